"""The records that `kp-worker tail` shows: scored documents and dead letters, as values and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from aiokafka.structs import ConsumerRecord

from worker.kafka.reading.dead_letters import DeadLetter, as_json, read_dead_letter


@dataclass(frozen=True, slots=True)
class TailRecord:
    """One record to show: a scored document or a dead letter."""

    record: ConsumerRecord
    document: dict[str, Any] | None
    dead_letter: DeadLetter | None

    def as_json(self) -> bytes:
        """Return one line of JSON: the output document as it is on the topic, or what the dead letter says."""
        if self.dead_letter is not None:
            return as_json(self.dead_letter, self.dead_letter.key, self.record.value, self.record.headers)
        return bytes(msgspec.json.format(self.record.value, indent=-1))  # a document keeps its producer's line breaks


@dataclass(frozen=True, slots=True)
class TailFilter:
    """Scored traces of this domain (exact) and at least this score; None: any. Dead letters have neither.

    Its topic shows that a record is a dead letter, not its headers: a redriven trace may carry those, too.
    """

    dead_letter_topic: str
    domain: str | None = None
    min_score: float | None = None

    def read(self, record: ConsumerRecord) -> TailRecord | None:
        """Read a record; None where the filter leaves it out, or the worker did not write it."""
        if record.topic == self.dead_letter_topic:
            dead_letter = read_dead_letter(record)
            return None if dead_letter is None else TailRecord(record, None, dead_letter)
        try:
            document = msgspec.json.decode(record.value or b"")
            domain, score = document["metadata"]["task_domain"], float(document["scoring"]["score"])
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError):
            return None
        taken = (self.domain is None or domain == self.domain) and (self.min_score is None or score >= self.min_score)
        return TailRecord(record, document, None) if taken else None
