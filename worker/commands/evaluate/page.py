"""The page of `evaluate`: figures with their intervals, and novelty of firsts and repeats. Needs the `report` extra."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import matplotlib as mpl
from matplotlib.ticker import MaxNLocator

from worker.commands.evaluate.numbers import BINS, Interval, Row, named
from worker.commands.shared.page import COLOURS, STYLE, as_svg, new_axes, page_environment, svg
from worker.commands.shared.shown import shown_text
from worker.version import __version__

_EDGES = [edge / BINS for edge in range(BINS + 1)]


def render_evaluation(rows: Sequence[Row], label: str) -> str:
    """Return the page; the same rows give the same page."""
    environment = page_environment()
    environment.filters |= {"n": lambda value: f"{value:,}", "f2": lambda value: f"{round(value, 2) + 0.0:.2f}",
                            "f3": lambda value: f"{value:.3f}"}  # fmt: skip
    groups = [(shown_text(file), list(group)) for file, group in groupby(rows, key=lambda row: row.file)]
    return environment.get_template("evaluate.html.j2").render(
        files=[
            (
                file, group, [shown_text(named(row.settings)) for row in group],
                svg(intervals([row.figures.auc_warm for row in group])),
                [svg(histograms(row.figures.first_histogram, row.figures.repeat_histogram)) for row in group],
            )
            for file, group in groups
        ],
        label=shown_text(label), version=__version__,
    )  # fmt: skip


def intervals(found: Sequence[Interval | None]) -> str:
    """Draw figures with their intervals on one axis from 0.5 to 1, the first one at the top."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((4.4, 0.5 + 0.28 * len(found)))
        for place, interval in enumerate(found):
            if interval is not None:
                colour = COLOURS[f"s{place % 8}"]
                axes.plot([interval.low, interval.high], [-place, -place], color=colour, linewidth=2)
                axes.plot([interval.value], [-place], "o", color=colour, markersize=5)
        axes.set_xlim(min([0.5, *(interval.low for interval in found if interval is not None)]) - 0.01, 1.01)
        axes.set_ylim(0.6 - len(found), 0.6)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        return as_svg(figure)


def histograms(firsts: Sequence[int], repeats: Sequence[int]) -> str:
    """Draw the novelty of firsts and of repeats, each as shares of its own traces, over one another."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes((4.4, 1.7))
        for counts, colour in ((repeats, "no"), (firsts, "yes")):
            shares = [count / (sum(counts) or 1) for count in counts]
            axes.stairs(shares, _EDGES, fill=True, color=COLOURS[colour], alpha=0.55)
            axes.stairs(shares, _EDGES, color=COLOURS[colour], linewidth=1.2)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.grid(axis="y")
        axes.set_xlabel("novelty")
        axes.set_ylabel("share")
        return as_svg(figure)
