"""What `kp-worker explain` says of what it found on the topics and is no score: a dead letter, several ids, nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from worker.commands.explain.search import Hit, Searched
from worker.commands.explain.target import Wanted, WantedOutput
from worker.commands.explain.view import named_rows
from worker.commands.redrive.source import NO_VALUE
from worker.core.documents import rfc3339
from worker.core.terminal import clean, clean_json
from worker.kafka.reading.dead_letters import DeadLetter, as_json

MOST_LISTED: Final = 10
"""Ids that are listed where one is ambiguous."""

DAY_MS: Final = 86_400_000


def letter_json(letter: DeadLetter) -> str:
    """Return the dead letter as one line of JSON, as `tail` writes it."""
    return clean_json(as_json(letter, letter.key, letter.record.value, letter.record.headers).decode())


def letter_text(found: Hit, others: Sequence[Hit]) -> RenderableType:
    """Return a dead letter for a terminal; `others`: more records that the search found."""
    letter = found.letter
    if letter is None:
        raise AssertionError("this is a bug: a scored document is no dead letter")
    table = named_rows()
    table.add_row(Text("reason", "bold"), Text(clean(letter.reason), "bold yellow"))
    if letter.path:
        table.add_row("path", Text(clean(letter.path)))
    table.add_row("message", Text(clean(letter.message)))
    table.add_row("dead letter", Text(clean(str(found.place))))
    table.add_row("source", Text(clean(_source(found))))
    if letter.timestamp_ms is not None:
        table.add_row("record time", rfc3339(letter.timestamp_ms))
    if letter.redriven:
        table.add_row("redriven", f"{letter.redriven} times, the last time from here or an earlier dead letter")
    for other in others:
        table.add_row("also", Text(clean(f"kp-worker explain {other.place}")))
    head = Text(clean(found.id or "a record without a trace id"), "bold")
    return Group(head, Text("not scored: it is a dead letter", "yellow"), "", table, "", _remedy(letter))


def _source(found: Hit) -> str:
    if found.first_offset == found.source.offset:
        return str(found.source)
    return f"{found.source.topic}:{found.source.partition}, offsets {found.first_offset} to {found.source.offset}"


def _remedy(letter: DeadLetter) -> RenderableType:
    if letter.reason in NO_VALUE:
        return Text(f"It has no content of its source record: {NO_VALUE[letter.reason]}.")
    command = f"kp-worker redrive --partition {letter.record.partition} --offset {letter.record.offset}"
    lines = (
        "Correct the record, and publish it again:",
        f"  {command} --to-file FILE",
        "Or send it unchanged, to a worker that accepts it now:",
        f"  {command} --execute",
    )
    return Text("\n".join(lines))


def ambiguous_text(target: str, hits: Sequence[Hit]) -> str:
    """Return the error for the beginning of several ids; it lists the newest ones."""
    ids = list(dict.fromkeys(hit.id for hit in hits if hit.id is not None))
    listed = "".join(f"\n  kp-worker explain {shlex.quote(clean(one))}" for one in ids[:MOST_LISTED])
    more = f"\n  and {len(ids) - MOST_LISTED} more" if len(ids) > MOST_LISTED else ""
    return f"{target} is the beginning of {len(ids)} trace ids; name one (newest first):{listed}{more}"


def not_found_text(target: str, wanted: Wanted, searched: Searched, note: str) -> str:
    """Return the error for a trace that is not on the topics; `note`: more about it, or ""."""
    if isinstance(wanted, WantedOutput) and searched.topics:
        return (
            f"{target} holds nothing that the worker wrote: the marker of a transaction, or another producer's record"
        )
    lines = [f"no record of {target} is on these topics:"]
    lines += [
        f"  {topic.name}: {_read_of(topic.name, searched)}{_kept(topic.retention_ms)}" for topic in searched.topics
    ]
    lines += [f"  {name}: there is no such topic" for name in searched.missing]
    lines.append(
        note
        or "It may not be scored yet (kp-worker doctor shows the lag), it may be older than what the topics keep, or "
        "it is on other topics (KP_ACCEPTED_TOPIC, KP_REJECTED_TOPIC, KP_DEAD_LETTER_TOPIC)."
    )
    return "\n".join(lines)


def _read_of(topic: str, searched: Searched) -> str:
    if topic not in searched.records:
        return "no records"
    count = searched.records[topic]
    return f"{count:,} {'record' if count == 1 else 'records'}, back to {rfc3339(searched.oldest_ms[topic])}"


def _kept(retention_ms: int | None) -> str:
    return "" if retention_ms is None else f", kept for {retention_ms / DAY_MS:g} days"
