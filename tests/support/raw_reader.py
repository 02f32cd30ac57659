"""Reading a topic batch by batch, with whatever a producer put into it: the judge's own eyes.

Independent of aiokafka's reader and of the worker's. The topic must fit into memory, and have no transactions.
"""

import asyncio
import gzip
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiokafka.codec as codecs
from aiokafka.conn import create_conn
from aiokafka.errors import for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest

FETCH_BYTES = 32 << 20


@dataclass(frozen=True)
class RawSourceRecord:
    """A record with its header names as bytes; `timestamp` in ms since 1970."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    raw_headers: tuple[tuple[bytes, bytes | None], ...]

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """The headers with readable names: what is not UTF-8 is escaped."""
        return tuple((name.decode("utf-8", "backslashreplace"), value) for name, value in self.raw_headers)

    @property
    def has_bad_header(self) -> bool:
        """Whether a header's name is not UTF-8."""
        try:
            for name, _ in self.raw_headers:
                name.decode()
        except UnicodeDecodeError:
            return True
        return False


@dataclass(frozen=True)
class RawBatch:
    """A batch as it is on the topic: first and last offset, unpacked size (bytes), its records."""

    partition: int
    first: int
    last: int
    unpacked: int
    records: tuple[RawSourceRecord, ...]


def read_batches(bootstrap: str, topic: str) -> list[RawBatch]:
    """Return all batches of a topic on one broker, partition by partition."""
    return asyncio.run(_read(bootstrap, topic))


async def _read(bootstrap: str, topic: str) -> list[RawBatch]:
    host, port = bootstrap.split(",", maxsplit=1)[0].rsplit(":", 1)
    connection = await create_conn(host, int(port), request_timeout_ms=60_000)
    try:
        described = await connection.send(MetadataRequest([topic], allow_auto_topic_creation=False))
        partitions = sorted(part["partition"] for part in described.to_object()["topics"][0]["partitions"])
        batches: list[RawBatch] = []
        for partition in partitions:
            offset = 0
            while True:
                request = FetchRequest(0, 0, FETCH_BYTES, 0, [(topic, [(partition, offset, FETCH_BYTES)])], rack_id="")
                answer: Any = await connection.send(request)
                _, [(_, code, high_water, *rest)] = answer.topics[0]
                if code:
                    raise for_code(code)(f"{topic}/{partition}@{offset}")
                found = list(split(partition, rest[-1]))
                batches += found
                offset = found[-1].last + 1 if found else offset
                if offset >= high_water or not found:
                    break
        return batches
    finally:
        connection.close()


def split(partition: int, data: bytes) -> Iterator[RawBatch]:
    """Take the complete batches of a fetch response apart."""
    at = 0
    while at + 61 <= len(data):
        base, length = struct.unpack_from(">qi", data, at)
        if at + 12 + length > len(data):
            return  # cut off by the size of the fetch
        attributes, last_delta, first_ms, max_ms, *_, count = struct.unpack_from(">hiqqqhii", data, at + 21)
        payload = bytes(UNPACK[attributes & 7](data[at + 61 : at + 12 + length]))
        moment = max_ms if attributes & 8 else None
        records = tuple(_records(partition, base, first_ms, moment, count, payload))
        yield RawBatch(partition, base, base + last_delta, len(payload), records)
        at += 12 + length


UNPACK: tuple[Callable[[bytes], bytes], ...] = (
    bytes, gzip.decompress, codecs.snappy_decode, codecs.lz4_decode, codecs.zstd_decode,
)  # fmt: skip
"""By the number of the codec; none has a bound."""


def _records(
    partition: int, base: int, first_ms: int, moment: int | None, count: int, data: bytes
) -> Iterator[RawSourceRecord]:
    at = 0

    def number() -> int:
        nonlocal at
        shift = result = 0
        while True:
            byte = data[at]
            at += 1
            result |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return (result >> 1) ^ -(result & 1)
            shift += 7

    def content() -> bytes | None:
        nonlocal at
        size = number()
        if size < 0:
            return None
        at += size
        return data[at - size : at]

    for _ in range(count):
        number()  # length
        at += 1  # attributes
        delta, offset = number(), number()
        key, value = content(), content()
        headers = tuple((content() or b"", content()) for _ in range(number()))
        timestamp = first_ms + delta if moment is None else moment
        yield RawSourceRecord(partition, base + offset, timestamp, key, value, headers)
