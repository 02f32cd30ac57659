"""A record on its way, and what the decided ones leave: outputs, and rows of the changelog."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from worker.core.changelog import Entry, Housekeeping, encode, slot_key
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.passes import NO_PASS, Pass
from worker.core.records import OutputRecord, Row, SourceRecord
from worker.core.scorer import PartitionScorer, cached_id
from worker.core.scoring import ScoredTrace
from worker.core.trace import InvalidTrace, ReasoningTrace
from worker.core.track_record import RECORD_PREFIX, Change, encode_row
from worker.core.verdicts import Ruling, Verdict
from worker.embed.embedder import Embedding
from worker.kafka.writing.publisher import Commit

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Pending:
    """A record between its fetch and its commit. Its decision sets all that follows `text_hash`."""

    __slots__ = (
        "changes", "embedding", "entry", "output", "parsed", "record", "result", "ruling", "span", "started",
        "submitted", "text_hash",
    )  # fmt: skip

    def __init__(self, record: SourceRecord) -> None:
        self.started = self.submitted = time.perf_counter()
        self.record = record
        self.span: Span | None = None
        self.parsed: ReasoningTrace | InvalidTrace | Verdict | None = None
        self.embedding: Embedding | asyncio.Future[Embedding] | None = None  # None: nothing is embedded
        self.text_hash = b""  # of what is embedded
        self.output: OutputRecord
        self.result: ScoredTrace | InvalidTrace | None = None  # None: of an honoured verdict
        self.entry: tuple[bytes, bytes] | None = None  # for the changelog
        self.ruling: Ruling | None = None  # what a verdict did
        self.changes: Sequence[Change] = ()  # of the changelog, by a verdict

    def ready(self) -> bool:
        """Whether the record can be decided."""
        return not isinstance(self.embedding, asyncio.Future) or self.embedding.done()

    def size(self) -> int:
        """Return the bytes of the record and its output's value; the output's key and headers are the record's."""
        return self.record.size + len(self.output.value or b"")


class PartitionState:
    """The restored state of a partition, updated by each batch."""

    def __init__(
        self,
        scorer: PartitionScorer,
        next_offset: int,  # of the first record to take
        replay: Mapping[int, Entry] | None = None,  # of records that will be read again, by source offset
        source_pass: Pass = NO_PASS,
        housekeeping: Housekeeping | None = None,
    ) -> None:
        self.scorer = scorer
        self.next_offset = next_offset
        self._replay = dict(replay or {})
        self._pass = source_pass
        self._housekeeping = housekeeping or Housekeeping()
        self._stream_time_ms = scorer.stream_time_ms  # after the last batch

    @property
    def topic_id(self) -> str | None:
        """The source topic's id when the partition was assigned; None if its broker has no ids."""
        return self._pass.topic_id

    def ready_embedding(self, offset: int, text_hash: bytes) -> Entry | None:
        """Return the entry of a record that was embedded before a restart, unless this offset had another text."""
        entry = self._replay.pop(offset, None)
        return entry if entry is not None and entry.text_hash == text_hash else None

    def entry(
        self, record: SourceRecord, trace: ReasoningTrace, scored: ScoredTrace, text_hash: bytes, model: str
    ) -> tuple[bytes, bytes] | None:
        """Return the changelog's key and value for a scored trace; None if it has no vector."""
        if scored.sequence is None or scored.vector is None:
            return None
        key = slot_key(scored.sequence, self.scorer.cache.max_elements, self._pass.number or 0)
        value = encode(
            sequence=scored.sequence,
            source_offset=record.offset,
            stream_time_ms=scored.stream_time_ms,
            trace_id=cached_id(trace),
            model=model,
            vector=scored.vector,
            pass_number=self._pass.number,
            text_hash=text_hash,
            agent_id=trace.metadata.agent_id[:CACHED_ID_LENGTH],
        )
        return key, value

    def commit(self, decided: Sequence[Pending]) -> Commit:
        """Return what to commit for these records, the partition's next in offset order."""
        entries: list[Row | Change] = []
        newest = None
        for each in decided:
            if isinstance(each.result, ScoredTrace):
                self._stream_time_ms = each.result.stream_time_ms
                if each.entry is not None:
                    entries.append(each.entry)
                    newest = each.result.sequence
            elif each.ruling is not None:
                entries += each.changes

        next_offset = decided[-1].record.offset + 1
        return Commit(
            outputs=[each.output for each in decided],
            entries=self._housekeeping.rows(_encoded(entries), newest, next_offset),
            next_offset=next_offset,
            stream_time_ms=self._stream_time_ms,
            records=[each.record for each in decided],
            source_pass=self._pass,
        )


def _encoded(rows: Sequence[Row | Change]) -> list[Row]:
    """Return the rows without track records that a later row of the batch replaces: these need no encoding."""
    last = {key: place for place, (key, _) in enumerate(rows) if key.startswith(RECORD_PREFIX)}
    return [encode_row(row) for place, row in enumerate(rows) if last.get(row[0], place) == place]
