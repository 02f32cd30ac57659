"""Scoring a JSON Lines file with the worker's own core, to the same documents as on the topics.

The files count as a source topic with one partition: line n of them all (from 0) is offset n. Blank lines are skipped.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from worker.commands.shared.console import (
    BadLines,
    CommandError,
    JsonOutput,
    output_file,
    say,
    size_of,
)
from worker.commands.shared.json_lines import Line, not_traces, read_lines
from worker.commands.shared.placed_verdicts import PlacedVerdict, read_verdicts
from worker.commands.shared.shown import shown_score, shown_threshold
from worker.config import Settings
from worker.config.redaction_rules import evaluation_config, output_rules
from worker.core.dead_letters import embedding_failed
from worker.core.records import SourceRecord
from worker.core.scorer import Evaluation
from worker.core.scoring import ScoredTrace, accepts_too_few
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace, ReasoningTrace, document_decoder, embedded_texts
from worker.core.verdicts import issued_ms
from worker.embed.embedder import Embedder, Embedding, ModelError, embed_trace
from worker.embed.load import load_embedder, new_scorer
from worker.redact.markers import MARKER


def run_score(
    files: Sequence[BinaryIO], output: BinaryIO, dead_letters: BinaryIO | None, verdicts: BinaryIO | None,
    settings: Settings,
) -> None:  # fmt: skip
    """Score files and report the counts. Raises CommandError, also if no line was valid."""
    problems: list[str] = []
    named = {_name(file): BadLines(_name(file), problems.append) for file in files}

    def on_bad(file: BinaryIO, number: int, line: bytes, error: InvalidTrace) -> None:
        if number == 1 and (other := not_traces(_name(file), line)):
            raise CommandError(other)
        named[_name(file)].name(f"{number}: {error.reason}: {error}")

    console = Console(stderr=True)
    scored, bad = JsonOutput(output), None if dead_letters is None else JsonOutput(dead_letters)
    try:
        judged = [] if verdicts is None else read_verdicts(verdicts, verdicts.name, settings.max_message_bytes)
        with console.status("loading the model"):
            embedder = load_embedder(settings)
        columns = (TextColumn("scoring"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("scoring", total=sum(size_of(file) or 0 for file in files) or None)
            counts = score_lines(
                files, scored, bad, settings, embedder, lambda size: progress.advance(task, size), on_bad, judged
            )
        for written in filter(None, (scored, bad)):
            written.flush()  # so that a full disk is reported here, not in a traceback at the end
    except ModelError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        partial = [name for name in (output_file(output), dead_letters and output_file(dead_letters)) if name]
        if partial:
            say(f"interrupted: {' and '.join(partial)} {'is' if len(partial) == 1 else 'are'} partial")
        raise
    valid, dead = len(counts.scores), counts.dead_letters.total()
    say(
        f"{number_of(valid + dead, 'trace')}: {counts.accepted} accepted, {valid - counts.accepted} rejected, "
        f"{number_of(dead, 'dead letter')}, {number_of(counts.truncated, 'text')} truncated at {settings.max_tokens} "
        "tokens"
    )
    if counts.truncated_objectives:
        say(f"  {number_of(counts.truncated_objectives, 'objective')} truncated: the model does not read more")
    for reason, count in sorted(counts.dead_letters.items()):
        say(f"  {count} {reason}")
    for kind, count in counts.redactions.items():
        say(f"  {count} {kind} redacted")
        if kind in counts.examples:
            say(f"    {counts.examples[kind]}")
    for rule, count in sorted(counts.screened.items()):
        say(f"  {count} marked by {rule}")
    for bad_lines in named.values():
        bad_lines.say_rest("--dead-letters BAD.jsonl writes them all, with their reasons")
    for text in problems:
        say(text)
    if valid and (not counts.accepted or accepts_too_few(counts.accepted, valid)):
        say(_nothing_passed(counts, output_file(output)))
    if not valid:
        raise CommandError(
            "no line of the file is a valid trace; write them with their reasons: --dead-letters BAD.jsonl" if dead
            else f"{', '.join(named)}: no line holds anything; one trace per line is expected"
        )  # fmt: skip


def _nothing_passed(counts: Summary, output: str | None) -> str:
    """Return why almost no trace was accepted, and how to see what another threshold would accept."""
    low, high = min(counts.thresholds), max(counts.thresholds)
    threshold = f"threshold {shown_threshold(low)}" + ("" if low == high else f" to {shown_threshold(high)}")
    passed = f"{counts.accepted} of {len(counts.scores)} passed" if counts.accepted else "nothing passed"
    file = "FILE" if output is None else shlex.quote(output)
    highest = f"highest score {shown_score(max(counts.scores), low)}"
    return f"{highest}, {threshold}: {passed}; kp-worker report {file} shows what would"


@dataclass(slots=True)
class Summary:
    """Counts of one run."""

    accepted: int = 0
    dead_letters: Counter[str] = field(default_factory=Counter)  # by reason
    truncated: int = 0
    truncated_objectives: int = 0
    redactions: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of the redactions, masked
    screened: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)  # of every scored trace, in order
    thresholds: set[float] = field(default_factory=set)  # by which they were judged


def score_lines(
    sources: Sequence[BinaryIO],
    output: BinaryIO | JsonOutput,
    dead_letters: BinaryIO | JsonOutput | None,
    settings: Settings,
    embedder: Embedder | None,
    on_line: Callable[[int], None] = lambda size: None,
    on_bad: Callable[[BinaryIO, int, bytes, InvalidTrace], None] = lambda file, number, line, error: None,
    verdicts: Iterable[PlacedVerdict] = (),
) -> Summary:
    """Score every line of the files, as of one, and write what the worker would publish.

    `on_line` gets each line's size, bytes; `on_bad` each invalid line, with its file and its number there. `verdicts`:
    sorted by place. An invalid line is written to `dead_letters` as one JSON object with its reason. Raises OSError.
    """
    identity = None if embedder is None else embedder.identity
    config = evaluation_config(settings, output_rules(settings))
    scorer = new_scorer(settings, identity)
    evaluation, waiting, summary = Evaluation(scorer, identity, config), deque(enumerate(verdicts)), Summary()
    lines = ((file, line) for file in sources for line in read_lines(file, settings.max_message_bytes))
    for number, (file, line) in enumerate(lines, 1):
        on_line(line.size)
        if line.blank:
            continue
        while waiting and waiting[0][1].after < number:
            place, (_, _, verdict) = waiting.popleft()
            scorer.record.add(verdict, issued_ms(verdict, None), place)
        try:
            record = SourceRecord(settings.source_topic, 0, number - 1, None, None, line.content())
            trace = evaluation.read(record)
            vector = None
            if embedder is not None and isinstance(trace, ReasoningTrace):
                embedding = _embed(embedder, embedded_texts(trace, settings.embed_text), settings.embed_text)
                vector = embedding.vector
                summary.truncated += embedding.truncated
                summary.truncated_objectives += embedding.objective_truncated
            _, scored, document, *_ = evaluation.decide(record, trace, vector)
            if not isinstance(scored, ScoredTrace):
                raise TypeError(f"this is a bug: line {number} is no trace")
        except InvalidTrace as error:
            on_bad(file, line.number, line.data, error)
            summary.dead_letters[str(error.reason)] += 1
            if dead_letters is not None:
                of = {"file": _name(file)} if len(sources) > 1 else {}
                dead_letters.write(_dead_line(of, line, error) + b"\n")
            continue
        summary.scores.append(scored.score)
        summary.thresholds.add(scored.threshold)
        summary.accepted += scored.accepted
        if document.redactions and config.clean is not None:
            if document.redactions.keys() - summary.redactions.keys():
                for kind, example in redaction_examples(line.data, config.clean(line.data)[0]).items():
                    summary.examples.setdefault(kind, f"line {number}: {example}")
            summary.redactions.update(document.redactions)
        summary.screened.update(document.screened)
        output.write((document.value or b"") + b"\n")
    return summary


def _name(file: BinaryIO) -> str:
    return str(getattr(file, "name", "standard input"))


def _embed(embedder: Embedder, texts: Sequence[str], view: str) -> Embedding:
    try:
        return embed_trace(embedder, texts, view)
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise embedding_failed(error) from error


def _dead_line(file: Mapping[str, str], line: Line, error: InvalidTrace) -> bytes:
    letter: dict[str, object] = {
        **file, "line": line.number, "reason": str(error.reason), "path": error.path, "message": error.message,
    }  # fmt: skip
    if line.problem is None:
        try:
            letter["value"] = line.data.decode()
        except UnicodeDecodeError:
            letter["value_base64"] = base64.b64encode(line.data).decode()
    return msgspec.json.encode(letter)


# -- examples of what redaction replaced, with the secrets masked


def redaction_examples(raw: bytes, redacted: bytes) -> dict[str, str]:
    """Return the first replacement of each type in a document: its path, and the masked secret in its surroundings."""
    examples: dict[str, str] = {}
    pending = deque([(document_decoder.decode(raw), document_decoder.decode(redacted), "")])
    while pending:
        before, after, path = pending.popleft()
        if isinstance(before, dict) and isinstance(after, dict):
            for (name, value), (cleaned_name, cleaned_value) in zip(before.items(), after.items(), strict=True):
                place = f"{path}.{cleaned_name}" if path else cleaned_name
                pending += [(name, cleaned_name, place), (value, cleaned_value, place)]
        elif isinstance(before, list) and isinstance(after, list):
            pending += [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(before, after, strict=True))]
        elif isinstance(after, str) and before != after:
            for kind, text in _markers(before if isinstance(before, str) else json.dumps(before), after):
                examples.setdefault(kind, f"{path}: {text}".replace("\n", " "))
    return examples


def _markers(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield the markers of a text. A replaced text lies between the parts around its marker, common to both texts."""
    markers = list(islice(MARKER.finditer(after), 1000))
    place = known = 0  # behind the last marker, in `before` and `after`
    for marker, end in zip(markers, [*(marker.start() for marker in markers[1:]), len(after)], strict=False):
        start, following = place + marker.start() - known, after[marker.end() : end]
        behind = before.find(following, start + 1) if following else len(before)
        if end == len(after):
            behind = len(before) - len(following)
        place, known = max(start, behind), marker.end()
        if before[start:place] != marker[0]:  # it was not already there
            left, right = after[max(0, marker.start() - 32) : marker.start()], after[marker.end() :][:32]
            kind = marker[0].removeprefix("[REDACTED:").removesuffix("]")
            yield kind, f"{left}«{_masked(before[start:place])}»{right}"


def _masked(secret: str) -> str:
    """Return the shape of a secret: a for a letter, A for a capital, 9 for a digit; at most 40 characters."""
    shape = "".join(
        "9" if c.isdigit() else "A" if c.isupper() else "a" if c.isalpha() or ord(c) > 126 else c for c in secret[:40]
    )
    return shape + (f"... ({len(secret)} characters)" if len(secret) > 40 else "")
