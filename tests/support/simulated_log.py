"""A compacted topic in memory: what Kafka holds for one partition."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.support.builders import TOPIC_ID, TextEmbedder
from worker.core.changelog import Kind, committed_from, kind_of
from worker.core.records import OutputRecord, SourceRecord
from worker.core.restore import Log, ModelCache, Restored, SourcePosition, restore
from worker.kafka.publisher import Commit

DIMENSIONS = 6
IDENTITY = TextEmbedder(DIMENSIONS).identity


class Consumed(NamedTuple):
    """A record, as a consumer has it."""

    kind: str  # of output; "": the source
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


def consumed(record: SourceRecord) -> Consumed:
    headers, time = tuple(record.headers), _time(record.timestamp_ms)
    return Consumed("", record.partition, record.offset, record.key, record.value, headers, time)


def published(output: OutputRecord) -> Consumed:
    kind = output.kind.replace("_", "-")
    return Consumed(kind, 0, 0, output.key, output.value, tuple(output.headers), _time(output.timestamp_ms))


def _time(ms: int | None) -> int:
    return 2**62 if ms is None or ms < 0 else ms  # the event time is then the trace's own


Record = tuple[int, bytes, bytes | None]
"""Offset on the changelog, key, value."""


class Topics:
    """The changelog, the outputs, and the group's offset."""

    def __init__(self, topic_id: str = TOPIC_ID) -> None:
        self.topic_id = topic_id
        self.log: list[Record] = []
        self.outputs: list[Consumed] = []
        self.offset = 0
        self.metadata: str | None = None  # None: no offset is committed

    def without_outputs(self) -> "Topics":
        """Return a copy on which another worker may go on."""
        copy = Topics(self.topic_id)
        copy.log, copy.offset, copy.metadata = [*self.log], self.offset, self.metadata
        return copy

    def commit(self, batch: Commit) -> None:
        """Make a whole transaction visible."""
        self.write(batch)
        self.offset = batch.next_offset
        self.metadata = batch.metadata

    def write(self, batch: Commit, count: int | None = None) -> None:
        """Make the first `count` records of a batch visible, entries first, all without a count."""
        for key, value in batch.entries[:count]:
            self.log.append((self.log[-1][0] + 1 if self.log else 0, key, value))
        left = None if count is None else max(0, count - len(batch.entries))
        self.outputs += map(published, batch.outputs[:left])

    def compacted(self) -> list[Record]:
        """Return the log as compaction leaves it: the last record of each key, no tombstones; never without its end."""
        last = {key: position for position, key, _ in self.log}
        end = self.log[-1][0] if self.log else 0
        return [it for it in self.log if it[0] == end or (it[2] is not None and last[it[1]] == it[0])]

    def entries(self) -> Mapping[bytes, bytes]:
        """Return the live entries of the cache."""
        return {key: value for _, key, value in self.compacted() if value is not None and kind_of(key) is Kind.ENTRY}

    def restored(self, capacity: int) -> Restored:
        """Read the changelog as worker/kafka/assignment.py does; whether compaction has run makes no difference."""
        committed = None if self.metadata is None else committed_from(self.metadata)
        recreated = committed is not None and committed.topic_id not in (None, self.topic_id)
        if recreated:
            committed, self.offset = None, 0
        found = SourcePosition(self.offset, self.metadata is not None, committed, self.topic_id, recreated)
        whole, compact = (_read(records, found, capacity) for records in (self.log, self.compacted()))
        assert (whole.entries, whole.replay) == (compact.entries, compact.replay)
        assert whole.report.current == compact.report.current
        assert not whole.report.skipped["corrupt"]
        return whole


def _read(records: Sequence[Record], found: SourcePosition, capacity: int) -> Restored:
    log = Log()
    for position, key, value in records:
        log.apply(key, value, position)
    return restore(log, found, ModelCache(IDENTITY.key(), DIMENSIONS, capacity))
