"""Scored documents, scored again with other settings: rows with the decision on each before and after.

Nothing is embedded: novelty is in the document, and no decision changes the novelty of a later trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from worker.commands.shared.json_lines import label_of
from worker.commands.shared.scored import (
    DistinctValues,
    DocumentScoring,
    LeftOut,
    NoDocuments,
    Rows,
    ScoredRows,
    Texts,
    hash64,
)
from worker.commands.shared.shown import cut_text, shown_text
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, REJECTED
from worker.core.scoring import DEFAULT_PROFILE, NEUTRAL_NOVELTY, Profile, Score, score_trace
from worker.core.trace import InvalidTrace, Limits, ReasoningTrace, parse_trace

_ANY: Limits = Limits(max_bytes=2**31, max_steps=2**31, max_depth=256)
"""The documents were taken before, whatever the limits are now."""


class ScoredDocument(ReasoningTrace, frozen=True, kw_only=True):
    """An output document: the trace and its `scoring` object."""

    scoring: DocumentScoring


class Setup(NamedTuple):
    """The profile and the threshold that a trace is judged with."""

    profile: str
    threshold: float


class RescoredTraces:
    """Traces with their score and decision before and after. `add` each document, then summarize.

    `profiles` and `threshold` are the candidate's. `label`: the field that says which traces have the same task, dotted
    where it is nested. `fields` are those of the first document without a label.
    """

    def __init__(self, profiles: Mapping[str, Profile], threshold: float, label: str | None = None) -> None:
        self.profiles, self.threshold, self.label = profiles, threshold, label
        self.fields: list[str] = []
        self.unreadable, self.inconsistent = LeftOut(), LeftOut()
        self.rows = ScoredRows(
            {
                "score_before": "d", "score": "d", "accepted_before": "B", "accepted": "B", "domain": "I",
                "setup_before": "I", "setup": "I", "id": "Q",
                **({} if label is None else {"labelled": "B", "label": "Q"}),
            }
        )  # fmt: skip
        self._decoder = msgspec.json.Decoder(ScoredDocument)
        self._ids = Texts()
        self._domains, self._setups = DistinctValues(), DistinctValues()

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Score one document again; one that cannot be used is counted, and the first ones are named by `where`."""
        raw = value or b""
        try:
            document = self._decoder.decode(raw)
            label = {} if self.label is None else self._label(raw, self.label)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.unreadable.add(where, _advice(raw, error))
            return
        wrong = contradiction(document)
        if wrong is not None:
            self.inconsistent.add(where, f"{cut_text(document.id, 60)}: {wrong}")
            return
        self.rows.append(raw, document.scoring, record_ms, self._cells(document) | label)

    def _cells(self, document: ScoredDocument) -> dict[str, Any]:
        before = document.scoring
        after = score_trace(document, before.components.novelty, self.profiles)
        threshold = self.profiles[after.profile].threshold
        if threshold is None:
            threshold = self.threshold
        return {
            "score_before": before.score,
            "score": after.score,
            "accepted_before": before.decision == ACCEPTED,
            "accepted": after.score >= threshold,
            "domain": self._domains.code(cut_text(document.metadata.task_domain)),
            "setup_before": self._setups.code(Setup(before.profile, before.threshold)),
            "setup": self._setups.code(Setup(after.profile, threshold)),
            "id": self._ids.add(cut_text(document.id, CACHED_ID_LENGTH)),
        }

    def _label(self, raw: bytes, path: str) -> dict[str, int]:
        """Return the cells of a label: whether there is one, and its hash."""
        fields: dict[str, Any] = msgspec.json.decode(raw)
        label = label_of(fields, path)
        if label is None:
            self.fields = self.fields or [shown_text(name) for name in sorted(fields)]
            return {"labelled": False, "label": 0}
        return {"labelled": True, "label": hash64(label.encode())}

    def counted(self, last: int | None = None, since_ms: int = 0) -> tuple[Rows, int]:
        """Return the rows that count, in stream-time order, and how many came again. Raises NoDocuments."""
        if not len(self.rows):
            raise NoDocuments(self._nothing())
        return self.rows.counted(last, since_ms)

    def _nothing(self) -> str:
        count = self.unreadable.count + self.inconsistent.count
        if not count:
            return "no documents"
        where, reason = (self.unreadable.shown or self.inconsistent.shown)[0]
        return f"none of {count} documents can be counted; {where}: {reason}"

    def domains(self) -> list[str]:
        """Return the domains in the order of their codes."""
        return self._domains.values()

    def setups(self) -> list[Setup]:
        """Return profiles and thresholds in the order of their codes, before and after alike."""
        return self._setups.values()

    def trace_id(self, position: int) -> str:
        """Return the id at a position of the column `id`, cut as in the novelty cache."""
        return self._ids.get(position, 1)[0]


def contradiction(document: ScoredDocument) -> str | None:
    """Return the first figure of a document that does not follow from its trace, bit for bit; None: all do."""
    scoring = document.scoring
    own = dict.fromkeys((DEFAULT_PROFILE, scoring.profile), Profile(scoring.weights))
    try:
        score = score_trace(document, scoring.components.novelty, own)
    except ValueError as error:
        return str(error)
    for name, stored, follows in _figures(scoring, score):
        if stored != follows:
            return f"{name} is {stored!r}, but {follows!r} follows from the trace"
    return None


def _figures(scoring: DocumentScoring, score: Score) -> Iterator[tuple[str, object, object]]:
    """Yield (name, the document's value, the value that follows)."""
    nearest = scoring.nearest
    novelty = NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity
    yield "novelty", scoring.components.novelty, novelty
    yield "profile", scoring.profile, score.profile
    for name in ("complexity", "tool_diversity", "outcome_confidence"):
        yield name, getattr(scoring.components, name), getattr(score.components, name)
    yield "overrides", ", ".join(scoring.overrides), ", ".join(score.overrides)
    yield "score", scoring.score, score.score
    yield "decision", scoring.decision, ACCEPTED if score.score >= scoring.threshold else REJECTED


def _advice(raw: bytes, error: Exception) -> str:
    """Return why a document cannot be read, in the parser's words where the trace is at fault."""
    try:
        parse_trace(raw, _ANY)
    except InvalidTrace as invalid:
        return f"{invalid.reason}: {invalid.message}"
    if "`scoring`" in str(error) and "missing" in str(error):
        return "no scoring object: score it first (kp-worker score)"
    return str(error)
