"""`kp-worker tail`: the scored traces and dead letters as they come, as table rows or JSON Lines.

Lives here: which records, from where. Must not live here: how they look (tail_view.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.commands.session import Session, read_to
from worker.kafka.dead_letters import Letter, as_json, read_letter

FIRST_STRIDE: Final = 3
"""Offsets to go back for one record, at first: the commit markers of transactions take offsets, too, on an idle stream
one for each record."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One record to show: a scored document or a dead letter."""

    record: ConsumerRecord
    document: Document | None
    letter: Letter | None

    def as_json(self) -> bytes:
        """Return one line of JSON: the output document as it is on the topic, or what the dead letter says."""
        if self.letter is not None:
            return as_json(self.letter, self.letter.key, self.record.value, self.record.headers)
        return bytes(msgspec.json.format(self.record.value, indent=-1))  # a document keeps its producer's line breaks


@dataclass(frozen=True, slots=True)
class Filter:
    """Scored traces of this domain (exact) and at least this score; None: any. Dead letters have neither.

    The topic tells a dead letter, not its headers: a trace may carry those of an earlier life.
    """

    dead_letter_topic: str
    domain: str | None = None
    min_score: float | None = None

    def entry(self, record: ConsumerRecord) -> Entry | None:
        """Read a record; None where it is not meant, or not written by the worker."""
        if record.topic == self.dead_letter_topic:
            letter = read_letter(record)
            return None if letter is None else Entry(record, None, letter)
        try:
            document = msgspec.json.decode(record.value or b"")
            domain, score = document["metadata"]["task_domain"], float(document["scoring"]["score"])
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError):
            return None
        meant = (self.domain is None or domain == self.domain) and (self.min_score is None or score >= self.min_score)
        return Entry(record, document, None) if meant else None


async def tail(
    session: Session,
    names: list[str],
    chosen: Filter,
    show: Callable[[list[Entry]], None],
    *,
    last: int | None,
    follow: bool,
) -> None:
    """Show entries in portions: the `last` ones (None: all there are), then with `follow` what comes, for ever."""
    topics = await session.existing(*names)
    # Subscribed, not assigned: partitions that are added later are read as well, from their beginning.
    async with session.connected(session.reader(*names)) as follower, session.connected(session.reader()) as reader:
        tps = [TopicPartition(topic.name, partition) for topic in topics for partition in range(topic.partitions)]
        starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
        if last is not None:
            show(await _last(reader, starts, ends, chosen, last))
            starts = ends
        if not follow:
            async for record in read_to(reader, starts, ends):
                if entry := chosen.entry(record):
                    show([entry])
            return
        for tp, offset in starts.items():
            follower.seek(tp, offset)
        while True:
            batches = await follower.getmany(timeout_ms=1000)
            records = sorted((record for batch in batches.values() for record in batch), key=_time)
            if entries := [entry for record in records if (entry := chosen.entry(record))]:
                show(entries)


def _time(record: ConsumerRecord) -> int:
    return int(record.timestamp)


async def _last(
    reader: AIOKafkaConsumer,
    starts: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
    chosen: Filter,
    last: int,
) -> list[Entry]:
    """Return the last entries that are meant, by time: look back ever further until there are enough."""
    if not last:
        return []
    stride = FIRST_STRIDE * last
    while True:
        begins = {tp: max(starts[tp], end - stride) for tp, end in ends.items()}
        entries = [entry async for record in read_to(reader, begins, ends) if (entry := chosen.entry(record))]
        if len(entries) >= last or begins == starts:
            entries.sort(key=lambda entry: _time(entry.record))
            return entries[-last:]
        stride *= 8
