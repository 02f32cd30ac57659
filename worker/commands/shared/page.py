"""The templates of all pages, and SVG for them: one style, and colours that the page decides on. Needs matplotlib.

Colours are names of CSS variables: light, dark, print.
"""

from __future__ import annotations

import io
import re
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from worker.core import terminal


def page_environment() -> jinja2.Environment:
    """Return the environment of all pages; a template may include another one, such as page.css."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files("worker").joinpath(f"data/{name}").read_text("utf-8")),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: terminal.clean(value, "\n") if type(value) is str else value,
    )  # fmt: skip


def svg(text: str) -> Markup:
    """Mark a plot of ours as what needs no escaping."""
    return Markup(text)  # noqa: S704 our own SVG


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
