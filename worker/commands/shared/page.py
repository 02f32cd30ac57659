"""The templates of all pages, and SVG for them: one style, and colours that the page decides on. Needs matplotlib.

Colours are names of CSS variables: light, dark, print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullLocator

from worker.commands.shared.console import CommandError, say
from worker.commands.shared.shown import percent, shown_name, shown_score, shown_threshold
from worker.core import terminal

FILTERS: Final[dict[str, Callable[..., str]]] = {
    "n": lambda value: f"{value:,}",
    "pct": percent,
    "f2": lambda value: f"{round(value, 2) + 0.0:.2f}",  # no -0.00
    "f3": lambda value: f"{round(value, 3) + 0.0:.3f}",
    "name": shown_name,
    "score": shown_score,
    "threshold": shown_threshold,
}
"""How all pages write numbers, shares and names."""


def page_environment() -> jinja2.Environment:
    """Return the environment of all pages; a template may include another one, such as page.css."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files("worker").joinpath(f"data/{name}").read_text("utf-8")),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: terminal.clean(value, "\n") if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= FILTERS
    return environment


def write_page(text: str, path: Path) -> None:
    """Write the page that --page asks for. Raises CommandError."""
    page = text.encode()
    try:
        path.write_bytes(page)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; choose another file (--page)") from None
    say(f"{len(page) // 1000} kB to {path}")


def svg(text: str) -> Markup:
    """Mark a plot of ours as what needs no escaping."""
    return Markup(text)  # noqa: S704 our own SVG


SERIES: Final = 8
"""Colours for curves and rows; a ninth would be hard to tell from the others."""

# matplotlib takes real colours only: each variable has one that is used for nothing else.
_VARIABLES: Final = {f"#0101{index:02x}": f"var(--{name})" for index, name in enumerate(
    ("ink", "muted", "line", "yes", "no", "mark", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
)}  # fmt: skip
COLOURS: Final = {variable[6:-1]: colour for colour, variable in _VARIABLES.items()}
STYLE: Final[dict[Any, Any]] = {  # matplotlib's type is a Literal of all its 300 names
    "svg.fonttype": "none",  # text stays text: small, and found by a search
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


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG element; the same figure gives the same text."""
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


def histogram(
    counts: Sequence[int], threshold: float | None = None, *, small: bool = False, colour: str = "no"
) -> Markup:
    """Draw the distribution of values in 0..1, in bars of equal width.

    With a threshold, what reaches it has another colour; a bar belongs to the side on which its middle lies, which is
    exact where the threshold falls between two bars.
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
        return svg(as_svg(figure))


def intervals(
    found: Sequence[tuple[float, float, float] | None],
    limits: tuple[float, float],
    marks: Sequence[float | None] = (),
) -> Markup:
    """Draw figures with their intervals (value, low, high) on one axis, the first one at the top.

    `limits`: what the axis shows at least. `marks`: a value of each row to compare with, drawn as a dash.
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
        return svg(as_svg(figure))
