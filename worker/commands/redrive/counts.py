"""What a re-drive has done so far, by reason: for the table at the end, and told while it lasts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from worker.kafka.reading.dead_letters import DeadLetter

EXAMPLES: Final = 2
"""Dead letters of each reason that are kept to be shown."""


class RefusedError(Exception):
    """A dead letter that cannot be redriven; the message says why and what to do."""


@dataclass(slots=True)
class RedriveCounts:
    """Counts by reason; `done` were redriven or written (dry run: would be). Kept up to date during the run.

    `repeated`: their source record is that of a letter before them in this run. `old` of those that are done have a
    timestamp that is older than the source topic's retention, `retention_ms`.
    """

    found: Counter[str] = field(default_factory=Counter)
    already: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    examples: list[DeadLetter] = field(default_factory=list)
    foreign: int = 0
    old: int = 0
    retention_ms: int | None = None

    def compare_with_retention(self, retention_ms: int | None) -> None:
        """Count as `old` from now on what is older than this; None: nothing."""
        self.retention_ms = retention_ms

    def count_foreign(self) -> None:
        """Count a record of another source topic, or none of the worker's."""
        self.foreign += 1

    def count_found(self, letter: DeadLetter) -> None:
        """Count a dead letter that matches."""
        self.found[letter.reason] += 1

    def count_already(self, letter: DeadLetter) -> None:
        """Count a dead letter that an earlier run has redriven."""
        self.already[letter.reason] += 1

    def count_repeated(self, letter: DeadLetter) -> None:
        """Count a dead letter whose source record an earlier one of this run stands for."""
        self.repeated[letter.reason] += 1

    def count_refused(self, letter: DeadLetter) -> None:
        """Count a dead letter that cannot be redriven."""
        self.refused[letter.reason] += 1

    def count_done(self, letter: DeadLetter) -> None:
        """Count a dead letter that was redriven, written, or would be, and keep the first ones."""
        if self.retention_ms is not None and (letter.timestamp_ms or 0) < time.time() * 1000 - self.retention_ms:
            self.old += 1
        self.done[letter.reason] += 1
        if self.done[letter.reason] <= EXAMPLES:
            self.examples.append(letter)


@dataclass(frozen=True, slots=True)
class RedriveProgress:
    """The counts of a run, and who is told: `on_refused` of each refused dead letter and why, `on_progress` of all."""

    counts: RedriveCounts
    on_refused: Callable[[DeadLetter, str], None]
    on_progress: Callable[[], None] = lambda: None

    @contextmanager
    def refusing(self, letter: DeadLetter) -> Iterator[None]:
        """Count and report a RefusedError of this dead letter, and continue."""
        try:
            yield
        except RefusedError as error:
            self.counts.count_refused(letter)
            self.on_refused(letter, str(error))
