"""Scored documents of a file or the topics, as one table of numbers: the input of report and whatif."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from worker.commands.shared.scored_document import DocumentScoring
from worker.commands.shared.shown import shown_text
from worker.core.terminal import number_of

Table = npt.NDArray[np.void]
"""Rows with named columns: `table["score"]` is a column, `table[rows]` selects rows."""

Rows = npt.NDArray[np.intp]

LEFT_OUT_SHOWN: Final = 20

_PIECE: Final = 4096
"""Rows collected before they are packed: as Python numbers, a row takes five times the memory."""


class NoDocuments(ValueError):
    """There is no document to work on; the message says why."""


def unscored(error: Exception) -> str | None:
    """Return what to do with an unscored document; None if the decoder's error means something else."""
    text = str(error)
    return "no scoring object: score it first (kp-worker score)" if "`scoring`" in text and "missing" in text else None


class LeftOut:
    """Documents skipped for one kind of reason: their number, and the places of the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[tuple[str, str]] = []

    def add(self, where: str, reason: str) -> None:
        """Count a document; the first LEFT_OUT_SHOWN are kept with their reason."""
        self.count += 1
        if len(self.shown) < LEFT_OUT_SHOWN:
            self.shown.append((shown_text(where), shown_text(reason)))


class ScoredTraces:
    """Scored documents as a table: `add` each, then take the `counted` ones.

    `columns`: the numpy type of each column, in addition to those that every table has: `document` (a hash of all
    bytes), `row` (its place in order of `add`), and those that decide which documents count, and in which order. A
    column of names holds their numbers, see `names`. `texts` are by row.
    """

    cannot: str
    """What cannot be done with skipped documents, for the error if none remains."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.unreadable, self.inconsistent = LeftOut(), LeftOut()
        self.texts: list[str] = []
        place = {"document": "u8", "row": "u4", "record_ms": "i8", "time_ms": "i8", "partition": "u4", "offset": "u8"}
        self._kind = np.dtype([*place.items(), *columns.items()])
        self._new: list[tuple[Any, ...]] = []
        self._pieces = [np.empty(0, self._kind)]
        self._codes: dict[str, dict[Any, int]] = {}

    @abstractmethod
    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Take one output document; an unusable one is counted, and the first of these are named by `where`.

        `record_ms` is the Kafka record's timestamp, for the bounds of `counted`.
        """

    def _keep(
        self, value: bytes, scoring: DocumentScoring, record_ms: int, text: str, cells: Mapping[str, Any]
    ) -> None:
        """Add the row of one document; `cells` are in the order of the columns."""
        row = (hash64(value), len(self.texts), record_ms, scoring.stream_time_ms, scoring.source.partition,
               scoring.source.offset, *cells.values())  # fmt: skip
        self.texts.append(text)
        self._new.append(row)
        if len(self._new) == _PIECE:
            self._pack()

    def _pack(self) -> None:
        self._pieces.append(np.array(self._new, self._kind))
        self._new.clear()

    def code(self, column: str, value: Any) -> int:
        """Return the number of a name; a new name gets a new number."""
        codes = self._codes.setdefault(column, {})
        return codes.setdefault(value, len(codes))

    def names(self, column: str) -> list[Any]:
        """Return the names of a column of numbers."""
        return list(self._codes.get(column, ()))

    def counted(self, last: int | None = None, since_ms: int = 0) -> tuple[Table, int]:
        """Return the rows that count, in stream-time order, and the number of repeated documents.

        Rows count from `since_ms` on (by `record_ms`), and of these only the `last` ones. Raises NoDocuments.
        """
        self._pack()
        table = np.concatenate(self._pieces)
        self._pieces = [table]
        if not len(table):
            raise NoDocuments(self._nothing())
        # 1. Repeated documents count once: a worker that delivers at least once may repeat an output byte for byte.
        kept = np.sort(np.unique(table["document"], return_index=True)[1])
        repeated, record_ms = len(table) - len(kept), table["record_ms"]
        # 2. Only the last ones, if requested.
        kept = kept[record_ms[kept] >= since_ms]
        if last is not None:
            kept = np.sort(kept[np.argsort(record_ms[kept], kind="stable")[-last:]])
        if not len(kept):
            raise NoDocuments(f"none of {number_of(len(table), 'trace')} is in the requested time range")
        # 3. Stream-time order; within a partition that is the order of scoring.
        order = np.lexsort([table[name][kept] for name in ("offset", "partition", "time_ms")])
        return table[kept[order]], repeated

    def _nothing(self) -> str:
        count = self.unreadable.count + self.inconsistent.count
        if not count:
            return "no documents"
        where, reason = (self.unreadable.shown or self.inconsistent.shown)[0]
        return f"none of {count} documents can be {self.cannot}; {where}: {reason}"


def hash64(data: bytes) -> int:
    """Return a 64-bit hash: among a million values, two are equal with a probability of 3e-8."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def counts_of(codes: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return (code, frequency), most frequent first, then in order of first appearance."""
    values, first, counts = np.unique(codes, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    return [(int(values[i]), int(counts[i])) for i in order]


DOMAINS_SHOWN: Final = 20
"""Domains are free text of the agents, so there may be as many as traces: the others become one row."""


def by_domain(codes: npt.NDArray[Any]) -> tuple[list[tuple[int, Rows]], list[int], Rows]:
    """Return the largest domains with their rows; then the codes of all others, and their rows together."""
    order = [code for code, _ in counts_of(codes)]
    rest = order[DOMAINS_SHOWN:]
    largest = [(code, np.flatnonzero(codes == code)) for code in order[:DOMAINS_SHOWN]]
    return largest, rest, np.flatnonzero(np.isin(codes, rest))


def bars(values: npt.NDArray[Any], count: int) -> tuple[int, ...]:
    """Count values in equal bars from 0 to 1; values outside (novelty may be) count in the outermost bars."""
    places = np.clip(np.floor(values * count + 1e-9).astype(np.intp), 0, count - 1)
    return tuple(np.bincount(places, minlength=count).tolist())


def floats(values: npt.ArrayLike) -> tuple[float, ...]:
    """Return Python floats."""
    return tuple(np.asarray(values, np.float64).tolist())
