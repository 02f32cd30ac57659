"""The first step: a record with spans is taken apart by trace id, and its partition's time goes on.

The time is that of the records, as their producer (the Collector) set it. A record from the far future or without a
time does not move it. What counts as the future is told by the clock or, where that is behind the records, by how long
it is since the last one.
"""

from __future__ import annotations

import logging
import zlib
from typing import Final

from worker.assemble.rows import MAX_RUN_BYTES, Mark, Part, packed
from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.runs.otlp.spans import InvalidSpans, Refused, split

log = logging.getLogger(__name__)

AHEAD_MS: Final = 3_600_000
"""How far ahead of the clock a record may be dated and still count, as of now: so much Kafka accepts by default
(log.message.timestamp.after.max.ms, since 4.0). A clock that is some minutes fast makes no difference then."""

EARLIEST_MS: Final = 946_684_800_000
"""The year 2000. Earlier times are those of producers that set none."""


def partition_of(trace_id: str, partitions: int) -> int:
    """Return the partition of the topic of spans that a trace belongs to."""
    return zlib.crc32(trace_id.encode()) % partitions


class Spread:
    """The time of one partition of a topic with spans, and its records by trace id. Times are ms since 1970."""

    def __init__(self, topic: str, partition: int, time_ms: int | None) -> None:
        self.time_ms = time_ms
        self._set_ms: int | None = None
        self._warned = False
        self._topic = topic
        self._partition = partition

    def take(self, record: SourceRecord, now_ms: int, refused: list[Refused] | None = None) -> dict[str, Part]:
        """Return a record's parts by trace id; add what is bad in it to `refused`.

        Raises InvalidTrace for a record that cannot be read, whatever its reader raises.
        """
        time_ms = self._time(record.timestamp_ms, now_ms)
        if record.fault is not None:
            raise InvalidTrace(record.fault.reason, "", record.fault.message)
        try:
            contents = split(record.value or b"", refused)
            if max(map(len, contents.values()), default=0) > MAX_RUN_BYTES:
                words = f"the spans of one trace have more than {MAX_RUN_BYTES} bytes; send them in several records"
                raise InvalidSpans("too_large", "", words)
            return {
                trace_id: Part(time_ms, self._topic, self._partition, record.offset, len(content), packed(content))
                for trace_id, content in contents.items()
            }
        except InvalidSpans as error:
            raise InvalidTrace(Reason(error.reason), error.path, error.message) from error
        except Exception as error:  # no record may stop the others
            log.exception("%s/%d offset %d: the record cannot be read", record.topic, record.partition, record.offset)
            words = f"{type(error).__name__} while the spans were read; report it with this record"
            raise InvalidTrace(Reason.ASSEMBLY_FAILED, "", words) from error

    def mark(self, read_ms: int | None = None, waited_ms: int = 0) -> Mark:
        """Return how far the partition is read; `read_ms` and `waited_ms` as in Mark."""
        return Mark(self._topic, self._partition, self.time_ms, read_ms, waited_ms)

    def _time(self, timestamp_ms: int | None, now_ms: int) -> int:
        """Return the time of a record, and let the partition's time go on. The clock must not go back."""
        clock_ms = now_ms
        if self._set_ms is None:
            self._set_ms = now_ms
        if self.time_ms is not None:
            now_ms = max(now_ms, self.time_ms + now_ms - self._set_ms)
        if timestamp_ms is not None and timestamp_ms > now_ms + AHEAD_MS and not self._warned:
            self._warned = True
            log.warning(
                "%s/%d: a record is dated more than an hour after this machine's clock, and its time does not count; "
                "correct the clock here, or its producer's. Until a record's time counts, no run closes "
                "(docs/opentelemetry.md)",
                self._topic,
                self._partition,
            )
        if timestamp_ms is None or not EARLIEST_MS <= timestamp_ms <= now_ms + AHEAD_MS:
            return now_ms if self.time_ms is None else self.time_ms
        time_ms = timestamp_ms if self.time_ms is None else min(timestamp_ms, now_ms)
        if self.time_ms is None or time_ms > self.time_ms:
            self.time_ms, self._set_ms = time_ms, clock_ms
        return time_ms
