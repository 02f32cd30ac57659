"""Dead letters that fit: what they lose, in which order, what they say, and that they always fit."""

import random

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder

from worker.core.dead_letters import (
    DROPPED_HEADER,
    SOURCE_KEY_HEADER,
    TRUNCATED_HEADER,
    dead_letter,
    fit_dead_letter,
    fits,
    last_resort,
    originals,
    readdressed,
    source_place,
    split,
)
from worker.core.records import BATCH_OVERHEAD, OutputRecord, SourceRecord, encoded_size, exact_size
from worker.core.trace import MAX_MESSAGE, InvalidTrace, Reason

LIMIT = 20_000
LONG_PATH = "steps.9999999.tool.name"


def letter(
    value: bytes | None = b"no trace",
    key: bytes | None = b"k",
    headers: list[tuple[str, bytes]] | None = None,
    *,
    topic: str = "traces",
    message: str = "broken",
    path: str = "steps.1",
) -> OutputRecord:
    record = SourceRecord(topic, 3, 42, 77, key, value, [("h", b"1")] if headers is None else headers)
    return dead_letter(record, InvalidTrace(Reason.NOT_JSON, path, message))


def batch_size(record: OutputRecord) -> int:
    """Return the bytes of the record in a real batch of its own."""
    builder = BatchBuilder(1 << 30, 0)
    builder.append(timestamp=record.timestamp_ms, key=record.key, value=record.value, headers=record.headers)
    return len(builder._build())


def own_headers(record: OutputRecord) -> dict[str, str]:
    return {name: content.decode() for name, content in split(record.headers)[1]}


def test_what_fits_is_unchanged() -> None:
    record = letter(b"x" * 10_000)
    assert fit_dead_letter(record, LIMIT) is record
    assert fit_dead_letter(record, batch_size(record)) is record
    assert fit_dead_letter(record, batch_size(record) - 1) is not record


def test_first_the_value_goes_and_no_more_than_has_to() -> None:
    record = letter(bytes(range(256)) * 400)
    cut = fit_dead_letter(record, LIMIT)
    assert record.value.startswith(cut.value)
    assert LIMIT - 16 < batch_size(cut) <= LIMIT
    assert cut.headers == [*record.headers, (TRUNCATED_HEADER, b"%d of 102400 bytes kept" % len(cut.value))]
    assert (cut.key, cut.kind, cut.timestamp_ms) == (record.key, record.kind, record.timestamp_ms)


def test_then_the_headers_go_and_what_fits_of_the_value_comes_back() -> None:
    headers = [("h", b"x" * 100)] * 300
    small = fit_dead_letter(letter(b"value", headers=headers), LIMIT)
    assert (small.key, small.value, originals(small.headers)) == (b"k", b"value", [])
    assert own_headers(small)[DROPPED_HEADER] == "headers (300 with 30300 bytes)"
    assert TRUNCATED_HEADER not in own_headers(small)
    large = fit_dead_letter(letter(b"x" * 50_000, headers=headers), LIMIT)
    assert LIMIT - 16 < batch_size(large) <= LIMIT
    assert own_headers(large)[TRUNCATED_HEADER] == f"{len(large.value or b'')} of 50000 bytes kept"
    assert DROPPED_HEADER in own_headers(large)


def test_then_the_key_goes() -> None:
    cut = fit_dead_letter(letter(b"value", b"k" * 30_000), LIMIT)
    assert (cut.key, cut.value) == (None, b"value")
    assert own_headers(cut)[DROPPED_HEADER] == "headers (1 with 2 bytes), key (30000 bytes)"
    assert own_headers(cut)["kp-source-offset"] == "42"


def test_the_last_resort_needs_nothing_of_the_record() -> None:
    record = letter(b"v" * 100, b"k" * 100, [("h", b"1")] * 3)
    last = last_resort(record, LIMIT, source_place(record))
    assert (last.key, last.value, last.timestamp_ms) == (b"traces/3/42", b"", None)
    assert own_headers(last)[DROPPED_HEADER] == "headers (3 with 6 bytes), key (100 bytes)"
    assert own_headers(last)[TRUNCATED_HEADER] == "0 of 100 bytes kept"
    assert own_headers(last)["kp-source-timestamp"] == "77"


def test_a_key_that_was_made_up_is_told_from_the_source_s() -> None:
    given = readdressed(letter(key=None))
    assert (given.key, given.value, own_headers(given)[SOURCE_KEY_HEADER]) == (b"traces/3/42", b"no trace", "null")
    last = last_resort(letter(key=None), LIMIT, b"traces/3/42")
    assert own_headers(last)[SOURCE_KEY_HEADER] == "null"


def test_the_worker_s_own_headers_are_bounded() -> None:
    """The longest of each: the last resort fits 3 kB as it is, and 1 kB with a shorter message."""
    longest = letter(b"v", None, topic="t" * 249, message="\N{GRINNING FACE}" * MAX_MESSAGE, path=LONG_PATH)
    assert batch_size(last_resort(longest, 3000, source_place(longest))) < 3000
    short = last_resort(longest, 1024, source_place(longest))
    assert 1024 - len("\N{GRINNING FACE}".encode()) <= batch_size(short) <= 1024, (
        "no more of the message goes than has to"
    )
    message = own_headers(short)["kp-error-message"]
    assert own_headers(last_resort(longest, 3000, None))["kp-error-message"].startswith(message)


@pytest.mark.slow
def test_sizes_are_those_of_a_real_batch(seed: int, long: bool) -> None:
    rng = random.Random(seed)
    for _ in range(300 if long else 100):
        record = random_record(rng)
        size = batch_size(record)
        assert exact_size(record.key, record.value, record.headers) == size
        assert size <= encoded_size(record.key, record.value, record.headers) + BATCH_OVERHEAD
        for limit in (size - 1, size, size + 40):
            assert fits(record, limit) == (size <= limit)


def random_bytes(rng: random.Random) -> bytes | None:
    largest = rng.choice([0, 1, 70, 300, 2000, 20_000])
    return rng.choice([None, rng.randbytes(rng.randint(0, largest)), rng.randbytes(largest)])


def random_record(rng: random.Random) -> OutputRecord:
    count = rng.choice([0, 1, 5, 100, 9000])
    name = rng.choice(["", "h", "\N{GRINNING FACE}" * rng.randrange(600), "kp-error-reason", "n" * 200])
    content = random_bytes(rng) if count < 9 else rng.choice([b"", b"x"])
    return letter(
        random_bytes(rng),
        random_bytes(rng),
        [(name, content)] * count,  # type: ignore[list-item]  # a header may have no value
        topic=rng.choice(["t", "t" * 249]),
        message=rng.choice(["m", "m" * 300, "\N{GRINNING FACE}" * 300]),
        path=rng.choice(["", LONG_PATH]),
    )


@pytest.mark.slow
def test_whatever_the_record_the_letter_fits_and_holds_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        record = random_record(rng)
        limit = rng.choice([1024, 1100, rng.randint(1024, 4000), rng.randint(1024, 70_000)])
        for cut in (fit_dead_letter(record, limit), last_resort(record, limit, source_place(record))):
            assert batch_size(cut) <= limit
            assert (record.value or b"").startswith(cut.value or b"")
            ours = own_headers(cut)
            assert (ours["kp-source-offset"], ours["kp-error-reason"]) == ("42", "not_json")
            assert (TRUNCATED_HEADER in ours) or cut.value == record.value
            if cut.key not in (record.key, source_place(record)):
                assert "key" in ours[DROPPED_HEADER]
            if split(cut.headers)[0] != split(record.headers)[0]:
                assert "headers" in ours[DROPPED_HEADER]
