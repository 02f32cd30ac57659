"""The findings of `kp-worker doctor`: their output, and what its checks share."""

import asyncio
import re
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from shutil import get_terminal_size
from typing import Final, Literal

import click
from aiokafka.errors import KafkaError
from msgspec import Struct

from worker.commands.shared.console import write_json, write_line
from worker.commands.shared.session import SessionError
from worker.config import ConfigError, Loaded, Settings
from worker.core.documents import ScoredDocument
from worker.core.terminal import clean, number_of
from worker.kafka.errors import error_text
from worker.kafka.topics import MissingTopicsError


class Finding(Struct, frozen=True):
    """One result of a check. Field names are those of the JSON output."""

    level: Literal["ok", "warn", "fail"]  # fail: the worker would not run; warn: it would, with a risk
    check: str
    message: str
    remedy: str = ""


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


# -- what checks share


@dataclass(slots=True)
class Exam:
    """The settings, where findings go as they become known, and what earlier checks have read for later ones."""

    loaded: Loaded
    report: Callable[[Finding], None]
    reachable: bool = False  # the brokers
    models: Counter[str] = field(default_factory=Counter)  # partitions by the embedder of their last cache entry
    documents: list[ScoredDocument] | None = None  # the newest; None: not read
    of_both: list[ScoredDocument] = field(default_factory=list)  # of these, from when on both topics were read

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self.loaded.settings

    def add(self, *findings: Finding) -> None:
        """Report findings."""
        for finding in findings:
            self.report(finding)

    def ok(self, check: str, message: str) -> None:
        """Report that all is well."""
        self.report(ok(check, message))

    def warn(self, check: str, message: str, remedy: str) -> None:
        """Report a risk."""
        self.report(warn(check, message, remedy))

    def fail(self, check: str, message: str, remedy: str) -> None:
        """Report what would keep the worker from running."""
        self.report(fail(check, message, remedy))


Check = Callable[[Exam], Awaitable[None]]


def reading(
    check: Check, name: str, what: str, seconds: float,
    remedy: str = "correct what the checks of the topics report, and run this again",
) -> Check:  # fmt: skip
    """Return a check that reads topics: it is skipped without brokers, and warns if `what` cannot be read in time."""

    async def guarded(exam: Exam) -> None:
        if not exam.reachable:
            return
        try:
            async with asyncio.timeout(seconds):
                await check(exam)
        except MissingTopicsError:
            return  # reported by the check of the topics
        except TimeoutError:
            exam.warn(name, f"{what} could not be read within {seconds:.0f} s", remedy)
        except (KafkaError, ConfigError, SessionError) as error:
            why = error_text(error) if isinstance(error, KafkaError) else error
            exam.warn(name, f"{what} could not be read: {why}", remedy)

    return guarded


# -- output

MARGIN: Final = 6
"""Width of the level, before the lines of a finding."""

COMMAND: Final = re.compile(r"(?:kp-worker|kafka-[a-z-]+\.sh)(?: [a-z][a-z-]*)?(?: --?[a-z][^ ,;:)]*)*")
"""A command with its options, which is pasted as one."""


def as_lines(finding: Finding, width: int) -> list[str]:
    """Return check and message, then the remedy, in lines of `width` characters; words and commands are not broken."""
    lines = []
    for text in (f"{finding.check}: {finding.message}", f"-> {finding.remedy}" if finding.remedy else ""):
        whole = COMMAND.sub(lambda command: command[0].replace(" ", "\0"), clean(text, "\n"))
        lines += textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def write_finding(finding: Finding, *, as_json: bool) -> None:
    """Write a finding to standard output: one line of JSON, or lines for a terminal."""
    if as_json:
        write_json(finding)
        return
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
    lines = as_lines(finding, get_terminal_size().columns - MARGIN)
    write_line(click.style(f"{finding.level:{MARGIN}}", colour) + ("\n" + " " * MARGIN).join(lines))


def summary(findings: Sequence[Finding]) -> str:
    """Return how many checks failed or warned, and which."""
    checks = {noun: [finding.check for finding in findings if finding.level == level]
              for level, noun in (("fail", "problem"), ("warn", "warning"))}  # fmt: skip
    parts = [
        f"{number_of(len(names), noun)} ({', '.join(dict.fromkeys(names))})" for noun, names in checks.items() if names
    ]
    return f"doctor: {', '.join(parts) or 'all is well'}"
