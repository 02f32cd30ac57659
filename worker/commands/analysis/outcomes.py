"""`kp-worker evaluate --outcome`: reading runs with recorded outcomes, and showing their figures in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from worker.commands.analysis.labelled import Labelled, Vectors, names_apart, numbered, progress_bar
from worker.commands.analysis.novelty import CHANCE, Interval, cell, compared
from worker.commands.analysis.outcome_numbers import Basis, Judging, Outcomes, Runs, as_claimed, outcomes
from worker.commands.shared.console import ArgumentError, CommandError, text_console, write_json, write_line
from worker.commands.shared.json_lines import label_of, value_at
from worker.commands.shared.options import read_settings
from worker.commands.shared.shown import cut_text, percent, shown_name, shown_text
from worker.commands.shared.table import columns
from worker.commands.shared.thresholds import parse_share
from worker.config import Settings
from worker.core.scoring import NEUTRAL_NOVELTY
from worker.core.terminal import clean
from worker.core.trace import ReasoningTrace

TASK: Final = "x_task"
"""The task field if --label names none and every run has it."""

LEAST: Final = 50
"""With fewer runs, an AUC's interval is wider than .3: it shows nothing."""

NUMBERS: Final = ("runs", "succeeded", "claims", "of them true", "base rate", "ECE")
"""Columns of numbers without an interval."""


def run_outcomes(
    files: Sequence[str], outcome: str, claimed: str | None, task: str | None, verdicts: str | None, late: int,
    seed: int, page: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Measure scores on files with recorded outcomes. Raises CommandError, ArgumentError."""
    try:
        judging = None if verdicts is None else Judging(float(parse_share(verdicts)), late, seed)
    except ValueError as error:
        raise ArgumentError("--verdicts", str(error)) from None
    settings = read_settings()
    with progress_bar() as progress:
        runs, named = _read_runs(files, outcome, claimed, task, settings, Vectors(progress))
    with Console(stderr=True).status("measuring"):
        found = outcomes(runs, settings, outcome, claimed, named, seed, judging)
    if as_json:
        write_json(found)
    else:
        _print(found)
    if page is not None:
        from worker.commands.analysis.page import render_outcomes, write_page

        write_page(render_outcomes(found, list(_sentences(found))), page)


def _read_runs(
    files: Sequence[str], outcome: str, claimed: str | None, task: str | None, settings: Settings, vectors: Vectors
) -> tuple[Runs, str | None]:
    """Read the runs of all files as their agents claim them, with their novelty; and find the field of their tasks.

    Raises CommandError, also for a missing or mistyped field.
    """
    names = names_apart(files)
    traces: list[ReasoningTrace] = []
    truths, claims, tasks, where, novelty = [], [], [], [], []
    for number, (file, name) in enumerate(zip(files, names, strict=True)):
        own = Labelled(name)
        for place, document in own.read(file, settings.limits):
            truths.append(_outcome(document, outcome, place))
            claims.append(None if claimed is None else _claim(document, claimed, place))
            tasks.append(label_of(document, task or TASK))
            if task is not None and tasks[-1] is None:
                raise CommandError(f"{place} has no task at {task}; --label must name a field with text or a number")
            where.append(number)
        traces += own.traces
        novelty.append(_novelty(own, settings, vectors))
    if claimed is not None and all(claim is None for claim in claims):
        raise CommandError(f"no run has a claim at {claimed}; --claimed must name a field with true, false or null")
    if len(set(truths)) < 2:
        raise CommandError(
            f"{len(truths)} runs, all with the same outcome; there must be runs that succeeded and runs that failed"
        )
    known = all(it is not None for it in tasks)
    domains = [trace.metadata.task_domain for trace in traces]
    runs = Runs(
        [as_claimed(trace, claim) for trace, claim in zip(traces, claims, strict=True)],
        np.concatenate(novelty),
        np.array(truths),
        numbered([str(it) for it in tasks]) if known else np.arange(len(truths)),
        numbered(domains),
        np.array(where),
        {"files": names, "domains": list(dict.fromkeys(domains))},
    )
    return runs, (task or TASK) if known else None


def _outcome(document: Mapping[str, Any], path: str, place: str) -> float:
    value = value_at(document, path)
    if value is None:
        raise CommandError(
            f"{place} has no outcome at {path}; name another field with --outcome. The line has "
            f"{', '.join(sorted(document))}"
        )
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise _wrong(place, path, value, "--outcome must name a field with true, false or a number from 0 to 1")
    return float(value)


def _claim(document: Mapping[str, Any], path: str, place: str) -> bool | None:
    value = value_at(document, path)
    if value is not None and not isinstance(value, bool):
        raise _wrong(place, path, value, "--claimed must name a field with true, false or null")
    return value


def _wrong(place: str, path: str, value: object, remedy: str) -> CommandError:
    return CommandError(f"{place}: {path} is {shown_text(json.dumps(value))}; {remedy}")


def _novelty(own: Labelled, settings: Settings, vectors: Vectors) -> Any:
    """Return the novelty of a file's traces, each compared with all earlier ones; 0.5 without an embedder."""
    if settings.embedder == "none" or not own.traces:
        return np.full(len(own.traces), NEUTRAL_NOVELTY)
    made, _ = vectors.of(own, settings)
    return compared(made, np.zeros(len(made), np.int64), np.arange(0), np.arange(len(made))).novelty


# -- in a terminal


def _print(it: Outcomes) -> None:
    """Print the figures as tables, then in sentences."""
    tasks = f"{it.tasks:,} tasks ({shown_text(it.task)})" if it.task else "each run a task"
    novelty = ", novelty 0.5 (no embedder)" if it.embedder == "none" else ""
    write_line(
        clean(f"{it.runs:,} runs, {percent(it.succeeded)} succeeded by {shown_text(it.outcome)}; {tasks}{novelty}")
    )
    _print_table(("file", "runs", "succeeded", "claims", "of them true"), (
        (cut_text(shown_name(part.name), 32), f"{part.runs:,}", percent(part.succeeded), f"{part.claims:,}",
         "-" if part.true is None else percent(part.true))
        for part in it.files
    ))  # fmt: skip
    bases = [it.stated] if it.record is None else [it.stated, it.record]
    _print_table(("confidence", "scope", "AUC score", "AUC confidence", "best fifth"), (
        (basis.name if scope.name == "all" else "", scope.name, cell(scope.auc_score), cell(scope.auc_confidence),
         cell(scope.best_fifth))
        for basis in bases for scope in basis.scopes
    ))  # fmt: skip
    _print_table(("confidence", "accepted", "of them succeeded", "Brier", "base rate", "ECE"), (
        (basis.name, cell(basis.accepted), cell(basis.succeeded), cell(basis.brier), f"{basis.scopes[0].base:.3f}",
         f"{basis.ece:.3f}")
        for basis in bases
    ))  # fmt: skip
    console = text_console()
    for sentence in _sentences(it):
        console.print(clean(sentence), soft_wrap=True, markup=False, highlight=False)


def _print_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = columns(*names, right=NUMBERS)
    for row in rows:
        table.add_row(*row)
    text_console().print(table)
    write_line("")


def _sentences(it: Outcomes) -> Iterator[str]:
    """Yield sentences on what the figures show, and what they do not."""
    if it.judging is not None:
        yield (
            f"record: verdicts on {percent(it.judging.share)} of the runs, drawn at random, {it.judging.late} runs "
            f"late. All files are mixed; means over {it.orders} random orders, of each the last {it.measured:,} runs."
        )
    yield _about_score(it.stated, "With the stated confidence")
    if it.record is not None:
        yield _about_score(it.record, "By the record")
        if it.gain is not None:
            shown = "no difference is shown" if it.gain.low <= 0 <= it.gain.high else "a difference is shown"
            yield f"The record changes the AUC of the score by {_signed(it.gain)}; {shown}."
        for scope in it.record.scopes[1:]:
            if scope.auc_confidence is not None and scope.auc_confidence.low <= CHANCE:
                yield (
                    f"{scope.name.capitalize()}, the record's AUC is {scope.auc_confidence}: it tells "
                    "agents and fleets apart rather than runs."
                )
    for basis in [it.stated] if it.record is None else [it.stated, it.record]:
        yield _about_threshold(basis, it.threshold)
    if it.admissions:
        yield f"Admissions of failure: {it.admissions:,}, of which {percent(it.admissions_true or 0)} failed."
    yield "Intervals are 95 %, over tasks: other agents may differ by more. ECE has none, since resampling raises it."
    if it.runs < LEAST:
        yield f"{it.runs} runs are few, so the intervals themselves are rough."


def _about_score(basis: Basis, how: str) -> str:
    auc = basis.scopes[0].auc_score
    if auc is None:
        return f"{how}, there is nothing to compare."
    told = f"{how}, the score's AUC is {auc}: "
    if auc.low > CHANCE:
        return told + f"better than chance ({CHANCE})."
    if auc.high < CHANCE:
        return told + f"worse than chance ({CHANCE}): runs that failed score higher."
    return told + f"the interval holds {CHANCE}, so it is not shown to tell success from failure."


def _about_threshold(basis: Basis, threshold: float) -> str:
    now = "-" if basis.succeeded is None else f"{percent(basis.succeeded.value)} of them succeeded"
    told = f"{basis.name}: {percent(basis.accepted.value)} are accepted at {threshold:g} ({now}). "
    it = basis.better
    if it is None or it.gain is None or it.gain.low <= 0:
        why = "" if it is None or it.gain is None else f" (on other tasks, {_signed(it.gain)})"
        return told + f"No threshold is shown to accept more of the successes than of the failures{why}."
    succeeded = "-" if it.succeeded is None else it.succeeded
    return (
        told + f"{it.threshold:.3f} would have been better: chosen on other tasks, such a threshold accepts "
        f"{percent(it.accepted.value)}, of which {succeeded} succeeded."
    )


def _signed(it: Interval) -> str:
    value, low, high = (round(number, 3) + 0.0 for number in (it.value, it.low, it.high))  # no -0.000
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
