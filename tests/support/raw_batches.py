"""Record batches byte by byte, for what no client library sends but every broker takes.

Kafka's record batch format (magic 2), written apart from the worker's reader of batches: the two check each other.
"""

import asyncio
import gzip
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiokafka.codec as codecs
from aiokafka.conn import create_conn
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c

CODECS: Final[Mapping[str, int]] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
COMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "none": bytes, "gzip": gzip.compress, "snappy": codecs.snappy_encode, "lz4": codecs.lz4_encode,
    "zstd": codecs.zstd_encode,
}  # fmt: skip


@dataclass(frozen=True)
class RawRecord:
    """A record as it is written: header names are bytes, so they may be anything. `timestamp_ms` None: now."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = field(default_factory=tuple)
    timestamp_ms: int | None = None


def varint(number: int) -> bytes:
    """Encode a zigzag varint."""
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number & ~0x7F:
        out.append((number & 0x7F) | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _nullable(content: bytes | None) -> bytes:
    return varint(-1) if content is None else varint(len(content)) + content


def encode_record(record: RawRecord, offset_delta: int, timestamp_delta: int) -> bytes:
    parts = [b"\0", varint(timestamp_delta), varint(offset_delta), _nullable(record.key), _nullable(record.value)]
    parts.append(varint(len(record.headers)))
    for name, value in record.headers:
        parts += [varint(len(name)), name, _nullable(value)]
    body = b"".join(parts)
    return varint(len(body)) + body


def compress(payload: bytes, codec: str) -> bytes:
    """Compress as producers do."""
    return bytes(COMPRESS[codec](payload))


def encode_batch(records: Sequence[RawRecord], codec: str = "none") -> bytes:
    now = int(time.time() * 1000)
    times = [now if record.timestamp_ms is None else record.timestamp_ms for record in records]
    payload = b"".join(
        encode_record(record, delta, moment - times[0])
        for delta, (record, moment) in enumerate(zip(records, times, strict=True))
    )
    return batch_of(compress(payload, codec), len(records), codec, times[0], max(times))


def batch_of(payload: bytes, count: int, codec: str, first_ms: int, last_ms: int) -> bytes:
    """Put the batch header before a payload that is compressed already."""
    after_crc = struct.pack(">hiqqqhii", CODECS[codec], count - 1, first_ms, last_ms, -1, -1, -1, count) + payload
    crc = calc_crc32c(after_crc)
    return struct.pack(">qiibI", 0, len(after_crc) + 9, -1, 2, crc) + after_crc


def blank_bomb(size: int, *, moment_ms: int | None = None) -> bytes:
    """Return a gzip batch of one record whose value, which is never held, has `size` bytes: "{}" and blanks."""
    now = int(time.time() * 1000) if moment_ms is None else moment_ms
    before = b"\0" + varint(0) + varint(0) + _nullable(None) + varint(size) + b"{}"
    times, rest = divmod(size - 2, 1 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(varint(len(before) + size - 2 + 1) + before)]
    parts += [packer.compress(b" " * (1 << 20)) for _ in range(times)]
    parts += [packer.compress(b" " * rest + varint(0)), packer.flush()]
    return batch_of(b"".join(parts), 1, "gzip", now, now)


async def produce_batches(bootstrap: str, topic: str, batches: Iterable[tuple[int, bytes]]) -> list[int]:
    """Send batches as they are to their partitions (one broker); return the first offset of each. Raises KafkaError."""
    host, port = bootstrap.split(",", maxsplit=1)[0].rsplit(":", 1)
    connection = await create_conn(host, int(port), request_timeout_ms=60_000)
    offsets = []
    try:
        for partition, batch in batches:
            answer = await connection.send(
                ProduceRequest(
                    required_acks=-1, timeout=60_000, topics=[(topic, [(partition, batch)])], transactional_id=None
                )
            )
            _, [(_, code, offset, *rest)] = answer.topics[0]
            if code:
                raise for_code(code)(f"{topic}/{partition}: code {code} {rest}")
            offsets.append(int(offset))
    finally:
        connection.close()
    return offsets


def produce_batch(bootstrap: str, topic: str, partition: int, batch: bytes) -> int:
    """Send one batch; return its first offset."""
    return asyncio.run(produce_batches(bootstrap, topic, [(partition, batch)]))[0]
