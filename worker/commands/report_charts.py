"""The plots of a report, as SVG that stands inside a page. Needs matplotlib (the `report` extra).

Lives here: what is drawn. Must not live here: numbers (report_summary.py), names and texts (report_page.py): texts of
the documents stay out of the SVG, since matplotlib reads `$` as mathematics and has no fonts for all scripts.

Colours are names of CSS variables, so that the page decides on them: light, dark, print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from worker.commands.report_numbers import CURVE, SCORE_BINS, Moment

# matplotlib takes real colours only: each variable has one that is used for nothing else.
_VARIABLES: Final = {f"#0101{index:02x}": f"var(--{name})" for index, name in enumerate(
    ("ink", "muted", "line", "yes", "no", "mark", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
)}  # fmt: skip
_COLOURS: Final = {variable[6:-1]: colour for colour, variable in _VARIABLES.items()}
SERIES: Final = 8
"""Colours for curves; a ninth would be hard to tell from the others."""

_DASHES: Final = ("-", "--", "-.", ":")
_STYLE: Final[dict[Any, Any]] = {  # matplotlib's type is a Literal of all its 300 names
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "svg.hashsalt": "kp-worker",  # the same input gives the same bytes
    "font.size": 9,
    "axes.edgecolor": _COLOURS["line"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLOURS["line"],
    "ytick.color": _COLOURS["line"],
    "xtick.labelcolor": _COLOURS["muted"],
    "ytick.labelcolor": _COLOURS["muted"],
    "text.color": _COLOURS["ink"],
    "path.simplify": False,
}
_EDGES: Final = [edge / SCORE_BINS for edge in range(SCORE_BINS + 1)]


def histogram(counts: Sequence[int], threshold: float | None = None, *, small: bool = False, colour: str = "no") -> str:
    """Draw the distribution of values in 0..1; with a threshold, what reaches it has another colour."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes((2.4, 0.5) if small else (4.4, 2.2))
        if threshold is None:
            axes.stairs(counts, _EDGES, fill=True, color=_COLOURS[colour])
        else:
            for side, chosen in (("no", False), ("yes", True)):
                # A bar belongs to the side on which its middle lies: exact for multiples of its width.
                bars = [count if ((edge + 0.5 / SCORE_BINS >= threshold) is chosen) else 0
                        for count, edge in zip(counts, _EDGES, strict=False)]  # fmt: skip
                axes.stairs(bars, _EDGES, fill=True, color=_COLOURS[side])
            axes.axvline(threshold, color=_COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        if small:
            axes.yaxis.set_major_locator(NullLocator())
            axes.xaxis.set_major_locator(NullLocator())
            axes.spines["left"].set_visible(False)
        else:
            axes.grid(axis="y")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        return _svg(figure)


def acceptance(curves: Sequence[tuple[Sequence[float], float | None]]) -> str:
    """Draw the share that reaches each threshold, one line for each (shares at CURVE, current threshold)."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes((4.4, 2.2))
        for index, (shares, threshold) in enumerate(curves):
            colour = _COLOURS[f"s{index}"]
            axes.plot(CURVE, shares, color=colour, linewidth=1.3, linestyle=_DASHES[index % 4])
            if threshold is not None:
                axes.plot([threshold], [np.interp(threshold, CURVE, shares)], "o", color=colour, markersize=4.5)
        for threshold in sorted({threshold for _, threshold in curves if threshold is not None}):
            axes.axvline(threshold, color=_COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0.2, 1)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid()
        return _svg(figure)


def novelty(moments: Sequence[Moment]) -> str:
    """Draw novelty (median, 10th to 90th percentile) and the share accepted along the stream."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 3.6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        figure.patch.set_visible(False)
        edges = [0]
        for moment in moments:
            edges.append(edges[-1] + moment.count)
        low, middle, high = zip(*(moment.novelty for moment in moments), strict=True)
        upper.stairs(high, edges, baseline=low, fill=True, color=_COLOURS["s0"], alpha=0.25)
        upper.stairs(middle, edges, baseline=None, color=_COLOURS["s0"], linewidth=1.8)
        upper.set_ylim(0, max(1.0, *high))
        upper.set_ylabel("novelty")
        lower.stairs([moment.accepted for moment in moments], edges, fill=True, color=_COLOURS["yes"])
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
        return _svg(figure)


def shares(parts: Sequence[float]) -> str:
    """Draw one stacked bar; negative parts are left out."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes((2.4, 0.3))
        left = 0.0
        for index, part in enumerate(parts):
            width = max(0.0, part)
            axes.barh(0, width, left=left, color=_COLOURS[f"s{index}"])
            left += width
        axes.set_xlim(0, left or 1)
        axes.set_axis_off()
        return _svg(figure)


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    return figure, axes


def _time_labels(times: Sequence[int]) -> list[str]:
    """Write times (ms) with their date only where they span more than a day."""
    span = times[-1] - times[0]
    form = "%H:%M:%S" if span < 600_000 else "%H:%M" if span < 86_400_000 else "%d %b\n%H:%M"
    if span >= 30 * 86_400_000:
        form = "%d %b\n%Y"
    return [(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)).strftime(form) for ms in times]


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<!--.*?-->\s*", "", text)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # Only clip paths and markers are referred to, and their ids are hashes of their content; the others repeat.
    text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
    text = re.sub(r"font: [^;]*px [^;\"]*", lambda found: found[0].split("'")[0] + "system-ui, sans-serif", text)
    return re.sub("#0101[0-9a-f]{2}", lambda found: _VARIABLES[found[0]], text)
