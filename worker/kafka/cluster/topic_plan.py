"""Compare the topics with what they should be; report problems and their remedies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from aiokafka import codec
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from worker.config import ConfigError, Settings
from worker.core.terminal import number_of
from worker.kafka.cluster.describe import TopicDescription, describe_topics, topic_configs
from worker.kafka.writing.rows import OutputTopic

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


async def look(admin: AIOKafkaAdminClient, settings: Settings, settings_of: Sequence[str]) -> Observed:
    """Observe the topics, and the settings of those in `settings_of` that exist. Changes nothing.

    Raises KafkaError, and MissingTopicsError for a topic so new that its settings are not known yet.
    """
    return await look_at(admin, list(settings.topics.values()), settings_of)


async def look_at(admin: AIOKafkaAdminClient, names: Sequence[str], settings_of: Sequence[str]) -> Observed:
    """Observe topics by name, as `look` does."""
    described = await describe_topics(admin, names)
    denied = [name for name, topic in described.items() if topic.error is TopicAuthorizationFailedError]
    topics = {name: topic for name in names if (topic := described.get(name)) is not None and topic.error is None}
    configs, unreadable = await _configs(admin, [name for name in settings_of if name in topics])
    return Observed(topics, denied, configs, unreadable)


async def _configs(
    admin: AIOKafkaAdminClient, names: Sequence[str]
) -> tuple[Mapping[str, Mapping[str, str]], Mapping[str, str]]:
    """Return the topics' settings, and the broker's message by topic whose settings cannot be read."""
    try:
        configs, unreadable = await topic_configs(admin, names)
    except KafkaError as error:
        if error.retriable:
            raise
        return {}, dict.fromkeys(names, str(error))
    for name, (error_type, _) in unreadable.items():
        if error_type.retriable:
            raise MissingTopicsError(f"topic {name}: its settings are not known yet ({error_type.__name__})")
    return configs, {name: words for name, (_, words) in unreadable.items()}


OUTPUT_OVERHEAD: Final = 8192
"""Bytes by which an output may be larger than its input: `scoring` (up to 3 kB), headers, and the record's framing."""

DEAD_LETTER_OVERHEAD: Final = 65_536
"""The same for a created dead-letter topic; generous, because no record may be too large for it."""

SOURCE_AFTER_MS: Final = 60_000
"""message.timestamp.after.max.ms of a created source topic, which limits how far one record moves stream time: a minute
tolerates a clock without NTP, and expires at most a sixtieth of an hour's cache."""

DEFAULT_AFTER_MS: Final = 3_600_000  # Kafka's default of AFTER since version 4.0

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


def plan(settings: Settings, found: Observed, extra_bytes: int = 0) -> list[TopicPlan]:
    """Return the topics as they should be, given the existing ones; the source first."""
    source = found.topics.get(settings.source_topic)
    partitions = settings.topic_partitions if source is None else source.partitions
    largest = settings.max_message_bytes + OUTPUT_OVERHEAD + extra_bytes
    # An output keeps its record's timestamp: if the source accepts more than Kafka's default, outputs must too.
    ahead = found.milliseconds(settings.source_topic, AFTER) or 0
    times = {AFTER: limit_text(ahead)} if ahead > DEFAULT_AFTER_MS and not found.stamps(settings.source_topic) else {}
    outputs = {"max.message.bytes": str(max(DEFAULT_MAX_BYTES, largest)), **times}
    # A dead letter contains the source's record: no record of the source may be too large for it.
    dead_letters = {"max.message.bytes": str(found.max_bytes(settings.source_topic) + DEAD_LETTER_OVERHEAD), **times}
    source_configs = {} if found.stamps(settings.source_topic) else {AFTER: str(SOURCE_AFTER_MS)}
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


SHORT_RETENTION_MS: Final = 86_400_000
SHORT_RETENTION_BYTES: Final = 100_000_000
"""Less than a day, or 100 MB of a partition (some 20,000 traces), is less than a worker may be away."""

HARMLESS_SHARE: Final = 0.1  # the share of KP_CACHE_TTL_SECONDS that one record may expire without a warning

ENTRY_BYTES: Final = 2048
"""Upper bound of a cache entry of 384 dimensions (about 1.7 kB) with its record's and batch's framing."""

LARGEST_ENTRY_BYTES: Final = 4096  # the same with the longest trace id

LARGEST_RECORD_BYTES: Final = 12_288
"""Upper bound of a track record with 200 verdicts and the longest names, at 4 bytes per character."""

CODECS: Final[Mapping[str, Callable[[], bool]]] = {
    "gzip": codec.has_gzip, "snappy": codec.has_snappy, "lz4": codec.has_lz4, "zstd": codec.has_zstd,
}  # fmt: skip
"""The codecs of compressed batches, and whether each can be read here."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with the topics."""

    level: Literal["warn", "fail"]  # fail: the worker does not start
    message: str
    remedy: str = ""
    missing: bool = False  # whether a topic is missing

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


def problems(settings: Settings, found: Observed, extra_bytes: int = 0) -> list[Problem]:
    """Return the problems of the topics, in the order in which to fix them.

    `extra_bytes`: how far an output may exceed its input beyond OUTPUT_OVERHEAD (its embedding).
    """
    return [
        *_denied_topics(settings, found),
        *_missing_topics(settings, found),
        *_changelog_problems(settings, found),
        *_small_changelog_for_verdicts(settings, found),
        *_compression_problems(found),
        *_unreadable_settings(found),
        *_small_outputs(settings, found, extra_bytes),
        *_refused_outputs(settings, found),
        *deleted_early(found, settings.source_topic, "scored"),
        *deleted_early(found, settings.accepted_topic, "read"),
        *_stream_time_problems(settings, found),
    ]


def deleted_early(found: Observed, name: str, done: str) -> Iterator[Problem]:
    """Yield the settings by which Kafka deletes records of a topic that its reader has not `done` yet."""
    policy = found.config(name, "cleanup.policy", "delete")
    if "compact" in policy:
        yield Problem(
            "warn",
            f"topic {name} has cleanup.policy={policy}: Kafka deletes all but the newest record of each key, {done} or "
            "not, and nothing counts them",
            f"set cleanup.policy=delete on {name}",
        )
    kept = found.milliseconds(name, "retention.ms")
    if "delete" in policy and kept is not None and kept < SHORT_RETENTION_MS:
        yield Problem(
            "warn",
            f"topic {name} has retention.ms={kept:.0f}: Kafka deletes records that are not {done} within "
            f"{kept / 60_000:.3g} min",
            f"set retention.ms={SHORT_RETENTION_MS} or more on {name}, longer than an outage may last",
        )
    size = int(found.config(name, "retention.bytes", "-1"))
    if "delete" in policy and 0 <= size < SHORT_RETENTION_BYTES:
        yield Problem(
            "warn",
            f"topic {name} has retention.bytes={size}: Kafka deletes the oldest records of a larger partition, {done} "
            "or not",
            f"set retention.bytes=-1 on {name}, or as much as comes while an outage lasts",
        )


def _denied_topics(settings: Settings, found: Observed) -> Iterator[Problem]:
    for name in found.denied:
        yield Problem(
            "fail",
            f"the broker denies access to topic {name}",
            f"grant the ACL {_needed(settings, name)} on it (docs/security.md)",
        )


def _missing_topics(settings: Settings, found: Observed) -> Iterator[Problem]:
    missing = [
        f"{name} ({variable})"
        for variable, name in settings.topics.items()
        if name not in found.topics and name not in found.denied
    ]
    if missing:
        yield Problem(
            "fail",
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}",
            "create them (kp-worker topics shows how), or let the worker do it with KP_CREATE_TOPICS=true, or "
            "correct the names",
            missing=True,
        )


def _unreadable_settings(found: Observed) -> Iterator[Problem]:
    for name, words in found.unreadable.items():
        yield Problem(
            "warn",
            f"cannot read the settings of topic {name}: {words}; assuming Kafka's defaults",
            "grant the ACL DescribeConfigs on it",
        )


def _small_outputs(settings: Settings, found: Observed, extra_bytes: int) -> Iterator[Problem]:
    accepted, rejected = settings.accepted_topic, settings.rejected_topic
    if not {accepted, rejected} <= found.topics.keys():
        return
    needed = settings.max_message_bytes + OUTPUT_OVERHEAD + extra_bytes
    small = {name: limit for name in (accepted, rejected) if (limit := found.max_bytes(name)) < needed}
    if not small:
        return
    limits = " and ".join(f"{name} has max.message.bytes={limit}" for name, limit in small.items())
    surely = min(small.values()) - OUTPUT_OVERHEAD - extra_bytes
    which = f"a scored trace that had more than {surely} bytes" if surely > 0 else "a scored trace"
    yield Problem(
        "warn",
        f"{limits}: {which} may not fit, and then becomes a dead letter (too_large)",
        f"set max.message.bytes={needed} on {' and '.join(small)}: every trace up to KP_MAX_MESSAGE_BYTES then "
        "fits, without a restart",
    )


def codec_problems() -> Iterator[Problem]:
    """Yield a warning if a codec cannot be read here; no topic setting shows which codecs producers use."""
    missing = [name for name, readable in CODECS.items() if not readable()]
    if missing:
        yield Problem(
            "warn",
            f"records that producers compress with {' or '.join(missing)} cannot be read here",
            "install cramjam (pip install cramjam)",
        )


def _compression_problems(found: Observed) -> Iterator[Problem]:
    """Yield the topics, outputs included, that the broker compresses with a codec that cannot be read here."""
    for name in found.topics:
        kind = found.config(name, "compression.type", "producer")
        if kind in CODECS and not CODECS[kind]():
            yield Problem(
                "fail",
                f"topic {name} has compression.type={kind}, which cannot be read here",
                "install cramjam (pip install cramjam), or set compression.type=gzip",
            )


def _refused_outputs(settings: Settings, found: Observed) -> Iterator[Problem]:
    """Yield the outputs that would refuse one of the worker's records for its key, size or timestamp."""
    source = settings.source_topic
    for name in (settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic):
        policy = found.config(name, "cleanup.policy", "delete")
        if "compact" in policy:
            yield Problem(
                "warn",
                f"topic {name} has cleanup.policy={policy}: records without a key are refused",
                "set cleanup.policy=delete",
            )
        yield from _refused_timestamps(source, name, found)
    letters = settings.dead_letter_topic
    wanted = found.max_bytes(source) + DEAD_LETTER_OVERHEAD
    if {source, letters} <= found.configs.keys() and found.max_bytes(letters) < wanted:
        yield Problem(
            "warn",
            f"topic {letters} has max.message.bytes={found.max_bytes(letters)}, the source {source} "
            f"{found.max_bytes(source)}: dead letters of the largest records are truncated",
            f"set max.message.bytes={wanted} on {letters}",
        )


def _refused_timestamps(source: str, output: str, found: Observed) -> Iterator[Problem]:
    """Compare the timestamps that the source and an output accept, as records keep theirs."""
    if found.stamps(output):
        return
    ahead, takes_ahead = found.milliseconds(source, AFTER), found.milliseconds(output, AFTER)
    if found.stamps(source):
        ahead = 0.0
    if ahead is not None and takes_ahead is not None and takes_ahead < ahead:
        yield Problem(
            "warn",
            f"topic {output} has {AFTER}={takes_ahead:.0f}, less than the source {source} ({limit_text(ahead)}): "
            "outputs of records from the future are refused",
            f"set {AFTER}={limit_text(ahead)} on {output}, or less on {source}",
        )
    old, takes_old = found.milliseconds(source, BEFORE), found.milliseconds(output, BEFORE)
    kept = found.milliseconds(source, "retention.ms")
    if found.stamps(source):
        old = 0.0
    if old is not None and takes_old is not None and kept is not None and takes_old < old + kept:
        # A record may age on the source, up to its retention, before it is scored.
        yield Problem(
            "warn",
            f"topic {output} has {BEFORE}={takes_old:.0f}, and records of the source {source} may be older when "
            f"they are scored ({BEFORE}={limit_text(old)} there, retention.ms={limit_text(kept)}): outputs are "
            "refused",
            f"set {BEFORE}={limit_text(old + kept)} on {output}",
        )


def _stream_time_problems(settings: Settings, found: Observed) -> Iterator[Problem]:
    """Warn if one record, dated as far ahead as the source accepts, would expire much of a cache."""
    source, ttl = settings.source_topic, settings.cache_ttl_ms
    ahead, step = found.milliseconds(source, AFTER), settings.stream_time_max_step_ms
    if ttl is None or settings.embedder == "none" or ahead is None or found.stamps(source):
        return
    harmless = max(SOURCE_AFTER_MS, int(ttl * HARMLESS_SHARE))
    if min(ahead, math.inf if step is None else step) <= harmless:
        return
    effect = "empties a partition's cache" if ahead >= ttl else "expires much of a partition's cache"
    yield Problem(
        "warn",
        f"topic {source} accepts records dated {'any time' if ahead == math.inf else f'{ahead / 1000:.0f} s'} "
        f"ahead ({AFTER}), KP_CACHE_TTL_SECONDS is {ttl / 1000:g}: one such record {effect}",
        f"set {AFTER}={SOURCE_AFTER_MS} on {source}, or KP_STREAM_TIME_MAX_STEP_SECONDS (docs/security.md)",
    )


def _changelog_problems(settings: Settings, found: Observed) -> Iterator[Problem]:
    name = settings.changelog
    source, changelog = found.topics.get(settings.source_topic), found.topics.get(name)
    if source is not None and changelog is not None and changelog.partitions < source.partitions:
        yield Problem(
            "fail",
            f"topic {name} has {number_of(changelog.partitions, 'partition')}, the source {settings.source_topic} "
            f"has {source.partitions}: the changelog needs at least as many",
            f"add partitions to it (kafka-topics --alter --partitions {source.partitions})",
        )
    policy = found.config(name, "cleanup.policy", "compact")
    if "compact" not in policy or "delete" in policy:
        yield Problem(
            "fail",
            f"topic {name} has cleanup.policy={policy}: cache entries would be deleted, or never compacted",
            "set cleanup.policy=compact",
        )
    limit = found.max_bytes(name)
    if limit < LARGEST_ENTRY_BYTES and settings.embedder != "none":
        yield Problem(
            "fail" if limit < ENTRY_BYTES else "warn",
            f"topic {name} has max.message.bytes={limit}, too small for "
            + ("a cache entry" if limit < ENTRY_BYTES else "a cache entry with a long trace id"),
            f"set max.message.bytes={DEFAULT_MAX_BYTES} on {name}",
        )


def _small_changelog_for_verdicts(settings: Settings, found: Observed) -> Iterator[Problem]:
    """Yield a failure if the changelog would refuse a track record."""
    limit, name = found.max_bytes(settings.changelog), settings.changelog
    if settings.verdict_key_file is not None and limit < LARGEST_RECORD_BYTES:
        yield Problem(
            "fail",
            f"topic {name} has max.message.bytes={limit}, too small for an agent's track record",
            f"set max.message.bytes={DEFAULT_MAX_BYTES} on {name}, or no KP_VERDICT_KEY_FILE",
        )


def _needed(settings: Settings, topic: str) -> str:
    if topic == settings.source_topic:
        return "Read"
    return "Read and Write" if topic == settings.changelog else "Write"
