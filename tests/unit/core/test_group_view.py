"""The group view against brute force, and what makes a partition be loaded again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.builders import make_trace
from worker.core.changelog import Log, OtherModelError, Probes, Restored, encode, slot_key
from worker.core.forgetting import FORGOTTEN_PREFIX
from worker.core.group_view import GroupView, memory_bytes
from worker.core.novelty import Neighbour, Vector, unit
from worker.core.passes import MARKER_KEY, Committed, Found, Marker, Segment, encode_marker
from worker.core.scan import FROM_ROWS
from worker.core.scorer import PartitionScorer

DIMENSIONS = 8
MODEL = "ours"
CHAIN = (Segment(1, 0, 0),)


def value_of(
    sequence: int, offset: int, time: int, vector: Vector, *, name: str = "", number: int | None = 1, model: str = MODEL
) -> bytes:
    return encode(
        sequence=sequence, source_offset=offset, stream_time_ms=time, trace_id=name or f"t-{offset}", model=model,
        vector=vector, pass_number=number,
    )  # fmt: skip


def vector_of(rng: random.Random) -> Vector:
    """Return one of few directions, so that there are equals, or any."""
    if rng.random() < 0.5:
        return unit(np.eye(DIMENSIONS)[rng.randrange(DIMENSIONS)], DIMENSIONS)
    return unit([rng.gauss(0, 1) for _ in range(DIMENSIONS)], DIMENSIONS)


@dataclass
class Expected:
    """An entry as the brute force knows it."""

    partition: int
    key: bytes
    sequence: int
    offset: int
    time: int
    vector: Vector


@dataclass
class BruteForce:
    """All entries in lists."""

    capacity: int
    ttl_ms: int | None
    most: int
    entries: list[Expected] = field(default_factory=list)

    def add(self, entry: Expected) -> None:
        self.remove(entry.partition, entry.key)
        self.entries = [
            it for it in self.entries if it.partition != entry.partition or it.sequence > entry.sequence - self.capacity
        ]
        self.entries.append(entry)
        if len(self.entries) > self.most:
            self.entries.remove(min(self.entries, key=lambda it: it.time))

    def remove(self, partition: int, key: bytes) -> None:
        self.entries = [it for it in self.entries if (it.partition, it.key) != (partition, key)]

    def nearest(self, partition: int, query: Vector, now: int) -> Neighbour | None:
        live = [
            it
            for it in self.entries
            if it.partition != partition and (self.ttl_ms is None or now - it.time < self.ttl_ms)
        ]
        if not live:
            return None
        # by the same product, so that equals are equal: rounding is test_scan.py's subject
        padded = np.zeros((-(-len(live) // 8) * 8, DIMENSIONS), np.float32)
        padded[: len(live)] = [it.vector for it in live]
        similarities = np.dot(padded, query)[: len(live)]
        best = min(
            (it for it, similarity in zip(live, similarities, strict=True) if similarity == similarities.max()),
            key=lambda it: (it.time, it.partition, it.sequence),
        )
        return Neighbour(f"t-{best.offset}", float(max(-1.0, similarities.max())), best.partition, best.offset)


@pytest.mark.parametrize("most", [1000, 20])
def test_the_nearest_entry_is_that_of_a_brute_force(seed: int, most: int) -> None:
    for run in range(6):
        rng = random.Random(f"{seed}-{run}")
        capacity, ttl = rng.choice([3, 10, 40]), rng.choice([None, 300, 2000])
        view = GroupView(MODEL, DIMENSIONS, capacity, ttl, most)
        model = BruteForce(capacity, ttl, most)
        partitions, times = rng.choice([1, 2, 5]), iter(rng.sample(range(100_000), 2000))
        sequences, offsets, positions = [0] * partitions, [0] * partitions, [0] * partitions
        base = 0
        for partition in range(partitions):
            view.load(partition, Restored(chain=CHAIN))
        for _ in range(400):
            partition = rng.randrange(partitions)
            offsets[partition] += rng.choice([1, 1, 3])
            positions[partition] += 1
            sequence, offset, position = sequences[partition], offsets[partition], positions[partition]
            base += rng.randrange(10)
            time = base * 10 if most == 1000 else next(times)  # bounded: distinct, and in any order
            vector = vector_of(rng)
            key = slot_key(sequence, capacity, 1)
            action = rng.random()
            if action < 0.6:
                assert view.apply(partition, key, value_of(sequence, offset, time, vector), position)
                model.add(Expected(partition, key, sequence, offset, time, vector))
                sequences[partition] += 1
            elif action < 0.7:
                gone = slot_key(max(0, sequence - rng.randrange(5)), capacity, 1)
                assert view.apply(partition, gone, None, position)
                model.remove(partition, gone)
            else:  # none of these counts
                other = rng.choice(
                    [
                        (b"9:9:9", value_of(sequence, offset, time, vector, number=2)),
                        (b"9:9:9", value_of(sequence, offset, time, vector, model="theirs")),
                        (b"9:9:9", value_of(sequence, offset, time, vector[:4])),
                        (b"9:9:9", b"damaged"),
                        (b"forgotten", b"a later release's"),
                        (None, b"no key"),
                        (MARKER_KEY, encode_marker(Marker(1, "", CHAIN))),
                    ]
                )
                assert view.apply(partition, *other, position)
            assert len(view) == len(model.entries)
            asked, now = rng.randrange(partitions), base * 10 - rng.choice([0, 0, 500])
            query = vector_of(rng)
            found, expected = view.nearest(asked, query, now), model.nearest(asked, query, now)
            if found is None or expected is None:
                assert found == expected
            else:
                assert found.similarity == pytest.approx(expected.similarity, abs=1e-6)
                if abs(expected.similarity - 1.0) < 1e-6 or sum(query) == 1.0:
                    assert found[2:] == expected[2:]


@pytest.mark.parametrize(("most", "left"), [(50, 0), (100, 50), (200, 150)])
def test_a_partition_dated_ahead_takes_the_places_that_docs_security_says(most: int, left: int) -> None:
    """As many as it has entries, until the others catch up: all of a small view, none of one with room for all."""
    capacity, sequences = 50, [0] * 4
    view = GroupView(MODEL, DIMENSIONS, capacity, None, most)
    rng = random.Random(1)
    for partition in range(4):
        view.load(partition, Restored(chain=CHAIN))

    def add(partition: int, time: int) -> None:
        sequence = sequences[partition]
        sequences[partition] += 1
        value = value_of(sequence, sequence, time, vector_of(rng), name=f"of {partition}")
        assert view.apply(partition, slot_key(sequence, capacity, 1), value, sequence)

    def foreign() -> int:
        return len(view) - sum(label.trace_id == "of 0" for label in view._labels)

    for number in range(200):
        add(number % 4, number)
    for number in range(200):
        add(0, 1_000_000 + number)
    assert foreign() == left
    for number in range(600):
        add(1 + number % 3, 1000 + number)
    assert foreign() == left
    for number in range(600):
        add(1 + number % 3, 2_000_000 + number)
    assert foreign() == min(most, 150)


def test_another_worker_s_probes_must_be_those_of_the_same_model() -> None:
    """Two machines behind one balancer may serve two models: each worker's own partitions would not show it."""
    north, east = np.eye(DIMENSIONS)[:2]
    probes = Probes("a/model", MODEL, (north,))
    (key,) = probes.keys()
    ours, theirs = probes.row(key, north), probes.row(key, east)
    elsewhere = Probes("b/model", "theirs", (east,))
    view = GroupView(MODEL, DIMENSIONS, 10, None, 100, probes)
    view.load(1, Restored(chain=CHAIN))
    for known in (ours, (key, None), elsewhere.row(elsewhere.keys()[0], east), (key, b"damaged")):
        assert view.apply(1, *known, 3)
    assert view.corrupt == 1
    assert len(view) == 0
    with pytest.raises(OtherModelError, match="a/model is not the one that made the cache"):
        view.apply(1, *theirs, 4)
    local = GroupView(MODEL, DIMENSIONS, 10, None, 100)
    local.load(1, Restored(chain=CHAIN))
    assert local.apply(1, *theirs, 4), "a model on this machine is known by its weights"


def loaded(capacity: int = 10) -> tuple[GroupView, Log]:
    """Return a view with a partition 0 of ten entries, and its log."""
    log, view = Log(), GroupView(MODEL, DIMENSIONS, capacity, None, 100)
    for number in range(10):
        vector = unit(np.eye(DIMENSIONS)[number % DIMENSIONS], DIMENSIONS)
        log.apply(slot_key(number, capacity, 1), value_of(number, number, number, vector), number)
    log.apply(MARKER_KEY, encode_marker(Marker(1, "", CHAIN)), 10)
    view.load(0, log.restore(Found(10, True, Committed(9, None, 1, 0)), MODEL, DIMENSIONS, capacity))
    return view, log


def offset_of_nearest(view: GroupView, number: int) -> int | None:
    found = view.nearest(1, unit(np.eye(DIMENSIONS)[number], DIMENSIONS), 0)
    return None if found is None or found.similarity < 0.5 else found.offset


def test_a_partition_is_loaded_like_a_cache_is_restored_and_names_partition_and_offset() -> None:
    view, _ = loaded()
    assert len(view) == 10
    assert view.nearest(1, unit([0, 0, 1, 0, 0, 0, 0, 0], DIMENSIONS), 0) == Neighbour("t-2", 1.0, 0, 2)
    assert view.nearest(0, unit([0, 0, 1, 0, 0, 0, 0, 0], DIMENSIONS), 0) is None, "its own entries are its cache's"


def test_of_another_capacity_only_the_newest_count() -> None:
    view, _ = loaded(capacity=4)
    assert len(view) == 4
    assert [offset_of_nearest(view, number) for number in range(8)] == [8, 9, None, None, None, None, 6, 7]


def test_a_reset_offset_hides_the_entries_of_the_pass_before_although_no_marker_says_so_yet() -> None:
    view, log = loaded()
    reset = log.restore(Found(3, True, None), MODEL, DIMENSIONS, 10)
    view.load(0, reset)
    assert [offset_of_nearest(view, number) for number in range(8)] == [0, 1, 2, None, None, None, None, None]
    assert view.apply(0, MARKER_KEY, encode_marker(Marker(1, "", reset.chain)), 11), "these are the known passes"
    assert not view.apply(0, MARKER_KEY, encode_marker(Marker(1, "", (Segment(1, 0, 0), Segment(2, 5, 11)))), 12)
    assert not view.apply(0, MARKER_KEY, b"damaged", 13)
    assert not view.apply(0, MARKER_KEY, None, 14)


def test_damaged_records_of_each_kind_are_counted_once_and_change_nothing() -> None:
    view, log = loaded()
    for number, key in enumerate((b"1:1034:3", FORGOTTEN_PREFIX + b"1:3", MARKER_KEY), 1):
        assert view.apply(0, key, b"broken", log.end + number) is (key != MARKER_KEY)
        assert view.corrupt == number


def test_a_sequence_that_goes_back_asks_for_the_partition_to_be_loaded_again() -> None:
    view, _ = loaded()
    vector = unit(np.ones(DIMENSIONS), DIMENSIONS)
    assert not view.apply(0, slot_key(4, 10, 1), value_of(4, 20, 20, vector), 11)


def test_a_removed_vector_does_not_stay_in_memory() -> None:
    view, _ = loaded()
    for number in range(10):
        assert view.apply(0, slot_key(number, 10, 1), None, 11 + number)
    assert len(view) == 0
    assert not view._matrix._vectors.any()


def test_a_scorer_takes_its_own_entry_of_equals() -> None:
    view, _ = loaded()
    scorer = PartitionScorer(10, None, DIMENSIONS)
    scorer.join_group(1, view)
    first = scorer.score(make_trace("kp:trace:mine"), np.eye(DIMENSIONS)[2], 0)
    assert first.nearest == Neighbour("t-2", 1.0, 0, 2)
    assert first.components.novelty == 0.0
    again = scorer.score(make_trace("kp:trace:again"), np.eye(DIMENSIONS)[2], 0)
    assert again.nearest == Neighbour("kp:trace:mine", 1.0, 1, None)


def test_memory_is_what_the_arrays_take() -> None:
    view = GroupView(MODEL, DIMENSIONS, 10, None, 800)
    arrays = view._matrix.nbytes + view._times.nbytes + view._owners.nbytes
    assert memory_bytes(800, DIMENSIONS) == arrays
    assert memory_bytes(FROM_ROWS, 384) > FROM_ROWS * 4 * 384
