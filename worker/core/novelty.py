"""The novelty cache: the latest embeddings of one partition, searched for the nearest to a new one.

Memory is a ring: sequence number s is in row s % max_elements. So the shape of the matrix product depends on the
sequence number alone, and a restored cache computes the same bits as one that was never interrupted.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from worker.core.scan import Matrix, Ranges

Vector = npt.NDArray[np.float32]

CACHED_ID_LENGTH: Final = 256
"""Characters of an id that the cache keeps. Ids may be as long as a message; a thousand such could exhaust memory."""

UNIT_TOLERANCE: Final = 2e-7
"""A vector whose length is this close to 1 is left unchanged. Rounding to float32 changes a unit vector's length by at
most 6e-8, so `unit` is idempotent; a larger tolerance would add the embedder's own rounding to the similarity."""

LENGTH_TOLERANCE: Final = 1e-3
"""A length farther from 1 than this cannot come from rounding: the vector was never a unit vector."""


class Neighbour(NamedTuple):
    """The most similar live entry."""

    trace_id: str
    similarity: float  # cosine, -1..1


def unit(vector: npt.ArrayLike, dimensions: int) -> Vector:
    """Return the vector as float32 of length 1 and shape (dimensions,); an all-zero vector stays zero.

    Idempotent, bit for bit, on any processor. Raises ValueError for another shape or for values that are not finite.
    """
    if isinstance(vector, np.ndarray) and vector.dtype == np.float32 and vector.shape == (dimensions,):
        wide = vector.astype(np.float64)
        # As embedders return it: 2 us instead of 25. Such a square, summed in any order, is within UNIT_TOLERANCE.
        if abs(float(wide @ wide) - 1.0) <= 3e-7:
            return vector.copy()
    wide = np.asarray(vector, dtype=np.float64)
    if wide.shape != (dimensions,):
        raise ValueError(f"expected a vector of {dimensions} dimensions, got shape {wide.shape}")
    largest = float(np.abs(wide).max())
    if not math.isfinite(largest):
        raise ValueError("the vector has values that are not finite (NaN or infinity)")
    if not 1e-100 < largest < 1e100 and largest:  # beyond float32: the squares would overflow, or vanish
        wide = wide / largest
    length = _length(wide)
    if length == 0.0 or abs(length - 1.0) <= UNIT_TOLERANCE:
        array = wide.astype(np.float32)
        if length == 0.0 or abs(_length(array.astype(np.float64)) - 1.0) <= UNIT_TOLERANCE:
            return array
    return (wide / length).astype(np.float32)


def unit_mean(vectors: Sequence[Vector]) -> Vector:
    """Return the unit vector of the mean, shape (dimensions,). Raises ValueError if the mean is zero."""
    if len(vectors) == 1:
        return vectors[0]
    mean = np.sum(np.asarray(vectors, np.float64), axis=0)
    if not np.abs(mean).max() > 0.0:
        raise ValueError("the parts of this text cancel each other out")
    return unit(mean, len(mean))


def _length(wide: npt.NDArray[np.float64]) -> float:
    """Return the length of a vector. The sum is exact: BLAS adds in an order that depends on the processor."""
    return math.sqrt(math.fsum((wide * wide).tolist()))


class VectorCache:
    """At most `max_elements` vectors. The oldest is evicted first; an entry lives while now - its time < `ttl_ms`.

    Time never goes back: a `now_ms` before the latest one seen counts as the latest.
    """

    def __init__(self, max_elements: int = 1000, dimensions: int = 384, ttl_ms: int | None = None) -> None:
        if max_elements < 1 or dimensions < 1:
            raise ValueError(f"max_elements and dimensions must be at least 1, got {max_elements}, {dimensions}")
        if ttl_ms is not None and ttl_ms < 1:
            raise ValueError(f"ttl_ms must be at least 1, or None for no expiry, got {ttl_ms}")
        self.max_elements = max_elements
        self.dimensions = dimensions
        self.ttl_ms = ttl_ms
        self._matrix = Matrix(max_elements, dimensions)
        self._times = [0] * max_elements
        self._trace_ids = [""] * max_elements
        self.clear()

    def clear(self) -> None:
        """Remove every entry, the time and the eviction counts."""
        self._oldest = self._next = 0  # sequence numbers: live entries are oldest <= s < next
        self._matrix.clear()
        self._now: int | None = None
        self.expired = 0
        self.displaced = 0

    def __len__(self) -> int:
        """Return the number of live entries at the latest time seen."""
        return self._next - self._oldest

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next entry."""
        return self._next

    @property
    def now_ms(self) -> int | None:
        """The latest time seen (ms since 1970); None before the first."""
        return self._now

    @property
    def reach_ms(self) -> int | None:
        """The age (ms) of the oldest entry, which the next one displaces; None while the cache is not full."""
        if self._now is None or self._next - self._oldest < self.max_elements:
            return None
        return self._now - self._times[self._oldest % self.max_elements]

    def advance(self, now_ms: int) -> int:
        """Advance time, expire entries, return the current time (ms)."""
        if self._now is None or now_ms > self._now:
            self._now = now_ms
            oldest = self._oldest_at(now_ms)
            self.expired += oldest - self._oldest
            self._oldest = oldest
        return self._now

    def _oldest_at(self, now_ms: int) -> int:
        """Return the sequence number of the first entry that lives at a time from the current one on."""
        oldest = self._oldest
        if self.ttl_ms is not None:
            dead_before = now_ms - self.ttl_ms
            while oldest < self._next and self._times[oldest % self.max_elements] <= dead_before:
                oldest += 1
        return oldest

    def add(self, vector: npt.ArrayLike, now_ms: int = 0, trace_id: str = "") -> int:
        """Add a vector of any length; return its sequence number. Raises ValueError (`unit`), changing nothing."""
        return self.add_unit(unit(vector, self.dimensions), now_ms, trace_id)

    def max_cosine_similarity(self, vector: npt.ArrayLike, now_ms: int = 0) -> float:
        """Return the greatest cosine similarity to a live entry, 0.0 if there is none. Raises ValueError (`unit`)."""
        neighbour = self.nearest(vector, now_ms)
        return 0.0 if neighbour is None else neighbour.similarity

    def nearest(self, vector: npt.ArrayLike, now_ms: int = 0) -> Neighbour | None:
        """Return the most similar live entry, the oldest in a tie; None if there is none."""
        query = unit(vector, self.dimensions)
        return self.nearest_unit(query, self.advance(now_ms))

    def nearest_unit(self, query: Vector, now_ms: int) -> Neighbour | None:
        """Do `nearest` for a vector that `unit` returned and a time from the current one on; nothing changes."""
        oldest = self._oldest_at(now_ms)
        if oldest == self._next:
            return None
        first, end = oldest % self.max_elements, self._next % self.max_elements
        if first < end:
            live: Ranges = ((first, end),)
        elif end == 0:
            live = ((first, self.max_elements),)
        else:  # the live range wraps: the older part is above the younger one
            live = ((first, self.max_elements), (0, end))
        row, similarity = self._matrix.nearest(query, live)
        return Neighbour(self._trace_ids[row], max(-1.0, similarity))

    def add_unit(self, vector: Vector, now_ms: int, trace_id: str) -> int:
        """Do `add` for a vector that `unit` returned."""
        now = self.advance(now_ms)
        if self._next - self._oldest == self.max_elements:
            self._oldest += 1
            self.displaced += 1
        sequence = self._next
        self._put(sequence, vector, now, trace_id)
        self._next += 1
        return sequence

    def _put(self, sequence: int, vector: Vector, time_ms: int, trace_id: str) -> None:
        row = sequence % self.max_elements
        self._matrix.put(row, vector)
        self._times[row] = time_ms
        self._trace_ids[row] = trace_id

    def restore(self, entries: Iterable[tuple[int, int, str, Vector]], now_ms: int | None = None) -> None:
        """Rebuild the cache from (sequence, time in ms, trace id, unit vector), in any order.

        The next sequence is the greatest one plus 1. The place of an entry that was lost is filled with its younger
        neighbour, which changes no maximum. `now_ms`: the stream time, if known to be later than the last entry's.
        """
        self.clear()
        by_sequence = {entry[0]: entry for entry in entries}
        if by_sequence:
            newest = max(by_sequence)
            self._next = newest + 1
            self._oldest = min(sequence for sequence in by_sequence if sequence >= self._next - self.max_elements)
            entry = by_sequence[newest]
            for sequence in range(newest, self._oldest - 1, -1):
                entry = by_sequence.get(sequence, entry)
                _, time, trace_id, vector = entry
                self._put(sequence, vector, time, trace_id)
            self.advance(by_sequence[newest][1])
        if now_ms is not None:
            self.advance(now_ms)
        self._matrix.prepare()
        self.expired = self.displaced = 0


# -- how large a cache must be: capacity = rate x TTL

MOST_ELEMENTS: Final = 1_000_000  # greatest capacity of a partition's cache (KP_CACHE_MAX_ELEMENTS)


def entry_bytes(dimensions: int) -> int:
    """Return the most bytes that one cache entry uses."""
    with_codes = round(4 * dimensions * 1.3)  # scan.py has int8 codes of large caches
    return with_codes + 150  # of id, time and their Python objects: measured with ids of 45 characters


def per_second(times_ms: Sequence[int]) -> float | None:
    """Return the rate of entries with these stream times (rising, ms); None if they span no time."""
    span = times_ms[-1] - times_ms[0] if times_ms else 0
    return None if span <= 0 else 1000 * (len(times_ms) - 1) / span


def is_short(reach_ms: float, ttl_ms: int | None) -> bool:
    """Return whether entries leave by capacity, at an age of `reach_ms`, long before the TTL (None: no expiry).

    If a full cache reaches back less than half of the TTL, the TTL hardly decides how long entries live.
    """
    return ttl_ms is not None and reach_ms < 0.5 * ttl_ms


def capacity_for(rate: float, ttl_ms: int) -> int:
    """Return the capacity that holds the TTL at a rate (entries per second), rounded up to two digits."""
    exact = max(1, math.ceil(rate * ttl_ms / 1000))
    step: int = 10 ** max(0, len(str(exact)) - 2)
    return -(-exact // step) * step


def advice(rate: float | None, reach_ms: float, ttl_ms: int, dimensions: int) -> str:
    """Return which setting to change if entries leave by capacity long before the TTL, and the memory that it costs."""
    seconds = max(1, round(reach_ms / 1000))
    lower = f"lower KP_CACHE_TTL_SECONDS to about {seconds}"
    wanted = None if rate is None else capacity_for(rate, ttl_ms)
    if wanted is None:
        return f"raise KP_CACHE_MAX_ELEMENTS, or {lower}"
    if wanted > MOST_ELEMENTS:
        return f"{lower}, or spread the traces over more partitions: rate x TTL is {wanted}, beyond any capacity"
    memory = megabytes(wanted * entry_bytes(dimensions))
    return f"set KP_CACHE_MAX_ELEMENTS to about {wanted} (rate x TTL; at most {memory} for each partition), or {lower}"


def megabytes(size: int) -> str:
    """Return a number of bytes as MB, with one decimal below 10."""
    value = size / 1e6
    return f"{value:.1f} MB" if value < 9.95 else f"{value:,.0f} MB"
