"""The pages of report, whatif and evaluate: one layout and one style, with colours defined in the page.

Each is a single HTML file that loads nothing. Needs the extra `report`.

Colours are names of CSS variables, with values for light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import jinja2
import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from worker.commands.analysis.novelty import BINS, CHANCE, Interval, Row, named, verdict
from worker.commands.analysis.outcome_numbers import Bin, Outcomes
from worker.commands.analysis.report_numbers import COMPONENTS, CURVE, PASTED_SHARE, SHARES, Group, Moment, Summary
from worker.commands.analysis.whatif_numbers import DomainProposal, Proposal, Scores, WhatIf
from worker.commands.analysis.whatif_view import NAMES_SHOWN, share_notes
from worker.commands.shared.console import CommandError, say
from worker.commands.shared.shown import (
    duration,
    fixed,
    percent,
    shown_name,
    shown_score,
    shown_text,
    shown_threshold,
)
from worker.core import terminal
from worker.core.documents import rfc3339
from worker.version import __version__

_FILTERS: Final[dict[str, Callable[..., str]]] = {
    "n": lambda value: f"{value:,}",
    "pct": percent,
    "f2": lambda value: fixed(value, 2),
    "f3": lambda value: fixed(value, 3),
    "time": lambda ms: rfc3339(ms)[:19].replace("T", " "),
    "words": lambda name: name.replace("_", " "),
    "two_places": lambda threshold: max(shown_threshold(threshold), f"{threshold:.2f}", key=len),
    "duration": duration,
    "text": shown_text,
    "name": shown_name,
    "score": shown_score,
    "threshold": shown_threshold,
}
"""The format of numbers, shares and names on all pages."""


def _page(command: str, **values: Any) -> str:
    """Return a command's page; it depends only on the values. A template may include another one."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files("worker").joinpath(f"data/{name}").read_text("utf-8")),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: terminal.clean(value, "\n") if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= _FILTERS
    environment.globals |= {"version": __version__, "command": command, "names_shown": NAMES_SHOWN}
    return environment.get_template(f"{command}.html.j2").render(**values)


def render_report(summary: Summary, source: str) -> str:
    """Return the page of `report`; `source` says where the documents come from."""
    return _page(
        "report", s=summary, source=shown_text(source), component_names=COMPONENTS, cutoff_shares=SHARES,
        pasted_share=PASTED_SHARE, plots=_report_plots(summary), series=SERIES, curves=_domain_curves(summary),
    )  # fmt: skip


def render_whatif(it: WhatIf | Proposal) -> str:
    """Return the page of `whatif`, with and without --share."""
    proposal = isinstance(it, Proposal)
    notes, plots = (list(share_notes(it)), _intervals(it)) if isinstance(it, Proposal) else ([], _histograms(it))
    return _page("whatif", w=it, proposal=proposal, notes=notes, plots=plots)


def render_evaluation(rows: Sequence[Row], label: str) -> str:
    """Return the page of `evaluate`: figures with their intervals, and novelty of firsts and repeats."""
    groups = [(shown_text(file), list(group)) for file, group in groupby(rows, key=lambda row: row.file)]
    found = [
        (
            file, group, [shown_text(named(row.settings)) for row in group],
            verdict(group), intervals([_ends(row.figures.auc_warm) for row in group], (CHANCE, 1)),
            [firsts_and_repeats(row.figures.first_histogram, row.figures.repeat_histogram) for row in group],
        )
        for file, group in groups
    ]  # fmt: skip
    return _page("evaluate", files=found, label=shown_text(label))


def render_outcomes(it: Outcomes, told: Sequence[str]) -> str:
    """Return the page of `evaluate --outcome`; `told`: what the figures show, in sentences."""
    bases = [it.stated] if it.record is None else [it.stated, it.record]
    plots = {
        "auc": intervals([_ends(scope.auc_score) for basis in bases for scope in basis.scopes], (0.3, 0.7)),
        "calibration": [_calibration(basis.bins) for basis in bases],
    }
    return _page("outcomes", it=it, bases=bases, told=told, plots=plots)


def write_page(text: str, path: Path) -> None:
    """Write the page that --page asks for. Raises CommandError."""
    page = text.encode()
    try:
        path.write_bytes(page)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; choose another file (--page)") from None
    say(f"{len(page) // 1000} kB to {path}")


SERIES: Final = 8
"""Number of colours for curves and rows; a ninth would be hard to distinguish."""

# matplotlib accepts only real colours: each variable has one that is used for nothing else.
_VARIABLES: Final = {f"#0101{index:02x}": f"var(--{name})" for index, name in enumerate(
    ("ink", "muted", "line", "yes", "no", "mark", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
)}  # fmt: skip
COLOURS: Final = {variable[6:-1]: colour for colour, variable in _VARIABLES.items()}
STYLE: Final[dict[Any, Any]] = {  # matplotlib's type is a Literal of all its 300 names
    "svg.fonttype": "none",  # text stays text: small and searchable
    "svg.hashsalt": "kp-worker",  # the same input gives the same bytes
    "font.size": 9,
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "text.color": COLOURS["ink"],
    "path.simplify": False,
}


def new_axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return a figure of this size (inches), transparent, with one pair of axes."""
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    return figure, axes


def as_svg(figure: Figure) -> Markup:
    """Return the figure as an SVG element, which needs no escaping; the same figure gives the same text."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<!--.*?-->\s*", "", text)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # Only clip paths and markers are referenced, and their ids are hashes of their content; other ids repeat.
    text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
    text = re.sub(r"font: [^;]*px [^;\"]*", lambda found: found[0].split("'")[0] + "system-ui, sans-serif", text)
    return Markup(re.sub("#0101[0-9a-f]{2}", lambda found: _VARIABLES[found[0]], text))  # noqa: S704 our own SVG


def histogram(
    counts: Sequence[int], threshold: float | None = None, *, small: bool = False, colour: str = "no"
) -> Markup:
    """Draw the distribution of values in 0..1, in bars of equal width.

    With a threshold, bars at or above it have another colour; a bar belongs to the side of its middle, which is exact
    if the threshold falls between two bars.
    """
    edges = [edge / len(counts) for edge in range(len(counts) + 1)]
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((2.4, 0.5) if small else (4.4, 2.2))
        if threshold is None:
            axes.stairs(counts, edges, fill=True, color=COLOURS[colour])
        else:
            for side, chosen in (("no", False), ("yes", True)):
                bars = [count if ((edge + 0.5 / len(counts) >= threshold) is chosen) else 0
                        for count, edge in zip(counts, edges, strict=False)]  # fmt: skip
                axes.stairs(bars, edges, fill=True, color=COLOURS[side])
            axes.axvline(threshold, color=COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        if small:
            axes.yaxis.set_major_locator(NullLocator())
            axes.xaxis.set_major_locator(NullLocator())
            axes.spines["left"].set_visible(False)
        else:
            axes.grid(axis="y")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        return as_svg(figure)


def intervals(
    found: Sequence[tuple[float, float, float] | None],
    limits: tuple[float, float],
    marks: Sequence[float | None] = (),
) -> Markup:
    """Draw figures with their intervals (value, low, high) on one axis, the first one at the top.

    `limits`: the least range of the axis. `marks`: a value to compare with for each row, drawn as a dash.
    """
    shown = [it for it in found if it is not None]
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((4.4, 0.5 + 0.28 * len(found)))
        for place, interval in enumerate(found):
            if interval is not None:
                value, low, high = interval
                colour = COLOURS[f"s{place % SERIES}"]
                axes.plot([low, high], [-place, -place], color=colour, linewidth=2)
                axes.plot([value], [-place], "o", color=colour, markersize=5)
        for place, mark in enumerate(marks):
            if mark is not None:
                axes.plot([mark, mark], [-place - 0.3, -place + 0.3], color=COLOURS["mark"], linewidth=2)
        known = [mark for mark in marks if mark is not None]
        axes.set_xlim(
            min([limits[0], *(low for _, low, _ in shown), *known]) - 0.01,
            max([limits[1], *(high for _, _, high in shown), *known]) + 0.01,
        )
        axes.set_ylim(0.6 - len(found), 0.6)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        return as_svg(figure)


def _report_plots(summary: Summary) -> dict[str, Any]:
    profiles = summary.profiles
    curves = [(profile.group.curve, profile.threshold) for profile in profiles[:SERIES]]
    return {
        "total": histogram(summary.total.histogram, summary.total.threshold),
        "domains": [histogram(group.histogram, group.threshold, small=True) for group in summary.domains],
        "components": {
            name: histogram(counts, colour=f"s{index}")
            for index, (name, counts) in enumerate(summary.components.items())
        },
        "shares": [_shares(profile.shares) for profile in profiles],
        "spread": [None if profile.spread is None else _shares(profile.spread) for profile in profiles],
        "domain_acceptance": _acceptance([(group.curve, group.threshold) for group in _domain_curves(summary)]),
        "acceptance": _acceptance(curves),
        "novelty": _novelty(summary.moments),
    }


def _domain_curves(summary: Summary) -> list[Group]:
    """Return the domains that have a curve: the largest ones, without the row of all others."""
    alone = summary.domains[:-1] if summary.other_domains else summary.domains
    return alone[:SERIES]


def _acceptance(curves: Sequence[tuple[Sequence[float], float | None]]) -> Markup:
    """Draw the share that reaches each threshold, one line per (shares at CURVE, current threshold)."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((4.4, 2.2))
        for index, (shares, threshold) in enumerate(curves):
            colour = COLOURS[f"s{index}"]
            axes.plot(CURVE, shares, color=colour, linewidth=1.3)
            if threshold is not None:
                axes.plot([threshold], [np.interp(threshold, CURVE, shares)], "o", color=colour, markersize=4.5)
        for threshold in sorted({threshold for _, threshold in curves if threshold is not None}):
            axes.axvline(threshold, color=COLOURS["mark"], linewidth=1, linestyle="--")
        axes.set_xlim(0.2, 1)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid()
        return as_svg(figure)


def _novelty(moments: Sequence[Moment]) -> Markup:
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


def _shares(parts: Sequence[float]) -> Markup:
    """Draw one stacked bar; negative parts are omitted."""
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
    """Format times (ms), with their date only if they span more than a day."""
    span = times[-1] - times[0]
    form = "%H:%M:%S" if span < 600_000 else "%H:%M" if span < 86_400_000 else "%d %b\n%H:%M"
    if span >= 30 * 86_400_000:
        form = "%d %b\n%Y"
    return [(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)).strftime(form) for ms in times]


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
    """Return the threshold of all domains; None if they have several, or some are unknown."""
    known = {it.threshold for it in domains}
    return known.pop() if len(known) == 1 and not others else None


def _intervals(it: Proposal) -> dict[str, Any]:
    """Draw the proposed thresholds, if there are any."""
    if not any(row.interval for row in it.domains):
        return {"intervals": None}
    return {
        "intervals": intervals(
            [_proposed(row) for row in it.domains], (1, 0), [row.current.threshold for row in it.domains]
        )
    }  # fmt: skip


def _proposed(row: DomainProposal) -> tuple[float, float, float] | None:
    threshold = row.proposed.threshold
    return None if row.interval is None or threshold is None else (threshold, *row.interval)


def _ends(it: Interval | None) -> tuple[float, float, float] | None:
    return None if it is None else (it.value, it.low, it.high)


def _calibration(bins: Sequence[Bin]) -> Markup:
    """Draw the share of successes over confidence; on the diagonal the confidence is right."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((3.2, 3.0))
        axes.plot([0, 1], [0, 1], color=COLOURS["mark"], linewidth=1, linestyle="--")
        for each in bins:
            it = each.succeeded
            axes.plot([each.confidence, each.confidence], [it.low, it.high], color=COLOURS["s0"], linewidth=2)
            axes.plot([each.confidence], [it.value], "o", color=COLOURS["s0"], markersize=4 + 8 * each.share)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.grid()
        axes.set_xlabel("confidence")
        axes.set_ylabel("succeeded")
        return as_svg(figure)


def firsts_and_repeats(firsts: Sequence[int], repeats: Sequence[int]) -> Markup:
    """Draw the novelty of firsts and of repeats over each other, each as shares of its own traces."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((4.4, 1.7))
        for counts, colour in ((repeats, "no"), (firsts, "yes")):
            shares = [count / (sum(counts) or 1) for count in counts]
            axes.stairs(shares, [edge / BINS for edge in range(BINS + 1)], fill=True, color=COLOURS[colour], alpha=0.55)
            axes.stairs(shares, [edge / BINS for edge in range(BINS + 1)], color=COLOURS[colour], linewidth=1.2)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.grid(axis="y")
        axes.set_xlabel("novelty")
        axes.set_ylabel("share")
        return as_svg(figure)
