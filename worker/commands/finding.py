"""One line of `kp-worker doctor`: how a check came out, and what to do."""

from __future__ import annotations

import textwrap
from typing import Literal

from msgspec import Struct

from worker.core.terminal import clean


class Finding(Struct, frozen=True):
    """`fail`: the worker would not run; `warn`: it would, but look at it. Field names are those of the JSON output."""

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
    """Return check and message, then the remedy, in lines of `width` characters; what could be copied is not cut."""
    lines = []
    for text in (f"{finding.check}: {finding.message}", f"-> {finding.remedy}" if finding.remedy else ""):
        lines += textwrap.wrap(clean(text, "\n"), width, break_long_words=False, break_on_hyphens=False)
    return lines
