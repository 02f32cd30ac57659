"""The five topics: created where asked for, otherwise checked, before the worker joins its group.

Lives here: which topics there must be, with how many partitions and which settings, and what is wrong with those that
there are. `kp-worker run`, `topics` and `doctor` share all of it. Must not live here: data, output for people.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from aiokafka import codec
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    InvalidPartitionsError,
    KafkaError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest

from worker.config import ConfigError, Settings
from worker.core.pipeline import ACCEPTED, DEAD_LETTER, REJECTED
from worker.kafka.client import why_not
from worker.kafka.errors import explain, is_final
from worker.kafka.publication import OutputTopic

log = logging.getLogger(__name__)

Found = TypeVar("Found")

CONNECT_ATTEMPTS: Final = 30
"""How often the worker tries to reach a broker at start, once a second, before it exits."""

DEFAULT_MAX_BYTES: Final = 1_048_588
"""Kafka's default max.message.bytes, assumed where the worker may not read a topic's settings."""

OUTPUT_OVERHEAD: Final = 8192
"""Bytes that an output may be larger than its input: the `scoring` object (about 1 kB, with a long nearest id 3 kB),
headers, and the record's framing; KP_OUTPUT_EMBEDDING comes on top."""

DEAD_LETTER_OVERHEAD: Final = 65_536
"""The same for a created dead-letter topic; roomy, because nothing may be too large for it."""

SOURCE_AFTER_MS: Final = 60_000
"""message.timestamp.after.max.ms of a created source topic: how far ahead of the broker's clock a record may be dated.
A producer sets created_at and the record's timestamp, so this is what bounds how far one record moves stream time.
Clocks that are kept by NTP differ by less than a second; a minute forgives one that is not, and expires a sixtieth of
an hour's cache at most."""

AFTER: Final = "message.timestamp.after.max.ms"
BEFORE: Final = "message.timestamp.before.max.ms"
DEFAULT_AFTER_MS: Final = 3_600_000
"""Kafka's default of AFTER, from version 4.0 on."""

HARMLESS_SHARE: Final = 0.1
"""Of KP_CACHE_TTL_SECONDS: what one record may expire without a warning."""

ENTRY_BYTES: Final = 2048
"""A cache entry of 384 dimensions is about 1.7 kB, with its record's and batch's framing below this."""

LARGEST_ENTRY_BYTES: Final = 4096
"""The same with the longest trace id that is kept."""

CODECS: Final[Mapping[str, Callable[[], bool]]] = {
    "gzip": codec.has_gzip, "snappy": codec.has_snappy, "lz4": codec.has_lz4, "zstd": codec.has_zstd,
}  # fmt: skip
"""What a batch may be compressed with, and whether it can be read here."""

CHANGELOG_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # Only closed segments are compacted: with the default of 7 days and 1 GiB the topic would grow without bound.
    "segment.ms": "600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "60000",
    # Entries must never age out while they are the latest of their slot.
    "retention.ms": "-1",
}

NO_LIMIT: Final = 2**63 - 1
"""What Kafka shows where a topic has no limit."""

LIMIT_SECONDS: Final = 5.0
"""How long the question for one topic's limit may take, in the middle of a transaction."""

SETTLE_ATTEMPTS: Final = 50
"""How often, 0.2 s apart, a new topic is looked for on a broker that does not know it yet."""


class MissingTopicsError(ConfigError):
    """A topic is not there."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the worker found: the source's partitions, the topics it writes, the largest trace that fits (bytes)."""

    source_partitions: int
    outputs: Mapping[str, OutputTopic]
    changelog: OutputTopic
    max_message_bytes: int


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """A topic as it should be: the variable that names it, partitions, and the settings that it is created with."""

    variable: str
    name: str
    partitions: int
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it is. `replicas`: the least of any partition; `leaderless`: partitions that nobody leads."""

    partitions: int
    replicas: int
    leaderless: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What the broker tells of the topics: those that exist, and those that it denies.

    `configs`: settings by topic; `unreadable`: the broker's words where it does not show them.
    """

    topics: Mapping[str, TopicState]
    denied: Sequence[str]
    configs: Mapping[str, Mapping[str, str]]
    unreadable: Mapping[str, str]

    def config(self, topic: str, name: str, default: str) -> str:
        """Return a topic's setting; `default` where it is not known."""
        return self.configs.get(topic, {}).get(name, default)

    def max_bytes(self, topic: str) -> int:
        """Return the largest record that a topic takes; Kafka's default where that is not known."""
        return int(self.config(topic, "max.message.bytes", str(DEFAULT_MAX_BYTES)))

    def milliseconds(self, topic: str, name: str) -> float | None:
        """Return a limit of a topic; infinity where it sets none, None where it is not known."""
        text = self.configs.get(topic, {}).get(name)
        if text is None:
            return None
        return math.inf if int(text) < 0 or int(text) == NO_LIMIT else int(text)

    def stamps(self, topic: str) -> bool:
        """Whether the broker stamps the topic's records itself: then nobody else can."""
        return self.config(topic, "message.timestamp.type", "CreateTime") == "LogAppendTime"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the topics. `fail`: the worker does not start; `warn`: it does."""

    level: Literal["warn", "fail"]
    message: str
    remedy: str = ""
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


async def prepare_topics(settings: Settings, client: Mapping[str, Any], extra_bytes: int = 0) -> Layout:
    """Create what is missing (KP_CREATE_TOPICS) and check the rest. Raises ConfigError naming topic and remedy.

    `extra_bytes`, here and below: what an output may be larger than its input beyond OUTPUT_OVERHEAD (the embedding
    in it).
    """
    admin = await connect(settings, client)
    try:
        if not settings.create_topics:
            return await _check(admin, settings, extra_bytes)
        await create_missing(admin, settings, extra_bytes)
        return await _settled(lambda: _check(admin, settings, extra_bytes))
    finally:
        await admin.close()


async def connect(
    settings: Settings, client: Mapping[str, Any], attempts: int = CONNECT_ATTEMPTS
) -> AIOKafkaAdminClient:
    """Connect, with patience: a worker that is restarted in a broker's outage should be there when it ends.

    `attempts`: how often to try again, once a second. Raises ConfigError that says why it cannot.
    """
    attempt = 0
    while True:
        admin = AIOKafkaAdminClient(**client)
        try:
            await admin.start()
            return admin
        except KafkaError as error:
            await admin.close()
            cause = await why_not(client) or error
            text = f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: {explain(cause)}"
            attempt += 1
            if attempt > attempts or is_final(cause):
                raise ConfigError(text) from error
            if attempt == 1:
                log.warning("%s; trying again for %d s", text, attempts)
            await asyncio.sleep(1)


# -- what is there


async def describe(admin: AIOKafkaAdminClient, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the broker's metadata of topics, each with `error_code`, `topic` and `partitions`; creates none."""
    # Without the flag a broker with auto.create.topics.enable would create what is only asked for.
    request = MetadataRequest(list(names), allow_auto_topic_creation=False)
    topics: list[dict[str, Any]] = (await admin._send_request(request)).to_object()["topics"]
    return topics


async def look(admin: AIOKafkaAdminClient, settings: Settings, settings_of: Sequence[str]) -> Observed:
    """Look at the five topics, and at the settings of those in `settings_of` that exist. Changes nothing.

    Raises KafkaError, and MissingTopicsError for a topic so new that its settings are not known yet.
    """
    topics: dict[str, TopicState] = {}
    denied = []
    for topic in await describe(admin, list(settings.topics.values())):
        parts = topic["partitions"]
        if topic["error_code"] == 0:
            replicas = min((len(part["replicas"]) for part in parts), default=0)
            topics[topic["topic"]] = TopicState(len(parts), replicas, sum(part["leader"] < 0 for part in parts))
        elif for_code(topic["error_code"]) is TopicAuthorizationFailedError:
            denied.append(topic["topic"])
    configs: dict[str, Mapping[str, str]] = {}
    unreadable: dict[str, str] = {}
    await _configs(admin, [name for name in settings_of if name in topics], configs, unreadable)
    ordered = {name: topics[name] for name in settings.topics.values() if name in topics}
    return Observed(ordered, denied, configs, unreadable)


async def _configs(
    admin: AIOKafkaAdminClient,
    names: list[str],
    configs: dict[str, Mapping[str, str]],
    unreadable: dict[str, str],
) -> None:
    if not names:
        return
    try:
        responses = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    except KafkaError as error:
        unreadable.update(dict.fromkeys(names, str(error)))
        return
    for response in responses:
        for code, message, _, name, entries in response.resources:
            if code and for_code(code).retriable:
                raise MissingTopicsError(f"topic {name}: its settings are not known yet ({for_code(code).__name__})")
            if code:
                unreadable[name] = message or for_code(code).__name__
            else:
                configs[name] = {entry[0]: entry[1] for entry in entries}


async def current_limit(client: Mapping[str, Any], name: str) -> int | None:
    """Return a topic's max.message.bytes as it is now; None where the broker does not tell."""
    admin = AIOKafkaAdminClient(**client)
    configs: dict[str, Mapping[str, str]] = {}
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            await admin.start()
            await _configs(admin, [name], configs, {})
        return int(configs[name]["max.message.bytes"])
    except (KafkaError, MissingTopicsError, TimeoutError, KeyError):
        return None
    finally:
        await admin.close()


def problems(settings: Settings, found: Observed, extra_bytes: int = 0) -> list[Problem]:
    """Return what is wrong with the topics, in the order in which it should be mended."""
    result = [
        Problem(
            "fail",
            f"the broker denies access to topic {name}",
            f"grant the ACL {_needed(settings, name)} on it (docs/security.md)",
        )
        for name in found.denied
    ]
    missing = [
        f"{name} ({variable})"
        for variable, name in settings.topics.items()
        if name not in found.topics and name not in found.denied
    ]
    if missing:
        result.append(
            Problem(
                "fail",
                f"missing on {settings.bootstrap_servers}: {', '.join(missing)}",
                "create them (kp-worker topics shows how), or let the worker do it with KP_CREATE_TOPICS=true, or "
                "correct the names",
                missing=True,
            )
        )
    result += _changelog_problems(settings, found)
    result += _compression_problems(found)
    result += [
        Problem(
            "warn",
            f"cannot read the settings of topic {name}: {words}; assuming Kafka's defaults",
            "grant the ACL DescribeConfigs on it",
        )
        for name, words in found.unreadable.items()
    ]
    accepted, rejected = settings.accepted_topic, settings.rejected_topic
    fits = _fits(settings, found, extra_bytes)
    if accepted in found.topics and rejected in found.topics and fits < settings.max_message_bytes:
        result.append(
            Problem(
                "warn",
                f"the output topics take records of at most {fits + OUTPUT_OVERHEAD + extra_bytes} bytes: traces above "
                f"{fits} bytes become dead letters",
                f"raise max.message.bytes of {accepted} and {rejected} by {settings.max_message_bytes - fits} to let "
                "all of KP_MAX_MESSAGE_BYTES through",
            )
        )
    result += _refused_outputs(settings, found)
    result += _stream_time_problems(settings, found)
    return result


def codec_problems() -> list[Problem]:
    """Return a warning where producers may send what cannot be read here; no topic tells what they send."""
    missing = [name for name, readable in CODECS.items() if not readable()]
    if not missing:
        return []
    return [
        Problem(
            "warn",
            f"records that producers compress with {' or '.join(missing)} cannot be read here",
            "install cramjam (pip install cramjam)",
        )
    ]


def _compression_problems(found: Observed) -> list[Problem]:
    """Return the topics that the broker compresses with what cannot be read here, the worker's own writes as well."""
    result = []
    for name in found.topics:
        kind = found.config(name, "compression.type", "producer")
        if kind in CODECS and not CODECS[kind]():
            result.append(
                Problem(
                    "fail",
                    f"topic {name} has compression.type={kind}, which cannot be read here",
                    "install cramjam (pip install cramjam), or set compression.type=gzip",
                )
            )
    return result


def _refused_outputs(settings: Settings, found: Observed) -> list[Problem]:
    """Return which outputs would refuse a record of the worker: by key, by size or by timestamp."""
    result = []
    source = settings.source_topic
    for name in (settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic):
        policy = found.config(name, "cleanup.policy", "delete")
        if "compact" in policy:
            result.append(
                Problem(
                    "warn",
                    f"topic {name} has cleanup.policy={policy}: records without a key are refused",
                    "set cleanup.policy=delete",
                )
            )
        result += _refused_timestamps(source, name, found)
    letters = settings.dead_letter_topic
    wanted = found.max_bytes(source) + DEAD_LETTER_OVERHEAD
    if {source, letters} <= found.configs.keys() and found.max_bytes(letters) < wanted:
        result.append(
            Problem(
                "warn",
                f"topic {letters} has max.message.bytes={found.max_bytes(letters)}, the source {source} "
                f"{found.max_bytes(source)}: dead letters of the largest records are cut",
                f"set max.message.bytes={wanted} on {letters}",
            )
        )
    return result


def _refused_timestamps(source: str, output: str, found: Observed) -> list[Problem]:
    """Compare what a record of the source may be dated with what an output takes: it keeps its timestamp there."""
    if found.stamps(output):
        return []
    result = []
    ahead, takes_ahead = found.milliseconds(source, AFTER), found.milliseconds(output, AFTER)
    if found.stamps(source):
        ahead = 0.0
    if ahead is not None and takes_ahead is not None and takes_ahead < ahead:
        result.append(
            Problem(
                "warn",
                f"topic {output} has {AFTER}={takes_ahead:.0f}, less than the source {source} ({_limit(ahead)}): "
                "outputs of records from the future are refused",
                f"set {AFTER}={_limit(ahead)} on {output}, or less on {source}",
            )
        )
    old, takes_old = found.milliseconds(source, BEFORE), found.milliseconds(output, BEFORE)
    kept = found.milliseconds(source, "retention.ms")
    if found.stamps(source):
        old = 0.0
    if old is not None and takes_old is not None and kept is not None and takes_old < old + kept:
        result.append(  # a record ages on the source, up to its retention, before it is scored
            Problem(
                "warn",
                f"topic {output} has {BEFORE}={takes_old:.0f}, and records of the source {source} may be older when "
                f"they are scored ({BEFORE}={_limit(old)} there, retention.ms={_limit(kept)}): outputs are refused",
                f"set {BEFORE}={_limit(old + kept)} on {output}",
            )
        )
    return result


def _limit(milliseconds: float) -> str:
    """Write a limit as Kafka's settings spell it."""
    return str(NO_LIMIT if milliseconds == math.inf else int(milliseconds))


def _stream_time_problems(settings: Settings, found: Observed) -> list[Problem]:
    """Warn where one record, dated as far ahead as the source takes it, would expire much of a cache."""
    source, ttl = settings.source_topic, settings.cache_ttl_ms
    ahead, step = found.milliseconds(source, AFTER), settings.stream_time_max_step_ms
    if ttl is None or settings.embedder == "none" or ahead is None or found.stamps(source):
        return []
    harmless = max(SOURCE_AFTER_MS, int(ttl * HARMLESS_SHARE))
    if min(ahead, math.inf if step is None else step) <= harmless:
        return []
    effect = "empties a partition's cache" if ahead >= ttl else "expires much of a partition's cache"
    return [
        Problem(
            "warn",
            f"topic {source} takes records dated {'any time' if ahead == math.inf else f'{ahead / 1000:.0f} s'} ahead "
            f"({AFTER}), KP_CACHE_TTL_SECONDS is {ttl / 1000:g}: one such record {effect}",
            f"set {AFTER}={SOURCE_AFTER_MS} on {source}, or KP_STREAM_TIME_MAX_STEP_SECONDS (docs/security.md)",
        )
    ]


def _changelog_problems(settings: Settings, found: Observed) -> list[Problem]:
    result = []
    name = settings.changelog
    source, changelog = found.topics.get(settings.source_topic), found.topics.get(name)
    if source is not None and changelog is not None and changelog.partitions < source.partitions:
        result.append(
            Problem(
                "fail",
                f"topic {name} has {changelog.partitions} partitions, the source {settings.source_topic} has "
                f"{source.partitions}: the changelog needs as many",
                f"add partitions to it (kafka-topics --alter --partitions {source.partitions})",
            )
        )
    policy = found.config(name, "cleanup.policy", "compact")
    if "compact" not in policy or "delete" in policy:
        result.append(
            Problem(
                "fail",
                f"topic {name} has cleanup.policy={policy}: cache entries would be deleted or never be cleaned up",
                "set cleanup.policy=compact",
            )
        )
    limit = found.max_bytes(name)
    if limit < LARGEST_ENTRY_BYTES and settings.embedder != "none":
        result.append(
            Problem(
                "fail" if limit < ENTRY_BYTES else "warn",
                f"topic {name} has max.message.bytes={limit}, less than "
                + ("a cache entry" if limit < ENTRY_BYTES else "a cache entry with a long trace id"),
                f"set max.message.bytes={DEFAULT_MAX_BYTES} on {name}",
            )
        )
    return result


def _fits(settings: Settings, found: Observed, extra_bytes: int) -> int:
    """Return the bytes of the largest trace whose output fits."""
    limit = min(found.max_bytes(name) for name in (settings.accepted_topic, settings.rejected_topic))
    return limit - OUTPUT_OVERHEAD - extra_bytes


def _needed(settings: Settings, topic: str) -> str:
    if topic == settings.source_topic:
        return "Read"
    return "Read and Write" if topic == settings.changelog else "Write"


async def _check(admin: AIOKafkaAdminClient, settings: Settings, extra_bytes: int) -> Layout:
    found = await look(admin, settings, list(settings.topics.values()))
    for problem in [*problems(settings, found, extra_bytes), *codec_problems()]:
        if problem.level == "fail":
            raise (MissingTopicsError if problem.missing else ConfigError)(str(problem))
        log.warning("%s", problem)
    kinds = {
        ACCEPTED: settings.accepted_topic,
        REJECTED: settings.rejected_topic,
        DEAD_LETTER: settings.dead_letter_topic,
    }
    return Layout(
        found.topics[settings.source_topic].partitions,
        {kind: _written(found, name) for kind, name in kinds.items()},
        _written(found, settings.changelog),
        min(settings.max_message_bytes, _fits(settings, found, extra_bytes)),
    )


def _written(found: Observed, name: str) -> OutputTopic:
    return OutputTopic(name, found.topics[name].partitions, found.max_bytes(name))


# -- what should be there


def plan(settings: Settings, found: Observed, extra_bytes: int = 0) -> list[TopicPlan]:
    """Return the five topics as they should be, given those that are there; the source first."""
    source = found.topics.get(settings.source_topic)
    partitions = settings.topic_partitions if source is None else source.partitions
    largest = settings.max_message_bytes + OUTPUT_OVERHEAD + extra_bytes
    # An output keeps its record's timestamp: where the source takes more than Kafka's default, so must they.
    ahead = found.milliseconds(settings.source_topic, AFTER) or 0
    times = {AFTER: _limit(ahead)} if ahead > DEFAULT_AFTER_MS and not found.stamps(settings.source_topic) else {}
    outputs = {"max.message.bytes": str(max(DEFAULT_MAX_BYTES, largest)), **times}
    # A dead letter holds the source's record: nothing that the source takes may be too large for it.
    dead_letters = {"max.message.bytes": str(found.max_bytes(settings.source_topic) + DEAD_LETTER_OVERHEAD), **times}
    configs: dict[str, Mapping[str, str]] = {
        settings.source_topic: {} if found.stamps(settings.source_topic) else {AFTER: str(SOURCE_AFTER_MS)},
        settings.accepted_topic: outputs,
        settings.rejected_topic: outputs,
        settings.dead_letter_topic: dead_letters,
        settings.changelog: CHANGELOG_CONFIG,
    }
    return [TopicPlan(variable, name, partitions, configs[name]) for variable, name in settings.topics.items()]


async def create_missing(admin: AIOKafkaAdminClient, settings: Settings, extra_bytes: int = 0) -> None:
    """Create the topics that are missing, and let the changelog grow with the source. Raises ConfigError."""
    found = await _settled(lambda: _accessible(admin, settings))
    source = plan(settings, found)[0]
    if source.name not in found.topics:
        await create(admin, settings, source)
        found = await _settled(lambda: _accessible(admin, settings, source.name))
    for topic in plan(settings, found, extra_bytes)[1:]:
        if topic.name not in found.topics:
            await create(admin, settings, topic)
    wanted = found.topics[source.name].partitions
    changelog = found.topics.get(settings.changelog)
    if changelog is not None and changelog.partitions < wanted:  # the source topic has gained partitions
        await _grow(admin, settings, wanted)
    await _settled(lambda: _accessible(admin, settings, *settings.topics.values()))


async def _accessible(admin: AIOKafkaAdminClient, settings: Settings, *needed: str) -> Observed:
    """Look at the topics, and at the source's settings. Raises ConfigError for denied ones, and missing ones needed."""
    found = await look(admin, settings, [settings.source_topic])
    if found.denied:
        raise ConfigError(str(problems(settings, found)[0]))
    for name in needed:
        if name not in found.topics:
            raise MissingTopicsError(f"topic {name} was created but the broker does not show it")
    return found


async def _grow(admin: AIOKafkaAdminClient, settings: Settings, partitions: int) -> None:
    name = settings.changelog
    refusal: KafkaError | None = None
    try:
        await admin.create_partitions({name: NewPartitions(partitions)})
        log.info("topic %s now has %d partitions, as many as the source", name, partitions)
    except InvalidPartitionsError as error:
        refusal = error  # where another worker was faster, it has as many already
    except KafkaError as error:
        raise ConfigError(
            f"topic {name} must grow to {partitions} partitions, as many as the source, and cannot: {error} "
            "(it takes the ACL Alter on it)"
        ) from error
    for _ in range(SETTLE_ATTEMPTS):
        if (await look(admin, settings, [])).topics[name].partitions >= partitions:
            return
        await asyncio.sleep(0.2)
    raise ConfigError(f"topic {name} does not grow to {partitions} partitions, as many as the source: {refusal}")


async def _settled(look: Callable[[], Awaitable[Found]]) -> Found:
    """Look at new topics until they are known: brokers learn of them one after the other."""
    for _ in range(SETTLE_ATTEMPTS):
        try:
            return await look()
        except MissingTopicsError:
            await asyncio.sleep(0.2)
    return await look()


async def create(admin: AIOKafkaAdminClient, settings: Settings, wanted: TopicPlan) -> None:
    """Create a topic, unless somebody was faster. Raises ConfigError with what the broker says against it."""
    topic = NewTopic(wanted.name, wanted.partitions, 1, topic_configs=dict(wanted.configs))
    topic.replication_factor = settings.topic_replication  # aiokafka's constructor refuses -1, the broker's default
    try:
        response = await admin.create_topics([topic])
    except TopicAlreadyExistsError:
        return  # another worker was faster
    for error in response.topic_errors:
        code, message = error[1], error[2] if len(error) > 2 else ""
        if code and for_code(code) is not TopicAlreadyExistsError:
            advice = " (grant the ACL Create on it)" if for_code(code) is TopicAuthorizationFailedError else ""
            raise ConfigError(f"topic {wanted.name} could not be created: {for_code(code).__name__}: {message}{advice}")
    log.info("created topic %s with %d partitions", wanted.name, wanted.partitions)
