"""The doctor's checks of the broker: connection, APIs, topics, permissions, group and lag. Changes nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, TransactionalIdAuthorizationFailed, UnknownTopicOrPartitionError

from worker.commands.doctor.finding import Exam, Finding, fail, ok, warn
from worker.commands.shared.session import read_to
from worker.config import ConfigError, Settings
from worker.core.terminal import number_of
from worker.kafka.aiokafka_private import send_request
from worker.kafka.assignment import OffsetsError, read_positions
from worker.kafka.connections import committed_reader, connected, connected_admin, find_fault, prepare_clients
from worker.kafka.describe import TopicDescription, apis_of, describe_group, describe_topics
from worker.kafka.errors import error_text
from worker.kafka.fetches import Reading
from worker.kafka.protocol import FeaturesRequest, may_hang_at_last_epoch, transaction_protocol
from worker.kafka.publisher import TRANSACTIONS
from worker.kafka.topics import CHANGELOG_CONFIG, MissingTopicsError, Observed, observe, problems

ANSWER_SECONDS: Final = 5.0
"""Time limit for one answer."""

KAFKA_SECONDS: Final = 45.0
"""Time limit for all checks of the broker together."""

GROUPS, TRANSACTION_LOG = "__consumer_offsets", "__transaction_state"
"""A broker creates these when a client looks up a coordinator: if they are missing, the doctor does not ask."""

OPEN_SECONDS: Final = 3.0
"""A transaction of a producer that is open for longer is named: most take milliseconds."""

Answer = TypeVar("Answer")


async def check_kafka(exam: Exam) -> None:
    """Check brokers, topics and group."""
    settings, unchecked = exam.settings, "topics and group were not checked"
    limit = asyncio.timeout(KAFKA_SECONDS)
    try:
        client = {**prepare_clients(settings), "request_timeout_ms": round(1000 * ANSWER_SECONDS)}
        async with limit:
            if (fault := await find_fault(client)) is not None:
                remedy = "; ".join(filter(None, (fault.advice(), unchecked)))
                exam.fail("broker", f"{fault.where}: {fault.words()}", remedy)
                return
            async with connected_admin(settings, client) as admin:
                await _checks(exam, admin, client)
        exam.reachable = True
    except ConfigError as error:
        exam.fail("broker", str(error), unchecked)
    except (KafkaError, OSError) as error:
        late = f"the checks took longer than {KAFKA_SECONDS:.0f} s", "check the brokers and the network"
        exam.fail("broker", *late if limit.expired() else (error_text(error), "later checks were skipped"))


async def _checks(exam: Exam, admin: AIOKafkaAdminClient, client: Mapping[str, Any]) -> None:
    settings = exam.settings
    brokers = (await admin.describe_cluster())["brokers"]
    login = f", logged in by {settings.sasl_mechanism}" if settings.uses_sasl else ""
    exam.ok("broker", f"{len(brokers)} reachable over {settings.security_protocol}{login}")
    if settings.uses_sasl and not settings.uses_tls:
        exam.warn("broker", "SASL_PLAINTEXT: login and records cross the network unencrypted", "use SASL_SSL")
    exam.add(await _apis(admin, settings))
    try:
        observed = await observe(admin, settings.topics.values())
    except MissingTopicsError as error:
        exam.warn("topics", str(error), "run this again: the topic is new")
        return
    for problem in problems(settings, observed):
        if problem.missing and settings.create_topics:
            exam.warn("topics", f"{problem.message}: the worker will create them", "see kp-worker topics")
        else:
            exam.add(Finding(problem.level, "topics", problem.message, problem.remedy))
    for name, topic in observed.topics.items():
        exam.add(*(list(_topic_problems(settings, name, topic, observed)) or [_topic(name, topic, observed)]))
    described = await describe_topics(admin, [*settings.topics.values(), GROUPS, TRANSACTION_LOG], operations=True)
    exam.add(*_permissions(settings, observed, described))
    missing = {name for name, topic in described.items() if topic.error is UnknownTopicOrPartitionError}
    if settings.delivery == "exactly_once":
        exam.add(await _transactions(admin, settings, TRANSACTION_LOG in missing))
    await _group(exam, admin, client, observed, unused=GROUPS in missing)


async def _apis(admin: AIOKafkaAdminClient, settings: Settings) -> Finding:
    check = "API versions"
    lacking, needed, old = await apis_of(admin, transactions=settings.delivery == "exactly_once")
    if lacking:
        message = f"no version in common with the broker: {', '.join(lacking)}"
        return fail(check, message, "use another Kafka version; 3.9 to 4.4 are tested")
    if old:
        return warn(check, "the broker is older than Kafka 3.9", "upgrade it: kp-worker is tested on 3.9 and later")
    return ok(check, f"a version in common for each of {needed} requests")


def _topic(name: str, topic: TopicDescription, observed: Observed) -> Finding:
    state = f"{number_of(topic.partitions, 'partition')}, replicas {topic.replicas}"
    if name in observed.configs:
        for key in ("min.insync.replicas", "max.message.bytes", "cleanup.policy"):
            state += f", {key} {observed.config(name, key, '?')}"
    return ok(f"topic {name}", state)


def _topic_problems(settings: Settings, name: str, topic: TopicDescription, observed: Observed) -> Iterator[Finding]:
    check = f"topic {name}"
    in_sync = int(observed.config(name, "min.insync.replicas", "0"))  # 0: not known
    if topic.leaderless:
        leaderless = number_of(topic.leaderless, "partition has", "partitions have")
        yield fail(check, f"{leaderless} no leader", "bring back the brokers that hold them")
    if in_sync > topic.replicas:
        yield fail(
            check,
            f"min.insync.replicas={in_sync} with {number_of(topic.replicas, 'replica')}: no write is ever acknowledged",
            f"lower min.insync.replicas, or add replicas (kafka-reassign-partitions.sh) to {name}",
        )
    elif topic.replicas == 1:
        yield warn(check, "one replica: its records are lost with its broker", "3 replicas, min.insync.replicas=2")
    elif in_sync == 1 and name != settings.source_topic:
        message = f"min.insync.replicas=1 with {topic.replicas} replicas: a record that only one broker has can be lost"
        yield warn(check, message, "set min.insync.replicas=2")
    if name == settings.changelog and name in observed.configs:
        wrong = [
            f"{key}={value} (not {wanted})"
            for key, wanted in CHANGELOG_CONFIG.items()
            if (value := observed.config(name, key, "")) != wanted and key != "cleanup.policy"
        ]
        if wrong:
            yield warn(check, f"is not set as intended: {', '.join(wrong)}", "kp-worker topics has the command")


def _permissions(
    settings: Settings, observed: Observed, described: Mapping[str, TopicDescription]
) -> Iterator[Finding]:
    check, complete = "permissions", True
    needed = {name: {"Write"} for name in settings.topics.values()}
    needed[settings.source_topic] = {"Read"}
    needed[settings.changelog] = {"Read", "Write", *(["Alter"] if settings.create_topics else [])}
    for name in observed.topics:
        topic = described.get(name)
        have = topic.operations if topic is not None and topic.error is None else None
        if have is None:
            complete = False
            yield warn(check, f"the broker does not report permissions on topic {name}", "see docs/security.md")
        elif lacking := " and ".join(sorted(needed[name] - have)):
            complete = False
            yield fail(check, f"{lacking} denied on topic {name}", f"grant the ACL {lacking} on it")
    if complete and observed.topics:
        yield ok(check, f"Read and Write on {number_of(len(observed.topics), 'topic')} as needed")


async def _transactions(admin: AIOKafkaAdminClient, settings: Settings, unused: bool) -> Finding:
    check, transactional_id = "transactions", f"{settings.group_id}-0"
    if unused:
        return ok(check, "never used on this cluster yet: not checked, because the lookup would create a topic")
    try:
        await _patiently(lambda: admin.find_coordinator(transactional_id, 1))
    except TransactionalIdAuthorizationFailed as error:
        return fail(check, f"transactional id {transactional_id} is denied", error_text(error))
    except KafkaError as error:
        return fail(check, error_text(error), "the worker's transactions need a coordinator")
    features = await send_request(admin, FeaturesRequest())
    protocol = TRANSACTIONS[transaction_protocol(features)]
    state = f"{protocol}; transactional id {transactional_id}: Describe is granted, coordinator found"
    if not may_hang_at_last_epoch(features):
        return ok(check, state)
    return warn(
        check,
        f"{state}. But in Kafka 4.0 to 4.2 a transaction can stay open indefinitely if its worker dies, or its "
        "coordinator moves, in the last epoch of its producer id, one in 32,767 (KAFKA-20090, KAFKA-20310)",
        "use Kafka 4.3.0 or later, with 3 replicas of each topic (KAFKA-20734)",
    )


async def _patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Retry a request for 5 s while its coordinator moves or loads its data. Raises KafkaError."""
    for _ in range(10):
        try:
            return await ask()
        except KafkaError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(0.5)
    return await ask()


async def _group(
    exam: Exam, admin: AIOKafkaAdminClient, client: Mapping[str, Any], observed: Observed, unused: bool
) -> None:
    settings = exam.settings
    check = f"group {settings.group_id}"
    if unused:
        exam.ok(check, "no group was ever used on this cluster: not checked, because the lookup would create a topic")
        return
    try:
        group, allowed = await _patiently(lambda: describe_group(admin, settings.group_id))
    except KafkaError as error:
        exam.fail(check, error_text(error), "the worker cannot join the group without it")
        return
    if allowed is not None and "Read" not in allowed:
        exam.fail(check, "Read denied", "grant the ACL Read on the group")
        return
    if group["protocol_type"] not in ("", "consumer"):
        exam.fail(check, f"is used for {group['protocol_type']!r}", "set another KP_GROUP_ID")
        return
    state = "does not exist yet" if group["state"] == "Dead" else f"{group['state']}, {len(group['members'])} members"
    exam.ok(check, state)
    if (source := observed.topics.get(settings.source_topic)) is None:
        return
    try:
        await _lag(exam, client, source.partitions)
    except OffsetsError as error:
        exam.fail("lag", str(error), "the worker does not choose an offset by itself")
    except (KafkaError, TimeoutError) as error:
        exam.fail("lag", error_text(error), "offsets of the group or of the source cannot be read")


async def _lag(exam: Exam, client: Mapping[str, Any], partitions: int) -> None:
    """Count the waiting records. Raises OffsetsError, KafkaError, ConfigError, TimeoutError.

    A transaction marker has an offset but is not a record: after one, the last offset is never committed. So a short
    lag is counted record by record, and a long lag is reported as an upper bound.
    """
    settings, topic = exam.settings, exam.settings.source_topic
    positions = await read_positions(client, settings.group_id, topic, range(partitions), ANSWER_SECONDS)
    if lost := sum(position.lost for position in positions.values()):
        deleted = number_of(lost, "record was", "records were")
        exam.warn("lag", f"{deleted} deleted unscored", "raise retention.ms, or add workers")
        return
    starts = {TopicPartition(topic, number): position.offset for number, position in positions.items()}
    reading = Reading(settings.max_batch_bytes, tolerant=True)
    async with connected(settings, client, committed_reader(client, reading)) as reader:
        behind = await _open_transactions(settings, client, reader, list(starts))
        waiting, bound = await _backlog(reader, starts)
    backlog = number_of(waiting, "record waits", "records wait")
    exam.ok("lag", f"{bound}{backlog} in {number_of(partitions, 'partition')}")
    exam.add(*behind)


async def _open_transactions(
    settings: Settings, client: Mapping[str, Any], stable: AIOKafkaConsumer, tps: Sequence[TopicPartition]
) -> list[Finding]:
    """Return a warning for each partition with a transaction that stays open. Raises KafkaError, ConfigError.

    `stable`: a reader of committed records.
    """
    high = AIOKafkaConsumer(**client, enable_auto_commit=False, isolation_level="read_uncommitted")
    async with connected(settings, client, high):
        before = await stable.end_offsets(tps)
        behind = {tp: end - before[tp] for tp, end in (await high.end_offsets(tps)).items() if end > before[tp]}
        if not behind:
            return []
        await asyncio.sleep(OPEN_SECONDS)
        after = await stable.end_offsets(list(behind))
    return [
        warn(
            f"topic {tp.topic}",
            f"partition {tp.partition}: {number_of(number, 'offset')} from {after[tp]} on cannot be read, because a "
            f"producer's transaction has been open there for at least {OPEN_SECONDS:g} s",
            f"if it does not end: kafka-transactions.sh --bootstrap-server {settings.bootstrap_servers} find-hanging "
            f"--topic {tp.topic} --partition {tp.partition} (docs/runbooks.md)",
        )
        for tp, number in behind.items()
        if after[tp] == before[tp]
    ]


async def _backlog(reader: AIOKafkaConsumer, starts: Mapping[TopicPartition, int]) -> tuple[int, str]:
    """Return the number of committed records from `starts` on, and "", or "at most " if it is an upper bound."""
    ends = await reader.end_offsets(list(starts))
    behind = {tp: max(0, end - starts[tp]) for tp, end in ends.items()}
    short = {tp: starts[tp] for tp, number in behind.items() if number <= 1000}  # these are read and counted
    waiting = long = sum(number for tp, number in behind.items() if tp not in short)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async for _ in read_to(reader, short, ends):
                waiting += 1
    except TimeoutError:
        return sum(behind.values()), "at most "
    return waiting, "at most " if long else ""
