"""The page of `evaluate`: figures with their intervals, and novelty of firsts and repeats. Needs the `report` extra."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import matplotlib as mpl
from matplotlib.ticker import MaxNLocator

from worker.commands.evaluate.numbers import BINS, CHANCE, Interval, Row, named, verdict
from worker.commands.shared.page import COLOURS, STYLE, as_svg, intervals, new_axes, page_environment, svg
from worker.commands.shared.shown import shown_text
from worker.version import __version__

_EDGES = [edge / BINS for edge in range(BINS + 1)]


def render_evaluation(rows: Sequence[Row], label: str) -> str:
    """Return the page; the same rows give the same page."""
    groups = [(shown_text(file), list(group)) for file, group in groupby(rows, key=lambda row: row.file)]
    return page_environment().get_template("evaluate.html.j2").render(
        files=[
            (
                file, group, [shown_text(named(row.settings)) for row in group],
                verdict(group), intervals([_ends(row.figures.auc_warm) for row in group], (CHANCE, 1)),
                [svg(histograms(row.figures.first_histogram, row.figures.repeat_histogram)) for row in group],
            )
            for file, group in groups
        ],
        label=shown_text(label), version=__version__,
    )  # fmt: skip


def _ends(it: Interval | None) -> tuple[float, float, float] | None:
    return None if it is None else (it.value, it.low, it.high)


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
