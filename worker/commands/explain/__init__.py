"""`kp-worker explain`: one trace's score, step by step."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, BinaryIO

import click

from worker.commands.shared.console import ArgumentError, Command, CommandError, open_file, text_console, write_json
from worker.commands.shared.json_lines import read_lines
from worker.commands.shared.options import given_options, json_option, read_settings, settings_options
from worker.core.trace import InvalidTrace, Reason, document_decoder

if TYPE_CHECKING:
    from worker.config import Settings
    from worker.core.documents import RecordPlace

ID_PREFIX = "kp:trace:"

PLACE = re.compile(r"(?:(?P<topic>[A-Za-z0-9._-]{1,249})[:/])?(?P<partition>\d{1,9})[:/](?P<offset>\d{1,18})")

FORMS = (
    "TRACE is a JSON file, - for standard input, a trace id (kp:trace:...) or its beginning, as tail and the status "
    "page show it, PARTITION:OFFSET on the source topic, or TOPIC:PARTITION:OFFSET on an output topic"
)


@click.command(cls=Command)
@click.argument("trace", type=click.Path(allow_dash=True))  # a shell completes files; an id is allowed too
@click.option("--line", type=click.IntRange(1), metavar="N", help="The line of a JSON Lines file, from 1.")
@click.option("--novelty", type=click.FloatRange(0, 2), metavar="N", help="Novelty to use.")
@json_option
@settings_options
def explain(trace: str, line: int | None, novelty: float | None, as_json: bool) -> None:
    """Explain one score, step by step.

    TRACE is a JSON file, - for standard input, or a record on the output topics: a trace id (kp:trace:...) or its
    beginning, PARTITION:OFFSET on the source topic, or TOPIC:PARTITION:OFFSET on an output topic. The search begins
    with the newest.

    A scored document is explained with its own novelty, weights and threshold; a plain trace with those of the
    settings, and novelty 0.5. Exit code 1: the trace is invalid or not found, or its score does not follow from its
    figures.
    """
    if novelty is not None and novelty != novelty:  # NaN is within any range
        raise ArgumentError("--novelty", "nan is not a number")
    settings = read_settings()
    from worker.commands.shared.explanation import agrees, explain_trace, explanation_text

    options = given_options()
    if is_file(trace):
        raw = read_document(trace, line, settings.limits.max_bytes)
        try:
            explanation = explain_trace(raw, settings, novelty)
        except InvalidTrace as error:
            where = f"{_name_of(trace)}: {'' if line is None else f'line {line}: '}"
            is_bracket = error.reason is Reason.NOT_JSON and line is not None and raw.strip() in (b"{", b"[")
            hint = "; the file holds one document over several lines: leave out --line" if is_bracket else ""
            raise CommandError(f"{where}{error.reason}: {error.message}{hint}") from None
    else:
        if line is not None:
            raise ArgumentError("--line", f"goes with a file, and there is no file {trace}")
        wanted = parse_target(trace, settings)
        from worker.commands.explain.search import explain_found, find, show_letter  # with Kafka's client

        hit, *others = find(trace, wanted, settings, options)
        if hit.letter is not None:
            show_letter(hit, hit.letter, others, options, as_json=as_json)
            return
        explanation = explain_found(hit, others, novelty, settings)
    if as_json:
        write_json(explanation)
    else:
        text_console().print(explanation_text(explanation, options))
    sys.exit(0 if agrees(explanation) else 1)


def is_file(target: str) -> bool:
    """Return whether the argument means a file. Raises ArgumentError for a missing file."""
    if target == "-" or os.path.exists(target):
        return True
    # An id may contain slashes and dots too, and a topic dots.
    if target.startswith(ID_PREFIX) or PLACE.fullmatch(target):
        return False
    if os.sep in target or PurePath(target).suffix.lower() in {".json", ".jsonl", ".ndjson", ".txt"}:
        raise ArgumentError("TRACE", f"no such file: {target}. {FORMS}")
    return False


def parse_target(target: str, settings: Settings) -> str | RecordPlace:
    """Return the meaning of an argument that is not a file. Raises ArgumentError."""
    from worker.commands.explain.search import output_topics
    from worker.core.documents import RecordPlace

    if place := PLACE.fullmatch(target):
        topic, known = place["topic"] or settings.source_topic, (settings.source_topic, *output_topics(settings))
        if topic not in known:
            raise ArgumentError("TRACE", f"{target}: {topic} is not one of the topics {', '.join(known)}")
        return RecordPlace(topic, int(place["partition"]), int(place["offset"]))
    beginning = target if target.startswith(ID_PREFIX) else ID_PREFIX + target
    if beginning == ID_PREFIX:
        raise ArgumentError("TRACE", f"{target!r} is not an id. {FORMS}")
    return beginning


def read_document(path: str, line: int | None, most: int) -> bytes:
    """Return the document of a file with one trace, or of a line (from 1) of a file. - is standard input.

    Reads at most `most` + 1 bytes of a document. Raises CommandError, and ArgumentError for an unreadable file.
    """
    name = _name_of(path)
    try:
        with open_file(path) as file:
            raw = file.read(most + 1) if line is None else _line_at(file, line, most, name)
    except OSError as error:
        raise ArgumentError("TRACE", f"{path} cannot be read: {error.strerror}") from None
    first, _, rest = (raw or b"").partition(b"\n")
    with suppress(ValueError, RecursionError):  # msgspec's errors are ValueErrors
        if line is None and rest.strip():
            document_decoder.decode(first)
            raise CommandError(
                f"{name} holds JSON Lines: name the line of one trace, as in kp-worker explain {path} --line 1, or "
                f"pick it by its id, as in grep -m1 ID {'FILE' if path == '-' else path} | kp-worker explain -"
            )
    if raw is None or len(raw) > most:
        where = "" if line is None else f"line {line}: "
        raise CommandError(f"{name}: {where}more than {most} bytes, the limit of one trace (KP_MAX_MESSAGE_BYTES)")
    return raw


def _line_at(file: BinaryIO, number: int, most: int, name: str) -> bytes | None:
    """Return one line; None if it is too long. Raises CommandError if it is missing or empty."""
    last = 0
    for last, data, _, problem in read_lines(file, most):
        if last == number and problem is None and not data.strip():
            raise CommandError(f"{name}: line {number} is empty")
        if last == number:
            return data if problem is None else None
    raise CommandError(f"{name} has no line {number}, only {last}")


def _name_of(path: str) -> str:
    return "<stdin>" if path == "-" else path
