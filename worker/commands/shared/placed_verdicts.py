"""Verdicts with their place among the traces of a partition, and the track records at each place."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta, Struct

from worker.commands.shared.console import BadLines, CommandError
from worker.commands.shared.json_lines import read_lines
from worker.config import Settings
from worker.core.documents import PartitionPlace, ScoredDocument
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.track_record import NOTHING, Standing, Tally, TrackRecord, standing
from worker.core.verdicts import Verdict, issued_ms, unsigned_verdict

_START = datetime(1970, 1, 1, tzinfo=UTC)


class PlacedVerdict(NamedTuple):
    """A verdict and its place."""

    partition: int
    after: int  # it counts for the traces of the partition from this offset on
    verdict: Verdict


def read_verdicts(file: BinaryIO, name: str, largest_trace: int) -> list[PlacedVerdict]:
    """Read verdicts as JSON Lines, and sort them into the order in which they count. Raises CommandError, OSError.

    A line is an input of `kp-worker verdict`, or a record of KP_JUDGED_TOPIC; there is one partition, as in a file of
    traces. Its place is its field `after`, the offset of the first trace for which it counts; without it, it counts for
    all. Its time is `issued_at`, if present; otherwise times follow the order of places.
    """
    placed: list[PlacedVerdict] = []
    wrong: list[str] = []
    bad = BadLines(name, wrong.append)
    for line in read_lines(file, largest_trace):
        try:
            if not line.blank:
                placed.append(_placed(msgspec.json.decode(line.content())))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            bad.name(f"{line.number}: {error}")
    bad.say_rest("correct them all")
    if wrong:
        raise CommandError("\n".join(wrong))
    return in_order(placed)


def in_order(verdicts: Iterable[PlacedVerdict]) -> list[PlacedVerdict]:
    """Return verdicts by partition and place, each with its issue time."""
    ordered, latest = [], _START
    for placed in sorted(verdicts, key=lambda placed: placed[:2]):
        issued = placed.verdict.issued_at
        if issued == _START:
            issued = latest + timedelta(milliseconds=1)
        latest = max(latest, issued)
        ordered.append(placed._replace(verdict=msgspec.structs.replace(placed.verdict, issued_at=issued)))
    return ordered


def judged_verdict(value: bytes) -> PlacedVerdict | None:
    """Return the verdict in a record of KP_JUDGED_TOPIC; None if it does not count. Raises ValueError."""
    judged = msgspec.json.decode(value, type=_Judged)
    if not judged.counts:
        return None
    return _placed(msgspec.json.decode(value))._replace(partition=judged.source.partition, after=judged.source.offset)


async def read_judged(settings: Settings) -> Standings:
    """Return the track records from all verdicts on KP_JUDGED_TOPIC. Raises as `read_topics` does."""
    from worker.commands.shared.session import read_topics  # with Kafka's client

    placed: list[PlacedVerdict] = []
    late_seconds: dict[str, deque[float | None]] = defaultdict(lambda: deque(maxlen=20))

    def take(value: bytes | None, _where: str, record_ms: int) -> None:
        with suppress(ValueError, LookupError, RecursionError):  # not the worker's
            judged = judged_verdict(value or b"")
            verdict = msgspec.json.decode(value or b"", type=_Judged).verdict
            late = record_ms / 1000 - datetime.fromisoformat(verdict["issued_at"]).timestamp()
            late_seconds[verdict["judge"]].append(late if judged is None else None)
            placed.extend([] if judged is None else [judged])

    await read_topics(settings, (settings.judged,), take)
    return Standings(in_order(placed), late_seconds)


class _Judged(Struct):
    """A record of KP_JUDGED_TOPIC (schemas/judged.schema.json)."""

    trace_id: str
    agent_id: str
    task_domain: str
    verdict: dict[str, Any]
    source: PartitionPlace
    counts: bool
    trace_offset: int | None = None  # a record by an earlier build has none


class _Line(Struct):
    """The fields of a line that give its place and time."""

    after: Annotated[int, Meta(ge=0)] | None = None
    issued_at: Annotated[datetime, Meta(tz=True)] | None = None


def _placed(document: Any) -> PlacedVerdict:
    """Return the verdict in a line, in partition 0. Raises ValueError."""
    if isinstance(document, dict) and "verdict" in document and "metadata" not in document:
        judged = msgspec.convert(document, _Judged)
        own = {name: document[name] for name in ("trace_id", "agent_id", "task_domain", "after") if name in document}
        document = judged.verdict | {"partition": judged.source.partition, "offset": judged.trace_offset} | own
    line = msgspec.convert(document, _Line)
    if "scoring" not in document:
        document = {"partition": 0, **document}
    return PlacedVerdict(0, line.after or 0, unsigned_verdict(document, line.issued_at or _START))


class Standings:
    """The track records of each partition at each place, from its own verdicts (sorted by `in_order`)."""

    def __init__(
        self, placed: Iterable[PlacedVerdict] = (), late_seconds: Mapping[str, Collection[float | None]] | None = None
    ) -> None:
        self.late_seconds = late_seconds or {}
        """Of each judge's last verdicts: how long after its issue each was read, or None if it counts."""
        self.verdicts = 0
        self.judged: set[tuple[int, int | str]] = set()
        """Partition and offset of each trace with a verdict; by a verdict of an earlier build, its id."""
        self._sizes: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """By partition: a verdict's place, and the size and prior of all records after it (see `standing`)."""
        self._tallies: dict[tuple[int, str, str], list[tuple[int, Tally]]] = defaultdict(list)
        records: dict[int, TrackRecord] = defaultdict(TrackRecord)
        for partition, after, verdict in placed:
            self.verdicts += 1
            self.judged.add((partition, verdict.trace_id if verdict.offset is None else verdict.offset))
            record, name = records[partition], (verdict.agent_id, verdict.task_domain)
            record.add(verdict, issued_ms(verdict, None), len(self._sizes[partition]))
            self._sizes[partition].append((after, len(record), record.firsts))
            self._tallies[partition, *name].append((after, record.tally(name)))

    def at(self, partition: int, offset: int, agent_id: str, task_domain: str) -> Standing:
        """Return an agent's standing in a domain at the time when the trace at an offset is scored."""
        name = partition, agent_id[:CACHED_ID_LENGTH], task_domain[:CACHED_ID_LENGTH]
        sizes, tallies = self._sizes.get(partition, []), self._tallies.get(name, [])
        known, mine = (bisect_right(places, offset, key=lambda place: place[0]) for places in (sizes, tallies))
        _, records, firsts = sizes[known - 1] if known else (0, 0, 0)
        return standing(tallies[mine - 1][1] if mine else NOTHING, records, firsts)

    def used(self, document: ScoredDocument) -> float | None:
        """Return the confidence of a scored document with KP_CONFIDENCE=record; None: the stated one.

        A document that was scored with that setting contains it.
        """
        if document.scoring.confidence is not None:
            return document.scoring.confidence.used
        source, metadata = document.scoring.source, document.metadata
        if not metadata.success or document.outcome.evaluated is True:
            return None
        return self.at(source.partition, source.offset, metadata.agent_id, metadata.task_domain).used
