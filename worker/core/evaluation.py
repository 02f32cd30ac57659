"""The evaluation of one record: read its trace, compare, score, and build the document. The stream and files share it.

Lives here: the order of these steps, and their settings. Must not live here: embedding, clocks and measurements,
the cache (novelty.py), the formula (scoring.py), the documents' bytes (documents.py).

Calls follow the order of the partition: each trace is compared and scored once, in offset order; a dead letter is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.documents import scored_record
from worker.core.identity import EmbedderIdentity
from worker.core.novelty import Vector
from worker.core.records import RECORD_OVERHEAD, OutputRecord, SourceRecord, encoded_size
from worker.core.scorer import Comparison, PartitionScorer, ScoredTrace, event_time_ms
from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, parse_trace


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """The settings: limits, which time counts (KP_EVENT_TIME), what a document contains, and which are redacted."""

    limits: Limits
    event_time: str = "created_at"
    output_embedding: bool = False
    redact: str = "off"


def _check_size(record: SourceRecord, limits: Limits) -> None:
    """Raise InvalidTrace for a record that is too large with its key and headers, in bytes as they are encoded.

    Kafka's framing does not count: KP_MAX_MESSAGE_BYTES is the largest value of a record without key and headers.
    """
    size = encoded_size(record.key, record.value, record.headers) - RECORD_OVERHEAD
    if size > limits.max_bytes:
        raise InvalidTrace(
            Reason.TOO_LARGE,
            "",
            f"the record has {size} bytes with key and headers, the limit is {limits.max_bytes} "
            "(KP_MAX_MESSAGE_BYTES, and the output topics' max.message.bytes)",
        )


class Evaluation:
    """The evaluation of one partition's records. `identity` is the embedder's; None without one.

    `evaluate` does all steps; a caller that measures each step calls `compare`, `decide` and `document` in this order.
    """

    def __init__(self, scorer: PartitionScorer, identity: EmbedderIdentity | None, config: EvaluationConfig) -> None:
        self._scorer = scorer
        self._identity = identity
        self._config = config

    def read(self, record: SourceRecord) -> ReasoningTrace:
        """Return the trace in a record. Raises InvalidTrace, which makes the record a dead letter."""
        limits = self._config.limits
        if record.fault is not None:
            raise InvalidTrace(record.fault.reason, "", record.fault.message)
        if record.size > limits.max_bytes:  # the size in memory is never smaller than the encoded one
            _check_size(record, limits)
        return parse_trace(record.value, limits)

    def compare(self, record: SourceRecord, trace: ReasoningTrace, vector: Vector | None) -> Comparison:
        """Advance stream time and find the nearest live neighbour of the vector, shape (dimensions,)."""
        return self._scorer.compare(vector, event_time_ms(trace, record.timestamp_ms, self._config.event_time))

    def decide(self, record: SourceRecord, trace: ReasoningTrace, comparison: Comparison) -> ScoredTrace:
        """Score the trace, and add its vector to the cache."""
        return self._scorer.decide(trace, comparison, record.offset)

    def document(self, record: SourceRecord, scored: ScoredTrace) -> OutputRecord:
        """Build the accepted or rejected record."""
        config = self._config
        return scored_record(record, scored, self._identity, embedding=config.output_embedding, redact=config.redact)

    def evaluate(
        self, record: SourceRecord, trace: ReasoningTrace, vector: Vector | None
    ) -> tuple[ScoredTrace, OutputRecord]:
        """Score the partition's next trace; return its score and the record to publish."""
        scored = self.decide(record, trace, self.compare(record, trace, vector))
        return scored, self.document(record, scored)
