"""Hostile and odd records among good ones, and what must become of them.

Belongs here: batches of every kind that a broker accepts and a careless worker does not survive, a thread that sends
them, and the reading of a source topic that holds them.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.support.kafka_fixtures import Record
from tests.support.raw_batches import CODECS, RawRecord, blank_bomb, encode_batch, produce_batch_async
from tests.support.raw_reader import RawSourceRecord, read_batches

MAX_BATCH_BYTES: Final = 4 << 20
"""KP_MAX_BATCH_BYTES of the workers under test; every batch of this module is far from it, on one side or the other."""

MAX_MESSAGE_BYTES: Final = 1 << 20
DAY_MS: Final = 86_400_000

OUTPUT_CONFIG: Final = {"message.timestamp.after.max.ms": "600000"}
"""Settings of the accepted and rejected topics: they refuse what is dated tomorrow."""

SOURCE_CONFIG: Final = {"message.timestamp.after.max.ms": str(30 * DAY_MS)}


@dataclass(frozen=True)
class UnreadBatch:
    """All of a batch that a worker must not unpack; it counts as one record, at its last offset."""

    partition: int
    first: int
    offset: int


SourceRecord = RawSourceRecord | UnreadBatch


def source(bootstrap: str, topic: str) -> list[SourceRecord]:
    """Return what is on the source topic, a batch that unpacks to too much as one."""
    found: list[SourceRecord] = []
    for batch in read_batches(bootstrap, topic):
        if batch.unpacked > MAX_BATCH_BYTES:
            found.append(UnreadBatch(batch.partition, batch.first, batch.last))
        else:
            found += batch.records
    return found


def reason(record: SourceRecord) -> str | None:
    """Return the reason of the dead letter that must come of a record before it is parsed, or None."""
    if isinstance(record, UnreadBatch):
        return "batch_too_large"
    if record.has_bad_header:
        return "bad_header"
    size = len(record.key or b"") + len(record.value or b"")
    size += sum(2 + len(name) + len(value or b"") for name, value in record.raw_headers)
    return "too_large" if size > MAX_MESSAGE_BYTES else None


def refused(record: SourceRecord) -> bool:
    """Whether the output topics refuse the scored trace: it is dated later than they allow."""
    return isinstance(record, RawSourceRecord) and record.timestamp > time.time() * 1000 + DAY_MS / 2


def batches(seed: int, good: Iterator[Record]) -> Iterator[tuple[str, int, bytes]]:
    """Yield (kind, partition, batch) without end: one to six records, good ones and those of the kind mixed."""
    rng = random.Random(seed)
    kinds: dict[str, Callable[[RawRecord], RawRecord]] = {
        "codec": lambda record: record,
        "bad_header": lambda record: _with_header(record, b"caf\xe9"),
        "future": lambda record: RawRecord(
            record.value, record.key, record.headers, int(time.time() * 1000) + 20 * DAY_MS
        ),
        "emoji": lambda record: _with_header(record, "\N{FIRE}".encode() * 560),
        "null_key": lambda record: RawRecord(record.value, None, record.headers, record.timestamp_ms),
        "large_key": lambda record: RawRecord(b"{}", b"k" * 3_000_000, record.headers, record.timestamp_ms),
        "headers": lambda record: RawRecord(record.value, record.key, ((b"", b""),) * 600_000, record.timestamp_ms),
    }
    while True:
        kind = rng.choices(["bomb", *kinds], [2, 40, 20, 15, 10, 10, 3, 3])[0]
        partition, of_partition = _some(rng, good)
        if kind == "bomb":
            yield kind, partition, blank_bomb(2 * MAX_BATCH_BYTES, moment_ms=of_partition[0].timestamp_ms)
            continue
        records = [kinds[kind](record) if rng.random() < 0.5 else record for record in of_partition]
        large = kind in ("large_key", "headers")
        yield (
            kind,
            partition,
            encode_batch(records[:1] if large else records, "gzip" if large else rng.choice([*CODECS])),
        )


def _some(rng: random.Random, good: Iterator[Record]) -> tuple[int, list[RawRecord]]:
    """Return one to six good records of one partition."""
    first = next(good)
    records = [first, *(record for record, _ in zip(good, range(rng.randrange(20)), strict=False))]
    mine = [record for record in records if record.partition == first.partition][:6]
    return first.partition or 0, [
        RawRecord(r.value, r.key, [(name.encode(), value) for name, value in r.headers], r.timestamp_ms) for r in mine
    ]


def _with_header(record: RawRecord, name: bytes) -> RawRecord:
    headers: Sequence[tuple[bytes, bytes | None]] = [*record.headers, (name, b"value")]
    return RawRecord(record.value, record.key, headers, record.timestamp_ms)


class HostileLoad(threading.Thread):
    """Sends such batches at `rate` a second until it is told to stop, whatever happens to the broker.

    A batch whose answer was lost is sent again and may be there twice: the judge reads the topic.
    """

    def __init__(self, bootstrap: str, topic: str, found: Iterator[tuple[str, int, bytes]], rate: float) -> None:
        super().__init__(name="hostile", daemon=True)
        self._arguments = bootstrap, topic, found, rate
        self._enough = threading.Event()
        self.sent: Counter[str] = Counter()

    def run(self) -> None:
        """Send."""
        asyncio.run(self._send(*self._arguments))

    def finish(self, timeout: float) -> None:
        """Stop, and wait for the last answer."""
        self._enough.set()
        self.join(timeout)
        if self.is_alive():
            raise AssertionError("the hostile producer is still at work")

    async def _send(self, bootstrap: str, topic: str, found: Iterator[tuple[str, int, bytes]], rate: float) -> None:
        for kind, partition, batch in found:
            while not self._enough.is_set():
                try:
                    await produce_batch_async(bootstrap, topic, partition, batch)
                except Exception:  # the broker is away: chaos does that
                    await asyncio.sleep(0.5)
                else:
                    self.sent[kind] += 1
                    break
            if self._enough.is_set():
                return
            await asyncio.sleep(1 / rate)
