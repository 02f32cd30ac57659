"""The worker's topics as they should be: partitions and settings.

Lives here: the plan, and the sizes and times behind it. Must not live here: Kafka clients, what is wrong with
topics that exist (topic_problems.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from worker.config import Settings
from worker.kafka.topic_state import AFTER, DEFAULT_MAX_BYTES, NO_LIMIT, Observed

OUTPUT_OVERHEAD: Final = 8192
"""Bytes by which an output may be larger than its input: the `scoring` object (about 1 kB, 3 kB with a long nearest
id), headers, and the record's framing. KP_OUTPUT_EMBEDDING adds to it."""

DEAD_LETTER_OVERHEAD: Final = 65_536
"""The same for a created dead-letter topic; generous, because no record may be too large for it."""

SOURCE_AFTER_MS: Final = 60_000
"""message.timestamp.after.max.ms of a created source topic: how far ahead of the broker's clock a record may be dated.
A producer sets created_at and the record's timestamp, so this limits how far one record moves stream time. Clocks that
are synchronized by NTP differ by less than a second; a minute tolerates one that is not, and expires at most a
sixtieth of an hour's cache."""

DEFAULT_AFTER_MS: Final = 3_600_000
"""Kafka's default of AFTER, from version 4.0 on."""

CHANGELOG_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # Only closed segments are compacted: with the default of 7 days and 1 GiB the topic would grow without bound.
    "segment.ms": "600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "60000",
    # Entries must never age out while they are the latest of their slot.
    "retention.ms": "-1",
    # The broker's time: a worker whose clock is an hour ahead could not commit (message.timestamp.after.max.ms).
    "message.timestamp.type": "LogAppendTime",
}


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """A topic as it should be: the variable that names it, partitions, and the settings that it is created with."""

    variable: str
    name: str
    partitions: int
    configs: Mapping[str, str]


def plan(settings: Settings, found: Observed, extra_bytes: int = 0) -> list[TopicPlan]:
    """Return the topics as they should be, given those that exist; the source first."""
    source = found.topics.get(settings.source_topic)
    partitions = settings.topic_partitions if source is None else source.partitions
    largest = settings.max_message_bytes + OUTPUT_OVERHEAD + extra_bytes
    # An output keeps its record's timestamp: if the source accepts more than Kafka's default, outputs must, too.
    ahead = found.milliseconds(settings.source_topic, AFTER) or 0
    times = {AFTER: limit_text(ahead)} if ahead > DEFAULT_AFTER_MS and not found.stamps(settings.source_topic) else {}
    outputs = {"max.message.bytes": str(max(DEFAULT_MAX_BYTES, largest)), **times}
    # A dead letter contains the source's record: no record of the source may be too large for it.
    dead_letters = {"max.message.bytes": str(found.max_bytes(settings.source_topic) + DEAD_LETTER_OVERHEAD), **times}
    bounded = found.has_after and not found.stamps(settings.source_topic)
    source_configs = {AFTER: str(SOURCE_AFTER_MS)} if bounded else {}
    configs: dict[str, Mapping[str, str]] = {
        settings.source_topic: source_configs,
        settings.accepted_topic: outputs,
        settings.rejected_topic: outputs,
        settings.dead_letter_topic: dead_letters,
        settings.changelog: CHANGELOG_CONFIG,
        settings.forgotten: {},
    }
    return [TopicPlan(variable, name, partitions, configs[name]) for variable, name in settings.topics.items()]


def limit_text(milliseconds: float) -> str:
    """Write a limit as Kafka's settings spell it."""
    return str(NO_LIMIT if milliseconds == math.inf else int(milliseconds))
