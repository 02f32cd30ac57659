"""The records that a consumer gets from a fetch response, in place of aiokafka's PartitionRecords and FetchResult."""

from __future__ import annotations

from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.core.records import RECORD_OVERHEAD, Fault, SourceRecord, memory_size
from worker.kafka.aiokafka_private import FetchResult, PartitionRecords, read_fetches_with
from worker.kafka.reading.batches import Batches, FetchedBatch
from worker.kafka.reading.budget import NoRoom
from worker.kafka.reading.faults import MAX_BATCH_BYTES, UnreadableError, place, set_default_bound


def install_reader(max_batch_bytes: int = MAX_BATCH_BYTES) -> None:
    """Let every consumer of this process read with these classes; another bound applies to new fetches."""
    set_default_bound(max_batch_bytes)
    read_fetches_with(Batches, PartitionReader, PartitionFetch)


class PartitionReader(PartitionRecords):
    """Reads the batches of one partition, and continues where aiokafka's reader would stop."""

    def __init__(self, tp: TopicPartition, records: Batches, *rest: Any) -> None:
        super().__init__(tp, records, *rest)
        self.tp = tp
        self.batches = records
        self._expected = self._end = 0
        self._complete = False
        self._source_records = records.reading.source_records
        records.belong_to(self)

    def recovers(self, error: Exception) -> bool:
        """Whether the batch on which aiokafka's parser failed can be read again, by ours."""
        return not isinstance(error, UnreadableError) and self.batches.read_slowly()

    def expect(self, batch: FetchedBatch) -> None:
        """Prepare for the batch's offsets: a wrong one would let aiokafka skip records."""
        self._end = batch.next_offset
        self._complete = not batch.slow and batch.head.records == batch.head.last_delta + 1
        self._expected = max(batch.base_offset, self.next_fetch_offset)

    def missed(self) -> bool:
        """Whether the batch that was read had other offsets than its header says; the position is reset then."""
        missed = self._complete and self._expected < self._end
        self._complete = False
        if missed:
            self.next_fetch_offset = self._expected
        return missed

    def consumer_record(self, tp: TopicPartition, record: Any) -> ConsumerRecord | SourceRecord:
        """Return the consumer's record for a parsed one. Raises ValueError, UnreadableError."""
        offset = record.offset
        if offset != self._expected and (self._complete or not self._expected < offset < self._end):
            self._complete = False
            raise ValueError("a record's offset does not follow the one before")
        self._expected = offset + 1
        fault = record.checksum
        if isinstance(fault, Fault) and not self.batches.reading.tolerant:
            raise UnreadableError(f"{place(tp, offset, fault.first_offset)}: {fault.reason}: {fault.message}")
        if self.deserializes:
            return super().consumer_record(tp, record)
        key, value, headers = record.key, record.value, record.headers
        if self._source_records:
            size = memory_size(key, value, headers)
            fault = fault if isinstance(fault, Fault) else None
            return SourceRecord(
                tp.topic, tp.partition, offset, record.timestamp, key, value, tuple(headers), size, fault
            )
        return ConsumerRecord(
            tp.topic,
            tp.partition,
            offset,
            record.timestamp,
            record.timestamp_type,
            key,
            value,
            fault,
            -1 if key is None else len(key),
            -1 if value is None else len(value),
            tuple(headers) if headers else (),
        )

    def restart(self) -> None:
        """Continue at the position, with the batch that comes next."""
        self._complete = False
        self.begin_again()

    def close(self) -> None:
        """Drop everything."""
        self.end()
        self.batches.close()


class PartitionFetch(FetchResult):
    """The records fetched from one partition, returned in portions that are also bounded in bytes."""

    def __init__(self, tp: TopicPartition, *, partition_records: PartitionReader, **rest: Any) -> None:
        super().__init__(tp, partition_records=partition_records, **rest)
        self._reading = partition_records.batches.reading
        if (former := self._reading.open.get(tp)) is not None:
            former.drop()
        self._reading.open[tp] = self

    def drop(self) -> None:
        """Drop the rest; aiokafka fetches from the position on."""
        records, self.records = self.records, None
        if records is not None:
            records.close()
        if self._reading.budget is not None:
            self._reading.budget.batches.leave(self.tp)
        if self._reading.open.get(self.tp) is self:
            del self._reading.open[self.tp]

    def check_assignment(self, tp: TopicPartition) -> bool:
        """Whether the fetched records are still needed; otherwise drop them."""
        records = self.records
        wanted = records is not None and super().check_assignment(tp)
        if not wanted:
            self.records = records
            self.drop()
        return wanted

    def getone(self) -> ConsumerRecord | SourceRecord | None:
        """Return the next record; None at the end."""
        found = self.getall(1)
        return found[0] if found else None

    def getall(self, max_records: int | None = None) -> list[ConsumerRecord | SourceRecord]:
        """Return the next records, up to the number or about the bytes allowed. Raises NoRoom."""
        reading, records = self._reading, self.records
        if records is None or not self.check_assignment(self.tp):
            return []
        if reading.budget is not None:
            reading.budget.records.room(self.tp)
        found: list[ConsumerRecord | SourceRecord] = []
        size = 0
        for record in records:
            found.append(record)
            size += record.size if reading.source_records else _size(record)
            if size >= reading.fetch_bytes or (max_records is not None and len(found) >= max_records):
                self.update_position()
                if records.batches.make_room():
                    if records.batches.at_end():
                        self.drop()  # now: the response is released and the next one fetched
                    else:
                        records.restart()
                return found
        self.update_position()
        no_room = records.batches.no_room
        if no_room is None:
            self.drop()
        elif not found:
            raise NoRoom(no_room.share, no_room.key)
        return found


def _size(record: ConsumerRecord) -> int:
    """Return about how many bytes of memory a record uses."""
    size = RECORD_OVERHEAD + int(record.serialized_value_size) + int(record.serialized_key_size)
    return size + memory_size(None, None, record.headers) if record.headers else size
