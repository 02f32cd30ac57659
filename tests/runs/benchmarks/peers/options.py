"""The command line that all peers share."""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass
from typing import Any

from tests.runs.benchmarks.job import Job, model_embed, table_embed
from worker.core.records import ACCEPTED, DEAD_LETTER, REJECTED


@dataclass(frozen=True)
class Options:
    """Where to read and write, and how."""

    bootstrap: str
    group: str
    source: str
    outputs: dict[str, str]
    changelog: str
    exactly_once: bool
    vectors: str
    commit_interval: float | None

    def job(self) -> Job:
        """Return the job, with the vectors asked for."""
        return Job({"none": lambda: None, "table": lambda: table_embed, "model": model_embed}[self.vectors]())


def parse() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    for name in ("bootstrap", "group", "source", "accepted", "rejected", "dead-letter", "changelog"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--exactly-once", action="store_true")
    parser.add_argument("--vectors", choices=("none", "table", "model"), default="table")
    parser.add_argument("--commit-interval", type=float, help="seconds; where the peer has such a setting")
    given: Any = parser.parse_args()
    outputs = {ACCEPTED: given.accepted, REJECTED: given.rejected, DEAD_LETTER: given.dead_letter}
    return Options(
        given.bootstrap,
        given.group,
        given.source,
        outputs,
        given.changelog,
        given.exactly_once,
        given.vectors,
        given.commit_interval,
    )


class Stop:
    """Turns true at SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked
