"""An explained score as tables for a terminal, for `explain` and the demo."""

from __future__ import annotations

import shlex

from rich.console import Group, RenderableType
from rich.text import Text

from worker.commands.shared.explanation import Explanation
from worker.commands.shared.shown import fixed, shown_score, shown_threshold
from worker.commands.shared.table import PlainTable, columns
from worker.core.terminal import clean


def explanation_text(it: Explanation, options: str = "") -> RenderableType:
    """Return the explanation for a terminal; `options`: those that give a printed command the same settings."""
    head = Text(clean(it.id), "bold")
    objective = Text(clean(it.objective), "dim", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [head, objective, "", _formulas(it), "", _weighting(it), "", _steps(it)]
    return Group(*parts, "", _places(it, options)) if it.source or it.record or it.nearest else Group(*parts)


def _weighting(it: Explanation) -> PlainTable:
    numbers = ("value", "* weight", "= part")
    table = columns("component", *numbers, right=numbers)
    for name, formula in it.components.items():
        cells = (fixed(formula.value, 4), f"{formula.weight:.2f}", fixed(formula.weighted, 4))
        table.add_row(name.replace("_", " "), *cells)
    table.add_row("sum", "", "", Text(_score(it, it.weighted_sum), "bold"))
    return table


def named_rows() -> PlainTable:
    """Return an empty table of names and their values."""
    table = PlainTable(
        box=None, padding=(0, 2, 0, 0), collapse_padding=True, show_header=False, show_edge=False, pad_edge=False
    )
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def _formulas(it: Explanation) -> PlainTable:
    table = named_rows()
    for name, formula in it.components.items():
        table.add_row(name.replace("_", " "), Text(formula.formula, "dim"))
        table.add_row("", Text(f"= {formula.numbers} = {fixed(formula.value, 3)}"))
    if it.confidence is not None:
        said = it.confidence
        table.add_row("confidence", Text(clean(f"{it.used_from}"), "dim"))
        table.add_row(
            "",
            f"= {said.used:.6g} (stated: {said.stated:.6g}); verdicts on the agent in this domain: {said.judged}, "
            f"successes: {said.succeeded:g}",
        )
    return table


def _steps(it: Explanation) -> PlainTable:
    table = named_rows()
    table.add_row("profile", Text(clean(f"{it.profile}, because {it.profile_because}")))
    for override in it.overrides:
        change = f"{_score(it, override.before)} -> {_score(it, override.after)}"
        table.add_row("override", f"{override.name}: {change} ({override.rule})")
    if not it.overrides:
        table.add_row("overrides", "none applies")
    clamped = f"{_score(it, it.before_clamp)} -> {_score(it, it.score)}"
    table.add_row("clamp to 0..1", clamped if it.score != it.before_clamp else "changes nothing")
    sign, colour = (">=", "green") if it.decision == "accepted" else ("<", "red")
    verdict = Text(f"{it.score!r} {sign} {shown_threshold(it.threshold)} ({it.threshold_from}): ")
    table.add_row(Text("score", "bold"), verdict.append(it.decision, f"bold {colour}"))
    for note in it.notes:
        table.add_row(Text("note", "yellow"), Text(clean(note)))
    return table


def _score(it: Explanation, value: float) -> str:
    return shown_score(value, it.threshold, 4)


def _places(it: Explanation, options: str) -> PlainTable:
    """Tabulate places and times of the verdict and its trace, and how to explain the nearest trace."""
    table = named_rows()
    if it.record is not None:
        table.add_row("decision", Text(clean(str(it.record))))
    for place in it.also:
        table.add_row("also", Text(clean(f"kp-worker explain{options} {place}")))
    if it.source is not None:
        table.add_row("source", Text(clean(str(it.source))))
    times = (("created at", it.created_at), ("stream time", it.stream_time), ("record time", it.record_time))
    for name, time in times:
        if time:
            table.add_row(name, Text(clean(time)))
    if it.nearest is not None:
        table.add_row("nearest", Text(clean(str(it.nearest))))
        if it.record is not None:
            table.add_row("", Text(f"kp-worker explain{options} {shlex.quote(clean(it.nearest.id))}"))
    return table
