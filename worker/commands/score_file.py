"""Scoring a JSON Lines file with the worker's own core: the same documents as on the topics.

The file counts as the source topic with one partition: line n (from 0) is offset n. Blank lines are passed over.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from worker.commands.json_lines import is_pretty_printed
from worker.config import Settings
from worker.core.documents import embedding_failed
from worker.core.evaluation import Evaluation, EvaluationConfig
from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace
from worker.core.views import embedded_texts
from worker.embed.embedder import Embedder, Embedding, ModelError, embed_or_diagnose
from worker.embed.load import new_scorer
from worker.embed.pool import mean_of_parts


@dataclass(slots=True)
class Summary:
    """Counts of one run; `scores` of every scored trace, in order. `pretty_printed`: the file is no JSON Lines."""

    accepted: int = 0
    rejected: int = 0
    dead_letters: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    redactions: Counter[str] = field(default_factory=Counter)
    pretty_printed: bool = False
    scores: list[float] = field(default_factory=list)


def score_lines(
    source: BinaryIO,
    output: BinaryIO,
    dead_letters: BinaryIO | None,
    settings: Settings,
    embedder: Embedder | None,
    on_line: Callable[[int], None] = lambda size: None,
) -> Summary:
    """Score every line of `source` and write what the worker would publish. `on_line` gets each line's size, bytes.

    A line that cannot be read is written to `dead_letters` as one JSON object with its reason. Raises OSError.
    """
    identity = None if embedder is None else embedder.identity
    config = EvaluationConfig(settings.limits, settings.event_time, settings.output_embedding, settings.redact)
    evaluation = Evaluation(new_scorer(settings, identity), identity, config)
    summary = Summary()
    for number, line in _lines(source, on_line):
        if not number:
            summary.pretty_printed = is_pretty_printed(line)
        record = SourceRecord(settings.source_topic, 0, number, None, None, line)
        try:
            trace = evaluation.read(record)
            vector = None
            if embedder is not None:
                vector, truncated = _embed(embedder, embedded_texts(trace, settings.embed_text))
                summary.truncated += truncated
        except InvalidTrace as error:
            summary.dead_letters[str(error.reason)] += 1
            if dead_letters is not None:
                dead_letters.write(_dead_line(number, line, error) + b"\n")
            continue
        scored, document = evaluation.evaluate(record, trace, vector)
        summary.scores.append(scored.score)
        if scored.accepted:
            summary.accepted += 1
        else:
            summary.rejected += 1
        summary.redactions.update(document.redactions or {})
        output.write((document.value or b"") + b"\n")
    return summary


def _lines(source: BinaryIO, on_line: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(source):
        on_line(len(line))
        text = line.rstrip(b"\r\n")
        if text.strip():
            yield number, text


def _embed(embedder: Embedder, texts: Sequence[str]) -> Embedding:
    try:
        return mean_of_parts([embed_or_diagnose(embedder, text) for text in texts])
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise embedding_failed(error) from error


def _dead_line(number: int, line: bytes, error: InvalidTrace) -> bytes:
    letter: dict[str, object] = {
        "line": number + 1,
        "reason": str(error.reason),
        "path": error.path,
        "message": error.message,
    }
    try:
        letter["value"] = line.decode()
    except UnicodeDecodeError:
        letter["value_base64"] = base64.b64encode(line).decode()
    return msgspec.json.encode(letter)
