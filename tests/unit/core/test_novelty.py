"""The novelty cache: the reference's streams, a brute-force oracle, and restores that keep every bit."""

import inspect
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.builders import make_trace, read_jsonl
from worker import PartitionScorer, VectorCache, parse_trace
from worker.config import Settings
from worker.core.novelty import (
    MOST_ELEMENTS,
    UNIT_TOLERANCE,
    Neighbour,
    Vector,
    advice,
    capacity_for,
    is_short,
    megabytes,
    per_second,
    unit,
)

CLOSE = 1e-6


def dense(case: dict[str, Any], item: dict[str, Any]) -> Vector:
    vector = np.zeros(case["dimensions"], dtype=np.float32)
    for index, value in item["vector"].items():
        vector[int(index)] = value
    return vector


# -- the reference


@pytest.mark.parametrize("case", read_jsonl("stream_cases.jsonl"), ids=lambda case: case["name"])
def test_same_stream_as_the_reference(case: dict[str, Any]) -> None:
    scorer = PartitionScorer(case["max_elements"], case["ttl_ms"], case["dimensions"])
    for item in case["items"]:
        trace = parse_trace(json.dumps(item["trace"]))
        scored, before, _ = scorer.decide(trace, dense(case, item), item["t"], lambda _: len(scorer.cache))
        assert before == item["cache_before"]
        assert scored.components.novelty == pytest.approx(item["novelty"], abs=CLOSE)
        assert scored.score == pytest.approx(min(1.0, max(0.0, item["score"])), abs=CLOSE)
        assert (scored.nearest is None) == (item["cache_before"] == 0)


# -- brute force


class Oracle:
    """The cache as the specification words it: plain lists, every pair compared, in double precision."""

    def __init__(self, max_elements: int, ttl_ms: int | None) -> None:
        self.max_elements = max_elements
        self.ttl_ms = ttl_ms
        self.now: int | None = None
        self.entries: list[tuple[int, str, list[float]]] = []
        self.expired = self.displaced = 0

    def at(self, now: int) -> None:
        self.now = now if self.now is None else max(now, self.now)
        if self.ttl_ms is not None:
            live = [entry for entry in self.entries if self.now - entry[0] < self.ttl_ms]
            self.expired += len(self.entries) - len(live)
            self.entries = live

    def add(self, vector: Sequence[float], now: int, trace_id: str) -> None:
        self.at(now)
        assert self.now is not None
        self.displaced += len(self.entries) == self.max_elements
        self.entries = [*self.entries, (self.now, trace_id, list(vector))][-self.max_elements :]

    def similarities(self, vector: Sequence[float], now: int) -> dict[str, float]:
        self.at(now)
        return {trace_id: cosine(vector, other) for _, trace_id, other in self.entries}


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return 0.0 if lengths == 0 else math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths


def random_vector(rng: random.Random, dimensions: int, earlier: list[list[float]]) -> list[float]:
    kind = rng.random()
    if kind < 0.1:
        return [0.0] * dimensions
    if kind < 0.4 and earlier:  # the same direction, or the opposite one, at another length
        factor = rng.choice([1.0, -1.0, 2.0, 0.125])
        return [factor * x for x in rng.choice(earlier)]
    length = 10.0 ** rng.randint(-15, 15)
    return [float(np.float32(rng.gauss(0, 1) * length)) for _ in range(dimensions)]


def test_agrees_with_brute_force_on_random_sequences(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        dimensions, capacity = rng.randint(1, 9), rng.randint(1, 9)
        ttl_ms = rng.choice([None, 1, 7, 30, 1000])
        cache, oracle = VectorCache(capacity, dimensions, ttl_ms), Oracle(capacity, ttl_ms)
        now, earlier = rng.choice([0, -50, 1_776_153_600_000]), list[list[float]]()
        for number in range(rng.randint(1, 60)):
            now += rng.choice([0, 0, 1, 1, 2, 5, 7, 30, -3, -40, 500])
            vector = random_vector(rng, dimensions, earlier)
            if rng.random() < 0.5:
                assert cache.add(vector, now, str(number)) == cache.next_sequence - 1
                oracle.add(vector, now, str(number))
                earlier.append(vector)
            else:
                check(cache, oracle, vector, now)
            assert len(cache) == len(oracle.entries)
            assert cache.now_ms == oracle.now
            assert (cache.expired, cache.displaced) == (oracle.expired, oracle.displaced)


def check(cache: VectorCache, oracle: Oracle, vector: list[float], now: int) -> None:
    expected = oracle.similarities(vector, now)
    found = cache.nearest(vector, now)
    if not expected:
        assert found is None
        assert cache.max_cosine_similarity(vector, now) == 0.0
        return
    assert found is not None
    best = max(expected.values())
    assert found.similarity == pytest.approx(best, abs=CLOSE)
    assert expected[found.trace_id] == pytest.approx(best, abs=CLOSE)
    assert cache.max_cosine_similarity(vector, now) == found.similarity
    assert -1.0 <= found.similarity <= 1.0 + CLOSE


# -- ties and ends


def cache_of(*vectors: Sequence[float], capacity: int = 10, ttl_ms: int | None = None) -> VectorCache:
    cache = VectorCache(capacity, len(vectors[0]), ttl_ms)
    for number, vector in enumerate(vectors):
        cache.add(vector, 0, f"kp:trace:{number}")
    return cache


def test_among_equal_entries_the_oldest_is_the_nearest() -> None:
    # One dimension: no rounding that could tell equal entries apart.
    cache = cache_of([1], [1], [1], [-1], capacity=3)
    assert cache.nearest([2]) == Neighbour("kp:trace:1", 1.0)
    assert cache.nearest([-2]) == Neighbour("kp:trace:3", 1.0)


def test_equal_entries_have_equal_similarity_in_any_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for count in range(2, 60):
        vector, query = rng.normal(size=384), rng.normal(size=384)
        cache = cache_of(*[vector] * count, capacity=100)
        found = cache.nearest(query)
        assert found is not None
        assert found.trace_id == "kp:trace:0"


def test_opposite_vectors_are_at_minus_1_and_zero_vectors_at_0() -> None:
    assert cache_of([3, -4]).max_cosine_similarity([-3, 4]) == -1.0
    assert cache_of([3, -4]).max_cosine_similarity([0, 0]) == 0.0
    assert cache_of([0, 0]).max_cosine_similarity([1, 0]) == 0.0
    assert cache_of([0, 0]).nearest([0, 0]) == Neighbour("kp:trace:0", 0.0)


def test_clear_forgets_everything() -> None:
    cache = cache_of([1, 0], [0, 1], ttl_ms=5)
    cache.advance(10**15)
    cache.clear()
    assert (len(cache), cache.now_ms, cache.next_sequence) == (0, None, 0)
    assert (cache.expired, cache.displaced) == (0, 0)
    assert cache.nearest([1, 0]) is None
    cache.add([1, 0], 3, "new")
    assert cache.nearest([1, 0], 3) == Neighbour("new", 1.0)


# -- the contract


def test_the_contract_s_signatures() -> None:
    def parameters(function: Callable[..., Any]) -> dict[str, Any]:
        return {
            name: None if p.default is inspect.Parameter.empty else p.default
            for name, p in inspect.signature(function).parameters.items()
            if name != "self"
        }

    assert parameters(VectorCache) == {"max_elements": 1000, "dimensions": 384, "ttl_ms": None}
    assert parameters(VectorCache.add) == {"vector": None, "now_ms": 0, "trace_id": ""}
    assert parameters(VectorCache.max_cosine_similarity) == {"vector": None, "now_ms": 0}
    scorer = parameters(PartitionScorer)
    assert dict(itertools.islice(scorer.items(), 4)) == {
        "max_elements": 1000, "ttl_ms": 3_600_000, "dimensions": 384, "threshold": 0.75,
    }  # fmt: skip
    assert list(parameters(PartitionScorer.score)) == ["trace", "vector", "event_time_ms"]


BAD = {
    "short": [1.0],
    "long": [1.0, 2.0, 3.0],
    "scalar": 1.0,
    "empty": [],
    "matrix": [[1.0, 2.0]],
    "nan": [1.0, math.nan],
    "infinity": [math.inf, 1.0],
    "minus infinity": [1.0, -math.inf],
}


@pytest.mark.parametrize("vector", BAD.values(), ids=BAD)
def test_a_bad_vector_is_a_value_error_and_changes_nothing(vector: Any) -> None:
    cache = VectorCache(10, 2, ttl_ms=100)
    cache.add([1, 0], 1000, "a")
    scorer = PartitionScorer(10, 100, 2)
    scorer.score(make_trace(), [1, 0], 1000)
    for call in (
        lambda: cache.add(vector, 9999, "bad"),
        lambda: cache.nearest(vector, 9999),
        lambda: cache.max_cosine_similarity(vector, 9999),
        lambda: scorer.score(make_trace(), vector, 9999),
    ):
        with pytest.raises(ValueError, match=r"expected a vector of 2 dimensions|not finite"):
            call()
    assert (len(cache), cache.now_ms, cache.next_sequence) == (1, 1000, 1)
    assert cache.nearest([1, 0], 1000) == Neighbour("a", 1.0)
    assert (len(scorer.cache), scorer.stream_time_ms) == (1, 1000)


@pytest.mark.parametrize("arguments", [(0, 2), (-1, 2), (1, 0), (1, 2, 0), (1, 2, -5)], ids=str)
def test_impossible_sizes_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"at least 1"):
        VectorCache(*arguments)


def test_unit_is_idempotent_bit_by_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in range(3000):
        dimensions = int(rng.integers(1, 500))
        exponent = float(rng.uniform(-44, 37)) if number % 2 else 0.0
        vector = (rng.normal(size=dimensions) * 10**exponent).astype(np.float32)
        first = unit(vector, dimensions)
        assert first.dtype == np.float32
        assert unit(first, dimensions).tobytes() == first.tobytes()
        if vector.any():
            assert float(np.linalg.norm(first.astype(np.float64))) == pytest.approx(1.0, abs=2e-7)


def of_length(rng: np.random.Generator, length: Fraction) -> Vector:
    """Return a vector of a length about 1, exact to 1e-17, whose square no sum in doubles gets right.

    Behind a large number the squares of the many small ones vanish, more or fewer of them by the order of the sum. The
    six numbers at random places take up what is left of the squared length, each one more exactly.
    """
    vector = rng.uniform(0.8e-8, 1e-8, size=4096).astype(np.float32)
    places = rng.permutation(4096)[:7]
    vector[places] = 0.0
    vector[places[0]] = rng.uniform(0.9, 0.99)
    squares = sum(Fraction(float(it)) ** 2 for it in vector)
    for place in places[1:]:
        vector[place] = math.sqrt(length**2 - squares) * (1 - 1e-7)
        squares += Fraction(float(vector[place])) ** 2
    assert 0 <= length**2 - squares < 1e-17
    return vector


@pytest.mark.slow
def test_what_counts_as_unit_length_depends_on_no_order_of_additions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in range(40):
        within = number % 2 == 0
        distance = Fraction(UNIT_TOLERANCE) + (-1 if within else 1) * Fraction(5, 10**16)
        vector = of_length(rng, 1 + (1 if number % 4 < 2 else -1) * distance)
        found = unit(vector, 4096)
        assert (found.tobytes() == vector.tobytes()) == within
        assert unit(found, 4096).tobytes() == found.tobytes()


def test_unit_takes_the_ends_of_float32() -> None:
    largest, smallest = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)
    for value in (largest, -largest, smallest, -smallest):
        assert unit([value, 0.0], 2).tolist() == [math.copysign(1.0, value), 0.0]
        assert unit([value, value], 2).tolist() == pytest.approx([math.copysign(0.5**0.5, value)] * 2)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("size", [1e300, 1e39, 1e-60, 1e-300])
def test_doubles_of_any_length_are_taken(size: float) -> None:
    assert unit([3 * size, 4 * size], 2).tolist() == pytest.approx([0.6, 0.8])


def test_the_cache_keeps_no_reference_to_the_caller_s_vector() -> None:
    vector = np.array([1, 0], dtype=np.float32)
    cache = cache_of([0, 1])
    cache.add(vector, 0, "mine")
    vector[:] = [0, 1]
    assert cache.nearest([1, 0]) == Neighbour("mine", 1.0)


# -- restore


class Run:
    """A cache beside the log of everything that entered it."""

    def __init__(self, rng: random.Random, capacity: int, ttl_ms: int | None, dimensions: int = 24) -> None:
        self.rng = rng
        self.numbers = np.random.default_rng(rng.randrange(2**32))
        self.cache = VectorCache(capacity, dimensions, ttl_ms)
        self.now = 1_000_000
        self.log: list[tuple[int, int, str, Vector]] = []

    def vector(self) -> Vector:
        if self.log and self.rng.random() < 0.3:
            return self.rng.choice(self.log[-10:])[3]
        return unit(self.numbers.normal(size=self.cache.dimensions), self.cache.dimensions)

    def step(self) -> None:
        self.now += self.rng.choice([0, 1, 10, 50, -200, 400])
        vector = self.vector()
        self.cache.nearest(vector, self.now)
        time_ms = self.cache.advance(self.now)
        sequence = self.cache.add(vector, self.now, str(len(self.log)))
        self.log.append((sequence, time_ms, str(sequence), vector))

    def restored(self, capacity: int | None = None, lost: Sequence[int] = ()) -> VectorCache:
        """Return a cache made of what a changelog with some spare slots would hold, in any order."""
        cache = VectorCache(capacity or self.cache.max_elements, self.cache.dimensions, self.cache.ttl_ms)
        entries = [entry for entry in self.log[-(self.cache.max_elements + 3) :] if entry[0] not in lost]
        self.rng.shuffle(entries)
        cache.restore(entries, self.cache.now_ms)
        return cache


def assert_same(one: VectorCache, other: VectorCache, vector: Vector, now: int) -> None:
    """Both find the same, to the last bit, and know the same time."""
    assert one.nearest(vector, now) == other.nearest(vector, now)
    assert (len(one), one.now_ms, one.next_sequence) == (len(other), other.now_ms, other.next_sequence)


@pytest.mark.parametrize("ttl_ms", [None, 900])
@pytest.mark.parametrize("capacity", [1, 7, 50])
def test_a_restored_cache_is_the_uninterrupted_one_bit_by_bit(capacity: int, ttl_ms: int | None, seed: int) -> None:
    run = Run(random.Random(seed), capacity, ttl_ms)
    restored = VectorCache(capacity, run.cache.dimensions, ttl_ms)
    for number in range(250):
        run.step()
        entry = run.log[-1]
        restored.advance(run.now)
        restored.add(entry[3], run.now, entry[2])  # goes on where the last restore left it
        if number % 3 == 0:
            restored = run.restored()
            assert (restored.expired, restored.displaced) == (0, 0)
        assert_same(run.cache, run.restored(), run.vector(), run.now)
        assert_same(run.cache, restored, run.vector(), run.now)


def test_lost_entries_change_no_other_maximum(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(rng, 7, 900)
    for _ in range(300):
        run.step()
        newest = run.log[-1][0]
        lost = [newest - back for back in range(1, 9) if rng.random() < 0.3]
        holed = run.restored(lost=lost)
        query = run.vector()
        live = run.log[len(run.log) - len(run.cache) :]
        kept = {e[2]: float(np.dot(e[3].astype(float), query)) for e in live if e[0] not in lost}
        found = holed.nearest(query, run.now)
        assert found is not None  # the newest is always there
        assert found.similarity == pytest.approx(max(kept.values()), abs=CLOSE)
        assert kept[found.trace_id] == pytest.approx(max(kept.values()), abs=CLOSE)
        assert holed.next_sequence == run.cache.next_sequence


@pytest.mark.parametrize(("before", "after"), [(7, 3), (7, 1), (3, 7), (50, 7), (1, 50)])
def test_a_cache_can_be_restored_at_another_capacity(before: int, after: int, seed: int) -> None:
    run = Run(random.Random(seed), before, None)
    for _ in range(60):
        run.step()
        restored = run.restored(capacity=after)
        assert len(restored) == min(after, len(run.log), before + 3)
        query = run.vector()
        kept = {e[2]: float(np.dot(e[3].astype(float), query)) for e in run.log[-len(restored) :]}
        found = restored.nearest(query, run.now)
        assert found is not None
        assert found.similarity == pytest.approx(max(kept.values()), abs=CLOSE)
        restored.add(query, run.now, "next")
        assert restored.next_sequence == run.cache.next_sequence + 1


def test_entries_far_behind_are_out_of_the_cache() -> None:
    cache = VectorCache(3, 2)
    vector = unit([1, 0], 2)
    cache.restore([(s, 5, str(s), vector) for s in (0, 6, 7, 9, 10)])
    assert len(cache) == 2
    assert cache.nearest(vector) == Neighbour("9", 1.0)


def test_a_known_stream_time_expires_entries_on_restore() -> None:
    vector = unit([1, 0], 2)
    entries = [(0, 1000, "a", vector), (1, 1050, "b", vector)]
    cache = VectorCache(5, 2, ttl_ms=100)
    cache.restore(entries)
    assert (len(cache), cache.now_ms) == (2, 1050)
    cache.restore(entries, 1100)
    assert (len(cache), cache.now_ms, cache.expired) == (1, 1100, 0)
    cache.restore(entries, 900)  # never behind its own entries
    assert (len(cache), cache.now_ms) == (2, 1050)
    cache.restore([], 1234)
    assert (len(cache), cache.now_ms, cache.next_sequence) == (0, 1234, 0)
    cache.restore([])
    assert cache.now_ms is None


# -- capacity = rate x TTL, against the cache itself

UNIT = np.array([1.0, 0.0], dtype=np.float32)


def fed(capacity: int, ttl_ms: int, times: list[int]) -> VectorCache:
    cache = VectorCache(capacity, 2, ttl_ms)
    for time in times:
        cache.add(UNIT, time)
    return cache


def test_the_capacity_for_a_rate_holds_the_ttl_and_half_of_it_does_not(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        rate, ttl_ms = rng.uniform(0.5, 40), rng.randint(1_000, 20_000)
        times = [round(1000 * number / rate) for number in range(round(3 * rate * ttl_ms / 1000) + 20)]
        wanted = capacity_for(rate, ttl_ms)
        assert wanted <= rate * ttl_ms / 1000 * 1.1 + 10
        enough = fed(wanted + 1, ttl_ms, times)
        assert enough.displaced == 0
        if wanted >= 8:
            short = fed(wanted // 3, ttl_ms, times)
            assert short.displaced > 0
            assert is_short(short.reach_ms or 0, ttl_ms)
        measured = per_second(times)
        assert measured == pytest.approx(rate, rel=0.05)


def test_the_reach_of_a_cache_is_the_age_at_which_its_oldest_entry_is_evicted(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        capacity = rng.randint(1, 12)
        cache = VectorCache(capacity, 2, rng.choice([None, 50]))
        live: list[int] = []
        now = 0
        for _ in range(rng.randint(1, 60)):
            now += rng.choice([0, 1, 5, 30])
            cache.add(UNIT, now)
            live = [time for time in [*live, now] if cache.ttl_ms is None or now - time < cache.ttl_ms][-capacity:]
            assert cache.reach_ms == (now - live[0] if len(live) == capacity else None)
            assert len(live) == len(cache)


def test_a_rate_needs_two_times() -> None:
    assert per_second([]) is None
    assert per_second([5]) is None
    assert per_second([5, 5, 5]) is None
    assert per_second([0, 500, 1000]) == 2.0


def test_no_ttl_is_never_too_long() -> None:
    assert not is_short(0, None)
    assert is_short(49, 100)
    assert not is_short(50, 100)


def test_the_advice_names_both_ways_out() -> None:
    told = advice(20.0, 50_000, 3_600_000, 384)
    assert "KP_CACHE_MAX_ELEMENTS to about 72000" in told
    assert "155 MB" in told
    assert "KP_CACHE_TTL_SECONDS to about 50" in told
    assert "KP_CACHE_TTL_SECONDS to about 1" in advice(None, 0, 3_600_000, 384)
    beyond = advice(1000.0, 1_000, 3_600_000, 384)
    assert "KP_CACHE_MAX_ELEMENTS" not in beyond
    assert capacity_for(1000.0, 3_600_000) > MOST_ELEMENTS
    assert "more partitions" in beyond


def test_megabytes_are_short() -> None:
    assert [megabytes(size) for size in (0, 123_456, 9_940_000, 9_960_000, 1_680_000_000)] == [
        "0.0 MB", "0.1 MB", "9.9 MB", "10 MB", "1,680 MB",
    ]  # fmt: skip


def test_the_setting_allows_what_the_advice_may_name() -> None:
    assert any(
        getattr(limit, "le", None) == MOST_ELEMENTS for limit in Settings.model_fields["cache_max_elements"].metadata
    )
