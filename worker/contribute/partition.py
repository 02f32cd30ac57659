"""One partition of the accepted topic: its records in order, each posted, refused or skipped before the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.contribute.delivery import Delivered, Delivery, DeniedError, Gateway, Stop, StoppedError
from worker.contribute.receipts import ReceiptPublisher, ReceiptQueue
from worker.contribute.unit import Gate, Refusal, Skip, Unit, clean_words, receipt, refused_record, unit_from
from worker.core.records import Fault, OutputRecord, SourceRecord
from worker.core.trace import Limits
from worker.observe.contribute_metrics import ContributeMetrics

log = logging.getLogger(__name__)

POLL_MS = 500
MAX_RECORDS = 50
"""Records taken at once: few, as each takes a request."""


@dataclass(eq=False)
class ContributePartition:
    """The work on one assigned partition. `next_offset`: the committed one. `idle`: nothing waits."""

    tp: TopicPartition
    consumer: AIOKafkaConsumer
    publisher: ReceiptPublisher
    delivery: Delivery
    gateway: Gateway
    metrics: ContributeMetrics
    gate: Gate
    limits: Limits
    next_offset: int = 0
    idle: bool = False
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        self._receipts = ReceiptQueue(self.publisher, lambda: limited_metadata(self.gateway.limited_at))

    async def run(self) -> None:
        """Work until stopped. Raises StoppedError, when all that was done is committed."""
        try:
            while True:
                self.stop.check()
                found = await self.consumer.getmany(self.tp, timeout_ms=POLL_MS, max_records=MAX_RECORDS)
                records = found.get(self.tp, [])
                if not records:
                    await self._receipts.flush()
                    self.idle = True
                for record in records:
                    self.idle = False
                    self.stop.check()
                    await self._handle(record)
        except (StoppedError, DeniedError):
            await self._receipts.flush()
            raise

    async def _handle(self, record: ConsumerRecord) -> None:
        source = _source(record)
        work = _unreadable(source.fault) if source.fault else unit_from(record.value, self.gate, self.limits)
        if isinstance(work, Skip):
            await self._done(record, None, self.metrics.skipped.labels(work.reason).inc)
            return
        if isinstance(work, Unit):
            result = await self.delivery.deliver(work, self.stop, partial(self._remember_429, record.offset))
            if isinstance(result, Delivered):
                output = receipt(source, work, result.status, result.time)
                await self._done(record, output, partial(self._count, work, result))
                return
            work = result
        await self._done(
            record, refused_record(source, work, self.gate.rules), self.metrics.refused.labels(work.reason).inc
        )
        log.warning(
            "refused for good: %s%s", work.message, f" {work.issues}" if work.issues else "",
            extra={"topic": source.topic, "partition": source.partition, "offset": source.offset,
                   "reason": work.reason, "path": work.path},
        )  # fmt: skip

    async def _done(self, record: ConsumerRecord, output: OutputRecord | None, count: Callable[[], None]) -> None:
        def committed() -> None:
            self.next_offset = record.offset + 1
            count()

        await self._receipts.add(output, record.offset + 1, committed)

    async def _remember_429(self, offset: int) -> None:
        """Commit the time of the 429: a process that takes over must wait, too."""
        await self._receipts.add(None, offset, lambda: None)
        await self._receipts.flush()

    def _count(self, unit: Unit, result: Delivered) -> None:
        (self.metrics.posted if result.status == 201 else self.metrics.found).inc()
        for kind, number in unit.redactions.items():
            self.metrics.redactions.labels(kind).inc(number)


def _source(record: ConsumerRecord) -> SourceRecord:
    timestamp = record.timestamp if record.timestamp is not None and record.timestamp >= 0 else None
    fault = record.checksum if isinstance(record.checksum, Fault) else None
    return SourceRecord(
        record.topic, record.partition, record.offset, timestamp, record.key, record.value, record.headers, 0, fault
    )


def _unreadable(fault: Fault) -> Refusal:
    return Refusal("unreadable", clean_words(fault.message))


LIMITED = "kp429:"


def limited_metadata(limited_at: float | None) -> str:
    """Return the metadata that is committed with an offset: the time of the last 429, seconds since 1970."""
    return "" if limited_at is None else f"{LIMITED}{round(limited_at)}"


def limited_from(metadata: str) -> float | None:
    """Read the time of the last 429 from committed metadata; None if there is none."""
    number = metadata.removeprefix(LIMITED)
    return float(number) if metadata.startswith(LIMITED) and number.isdigit() and len(number) < 16 else None
