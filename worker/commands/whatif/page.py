"""The page of `whatif`, with and without --share: what the terminal shows, with pictures. Needs the `report` extra."""

from __future__ import annotations

from typing import Any

from worker.commands.shared.page import histogram, intervals, page_environment
from worker.commands.shared.shown import shown_text
from worker.commands.whatif.share import DomainProposal, Proposal
from worker.commands.whatif.summary import Scores, WhatIf
from worker.commands.whatif.view import NAMES_SHOWN, share_notes
from worker.version import __version__


def render_whatif(it: WhatIf | Proposal) -> str:
    """Return the page; the same figures give the same page."""
    environment = page_environment()
    environment.filters["text"] = shown_text
    proposal = isinstance(it, Proposal)
    return environment.get_template("whatif.html.j2").render(
        w=it, proposal=proposal, version=__version__, names_shown=NAMES_SHOWN,
        notes=list(share_notes(it)) if isinstance(it, Proposal) else [],
        plots=_intervals(it) if isinstance(it, Proposal) else _histograms(it),
    )  # fmt: skip


def _histograms(it: WhatIf) -> dict[str, Any]:
    before, after = (
        _threshold([getattr(row, side) for row in it.domains], it.other_domains) for side in ("before", "after")
    )
    total = [(it.total.before.histogram, before), (it.total.after.histogram, after)]
    rows = [[(side.histogram, side.threshold) for side in (row.before, row.after)] for row in it.domains]
    return {
        "before": histogram(*total[0]),
        "after": histogram(*total[1]),
        "threshold_before": before,
        "threshold_after": after,
        "rows": [[histogram(*side, small=True) for side in sides] for sides in (total, *rows)],
    }


def _threshold(domains: list[Scores], others: int) -> float | None:
    """Return the threshold of all domains; None where they have several, or some are not known."""
    known = {it.threshold for it in domains}
    return known.pop() if len(known) == 1 and not others else None


def _intervals(it: Proposal) -> dict[str, Any]:
    """Draw the proposed thresholds, if there are any."""
    if not any(row.interval for row in it.domains):
        return {"intervals": None}
    return {
        "intervals": intervals(
            [_ends(row) for row in it.domains], (1, 0), [row.current.threshold for row in it.domains]
        )
    }  # fmt: skip


def _ends(row: DomainProposal) -> tuple[float, float, float] | None:
    threshold = row.proposed.threshold
    return None if row.interval is None or threshold is None else (threshold, *row.interval)
