"""The doctor's check of the lag: how many records wait, and which control records will be refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.commands.doctor.finding import Finding, fail, ok, warn
from worker.commands.shared.session import read_to
from worker.config import ConfigError, Settings
from worker.config.forget_keys import forget_keys
from worker.core.forgetting import is_control, read_control
from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace
from worker.kafka.cluster.connections import committed_reader, connected
from worker.kafka.state.restore import read_positions

COUNTED: Final = 1000
"""Offsets behind the committed one that are read, for each partition. With more, their number is an upper bound."""

READ_SECONDS: Final = 5.0
"""How long these may take to read."""


@dataclass(slots=True)
class _Backlog:
    """What waits. `exact`: whether `waiting` is a count of records; otherwise it is an upper bound.

    `controls`: control records among those that were read, `refused` of them will be. `first`: where the first one of
    these is, and why.
    """

    waiting: int = 0
    exact: bool = True
    controls: int = 0
    refused: int = 0
    first: str = ""

    def judge(self, record: ConsumerRecord, keys: Sequence[bytes], topic_id: str | None) -> None:
        """Count a control record; for any other record do nothing."""
        headers = record.headers
        if not is_control(headers):
            return
        self.controls += 1
        place = record.topic, record.partition, record.offset
        try:
            read_control(SourceRecord(*place, record.timestamp, record.key, record.value, headers), keys, topic_id)
        except InvalidTrace as error:
            self.refused += 1
            self.first = self.first or f"{record.partition}:{record.offset}: {error.message}"


async def check_lag(
    settings: Settings, client: Mapping[str, Any], partitions: int, answer_seconds: float
) -> list[Finding]:
    """Count the records that wait. Raises OffsetsError, KafkaError, ConfigError, TimeoutError.

    A transaction marker has an offset but is not a record: after one, the last offset is never committed. So
    the records of a short lag are counted, and a long lag is reported as an upper bound.
    """
    topic = settings.source_topic
    positions = await read_positions(client, settings.group_id, topic, range(partitions), answer_seconds)
    if lost := sum(position.lost for position in positions.values()):
        return [
            warn("lag", f"{lost} records were deleted before they were scored", "longer retention, or more workers")
        ]
    starts = {TopicPartition(topic, number): position.offset for number, position in positions.items()}
    keys: Sequence[bytes] = ()
    unusable: list[Finding] = []
    if settings.forget:
        try:
            keys = forget_keys(settings)
        except ConfigError as error:
            unusable = [fail("forget", str(error), "a worker does not start without its key")]
    backlog = await _read(settings, client, starts, keys, positions[0].topic_id)
    bound = "" if backlog.exact else "at most "
    waiting = backlog.waiting
    lag = ok(
        "lag",
        f"{bound}{waiting} record{' waits' if waiting == 1 else 's wait'} in {partitions} partitions",
    )
    return [lag, *(unusable or _control_records(backlog, len(keys)))]


async def _read(
    settings: Settings,
    client: Mapping[str, Any],
    starts: Mapping[TopicPartition, int],
    keys: Sequence[bytes],
    topic_id: str | None,
) -> _Backlog:
    """Count the committed records from `starts` on. With keys, the control records among them are judged."""
    async with connected(settings, client, committed_reader(client), tolerant=True) as reader:
        ends = await reader.end_offsets(list(starts))
        behind = {tp: max(0, end - starts[tp]) for tp, end in ends.items()}
        short = {tp: starts[tp] for tp, number in behind.items() if number <= COUNTED}
        bound = sum(behind.values())
        long = sum(number for tp, number in behind.items() if tp not in short)
        found = _Backlog(long, long == 0)
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for record in read_to(reader, short, ends):
                    found.waiting += 1
                    if keys:
                        found.judge(record, keys, topic_id)
        except TimeoutError:
            found.waiting, found.exact = bound, False
        return found


def _control_records(backlog: _Backlog, keys: int) -> list[Finding]:
    """Return what is to be said of the control records that wait; nothing without KP_FORGET."""
    if not keys:
        return []
    read = "" if backlog.exact else " among the records that were read"
    if not backlog.refused:
        return [ok("forget", f"{keys} key{'s' * (keys > 1)}; {backlog.controls} control records wait{read}")]
    return [
        warn(
            "forget",
            f"{backlog.refused} of {backlog.controls} control records that wait{read} will become dead letters "
            f"(bad_control), the first at {backlog.first}",
            "ask again with kp-worker forget, of the version of the workers",
        )
    ]
