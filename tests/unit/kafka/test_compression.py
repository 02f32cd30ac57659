"""Bounded decompression: what each codec makes, cut, lying and hostile input, and that the bound holds."""

import contextlib
import gzip
import random
import struct

import cramjam
import pytest

from tests.support.raw_batches import CODECS, compress
from worker.kafka.record_batch import CorruptError, TooLargeError, decompress

CODEC_NAMES = [name for name in CODECS if name != "none"]
LIMIT = 4 << 20


def taken(payload: bytes, codec: str, limit: int = LIMIT) -> bytes:
    return bytes(decompress(memoryview(payload), CODECS[codec], limit))


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("size", [1, 1000, 200_000, LIMIT - 1, LIMIT])
def test_what_fits_is_unpacked(codec: str, size: int) -> None:
    content = random.Random(size).randbytes(min(size, 5000)) * (size // 5000 + 1)
    content = content[:size]
    payload = compress(content, codec)
    assert taken(payload, codec) == content
    assert bytes(decompress(memoryview(payload), CODECS[codec], LIMIT, b"head")) == b"head" + content
    if size > 1:
        with pytest.raises(TooLargeError):
            taken(payload, codec, size - 1)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_input_that_is_cut_or_changed_is_corrupt_too_large_or_something_else(codec: str, seed: int) -> None:
    rng = random.Random(seed)
    payload = compress(b"some text, some more text " * 300, codec)
    for cut in range(len(payload)):
        with contextlib.suppress(CorruptError, TooLargeError):  # xerial's framing has no end that could be missing
            assert len(taken(payload[:cut], codec)) <= LIMIT
    for _ in range(3000):
        changed = bytearray(payload)
        for _ in range(rng.randint(1, 5)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(CorruptError, TooLargeError):
            assert len(taken(bytes(changed), codec, 100_000)) <= 100_000


def test_gzip_of_several_members_and_zeros_behind() -> None:
    assert taken(gzip.compress(b"one ") + gzip.compress(b"two") + bytes(20), "gzip") == b"one two"
    with pytest.raises(CorruptError):
        taken(gzip.compress(b"one") + b"rubbish", "gzip")


def test_raw_snappy_and_what_a_block_claims() -> None:
    assert taken(bytes(cramjam.snappy.compress_raw(b"abc" * 1000)), "snappy") == b"abc" * 1000
    with pytest.raises(TooLargeError):
        taken(b"\xff\xff\xff\xff\x0f" + b"abc", "snappy")
    framed = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    with pytest.raises(CorruptError):
        taken(framed + struct.pack(">i", 1 << 30) + b"abc", "snappy")
    block = bytes(cramjam.snappy.compress_raw(b"abc" * 1000))
    assert taken(framed + 2 * (struct.pack(">i", len(block)) + block), "snappy") == b"abc" * 2000
    for size in (0, -1, len(block) + 1):
        with pytest.raises(CorruptError, match="a block does not fit"):
            taken(framed + struct.pack(">i", size) + block, "snappy")


def test_zstd_windows_and_sizes_that_lie() -> None:
    magic = struct.pack("<I", 0xFD2FB528)
    block = struct.pack("<I", (1 << 17) << 3 | 2 | 1)[:3] + b"b"
    for head in (b"\x00\xff", b"\xa0" + struct.pack("<I", 1 << 31)):  # a window of 3.75 TiB; a size of 2 GiB
        with pytest.raises(CorruptError):
            taken(magic + head + block, "zstd")


def test_cramjam_still_says_that_the_buffer_is_full() -> None:
    for codec in (cramjam.lz4, cramjam.zstd):
        with pytest.raises(cramjam.DecompressionError, match="failed to write whole buffer"):
            codec.decompress_into(bytes(codec.compress(b"x" * 5000)), bytearray(4999))


def test_an_unknown_codec_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="codec 5"):
        decompress(memoryview(b"x"), 5, LIMIT)
