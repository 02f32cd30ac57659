"""The page of a report: one HTML file that loads nothing, with its plots. Needs the `report` extra."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from worker.commands.report.columns import COMPONENTS
from worker.commands.report.summary import (
    CURVE,
    PASTED_SHARE,
    SHARES,
    Group,
    Moment,
    Summary,
)
from worker.commands.shared.page import COLOURS, SERIES, STYLE, as_svg, histogram, new_axes, page_environment, svg
from worker.commands.shared.shown import duration, shown_text, shown_threshold
from worker.core.documents import rfc3339
from worker.version import __version__

NAMES_SHOWN = 20
"""Domains without a profile that are listed; the rest is counted."""

_DASHES: Final = ("-", "--", "-.", ":")


def render(summary: Summary, source: str) -> str:
    """Return the page. `source` says where the documents come from; the same arguments give the same page."""
    environment = page_environment()
    environment.filters |= {
        "time": lambda ms: rfc3339(ms)[:19].replace("T", " "),
        "words": lambda name: name.replace("_", " "),
        "two_places": lambda threshold: max(shown_threshold(threshold), f"{threshold:.2f}", key=len),
        "duration": duration,
    }
    return environment.get_template("report.html.j2").render(
        s=summary, source=shown_text(source), version=__version__, component_names=COMPONENTS,
        cutoff_shares=SHARES, pasted_share=PASTED_SHARE, plots=_plots(summary), series=SERIES,
        curves=_domain_curves(summary), names_shown=NAMES_SHOWN,
    )  # fmt: skip


def _plots(summary: Summary) -> dict[str, Any]:
    profiles = summary.profiles
    curves = [(profile.group.curve, profile.threshold) for profile in profiles[:SERIES]]
    return {
        "total": histogram(summary.total.histogram, summary.total.threshold),
        "domains": [histogram(group.histogram, group.threshold, small=True) for group in summary.domains],
        "components": {
            name: histogram(counts, colour=f"s{index}")
            for index, (name, counts) in enumerate(summary.components.items())
        },
        "shares": [svg(_shares(profile.shares)) for profile in profiles],
        "spread": [None if profile.spread is None else svg(_shares(profile.spread)) for profile in profiles],
        "domain_acceptance": svg(_acceptance([(group.curve, group.threshold) for group in _domain_curves(summary)])),
        "acceptance": svg(_acceptance(curves)),
        "novelty": svg(_novelty(summary.moments)),
    }


def _domain_curves(summary: Summary) -> list[Group]:
    """Return the domains that have a curve: the largest ones, without the row of all others."""
    alone = summary.domains[:-1] if summary.other_domains else summary.domains
    return alone[:SERIES]


def _acceptance(curves: Sequence[tuple[Sequence[float], float | None]]) -> str:
    """Draw the share that reaches each threshold, one line for each (shares at CURVE, current threshold)."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((4.4, 2.2))
        for index, (shares, threshold) in enumerate(curves):
            colour = COLOURS[f"s{index}"]
            axes.plot(CURVE, shares, color=colour, linewidth=1.3, linestyle=_DASHES[index % 4])
            if threshold is not None:
                axes.plot([threshold], [np.interp(threshold, CURVE, shares)], "o", color=colour, markersize=4.5)
        for threshold in sorted({threshold for _, threshold in curves if threshold is not None}):
            axes.axvline(threshold, color=COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0.2, 1)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid()
        return as_svg(figure)


def _novelty(moments: Sequence[Moment]) -> str:
    """Draw novelty (median, 10th to 90th percentile) and the share accepted along the stream."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 3.6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        figure.patch.set_visible(False)
        edges = [0]
        for moment in moments:
            edges.append(edges[-1] + moment.count)
        low, middle, high = zip(*(moment.novelty for moment in moments), strict=True)
        upper.stairs(high, edges, baseline=low, fill=True, color=COLOURS["s0"], alpha=0.25)
        upper.stairs(middle, edges, baseline=None, color=COLOURS["s0"], linewidth=1.8)
        upper.set_ylim(0, max(1.0, *high))
        upper.set_ylabel("novelty")
        lower.stairs([moment.accepted for moment in moments], edges, fill=True, color=COLOURS["yes"])
        lower.set_ylabel("accepted")
        lower.set_ylim(bottom=0)
        lower.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        lower.yaxis.set_major_locator(MaxNLocator(3))
        for axes in (upper, lower):
            axes.patch.set_visible(False)
            axes.grid(axis="y")
            axes.set_xlim(0, edges[-1])
        shown = sorted({round(step * (len(moments) - 1) / 5) for step in range(6)})
        lower.xaxis.set_major_locator(FixedLocator([edges[index] for index in shown]))
        lower.set_xticklabels(_time_labels([moments[index].time_ms for index in shown]))
        return as_svg(figure)


def _shares(parts: Sequence[float]) -> str:
    """Draw one stacked bar; negative parts are left out."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((2.4, 0.3))
        left = 0.0
        for index, part in enumerate(parts):
            width = max(0.0, part)
            axes.barh(0, width, left=left, color=COLOURS[f"s{index}"])
            left += width
        axes.set_xlim(0, left or 1)
        axes.set_axis_off()
        return as_svg(figure)


def _time_labels(times: Sequence[int]) -> list[str]:
    """Write times (ms) with their date only where they span more than a day."""
    span = times[-1] - times[0]
    form = "%H:%M:%S" if span < 600_000 else "%H:%M" if span < 86_400_000 else "%d %b\n%H:%M"
    if span >= 30 * 86_400_000:
        form = "%d %b\n%Y"
    return [(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)).strftime(form) for ms in times]
