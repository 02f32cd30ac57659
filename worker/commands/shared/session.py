"""A command's session with Kafka: its clients, its topics, and reading them to a known end.

Reading joins no group and commits nothing. It needs the ACLs Read and Describe on the topics.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from worker.commands.shared.console import CommandError, SettingsError, file_problem
from worker.config import ConfigError, Settings
from worker.core.records import SourceRecord
from worker.kafka.connections import (
    Client,
    committed_reader,
    connected,
    connected_admin,
    prepare_clients,
)
from worker.kafka.describe import describe_topics, topic_configs
from worker.kafka.errors import error_text
from worker.kafka.fetches import Consumer, Reading
from worker.kafka.producer import PublishError
from worker.kafka.topics import DEFAULT_MAX_BYTES, MissingTopicsError, no_access

Result = TypeVar("Result")

STALL_SECONDS: Final = 30.0
"""How long reading to a known end may return no record before it is an error."""


class SessionError(CommandError):
    """Kafka did not do what a command needed."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic."""

    name: str
    partitions: int
    config: Mapping[str, str]  # empty if the broker does not report it

    @property
    def tps(self) -> list[TopicPartition]:
        """Return its partitions as TopicPartitions."""
        return [TopicPartition(self.name, partition) for partition in range(self.partitions)]

    @property
    def max_bytes(self) -> int:
        """Return the largest record batch that it accepts, bytes."""
        return int(self.config.get("max.message.bytes", DEFAULT_MAX_BYTES))

    @property
    def retention_ms(self) -> int | None:
        """Return how long it keeps records, by timestamp, ms; None: forever, or unknown."""
        limit = int(self.config.get("retention.ms", -1))
        return limit if limit >= 0 and "delete" in self.config.get("cleanup.policy", "delete") else None


def run_session(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's work. Raises CommandError, and SettingsError for wrong settings or topics."""
    for library in ("aiokafka", "asyncio"):  # they also log what is raised here, and futures of a fenced producer
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        return asyncio.run(work)
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    except (KafkaError, PublishError, TimeoutError) as error:
        raise SessionError(error_text(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(file_problem(error)) from None


class Session:
    """The settings and client arguments shared by all clients of one command."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = prepare_clients(settings)

    def connected(self, client: Client) -> AbstractAsyncContextManager[Client]:
        """Start a consumer or producer, stop it at the end (connections.connected). Raises ConfigError."""
        return connected(self.settings, self.client, client)

    def reader(self, *topics: str, tolerant: bool = False, **more: Any) -> Consumer:
        """Return a consumer without a group that reads committed records, by default from the oldest on.

        `tolerant`: unreadable records become faults; otherwise they are errors.
        """
        return committed_reader(self.client, Reading(self.settings.max_batch_bytes, tolerant), *topics, **more)

    def admin(self) -> AbstractAsyncContextManager[AIOKafkaAdminClient]:
        """Start an admin client, close it at the end. Raises ConfigError if no broker accepts it."""
        return connected_admin(self.settings, self.client)

    async def topics(self, admin: AIOKafkaAdminClient, *names: str) -> dict[str, Topic]:
        """Return the existing ones of the topics. Raises ConfigError for one that may not be described."""
        described = await describe_topics(admin, names)
        for name, topic in described.items():
            if topic.error is TopicAuthorizationFailedError:
                raise ConfigError(no_access(name))
        partitions_of = {name: topic.partitions for name, topic in described.items() if topic.error is None}
        configs, _ = await topic_configs(admin, list(partitions_of))  # not reported without the ACL DescribeConfigs
        return {name: Topic(name, partitions, configs.get(name, {})) for name, partitions in partitions_of.items()}

    async def existing(self, *names: str) -> list[Topic]:
        """Return the topics, in order. Raises MissingTopicsError that names the missing ones, ConfigError."""
        async with self.admin() as admin:
            topics = await self.topics(admin, *names)
        missing = [name for name in names if name not in topics]
        if missing:
            raise MissingTopicsError(
                f"missing on {self.settings.bootstrap_servers}: topic {', '.join(missing)}. Correct the name (the KP_ "
                f"topic settings must be the worker's), or create it: a worker does so with KP_CREATE_TOPICS=true"
            )
        return [topics[name] for name in names]


async def read_to(
    consumer: AIOKafkaConsumer, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> AsyncIterator[SourceRecord]:
    """Yield the records from `starts` up to `ends`, in order within each partition. Raises SessionError on a stall.

    `ends` are exclusive and must not exceed the end that the consumer's isolation level sees.
    """
    todo = {tp for tp in starts if starts[tp] < ends[tp]}
    if todo:
        consumer.assign(sorted(todo))
    for tp in todo:
        consumer.seek(tp, starts[tp])
    idle = 0.0
    while todo:
        batches = await consumer.getmany(*todo, timeout_ms=500)
        for tp, records in batches.items():
            for record in records:
                if record.offset < ends[tp]:
                    yield record
        done = {tp for tp in todo if await consumer.position(tp) >= ends[tp]}
        consumer.pause(*done)
        todo -= done
        idle = 0.0 if batches or done else idle + 0.5
        if idle > STALL_SECONDS:
            raise SessionError(
                f"no record arrived from {sorted(todo)} for {STALL_SECONDS:.0f} s; check that these partitions have a "
                "leader"
            )


async def read_topics(
    settings: Settings,
    topics: Sequence[str],
    take: Callable[[bytes | None, str, int], None],
    since_ms: int | None = None,
    last: int | None = None,
) -> int:
    """Pass on the records of topics up to their current ends; return the time (ms) from which on they are complete.

    `take` gets a record's value, its place, and its timestamp, ms.
    `since_ms`: no records before it. `last`: at most this many offsets of each partition. One partition may then reach
    further back than another: the result is later than `since_ms`, and earlier records must be ignored. Raises
    ConfigError, also if no broker is reachable, SessionError, KafkaError.
    """
    session, complete_from, cut = Session(settings), since_ms or 0, set[TopicPartition]()
    partitions = sorted(tp for topic in await session.existing(*topics) for tp in topic.tps)
    async with session.connected(session.reader(max_partition_fetch_bytes=4 << 20)) as consumer:
        consumer.assign(partitions)
        starts, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
        if since_ms is not None:
            for tp, first in (await consumer.offsets_for_times(dict.fromkeys(partitions, since_ms))).items():
                starts[tp] = ends[tp] if first is None else first.offset
        for tp in partitions:
            if last is not None and ends[tp] - last > starts[tp]:
                starts[tp] = ends[tp] - last
                cut.add(tp)
        async for record in read_to(consumer, starts, ends):
            if cut and (tp := TopicPartition(record.topic, record.partition)) in cut:
                cut.remove(tp)
                complete_from = max(complete_from, record.time_ms)
            take(record.value, f"{record.topic}/{record.partition} offset {record.offset}", record.time_ms)
    return complete_from
