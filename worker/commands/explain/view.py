"""How `kp-worker explain` shows an explanation: as one line of JSON, or as tables for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from worker.commands.explain.steps import Explanation
from worker.commands.shared.shown import fixed, shown_score, shown_threshold
from worker.commands.shared.table import PlainTable
from worker.core.documents import rfc3339
from worker.core.terminal import clean, clean_json

if TYPE_CHECKING:  # with Kafka's client: a file does without
    from worker.commands.explain.search import Hit
    from worker.kafka.reading.dead_letters import DeadLetter


def explanation_json(explanation: Explanation) -> str:
    """Return the explanation as one line of JSON."""
    return clean_json(msgspec.json.encode(explanation).decode())


def explanation_text(it: Explanation, options: str = "") -> RenderableType:
    """Return the explanation for a terminal; `options`: what a printed command needs to have the same settings."""
    head = Text(clean(it.id), "bold")
    objective = Text(clean(it.objective), "dim", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [head, objective, "", _formulas(it), "", _weighting(it), "", _steps(it)]
    return Group(*parts, "", _places(it, options)) if it.source or it.record or it.nearest else Group(*parts)


def _weighting(it: Explanation) -> PlainTable:
    table = PlainTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("component", no_wrap=True)
    for name in ("value", "* weight", "= part"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, formula in it.components.items():
        cells = (fixed(formula.value, 4), f"{formula.weight:.2f}", fixed(formula.weighted, 4))
        table.add_row(name.replace("_", " "), *cells)
    table.add_row("sum", "", "", Text(_score(it, it.weighted_sum), "bold"))
    return table


def _named_rows() -> PlainTable:
    """Return an empty table of names and what they mean."""
    table = PlainTable(
        box=None, padding=(0, 2, 0, 0), collapse_padding=True, show_header=False, show_edge=False, pad_edge=False
    )
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def _formulas(it: Explanation) -> PlainTable:
    table = _named_rows()
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
    table = _named_rows()
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
    """Tabulate where the verdict and its trace are, when, and how the nearest trace is explained."""
    table = _named_rows()
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
        for part in it.parts:
            alone = "" if part.alone is None else f"; to the nearest trace's {part.name} alone {part.alone:.4f}"
            table.add_row("", f"of it {part.share:.4f} by the {part.name}{alone}")
        if it.record is not None:
            table.add_row("", Text(f"kp-worker explain{options} {shlex.quote(clean(it.nearest.id))}"))
    return table


def letter_json(letter: DeadLetter) -> str:
    """Return a dead letter as one line of JSON, as `tail` writes it."""
    from worker.kafka.reading.dead_letters import as_json

    return clean_json(as_json(letter, letter.key, letter.record.value, letter.record.headers).decode())


def letter_text(found: Hit, letter: DeadLetter, others: Sequence[Hit], options: str) -> RenderableType:
    """Return a dead letter for a terminal; `others`: more records that the search found; `options`: as above."""
    table = _named_rows()
    table.add_row(Text("reason", "bold"), Text(clean(letter.reason), "bold yellow"))
    if letter.path:
        table.add_row("path", Text(clean(letter.path)))
    table.add_row("message", Text(clean(letter.message)))
    table.add_row("dead letter", Text(clean(str(found.place))))
    source = f"{letter.source_topic}:{letter.source_partition}"
    several = f"{source}, offsets {found.first_offset} to {letter.source_offset}"
    table.add_row(
        "source",
        Text(clean(f"{source}:{letter.source_offset}" if found.first_offset == letter.source_offset else several)),
    )
    if letter.timestamp_ms is not None:
        table.add_row("record time", rfc3339(letter.timestamp_ms))
    if letter.redriven:
        table.add_row("redriven", f"{letter.redriven} times, the last time from here or an earlier dead letter")
    for other in others:
        table.add_row("also", Text(clean(f"kp-worker explain{options} {other.place}")))
    head = Text(clean(found.id or "a record without a trace id"), "bold")
    return Group(head, Text("not scored: it is a dead letter", "yellow"), "", table, "", Text(_remedy(letter, options)))


def _remedy(letter: DeadLetter, options: str) -> str:
    from worker.kafka.reading.dead_letters import NO_VALUE

    if letter.reason in NO_VALUE:
        return f"It has no content of its source record: {NO_VALUE[letter.reason]}."
    place = f"--partition {letter.record.partition} --offset {letter.record.offset}"
    command = f"  kp-worker redrive{options} {place}"
    return (
        "Write it to a file, correct the trace in its `value`, and publish that (kp-worker publish):\n"
        f"{command} --to-file letter-{letter.record.partition}-{letter.record.offset}.jsonl --execute\n"
        "Or send it unchanged, to a worker that accepts it now:\n"
        f"{command} --execute"
    )
