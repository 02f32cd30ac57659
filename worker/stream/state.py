"""The state of a partition between its restore and its next commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.core.changelog import Entry, Housekeeping
from worker.core.passes import NO_PASS, Pass
from worker.core.records import Row
from worker.core.scorer import Decision, PartitionScorer
from worker.core.scoring import ScoredTrace
from worker.core.track_record import RECORD_PREFIX, Change, encode_row
from worker.kafka.writing.publisher import Commit


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
        self.source = source_pass
        self._housekeeping = housekeeping or Housekeeping()
        self._stream_time_ms = scorer.stream_time_ms  # after the last batch

    def ready_embedding(self, offset: int, text_hash: bytes) -> Entry | None:
        """Return the entry of a record that was embedded before a restart, unless this offset had another text."""
        entry = self._replay.pop(offset, None)
        return entry if entry is not None and entry.text_hash == text_hash else None

    def commit(self, decided: Sequence[Decision]) -> Commit:
        """Return what to commit for these records, the partition's next in offset order."""
        rows: list[Row | Change] = []
        newest = None
        for each in decided:
            rows += each.rows
            if isinstance(each.result, ScoredTrace):
                self._stream_time_ms = each.result.stream_time_ms
                if each.rows:
                    newest = each.result.sequence
        next_offset = decided[-1].record.offset + 1
        return Commit(
            outputs=[each.output for each in decided],
            entries=self._housekeeping.rows(_encoded(rows), newest, next_offset),
            next_offset=next_offset,
            metadata=self.source.metadata(self._stream_time_ms),
            records=[each.record for each in decided],
        )


def _encoded(rows: Sequence[Row | Change]) -> list[Row]:
    """Return the rows without track records that a later row of the batch replaces: these need no encoding."""
    last = {key: place for place, (key, _) in enumerate(rows) if key.startswith(RECORD_PREFIX)}
    return [encode_row(row) for place, row in enumerate(rows) if last.get(row[0], place) == place]
