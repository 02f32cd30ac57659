"""`kp-worker tail`: the scored traces and dead letters as they come, as table rows or JSON Lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.commands.shared.console import discard_buffered, errors_for_the_user
from worker.commands.shared.session import Session, read_to, run_session
from worker.commands.tail.records import TailFilter, TailRecord, table_writer, write_lines
from worker.config import Settings

FIRST_STRIDE: Final = 3
"""Offsets to go back for one record, at first: the commit markers of transactions take offsets, too, on an idle stream
one for each record."""


def run_tail(
    settings: Settings,
    topics: list[str],
    chosen: TailFilter,
    *,
    last: int | None,
    follow: bool,
    as_json: bool,
    objectives: bool,
) -> None:
    """Show what is on the topics until Ctrl-C, or until the reader of the pipe closes it. Raises CommandError.

    `objectives`: those of the traces, in a table; documents hold them anyway.
    """
    only_dead_letters = topics == [settings.dead_letter_topic]
    table = table_writer(only_dead_letters=only_dead_letters, objectives=objectives, follow=follow)
    try:
        with nullcontext(write_lines) if as_json else table as show, errors_for_the_user():
            run_session(show_records(Session(settings), topics, chosen, show, last=last, follow=follow))
    except KeyboardInterrupt:
        sys.exit(0)
    except BrokenPipeError:
        discard_buffered(sys.stdout.buffer)


async def show_records(
    session: Session,
    names: list[str],
    chosen: TailFilter,
    show: Callable[[list[TailRecord]], None],
    *,
    last: int | None,
    follow: bool,
) -> None:
    """Show records in portions: the `last` ones (None: all), then with `follow` what comes, until interrupted."""
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
                if one := chosen.read(record):
                    show([one])
            return
        for tp, offset in starts.items():
            follower.seek(tp, offset)
        while True:
            batches = await follower.getmany(timeout_ms=1000)
            records = sorted((record for batch in batches.values() for record in batch), key=_time)
            if found := [one for record in records if (one := chosen.read(record))]:
                show(found)


def _time(record: ConsumerRecord) -> int:
    return int(record.timestamp)


async def _last(
    reader: AIOKafkaConsumer,
    starts: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
    chosen: TailFilter,
    last: int,
) -> list[TailRecord]:
    """Return the last records that the filter takes, by time: look back ever further until there are enough."""
    if not last:
        return []
    stride = FIRST_STRIDE * last
    while True:
        begins = {tp: max(starts[tp], end - stride) for tp, end in ends.items()}
        found = [one async for record in read_to(reader, begins, ends) if (one := chosen.read(record))]
        if len(found) >= last or begins == starts:
            found.sort(key=lambda one: _time(one.record))
            return found[-last:]
        stride *= 8
