"""Reading the accepted and rejected topics once, from an offset or a time to the current end; and all verdicts.

It joins no group and commits nothing; it needs the ACLs Read and Describe on the topics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError

from worker.commands.shared.placed_verdicts import PlacedVerdict, Standings, in_order, judged_verdict
from worker.commands.shared.session import SessionError, read_to
from worker.config import ConfigError, Settings
from worker.kafka.cluster.client import client_arguments, patch_aiokafka
from worker.kafka.cluster.connections import committed_reader, connected_admin, running, unreachable
from worker.kafka.cluster.describe import describe_topics
from worker.kafka.cluster.topic_plan import MissingTopicsError

TakeDocument = Callable[[bytes | None, str, int], None]
"""Takes an output document, where it was found, and its record's timestamp (ms; 0: it comes from a file)."""

FETCH_BYTES: Final = 4 << 20


async def read_outputs(settings: Settings, take: TakeDocument, since_ms: int | None, last: int | None) -> int:
    """Hand over the records of the two topics; return the time (record timestamp, ms) from which on they are complete.

    `since_ms`: no records before it. `last`: at most that many offsets of each partition. One partition may then reach
    further back than another: the result is later than `since_ms`, and earlier records must be left out. Raises
    ConfigError, also if no broker can be reached.
    """
    patch_aiokafka(settings)
    client = client_arguments(settings)
    try:
        partitions = await _partitions(settings, client, [settings.accepted_topic, settings.rejected_topic])
        return await _read(client, partitions, take, since_ms, last)
    except KafkaError as error:
        raise await unreachable(settings, client, error) from error
    except SessionError as error:
        raise ConfigError(f"reading from {settings.bootstrap_servers} failed: {error}") from error


async def read_judged(settings: Settings) -> Standings:
    """Return the track records that all verdicts on KP_JUDGED_TOPIC make. Raises ConfigError as `read_outputs`."""
    patch_aiokafka(settings)
    client = client_arguments(settings)
    found: list[PlacedVerdict] = []

    def take(value: bytes | None, _where: str, _record_ms: int) -> None:
        try:
            judged = judged_verdict(value or b"")
        except (ValueError, RecursionError):
            return  # not the worker's
        if judged is not None:
            found.append(judged)

    try:
        await _read(client, await _partitions(settings, client, [settings.judged]), take, None, None)
    except KafkaError as error:
        raise await unreachable(settings, client, error) from error
    except SessionError as error:
        raise ConfigError(f"reading from {settings.bootstrap_servers} failed: {error}") from error
    return Standings(in_order(found))


async def _partitions(settings: Settings, client: Mapping[str, Any], topics: Sequence[str]) -> list[TopicPartition]:
    """Return the topics' partitions, by the admin client: a consumer that asks for a topic may create it."""
    async with connected_admin(settings, client) as admin:
        found = await describe_topics(admin, topics)
    missing = [topic.name for topic in found.values() if topic.error is UnknownTopicOrPartitionError]
    if missing:
        names = "KP_JUDGED_TOPIC" if topics == [settings.judged] else "KP_ACCEPTED_TOPIC and KP_REJECTED_TOPIC"
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: topic {', '.join(missing)}: check {names}; a worker creates "
            "them with KP_CREATE_TOPICS=true"
        )
    for topic in found.values():
        if topic.error is not None:
            raise ConfigError(
                f"topic {topic.name} cannot be read ({topic.error.__name__}): check the ACL Read on "
                f"{' and '.join(topics)}"
            )
    return sorted(
        TopicPartition(topic.name, partition) for topic in found.values() for partition in range(topic.partitions)
    )


async def _read(
    client: Mapping[str, Any], partitions: list[TopicPartition], take: TakeDocument, since_ms: int | None,
    last: int | None,
) -> int:  # fmt: skip
    async with running(committed_reader(client, max_partition_fetch_bytes=FETCH_BYTES)) as consumer:
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
                complete_from = max(complete_from, record.timestamp)
            take(record.value, f"{record.topic}/{record.partition} offset {record.offset}", record.timestamp)
        return complete_from
