"""Damaged records on the changelog are skipped and counted and change no score; whatever is there, nothing fails."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from tests.support.builders import T0, make_trace
from tests.support.damaged import (
    bad_entries,
    bad_markers,
    bad_metadata,
    bad_vectors,
    entry_fields,
    mutated,
    packed,
    some_key,
)
from worker.core.changelog import (
    MARKER_KEY,
    MAX_EPOCH,
    Marker,
    Segment,
    committed_from,
    decode,
    decode_marker,
    encode,
    encode_marker,
    slot_key,
)
from worker.core.novelty import Vector, unit
from worker.core.records import Fault
from worker.core.restore import Log, ModelCache, Restored, SourcePosition, restore
from worker.core.scorer import PartitionScorer
from worker.core.scoring import ScoredTrace
from worker.core.trace import Reason
from worker.core.track_record import TrackRecord, encode_row, read_record, record_key
from worker.core.verdicts import Verdict

DIMENSIONS, CAPACITY, TTL = 8, 10, 3_600_000
MODEL = "ours:00:8:256:fp32"
TOPIC = "a" * 22
GOOD = 20
"""Entries of a good changelog, at offsets 10 to 29; offset 30 is committed."""

OFFSET = 10 + GOOD


def vector_of(number: int) -> Vector:
    return unit(np.random.default_rng(number).normal(size=DIMENSIONS), DIMENSIONS)


def good_fields(number: int) -> dict[str, Any]:
    return entry_fields(number, 10 + number, T0 + number, MODEL, vector_of(number))


def queries() -> list[Vector]:
    """Return what is scored: near to and opposite to good vectors, and in the direction of damaged ones."""
    vectors = [vector_of(3), -vector_of(GOOD - 1), np.zeros(DIMENSIONS, np.float32), vector_of(99)]
    for raw in bad_vectors(vector_of(GOOD - 1).tobytes()).values():
        numbers = np.frombuffer(raw[: len(raw) // 4 * 4], "<f4")
        if len(numbers) == DIMENSIONS and np.isfinite(numbers).all():
            vectors += [unit(numbers, DIMENSIONS), -unit(numbers, DIMENSIONS)]
    return vectors


@dataclass
class Changelog:
    """A partition's changelog, and the group's offset."""

    log: Log = field(default_factory=Log)
    offset: int = OFFSET
    metadata: str = f"kp2:{T0 + GOOD - 1}:{TOPIC}:1:0"

    def append(self, key: bytes | None, value: bytes | None) -> None:
        self.log.apply(key, value, self.log.end)

    def on_source(self) -> SourcePosition:
        return SourcePosition(self.offset, True, committed_from(self.metadata), TOPIC)

    def restored(self) -> Restored:
        return restore(self.log, self.on_source(), ModelCache(MODEL, DIMENSIONS, CAPACITY))


def good() -> Changelog:
    changelog = Changelog()
    changelog.append(MARKER_KEY, encode_marker(Marker(1, TOPIC, (Segment(1, 0, 0),))))
    for number in range(GOOD):
        changelog.append(slot_key(number, CAPACITY, 1), packed(good_fields(number)))
    return changelog


def scored(scorer: PartitionScorer) -> list[ScoredTrace]:
    return [
        scorer.score(make_trace(f"kp:trace:new-{number}"), vector, T0 + GOOD + number)
        for number, vector in enumerate(queries())
    ]


def scores_of(restored: Restored) -> list[Any]:
    """Return what a worker that restores this says of the queries."""
    committed = committed_from(restored.report.current.metadata(T0 + GOOD - 1))
    own = PartitionScorer(CAPACITY, TTL, DIMENSIONS)
    own.restore(restored.cache(), committed.stream_time_ms)
    return [(it.score, it.components, it.nearest, it.sequence, it.stream_time_ms) for it in scored(own)]


def test_damaged_entries_are_skipped_and_counted_and_no_score_changes() -> None:
    expected = scores_of(good().restored())
    changelog = good()
    damaged = [  # made from an entry that would be the next: no other record tells against it
        *bad_entries(entry_fields(GOOD - 1, OFFSET - 1, T0 + GOOD - 1, MODEL, vector_of(98))),
        ("later than what was committed", packed({**good_fields(GOOD - 1), "stream_time_ms": T0 + 10**9})),
    ]
    for number, (_, value) in enumerate(damaged):
        changelog.append(b"1:%d:%d" % (CAPACITY + 1024, 100 + number), value)
    for number in range(3):
        changelog.log.skip(Fault(Reason.UNREADABLE, "broken", changelog.log.end), changelog.log.end + number)
    restored = changelog.restored()
    assert restored.report.skipped["corrupt"] == len(damaged) + 3
    assert restored.report.problem
    assert scores_of(restored) == expected


def test_the_longest_vector_that_is_taken_fails_no_score(seed: int) -> None:
    rng = np.random.default_rng(seed)
    longest = 0.0
    for _ in range(200):
        wide = rng.normal(size=DIMENSIONS)
        wide /= np.linalg.norm(wide)
        entry, query = (wide * 1.00099999).astype(np.float32), (wide * (1 + 1.9e-7)).astype(np.float32)
        changelog = good()
        changelog.append(b"1:%d:500" % (CAPACITY + 1024), packed({**good_fields(GOOD), "vector": entry.tobytes()}))
        changelog.offset += 1
        changelog.metadata = f"kp2:{T0 + GOOD}:{TOPIC}:1:0"
        restored = changelog.restored()
        scorer = PartitionScorer(CAPACITY, TTL, DIMENSIONS)
        scorer.restore(restored.cache(), T0 + GOOD)
        longest = max(longest, 1.0 - scorer.score(make_trace(), query, T0).components.novelty)
    assert longest > 1.001


@pytest.mark.slow
def test_a_damaged_record_of_the_epochs_changes_no_score_where_the_committed_offset_names_the_epoch() -> None:
    expected = scores_of(good().restored())
    for value in bad_markers(TOPIC):
        with pytest.raises(ValueError, match="epochs"):
            decode_marker(value)
        changelog = good()
        changelog.append(MARKER_KEY, value)
        restored = changelog.restored()
        assert restored.report.skipped["corrupt"] == 1
        assert scores_of(restored) == expected


def test_metadata_of_others_begins_an_epoch_that_inherits_all_entries() -> None:
    for metadata in bad_metadata(TOPIC):
        changelog = good()
        changelog.metadata = metadata
        restored = changelog.restored()
        assert committed_from(restored.report.current.metadata(T0)) is not None, metadata
        if committed_from(metadata) is None:
            assert restored.report.begins
            assert len(restored.entries) == GOOD
        live(changelog)


def entry_is_whole(value: bytes) -> None:
    length = float(np.linalg.norm(decode(value).array().astype(np.float64)))
    assert length == 0 or length == pytest.approx(1.0, abs=1e-3)  # an all-zero vector stays zero


def record_counts(value: bytes) -> None:
    stored = read_record(record_key("ada", "code"), value)
    record = TrackRecord(stored.topic_id)
    record.restore([stored], 100)
    assert 0 <= record.standing("ada", "code").used <= 1


def track_record() -> bytes:
    """Return the record of an agent with one verdict."""
    verdict = Verdict(
        version=1, trace_id="t", agent_id="ada", task_domain="code", success=1.0, judge="ci", topic="traces",
        issued_at=datetime.fromtimestamp(0, UTC), topic_id=TOPIC, partition=0,
    )  # fmt: skip
    ((_, value),) = map(encode_row, TrackRecord(TOPIC).add(verdict, 0, 7).changes)
    return value


EPOCHS = encode_marker(Marker(1, TOPIC, (Segment(1, 0, 0), Segment(2, 20, 5))))


@pytest.mark.parametrize(
    ("read", "good"),
    [(entry_is_whole, packed(good_fields(GOOD - 1))), (decode_marker, EPOCHS), (record_counts, track_record())],
    ids=["entry", "epochs", "track record"],
)
def test_damaged_bytes_raise_value_error_and_nothing_else(
    read: Callable[[bytes], object], good: bytes, seed: int
) -> None:
    rng = random.Random(seed)
    read(good)
    taken = 0
    for _ in range(10_000):
        with contextlib.suppress(ValueError):
            read(mutated(rng, [good]))
            taken += 1
    assert 100 < taken < 9900  # else the damage is too heavy, or too light, to prove much


def live(changelog: Changelog) -> None:
    """Live one life of a worker: restore, score, write; the next restore reads all that it wrote."""
    restored = changelog.restored()
    number = restored.report.current.number
    assert number is not None
    committed = committed_from(changelog.metadata)
    scorer = PartitionScorer(CAPACITY, TTL, DIMENSIONS)
    scorer.restore(restored.cache(), None if committed is None else committed.stream_time_ms)
    rows: list[tuple[bytes, bytes | None]] = []
    newest = None
    for each in scored(scorer):
        assert 0.0 <= each.score <= 1.0
        newest = each.sequence
        value = encode(
            sequence=newest, source_offset=changelog.offset, stream_time_ms=each.stream_time_ms, model=MODEL,
            trace_id=each.trace_id, vector=each.vector, epoch=number,
        )  # fmt: skip
        rows.append((slot_key(newest, CAPACITY, number), value))
        changelog.offset += 1
    for key, row in restored.housekeeping.rows(rows, newest, changelog.offset):
        changelog.append(key, row)
    changelog.metadata = restored.report.current.metadata(scorer.stream_time_ms)
    again = changelog.restored()
    assert again.report.begins is None, again.report.begins
    assert [it.source_offset for it in again.entries[-len(rows) :]] == list(
        range(changelog.offset - len(rows), changelog.offset)
    )


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [True, False], ids=["committed", "moved"])
def test_whatever_is_on_the_changelog_nothing_fails(metadata: bool, seed: int, long: bool) -> None:
    rng = random.Random(seed)
    values = [packed(good_fields(GOOD - 1)), EPOCHS]
    used = [slot_key(number, CAPACITY, 1) for number in range(GOOD)] + [MARKER_KEY]
    written = corrupt = 0
    rounds = 50 if long else 30
    for _ in range(rounds):
        changelog = good()
        if not metadata:
            changelog.metadata = ""
        for _ in range(rng.randint(1, 12)):
            changelog.append(some_key(rng, used), rng.choice([None, *[mutated(rng, values)] * 9]))
            written += 1
        restored = changelog.restored()
        corrupt += restored.report.skipped["corrupt"]
        scores_of(restored)
        live(changelog)
        live(changelog)
    assert written / 10 < corrupt < written * 9 / 10


def test_an_epoch_that_begins_has_a_number_that_can_be_read_again() -> None:
    for number in (MAX_EPOCH, MAX_EPOCH - 1, 2**53):
        changelog = good()
        changelog.metadata = ""
        changelog.append(b"7:8:9", packed({**good_fields(GOOD - 1), "epoch": number}))
        live(changelog)
        changelog.metadata = ""
        live(changelog)
