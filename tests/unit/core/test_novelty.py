"""The novelty cache: the reference's streams, brute force, and restores that keep every bit."""

import inspect
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
        scorer.cache.advance(item["t"])
        assert len(scorer.cache) == item["cache_before"]
        scored = scorer.score(trace, dense(case, item), item["t"])
        assert scored.components.novelty == pytest.approx(item["novelty"], abs=CLOSE)
        assert scored.score == pytest.approx(min(1.0, max(0.0, item["score"])), abs=CLOSE)
        assert (scored.nearest is None) == (item["cache_before"] == 0)


# -- brute force


PASSED = st.sampled_from([0, 0, 1, 1, 2, 5, 7, 30, -3, -40, 500])
"""Milliseconds from one step to the next."""


class Added(NamedTuple):
    """What entered a cache."""

    sequence: int
    time_ms: int
    trace_id: str
    vector: Vector
    direction: npt.NDArray[np.float64]  # of the vector before it was made a unit vector; zeros stay


KINDS = st.sampled_from([*["new"] * 5, *["again"] * 4, "zero"])


class CacheMachine(RuleBasedStateMachine):
    """A cache and one that goes on from the last restore, held against the specification's words.

    That is a plain list, of which every entry is compared, in double precision.
    """

    @initialize(
        dimensions=st.integers(1, 24),
        capacity=st.sampled_from([7, 1, 2, 3, 50]),
        ttl_ms=st.sampled_from([None, 1, 30, 900]),
        now=st.sampled_from([0, -50, 1_776_153_600_000]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, dimensions: int, capacity: int, ttl_ms: int | None, now: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache, self.restored = (VectorCache(capacity, dimensions, ttl_ms) for _ in range(2))
        self.begun = now
        self.log: list[Added] = []
        self.live: list[Added] = []
        self.now: int | None = None
        self.expired = self.displaced = 0

    def draw(self, kind: str, which: int, exponent: int) -> tuple[list[float], npt.NDArray[np.float64]]:
        """Return a vector of any length and its direction: new, zeros, or an earlier direction or its opposite."""
        wide = self.rng.normal(size=self.cache.dimensions) * 10.0**exponent
        if kind == "zero":
            wide[:] = 0
        if kind == "again" and self.log:
            wide = self.log[-1 - which % len(self.log)].direction * (-1) ** exponent * 2.0 ** (exponent % 3)
        wide = wide.astype(np.float32).astype(np.float64)
        return wide.tolist(), wide / (np.linalg.norm(wide) or 1.0)

    def advance(self, passed: int) -> int:
        """Let time pass, or seem to go back; return what the clock says."""
        clock = (self.begun if self.now is None else self.now) + passed
        self.now = clock if self.now is None else max(self.now, clock)
        ttl_ms = self.cache.ttl_ms
        live = [it for it in self.live if ttl_ms is None or self.now - it.time_ms < ttl_ms]
        self.expired += len(self.live) - len(live)
        self.live = live
        return clock

    def check(self, cache: VectorCache, live: list[Added], vector: list[float], direction: npt.ArrayLike) -> None:
        """A search finds one of the nearest of these entries."""
        nearest = cache.nearest(vector, self.now)
        assert cache.max_cosine_similarity(vector, self.now) == (0.0 if nearest is None else nearest.similarity)
        assert (nearest is None) == (not live)
        if nearest is not None:
            expected = {it.trace_id: float(it.direction @ direction) for it in live}
            assert nearest.similarity == pytest.approx(max(expected.values()), abs=CLOSE)
            assert expected[nearest.trace_id] == pytest.approx(max(expected.values()), abs=CLOSE)
            assert -1.0 <= nearest.similarity <= 1.0 + CLOSE

    @rule(passed=PASSED, kind=KINDS, which=st.integers(0, 60), exponent=st.integers(-15, 15))
    def add(self, passed: int, kind: str, which: int, exponent: int) -> None:
        vector, direction = self.draw(kind, which, exponent)
        clock = self.advance(passed)
        trace_id, sequence = str(len(self.log)), len(self.log)
        assert self.cache.add(vector, clock, trace_id) == self.restored.add(vector, clock, trace_id) == sequence
        self.log.append(Added(sequence, self.now, trace_id, unit(vector, self.cache.dimensions), direction))
        self.displaced += len(self.live) == self.cache.max_elements
        self.live = [*self.live, self.log[-1]][-self.cache.max_elements :]

    @rule(count=st.integers(2, 30), passed=st.sampled_from([1, 0, 7, -3]))
    def add_many(self, count: int, passed: int) -> None:
        """Single steps alone fill no cache of more than three entries."""
        for _ in range(count):
            self.add(passed, "new", 0, 0)

    @rule(passed=PASSED, kind=KINDS, which=st.integers(0, 60), exponent=st.integers(-15, 15))
    def search(self, passed: int, kind: str, which: int, exponent: int) -> None:
        """The restored cache has the same answer, to the last bit."""
        vector, direction = self.draw(kind, which, exponent)
        clock = self.advance(passed)
        assert self.cache.nearest(vector, clock) == self.restored.nearest(vector, clock)
        self.check(self.cache, self.live, vector, direction)

    def on_changelog(self) -> list[Added]:
        """Return what a changelog with some spare slots would hold, in any order."""
        entries = self.log[-(self.cache.max_elements + 3) :]
        return [entries[int(place)] for place in self.rng.permutation(len(entries))]

    @rule()
    def restore(self) -> None:
        self.restored = VectorCache(self.cache.max_elements, self.cache.dimensions, self.cache.ttl_ms)
        self.restored.restore([it[:4] for it in self.on_changelog()], self.now)
        assert (self.restored.expired, self.restored.displaced) == (0, 0)

    @precondition(lambda self: self.log)
    @rule(capacity=st.sampled_from([1, 3, 7, 50]), lost=st.sets(st.integers(1, 8)))
    def restore_elsewhere(self, capacity: int, lost: set[int]) -> None:
        """At another capacity; entries that are lost (so far behind the newest) change no other maximum."""
        other = VectorCache(capacity, self.cache.dimensions, self.cache.ttl_ms)
        newest = self.log[-1].sequence
        entries = [it for it in self.on_changelog() if newest - it.sequence not in lost]
        other.restore([it[:4] for it in entries], self.now)
        live = [
            it
            for it in entries
            if it.sequence > newest - capacity and (other.ttl_ms is None or self.now - it.time_ms < other.ttl_ms)
        ]
        assert lost or len(other) == len(live)
        vector, direction = self.draw("new", 0, 0)
        self.check(other, live, vector, direction)
        assert other.add(vector, self.now) == len(self.log)

    @invariant()
    def both_are_as_the_list(self) -> None:
        for cache in (self.cache, self.restored):
            assert (len(cache), cache.now_ms, cache.next_sequence) == (len(self.live), self.now, len(self.log))
        assert (self.cache.expired, self.cache.displaced) == (self.expired, self.displaced)
        full = self.now is not None and len(self.live) == self.cache.max_elements
        assert self.cache.reach_ms == (self.now - self.live[0].time_ms if full else None)  # type: ignore[operator]


TestCache = CacheMachine.TestCase


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
        assert cache.nearest(query).trace_id == "kp:trace:0"


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
        normalised = unit(vector, 4096)
        assert (normalised.tobytes() == vector.tobytes()) == within
        assert unit(normalised, 4096).tobytes() == normalised.tobytes()


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


def fed(capacity: int, ttl_ms: int, times: list[int]) -> VectorCache:
    cache = VectorCache(capacity, 2, ttl_ms)
    for time in times:
        cache.add([1, 0], time)
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
    sentence = advice(20.0, 50_000, 3_600_000, 384)
    assert "KP_CACHE_MAX_ELEMENTS to about 72000" in sentence
    assert "155 MB" in sentence
    assert "KP_CACHE_TTL_SECONDS to about 50" in sentence
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
