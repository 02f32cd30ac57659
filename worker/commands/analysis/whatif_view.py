"""The output of `kp-worker whatif`, with and without --share: tables for a terminal, or one line of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from worker.commands.analysis.documents import LEFT_OUT_SHOWN
from worker.commands.analysis.whatif_numbers import DomainChange, DomainProposal, Labels, Proposal, WhatIf
from worker.commands.shared.console import text_console
from worker.commands.shared.shown import (
    cut_text,
    percent,
    shown_name,
    shown_score,
    shown_text,
    shown_threshold,
)
from worker.commands.shared.table import PlainTable, columns
from worker.commands.shared.thresholds import FEW_TRACES, LEAST_TRACES, interval_text, too_few
from worker.core.records import ACCEPTED
from worker.core.scoring import DEFAULT_PROFILE
from worker.core.terminal import clean, number_of

_DOMAIN_CELLS: Final = 16
"""Width of a domain's column; a longer name is cut."""

_BARS: Final = " ▁▂▃▄▅▆▇█"

NAMES_SHOWN: Final = 20
"""Domains without a profile that are listed; the others are counted."""


def left_out(it: WhatIf | Proposal) -> Iterator[str]:
    """Yield lines about the skipped documents."""
    if it.repeated:
        yield f"repeated documents (identical bytes), counted once: {it.repeated:,}"
    for what, documents in (
        ("cannot be read", it.unreadable),
        ("have a score that does not follow from their own figures", it.inconsistent),
    ):
        if documents.count:
            yield f"skipped, since they {what}: {documents.count:,}"
            yield from (f"  {where}: {reason}" for where, reason in documents.first)
            if documents.count > LEFT_OUT_SHOWN:
                yield f"  and {documents.count - LEFT_OUT_SHOWN:,} more"
    if isinstance(it, Proposal) and it.unlabelled:
        yield f"neither firsts nor repeats, since they have no label at {it.label}: {it.unlabelled:,}"


def print_found(it: WhatIf | Proposal) -> None:
    """Print everything for a terminal; the lines of the config file are not wrapped, so they can be pasted."""
    console = text_console()
    console.print(
        _share_text(it) if isinstance(it, Proposal) else _whatif_text(it, bars=not console.options.ascii_only)
    )
    console.print()
    if it.config:
        console.print("To use it, paste this into the config file (--config FILE, KP_CONFIG):", style="bold")
        console.print(Text(it.config), soft_wrap=True)
    else:
        console.print("The candidate is the built-in threshold and profiles: there is nothing to set.", style="bold")


def _whatif_text(it: WhatIf, *, bars: bool) -> RenderableType:
    """Return everything except the config; `bars`: whether the terminal's encoding can show a histogram."""
    parts: list[RenderableType] = [Text(headline(it), "bold")]
    if it.same_share is not None and it.total.before.accepted != it.total.after.accepted:
        parts.append(Text(f"one threshold for all, {it.same_share!r}, would accept as many as now"))
    rows = [it.total, *it.domains]
    parts += ["", _decisions(rows), "", _scores(rows, bars=bars)]
    if it.other_domains:
        parts.append(
            Text(f"{number_of(it.other_domains, 'smaller domain is', 'smaller domains are')} in one row.", "dim")
        )
    changed = it.total.to_accepted + it.total.to_rejected
    if not changed:
        parts += ["", Text("No decision changes.", "bold")]
    elif it.flips:
        more = "" if len(it.flips) == changed else f", the first {len(it.flips)} (--flips N; all: --export FILE)"
        parts += ["", Text(f"Decisions that change: {changed:,}{more}", "bold"), _flips(it)]
    parts += _names(it)
    return Group(*parts)


def headline(it: WhatIf) -> str:
    """Return the changes in two lines."""
    total = it.total
    before, after = (
        f"{side.accepted:,} ({percent(side.accepted / total.traces)})" for side in (total.before, total.after)
    )
    return (
        f"{number_of(total.traces, 'trace')} of {shown_text(it.source)}\n"
        f"accepted: {before} -> {after}; {total.to_accepted:,} become accepted, {total.to_rejected:,} become rejected"
    )


def _decisions(rows: Sequence[DomainChange]) -> PlainTable:
    numbers = ("traces", "accepted", "become\naccepted", "become\nrejected")
    table = columns("domain", "profile", *numbers, right=numbers, fold=("profile",))
    for row in rows:
        profiles = ("" if side.profile is None else shown_name(side.profile) for side in (row.before, row.after))
        shares = (percent(side.accepted / row.traces) for side in (row.before, row.after))
        table.add_row(
            _domain(row.domain),
            _before_and_after(*profiles),
            f"{row.traces:,}",
            _before_and_after(*shares),
            Text(f"{row.to_accepted:,}", "green" if row.to_accepted else "dim"),
            Text(f"{row.to_rejected:,}", "red" if row.to_rejected else "dim"),
        )
    return table


def _scores(rows: Sequence[DomainChange], *, bars: bool) -> PlainTable:
    names = ["domain", "threshold", "10%", "median", "90%", *(["new scores, 0 to 1"] if bars else [])]
    table = columns(*names, right=("10%", "median", "90%"))
    for row in rows:
        low, high = (row.after.quantiles[index] for index in (0, 4))
        thresholds = (
            "" if side.threshold is None else shown_threshold(side.threshold) for side in (row.before, row.after)
        )
        cells: list[str | Text] = [
            _domain(row.domain),
            _before_and_after(*thresholds),
            f"{low:.2f}",
            _before_and_after(*(shown_score(side.quantiles[2], side.threshold) for side in (row.before, row.after))),
            f"{high:.2f}",
        ]
        table.add_row(*cells, *([_histogram(row.after.histogram)] if bars else []))
    return table


def _histogram(counts: Sequence[int]) -> str:
    most = max(counts) or 1
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)


def _flips(it: WhatIf) -> PlainTable:
    table = columns("domain", "trace", "score", "decision")
    for flip in it.flips:
        decision = flip.after.decision
        table.add_row(
            _domain(flip.domain),
            shown_text(flip.id.removeprefix("kp:trace:")),
            _before_and_after(*(shown_score(it.score, it.threshold) for it in (flip.before, flip.after))),
            Text(decision, "green" if decision == ACCEPTED else "red"),
        )
    return table


def _names(it: WhatIf) -> Iterator[RenderableType]:
    if it.without_profile:
        yield from ("", Text("Domains without a profile (they take default)", "bold"))
        for domain in it.without_profile[:NAMES_SHOWN]:
            told = f"{shown_name(domain.name)}: {number_of(domain.traces, 'trace')}"
            yield _name_line(told, domain.near)
        if len(it.without_profile) > NAMES_SHOWN:
            yield Text(f"  and {len(it.without_profile) - NAMES_SHOWN:,} more")
    if it.unused_profiles:
        yield from ("", Text("Profiles that no trace takes", "bold"))
        for profile in it.unused_profiles[:NAMES_SHOWN]:
            yield _name_line(shown_name(profile.name), profile.near)


def _share_text(it: Proposal) -> RenderableType:
    rows = [it.total, *it.domains]
    parts: list[RenderableType] = [Text(_share_headline(it), "bold"), "", _proposals(rows)]
    if it.label is not None:
        parts += [
            "",
            Text(f"Firsts (no earlier trace of the domain has their {shown_text(it.label)}) and repeats", "bold"),
            _labels(rows),
        ]
    notes = [Padding.indent(Text(note), 2) for note in share_notes(it)]
    if notes:
        parts += ["", Text("Notes", "bold"), *notes]
    return Group(*parts)


def _share_headline(it: Proposal) -> str:
    """Return the proposal in two lines."""
    total = it.total
    now, then = (percent(side.accepted / total.traces) for side in (total.current, total.proposed))
    return (
        f"{number_of(total.traces, 'trace')} of {shown_text(it.source)}\n"
        f"thresholds for the best {it.share * 100:g}% of each domain; accepted of all: {now} -> {then}"
    )


def _proposals(rows: Sequence[DomainProposal]) -> PlainTable:
    table = columns(
        "domain",
        "profile",
        "traces",
        "threshold",
        "95% interval",
        "accepted",
        right=("traces", "accepted"),
        fold=("profile",),
    )
    for row in rows:
        current, proposed = row.current, row.proposed
        thresholds = ("" if side.threshold is None else f"{side.threshold!r}" for side in (current, proposed))
        table.add_row(
            _domain(row.domain),
            "" if row.profile is None else shown_name(row.profile),
            f"{row.traces:,}",
            _before_and_after(*thresholds),
            "" if row.interval is None else interval_text(row.interval),
            _before_and_after(*(percent(side.accepted / row.traces) for side in (current, proposed))),
        )
    return table


def _labels(rows: Sequence[DomainProposal]) -> PlainTable:
    numbers = ("firsts", "firsts\naccepted", "repeats", "repeats\naccepted")
    table = columns("domain", *numbers, right=numbers)
    for row in rows:
        counts, now, then = (_counts(labels) for labels in (row.labels, row.current.labels, row.proposed.labels))
        cells = []
        for count, before, after in zip(counts, now, then, strict=True):
            shares = [percent(accepted / count) if count else "-" for accepted in (before, after)]
            cells += [Text(f"{count:,}"), _before_and_after(*shares)]
        table.add_row(_domain(row.domain), *cells)
    return table


def _counts(labels: Labels | None) -> tuple[int, int]:
    return (0, 0) if labels is None else (labels.firsts, labels.repeats)


def share_notes(it: Proposal) -> Iterator[str]:
    """Yield notes on the proposals."""
    for row in it.domains:
        yield from _about_domain(row)
    yield from _about_default(it)
    for name in it.cut:
        yield f"{shown_name(name)}: the name is too long for a profile; this domain keeps its threshold"
    if it.other_domains:
        smaller = number_of(it.other_domains, "smaller domain keeps its", "smaller domains keep their")
        yield f"{smaller} threshold: fewer than {FEW_TRACES} traces"


def _about_domain(row: DomainProposal) -> Iterator[str]:
    name = shown_name(row.domain)
    if row.traces < LEAST_TRACES:
        yield f"{name}: {too_few(row.traces)}; it keeps its threshold"
    elif row.traces < FEW_TRACES:
        yield f"{name}: {row.traces} traces are few; the threshold may accept another share of the next ones"
    if row.wanted is not None and row.above is not None and row.proposed.accepted > row.wanted:
        ties = row.proposed.accepted - row.above
        yield (
            f"{name}: {ties:,} traces tie, so {row.proposed.accepted:,} are accepted, not {row.wanted:,}; "
            f"a threshold above the tie accepts {row.above:,}"
        )


def _about_default(it: Proposal) -> Iterator[str]:
    """Yield notes on thresholds of domains that share the profile default."""
    for domain in it.without_profile[:NAMES_SHOWN]:
        if domain.near is not None:
            yield f"{shown_name(domain.name)} has no profile; did you mean {shown_name(domain.near)}?"
    proposed = [row for row in it.domains if row.interval is not None]
    named = [shown_name(row.domain) for row in proposed if row.profile == DEFAULT_PROFILE != row.domain]
    if named:
        more = f" and {len(named) - NAMES_SHOWN:,} more" if len(named) > NAMES_SHOWN else ""
        yield (
            f"without a profile: {', '.join(named[:NAMES_SHOWN])}{more}. Such domains share the threshold of default; "
            "the config gives each its own profile, with the weights of default"
        )
    if any(row.domain == DEFAULT_PROFILE for row in it.domains):
        yield "default: its threshold also applies to every domain without a profile"


def _domain(name: str) -> str:
    """Return the name of a domain, cut to the column."""
    return cut_text(shown_name(name), _DOMAIN_CELLS)


def _before_and_after(before: str, after: str) -> Text:
    """Return `before -> after`, or just one if they are equal."""
    return Text(clean(before if before == after else f"{before} -> {after}"))


def _name_line(text: str, near: str | None) -> Text:
    """Return a line about a domain or profile, with the name that may be meant."""
    line = Text(f"  {text}")
    return line if near is None else line.append(f"; did you mean {shown_name(near)}?", "yellow")
