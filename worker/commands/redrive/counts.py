"""What a re-drive has done, by reason: counted and told while it lasts, and as tables at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from worker.commands.shared.console import text_console
from worker.commands.shared.table import PlainTable
from worker.core.terminal import clean
from worker.kafka.reading.dead_letters import DeadLetter

EXAMPLES: Final = 2
"""Dead letters of each reason that are kept to be shown."""

ADVICE: Final = {
    "conflict": "the registry has other units with the ids of these traces, and refuses them again until those units "
    "are deleted there (docs/contribute.md)",
}
"""What to do before records of a reason are sent again, where sending them alone changes nothing."""


class RefusedError(Exception):
    """A dead letter that cannot be redriven; the message says why and what to do."""


@dataclass(slots=True)
class Counts:
    """Dead letters by reason, kept up to date during the run: `found` match, `done` were (dry run: would be) redriven.

    `already`: an earlier run has redriven them. `repeated`: their source record is that of a letter before them in this
    run. `foreign`: records of a topic that these settings do not name, or none of the worker's. `late`: spans of runs
    that were closed before they came. `sent`: those that are done, by the topic that they go back to; `old` of them
    have a timestamp that is older than its retention, `retention_ms`.
    """

    found: Counter[str] = field(default_factory=Counter)
    already: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    examples: list[DeadLetter] = field(default_factory=list)
    foreign: int = 0
    late: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    old: Counter[str] = field(default_factory=Counter)
    retention_ms: Mapping[str, int | None] = field(default_factory=dict)

    def compare_with_retention(self, retention_ms: Mapping[str, int | None]) -> None:
        """Count as `old` from now on what is older than its topic keeps records; None: it keeps them for ever."""
        self.retention_ms = retention_ms

    def count_done(self, letter: DeadLetter) -> None:
        """Count a dead letter that was redriven, written, or would be, and keep the first ones."""
        topic = letter.source_topic
        retention_ms = self.retention_ms.get(topic)
        self.sent[topic] += 1
        if retention_ms is not None and (letter.timestamp_ms or 0) < time.time() * 1000 - retention_ms:
            self.old[topic] += 1
        self.done[letter.reason] += 1
        if self.done[letter.reason] <= EXAMPLES:
            self.examples.append(letter)


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts of a run, and who is told: `on_refused` of each refused dead letter and why, `on_progress` of all."""

    counts: Counts
    on_refused: Callable[[DeadLetter, str], None]
    on_progress: Callable[[], None] = lambda: None

    @contextmanager
    def refusing(self, letter: DeadLetter) -> Iterator[None]:
        """Count and report a RefusedError of this dead letter, and continue."""
        try:
            yield
        except RefusedError as error:
            self.counts.refused[letter.reason] += 1
            self.on_refused(letter, str(error))


@contextmanager
def watching(counts: Counts) -> Iterator[Progress]:
    """Show progress on a terminal, and each refused dead letter."""
    console = Console(stderr=True, highlight=False)
    with console.status("reading dead letters") if console.is_terminal else nullcontext() as status:

        def on_refused(letter: DeadLetter, why: str) -> None:
            console.print(Text(clean(f"{letter.place} "), "bold") + Text(clean(why)), soft_wrap=True)

        def on_progress() -> None:
            if status is not None:
                status.update(f"{counts.found.total()} dead letters match")

        yield Progress(counts, on_refused, on_progress)


def print_counts(counts: Counts, to_file: str | None, execute: bool) -> None:
    """Print the counts, and after a dry run some examples and what to do next.

    They go to standard error where standard output is the file.
    """
    console = text_console(stderr=to_file == "-")
    target = escape(
        clean(_topics(counts.sent) if to_file is None else "standard output" if to_file == "-" else to_file)
    )
    if counts.foreign:
        console.print(
            f"{counts.foreign} records belong to topics that these settings do not name (KP_SOURCE_TOPIC, "
            "KP_SPANS_TOPIC), or are not dead letters: skipped",
            soft_wrap=True,
        )
    if counts.late:
        console.print(
            f"{counts.late} dead letters hold spans of runs that are closed: skipped, since they would come too late "
            "again",
            soft_wrap=True,
        )
    if not counts.found:
        console.print("no dead letter matches")
        return
    verb, does = ("redriven", "sends") if to_file is None else ("written", "writes")
    console.print(_counts_table(counts, verb if execute else "to do"))
    if repeated := counts.repeated.total():
        console.print(
            f"\n{repeated} repeated: another dead letter here is of the same source record, as after a replay or where "
            "two groups share the dead-letter topic. The record is taken once; every group reads the topic",
            soft_wrap=True,
        )
    for reason, advice in ADVICE.items():
        if counts.done[reason] and to_file is None:
            console.print(f"\n{reason}: {advice}", soft_wrap=True)
    if execute:
        done = counts.done.total()
        console.print(f"\n{done} dead letter{'s' * (done != 1)} {verb} to {target}", soft_wrap=True)
        _warn_of_retention(console, counts)
        return
    todo = counts.done.total()
    if todo:
        console.print(Text("\nExamples", "bold"), examples_table(counts.examples), sep="\n")
        console.print(f"\nDry run: nothing was {verb}. --execute {does} {todo} to {target}", soft_wrap=True)
        _warn_of_retention(console, counts)
    else:
        console.print("\nNothing to do")


def _counts_table(counts: Counts, done: str) -> PlainTable:
    """Tabulate the counts by reason; `done` names the last column."""
    columns = {
        "dead letters": counts.found,
        "already done": counts.already,
        "refused": counts.refused,
        done: counts.done,
    }
    if counts.repeated:  # rare: a column of its own only then
        columns = {"dead letters": columns.pop("dead letters"), "repeated": counts.repeated} | columns
    table = _table("reason")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for reason in sorted(counts.found):
        table.add_row(Text(clean(reason), "yellow"), *(_count(column[reason]) for column in columns.values()))
    if len(counts.found) != 1:
        table.add_section()
        table.add_row("all", *(_count(column.total()) for column in columns.values()), style="bold")
    return table


def _count(number: int) -> str:
    return str(number) if number else "-"


def examples_table(examples: list[DeadLetter]) -> PlainTable:
    """Tabulate some dead letters: partition and offset, the source record's time, and what is wrong."""
    table = _table()
    for name in ("letter", "time (UTC)", "reason"):
        table.add_column(name, no_wrap=True)
    table.add_column("message", overflow="fold")
    for letter in sorted(examples, key=lambda letter: letter.reason):
        table.add_row(
            f"{letter.record.partition}:{letter.record.offset}",
            _time(letter.timestamp_ms),
            Text(clean(letter.reason), "yellow"),
            Text(clean(letter.message)),
        )
    return table


def _table(*names: str) -> PlainTable:
    return PlainTable(*names, box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def _time(ms: int | None) -> str:
    return "-" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%m-%d %H:%M:%S}"


def _warn_of_retention(console: Console, counts: Counts) -> None:
    for topic, old in sorted(counts.old.items()):
        days = (counts.retention_ms[topic] or 0) / 86_400_000
        console.print(
            f"{old} of them are older than topic {escape(clean(topic))} keeps records ({days:.1f} days): they keep "
            "their timestamps, so Kafka may delete them before they are read. Keep their reader running, or raise "
            "retention.ms",
            style="yellow",
            soft_wrap=True,
        )


def _topics(names: Iterable[str]) -> str:
    """Return the topics that records go to, in words; where there are none, nothing is sent."""
    found = sorted(names)
    return f"topic{'s' * (len(found) > 1)} {', '.join(found)}" if found else "their topic"
