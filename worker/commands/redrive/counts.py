"""The results of a redrive by reason: shown while it runs, and as tables at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from worker.commands.shared.console import BadLines, text_console
from worker.commands.shared.shown import PlainTable
from worker.core.dead_letters import DeadLetter
from worker.core.terminal import clean, number_of

EXAMPLES: Final = 2
"""Dead letters of each reason that are kept as examples."""

ADVICE: Final = {
    "conflict": "the registry has other units with the ids of these traces, and refuses them again until those units "
    "are deleted there (docs/contribute.md)",
}
"""Advice for reasons whose records would only be refused again."""


class RefusedError(Exception):
    """A dead letter cannot be redriven; the message says why and what to do."""


@dataclass(slots=True)
class Counts:
    """Dead letters by reason, kept up to date during the run."""

    found: Counter[str] = field(default_factory=Counter)  # that match the selection
    already: Counter[str] = field(default_factory=Counter)  # redriven by an earlier run
    repeated: Counter[str] = field(default_factory=Counter)  # with the source record of an earlier letter of this run
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)  # redriven (dry run: would be)
    examples: list[DeadLetter] = field(default_factory=list)
    foreign: int = 0  # of a topic that these settings do not name, or not of the worker
    late: int = 0  # spans of runs that had closed before
    sent: Counter[str] = field(default_factory=Counter)  # those done, by the topic they go back to
    old: Counter[str] = field(default_factory=Counter)
    """Those sent whose timestamp is older than the retention of the topic."""
    retention_ms: Mapping[str, int | None] = field(default_factory=dict)  # by topic; None: without limit

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
    """The counts of a run, and callbacks."""

    counts: Counts
    on_refused: Callable[[DeadLetter, str], None]  # for each refused dead letter, with the reason
    on_progress: Callable[[], None] = lambda: None  # after each dead letter

    @contextmanager
    def refusing(self, letter: DeadLetter) -> Iterator[None]:
        """Count and report a RefusedError of this dead letter, and continue."""
        try:
            yield
        except RefusedError as error:
            self.counts.refused[letter.reason] += 1
            self.on_refused(letter, str(error))


@contextmanager
def watching(counts: Counts, topic: str) -> Iterator[Progress]:
    """Show progress on a terminal, and the first refused dead letters of the topic."""
    console = Console(stderr=True, highlight=False)
    with console.status("reading dead letters") if console.is_terminal else nullcontext() as status:
        bad = BadLines(topic, lambda text: console.print(Text(clean(text)), soft_wrap=True))

        def on_refused(letter: DeadLetter, why: str) -> None:
            bad.name(f"{letter.record.partition}:{letter.record.offset} {why}")

        def on_progress() -> None:
            if status is not None:
                status.update(number_of(counts.found.total(), "dead letter matches", "dead letters match"))

        yield Progress(counts, on_refused, on_progress)
        bad.say_rest("--partition and --offset select them")


def print_counts(counts: Counts, to_file: str | None, execute: bool) -> None:
    """Print the counts, and after a dry run some examples and what to do next.

    The output goes to standard error if standard output is the file.
    """
    console = text_console(stderr=to_file == "-")
    tell = partial(console.print, soft_wrap=True)
    target = escape(
        clean(_topics(counts.sent) if to_file is None else "standard output" if to_file == "-" else to_file)
    )
    if counts.foreign:
        tell(
            f"skipped {number_of(counts.foreign, 'record')}: not a dead letter, or of a topic that these settings do "
            "not name (KP_SOURCE_TOPIC, KP_SPANS_TOPIC)"
        )
    if counts.late:
        tell(f"skipped {number_of(counts.late, 'dead letter')} with spans of closed runs: they would be late again")
    if not counts.found:
        tell("no dead letter matches")
        return
    verb, does = ("redriven", "sends") if to_file is None else ("written", "writes")
    console.print(_counts_table(counts, verb if execute else "to do"))
    if repeated := counts.repeated.total():
        tell(
            f"\n{repeated} repeated: another dead letter is of the same source record, as after a replay, or if two "
            "groups share the dead-letter topic. The record is sent once; every group reads it"
        )
    for reason, advice in ADVICE.items():
        if counts.done[reason] and to_file is None:
            tell(f"\n{reason}: {advice}")
    done = counts.done.total()
    if execute:
        tell(f"\n{number_of(done, 'dead letter')} {verb} to {target}")
    elif done:
        console.print(Text("\nExamples", "bold"), examples_table(counts.examples), sep="\n")
        tell(f"\nDry run: nothing was {verb}. --execute {does} {done} to {target}")
    else:
        tell("\nNothing to do")
        return
    _warn_of_retention(console, counts)


def _counts_table(counts: Counts, done: str) -> PlainTable:
    """Tabulate the counts by reason; `done` names the last column."""
    columns = {
        "dead letters": counts.found, "already done": counts.already, "refused": counts.refused, done: counts.done,
    }  # fmt: skip
    if counts.repeated:  # rare, so the column is optional
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
    """Tabulate some dead letters: partition and offset, the source record's time, and the problem."""
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
        older = number_of(old, "of them is", "of them are")
        console.print(
            f"{older} older than topic {escape(clean(topic))} keeps records ({days:.1f} days). Redriven records keep "
            "their timestamps, so Kafka may delete them before they are read: keep their reader running, or raise "
            "retention.ms",
            style="yellow",
            soft_wrap=True,
        )


def _topics(names: Iterable[str]) -> str:
    """Return the target topics in words; if there are none, nothing is sent."""
    topics = sorted(names)
    return f"topic{'s' * (len(topics) > 1)} {', '.join(topics)}" if topics else "their topic"
