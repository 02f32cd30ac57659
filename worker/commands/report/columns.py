"""Scored documents as compact columns, for a report: about 150 bytes a trace, and its id and objective, cut."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from worker.commands.shared.scored import DistinctValues, DocumentScoring, LeftOut, ScoredRows, Texts, hash64
from worker.commands.shared.shown import cut_text, shown_text
from worker.core.json_words import in_json_words
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, REJECTED

COMPONENTS: Final = ("complexity", "novelty", "tool_diversity", "outcome_confidence")


class _DocumentMetadata(Struct):
    task_domain: str


class _DocumentTask(Struct):
    objective: str


class _DocumentStep(Struct):
    latency_ms: float = 0.0


class _Document(Struct):
    """What a report reads of an output document (schemas/scored-trace.schema.json)."""

    id: str
    metadata: _DocumentMetadata
    task: _DocumentTask
    steps: list[_DocumentStep]
    scoring: DocumentScoring


class Traces:
    """Scored traces as columns. `add` each document, then `summarize`."""

    def __init__(self, *, hide_texts: bool = False) -> None:
        self.hide_texts = hide_texts
        self.unreadable = LeftOut()
        self.rows = ScoredRows(
            {
                "score": "d", **dict.fromkeys(COMPONENTS, "d"), "similarity": "d", "latency_ms": "d", "steps": "I",
                "accepted": "B", "domain": "I", "setup": "I", "maker": "I", "overrides": "I", "screen": "I", "id": "Q",
                "nearest": "Q", "text": "Q",
            }
        )  # fmt: skip
        self._decoder = msgspec.json.Decoder(_Document)
        self._texts = Texts()
        self._names = {name: DistinctValues() for name in ("domain", "setup", "maker", "overrides", "screen")}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Take one output document; one that cannot be read is counted, and the first ones are named by `where`.

        `record_ms` is the Kafka record's timestamp, for the bounds of `summarize`.
        """
        try:
            document = self._decoder.decode(_given(value))
            if document.scoring.decision not in (ACCEPTED, REJECTED):
                raise msgspec.ValidationError("scoring.decision is neither accepted nor rejected")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.unreadable.add(where, _advice(error))
            return
        self.rows.append(_given(value), document.scoring, record_ms, self._cells(document))

    def _cells(self, document: _Document) -> dict[str, Any]:
        scoring, nearest = document.scoring, document.scoring.nearest
        codes = {
            # Names as they are: a domain and its near miss may look alike when they are shown.
            "domain": cut_text(document.metadata.task_domain),
            "setup": (cut_text(scoring.profile), scoring.threshold, scoring.weights),
            "maker": (scoring.embedder, shown_text(scoring.worker_version)),
            "overrides": tuple(shown_text(name) for name in scoring.overrides),
            "screen": None if scoring.screen is None else tuple(shown_text(rule) for rule in scoring.screen.rules),
        }
        objective = "" if self.hide_texts else shown_text(document.task.objective)
        return {
            "score": scoring.score,
            **{name: getattr(scoring.components, name) for name in COMPONENTS},
            "similarity": np.nan if nearest is None else nearest.similarity,
            "latency_ms": sum(step.latency_ms for step in document.steps),
            "steps": len(document.steps),
            "accepted": scoring.decision == ACCEPTED,
            **{name: self._names[name].code(value) for name, value in codes.items()},
            "id": hash64(document.id[:CACHED_ID_LENGTH].encode()),
            "nearest": 0 if nearest is None else hash64(nearest.id.encode()),
            "text": self._texts.add(shown_text(document.id), objective),
        }

    def text(self, row: int) -> tuple[str, str]:
        """Return id and objective of one trace, cut and cleaned."""
        identity, objective = self._texts.get(int(self.rows.column("text")[row]), 2)
        return identity, objective

    def names(self, column: str) -> list[Any]:
        """Return the distinct values behind a column of numbers."""
        return self._names[column].values()


def _given(value: bytes | None) -> bytes:
    if not value:
        raise msgspec.DecodeError("it has no value")
    return value


def _advice(error: Exception) -> str:
    if "`scoring`" in str(error) and "missing" in str(error):
        return "no scoring object: score it first (kp-worker score)"
    return "nested too deep" if isinstance(error, RecursionError) else in_json_words(str(error))
