"""The reader of record batches: as aiokafka's own where that can read, past what cannot be read, bounded in memory."""

import random
import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from tests.support.hostile import KINDS, MAX_BATCH_BYTES, good_record
from tests.support.raw_batches import CODECS, RawRecord, batch_of, blank_bomb, encode_batch, varint
from worker.core.records import SourceRecord, memory_size
from worker.core.trace import Reason
from worker.kafka import fetches
from worker.kafka.budget import Budget, NoRoom
from worker.kafka.fetches import PartitionFetch, PartitionReader, Reading, Response, UnreadableError
from worker.kafka.record_batch import HEADER, Head, parse

TP = TopicPartition("traces", 0)
T0 = 1_776_153_600_000


def at(offset: int, batch: bytes) -> bytes:
    """Return the batch as a broker keeps it: with its offset."""
    return struct.pack(">q", offset) + batch[8:]


def sealed(batch: bytes) -> bytes:
    """Return the batch with its length and CRC made right."""
    batch = batch[:8] + struct.pack(">i", len(batch) - 12) + batch[12:]
    return batch[:17] + struct.pack(">I", calc_crc32c(batch[21:])) + batch[21:]


async def result_of(
    data: bytes, position: int = 0, reading: Reading | None = None, aborted: Sequence[tuple[int, int]] = (),
    tp: TopicPartition = TP,
) -> Any:  # fmt: skip
    """Return what aiokafka's fetcher makes of a response."""
    subscriptions = SubscriptionState()
    subscriptions.assign_from_user({tp})
    assignment = subscriptions.subscription.assignment
    assignment.state_value(tp).reset_to(position)
    response = Response(data)
    assert response.has_next() == bool(data)
    reader = PartitionReader(
        reading or Reading(tolerant=True), tp, response, aborted, position, None, None, True, fetcher.READ_COMMITTED
    )
    return PartitionFetch(tp, partition_records=reader, assignment=assignment, backoff=0.1)


async def read(data: bytes, position: int = 0, **how: Any) -> list[SourceRecord]:
    result = await result_of(data, position, **how)
    found: list[SourceRecord] = []
    while result.has_more():
        found += result.getall(512)
    return found


def theirs(data: bytes, position: int = 0, aborted: Sequence[tuple[int, int]] = ()) -> list[SourceRecord]:
    """Return what aiokafka's reader finds."""
    return [
        SourceRecord(
            r.topic,
            r.partition,
            r.offset,
            r.timestamp,
            r.key,
            r.value,
            r.headers,
            memory_size(r.key, r.value, r.headers),
        )
        for r in fetcher.PartitionRecords(
            TP, MemoryRecords(data), list(aborted), position, None, None, True, fetcher.READ_COMMITTED
        )
    ]


def records(count: int, size: int = 20, **more: Any) -> list[RawRecord]:
    return [RawRecord(b"%d" % n * size, b"k%d" % n, timestamp_ms=T0 + n, **more) for n in range(count)]


def faults(found: Sequence[SourceRecord]) -> dict[int, tuple[Reason, int | None]]:
    return {r.offset: (r.fault.reason, r.fault.first_offset) for r in found if r.fault is not None}


def message(record: SourceRecord) -> str:
    assert record.fault is not None
    return record.fault.message


@pytest.mark.parametrize("codec", CODECS)
async def test_good_batches_read_as_by_aiokafka(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by its parser, which is fast."""
    monkeypatch.setattr(fetches, "parse", None)
    data = at(10, encode_batch(records(700, headers=((b"a", b"1"), (b"b", None))), codec))
    data += at(710, encode_batch(records(3), "none")) + at(720, encode_batch([RawRecord(None), RawRecord(b"")], codec))
    for position in (0, 10, 400, 710, 721):
        assert await read(data, position) == theirs(data, position)


def message_set(magic: int, codec: int) -> bytes:
    """Return three messages, of offsets 0 to 2, as producers before Kafka 0.11 wrote them; codec 1 is gzip."""
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 20)
    for offset in range(3):
        assert builder.append(offset, T0 + offset if magic else None, None if offset else b"key", b"value")
    return at(2 if codec else 0, bytes(builder.build()))  # a broker gives compressed ones the offset of the last


@pytest.mark.parametrize("codec", [0, 1], ids=["none", "gzip"])
@pytest.mark.parametrize("magic", [0, 1])
async def test_messages_of_before_0_11_are_passed_over(magic: int, codec: int) -> None:
    """What is compressed is one message around the others, at the offset of the last."""
    data = message_set(magic, codec) + at(3, encode_batch(records(2)))
    for position in (0, 1, 2) if codec else (0,):  # a response begins with the message, or set, of the position
        found = await read(data, position)
        letters = [2] if codec else [0, 1, 2]
        assert [it.offset for it in found] == [*letters, 3, 4]
        first = {2: position} if codec else {0: 0, 1: 1, 2: 2}
        assert faults(found) == {offset: (Reason.UNREADABLE, first[offset]) for offset in letters}
        letter = found[0]
        assert message(letter).startswith(f"message format {magic}, ")
        assert (letter.key, letter.value, letter.headers, letter.timestamp_ms) == (None, None, (), -1)
    result = await result_of(data, 0, Reading())
    with pytest.raises(UnreadableError, match=rf"traces/0 offsets? 0.*: unreadable: message format {magic}"):
        result.getall()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bomb"])
async def test_every_hostile_kind_is_read_past(kind: str) -> None:
    """The bomb has a test of its own, which measures it. What a topic refuses, or has no JSON, is no fault here."""
    batch = KINDS[kind].batch(good_record(1, T0))
    count, letters = int.from_bytes(batch[57:61], "big"), KINDS[kind].letters
    data = at(0, encode_batch(records(2))) + at(2, batch) + at(2 + count, encode_batch(records(2)))
    found = await read(data, reading=Reading(MAX_BATCH_BYTES, tolerant=True))
    unread = {"bad_header", "batch_too_large", "unreadable"}
    assert {offset - 2: reason for offset, (reason, _) in faults(found).items() if reason in unread} == {
        place: reason for place, reason in letters.items() if reason in unread
    }
    whole = "batch_too_large" in letters.values()
    assert [it.offset for it in found] == [0, 1, *range(1 + count if whole else 2, 4 + count)]


async def test_a_header_name_that_is_not_utf8_is_escaped_and_its_neighbours_are_untouched() -> None:
    bad = RawRecord(b"v", b"k", ((b"ok", b"1"), (b"caf\xe9", b"2"), (b"n", None)), T0)
    for codec in CODECS:
        data = at(5, encode_batch([*records(2), bad, *records(2)], codec))
        found = await read(data)
        assert [r.offset for r in found] == [5, 6, 7, 8, 9]
        assert faults(found) == {7: (Reason.BAD_HEADER, None)}
        assert (found[2].key, found[2].value, found[2].timestamp_ms) == (b"k", b"v", T0)
        assert found[2].headers == (("ok", b"1"), ("caf\\xe9", b"2"), ("n", None))
        assert "header 2 of 3" in message(found[2])
        assert r"caf\\xe9" in message(found[2])


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_a_batch_that_unpacks_to_too_much_is_one_record_with_its_last_offset(codec: str) -> None:
    big = encode_batch([RawRecord(b"x" * 600_000, timestamp_ms=T0), RawRecord(b"y" * 600_000, timestamp_ms=T0)], codec)
    before = at(0, encode_batch(records(2)))
    data = before + at(2, big) + at(4, encode_batch(records(2), codec))
    for position, first in ((0, 2), (2, 2), (3, 3)):  # a broker's response begins with the batch of the position
        found = await read(
            data[0 if position < 2 else len(before) :], position, reading=Reading(1 << 20, tolerant=True)
        )
        assert [r.offset for r in found] == [*range(position, 2), 3, 4, 5]
        assert faults(found) == {3: (Reason.BATCH_TOO_LARGE, first)}
        letter = next(r for r in found if r.fault)
        assert (letter.key, letter.value, letter.headers, letter.timestamp_ms) == (None, None, (), T0)
    after = data[len(before) + len(big) :]
    assert await read(after, 4) == theirs(after, 4)


@pytest.mark.slow
async def test_a_bomb_costs_no_more_than_the_bound() -> None:
    data = at(0, blank_bomb(300 << 20))
    tracemalloc.start()
    found = await read(data, reading=Reading(8 << 20, tolerant=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert faults(found) == {0: (Reason.BATCH_TOO_LARGE, 0)}
    assert peak < 16 << 20


async def test_a_wrong_crc_is_fetched_again_and_then_passed_over() -> None:
    batch = bytearray(at(3, encode_batch(records(3))))
    batch[-1] ^= 1
    data = at(0, encode_batch(records(3))) + bytes(batch) + at(6, encode_batch(records(2)))
    reading = Reading(tolerant=True)
    assert [r.offset for r in await read(data, 0, reading=reading)] == [0, 1, 2]
    assert await read(data, 3, reading=reading) == []
    found = await read(data, 3, reading=reading)
    assert [r.offset for r in found] == [5, 6, 7]
    assert faults(found) == {5: (Reason.UNREADABLE, 3)}


async def test_a_payload_that_is_no_gzip_is_passed_over() -> None:
    for codec in ("gzip", "snappy", "lz4", "zstd"):
        data = at(0, batch_of(b"\x05nonsense, no codec makes it", 4, codec, T0, T0)) + at(4, encode_batch(records(1)))
        found = await read(data)
        assert faults(found) == {3: (Reason.UNREADABLE, 0)}
        assert [r.offset for r in found] == [3, 4]


async def test_a_strict_reader_gets_an_error_that_says_where() -> None:
    data = at(7, encode_batch([*records(1), RawRecord(b"v", None, ((b"\xff", b""),))]))
    result = await result_of(data, 7, Reading())
    with pytest.raises(UnreadableError, match=r"traces/0 offset 8: bad_header"):
        result.getall()


async def test_aborted_transactions_and_markers_are_left_out() -> None:
    def of(producer: int, batch: bytes, control: bool = False) -> bytes:
        attributes = struct.unpack_from(">h", batch, 21)[0] | 0x10 | (0x20 if control else 0)
        return sealed(
            batch[:21] + struct.pack(">h", attributes) + batch[23:43] + struct.pack(">q", producer) + batch[51:]
        )

    abort = encode_batch([RawRecord(b"\0\0\0\0\0\0", b"\0\0\0\0")])
    data = at(0, of(1, encode_batch(records(2), "zstd"))) + at(2, of(2, encode_batch(records(2), "gzip")))
    data += at(4, of(1, abort, True)) + at(5, of(1, encode_batch(records(2), "lz4")))
    assert await read(data, aborted=[(1, 0)]) == theirs(data, 0, [(1, 0)])
    assert [r.offset for r in await read(data, aborted=[(1, 0)])] == [2, 3, 5, 6]


async def test_too_many_headers_are_left_out_before_they_take_memory() -> None:
    body = b"\0\0\0" + varint(1) + b"k" + varint(5) + b"value" + varint(3_000_000) + b"\0\0" * 3_000_000
    data = at(0, batch_of(varint(len(body)) + body, 1, "none", T0, T0)) + at(1, encode_batch(records(1)))
    tracemalloc.start()
    found = await read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert faults(found) == {0: (Reason.TOO_LARGE, None)}
    assert (found[0].key, found[0].value, found[0].headers) == (b"k", b"value", ())
    assert found[1].offset == 1
    assert peak < 4 << 20


async def test_a_portion_is_bounded_in_bytes_and_the_rest_comes_after_it() -> None:
    data = at(0, encode_batch(records(300, 5_000), "zstd"))
    result = await result_of(data, 0, Reading(tolerant=True, fetch_bytes=100_000))
    sizes, found = [], []
    while result.has_more():
        portion = result.getall(512)
        sizes.append(sum(len(r.value or b"") for r in portion))
        found += portion
    assert found == theirs(data)
    assert max(sizes) < 120_000


@pytest.mark.parametrize("codec", CODECS)
async def test_records_have_their_size_in_memory_and_portions_are_bounded_by_it(codec: str) -> None:
    headers = [(b"a", b"1" * 900), (b"b", None)]
    data = at(0, encode_batch([*records(200, 500), RawRecord(None), RawRecord(b"")], codec))
    data += at(202, encode_batch(records(40, 500, headers=headers), codec))
    expected = theirs(data)
    data += at(242, encode_batch(records(3, headers=[(b"\xff", b"1")]), codec))
    result = await result_of(data, 0, Reading(tolerant=True, fetch_bytes=40_000))
    portions: list[list[SourceRecord]] = []
    while result.has_more():
        portions.append(result.getall(512))
    found = [record for portion in portions for record in portion]
    assert found[:242] == expected
    assert [r.size for r in found] == [memory_size(r.key, r.value, r.headers) for r in found]
    assert found[-1].fault is not None
    assert 40_000 < max(sum(r.size for r in portion) for portion in portions) < 45_000


async def test_fetches_wait_for_room_take_turns_and_all_come() -> None:
    budget = Budget(2 << 20)
    reading = Reading(tolerant=True, fetch_bytes=50_000, budget=budget)
    data = at(0, encode_batch(records(200, 1_500), "gzip"))
    tps = [TopicPartition("traces", n) for n in range(8)]
    results = {tp: await result_of(data, 0, reading, tp=tp) for tp in tps}
    found: dict[TopicPartition, list[Any]] = {tp: [] for tp in tps}
    refused = peak = 0
    while any(result.has_more() for result in results.values()):
        before = sum(map(len, found.values()))
        for tp, result in results.items():
            try:
                found[tp] += result.getall(512)
            except NoRoom:
                refused += 1
            peak = max(peak, budget.batches.held)
        assert sum(map(len, found.values())) > before, "somebody always gets on"
    expected = theirs(data)
    assert all([r.value for r in found[tp]] == [r.value for r in expected] for tp in tps)
    assert refused
    assert peak <= 1 << 20
    assert budget.batches.held == 0
    assert not len(budget.batches)
    assert not reading.open


def mutated(rng: random.Random, batch: bytes) -> bytes:
    """Change some bytes behind the length, and make the CRC right, as a hostile producer would."""
    changed = bytearray(batch)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(57, len(changed)) if rng.random() < 0.9 else rng.randrange(21, 27)
        kind = rng.randrange(4)
        if kind == 0:
            changed[place] = rng.randrange(256)
        elif kind == 1:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 2 and place >= 61:
            del changed[place : place + rng.randrange(1, 20)]
        elif place >= 61:
            changed[place:place] = rng.randbytes(rng.randrange(1, 20))
    return sealed(bytes(changed))


@pytest.mark.slow
async def test_no_mutation_escapes_loops_or_takes_an_offset_twice(seed: int) -> None:
    rng = random.Random(seed)
    good = at(1000, encode_batch(records(2)))
    for _ in range(4000):
        raw = [
            RawRecord(
                rng.choice((None, b"", rng.randbytes(30), b"v" * 200)),
                rng.choice((None, b"key")),
                [(rng.choice((b"", b"h", b"caf\xe9")), rng.choice((None, b"", b"1"))) for _ in range(rng.randrange(3))],
                T0,
            )
            for _ in range(rng.randint(2, 6))
        ]
        batch = mutated(rng, at(10, encode_batch(raw, rng.choice(list(CODECS)))))
        position = rng.choice((0, 10, 11))
        head = Head._make(HEADER.unpack_from(batch))
        found = await read(batch + good, position, reading=Reading(1 << 20, tolerant=True))
        offsets = [r.offset for r in found]
        assert offsets == sorted(set(offsets))
        mine = [r for r in found if r.offset < 1000]
        if 10 <= head.last_offset < 1000 and not head.attributes & 0x20:
            covered: set[int] = set()
            for r in mine:
                first = None if r.fault is None else r.fault.first_offset
                covered |= set(range(r.offset if first is None else first, r.offset + 1))
            assert all(max(position, 10) <= offset <= head.last_offset for offset in covered)
            if head.records == head.last_delta + 1:
                assert covered == set(range(max(position, 10), head.last_offset + 1)), (batch, found)
            assert offsets[-2:] == [1000, 1001]


def test_records_that_compaction_has_removed_at_the_end_are_no_fault_and_bytes_behind_are() -> None:
    batch = encode_batch(records(3), "none")
    batch = batch[:23] + struct.pack(">i", 9) + batch[27:]  # the batch's last offset stays when its record goes
    head = Head._make(HEADER.unpack_from(batch))
    assert [(it.offset, it.fault) for it in parse(head, memoryview(batch))] == [(0, None), (1, None), (2, None)]
    *good, rest = parse(head, memoryview(batch + b"\0"))
    assert [it.offset for it in good] == [0, 1, 2]
    assert rest.fault is not None
    assert (rest.offset, rest.fault.first_offset) == (9, 3)
    assert "more bytes follow its last record" in rest.fault.message
