"""The exact scan: find the unit vector most similar to a query, bit for bit as the full float32 product would.

Memory bandwidth limits a scan. From `FROM_ROWS` rows on, each row also has int8 codes, a quarter of the bytes, and an
integer product with the query's codes (simsimd) bounds every similarity. Only the candidates, whose upper bound reaches
the greatest lower bound, are computed in float32, with the bits of the full product. Without simsimd, with fewer rows,
or with many candidates, the full product is computed.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]
Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of rows that do not overlap, the one with the greatest end first. A tie goes to the earlier range,
then to the lower row."""

FROM_ROWS: Final = 8192
"""Rows from which the codes are worth their overhead: fewer float32 rows fit in the processor's cache."""

BLOCK: Final = 8
"""BLAS computes the rows after the last multiple of 4 with another kernel, slightly differently. In whole blocks of 8,
equal vectors have equal similarity in any row."""

TOGETHER: Final = 128
"""Rows copied or encoded together: 192 kB of float32, which stay in the processor's cache."""

SHARE: Final = 6  # if more than 1 in 6 rows is a candidate, the full product is faster than copying the candidates

LONGEST_PAUSE: Final = 32
"""Most full-product scans before the codes are tried again, while every trial finds too many candidates."""

UNIT_ROUNDING: Final = 2.0**-24
LONGEST: Final = 1.001  # vectors up to this length have a bound; a longer row is always a candidate

UNBOUNDED: Final = np.float32(1e30)  # the residual of a row that is always a candidate


def whole_blocks(rows: int) -> int:
    """Return a number of rows, rounded up to whole blocks."""
    return -(-rows // BLOCK) * BLOCK


class Matrix:
    """Float32 rows of unit length (or zero), and the exact scan over some of them.

    Memory, once rows are written: 4 bytes per number and 4 per row; with codes another byte per number and 8 per row.
    """

    def __init__(self, rows: int, dimensions: int) -> None:
        self._vectors = np.zeros((whole_blocks(rows), dimensions), dtype=np.float32)
        self._similarities = np.zeros(len(self._vectors), dtype=np.float32)
        self._codes: Codes | None = None
        self._used = 0
        self._pause = self._refused = 0

    def put(self, row: int, vector: Floats) -> None:
        """Overwrite a row with a vector of unit length, or zero."""
        self._vectors[row] = vector
        if row >= self._used:
            self._used = row + 1
        if self._codes is not None:
            self._codes.encode(self._vectors, row, row + 1)

    def clear(self) -> None:
        """Drop the codes; `prepare` makes them again."""
        self._codes = None
        self._used = 0

    def prepare(self) -> None:
        """Make the codes of the rows that have a vector, if there are many; otherwise the first scan makes them."""
        if self._codes is None and self._used >= FROM_ROWS and can_scan_codes(self._vectors.shape[1]):
            self._codes = Codes(*self._vectors.shape)
            self._codes.encode(self._vectors, 0, self._used)

    def nearest(self, query: Floats, ranges: Ranges) -> tuple[int, float]:
        """Return the most similar row in `ranges` and its similarity; a tie goes to the first (see `Ranges`)."""
        used = -(-ranges[0][1] // BLOCK) * BLOCK
        if used < FROM_ROWS:
            similarities = np.dot(self._vectors[:used], query, out=self._similarities[:used])
        else:
            candidates = self._candidates(query, ranges, used)
            if candidates is not None:
                rows, similarities = candidates
                at = int(similarities.argmax())
                return int(rows[at]), float(similarities[at])
            similarities = self._similarities[:used]
            for first, end in ranges:
                blocks = slice(first // BLOCK * BLOCK, whole_blocks(end))
                np.dot(self._vectors[blocks], query, out=self._similarities[blocks])
        row, greatest = -1, -np.inf
        for first, end in ranges:
            other = first + int(similarities[first:end].argmax())
            similarity = similarities[other]
            if row < 0 or similarity > greatest:
                row, greatest = other, similarity
        return row, float(greatest)

    def _candidates(self, query: Floats, ranges: Ranges, used: int) -> tuple[Indices, Floats] | None:
        """Return the rows that can be most similar, in the order of `ranges`, and their similarities.

        None if the codes give no bound, or would not be faster than the full product.
        """
        count = sum(end - first for first, end in ranges)
        if count < FROM_ROWS:
            return None
        if self._pause:
            self._pause -= 1
            return None
        self.prepare()
        if self._codes is None:
            return None
        estimates = self._similarities[:used]
        bounds = self._codes.estimate(query, ranges, estimates)
        if bounds is None:
            return None
        errors, common = bounds
        floor = max(
            float((estimates[first:end] - error).max()) for (first, end), error in zip(ranges, errors, strict=True)
        )
        possible = [
            estimates[first:end] + error >= floor - 2.0 * common
            for (first, end), error in zip(ranges, errors, strict=True)
        ]
        if sum(int(np.count_nonzero(part)) for part in possible) * SHARE > count:
            self._refused += 1
            self._pause = min(2 ** (self._refused - 1), LONGEST_PAUSE) - 1
            return None
        self._refused = 0
        parts = [first + np.flatnonzero(part) for (first, _), part in zip(ranges, possible, strict=True)]
        rows = np.concatenate(parts)
        return rows, self._gather(query, rows)

    def _gather(self, query: Floats, rows: Indices) -> Floats:
        """Return the similarities of these rows, with the bits of the full product."""
        similarities = np.empty(len(rows), dtype=np.float32)
        copies = np.zeros((whole_blocks(min(len(rows), TOGETHER)), len(query)), dtype=np.float32)
        for start in range(0, len(rows), TOGETHER):
            part = rows[start : start + TOGETHER]
            np.take(self._vectors, part, axis=0, out=copies[: len(part)], mode="clip")
            product = np.dot(copies[: whole_blocks(len(part))], query)  # leftovers in the last block do no harm
            similarities[start : start + len(part)] = product[: len(part)]
        return similarities


class Codes:
    """Int8 codes of float32 rows: row x is about scale * code, and |x - scale * code| is at most the row's residual.

    Error bound. Let q be the query, x a row, q' and x' their scale * code, r_q and r their residuals, d the dimensions,
    u = 2^-24, and L = `LONGEST`, which no length exceeds.
     - q.x - q'.x' = q'.(x - x') + (q - q').x, which by Cauchy-Schwarz is at most (L + r_q) r + r_q L.
     - BLAS computes q.x in float32 with an error of at most g L^2, g = d u / (1 - d u), in any order of the sum.
     - The product of two codes is an exact integer below 2^31. It is rounded to float32 and multiplied by two scales;
       these roundings and those of the bounds themselves are below 32 u, as no sum exceeds 2.
    So the computed similarity is within (L + r_q) r + c of the estimate, c = r_q L + g L^2 + 32 u, and a row whose
    estimate + (L + r_q) r is more than 2 c below the greatest estimate - (L + r_q) r is not the maximum.
    """

    def __init__(self, rows: int, dimensions: int) -> None:
        self._codes = np.zeros((rows, dimensions), dtype=np.int8)
        self._scales = np.zeros(rows, dtype=np.float32)
        self._residuals = np.zeros(rows, dtype=np.float32)

    def encode(self, vectors: Floats, first: int, end: int) -> None:
        """Make the codes of vectors[first:end]."""
        for start in range(first, end, TOGETHER):
            part = slice(start, min(start + TOGETHER, end))
            self._codes[part], self._scales[part], self._residuals[part] = int8_codes(vectors[part])

    def estimate(self, query: Floats, ranges: Ranges, out: Floats) -> tuple[list[Floats], float] | None:
        """Write the estimated similarities of the rows in `ranges` to `out`.

        Return the error bounds by row of each range, and the common part c of the bounds; None for a query whose length
        is not about 1.
        """
        import simsimd

        codes, scales, residuals = int8_codes(query[None])
        if not scales[0] or residuals[0] >= UNBOUNDED:
            return None
        errors = []
        residual = float(residuals[0])
        for first, end in ranges:
            # Without the argument `out`: with it, simsimd 6.5 returns a borrowed None without a reference, which
            # eventually aborts Python 3.11.
            products = simsimd.cdist(codes, self._codes[first:end], "dot", out_dtype="float32")
            np.multiply(np.asarray(products).reshape(-1), self._scales[first:end], out=out[first:end])
            out[first:end] *= scales[0]
            errors.append(self._residuals[first:end] * np.float32(LONGEST + residual))
        rounding = len(query) * UNIT_ROUNDING
        return errors, residual * LONGEST + rounding / (1 - rounding) * LONGEST**2 + 32 * UNIT_ROUNDING


def int8_codes(vectors: Floats) -> tuple[npt.NDArray[np.int8], Floats, Floats]:
    """Return the int8 codes of vectors, shape (n, d), with each one's scale and residual.

    The residual is at least |x - scale * code|. With u = 2^-24, the float32 difference is wrong by at most 4 u in
    length (2 u of each number, plus underflow), and its length, a sum of d squares, by a factor of at most 1 + d u. It
    is `UNBOUNDED` for a vector longer than `LONGEST`.
    """
    dimensions = vectors.shape[1]
    odd = ~(np.einsum("ij,ij->i", vectors, vectors) <= LONGEST)
    if odd.any():
        vectors = np.where(odd[:, None], np.float32(0), vectors)
    scales = np.maximum(vectors.max(axis=1), -vectors.min(axis=1)) / np.float32(127)
    # A row of tiny numbers gets the codes 0 and its length as residual: no quotient leaves int8's range.
    scales[scales < np.float32(1e-30)] = 0.0
    rest = vectors / np.where(scales > 0.0, scales, np.float32(1))[:, None]
    codes = np.rint(rest, out=rest).astype(np.int8)
    rest *= scales[:, None]
    np.subtract(vectors, rest, out=rest)
    lengths = np.sqrt(np.einsum("ij,ij->i", rest, rest))
    residuals = lengths * np.float32(1.0 + (dimensions + 8) * UNIT_ROUNDING) + np.float32(8 * UNIT_ROUNDING)
    residuals[odd] = UNBOUNDED
    return codes, scales, residuals


@lru_cache
def can_scan_codes(dimensions: int) -> bool:
    """Return whether codes can be used: simsimd is installed, and BLAS gives copied rows the same bits."""
    if not 64 <= dimensions <= 8192 or find_spec("simsimd") is None:
        return False
    vectors = np.sin(np.arange(1, 1 + 512 * dimensions, dtype=np.float32)).reshape(-1, dimensions)
    query, rows = vectors[100].copy(), np.arange(3, 512, 5)[:96]
    full = np.dot(vectors, query)
    copied = [np.dot(vectors[rows[:count]], query) for count in (8, 24, 96)]
    return np.array_equal(np.dot(vectors[8:504], query), full[8:504]) and all(
        np.array_equal(part, full[rows[: len(part)]]) for part in copied
    )
