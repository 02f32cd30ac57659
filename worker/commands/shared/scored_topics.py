"""Reading the accepted and rejected topics once, from an offset or a time to the current end; and all verdicts.

It joins no group and commits nothing. It needs the ACLs Read and Describe on the topics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from worker.commands.shared.placed_verdicts import PlacedVerdict, Standings, in_order, judged_verdict
from worker.commands.shared.session import Session, SessionError, read_to
from worker.config import ConfigError, Settings
from worker.kafka.cluster.connections import running, unreachable

TakeDocument = Callable[[bytes | None, str, int], None]
"""Takes an output document, its place, and its record's timestamp (ms; 0 if it comes from a file)."""

FETCH_BYTES: Final = 4 << 20


async def read_outputs(settings: Settings, take: TakeDocument, since_ms: int | None, last: int | None) -> int:
    """Pass on the records of the two topics; return the time (record timestamp, ms) from which on they are complete.

    `since_ms`: no records before it. `last`: at most this many offsets of each partition. One partition may then reach
    further back than another: the result is later than `since_ms`, and earlier records must be ignored. Raises
    ConfigError, also if no broker is reachable.
    """
    return await _read(settings, (settings.accepted_topic, settings.rejected_topic), take, since_ms, last)


async def read_judged(settings: Settings) -> Standings:
    """Return the track records from all verdicts on KP_JUDGED_TOPIC. Raises ConfigError as `read_outputs` does."""
    found: list[PlacedVerdict] = []

    def take(value: bytes | None, _where: str, _record_ms: int) -> None:
        try:
            judged = judged_verdict(value or b"")
        except (ValueError, RecursionError):
            return  # not the worker's
        if judged is not None:
            found.append(judged)

    await _read(settings, (settings.judged,), take, None, None)
    return Standings(in_order(found))


async def _read(
    settings: Settings, topics: Sequence[str], take: TakeDocument, since_ms: int | None, last: int | None
) -> int:
    session = Session(settings)
    try:
        found = await session.existing(*topics)
        partitions = sorted(tp for topic in found for tp in topic.tps)
        async with running(session.reader(max_partition_fetch_bytes=FETCH_BYTES)) as consumer:
            return await _read_partitions(consumer, partitions, take, since_ms, last)
    except KafkaError as error:
        raise await unreachable(settings, session.client, error) from error
    except SessionError as error:
        raise ConfigError(f"reading from {settings.bootstrap_servers} failed: {error}") from error


async def _read_partitions(
    consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition], take: TakeDocument, since_ms: int | None,
    last: int | None,
) -> int:  # fmt: skip
    consumer.assign(partitions)
    starts, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
    if since_ms is not None:
        for tp, found in (await consumer.offsets_for_times(dict.fromkeys(partitions, since_ms))).items():
            starts[tp] = ends[tp] if found is None else found.offset
    cut = set()
    for tp in partitions:
        if last is not None and ends[tp] - last > starts[tp]:
            starts[tp] = ends[tp] - last
            cut.add((tp.topic, tp.partition))
    complete_from = since_ms or 0
    async for record in read_to(consumer, starts, ends):
        if cut and (place := (record.topic, record.partition)) in cut:
            cut.remove(place)
            complete_from = max(complete_from, record.time_ms)
        take(record.value, f"{record.topic}/{record.partition} offset {record.offset}", record.time_ms)
    return complete_from
