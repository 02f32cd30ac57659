"""One finding of `kp-worker doctor`: the result of a check, what to do about it, and how both look."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import Final, Literal

from msgspec import Struct

from worker.commands.shared.console import write_json, write_line
from worker.core.terminal import clean, number_of

MARGIN: Final = 6
"""Columns of the level, before the lines of a finding."""


class Finding(Struct, frozen=True):
    """`fail`: the worker would not run; `warn`: it would, with a risk. Field names are those of the JSON output."""

    level: Literal["ok", "warn", "fail"]
    check: str
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    """Return a check that passed."""
    return Finding("ok", check, message)


def warn(check: str, message: str, remedy: str) -> Finding:
    """Return something to look at."""
    return Finding("warn", check, message, remedy)


def fail(check: str, message: str, remedy: str = "") -> Finding:
    """Return something that keeps a worker from running."""
    return Finding("fail", check, message, remedy)


def as_lines(finding: Finding, width: int) -> list[str]:
    """Return check and message, then the remedy, in lines of `width` characters; words are not broken."""
    lines = []
    for text in (f"{finding.check}: {finding.message}", f"-> {finding.remedy}" if finding.remedy else ""):
        lines += textwrap.wrap(clean(text, "\n"), width, break_long_words=False, break_on_hyphens=False)
    return lines


def verdict(findings: Sequence[Finding]) -> str:
    """Sum up all findings: how many failed and warned, and of which checks."""
    said = []
    for level, noun in (("fail", "problem"), ("warn", "warning")):
        checks = [each.check for each in findings if each.level == level]
        if checks:
            said.append(f"{number_of(len(checks), noun)} ({', '.join(dict.fromkeys(checks))})")
    return f"doctor: {', '.join(said) or 'all is well'}"


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
