"""The exact scan against the full product: the same row and the same bits, whatever the vectors are."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from worker import VectorCache
from worker.core import scan
from worker.core.novelty import Neighbour, Vector, unit
from worker.core.scan import Codes, Matrix, Ranges, can_scan_codes

DIMENSIONS = 384
Rows = npt.NDArray[np.float32]


def units(values: npt.ArrayLike) -> Rows:
    return np.stack([unit(row, len(row)) for row in np.asarray(values, dtype=np.float64)])


def random(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    return units(rng.normal(size=(count, dimensions)))


def clustered(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    centres = rng.normal(size=(5, dimensions))
    return units(centres[rng.integers(5, size=count)] + 0.05 * rng.normal(size=(count, dimensions)))


def duplicates(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    return random(rng, 7, dimensions)[rng.integers(7, size=count)]


def all_equal(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    return np.repeat(random(rng, 1, dimensions), count, axis=0)


def opposite(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    return random(rng, 1, dimensions) * rng.choice(np.array([-1, 1], dtype=np.float32), size=(count, 1))


def one_hot(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    return np.eye(dimensions, dtype=np.float32)[rng.integers(dimensions, size=count)]


def with_zeros(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    return random(rng, count, dimensions) * rng.integers(2, size=(count, 1)).astype(np.float32)


def one_large_number(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    values = rng.normal(size=(count, dimensions)) * 10.0 ** rng.integers(-30, 0, size=(count, 1))
    values[:, 0] = 1.0
    return units(values)


def close_to_each_other(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    """One direction and its neighbours at a distance of a few roundings: their order is decided by the last bits."""
    return units(rng.normal(size=dimensions) + 1e-7 * rng.normal(size=(count, dimensions)))


def just_too_coarse(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    """Numbers in the middle between two codes: the greatest rounding of each number, in one direction."""
    steps = rng.integers(-126, 126, size=(count, dimensions)) + 0.5
    steps[:, 0] = 127
    return units(steps)


def any_length(rng: np.random.Generator, count: int, dimensions: int) -> Rows:
    """No entry has such a vector, but a changelog that somebody else wrote may."""
    return random(rng, count, dimensions) * np.float32(10.0) ** rng.integers(-6, 7, size=(count, 1)).astype(np.float32)


KINDS = (
    random, clustered, duplicates, all_equal, opposite, one_hot, with_zeros, one_large_number, close_to_each_other,
    just_too_coarse, any_length,
)  # fmt: skip


@pytest.fixture
def few_rows_have_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "FROM_ROWS", 64)


class Counted(Matrix):
    """A matrix that counts the scans by codes."""

    by_codes = 0

    def _gather(self, query: Vector, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        self.by_codes += 1
        return super()._gather(query, rows)


def matrix_of(rows: Rows) -> Counted:
    matrix = Counted(*rows.shape)
    for number, row in enumerate(rows):
        matrix.put(number, row)
    return matrix


def full_product(rows: Rows, query: Vector) -> npt.NDArray[np.float32]:
    padded = np.zeros((scan.whole_blocks(len(rows)), rows.shape[1]), dtype=np.float32)
    padded[: len(rows)] = rows
    return np.dot(padded, query)[: len(rows)]


def same_in_any_row(dimensions: int) -> bool:
    """Return whether BLAS computes equal rows with equal bits. Sandy Bridge's kernel does at multiples of 16 alone."""
    rng = np.random.default_rng(1)
    return all(
        len(set(np.dot(np.repeat(random(rng, 1, dimensions), 104, axis=0), random(rng, 1, dimensions)[0]).tolist()))
        == 1
        for _ in range(20)
    )


def brute_force(similarities: npt.NDArray[np.float32], ranges: Ranges) -> tuple[int, float]:
    best: tuple[int, float] | None = None
    for row in (row for first, end in ranges for row in range(first, end)):
        if best is None or similarities[row] > best[1]:
            best = row, float(similarities[row])
    return best


def queries(rng: np.random.Generator, rows: Rows) -> Iterator[Vector]:
    dimensions = rows.shape[1]
    yield unit(rows[rng.integers(len(rows))], dimensions)  # a repeat
    yield -unit(rows[rng.integers(len(rows))], dimensions)
    yield unit(rows[rng.integers(len(rows))] + 0.01 * rng.normal(size=dimensions), dimensions)
    yield unit(rng.normal(size=dimensions), dimensions)
    yield np.zeros(dimensions, dtype=np.float32)
    yield np.eye(dimensions, dtype=np.float32)[rng.integers(dimensions)]


def some_ranges(rng: np.random.Generator, count: int) -> Ranges:
    """Return live rows of a ring: all of them, a part, or two parts with the older one behind."""
    first, end = sorted(int(number) for number in rng.choice(count + 1, size=2, replace=False))
    return [((0, count),), ((first, end),), ((end, count), (0, first + 1)) if end < count else ((0, count),)][
        int(rng.integers(3))
    ]


@pytest.mark.usefixtures("few_rows_have_codes")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_scan_is_the_full_product_to_the_last_bit(kind: Callable[..., Rows], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dimensions in (DIMENSIONS, 768, 100):
        assert can_scan_codes(dimensions) == same_in_any_row(dimensions)
        assert can_scan_codes(dimensions) or dimensions % 16, "the dimensions of common models"
        count = int(rng.integers(80, 700))
        rows = kind(rng, count, dimensions)
        matrix = matrix_of(rows)
        for query in queries(rng, rows):
            similarities = full_product(rows, query)
            ranges = some_ranges(rng, count)
            assert matrix.nearest(query, ranges) == brute_force(similarities, ranges)


@pytest.mark.usefixtures("few_rows_have_codes")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_bounds_hold_for_every_row(kind: Callable[..., Rows], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = kind(rng, 300, DIMENSIONS)
    codes = Codes(*rows.shape)
    codes.encode(rows, 0, len(rows))
    for query in queries(rng, rows):
        estimates = np.zeros(len(rows), dtype=np.float32)
        bounds = codes.estimate(query, ((0, len(rows)),), estimates)
        if bounds is None:
            assert not query.any()
            continue
        (errors,), common = bounds
        wrong = np.abs(full_product(rows, query).astype(np.float64) - estimates)
        assert (wrong <= errors.astype(np.float64) + common).all()
        assert errors[np.linalg.norm(rows, axis=1) < 1.0005].max(initial=0.0) < 0.08


@pytest.mark.slow
def test_the_codes_scan_what_they_should(seed: int) -> None:
    """At the size from which they are used: by codes where few rows are candidates, by the full product elsewhere."""
    rng = np.random.default_rng(seed)
    count = scan.FROM_ROWS + 100
    for kind, by_codes in ((random, True), (opposite, False), (all_equal, False)):
        rows = kind(rng, count, DIMENSIONS)
        matrix = matrix_of(rows)
        for number, query in enumerate(queries(rng, rows)):
            expected = full_product(rows, query)
            assert matrix.nearest(query, ((0, count),)) == (int(expected.argmax()), float(expected.max()))
            assert by_codes or not matrix.by_codes, number
        assert by_codes == bool(matrix.by_codes)
        small = matrix.by_codes
        matrix.nearest(rows[0], ((0, scan.FROM_ROWS - 1),))
        assert matrix.by_codes == small


@pytest.mark.usefixtures("few_rows_have_codes")
def test_useless_trials_become_rare_and_codes_come_back(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = all_equal(rng, 100, DIMENSIONS)
    matrix = matrix_of(rows)
    trials = 0
    estimate = Codes.estimate

    def counted(self: Codes, *arguments: Any) -> Any:
        nonlocal trials
        trials += 1
        return estimate(self, *arguments)

    monkeypatch.setattr(Codes, "estimate", counted)
    for _ in range(400):
        matrix.nearest(rows[0], ((0, 100),))
    assert trials < 20
    assert not matrix.by_codes
    for number, row in enumerate(random(rng, 100, DIMENSIONS)):
        matrix.put(number, row)
    for _ in range(100):
        matrix.nearest(random(rng, 1, DIMENSIONS)[0], ((0, 100),))
    assert matrix.by_codes > 60


@pytest.mark.slow
def test_copied_rows_and_parts_have_the_bits_of_the_whole_product(seed: int) -> None:
    """Also where the matrix has many MB, so that BLAS may share the work among threads."""
    rng = np.random.default_rng(seed)
    for dimensions in (64, 384, 512, 768, 1024):
        assert can_scan_codes(dimensions)
        vectors = rng.normal(size=(scan.FROM_ROWS, dimensions)).astype(np.float32)
        query = rng.normal(size=dimensions).astype(np.float32)
        whole = np.dot(vectors, query)
        for count in (8, 16, 24, 64, 128, 1000, 4000):
            rows = rng.integers(len(vectors), size=count)
            assert np.dot(vectors[rows], query).tobytes() == whole[rows].tobytes()
            first = 8 * int(rng.integers((len(vectors) - count) // 8))
            assert np.dot(vectors[first : first + count], query).tobytes() == whole[first : first + count].tobytes()


def test_vectors_and_index_need_at_most_1_3_times_the_vectors() -> None:
    """A row is 4 d bytes of float32, d of codes, 4 each of scale, residual and similarity: 1.258 times 4 d, d = 384."""

    def held(part: object) -> int:
        return sum(it.nbytes for it in vars(part).values() if isinstance(it, np.ndarray))

    count = scan.FROM_ROWS
    matrix = Matrix(count, DIMENSIONS)
    float32 = 4 * DIMENSIONS * count
    assert held(matrix) == float32 + 4 * count
    matrix.put(count - 1, np.eye(DIMENSIONS, dtype=np.float32)[0])
    matrix.prepare()
    assert held(matrix) + held(matrix._codes) == float32 + DIMENSIONS * count + 12 * count <= 1.3 * float32


# -- the cache


def replay(rng: np.random.Generator, cache: VectorCache, rows: Rows) -> list[tuple[int, Neighbour | None]]:
    """Return what a cache finds while vectors enter and expire, and it is restored."""
    nearest: list[tuple[int, Neighbour | None]] = []
    log: list[tuple[int, int, str, Vector]] = []
    for number, row in enumerate(rows):
        now = number * 10
        nearest.append((len(cache), cache.nearest_unit(row, now)))
        log.append((cache.add_unit(row, now, str(number)), now, str(number), row))
        if rng.random() < 0.01:
            cache.restore(log[-cache.max_elements :], now)
    return nearest


@pytest.mark.parametrize("kind", KINDS[:-1], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ttl_ms", [None, 1500])
def test_a_cache_finds_the_same_with_and_without_codes(
    kind: Callable[..., Rows], ttl_ms: int | None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rows = kind(np.random.default_rng(seed), 700, DIMENSIONS)
    results = []
    for from_rows in (64, sys.maxsize):
        monkeypatch.setattr(scan, "FROM_ROWS", from_rows)
        results.append(replay(np.random.default_rng(seed), VectorCache(200, DIMENSIONS, ttl_ms), rows))
    assert results[0] == results[1]


@pytest.mark.usefixtures("few_rows_have_codes")
def test_a_scan_leaves_no_reference_behind_and_takes_none(seed: int) -> None:
    """A None that simsimd gave away without owning it would abort Python in the end (`Codes.estimate`)."""
    rows = random(np.random.default_rng(seed), 100, DIMENSIONS)
    matrix = matrix_of(rows)
    matrix.nearest(rows[0], ((0, 100),))
    before = sys.getrefcount(None)
    for _ in range(500):
        assert matrix.nearest(rows[0], ((1, 100), (0, 1)))[0] == 0
    assert abs(sys.getrefcount(None) - before) < 100
    assert matrix.by_codes == 501


def test_without_simsimd_the_full_product_is_computed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rows = random(np.random.default_rng(seed), scan.FROM_ROWS, DIMENSIONS)
    with_codes, without = matrix_of(rows), matrix_of(rows)
    everything = ((0, len(rows)),)
    nearest = with_codes.nearest(rows[5], everything)
    monkeypatch.setattr(scan, "find_spec", lambda name: None)
    can_scan_codes.cache_clear()
    try:
        assert without.nearest(rows[5], everything) == nearest
    finally:
        can_scan_codes.cache_clear()
    assert with_codes.by_codes == 1
    assert not without.by_codes
