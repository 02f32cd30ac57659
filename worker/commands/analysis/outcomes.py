"""`kp-worker evaluate --outcome`: reading runs with recorded outcomes, and how their figures look in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from worker.commands.analysis.labelled import LabelError, Labelled, Vectors, names_apart, numbered
from worker.commands.analysis.novelty import CHANCE, Interval, compared
from worker.commands.analysis.outcome_numbers import (
    ORDERS,
    Basis,
    Judging,
    Outcomes,
    Runs,
    as_claimed,
    evaluated,
    parts,
)
from worker.commands.shared.console import ArgumentError, CommandError, open_file, say, text_console, write_line
from worker.commands.shared.json_lines import label_of, read_lines, value_at
from worker.commands.shared.options import read_settings
from worker.commands.shared.shown import cut_text, percent, shown_name, shown_text
from worker.commands.shared.table import PlainTable
from worker.commands.shared.thresholds import parse_share
from worker.config import Settings
from worker.core.scoring import NEUTRAL_NOVELTY
from worker.core.terminal import clean, clean_json
from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, parse_trace
from worker.embed.embedder import ModelError

TASK: Final = "x_task"
"""The field of a run's task where --label names none, if every run has it."""

BAD_SHOWN: Final = 5

LEAST: Final = 50
"""With fewer runs an AUC's interval is wider than .3: nothing can be said."""


def run_outcomes(
    files: Sequence[str], outcome: str, claimed: str | None, task: str | None, verdicts: str | None, late: int,
    seed: int, page: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Do the command; raises CommandError, ArgumentError."""
    try:
        share = None if verdicts is None else float(parse_share(verdicts))
    except ValueError as error:
        raise ArgumentError("--verdicts", str(error)) from None
    settings = read_settings()
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            runs, named = read_runs(files, outcome, claimed, task, settings, progress)
    except (LabelError, ModelError, OSError) as error:
        raise CommandError(str(error)) from None
    judging = None if share is None else Judging(share, late, seed)
    with console.status("measuring"):
        found = outcomes(runs, settings, outcome, claimed, named, seed, judging)
    if as_json:
        write_line(clean_json(msgspec.json.encode(found).decode()))
    else:
        print_outcomes(found)
    if page is not None:
        from worker.commands.analysis.page import render_outcomes, write_page

        write_page(render_outcomes(found, list(sentences(found))), page)


def outcomes(
    runs: Runs, settings: Settings, outcome: str, claimed: str | None, task: str | None, seed: int,
    judging: Judging | None,
) -> Outcomes:  # fmt: skip
    """Return everything that is said of the runs."""
    stated, record, gain, measured = evaluated(runs, settings.scoring_profiles(), settings.threshold, seed, judging)
    failures = 1 - runs.outcome[[not trace.metadata.success for trace in runs.traces]]
    return Outcomes(
        outcome=outcome,
        claimed=claimed,
        task=task,
        runs=len(runs),
        tasks=int(runs.tasks.max()) + 1,
        succeeded=round(float(runs.outcome.mean()), 4),
        admissions=len(failures),
        admissions_true=round(float(failures.mean()), 4) if len(failures) else None,
        threshold=settings.threshold,
        embedder=settings.embedder,
        files=parts(runs.names["files"], runs.files, runs),
        domains=parts(runs.names["domains"], runs.domains, runs),
        judging=judging,
        orders=1 if judging is None else ORDERS,
        measured=measured,
        stated=stated,
        record=record,
        gain=gain,
    )


def read_runs(
    files: Sequence[str], outcome: str, claimed: str | None, task: str | None, settings: Settings, progress: Progress
) -> tuple[Runs, str | None]:
    """Read the runs of all files, as they are claimed, with their novelty; and the field that names their tasks.

    Raises LabelError for a field that is missing or of another kind, ModelError, OSError.
    """
    vectors, names = Vectors(), names_apart(files)
    traces: list[ReasoningTrace] = []
    truths, claims, tasks, where, novelty = [], [], [], [], []
    for number, (file, name) in enumerate(zip(files, names, strict=True)):
        own = Labelled(name)
        for line, document in _documents(file, own, settings.limits):
            place = f"{name}: line {line}"
            truths.append(_outcome(document, outcome, place))
            claims.append(None if claimed is None else _claim(document, claimed, place))
            tasks.append(label_of(document, task or TASK))
            if task is not None and tasks[-1] is None:
                raise LabelError(f"{place} has no task at {task}: --label names a field with text or a number")
            where.append(number)
        for text in own.bad[:BAD_SHOWN]:
            say(f"{name}: {text}")
        if len(own.bad) > BAD_SHOWN:
            say(f"{name}: {len(own.bad) - BAD_SHOWN} more lines are no valid trace")
        traces += own.traces
        novelty.append(_novelty(own, settings, vectors, progress))
    if claimed is not None and all(claim is None for claim in claims):
        raise LabelError(f"no run has a claim at {claimed}: --claimed names a field with true, false or null")
    if len(set(truths)) < 2:
        raise LabelError(
            f"{len(truths)} runs, all with the same outcome: there must be runs that succeeded and runs that failed"
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


def _documents(file: str, own: Labelled, limits: Limits) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and document of each line that is a valid trace, once it is among the own ones."""
    with open_file(file, "rb") as source:
        for number, line, _, problem in read_lines(source, limits.max_bytes):
            if problem is None and not line.strip():
                continue
            try:
                if problem is not None:
                    raise InvalidTrace(Reason.TOO_LARGE, "", problem)
                own.traces.append(parse_trace(line, limits))
            except InvalidTrace as error:
                own.bad.append(f"line {number}: {error.reason}: {error.path}: {error.message}")
                continue
            yield number, json.loads(line)


def _outcome(document: Mapping[str, Any], path: str, place: str) -> float:
    value = value_at(document, path)
    if value is None:
        raise LabelError(f"{place} has no outcome at {path}: --outcome; the line has {', '.join(sorted(document))}")
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise LabelError(
            f"{place}: {path} is {shown_text(json.dumps(value))}: --outcome names a field with true, false or a number "
            "from 0 to 1"
        )
    return float(value)


def _claim(document: Mapping[str, Any], path: str, place: str) -> bool | None:
    value = value_at(document, path)
    if value is not None and not isinstance(value, bool):
        raise LabelError(
            f"{place}: {path} is {shown_text(json.dumps(value))}: --claimed names a field with true, false or null"
        )
    return value


def _novelty(own: Labelled, settings: Settings, vectors: Vectors, progress: Progress) -> Any:
    """Return the novelty of a file's traces, compared with all earlier ones of it; 0.5 without an embedder."""
    if settings.embedder == "none" or not own.traces:
        return np.full(len(own.traces), NEUTRAL_NOVELTY)
    bar = progress.add_task(clean(own.name), total=len(own.traces))
    made, _ = vectors.of(own, settings, lambda: progress.advance(bar))
    progress.remove_task(bar)
    places = np.arange(len(made))
    return compared(made, np.zeros(len(made), np.int64), np.arange(0), places).novelty


# -- in a terminal


def print_outcomes(it: Outcomes) -> None:
    """Print the figures as tables, and what they show in sentences."""
    console = text_console()
    tasks = f"{it.tasks:,} tasks ({shown_text(it.task)})" if it.task else "each run a task"
    novelty = ", novelty 0.5 (no embedder)" if it.embedder == "none" else ""
    write_line(
        clean(f"{it.runs:,} runs, {percent(it.succeeded)} succeeded by {shown_text(it.outcome)}; {tasks}{novelty}")
    )
    table = _table("file", "runs", "succeeded", "claims", "of them true")
    for part in it.files:
        cells = [f"{part.runs:,}", percent(part.succeeded), f"{part.claims:,}"]
        table.add_row(cut_text(shown_name(part.name), 32), *cells, "-" if part.true is None else percent(part.true))
    console.print(table)
    write_line("")
    bases = [it.stated] if it.record is None else [it.stated, it.record]
    table = _table("confidence", "scope", "AUC score", "AUC confidence", "best fifth")
    for basis in bases:
        for scope in basis.scopes:
            cells = [_text(scope.auc_score), _text(scope.auc_confidence), _text(scope.best_fifth)]
            table.add_row(basis.name if scope.name == "all" else "", scope.name, *cells)
    console.print(table)
    write_line("")
    table = _table("confidence", "accepted", "of them succeeded", "Brier", "base rate", "ECE")
    for basis in bases:
        cells = [_text(basis.accepted), _text(basis.succeeded), _text(basis.brier)]
        table.add_row(basis.name, *cells, f"{basis.scopes[0].base:.3f}", f"{basis.ece:.3f}")
    console.print(table)
    write_line("")
    for sentence in sentences(it):
        console.print(clean(sentence), soft_wrap=True, markup=False, highlight=False)


def sentences(it: Outcomes) -> Iterator[str]:
    """Yield what the figures show, and what they do not."""
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
                    f"{scope.name.capitalize()}, the record's AUC is {_written(scope.auc_confidence)}: what it tells "
                    "apart is rather agents and fleets than runs."
                )
    for basis in [it.stated] if it.record is None else [it.stated, it.record]:
        yield _about_threshold(basis, it.threshold)
    if it.admissions:
        yield f"Admissions of failure: {it.admissions:,}, of which {percent(it.admissions_true or 0)} failed."
    yield "Intervals are 95 %, over tasks: other agents may differ by more. ECE has none, since resampling raises it."
    if it.runs < LEAST:
        yield f"{it.runs} runs are few: the intervals themselves are rough."


def _about_score(basis: Basis, how: str) -> str:
    auc = basis.scopes[0].auc_score
    if auc is None:
        return f"{how}, there is nothing to compare."
    told = f"{how}, the score's AUC is {_written(auc)}: "
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
    succeeded = "-" if it.succeeded is None else _written(it.succeeded)
    return (
        told + f"{it.threshold:.3f} would have been better: chosen on other tasks, such a threshold accepts "
        f"{percent(it.accepted.value)}, of which {succeeded} succeeded."
    )


def _table(*columns: str) -> PlainTable:
    table = PlainTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        right = name in ("runs", "succeeded", "claims", "of them true", "base rate", "ECE")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    return table


def _text(it: Interval | None) -> str:
    return "-" if it is None else f"{it.value:.3f} {it.low:.3f}-{it.high:.3f}"


def _written(it: Interval) -> str:
    return f"{it.value:.3f} ({it.low:.3f} to {it.high:.3f})"


def _signed(it: Interval) -> str:
    value, low, high = (round(number, 3) + 0.0 for number in (it.value, it.low, it.high))  # no -0.000
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
