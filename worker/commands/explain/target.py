"""The argument of `kp-worker explain`: a file and its document, a trace id, or the place of a record."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import BinaryIO, Final

from worker.commands.shared.console import ArgumentError, CommandError, open_file
from worker.commands.shared.json_lines import read_lines
from worker.config import Settings
from worker.core.documents import RecordPlace
from worker.core.trace import InvalidTrace, Reason, document_decoder

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


def read_document(path: str, line: int | None, most: int) -> bytes:
    """Return the document of a file with one trace, or of a line (from 1) of a file. - is standard input.

    Reads at most `most` + 1 bytes of a document. Raises CommandError, and ArgumentError for an unreadable file.
    """
    name = name_of(path)
    try:
        with open_file(path, "rb") as file:
            raw = file.read(most + 1) if line is None else _line_at(file, line, most, name)
    except OSError as error:
        raise ArgumentError("TRACE", f"{path} cannot be read: {error.strerror}") from None
    first, _, rest = (raw or b"").partition(b"\n")
    if line is None and rest.strip() and _is_json(first):
        raise CommandError(
            f"{name} holds JSON Lines: name the line of one trace, as in kp-worker explain {path} --line 1, or pick "
            f"it by its id, as in grep -m1 ID {'FILE' if path == '-' else path} | kp-worker explain -"
        )
    if raw is None or len(raw) > most:
        where = "" if line is None else f"line {line}: "
        raise CommandError(f"{name}: {where}more than {most} bytes, the limit of one trace (KP_MAX_MESSAGE_BYTES)")
    return raw


def _line_at(file: BinaryIO, number: int, most: int, name: str) -> bytes | None:
    """Return one line; None if it is too long. Raises CommandError if it is missing or empty."""
    last = 0
    for line in read_lines(file, most):
        last = line.number
        if last == number:
            if line.problem is not None:
                return None
            if not line.data.strip():
                raise CommandError(f"{name}: line {number} is empty")
            return line.data
    raise CommandError(f"{name} has no line {number}, only {last}")


def _is_json(raw: bytes) -> bool:
    """Return whether the bytes are one JSON document, according to the parser of traces."""
    try:
        document_decoder.decode(raw)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return True


def name_of(path: str) -> str:
    """Return the file's name for errors."""
    return "<stdin>" if path == "-" else path


def describe_problem(raw: bytes, line: int | None, error: InvalidTrace) -> str:
    """Return reason and message of an invalid trace, with its line (from 1) in a file of several."""
    text = f"{'' if line is None else f'line {line}: '}{error.reason}: {error.message}"
    if error.reason is Reason.NOT_JSON and line is not None and raw.strip() in (b"{", b"["):
        text += "; the file holds one document over several lines: leave out --line"
    return text
