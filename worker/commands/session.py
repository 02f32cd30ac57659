"""A command's short session with Kafka: connect or say why not, know the topics, read them.

Lives here: what `publish`, `tail` and `redrive` share. Must not live here: anything about traces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError, for_code
from aiokafka.structs import ConsumerRecord

from worker.config import ConfigError, Settings
from worker.kafka.client import client_arguments, why_not
from worker.kafka.errors import explain
from worker.kafka.producer import PublishError
from worker.kafka.reading import tolerant as reading_tolerantly
from worker.kafka.topics import DEFAULT_MAX_BYTES, describe

Result = TypeVar("Result")
Client = TypeVar("Client", AIOKafkaConsumer, AIOKafkaProducer)

STALL_SECONDS: Final = 30.0
"""How long reading to a known end may bring nothing before it is an error and not patience."""


class SessionError(Exception):
    """Kafka did not do what was asked; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic: its name, number of partitions and settings (empty where the broker does not tell)."""

    name: str
    partitions: int
    config: Mapping[str, str]

    @property
    def max_bytes(self) -> int:
        """Return the largest record batch that it takes."""
        return int(self.config.get("max.message.bytes", DEFAULT_MAX_BYTES))

    @property
    def retention_ms(self) -> int | None:
        """Return how long it keeps records, by their timestamps; None: for ever, or unknown."""
        limit = int(self.config.get("retention.ms", -1))
        return limit if limit >= 0 and "delete" in self.config.get("cleanup.policy", "delete") else None


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's work. Raises ConfigError, SessionError and OSError (of files), with words for the user."""
    for library in ("aiokafka", "asyncio"):  # they log what we raise, and more often; a fenced producer's futures too
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        return asyncio.run(work)
    except (KafkaError, PublishError, TimeoutError) as error:
        raise SessionError(explain(error)) from error


class Session:
    """The settings and the arguments that all clients of one command share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = client_arguments(settings)

    @asynccontextmanager
    async def connected(self, client: Client, *, tolerant: bool = False) -> AsyncIterator[Client]:
        """Start a consumer or producer, stop it at the end. Raises ConfigError where no broker lets it in.

        `tolerant`: records that cannot be read come as faults (reading.py); otherwise they are an error.
        """
        try:
            with reading_tolerantly(self.settings.max_batch_bytes) if tolerant else nullcontext():
                await client.start()
        except KafkaError as error:
            await client.stop()
            raise await self._refusal(error) from error
        try:
            yield client
        finally:
            await client.stop()

    async def _refusal(self, error: KafkaError) -> ConfigError:
        cause = await why_not(self.client)
        if cause is None:  # the brokers can be reached: what failed came after that
            return ConfigError(explain(error))
        return ConfigError(
            f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS={self.settings.bootstrap_servers}: {explain(cause)}"
        )

    def reader(self, *topics: str) -> AIOKafkaConsumer:
        """Return a consumer without a group that reads committed records, by default from the oldest on."""
        return AIOKafkaConsumer(
            *topics,
            **self.client,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        """Connect an admin client. Raises ConfigError where no broker lets it in."""
        admin = AIOKafkaAdminClient(**self.client)
        try:
            try:
                await admin.start()
            except KafkaError as error:
                raise await self._refusal(error) from error
            yield admin
        finally:
            await admin.close()

    async def topics(self, admin: AIOKafkaAdminClient, *names: str) -> dict[str, Topic]:
        """Return those of the topics that are there. Raises ConfigError for one that may not be described."""
        found = {}
        for topic in await describe(admin, names):
            name = topic["topic"]
            if topic["error_code"] == 0:
                found[name] = len(topic["partitions"])
            elif for_code(topic["error_code"]) is TopicAuthorizationFailedError:
                raise ConfigError(f"the broker denies access to topic {name}: grant an ACL on it (docs/security.md)")
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in found]
        configs: dict[str, dict[str, str]] = {}
        for response in await admin.describe_configs(resources) if resources else []:
            for code, _, _, name, entries in response.resources:
                if not code:  # else: no ACL DescribeConfigs; Kafka's defaults then count
                    configs[name] = {entry[0]: entry[1] for entry in entries}
        return {name: Topic(name, partitions, configs.get(name, {})) for name, partitions in found.items()}

    async def existing(self, *names: str) -> list[Topic]:
        """Return the topics, in order. Raises ConfigError naming the one that is missing."""
        async with self.admin() as admin:
            found = await self.topics(admin, *names)
        missing = [name for name in names if name not in found]
        if missing:
            raise ConfigError(
                f"missing on {self.settings.bootstrap_servers}: topic {', '.join(missing)}. Correct the name (the KP_ "
                "topic settings must be the worker's), or create it: a worker does so with KP_CREATE_TOPICS=true"
            )
        return [found[name] for name in names]


async def read_to(
    consumer: AIOKafkaConsumer, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> AsyncIterator[ConsumerRecord]:
    """Yield the records from `starts` up to `ends`, in the order of each partition. Raises SessionError on a stall.

    `ends` are exclusive and must not lie past the end that the consumer's isolation level sees.
    """
    todo = {tp for tp in starts if starts[tp] < ends[tp]}
    if not todo:
        return
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
            raise SessionError(f"no record came for {STALL_SECONDS:.0f} s from {sorted(todo)}: is its leader up?")
