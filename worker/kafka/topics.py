"""The topics as they are and as they should be: their problems, with remedies, and creating them (KP_CREATE_TOPICS)."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from aiokafka import codec
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import (
    InvalidPartitionsError,
    KafkaError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from worker.config import ConfigError, Settings
from worker.core.records import ACCEPTED, DEAD_LETTER, JUDGED, REJECTED
from worker.core.terminal import number_of
from worker.kafka.connections import prepare_patiently
from worker.kafka.describe import TopicDescription, describe_topics, topic_configs
from worker.kafka.rows import OutputTopic

log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES: Final = 1_048_588
"""Kafka's default max.message.bytes, assumed if the worker may not read a topic's settings."""

AFTER: Final = "message.timestamp.after.max.ms"
BEFORE: Final = "message.timestamp.before.max.ms"

NO_LIMIT: Final = 2**63 - 1  # the value that Kafka reports for a topic without a limit


class MissingTopicsError(ConfigError):
    """A topic is missing."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The topics as a broker reports them."""

    topics: Mapping[str, TopicDescription]  # existing ones
    denied: Sequence[str]  # topics to which this login has no access
    configs: Mapping[str, Mapping[str, str]]  # settings by topic
    unreadable: Mapping[str, str]  # the broker's message, by topic whose settings cannot be read

    def config(self, topic: str, name: str, default: str) -> str:
        """Return a topic's setting; `default` if unknown."""
        return self.configs.get(topic, {}).get(name, default)

    def max_bytes(self, topic: str) -> int:
        """Return the largest record that a topic accepts; Kafka's default if unknown."""
        return int(self.config(topic, "max.message.bytes", str(DEFAULT_MAX_BYTES)))

    def output(self, topic: str) -> OutputTopic:
        """Return an existing topic as an output topic."""
        return OutputTopic(topic, self.topics[topic].partitions, self.max_bytes(topic))

    def milliseconds(self, topic: str, name: str) -> float | None:
        """Return one of a topic's time limits: infinity if there is none, None if unknown."""
        text = self.configs.get(topic, {}).get(name)
        if text is None:
            return None
        return math.inf if int(text) < 0 or int(text) == NO_LIMIT else int(text)

    def stamps(self, topic: str) -> bool:
        """Whether the broker sets the timestamps of the topic's records, in place of the producer's."""
        return self.config(topic, "message.timestamp.type", "CreateTime") == "LogAppendTime"


def no_access(topic: str) -> str:
    """Return the message for a topic to which this login has no access."""
    return f"the broker denies access to topic {topic}: grant an ACL on it (docs/security.md)"


async def observe(admin: AIOKafkaAdminClient, names: Iterable[str]) -> Observed:
    """Observe topics and their settings. Changes nothing.

    Raises KafkaError, and MissingTopicsError for a topic so new that its settings are not known yet.
    """
    names = list(names)
    described = await describe_topics(admin, names)
    denied = [name for name, topic in described.items() if topic.error is TopicAuthorizationFailedError]
    topics = {name: topic for name in names if (topic := described.get(name)) is not None and topic.error is None}
    try:
        configs, errors = await topic_configs(admin, list(topics))
    except KafkaError as error:
        if error.retriable:
            raise
        return Observed(topics, denied, {}, dict.fromkeys(topics, str(error)))
    for name, (error_type, _) in errors.items():
        if error_type.retriable:
            raise MissingTopicsError(f"topic {name}: its settings are not known yet ({error_type.__name__})")
    return Observed(topics, denied, configs, {name: message for name, (_, message) in errors.items()})


OUTPUT_OVERHEAD: Final = 8192
"""Bytes by which an output may be larger than its input: `scoring` (up to 3 kB), headers, and the record's framing."""

DEAD_LETTER_OVERHEAD: Final = 65_536
"""The same for a created dead-letter topic; generous, because no record may be too large for it."""

SOURCE_AFTER_MS: Final = 60_000
"""message.timestamp.after.max.ms of a created source topic, which limits how far one record moves stream time: a minute
tolerates a clock without NTP, and expires at most a sixtieth of an hour's cache."""

CHANGELOG_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # Only closed segments are compacted: with the defaults of 7 days and 1 GiB the topic would grow without bound.
    "segment.ms": "600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "60000",
    # An entry must never age out while it is the latest of its slot.
    "retention.ms": "-1",
    # The broker's time: a worker whose clock is an hour ahead could not commit (message.timestamp.after.max.ms).
    "message.timestamp.type": "LogAppendTime",
}


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """A topic as it should be."""

    variable: str  # that sets its name
    name: str
    partitions: int  # number of partitions
    configs: Mapping[str, str]  # settings with which it is created


def plan(settings: Settings, observed: Observed, extra_bytes: int = 0) -> list[TopicPlan]:
    """Return the topics as they should be, given the existing ones; the source first."""
    source = observed.topics.get(settings.source_topic)
    partitions = settings.topic_partitions if source is None else source.partitions
    largest = settings.max_message_bytes + OUTPUT_OVERHEAD + extra_bytes
    # An output keeps its record's timestamp: what the source accepts beyond Kafka's default, an hour, outputs must too.
    ahead = observed.milliseconds(settings.source_topic, AFTER) or 0
    times = {AFTER: limit_text(ahead)} if ahead > 3_600_000 and not observed.stamps(settings.source_topic) else {}
    outputs = {"max.message.bytes": str(max(DEFAULT_MAX_BYTES, largest)), **times}
    # A dead letter contains the source's record: no record of the source may be too large for it.
    dead_letters = {"max.message.bytes": str(observed.max_bytes(settings.source_topic) + DEAD_LETTER_OVERHEAD), **times}
    source_configs = {} if observed.stamps(settings.source_topic) else {AFTER: str(SOURCE_AFTER_MS)}
    configs: dict[str, Mapping[str, str]] = {
        settings.source_topic: source_configs,
        settings.accepted_topic: outputs,
        settings.rejected_topic: outputs,
        settings.dead_letter_topic: dead_letters,
        settings.changelog: CHANGELOG_CONFIG,
        settings.judged: {},
    }
    return [TopicPlan(variable, name, partitions, configs[name]) for variable, name in settings.topics.items()]


def limit_text(milliseconds: float) -> str:
    """Return a limit as Kafka's settings spell it."""
    return str(NO_LIMIT if milliseconds == math.inf else int(milliseconds))


SHORT_RETENTION_MS: Final = 86_400_000  # a day: a worker may be away for longer than anything less

ENTRY_BYTES: Final = 2048
"""Upper bound of a cache entry of 384 dimensions (about 1.7 kB) with its record's and batch's framing. One with the
longest trace id takes less than twice as much."""

LARGEST_RECORD_BYTES: Final = 12_288
"""Upper bound of a track record with 200 verdicts and the longest names, at 4 bytes per character."""

CODECS: Final[Mapping[str, Callable[[], bool]]] = {
    "gzip": codec.has_gzip, "snappy": codec.has_snappy, "lz4": codec.has_lz4, "zstd": codec.has_zstd,
}  # fmt: skip
"""The codecs of compressed batches, and whether each can be read here."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with the topics."""

    message: str
    remedy: str
    level: Literal["warn", "fail"] = "warn"  # fail: the worker does not start
    missing: bool = False  # whether a topic is missing

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def problems(settings: Settings, observed: Observed, extra_bytes: int = 0) -> list[Problem]:
    """Return the problems of the topics, in the order in which to fix them.

    `extra_bytes`: how far an output may exceed its input beyond OUTPUT_OVERHEAD (its embedding).
    """
    return [
        *_denied_topics(settings, observed),
        *_missing_topics(settings, observed),
        *_changelog_problems(settings, observed),
        *_compression_problems(observed),
        *_unreadable_settings(observed),
        *_small_outputs(settings, observed, extra_bytes),
        *_refused_outputs(settings, observed),
        *deleted_early(observed, settings.source_topic, "scored"),
        *deleted_early(observed, settings.accepted_topic, "read"),
        *_stream_time_problems(settings, observed),
    ]


def deleted_early(observed: Observed, name: str, done: str) -> Iterator[Problem]:
    """Yield the settings by which Kafka deletes records of a topic that its reader has not `done` yet."""
    policy = observed.config(name, "cleanup.policy", "delete")
    if "compact" in policy:
        yield Problem(
            f"topic {name} has cleanup.policy={policy}: Kafka deletes all but the newest record of each key, {done} or "
            "not, and nothing counts them",
            f"set cleanup.policy=delete on {name}",
        )
    kept = observed.milliseconds(name, "retention.ms")
    if "delete" in policy and kept is not None and kept < SHORT_RETENTION_MS:
        yield Problem(
            f"topic {name} has retention.ms={kept:.0f}: Kafka deletes records that are not {done} within "
            f"{kept / 60_000:.3g} min",
            f"set retention.ms={SHORT_RETENTION_MS} or more on {name}, longer than an outage may last",
        )
    size = int(observed.config(name, "retention.bytes", "-1"))
    if "delete" in policy and 0 <= size < 100_000_000:  # some 20,000 traces
        yield Problem(
            f"topic {name} has retention.bytes={size}: Kafka deletes the oldest records of a larger partition, {done} "
            "or not",
            f"set retention.bytes=-1 on {name}, or as much as comes while an outage lasts",
        )


def _denied_topics(settings: Settings, observed: Observed) -> Iterator[Problem]:
    needed = {settings.source_topic: "Read", settings.changelog: "Read and Write"}
    for name in observed.denied:
        yield Problem(
            f"the broker denies access to topic {name}",
            f"grant the ACL {needed.get(name, 'Write')} on it (docs/security.md)",
            level="fail",
        )


def _missing_topics(settings: Settings, observed: Observed) -> Iterator[Problem]:
    missing = [
        f"{name} ({variable})"
        for variable, name in settings.topics.items()
        if name not in observed.topics and name not in observed.denied
    ]
    if missing:
        yield Problem(
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}",
            "create them (kp-worker topics shows how), or let the worker do it with KP_CREATE_TOPICS=true, or "
            "correct the names",
            missing=True,
            level="fail",
        )


def _unreadable_settings(observed: Observed) -> Iterator[Problem]:
    for name, words in observed.unreadable.items():
        yield Problem(
            f"cannot read the settings of topic {name}: {words}; assuming Kafka's defaults",
            "grant the ACL DescribeConfigs on it",
        )


def _small_outputs(settings: Settings, observed: Observed, extra_bytes: int) -> Iterator[Problem]:
    accepted, rejected = settings.accepted_topic, settings.rejected_topic
    if not {accepted, rejected} <= observed.topics.keys():
        return
    needed = settings.max_message_bytes + OUTPUT_OVERHEAD + extra_bytes
    small = {name: limit for name in (accepted, rejected) if (limit := observed.max_bytes(name)) < needed}
    if not small:
        return
    limits = " and ".join(f"{name} has max.message.bytes={limit}" for name, limit in small.items())
    surely = min(small.values()) - OUTPUT_OVERHEAD - extra_bytes
    which = f"a scored trace that had more than {surely} bytes" if surely > 0 else "a scored trace"
    yield Problem(
        f"{limits}: {which} may not fit, and then becomes a dead letter (too_large)",
        f"set max.message.bytes={needed} on {' and '.join(small)}: every trace up to KP_MAX_MESSAGE_BYTES then "
        "fits, without a restart",
    )


def codec_problems() -> Iterator[Problem]:
    """Yield a warning if a codec cannot be read here; no topic setting shows which codecs producers use."""
    missing = [name for name, readable in CODECS.items() if not readable()]
    if missing:
        yield Problem(
            f"records that producers compress with {' or '.join(missing)} cannot be read here",
            "install cramjam (pip install cramjam)",
        )


def _compression_problems(observed: Observed) -> Iterator[Problem]:
    """Yield the topics, outputs included, that the broker compresses with a codec that cannot be read here."""
    for name in observed.topics:
        kind = observed.config(name, "compression.type", "producer")
        if kind in CODECS and not CODECS[kind]():
            yield Problem(
                f"topic {name} has compression.type={kind}, which cannot be read here",
                "install cramjam (pip install cramjam), or set compression.type=gzip",
                level="fail",
            )


def _refused_outputs(settings: Settings, observed: Observed) -> Iterator[Problem]:
    """Yield the outputs that would refuse one of the worker's records for its key, size or timestamp."""
    source = settings.source_topic
    for name in (settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic):
        policy = observed.config(name, "cleanup.policy", "delete")
        if "compact" in policy:
            yield Problem(
                f"topic {name} has cleanup.policy={policy}: records without a key are refused",
                "set cleanup.policy=delete",
            )
        yield from _refused_timestamps(source, name, observed)
    letters = settings.dead_letter_topic
    wanted = observed.max_bytes(source) + DEAD_LETTER_OVERHEAD
    if {source, letters} <= observed.configs.keys() and observed.max_bytes(letters) < wanted:
        yield Problem(
            f"topic {letters} has max.message.bytes={observed.max_bytes(letters)}, the source {source} "
            f"{observed.max_bytes(source)}: dead letters of the largest records are truncated",
            f"set max.message.bytes={wanted} on {letters}",
        )


def _refused_timestamps(source: str, output: str, observed: Observed) -> Iterator[Problem]:
    """Compare the timestamps that the source and an output accept, as records keep theirs."""
    if observed.stamps(output):
        return
    ahead, takes_ahead = observed.milliseconds(source, AFTER), observed.milliseconds(output, AFTER)
    if observed.stamps(source):
        ahead = 0.0
    if ahead is not None and takes_ahead is not None and takes_ahead < ahead:
        yield Problem(
            f"topic {output} has {AFTER}={takes_ahead:.0f}, less than the source {source} ({limit_text(ahead)}): "
            "outputs of records from the future are refused",
            f"set {AFTER}={limit_text(ahead)} on {output}, or less on {source}",
        )
    old, takes_old = observed.milliseconds(source, BEFORE), observed.milliseconds(output, BEFORE)
    kept = observed.milliseconds(source, "retention.ms")
    if observed.stamps(source):
        old = 0.0
    if old is not None and takes_old is not None and kept is not None and takes_old < old + kept:
        # A record may age on the source, up to its retention, before it is scored.
        yield Problem(
            f"topic {output} has {BEFORE}={takes_old:.0f}, and records of the source {source} may be older when "
            f"they are scored ({BEFORE}={limit_text(old)} there, retention.ms={limit_text(kept)}): outputs are "
            "refused",
            f"set {BEFORE}={limit_text(old + kept)} on {output}",
        )


def _stream_time_problems(settings: Settings, observed: Observed) -> Iterator[Problem]:
    """Warn if one record, dated as far ahead as the source accepts, would expire much of a cache."""
    source, ttl = settings.source_topic, settings.cache_ttl_ms
    ahead, step = observed.milliseconds(source, AFTER), settings.stream_time_max_step_ms
    if ttl is None or settings.embedder == "none" or ahead is None or observed.stamps(source):
        return
    harmless = max(SOURCE_AFTER_MS, ttl // 10)  # that much may expire without a warning
    if min(ahead, math.inf if step is None else step) <= harmless:
        return
    effect = "empties a partition's cache" if ahead >= ttl else "expires much of a partition's cache"
    yield Problem(
        f"topic {source} accepts records dated {'any time' if ahead == math.inf else f'{ahead / 1000:.0f} s'} "
        f"ahead ({AFTER}), KP_CACHE_TTL_SECONDS is {ttl / 1000:g}: one such record {effect}",
        f"set {AFTER}={SOURCE_AFTER_MS} on {source}, or KP_STREAM_TIME_MAX_STEP_SECONDS (docs/security.md)",
    )


def _changelog_problems(settings: Settings, observed: Observed) -> Iterator[Problem]:
    name = settings.changelog
    source, changelog = observed.topics.get(settings.source_topic), observed.topics.get(name)
    if source is not None and changelog is not None and changelog.partitions < source.partitions:
        yield Problem(
            f"topic {name} has {number_of(changelog.partitions, 'partition')}, the source {settings.source_topic} "
            f"has {source.partitions}: the changelog needs at least as many",
            f"add partitions to it (kafka-topics --alter --partitions {source.partitions})",
            level="fail",
        )
    policy = observed.config(name, "cleanup.policy", "compact")
    if "compact" not in policy or "delete" in policy:
        yield Problem(
            f"topic {name} has cleanup.policy={policy}: cache entries would be deleted, or never compacted",
            "set cleanup.policy=compact",
            level="fail",
        )
    limit = observed.max_bytes(name)
    if limit < 2 * ENTRY_BYTES and settings.embedder != "none":
        yield Problem(
            f"topic {name} has max.message.bytes={limit}, too small for "
            + ("a cache entry" if limit < ENTRY_BYTES else "a cache entry with a long trace id"),
            f"set max.message.bytes={DEFAULT_MAX_BYTES} on {name}",
            level="fail" if limit < ENTRY_BYTES else "warn",
        )
    if settings.verdict_key_file is not None and limit < LARGEST_RECORD_BYTES:
        yield Problem(
            f"topic {name} has max.message.bytes={limit}, too small for an agent's track record",
            f"set max.message.bytes={DEFAULT_MAX_BYTES} on {name}, or no KP_VERDICT_KEY_FILE",
            level="fail",
        )


# -- creating them, before the worker joins its group

Result = TypeVar("Result")

SETTLE_ATTEMPTS: Final = 50  # how often, 0.2 s apart, a broker is asked for a topic that it does not know yet


@dataclass(frozen=True, slots=True)
class Layout:
    """The worker's topics as they were observed."""

    source_partitions: int  # number of partitions
    outputs: Mapping[str, OutputTopic]  # by kind (records.ACCEPTED and so on)
    changelog: OutputTopic


async def prepare_topics(settings: Settings, client: Mapping[str, Any], extra_bytes: int = 0) -> Layout:
    """Create missing topics (KP_CREATE_TOPICS) and check all. Raises ConfigError that names topic and remedy.

    `extra_bytes`: see `problems`.
    """

    async def prepare(admin: AIOKafkaAdminClient) -> Layout:
        if settings.create_topics:
            await create_missing(admin, settings, extra_bytes)
            return await settled(lambda: _check(admin, settings, extra_bytes))
        return await _check(admin, settings, extra_bytes)

    return await prepare_patiently(settings, client, prepare)


async def _check(admin: AIOKafkaAdminClient, settings: Settings, extra_bytes: int) -> Layout:
    observed = await observe(admin, settings.topics.values())
    for problem in [*problems(settings, observed, extra_bytes), *codec_problems()]:
        if problem.level == "fail":
            raise (MissingTopicsError if problem.missing else ConfigError)(str(problem))
        log.warning("%s", problem)
    kinds = {
        ACCEPTED: settings.accepted_topic,
        REJECTED: settings.rejected_topic,
        DEAD_LETTER: settings.dead_letter_topic,
    }
    if settings.verdict_key_file is not None:
        kinds[JUDGED] = settings.judged
    return Layout(
        observed.topics[settings.source_topic].partitions,
        {kind: observed.output(name) for kind, name in kinds.items()},
        observed.output(settings.changelog),
    )


async def create_missing(admin: AIOKafkaAdminClient, settings: Settings, extra_bytes: int = 0) -> None:
    """Create the missing topics, and add partitions to the changelog if the source has more. Raises ConfigError."""

    async def accessible() -> Observed:
        observed = await observe(admin, settings.topics.values())
        if observed.denied:
            raise ConfigError(str(problems(settings, observed)[0]))
        return observed

    def due(observed: Observed) -> Sequence[TopicPlan]:
        topics = plan(settings, observed, extra_bytes)
        return topics if settings.source_topic in observed.topics else topics[:1]  # the others depend on the source

    topics = (await create_planned(admin, settings, accessible, due)).topics
    wanted = topics[settings.source_topic].partitions
    if topics[settings.changelog].partitions < wanted:  # the source topic has gained partitions
        await _grow(admin, settings.changelog, wanted)


async def _grow(admin: AIOKafkaAdminClient, name: str, partitions: int) -> None:
    """Add partitions to the changelog. Raises ConfigError."""
    failure: KafkaError | None = None
    try:
        await admin.create_partitions({name: NewPartitions(partitions)})
        log.info("topic %s now has %s, like the source", name, number_of(partitions, "partition"))
    except InvalidPartitionsError as error:
        failure = error  # it has enough already if another worker was faster
    except KafkaError as error:
        if error.retriable:
            raise
        raise ConfigError(
            f"topic {name} must grow to {partitions} partitions, like the source, but cannot: {error} "
            "(grant the ACL Alter on it)"
        ) from error
    for _ in range(SETTLE_ATTEMPTS):
        if (await describe_topics(admin, [name]))[name].partitions >= partitions:
            return
        await asyncio.sleep(0.2)
    raise ConfigError(f"topic {name} could not be extended to {partitions} partitions, like the source: {failure}")


async def settled(ask: Callable[[], Awaitable[Result]]) -> Result:
    """Return the answer once it has the new topics: brokers learn of them at different times."""
    for _ in range(SETTLE_ATTEMPTS):
        try:
            return await ask()
        except MissingTopicsError:
            await asyncio.sleep(0.2)
    return await ask()


async def create_planned(
    admin: AIOKafkaAdminClient, settings: Settings, ask: Callable[[], Awaitable[Observed]],
    plan: Callable[[Observed], Sequence[TopicPlan]],
) -> Observed:  # fmt: skip
    """Create the missing topics of a plan, and wait until the broker shows them; return them as last observed.

    Raises ConfigError.
    """
    for _ in range(SETTLE_ATTEMPTS):
        observed = await settled(ask)
        lacking = [wanted for wanted in plan(observed) if wanted.name not in {*observed.topics, *observed.denied}]
        if not lacking:
            return observed
        for wanted in lacking:
            await create(admin, settings, wanted)
        await asyncio.sleep(0.2)
    raise MissingTopicsError(f"topic {lacking[0].name} was created but the broker does not show it")


async def create(admin: AIOKafkaAdminClient, settings: Settings, wanted: TopicPlan) -> None:
    """Create a topic, unless another process was faster. Raises ConfigError with the broker's message."""
    topic = NewTopic(wanted.name, wanted.partitions, 1, topic_configs=dict(wanted.configs))
    topic.replication_factor = settings.topic_replication  # aiokafka's constructor refuses -1, the broker's default
    for error in (await admin.create_topics([topic])).topic_errors:
        code, message = error[1], error[2] or "" if len(error) > 2 else ""
        if for_code(code) is TopicAlreadyExistsError:
            return  # another process was faster, or the broker does not show it yet
        if code:
            advice = " (grant the ACL Create on it)" if for_code(code) is TopicAuthorizationFailedError else ""
            raise ConfigError(f"topic {wanted.name} could not be created: {for_code(code).__name__}: {message}{advice}")
    log.info("created topic %s with %s", wanted.name, number_of(wanted.partitions, "partition"))
