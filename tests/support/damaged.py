"""Records of a changelog that no worker has written: damaged ones, and what somebody else may write there."""

import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from worker.core.changelog import MARKER_KEY

EXTREMES: Final = (
    -(2**63), -(2**62), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**53 + 1, 10**18 - 1, 10**18, 2**62, 2**63 - 1, 2**63,
    2**64 - 1,
)  # fmt: skip
"""Integers at the ends of what msgpack, Kafka, int64 and double can hold."""

OTHER_TYPES: Final[tuple[Any, ...]] = (None, True, 1.5, float("nan"), float("inf"), "5", "", b"5", [], {}, [[[]]])

QUIET, SIGNALLING, INFINITE = 0x7FC00000, 0x7F800001, 0x7F800000
"""Bits of float32 values that are not finite."""


def entry_fields(
    sequence: int, offset: int, time_ms: int, model: str, vector: npt.NDArray[np.float32], epoch: int = 1
) -> dict[str, Any]:
    return {
        "version": 1, "sequence": sequence, "source_offset": offset, "stream_time_ms": time_ms,
        "trace_id": f"kp:trace:{offset}", "model": model, "vector": vector.astype("<f4").tobytes(),
        "epoch": epoch, "text_hash": b"0123456789abcdef", "agent_id": "agent",
    }  # fmt: skip


def packed(fields: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode(list(fields.values()))


def not_finite(vector: bytes, bits: int, place: int = 0) -> bytes:
    """Return the vector with a number that is not finite."""
    return vector[: 4 * place] + struct.pack("<I", bits) + vector[4 * place + 4 :]


def _scaled(vector: bytes, factor: float) -> bytes:
    with np.errstate(all="ignore"):
        numbers = np.frombuffer(vector[: len(vector) // 4 * 4], "<f4").astype(np.float64)
        return bytes((numbers * factor).astype("<f4").tobytes())


def bad_vectors(vector: bytes) -> dict[str, bytes]:
    """Return vectors that no entry has, made from one of unit length."""
    filled = len(vector) // 4
    return {
        "nan": not_finite(vector, QUIET),
        "signalling nan": not_finite(vector, SIGNALLING, filled - 1),
        "inf": not_finite(vector, INFINITE),
        "-inf": not_finite(vector, INFINITE | 1 << 31, filled // 2),
        "greatest": np.full(filled, np.finfo(np.float32).max, "<f4").tobytes(),
        "denormal": np.full(filled, 1e-45, "<f4").tobytes(),
        "empty": b"",
        "cut": vector[:-1],
        **{f"length {factor}": _scaled(vector, factor) for factor in (1e-30, 1e-3, 0.5, 0.9989, 1.0011, 2.0, 1e30)},
    }


def bad_entries(fields: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, value): entries of which each is damaged, whatever else is on the changelog.

    `fields`: of a valid entry.
    """
    wrong: dict[str, list[Any]] = {
        "version": [0, 2, 2**63],
        "sequence": [-(2**63), -1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, fields["source_offset"] + 1],
        "source_offset": [-(2**63), -1, 2**63, 2**64 - 1],
        "stream_time_ms": [-(2**63), -62_135_596_800_001, 253_402_300_800_000, 2**62, 2**63 - 1, 2**63, 2**64 - 1],
        "trace_id": ["x" * 257, "x" * 100_000],
        "model": ["x" * 100_000],
        "vector": [*bad_vectors(fields["vector"]).values(), "abcd"],
        "epoch": [-1, 10**18, 2**63],
        "text_hash": [b"x", b"x" * 17],
        "agent_id": ["x" * 257],
    }
    for name, values in wrong.items():
        others = [it for it in OTHER_TYPES if not (name == "epoch" and it is None)]
        if isinstance(fields[name], str):
            others = [it for it in others if not isinstance(it, str)]
        if isinstance(fields[name], bytes):
            others = [it for it in others if not isinstance(it, (bytes, str))]
        for value in [*values, *others]:
            yield f"{name}={value!r:.40}", packed({**fields, name: value})
    whole = packed(fields)
    for name in ("trace_id", "agent_id"):
        text = fields[name].encode()
        yield f"{name} is not UTF-8", whole.replace(text, b"\xff" * len(text))
    for size in range(0, len(whole), 3):
        yield f"cut at {size}", whole[:size]
    yield "trailing byte", whole + b"\0"
    yield "no array", msgspec.msgpack.encode(dict(fields))
    yield "empty array", b"\x90"
    yield "nested", b"\x91" * 5000
    yield "not msgpack", b"\xc1" * 50


def bad_markers(topic_id: str) -> Iterator[bytes]:
    """Yield values of the record of the epochs that no worker writes."""
    for field in range(3):
        for value in (*EXTREMES[:4], 10**18, 2**63, 2**64 - 1):
            segment = [1, 0, 0]
            segment[field] = value
            if field == 0 or not 0 <= value <= 2**63 - 1:
                yield msgspec.msgpack.encode([1, topic_id, [segment]])
    yield msgspec.msgpack.encode([1, topic_id, [[n, n, n] for n in range(65)]])
    for start in (4, 5):
        yield msgspec.msgpack.encode([1, topic_id, [[1, 5, 0], [2, start, 0]]])
    yield msgspec.msgpack.encode([1, "x" * 100_000, [[1, 0, 0]]])
    yield msgspec.msgpack.encode([2, topic_id, [[1, 0, 0]]])
    for other in OTHER_TYPES:
        if other != []:
            yield msgspec.msgpack.encode([1, topic_id, other])
    whole = msgspec.msgpack.encode([1, topic_id, [[1, 0, 0]]])
    yield whole.replace(topic_id.encode(), b"\xff" * len(topic_id))
    yield from (whole[:size] for size in range(len(whole)))
    yield whole + b"\0"


def bad_metadata(topic_id: str) -> Iterator[str]:
    """Yield metadata that somebody else commits with an offset."""
    for number in EXTREMES:
        for each in (f"{number}:{topic_id}:1:0", f"5:{topic_id}:{number}:0", f"5:{topic_id}:1:{number}"):
            yield f"kp2:{each}"
        yield f"kp1:{number}"
    yield from ("", "kp2", "kp2:5", "kp2::::", "kp2:::1:" + "9" * 5000, "kp3:5::1:0", "\x00", "kp2:\ud800::1:0")


def mutated(rng: random.Random, values: list[bytes]) -> bytes:
    """Return one of the values with damage of any kind: a field replaced, or bytes."""
    value = rng.choice(values)
    if rng.random() < 0.5:
        fields = msgspec.msgpack.decode(value)
        for _ in range(rng.choice([1, 1, 2])):
            place = rng.randrange(len(fields))
            if isinstance(fields[place], bytes) and len(fields[place]) > 17 and rng.random() < 0.8:
                fields[place] = rng.choice([*bad_vectors(fields[place]).values()])
            elif isinstance(fields[place], list) and fields[place] and rng.random() < 0.7:
                fields[place] = [_replaced(rng, it) for it in fields[place]]
            else:
                fields[place] = _replaced(rng, fields[place])
        return msgspec.msgpack.encode(fields)
    raw = bytearray(value)
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(len(raw) + 1), rng.random()
        if kind < 0.6 and at < len(raw):
            raw[at] = rng.randrange(256)
        elif kind < 0.8:
            del raw[at : at + rng.randint(1, 6)]
        else:
            raw[at:at] = rng.randbytes(rng.randint(1, 6))
    return bytes(raw)


def _replaced(rng: random.Random, value: Any) -> Any:
    if isinstance(value, list):
        return [_replaced(rng, it) if rng.random() < 0.5 else it for it in value]
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(EXTREMES) if isinstance(value, int) else rng.choice(["", "x" * 300, b"", b"x" * 40, value])
    return rng.choice(OTHER_TYPES)


def some_key(rng: random.Random, used: list[bytes]) -> bytes | None:
    """Return a key of the changelog: one that is used, or any."""
    if rng.random() < 0.4:
        return rng.choice(used)
    odd = [None, b"", b"::", b"1:2:", b"7", b"9" * 5000, b"\xff\xfe", b"forgotten:x:y"]
    some = [MARKER_KEY, b"1:1034:%d" % rng.randrange(2000)]
    return rng.choice([*odd, *some, b"%d:%d:%d" % tuple(rng.choices(range(3000), k=3))])
