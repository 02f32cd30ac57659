"""A file with one trace, of `kp-worker explain` and `cache nearest`: a JSON document, or one line of JSON Lines.

Must not
live here: the explanation (explain_steps.py).
"""

from __future__ import annotations

from typing import BinaryIO

from worker.commands.explain.steps import is_json
from worker.commands.shared.console import ArgumentError, CommandError, open_file
from worker.commands.shared.json_lines import line_of, read_lines
from worker.core.trace import InvalidTrace, Reason


def read_document(
    path: str, line: int | None, most: int, command: str = "kp-worker explain", argument: str = "TRACE"
) -> bytes:
    """Return the file's document, or that on a line (from 1). - is standard input.

    `command`, `argument`: what errors say that the user may enter, and has entered. Reads at most `most` bytes of a
    document, and one more. Raises CommandError, and ArgumentError for a file that cannot be read.
    """
    name = name_of(path)
    try:
        with open_file(path, "rb") as file:
            raw = file.read(most + 1) if line is None else _line(file, line, most, name)
    except OSError as error:
        raise ArgumentError(argument, f"{path} cannot be read: {error.strerror}") from None
    first, _, rest = (raw or b"").partition(b"\n")
    if line is None and rest.strip() and is_json(first):
        raise CommandError(
            f"{name} holds JSON Lines: name the line of one trace, as in {command} {path} --line 1, or pick it by "
            f"its id, as in grep -m1 ID {'FILE' if path == '-' else path} | {command} -"
        )
    if raw is None or len(raw) > most:
        where = "" if line is None else f"line {line}: "
        raise CommandError(f"{name}: {where}more than {most} bytes, the limit of one trace (KP_MAX_MESSAGE_BYTES)")
    return raw


def name_of(path: str) -> str:
    """Return what errors call the file."""
    return "<stdin>" if path == "-" else path


def describe_problem(raw: bytes, line: int | None, error: InvalidTrace) -> str:
    """Return reason and message of an invalid trace, with the line (from 1) where it can be told."""
    place = line_of(raw, error.path) if line is None else line
    text = f"{'' if place is None else f'line {place}: '}{error.reason}: {error.message}"
    if error.reason is Reason.NOT_JSON and line is not None and raw.strip() in (b"{", b"["):
        text += "; the file holds one document over several lines: leave out --line"
    return text


def _line(file: BinaryIO, number: int, most: int, name: str) -> bytes | None:
    """Return one line; None where it is too long. Raises CommandError where it is missing or empty."""
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
