"""The exact scan against the full product: the same row and the same bits, whatever the vectors are."""

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from worker import VectorCache
from worker.core import scan
from worker.core.novelty import Label, Neighbour, Vector, unit
from worker.core.scan import Codes, Matrix, Ranges, can_scan_codes, quantise

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


@pytest.fixture
def never_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that switches the codes off."""
    yield lambda: monkeypatch.setattr(scan, "FROM_ROWS", sys.maxsize)


def matrix_of(rows: Rows) -> Matrix:
    matrix = Matrix(*rows.shape)
    for number, row in enumerate(rows):
        matrix.put(number, row)
    return matrix


def full_product(rows: Rows, query: Vector) -> npt.NDArray[np.float32]:
    padded = np.zeros((scan.whole_blocks(len(rows)), rows.shape[1]), dtype=np.float32)
    padded[: len(rows)] = rows
    return np.dot(padded, query)[: len(rows)]


def brute_force(similarities: npt.NDArray[np.float32], ranges: Ranges, excluded: Sequence[int]) -> tuple[int, float]:
    best: tuple[int, float] | None = None
    for row in (row for first, end in ranges for row in range(first, end) if row not in set(excluded)):
        if best is None or similarities[row] > best[1]:
            best = row, float(similarities[row])
    assert best is not None
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
        assert can_scan_codes(dimensions)
        count = int(rng.integers(80, 700))
        rows = kind(rng, count, dimensions)
        matrix = matrix_of(rows)
        for query in queries(rng, rows):
            similarities = full_product(rows, query)
            ranges = some_ranges(rng, count)
            inside = [row for first, end in ranges for row in range(first, end)]
            excluded = [int(row) for row in rng.choice(inside, size=len(inside) // 9, replace=False)]
            assert matrix.nearest(query, ranges, excluded) == brute_force(similarities, ranges, excluded)
            live = rng.random(count) < 0.5
            found = matrix.all_nearest(query, live)
            assert found is not None
            greatest = similarities[live].max()
            assert found[1] == greatest
            assert found[0].tolist() == np.flatnonzero(live & (similarities == greatest)).tolist()
