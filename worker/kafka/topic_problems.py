"""What is wrong with the worker's topics, and what to do about it.

Lives here: the checks, which `kp-worker run`, `topics` and `doctor` share. Must not live here: Kafka clients, output
for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from aiokafka import codec

from worker.config import Settings
from worker.kafka.topic_plan import DEAD_LETTER_OVERHEAD, OUTPUT_OVERHEAD, SOURCE_AFTER_MS, limit_text
from worker.kafka.topic_state import AFTER, BEFORE, DEFAULT_MAX_BYTES, DIFFERENCE, Observed

HARMLESS_SHARE: Final = 0.1
"""The share of KP_CACHE_TTL_SECONDS that one record may expire without a warning."""

ENTRY_BYTES: Final = 2048
"""A cache entry of 384 dimensions is about 1.7 kB, with its record's and batch's framing below this."""

LARGEST_ENTRY_BYTES: Final = 4096
"""The same with the longest trace id that is kept."""

LARGEST_REQUEST_BYTES: Final = 131_072
"""The changelog's record of a request to forget, with the most ids and the ends of 10,000 partitions, is below this."""

CODECS: Final[Mapping[str, Callable[[], bool]]] = {
    "gzip": codec.has_gzip, "snappy": codec.has_snappy, "lz4": codec.has_lz4, "zstd": codec.has_zstd,
}  # fmt: skip
"""The codecs that a batch may be compressed with, and whether each can be read here."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with the topics. `fail`: the worker does not start; `warn`: it does."""

    level: Literal["warn", "fail"]
    message: str
    remedy: str = ""
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


def problems(settings: Settings, found: Observed, extra_bytes: int = 0) -> list[Problem]:
    """Return what is wrong with the topics, in the order in which it should be fixed.

    `extra_bytes`: by how much an output may be larger than its input beyond OUTPUT_OVERHEAD (the embedding in it).
    """
    return [
        *_denied_topics(settings, found),
        *_missing_topics(settings, found),
        *_changelog_problems(settings, found),
        *_small_changelog_for_requests(settings, found),
        *_no_id_for_requests(settings, found),
        *_compression_problems(found),
        *_unreadable_settings(found),
        *_small_outputs(settings, found, extra_bytes),
        *_refused_outputs(settings, found),
        *_stream_time_problems(settings, found),
    ]


def _denied_topics(settings: Settings, found: Observed) -> list[Problem]:
    return [
        Problem(
            "fail",
            f"the broker denies access to topic {name}",
            f"grant the ACL {_needed(settings, name)} on it (docs/security.md)",
        )
        for name in found.denied
    ]


def _missing_topics(settings: Settings, found: Observed) -> list[Problem]:
    missing = [
        f"{name} ({variable})"
        for variable, name in settings.topics.items()
        if name not in found.topics and name not in found.denied
    ]
    if not missing:
        return []
    return [
        Problem(
            "fail",
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}",
            "create them (kp-worker topics shows how), or let the worker do it with KP_CREATE_TOPICS=true, or "
            "correct the names",
            missing=True,
        )
    ]


def _unreadable_settings(found: Observed) -> list[Problem]:
    return [
        Problem(
            "warn",
            f"cannot read the settings of topic {name}: {words}; assuming Kafka's defaults",
            "grant the ACL DescribeConfigs on it",
        )
        for name, words in found.unreadable.items()
    ]


def _small_outputs(settings: Settings, found: Observed, extra_bytes: int) -> list[Problem]:
    accepted, rejected = settings.accepted_topic, settings.rejected_topic
    fits = largest_trace(settings, found, extra_bytes)
    if not {accepted, rejected} <= found.topics.keys() or fits >= settings.max_message_bytes:
        return []
    return [
        Problem(
            "warn",
            f"the output topics accept records of at most {fits + OUTPUT_OVERHEAD + extra_bytes} bytes: traces above "
            f"{fits} bytes become dead letters",
            f"raise max.message.bytes of {accepted} and {rejected} by {settings.max_message_bytes - fits} to "
            "accept traces up to KP_MAX_MESSAGE_BYTES",
        )
    ]


def codec_problems() -> list[Problem]:
    """Return a warning if producers may send what cannot be read here; no topic setting shows which codecs they use."""
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
    """Return the topics that the broker compresses with a codec that cannot be read here, also the worker's outputs."""
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
    """Return the outputs that would refuse a record of the worker: by key, by size or by timestamp."""
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
                f"{found.max_bytes(source)}: dead letters of the largest records are truncated",
                f"set max.message.bytes={wanted} on {letters}",
            )
        )
    return result


def _refused_timestamps(source: str, output: str, found: Observed) -> list[Problem]:
    """Compare the timestamps that the source accepts with those that an output accepts: records keep theirs."""
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
                f"topic {output} has {AFTER}={takes_ahead:.0f}, less than the source {source} ({limit_text(ahead)}): "
                "outputs of records from the future are refused",
                f"set {AFTER}={limit_text(ahead)} on {output}, or less on {source}",
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
                f"they are scored ({BEFORE}={limit_text(old)} there, retention.ms={limit_text(kept)}): outputs are "
                "refused",
                f"set {BEFORE}={limit_text(old + kept)} on {output}",
            )
        )
    return result


def _stream_time_problems(settings: Settings, found: Observed) -> list[Problem]:
    """Warn if one record, dated as far ahead as the source accepts, would expire much of a cache."""
    source, ttl = settings.source_topic, settings.cache_ttl_ms
    limit = AFTER if found.has_after else DIFFERENCE
    ahead, step = found.milliseconds(source, limit), settings.stream_time_max_step_ms
    if ttl is None or settings.embedder == "none" or ahead is None or found.stamps(source):
        return []
    harmless = max(SOURCE_AFTER_MS, int(ttl * HARMLESS_SHARE))
    if min(ahead, math.inf if step is None else step) <= harmless:
        return []
    effect = "empties a partition's cache" if ahead >= ttl else "expires much of a partition's cache"
    step_setting = "KP_STREAM_TIME_MAX_STEP_SECONDS (docs/security.md)"
    remedy = f"set {AFTER}={SOURCE_AFTER_MS} on {source}, or {step_setting}"
    if not found.has_after:
        remedy = f"set {step_setting}; Kafka before 3.6 cannot limit the future alone"
    return [
        Problem(
            "warn",
            f"topic {source} accepts records dated {'any time' if ahead == math.inf else f'{ahead / 1000:.0f} s'} "
            f"ahead ({limit}), KP_CACHE_TTL_SECONDS is {ttl / 1000:g}: one such record {effect}",
            remedy,
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
                f"{source.partitions}: the changelog needs at least as many",
                f"add partitions to it (kafka-topics --alter --partitions {source.partitions})",
            )
        )
    policy = found.config(name, "cleanup.policy", "compact")
    if "compact" not in policy or "delete" in policy:
        result.append(
            Problem(
                "fail",
                f"topic {name} has cleanup.policy={policy}: cache entries would be deleted, or never compacted",
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


def _small_changelog_for_requests(settings: Settings, found: Observed) -> list[Problem]:
    limit = found.max_bytes(settings.changelog)
    if not settings.forget or limit >= LARGEST_REQUEST_BYTES:
        return []
    return [
        Problem(
            "fail",
            f"topic {settings.changelog} has max.message.bytes={limit}, less than the record of a request to forget",
            f"set max.message.bytes={DEFAULT_MAX_BYTES} on {settings.changelog}, or KP_FORGET=false",
        )
    ]


def _no_id_for_requests(settings: Settings, found: Observed) -> list[Problem]:
    source = found.topics.get(settings.source_topic)
    if not settings.forget or source is None or source.topic_id is not None:
        return []
    return [
        Problem(
            "warn",
            f"the brokers report no id of topic {settings.source_topic} (Kafka has ids since 2.8): no request to "
            "forget is honoured, because one of an earlier topic of this name could be sent again",
            "upgrade the brokers, or set KP_FORGET=false",
        )
    ]


def largest_trace(settings: Settings, found: Observed, extra_bytes: int) -> int:
    """Return the bytes of the largest trace whose output fits."""
    limit = min(found.max_bytes(name) for name in (settings.accepted_topic, settings.rejected_topic))
    return limit - OUTPUT_OVERHEAD - extra_bytes


def _needed(settings: Settings, topic: str) -> str:
    if topic == settings.source_topic:
        return "Read"
    return "Read and Write" if topic == settings.changelog else "Write"
