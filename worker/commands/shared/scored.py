"""Scored documents of a file or the topics, as rows of numbers: what report and whatif share."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from worker.commands.shared.console import CommandError, SettingsError
from worker.commands.shared.json_lines import read_lines
from worker.commands.shared.shown import shown_text
from worker.config import ConfigError, Settings
from worker.core.records import EmbedderIdentity
from worker.core.scoring import Components, Weights

if TYPE_CHECKING:
    from worker.commands.shared.scored_topics import TakeDocument


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class NearestTrace(Struct, frozen=True):
    """The nearest earlier trace and its cosine similarity."""

    id: str
    similarity: float


class TraceSource(Struct, frozen=True):
    """Where the trace was read."""

    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class DocumentScreening(Struct, frozen=True):
    """The `scoring.screen` object."""

    rules: list[str]


class DocumentScoring(Struct, frozen=True):
    """The `scoring` object."""

    score: _Fraction
    decision: str
    threshold: _Fraction
    profile: str
    weights: Weights
    components: Components
    overrides: list[str]
    nearest: NearestTrace | None
    stream_time: Annotated[datetime, Meta(tz=True)]
    embedder: EmbedderIdentity | None
    source: TraceSource
    worker_version: str
    screen: DocumentScreening | None = None

    @property
    def stream_time_ms(self) -> int:
        """Stream time, ms since 1970."""
        return (self.stream_time - _EPOCH) // timedelta(milliseconds=1)


class ScoredInput(NamedTuple):
    """What to read: a file, or (None) the topics; of these records from `since` on (UTC), and the `last` ones."""

    file: BinaryIO | None
    since: datetime | None = None
    last: int | None = None

    def described(self, settings: Settings) -> str:
        """Return what is read, for the user: a file without its folders, since a page may be shared."""
        if self.file is not None:
            name = str(getattr(self.file, "name", "<stdin>"))
            return "standard input" if name == "<stdin>" else Path(name).name
        since = [f"since {self.since:%Y-%m-%d %H:%M:%S} UTC"] if self.since else []
        last = [f"the last {self.last}"] if self.last else []
        return ", ".join([f"{settings.accepted_topic} and {settings.rejected_topic}", *since, *last])

    def read(self, settings: Settings, take: TakeDocument, leave_out: Callable[[str, str], None]) -> int:
        """Read all documents; return from which time (ms) on they are complete. Raises CommandError.

        `leave_out` gets the place of a line that is too long, and why it is not read.
        """
        try:
            if self.file is not None:
                for line in read_lines(self.file, settings.max_message_bytes):
                    if line.problem is not None:
                        leave_out(f"line {line.number}", line.problem)
                    elif line.data.strip():
                        take(line.data, f"line {line.number}", 0)
                return 0
            return self._read_topics(settings, take)
        except OSError as error:
            raise CommandError(f"{self.described(settings)} cannot be read: {error.strerror or error}") from None

    def _read_topics(self, settings: Settings, take: TakeDocument) -> int:
        from worker.commands.shared.scored_topics import read_outputs

        since_ms = None if self.since is None else round(self.since.replace(tzinfo=UTC).timestamp() * 1000)
        try:
            return asyncio.run(read_outputs(settings, take, since_ms, self.last))
        except ConfigError as error:
            raise SettingsError(str(error)) from None


Rows = npt.NDArray[np.intp]

LEFT_OUT_SHOWN: Final = 20

_PLACE: Final = {"document": "Q", "record_ms": "q", "time_ms": "q", "partition": "I", "offset": "Q"}
"""Columns that every table has: they say which rows count, and in which order."""


class NoDocuments(ValueError):
    """There is no document to work on; the message says why."""


class LeftOut:
    """Documents that are skipped for one kind of reason: how many, and where the first ones are."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[tuple[str, str]] = []

    def add(self, where: str, reason: str) -> None:
        """Count a document; the first LEFT_OUT_SHOWN are kept with their reason."""
        self.count += 1
        if len(self.shown) < LEFT_OUT_SHOWN:
            self.shown.append((shown_text(where), shown_text(reason)))


class DistinctValues:
    """Distinct values by number, so that a column can hold four bytes for each."""

    def __init__(self) -> None:
        self._codes: dict[Any, int] = {}

    def code(self, value: Any) -> int:
        """Return the number of a value, a new one for a new value."""
        return self._codes.setdefault(value, len(self._codes))

    def values(self) -> list[Any]:
        """Return the values in the order of their numbers."""
        return list(self._codes)


class Texts:
    """Texts in one piece of memory, by the position that `add` returned; none holds U+0000."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, *texts: str) -> int:
        """Keep texts that belong to one row; return their position."""
        position = len(self._bytes)
        self._bytes += "".join(f"{text}\0" for text in texts).encode()
        return position

    def get(self, position: int, count: int) -> list[str]:
        """Return as many texts as were added at the position."""
        texts = []
        for _ in range(count):
            end = self._bytes.index(0, position)
            texts.append(self._bytes[position:end].decode())
            position = end + 1
        return texts


class ScoredRows:
    """A table of numbers. `kinds`: the typecode (module array) of each column besides those that every table has."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._columns = {name: array(kind) for name, kind in {**_PLACE, **kinds}.items()}

    def __len__(self) -> int:
        return len(self._columns["document"])

    def append(self, value: bytes, scoring: DocumentScoring, record_ms: int, cells: Mapping[str, Any]) -> None:
        """Add the row of one document; `record_ms` is the Kafka record's timestamp."""
        place = {
            "document": hash64(value),
            "record_ms": record_ms,
            "time_ms": scoring.stream_time_ms,
            "partition": scoring.source.partition,
            "offset": scoring.source.offset,
        }
        for name, cell in {**place, **cells}.items():
            self._columns[name].append(cell)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column, without a copy."""
        column = self._columns[name]
        return np.frombuffer(column, dtype=np.dtype(column.typecode))

    def counted(self, last: int | None = None, since_ms: int = 0) -> tuple[Rows, int]:
        """Return the rows that count, in stream-time order, and how many documents came again.

        Those with `record_ms` from `since_ms` on, and of these the `last` ones. Raises NoDocuments.
        """
        # 1. Documents that came twice (a worker that delivers at least once repeats its outputs to the byte) count
        # once.
        _, first = np.unique(self.column("document"), return_index=True)
        kept = np.sort(first)
        repeated = len(self) - len(kept)
        # 2. The last ones only, where asked for.
        record_ms = self.column("record_ms")
        kept = kept[record_ms[kept] >= since_ms]
        if last is not None:
            kept = np.sort(kept[np.argsort(record_ms[kept], kind="stable")][-last:])
        if not len(kept):
            raise NoDocuments(f"none of {len(self)} traces is in the requested time range")
        # 3. Stream-time order; within a partition that is the order of scoring.
        keys = [self.column(name)[kept] for name in ("offset", "partition", "time_ms")]
        return kept[np.lexsort(keys)], repeated


def hash64(data: bytes) -> int:
    """Return 64 bits of a hash: of a million values two are equal with a probability of 3e-8."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def counts_of(codes: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return (code, how often), most frequent first, then in the order of first appearance."""
    values, first, counts = np.unique(codes, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    return [(int(values[i]), int(counts[i])) for i in order]
