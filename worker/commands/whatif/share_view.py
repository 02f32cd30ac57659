"""How `kp-worker whatif --share` looks: tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from worker.commands.shared.shown import percent, shown_name, shown_text
from worker.commands.shared.target_share import FEW_TRACES
from worker.commands.whatif.cells import before_and_after, domain_cell, plain_table
from worker.commands.whatif.share import DomainProposal, Labels, Proposal
from worker.commands.whatif.view import NAMES_SHOWN
from worker.core.scoring import DEFAULT_PROFILE


def share_text(it: Proposal) -> RenderableType:
    """Return everything but the config for a terminal."""
    rows = [it.total, *it.domains]
    parts: list[RenderableType] = [Text(share_headline(it), "bold"), "", _thresholds(rows)]
    if it.label is not None:
        parts += [
            "",
            Text(f"Firsts (no earlier trace of the domain has their {shown_text(it.label)}) and repeats", "bold"),
            _labels(rows),
        ]
    notes = [Padding.indent(Text(note), 2) for note in _notes(it)]
    if notes:
        parts += ["", Text("Notes", "bold"), *notes]
    return Group(*parts)


def share_headline(it: Proposal) -> str:
    """Return what is proposed, in two lines."""
    total = it.total
    now, then = (percent(side.accepted / total.traces) for side in (total.current, total.proposed))
    return (
        f"{total.traces:,} traces of {shown_text(it.source)}\n"
        f"thresholds for the best {it.share * 100:g}% of each domain; accepted of all: {now} -> {then}"
    )


def without_label(it: Proposal) -> Iterator[str]:
    """Yield a line about the documents that are neither firsts nor repeats."""
    if it.unlabelled:
        yield f"neither firsts nor repeats, since they have no label at {it.label}: {it.unlabelled:,}"


def _thresholds(rows: Sequence[DomainProposal]) -> Table:
    table = plain_table("domain", "profile", "traces", "threshold", "accepted", right=("traces", "accepted"))
    for row in rows:
        current, proposed = row.current, row.proposed
        thresholds = ("" if side.threshold is None else f"{side.threshold!r}" for side in (current, proposed))
        table.add_row(
            domain_cell(row.domain),
            "" if row.profile is None else shown_name(row.profile),
            f"{row.traces:,}",
            before_and_after(*thresholds),
            before_and_after(*(percent(side.accepted / row.traces) for side in (current, proposed))),
        )
    return table


def _labels(rows: Sequence[DomainProposal]) -> Table:
    numbers = ("firsts", "firsts\naccepted", "repeats", "repeats\naccepted")
    table = plain_table("domain", *numbers, right=numbers)
    for row in rows:
        counts, now, then = (_counts(labels) for labels in (row.labels, row.current.labels, row.proposed.labels))
        cells = []
        for count, before, after in zip(counts, now, then, strict=True):
            shares = [percent(accepted / count) if count else "-" for accepted in (before, after)]
            cells += [Text(f"{count:,}"), before_and_after(*shares)]
        table.add_row(domain_cell(row.domain), *cells)
    return table


def _counts(labels: Labels | None) -> tuple[int, int]:
    return (0, 0) if labels is None else (labels.firsts, labels.repeats)


def _notes(it: Proposal) -> Iterator[str]:
    for row in it.domains:
        yield from _of_domain(row)
    yield from _default(it)
    for name in it.cut:
        yield f"{shown_name(name)}: the name is too long for a profile; this domain keeps its threshold"
    if it.other_domains:
        yield f"{it.other_domains:,} smaller domains, with fewer than {FEW_TRACES} traces each, keep their threshold"


def _of_domain(row: DomainProposal) -> Iterator[str]:
    name = shown_name(row.domain)
    if row.traces < FEW_TRACES:
        yield f"{name}: {row.traces} traces are few; the threshold may accept another share of the next ones"
    if row.wanted is not None and row.above is not None and row.proposed.accepted > row.wanted:
        ties = row.proposed.accepted - row.above
        yield (
            f"{name}: {ties:,} traces tie, so {row.proposed.accepted:,} are accepted, not {row.wanted:,}; "
            f"a threshold above the tie accepts {row.above:,}"
        )


def _default(it: Proposal) -> Iterator[str]:
    """Yield what a threshold means for domains that share the profile default."""
    for domain in it.without_profile[:NAMES_SHOWN]:
        if domain.near is not None:
            yield f"{shown_name(domain.name)} has no profile; did you mean {shown_name(domain.near)}?"
    named = [shown_name(row.domain) for row in it.domains if row.profile == DEFAULT_PROFILE != row.domain]
    if named:
        more = f" and {len(named) - NAMES_SHOWN:,} more" if len(named) > NAMES_SHOWN else ""
        yield (
            f"without a profile: {', '.join(named[:NAMES_SHOWN])}{more}. Such domains share the threshold of default; "
            "the config gives each a profile of its own, with the weights of default"
        )
    if any(row.domain == DEFAULT_PROFILE for row in it.domains):
        yield "default: its threshold holds for every domain without a profile, too"
