"""The bytes of a cache entry: they come back as they went, and nothing else is read."""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.builders import T0, text_vector
from worker.core import changelog
from worker.core.changelog import (
    MARKER_KEY,
    PROBE_DISTANCE,
    SLACK,
    Committed,
    CorruptRecord,
    Entry,
    OtherModelError,
    Probes,
    decode,
    encode,
    probe_distance,
    slot_key,
    text_hash,
)
from worker.core.novelty import unit
from worker.core.restore import _ENTRY_KEY, Log, ModelCache, SourcePosition, restore, rising
from worker.core.trace import EARLIEST_MS, LATEST_MS

VECTOR = np.array([0.6, -0.8, 1e-45, 0.0], dtype=np.float32)


FIELDS: dict[str, Any] = {
    "sequence": 5, "source_offset": 7, "stream_time_ms": -3, "trace_id": "kp:trace:ü", "model": "m:1",
}  # fmt: skip


def entry_bytes(**changes: object) -> bytes:
    more = {"vector": VECTOR.tobytes(), "epoch": 3, "text_hash": b"0123456789abcdef"}
    return msgspec.msgpack.encode(list(({"version": changelog.VERSION} | FIELDS | more | changes).values()))


def encoded(**changes: Any) -> bytes:
    """Return what a worker writes for the entry of `entry_bytes`."""
    return encode(**FIELDS | {"vector": VECTOR} | changes)


def test_an_entry_comes_back_as_it_went(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dimensions in (1, 3, 384, 1024):
        vector = unit(rng.normal(size=dimensions), dimensions)
        pair = [int(n) for n in rng.integers(0, 2**63 - 1, size=2, endpoint=True)]
        time = int(rng.integers(EARLIEST_MS, LATEST_MS, endpoint=True))
        places = {"sequence": pair[0], "source_offset": pair[1], "stream_time_ms": time}
        raw = encoded(**places, trace_id="kp:trace:\0检", model="name:sha:384", vector=vector)
        entry = decode(raw)
        assert entry.array().tobytes() == vector.tobytes()
        assert entry.array().shape == (dimensions,)
        assert (entry.sequence, entry.source_offset, entry.stream_time_ms) == (*pair, time)
        assert (entry.trace_id, entry.model) == ("kp:trace:\0检", "name:sha:384")
        assert len(raw) < 4 * dimensions + 100


def test_the_bytes_of_version_1() -> None:
    """A change here is a change of the format: raise VERSION. 0.2.0 wrote, and reads, all fields but the last."""
    fields = (
        bytes.fromhex("01 05 07 fd ab")
        + "kp:trace:ü".encode()
        + bytes.fromhex("a3 6d3a31 c410 9a99193f cdcc4cbf 01000000 00000000 03 c410")
        + b"0123456789abcdef"
    )
    assert entry_bytes() == b"\x99" + fields
    old = decode(entry_bytes())
    assert (old.epoch, old.text_hash, old.agent_id) == (3, b"0123456789abcdef", "")
    raw = encoded(epoch=3, text_hash=b"0123456789abcdef", agent_id="a")
    assert raw == b"\x9a" + fields + bytes.fromhex("a1 61")
    new = decode(raw)
    assert (new.epoch, new.text_hash, new.agent_id) == (3, b"0123456789abcdef", "a")
    assert changelog.VERSION == 1


def test_the_hash_of_a_text() -> None:
    assert text_hash("ü") == hashlib.blake2b("ü".encode(), digest_size=16).digest()
    assert len(text_hash("\ud800")) == 16


def test_any_layout_of_the_array_gives_the_same_bytes() -> None:
    swapped = VECTOR.astype(">f4")
    strided = np.repeat(VECTOR, 2)[::2]
    for vector in (VECTOR, swapped, strided, VECTOR.astype(np.float64)):
        assert decode(encoded(vector=vector)).array().tobytes() == VECTOR.tobytes()


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_another_version_is_refused_with_both_numbers(version: int) -> None:
    with pytest.raises(CorruptRecord, match=rf"version {version}, this worker reads version 1"):
        decode(entry_bytes(version=version))


def test_a_vector_of_about_unit_length_or_zero_is_taken() -> None:
    for length in (1.0, 1.0009, 0.9991, 0.0):
        assert decode(entry_bytes(vector=np.array([length, 0.0], dtype=np.float32).tobytes())).sequence == 5


def test_the_key_is_epoch_slots_and_slot_in_decimal_digits() -> None:
    slots = 1000 + SLACK
    assert slot_key(0, 1000) == b"0:2024:0"
    assert slot_key(slots - 1, 1000, 3) == b"3:2024:%d" % (slots - 1)
    assert slot_key(slots, 1000, 3) == b"3:2024:0"
    assert slot_key(10**12, 7) == b"0:%d:%d" % (7 + SLACK, 10**12 % (7 + SLACK))


def entry(sequence: int, offset: int) -> Entry:
    return Entry(1, sequence, offset, 0, "", "m", b"\0\0\0\0", 1, b"")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ([], []),
        ([(0, 0), (1, 2), (2, 3)], [0, 1, 2]),
        # a frozen worker wrote 0 and 1 again, late; after compaction only the late copies are left
        ([(0, 0), (1, 2), (2, 3), (3, 4), (0, 0), (1, 2)], [0, 1, 2, 3]),
        ([(2, 3), (3, 4), (0, 0), (1, 2)], [0, 1, 2, 3]),
        # an offset reset: the second epoch began at sequence 0, the first one's tail is still there
        ([(7, 10), (8, 11), (0, 8), (1, 9), (2, 10), (3, 11)], [0, 1, 2, 3]),
        ([(7, 10), (8, 11), (0, 11), (1, 12)], [0, 1]),
        # a hole is no reason to drop what is older
        ([(0, 0), (2, 5), (3, 6)], [0, 2, 3]),
    ],
)
def test_one_epoch_of_the_source_is_kept(log: list[tuple[int, int]], expected: list[int]) -> None:
    assert [it.sequence for it in rising([entry(*pair) for pair in log])] == expected


def log_with(rows: Iterable[tuple[bytes, bytes | None]]) -> Log:
    log = Log()
    for position, (key, value) in enumerate(rows):
        log.apply(key, value, position)
    return log


def test_the_latest_entry_is_the_last_one_written_below_the_committed_offset() -> None:
    assert Log().latest(100) is None
    rows = [(b"0", 0, "a"), (b"1", 1, "a"), (b"0", 2, "b"), (b"2", 3, "c")]
    entries = [(key, entry_bytes(source_offset=offset, model=model)) for key, offset, model in rows]
    log = log_with([*entries, (MARKER_KEY, b"\x93\x01\xa0\x90"), (b"3", b"broken")])
    assert [entry.model if (entry := log.latest(end)) else None for end in (9, 3, 2, 1)] == ["c", "b", "a", None]
    log.apply(b"2", None, 6)
    log.apply(b"3", None, 7)
    assert log.latest(9).model == "b"


@pytest.mark.parametrize("committed", [Committed(None, 1, 0, 7), Committed(None, 3, 0, 7)])
def test_a_record_that_cannot_be_read_goes_when_the_slots_have_been_used_once(committed: Committed) -> None:
    """No entry overwrites it if its key is of another capacity or epoch."""
    number, slots = committed.number or 0, 5 + SLACK
    log = log_with([
        *((key, b"broken") for key in (slot_key(0, 7, number), slot_key(0, 5, 8), slot_key(1, 5, number))),
        (slot_key(0, 5, number), encoded(sequence=0, source_offset=0, stream_time_ms=0, epoch=number)),
    ])  # fmt: skip
    restored = restore(log, SourcePosition(60, True, committed), ModelCache("m:1", 4, 5))
    assert [it.sequence for it in restored.entries] == [0]
    assert restored.report.skipped["corrupt"] == 3
    before = restored.housekeeping.rows([(b"x", b"x")], slots - 1, 60)
    assert not [key for key, _ in before if key.endswith((b":0", b":1"))]
    due = [(slot_key(0, 5, 8), None), (slot_key(0, 7, number), None)]
    assert sorted(restored.housekeeping.rows([(b"x", b"x")], slots, 61)[:-1]) == sorted(due)


def test_records_of_earlier_versions_are_skipped_and_deleted_by_the_first_commit() -> None:
    """Entries of 0.1.0, under bare slots and without an epoch, and requests to forget."""
    log = log_with([
        (b"forgotten:0:5", b"any value"),
        (b"7", msgspec.msgpack.encode([1, 7, 0, 0, "kp:trace:1", "m:1", VECTOR.tobytes()])),
        (slot_key(0, 5, 1), encoded(sequence=0, source_offset=1, epoch=1)),
    ])  # fmt: skip
    restored = restore(log, SourcePosition(6, True, Committed(None, 1, 0, 7)), ModelCache("m:1", 4, 5))
    assert [it.sequence for it in restored.entries] == [0]
    assert (restored.report.skipped["corrupt"], restored.report.skipped["older"]) == (0, 2)
    assert restored.housekeeping.rows([], None, 6)[:2] == [(b"forgotten:0:5", None), (b"7", None)]


# --- the probes of a service's model


def probes(*vectors: np.ndarray, name: str = "a/model", model: str = "a/model::3:256:unknown") -> Probes:
    return Probes(name, model, tuple(unit(vector, len(vector)) for vector in vectors))


NORTH, EAST = np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])
FOUND = SourcePosition(3, True, Committed(None, 1, 3, 10))


def kept(given: Probes) -> list[tuple[bytes, bytes | None]]:
    """Return the rows that the first commit of a partition writes for the probes."""
    return restore(Log(), SourcePosition(3), ModelCache(given.model, 3, 5, given)).housekeeping.rows([], None, 3)


def test_the_first_commit_keeps_the_probes_and_later_ones_do_not() -> None:
    rows = kept(probes(NORTH, EAST))
    assert [key for key, _ in rows if key.startswith(b"probe:")] == probes(NORTH, EAST).keys()
    again = restore(log_with(rows), FOUND, ModelCache("a/model::3:256:unknown", 3, 5, probes(NORTH, EAST)))
    assert again.housekeeping.rows([], None, 4) == []
    assert not again.entries
    assert not again.report.skipped


def test_a_moved_probe_is_another_model_however_long_its_vector() -> None:
    log = log_with(kept(probes(NORTH, EAST)))
    near = NORTH + np.array([0.9 * PROBE_DISTANCE, 0.0, 0.0])
    assert restore(log, FOUND, ModelCache("m", 3, 5, probes(near, EAST))).housekeeping.rows([], None, 3) == []
    for moved in (NORTH + np.array([1.1 * PROBE_DISTANCE, 0.0, 0.0]), EAST):
        with pytest.raises(OtherModelError, match=r"a/model.*has moved by .*KP_MODEL"):
            restore(log, FOUND, ModelCache("m", 3, 5, probes(moved, EAST)))
    with pytest.raises(OtherModelError, match="had 3 dimensions, and has 4"):
        restore(log, FOUND, ModelCache("m", 4, 5, probes(np.append(NORTH, 0.0), np.append(EAST, 0.0))))


def test_probes_are_kept_for_each_name_of_a_model() -> None:
    rows = kept(probes(NORTH))
    other = probes(EAST, name="b/model", model="b/model::3:256:unknown")
    log = log_with(rows)
    added = restore(log, FOUND, ModelCache(other.model, 3, 5, other)).housekeeping.rows([], None, 3)
    assert [key for key, _ in added] == other.keys()
    log = log_with([*rows, *added])
    for each in (other, probes(NORTH)):
        assert restore(log, FOUND, ModelCache(each.model, 3, 5, each)).housekeeping.rows([], None, 3) == []


def test_a_damaged_probe_is_reported_and_written_again() -> None:
    rows = kept(probes(NORTH, EAST))
    broken = [(key, b"rubbish" if key == probes(NORTH).keys()[0] else value) for key, value in rows]
    restored = restore(log_with(broken), FOUND, ModelCache("m", 3, 5, probes(NORTH, EAST)))
    assert restored.report.skipped["corrupt"] == 1
    assert "not a changelog entry" in restored.report.problem
    assert restored.housekeeping.rows([], None, 3) == [probes(NORTH, EAST).row(probes(NORTH).keys()[0], unit(NORTH, 3))]


def test_workers_that_know_no_probes_pass_over_them() -> None:
    """0.2.0 reads any value as an entry, takes its key for an entry's by `_KEY`, and looks for the latest by offset."""
    for key, value in kept(probes(NORTH)):
        if key.startswith(b"probe:"):
            assert decode(value).array() == pytest.approx(NORTH)
            assert _ENTRY_KEY.fullmatch(key) is None
    assert log_with(kept(probes(NORTH))).latest(2**62) is None


def test_the_distance_bounds_the_change_of_a_similarity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        one, other, third = (unit(it, 8) for it in rng.normal(size=(3, 8)))
        assert abs(float(one @ third) - float(other @ third)) <= probe_distance(one, other) + 1e-6


def test_entries_of_another_model_or_dimension_and_rubbish_are_left_out() -> None:
    def value(sequence: int, model: str = "text", dimensions: int = 6) -> bytes:
        vector = text_vector("x", dimensions)
        return encoded(sequence=sequence, source_offset=sequence, model=model, vector=vector, epoch=1)

    values = [value(0), value(1, model="other"), value(2, dimensions=7), b"rubbish", b"", value(5), value(7, "other")]
    log = log_with((slot_key(number, 1000, 1), raw) for number, raw in enumerate(values))
    restored = restore(log, SourcePosition(5, committed=Committed(None, 1, 0, T0)), ModelCache("text", 6, 1000))
    assert [entry.sequence for entry in restored.entries] == [0]
    assert list(restored.replay) == [5]
    assert (restored.report.skipped["other_model"], restored.report.skipped["corrupt"]) == (3, 2)
