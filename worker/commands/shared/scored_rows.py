"""The records of `kp-worker tail`: scored documents and dead letters, as rows of a table or as JSON Lines."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
from rich.text import Text

from worker.commands.shared.console import text_console
from worker.commands.shared.shown import PlainTable, shown_score
from worker.core.dead_letters import DeadLetter, as_json, read_dead_letter
from worker.core.documents import rfc3339
from worker.core.records import SourceRecord
from worker.core.scoring import FORMULAS
from worker.core.terminal import clean, clean_json_bytes

COLOURS = {"accepted": "green", "rejected": "red", "dead": "yellow"}

SCORED = {
    "id": 8, "time": 5, "domain": 16, "C": 4, "N": 4, "D": 4, "O": 4, "score": 5, "decision": 8, "nearest": 8,
    "sim.": 4, "overrides": 26,
}  # fmt: skip
"""The columns and the fewest characters of each, so that rows that are printed apart stand below each other."""

LETTERS = {"source": 11, "time": 8, "reason": 16, "message": 20}


@dataclass(frozen=True, slots=True)
class TailRecord:
    """One record to show: a scored document or a dead letter."""

    record: SourceRecord
    document: dict[str, Any] | None
    dead_letter: DeadLetter | None

    @property
    def source(self) -> tuple[int, int]:
        """Partition and offset of the source record."""
        if self.dead_letter is not None:
            return self.dead_letter.source_partition, self.dead_letter.source_offset
        source = (self.document or {})["scoring"]["source"]
        return source["partition"], source["offset"]

    @property
    def day(self) -> str:
        """The date of the time in its row; "" if that is unknown."""
        if self.document is not None:
            return clean(str(self.document["metadata"]["created_at"])[:10])
        ms = None if self.dead_letter is None else self.dead_letter.timestamp_ms
        return "" if ms is None else rfc3339(ms)[:10]

    def as_json(self) -> bytes:
        """Return one line of JSON: the output document as on the topic, or the dead letter's contents."""
        if self.dead_letter is not None:
            return as_json(self.dead_letter, self.dead_letter.key, self.record.value, self.record.headers)
        # A document keeps its producer's line breaks.
        return bytes(msgspec.json.format(self.record.value or b"", indent=-1))


@dataclass(frozen=True, slots=True)
class TailFilter:
    """Selects scored traces; dead letters have neither domain nor score.

    A dead letter is recognised by its topic, not its headers: a redriven trace may carry those too.
    """

    dead_letter_topic: str
    domain: str | None = None  # exact; None: any
    min_score: float | None = None
    others: Counter[str] = field(default_factory=Counter)  # skipped traces of other domains, by domain

    def read(self, record: SourceRecord) -> TailRecord | None:
        """Read a record; None if the filter skips it, or the worker did not write it."""
        if record.topic == self.dead_letter_topic:
            dead_letter = read_dead_letter(record)
            return None if dead_letter is None else TailRecord(record, None, dead_letter)
        try:
            document = msgspec.json.decode(record.value or b"")
            domain, score = document["metadata"]["task_domain"], float(document["scoring"]["score"])
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError):
            return None
        if self.domain not in (None, domain):
            self.others[str(domain)] += 1
            return None
        return None if self.min_score is not None and score < self.min_score else TailRecord(record, document, None)


def write_lines(records: list[TailRecord]) -> None:
    """Write and flush records as JSON Lines. Raises BrokenPipeError."""
    output = sys.stdout.buffer
    output.writelines(clean_json_bytes(record.as_json()) + b"\n" for record in records)
    output.flush()


@contextmanager
def table_writer(
    *, only_dead_letters: bool, objectives: bool, follow: bool
) -> Iterator[Callable[[list[TailRecord]], None]]:
    """Yield a function that prints records as rows of one table; with `follow`, a last line shows that it waits.

    `objectives`: also print each trace's objective below its row. Rows are cut only on a terminal.
    """
    console = text_console()
    day = None

    def show(records: list[TailRecord]) -> None:
        nonlocal day
        if day is None and records:
            console.print(rows([], only_dead_letters=only_dead_letters))
        for this_day, of_day in groupby(records, lambda record: record.day):
            if this_day and this_day != day:
                day = this_day
                console.print(Text(day, "dim"))
            portion = list(of_day)
            for part in [[record] for record in portion] if objectives else [portion]:
                console.print(rows(part, header=False, only_dead_letters=only_dead_letters, cut=console.is_terminal))
                if objectives and (document := part[0].document) is not None:
                    objective = f"  {clean(str(document['task']['objective']))}"
                    console.print(Text(objective, "dim", no_wrap=True, overflow="ellipsis"))
        day = day or ""
        if not console.is_terminal:
            sys.stdout.flush()  # at once, as on a terminal, because its reader may follow too

    waiting = follow and console.is_terminal
    with console.status("waiting for traces; press Ctrl-C to stop") if waiting else nullcontext():
        yield show


def in_commit_order(records: Iterable[TailRecord]) -> list[TailRecord]:
    """Sort records as their commits followed each other: exactly within a partition, between partitions by time."""
    latest: dict[int, int] = {}
    by_time = defaultdict[int, list[TailRecord]](list)
    for record in sorted(records, key=lambda record: record.source):
        partition, _ = record.source
        latest[partition] = max(latest.get(partition, 0), record.record.time_ms)
        by_time[latest[partition]].append(record)
    return [record for _, of_time in sorted(by_time.items()) for record in of_time]


def rows(
    records: Sequence[TailRecord], *, header: bool = True, only_dead_letters: bool = False, cut: bool = True
) -> PlainTable:
    """Tabulate records; `only_dead_letters`: no scored traces. Figures, ids and decisions are whole.

    `cut`: long domains are cut, so that the columns of several tables stand below each other.
    """
    table = PlainTable(box=None, padding=(0, 1, 0, 0), show_header=header, header_style="bold", pad_edge=False)
    table.fit = ("overrides", "domain~", "sim.", "nearest", "time", "O", "D", "C", "N")
    for name, least in (LETTERS if only_dead_letters else SCORED).items():
        table.add_column(
            name, min_width=least, max_width=least if cut and name == "domain" else None,
            no_wrap=name not in ("overrides", "message"),  # two names of overrides take two lines
            justify="right" if name in ("C", "N", "D", "O", "score") else "left",
        )  # fmt: skip
    for record in records:
        if record.dead_letter is not None:
            table.add_row(*_dead_letter(record.dead_letter, among_scored=not only_dead_letters))
        elif record.document is not None:
            table.add_row(*_scored(record.document))
    return table


def _scored(document: dict[str, Any]) -> list[Text]:
    scoring, metadata = document["scoring"], document["metadata"]
    nearest = scoring["nearest"]
    # A resent text's novelty may be 1e-7 below 0; the table should not show -0.00.
    parts = [Text(f"{scoring['components'][name] + 1e-6:.2f}") for name in FORMULAS]
    if scoring["components"]["novelty"] < 0.3:  # a novelty below this is highlighted: a very similar trace came before
        parts[1].stylize("bold yellow")
    return [
        Text(_short(document["id"])),
        Text(clean(str(metadata["created_at"])[11:16])),
        Text(clean(metadata["task_domain"])),
        *parts,
        Text(shown_score(scoring["score"], scoring["threshold"]), "bold"),
        Text(clean(scoring["decision"]), COLOURS.get(scoring["decision"], "")),
        Text(_short(nearest["id"]) if nearest else "-", "" if nearest else "dim"),
        Text(f"{nearest['similarity']:.2f}" if nearest else "-", "" if nearest else "dim"),
        Text(clean(", ".join(scoring["overrides"]))),
    ]


def _short(trace_id: str) -> str:
    return clean(trace_id.removeprefix("kp:trace:")[:8])


def _dead_letter(dead: DeadLetter, *, among_scored: bool) -> list[Text]:
    """Return the row of a dead letter: its place on the source topic, and the reason; alone also time and message."""
    place, reason = Text(f"{dead.source_partition}:{dead.source_offset}"), Text(clean(dead.reason), "yellow")
    if among_scored:
        cells = {"id": place, "domain": reason, "decision": Text("dead", "yellow")}
        return [cells.get(name, Text("-", "dim")) for name in SCORED]
    time = "-" if dead.timestamp_ms is None else rfc3339(dead.timestamp_ms)[11:19]
    return [place, Text(time), reason, Text(clean(dead.message))]
