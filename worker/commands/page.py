"""Pages of `report` and `evaluate`: templates of worker/data, in HTML that loads nothing. Needs Jinja2.

Lives here: how a template is found and how texts are escaped. Must not live here: what a page shows. Jinja2 escapes all
texts; `svg` is for our own plots alone.
"""

from __future__ import annotations

from importlib.resources import files

import jinja2
from markupsafe import Markup

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
