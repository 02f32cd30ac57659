"""The argument of `kp-worker explain`: a file, a trace id, or the place of a record."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Final

from worker.commands.shared.console import ArgumentError
from worker.config import Settings
from worker.core.scored_document import RecordPlace

ID_PREFIX: Final = "kp:trace:"

FORMS: Final = (
    "TRACE is a JSON file, - for standard input, a trace id (kp:trace:...) or its beginning, as tail and the status "
    "page show it, PARTITION:OFFSET on the source topic, or TOPIC:PARTITION:OFFSET on an output topic"
)

_PLACE: Final = re.compile(r"(?:(?P<topic>[A-Za-z0-9._-]{1,249})[:/])?(?P<partition>\d{1,9})[:/](?P<offset>\d{1,18})")
_FILE_SUFFIXES: Final = frozenset({".json", ".jsonl", ".ndjson", ".txt"})

Wanted = str | RecordPlace
"""A trace id or a prefix of one, always with kp:trace:, or the place of a record on the worker's topics."""


def is_file(target: str) -> bool:
    """Return whether the argument means a file. Raises ArgumentError for a missing file."""
    if target == "-" or os.path.exists(target):
        return True
    # An id may contain slashes and dots too, and a topic dots.
    if target.startswith(ID_PREFIX) or _PLACE.fullmatch(target):
        return False
    if os.sep in target or PurePath(target).suffix.lower() in _FILE_SUFFIXES:
        raise ArgumentError("TRACE", f"no such file: {target}. {FORMS}")
    return False


def parse_target(target: str, settings: Settings) -> Wanted:
    """Return the meaning of an argument that is not a file. Raises ArgumentError."""
    if place := _PLACE.fullmatch(target):
        topic, known = place["topic"] or settings.source_topic, (settings.source_topic, *output_topics(settings))
        if topic not in known:
            raise ArgumentError("TRACE", f"{target}: {topic} is not one of the topics {', '.join(known)}")
        return RecordPlace(topic, int(place["partition"]), int(place["offset"]))
    beginning = target if target.startswith(ID_PREFIX) else ID_PREFIX + target
    if beginning == ID_PREFIX:
        raise ArgumentError("TRACE", f"{target!r} is not an id. {FORMS}")
    return beginning


def output_topics(settings: Settings) -> tuple[str, str, str]:
    """Return the topics to which a trace may be written."""
    return settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic
