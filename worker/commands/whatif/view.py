"""How `kp-worker whatif` looks: tables for a terminal, or one line of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from worker.commands.shared.shown import percent, shown_name, shown_text
from worker.commands.whatif.cells import before_and_after, domain_cell, name_line, plain_table
from worker.commands.whatif.share import Proposal
from worker.commands.whatif.summary import DomainChange, WhatIf
from worker.core.domains import DomainWithoutProfile, UnusedProfile
from worker.core.records import ACCEPTED
from worker.core.terminal import clean_json

_BARS: Final = " ▁▂▃▄▅▆▇█"
NAMES_SHOWN: Final = 20
"""Domains without a profile that are listed; the rest is counted."""


def whatif_json(it: WhatIf | Proposal) -> str:
    """Return everything as one line of JSON."""
    return clean_json(msgspec.json.encode(it).decode())


def whatif_text(it: WhatIf, *, bars: bool) -> RenderableType:
    """Return everything but the config for a terminal; `bars`: whether it can show a histogram."""
    parts: list[RenderableType] = [Text(headline(it), "bold")]
    rows = [it.total, *it.domains]
    parts += ["", _decisions(rows), "", _scores(rows, bars=bars)]
    if it.other_domains:
        parts.append(Text(f"{it.other_domains} smaller domains are one row.", "dim"))
    changed = it.total.to_accepted + it.total.to_rejected
    if not changed:
        parts += ["", Text("No decision changes.", "bold")]
    elif it.flips:
        more = "" if len(it.flips) == changed else f", the first {len(it.flips)} (--flips N; all: --export FILE)"
        parts += ["", Text(f"Decisions that change: {changed:,}{more}", "bold"), _flips(it)]
    parts += _names(it)
    return Group(*parts)


def headline(it: WhatIf) -> str:
    """Return what changes, in two lines."""
    total = it.total
    before, after = (
        f"{side.accepted:,} ({percent(side.accepted / total.traces)})" for side in (total.before, total.after)
    )
    return (
        f"{total.traces:,} traces of {shown_text(it.source)}\n"
        f"accepted: {before} -> {after}; {total.to_accepted:,} become accepted, {total.to_rejected:,} become rejected"
    )


def _decisions(rows: Sequence[DomainChange]) -> Table:
    numbers = ("traces", "accepted", "become\naccepted", "become\nrejected")
    table = plain_table("domain", "profile", *numbers, right=numbers)
    for row in rows:
        profiles = ("" if side.profile is None else shown_name(side.profile) for side in (row.before, row.after))
        shares = (percent(side.accepted / row.traces) for side in (row.before, row.after))
        table.add_row(
            domain_cell(row.domain),
            before_and_after(*profiles),
            f"{row.traces:,}",
            before_and_after(*shares),
            Text(f"{row.to_accepted:,}", "green" if row.to_accepted else "dim"),
            Text(f"{row.to_rejected:,}", "red" if row.to_rejected else "dim"),
        )
    return table


def _scores(rows: Sequence[DomainChange], *, bars: bool) -> Table:
    names = ["domain", "threshold", "10%", "median", "90%", *(["new scores, 0 to 1"] if bars else [])]
    table = plain_table(*names, right=("10%", "median", "90%"))
    for row in rows:
        low, middle, high = (row.after.quantiles[index] for index in (0, 2, 4))
        thresholds = ("" if side.threshold is None else f"{side.threshold:g}" for side in (row.before, row.after))
        cells: list[str | Text] = [
            domain_cell(row.domain),
            before_and_after(*thresholds),
            f"{low:.2f}",
            before_and_after(f"{row.before.quantiles[2]:.3f}", f"{middle:.3f}"),
            f"{high:.2f}",
        ]
        table.add_row(*cells, *([_histogram(row.after.histogram)] if bars else []))
    return table


def _histogram(counts: Sequence[int]) -> str:
    most = max(counts) or 1
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)


def _flips(it: WhatIf) -> Table:
    table = plain_table("domain", "trace", "score", "decision")
    for flip in it.flips:
        decision = flip.after.decision
        table.add_row(
            domain_cell(flip.domain),
            shown_text(flip.id.removeprefix("kp:trace:")),
            before_and_after(f"{flip.before.score:.3f}", f"{flip.after.score:.3f}"),
            Text(decision, "green" if decision == ACCEPTED else "red"),
        )
    return table


def _names(it: WhatIf) -> Iterator[RenderableType]:
    if it.without_profile:
        yield from ("", Text("Domains without a profile (they take default)", "bold"))
        yield from map(_domain_line, it.without_profile[:NAMES_SHOWN])
        if len(it.without_profile) > NAMES_SHOWN:
            yield Text(f"  and {len(it.without_profile) - NAMES_SHOWN:,} more")
    if it.unused_profiles:
        yield from ("", Text("Profiles that no trace takes", "bold"))
        yield from map(_profile_line, it.unused_profiles[:NAMES_SHOWN])


def _domain_line(domain: DomainWithoutProfile) -> Text:
    plural = "" if domain.traces == 1 else "s"
    return name_line(f"{shown_name(domain.name)}: {domain.traces:,} trace{plural}", domain.near)


def _profile_line(profile: UnusedProfile) -> Text:
    return name_line(shown_name(profile.name), profile.near)


def can_show_bars(console: Console) -> bool:
    """Whether the terminal's encoding has the blocks of a histogram."""
    return not console.options.ascii_only
