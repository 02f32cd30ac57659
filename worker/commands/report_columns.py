"""Scored documents as compact columns, for a report: about 150 bytes a trace, and its id and objective, cut.

Lives here: reading `scoring` objects, and the texts that a report shows of documents. Must not live here: what is
computed from the columns (report_summary.py), files, Kafka.
"""

from __future__ import annotations

import hashlib
from array import array
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from worker.core import terminal
from worker.core.identity import EmbedderIdentity
from worker.core.json_words import in_json_words
from worker.core.records import ACCEPTED, REJECTED
from worker.core.scorer import CACHED_ID_LENGTH
from worker.core.scoring import Components, Weights

COMPONENTS: Final = ("complexity", "novelty", "tool_diversity", "outcome_confidence")
TEXT_LENGTH: Final = 160
"""Characters that are kept of an id and of an objective: enough to recognise them."""

BAD_SHOWN: Final = 20

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class _DocumentMetadata(Struct):
    task_domain: str


class _DocumentTask(Struct):
    objective: str


class _DocumentStep(Struct):
    latency_ms: float = 0.0


class _DocumentNearest(Struct):
    id: str
    similarity: float


class _DocumentSource(Struct):
    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _DocumentScoring(Struct):
    score: _Fraction
    decision: str
    threshold: _Fraction
    profile: str
    weights: Weights
    components: Components
    overrides: list[str]
    nearest: _DocumentNearest | None
    stream_time: Annotated[datetime, Meta(tz=True)]
    embedder: EmbedderIdentity | None
    source: _DocumentSource
    worker_version: str


class _Document(Struct):
    """What a report reads of an output document (schemas/scored-trace.schema.json)."""

    id: str
    metadata: _DocumentMetadata
    task: _DocumentTask
    steps: list[_DocumentStep]
    scoring: _DocumentScoring


class DistinctValues:
    """Distinct values by number, so that a column can hold four bytes for each."""

    def __init__(self) -> None:
        self._codes: dict[Any, int] = {}

    def code(self, value: Any) -> int:
        """Return the number of a value, a new one for a new value."""
        return self._codes.setdefault(value, len(self._codes))

    def values(self) -> list[Any]:
        """Return the values in the order of their numbers."""
        return list(self._codes)


class Traces:
    """Scored traces as columns. `add` each document, then `summarize`."""

    def __init__(self, *, hide_texts: bool = False) -> None:
        self.hide_texts = hide_texts
        self.bad = 0
        self.bad_shown: list[tuple[str, str]] = []
        self._decoder = msgspec.json.Decoder(_Document)
        self._texts = bytearray()
        self._domains, self._setups, self._makers, self._overrides = (
            DistinctValues(),
            DistinctValues(),
            DistinctValues(),
            DistinctValues(),
        )
        self._columns = {
            name: array(kind)
            for name, kind in {
                "score": "d", **dict.fromkeys(COMPONENTS, "d"), "similarity": "d", "latency_ms": "d",
                "time_ms": "q", "record_ms": "q", "partition": "I", "offset": "Q", "steps": "I", "accepted": "B",
                "domain": "I", "setup": "I", "maker": "I", "overrides": "I",
                "document": "Q", "id": "Q", "nearest": "Q", "text": "Q",
            }.items()
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self._columns["score"])

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Take one output document; one that cannot be read is counted, and the first ones are named by `where`.

        `record_ms` is the Kafka record's timestamp, for the bounds of `summarize`.
        """
        try:
            document = self._decoder.decode(_given(value))
            row = self._row(document, _given(value), record_ms)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.bad += 1
            if len(self.bad_shown) < BAD_SHOWN:
                self.bad_shown.append((shown_text(where), _advice(error)))
            return
        for name, cell in row.items():
            self._columns[name].append(cell)
        objective = "" if self.hide_texts else shown_text(document.task.objective)
        self._texts += f"{shown_text(document.id)}\0{objective}\0".encode()

    def _row(self, document: _Document, value: bytes, record_ms: int) -> dict[str, Any]:
        """Return the cells of a document, by column. Raises msgspec.ValidationError."""
        scoring, nearest = document.scoring, document.scoring.nearest
        if scoring.decision not in (ACCEPTED, REJECTED):
            raise msgspec.ValidationError("scoring.decision is neither accepted nor rejected")
        return {
            "score": scoring.score,
            **{name: getattr(scoring.components, name) for name in COMPONENTS},
            "similarity": np.nan if nearest is None else nearest.similarity,
            "latency_ms": sum(step.latency_ms for step in document.steps),
            "time_ms": (scoring.stream_time - _EPOCH) // timedelta(milliseconds=1),
            "record_ms": record_ms,
            "partition": scoring.source.partition,
            "offset": scoring.source.offset,
            "steps": len(document.steps),
            "accepted": scoring.decision == ACCEPTED,
            "domain": self._domains.code(shown_text(document.metadata.task_domain)),
            "setup": self._setups.code((shown_text(scoring.profile), scoring.threshold, scoring.weights)),
            "maker": self._makers.code((scoring.embedder, shown_text(scoring.worker_version))),
            "overrides": self._overrides.code(tuple(shown_text(name) for name in scoring.overrides)),
            "document": _hash(value),
            "id": _hash(document.id[:CACHED_ID_LENGTH].encode()),
            "nearest": 0 if nearest is None else _hash(nearest.id.encode()),
            "text": len(self._texts),
        }

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column, without a copy."""
        column = self._columns[name]
        return np.frombuffer(column, dtype=np.dtype(column.typecode))

    def text(self, row: int) -> tuple[str, str]:
        """Return id and objective of one trace, cut and cleaned."""
        start = self._columns["text"][row]
        middle = self._texts.index(0, start)
        end = self._texts.index(0, middle + 1)
        return self._texts[start:middle].decode(), self._texts[middle + 1 : end].decode()

    def names(self, column: str) -> list[Any]:
        """Return the distinct values behind a column of numbers."""
        return {
            "domain": self._domains, "setup": self._setups, "maker": self._makers, "overrides": self._overrides,
        }[column].values()  # fmt: skip


_BLANKS: Final = dict.fromkeys(map(ord, "\t\n\r"), " ")


def shown_text(text: str) -> str:
    """Return a text that is safe to show: cut, and without characters that control terminals, markup or direction."""
    shown = text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"
    if shown.isascii() and shown.isprintable():
        return shown
    return terminal.clean(shown.translate(_BLANKS))


def _hash(data: bytes) -> int:
    # 64 bits: of a million values two are equal with a probability of 3e-8.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _given(value: bytes | None) -> bytes:
    if not value:
        raise msgspec.DecodeError("it has no value")
    return value


def _advice(error: Exception) -> str:
    if "`scoring`" in str(error) and "missing" in str(error):
        return "no scoring object: score it first (kp-worker score)"
    return shown_text(in_json_words(str(error)))
