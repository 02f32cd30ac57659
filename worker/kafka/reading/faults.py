"""How a consumer reads record batches: its bounds, and whether it accepts a fault instead of a record.

Without `Reading.tolerant` a consumer gets an UnreadableError instead of a fault: `tail` and `report` must not use a
substitute for a record.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from worker.kafka.reading.budget import Budget

MAX_BATCH_BYTES: Final = 64 << 20
"""The default limit of one batch's unpacked size."""

FETCH_BYTES: Final = 16 << 20
"""Bytes of one fetch from one partition; the worker's own fetches are smaller (faust_consumer.py)."""

CRC_ATTEMPTS: Final = 3
"""How often a batch with a wrong CRC is fetched. If it is still wrong, the disk damaged it, not the network."""


class UnreadableError(KafkaError):  # type: ignore[misc]
    """A record or batch cannot be read, and its reader does not accept a fault; the message says where and why."""


class Fetched(Protocol):
    """Records fetched from one partition and not consumed yet."""

    def drop(self) -> None:
        """Drop the rest; it is fetched again if it is still needed."""
        ...


@dataclass(eq=False, slots=True)
class Reading:
    """How one consumer reads; used in the consumer's thread only. `budget` None: no bound on all partitions together.

    `source_records`: it gets SourceRecord, which saves the worker a ConsumerRecord for each message.
    `attempts`: how often a damaged batch was fetched, by partition and offset.
    """

    max_batch_bytes: int = MAX_BATCH_BYTES
    tolerant: bool = False
    fetch_bytes: int = FETCH_BYTES
    budget: Budget | None = None
    source_records: bool = False
    attempts: Counter[tuple[TopicPartition, int]] = field(default_factory=Counter)
    open: dict[TopicPartition, Fetched] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop all records fetched and not consumed yet; they are fetched again if they are still needed."""
        for fetched in list(self.open.values()):
            fetched.drop()
        self.attempts.clear()

    def fetch_again(self, tp: TopicPartition, offset: int) -> bool:
        """Whether to fetch a damaged batch again."""
        self.attempts[tp, offset] += 1
        if self.attempts[tp, offset] < CRC_ATTEMPTS:
            return True
        del self.attempts[tp, offset]
        return False


_default = Reading()
_reading: ContextVar[Reading | None] = ContextVar("reading", default=None)


def set_default_bound(max_batch_bytes: int) -> None:
    """Set the largest unpacked batch for all consumers without their own `Reading`; it applies to new fetches."""
    _default.max_batch_bytes = max_batch_bytes


def current_reading() -> Reading:
    """Return the `Reading` of the consumer that this task belongs to."""
    return _reading.get() or _default


def read_as(reading: Reading) -> None:
    """Set the `Reading` of the consumers that this task starts from now on (aiokafka's fetch task inherits it)."""
    _reading.set(reading)


@contextlib.contextmanager
def tolerant(max_batch_bytes: int | None = None) -> Iterator[None]:
    """Let the consumers that are started in this context get faults, in `ConsumerRecord.checksum`.

    `max_batch_bytes` None: the bound of all consumers.
    """
    token = _reading.set(Reading(max_batch_bytes or _default.max_batch_bytes, tolerant=True))
    try:
        yield
    finally:
        _reading.reset(token)


def place(tp: TopicPartition, offset: int, first: int | None = None) -> str:
    """Return topic, partition and offset, or the range of offsets from `first` on, as text."""
    offsets = f"offset {offset}" if first in (None, offset) else f"offsets {first} to {offset}"
    return f"{tp.topic}/{tp.partition} {offsets}"
