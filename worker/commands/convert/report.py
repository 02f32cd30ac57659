"""The losses of a conversion: the counts of a run and the report of a file, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from worker.commands.shared.console import BadLines
from worker.core.terminal import number_of
from worker.runs.fields import Counts, RunRefused

MAX_KINDS: Final = 100
"""Kinds of losses that are counted separately. A log with ids as field names must not exhaust the memory."""

MAX_EXAMPLES: Final = 100
"""Refused runs that a report lists; all are counted."""


@dataclass
class FileReport:
    """The counts of one file; the first runs and lines that it loses are named on standard error."""

    file: str
    read: int = 0
    written: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    counts: Counts = field(default_factory=Counts)
    examples: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bad = BadLines(self.file)

    def add_run(self) -> None:
        """Count a run that was read."""
        self.read += 1

    def add_written(self, run: Counts) -> None:
        """Count a run that was written, and what became of its parts."""
        self.written += 1
        self.counts.steps.update(run.steps)
        _add_bounded(self.counts.dropped, run.dropped)
        _add_bounded(self.counts.changed, run.changed)

    def add_lost(self, counts: Counts) -> None:
        """Count parts that have no place in any run."""
        _add_bounded(self.counts.dropped, counts.dropped)

    def skip_line(self, line: int | None, error: RunRefused, entry: str = "") -> None:
        """Count and name an unreadable line of a session; its run is converted without it."""
        self.unread[error.reason] += 1
        self._add_example(line, error.reason, str(error))
        self._name(line, entry, error)

    def refuse(self, line: int | None, error: RunRefused, trace: str = "") -> None:
        """Count and name a run that is not written. `line`: from 1; None: the file is one run. `trace`: of OTLP."""
        self.add_refused(line, error.reason, f"{trace}: {error}" if trace else str(error))
        self._name(line, trace, error)

    def add_refused(self, line: int | None, reason: str, message: str) -> None:
        """Count a refused run or part without naming it."""
        self.refused[reason] += 1
        self._add_example(line, reason, message)

    def _name(self, line: int | None, place: str, error: RunRefused) -> None:
        where = ("" if line is None else f"{line}:") + (f" {place}:" if place else "")
        self.bad.name(f"{where} {error.reason}: {error}")

    def _add_example(self, line: int | None, reason: str, message: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append({"line": line, "reason": reason, "message": message})

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON data; counts in descending order."""
        return {
            "file": self.file, "runs": {"read": self.read, "written": self.written, "refused": self.refused.total()},
            "steps": dict(self.counts.steps.most_common()), "dropped": _sorted(self.counts.dropped),
            "changed": _sorted(self.counts.changed), "unread_lines": _sorted(self.unread),
            "refused": {"by_reason": _sorted(self.refused), "first": self.examples},
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        runs = f"{number_of(self.read, 'run')} read, {self.written} written, {self.refused.total()} refused"
        if unread := self.unread.total():
            runs += f", {number_of(unread, 'line')} not read"
        steps = [f"{count} {kind}" for kind, count in self.counts.steps.most_common()]
        lines = [f"{self.file}: {runs}" + (f" ({', '.join(steps)})" if steps else "")]
        for title, counts in (("not in the traces", self.counts.dropped), ("changed", self.counts.changed)):
            if counts:
                lines.append(f"  {title}:")
                width = len(str(max(counts.values())))
                lines += [f"    {count:>{width}}  {kind}" for kind, count in _sorted(counts).items()]
        return lines


def _add_bounded(total: Counter[str], more: Counter[str]) -> None:
    for kind, count in more.items():
        short = kind if len(kind) <= 60 else kind[:60] + "..."
        total[short if short in total or len(total) < MAX_KINDS else "other fields"] += count


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
