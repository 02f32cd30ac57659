"""One finding of `kp-worker doctor`: the result of a check, the remedy, and the output of both."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import Final, Literal

from msgspec import Struct

from worker.commands.shared.console import write_json, write_line
from worker.core.terminal import clean, number_of

MARGIN: Final = 6
"""Width of the level, before the lines of a finding."""


COMMAND: Final = re.compile(r"(?:kp-worker|kafka-[a-z-]+\.sh)(?: [a-z][a-z-]*)?(?: --?[a-z][^ ,;:)]*)*")
"""A command with its options, which is pasted as one."""


class Finding(Struct, frozen=True):
    """The result of one check. Field names are those of the JSON output."""

    level: Literal["ok", "warn", "fail"]  # fail: the worker would not run; warn: it would, with a risk
    check: str
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding("ok", check, message)


def warn(check: str, message: str, remedy: str) -> Finding:
    """Return the finding of a risk."""
    return Finding("warn", check, message, remedy)


def fail(check: str, message: str, remedy: str = "") -> Finding:
    """Return the finding of a problem that keeps a worker from running."""
    return Finding("fail", check, message, remedy)


def as_lines(finding: Finding, width: int) -> list[str]:
    """Return check and message, then the remedy, in lines of `width` characters; words and commands are not broken."""
    lines = []
    for text in (f"{finding.check}: {finding.message}", f"-> {finding.remedy}" if finding.remedy else ""):
        whole = COMMAND.sub(lambda command: command[0].replace(" ", "\0"), clean(text, "\n"))
        lines += textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def verdict(findings: Sequence[Finding]) -> str:
    """Summarise all findings: how many failed or warned, and in which checks."""
    parts = []
    for level, noun in (("fail", "problem"), ("warn", "warning")):
        checks = [each.check for each in findings if each.level == level]
        if checks:
            parts.append(f"{number_of(len(checks), noun)} ({', '.join(dict.fromkeys(checks))})")
    return f"doctor: {', '.join(parts) or 'all is well'}"


def write_finding(finding: Finding, *, as_json: bool) -> None:
    """Write a finding to standard output: one line of JSON, or lines for a terminal."""
    if as_json:
        write_json(finding)
        return
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
    lines = as_lines(finding, get_terminal_size().columns - MARGIN)
    write_line(lines[0], f"{finding.level:{MARGIN}}", colour)
    for line in lines[1:]:
        write_line(" " * MARGIN + line)
