"""`kp-worker explain ID`: the trace that is found on the topics, explained from what is stored.

The search reads the accepted, rejected and dead-letter topics from the newest records to the oldest. It reads committed
records, joins no group and commits nothing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec
from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.text import Text

from worker.commands.explain.parts import load_same_embedder, similarity_parts
from worker.commands.explain.steps import Explanation, RecordPlace, SimilarityPart, explain_trace
from worker.commands.explain.target import (
    ID_PREFIX,
    Wanted,
    WantedId,
    WantedOutput,
    WantedSource,
    output_topics,
    parse_target,
)
from worker.commands.explain.view import named_rows
from worker.commands.redrive.dead_letters import NO_VALUE
from worker.commands.shared.console import CommandError, errors_for_the_user
from worker.commands.shared.session import Session, SessionError, Topic, read_to, run_session
from worker.config import Settings
from worker.core.documents import rfc3339
from worker.core.terminal import clean, clean_json
from worker.core.trace import InvalidTrace, Limits, parse_trace
from worker.kafka.cluster.connections import committed_reader
from worker.kafka.reading.dead_letters import DeadLetter, as_json, read_dead_letter

FIRST_STRIDE: Final = 1000
"""Offsets of each partition that are read first: what `tail` and the status page show is among them."""

GROWTH: Final = 4
"""How much further back each portion reaches than the one before it."""

FETCH_BYTES: Final = 1 << 20
"""Bytes of one fetch from one partition: a portion ends somewhere within its last one."""

PROGRESS_RECORDS: Final = 5000
"""Records between two calls of `on_progress`."""

MOST_LISTED: Final = 10
"""Ids that are listed where one is ambiguous."""

DAY_MS: Final = 86_400_000


class LetterAnswer(NamedTuple):
    """What is said of a dead letter, in both forms."""

    json: str
    text: RenderableType


def explain_target(
    target: str, novelty: float | None, settings: Settings, *, parts: bool = False
) -> Explanation | LetterAnswer:
    """Find a trace on the topics and explain it; with `parts`, also what made it similar to its nearest one.

    Raises CommandError, ArgumentError for what can be no id or place.
    """
    found = _find(target, parse_target(target, settings), settings)
    if found[0].letter is not None:
        return LetterAnswer(_letter_json(found[0].letter), _letter_text(found[0], found[1:]))
    explanation = _explain_document(found, novelty, settings)
    if not parts or explanation.nearest is None:
        return explanation
    return msgspec.structs.replace(explanation, parts=_parts(found[0], explanation.nearest.id, settings))


def _parts(document: Hit, nearest: str, settings: Settings) -> list[SimilarityPart]:
    """Find the nearest trace, and take the similarity to it apart."""
    raw = document.record.value or b""
    embedder = load_same_embedder(settings, raw)
    scored = [hit for hit in _find(nearest, WantedId(nearest), settings) if hit.letter is None]
    if not scored:
        raise CommandError(f"--parts: the nearest trace {nearest} is a dead letter: its output was refused")
    limits = Limits(max_bytes=sys.maxsize, max_steps=sys.maxsize, max_depth=settings.max_depth)
    return similarity_parts(embedder, parse_trace(raw, limits), parse_trace(scored[0].record.value or b"", limits))


def _explain_document(found: list[Hit], novelty: float | None, settings: Settings) -> Explanation:
    """Explain the first of the records that are meant, and name the others."""
    document = found[0]
    raw = document.record.value or b""
    # It was scored: whatever limits hold now, they held when it was.
    limits = replace(settings.limits, max_bytes=len(raw), max_steps=sys.maxsize, strict_context=False)
    try:
        explanation = explain_trace(raw, settings, novelty, limits)
    except InvalidTrace as error:
        raise CommandError(f"{document.place}: {error.reason}: {error.message}") from None
    return msgspec.structs.replace(
        explanation,
        record=document.place,
        record_time=rfc3339(document.record.timestamp),
        also=[str(other.place) for other in found[1:]],
    )


def _find(target: str, wanted: Wanted, settings: Settings) -> list[Hit]:
    """Return the records of one trace, newest first. Raises CommandError where there is none, or several are meant."""
    searched = Searched()
    try:
        with errors_for_the_user():
            hits, note = run_session(_search(Session(settings), wanted, searched))
    except CommandError as error:
        if isinstance(wanted, WantedId) and not target.startswith(ID_PREFIX):
            raise error.adding(f"; there is no file {target}, so it was taken for a trace id") from None
        raise
    if not hits:
        raise CommandError(_not_found_text(target, wanted, searched, note))
    if isinstance(wanted, WantedId):
        hits = [hit for hit in hits if hit.id == wanted.beginning] or hits
        if len({hit.id for hit in hits if hit.id is not None}) > 1:
            raise CommandError(_ambiguous_text(target, hits))
    return hits


async def _search(session: Session, wanted: Wanted, searched: Searched) -> tuple[list[Hit], str]:
    """Return the records that are meant; where there is none, why the source topic has no such record, or ""."""
    with Console(stderr=True).status("searching") as status:

        def on_progress() -> None:
            status.update(f"searching, {searched.total:,} records so far; press Ctrl-C to stop")

        hits = await _search_outputs(session, wanted, searched, on_progress)
    note = "" if hits or not isinstance(wanted, WantedSource) else await _about_source(session, wanted)
    return hits, note


class _SourceOnly(Struct):
    source: RecordPlace


class _Head(Struct):
    """What is read of each document, all else is skipped; a dead letter's value has no `scoring`."""

    id: str
    scoring: _SourceOnly | None = None


_head: Final = msgspec.json.Decoder(_Head)


@dataclass(frozen=True, slots=True)
class Hit:
    """A scored document, or a dead letter; `id` None: the dead letter's value has none.

    `first_offset` to `source.offset` are the records of the source topic that it was made of.
    """

    record: ConsumerRecord
    id: str | None
    source: RecordPlace
    first_offset: int
    letter: DeadLetter | None = None

    @property
    def place(self) -> RecordPlace:
        """Return where the record is."""
        return RecordPlace(self.record.topic, self.record.partition, self.record.offset)


@dataclass(slots=True)
class Searched:
    """What was read: records and oldest timestamp (ms) by topic, and all records; `missing` topics do not exist."""

    topics: list[Topic] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)
    oldest_ms: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def count(self, record: ConsumerRecord) -> None:
        """Count a record that was read."""
        self.total += 1
        self.records[record.topic] = self.records.get(record.topic, 0) + 1
        oldest = self.oldest_ms.get(record.topic)
        if oldest is None or record.timestamp < oldest:
            self.oldest_ms[record.topic] = record.timestamp


async def _search_outputs(
    session: Session, wanted: Wanted, searched: Searched, on_progress: Callable[[], None]
) -> list[Hit]:
    """Return the records that are meant, newest first; empty: there is none.

    Portions of all partitions are read from their ends backwards, each GROWTH times as long as the one before it, until
    one holds what is meant. Raises ConfigError and KafkaError.
    """
    names = [wanted.topic] if isinstance(wanted, WantedOutput) else list(output_topics(session.settings))
    async with session.admin() as admin:
        found = await session.topics(admin, *names)
    searched.topics, searched.missing = list(found.values()), [name for name in names if name not in found]
    tps = [TopicPartition(topic.name, partition) for topic in searched.topics for partition in range(topic.partitions)]
    if not tps:
        return []
    hits: list[Hit] = []
    async with session.connected(committed_reader(session.client, max_partition_fetch_bytes=FETCH_BYTES)) as reader:
        starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
        if isinstance(wanted, WantedOutput):
            starts, ends = _bounds_of(wanted, starts, ends)
        upper, stride = dict(ends), FIRST_STRIDE
        while True:
            lower = {tp: max(starts[tp], end - stride) for tp, end in upper.items()}
            async for record in read_to(reader, lower, upper):
                searched.count(record)
                dead = record.topic == session.settings.dead_letter_topic
                hit = _letter_hit(record) if dead else _document_hit(record)
                if hit is not None and _is_meant(hit, wanted, session.settings.source_topic):
                    hits.append(hit)
                if searched.total % PROGRESS_RECORDS == 0:
                    on_progress()
            if hits or all(lower[tp] <= starts[tp] for tp in lower):
                return sorted(hits, key=lambda hit: (hit.record.timestamp, hit.record.offset), reverse=True)
            upper, stride = lower, stride * GROWTH


def _bounds_of(
    wanted: WantedOutput, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the bounds of one record. Raises SessionError where its partition has no such offset."""
    tp = TopicPartition(wanted.topic, wanted.partition)
    if tp not in ends:
        raise SessionError(f"topic {tp.topic} has no partition {tp.partition}, only 0 to {len(ends) - 1}")
    if not starts[tp] <= wanted.offset < ends[tp]:
        raise SessionError(
            f"partition {tp.partition} of {tp.topic} has no offset {wanted.offset}, only {starts[tp]} to {ends[tp] - 1}"
            if starts[tp] < ends[tp]
            else f"partition {tp.partition} of {tp.topic} is empty"
        )
    return {tp: wanted.offset}, {tp: wanted.offset + 1}


def _document_hit(record: ConsumerRecord) -> Hit | None:
    """Return a scored document; None where the worker did not write it."""
    try:
        head = _head.decode(record.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if head.scoring is None:
        return None
    return Hit(record, head.id, head.scoring.source, head.scoring.source.offset)


def _letter_hit(record: ConsumerRecord) -> Hit | None:
    """Return a dead letter; None where the worker did not write it."""
    letter = read_dead_letter(record)
    if letter is None:
        return None
    try:
        trace_id = _head.decode(record.value or b"").id
    except (msgspec.DecodeError, UnicodeDecodeError):
        trace_id = None
    source = RecordPlace(letter.source_topic, letter.source_partition, letter.source_offset)
    return Hit(record, trace_id, source, source.offset if letter.first_offset is None else letter.first_offset, letter)


def _is_meant(found: Hit, wanted: Wanted, source_topic: str) -> bool:
    if isinstance(wanted, WantedOutput):
        return True
    if isinstance(wanted, WantedSource):
        same_partition = (found.source.topic, found.source.partition) == (source_topic, wanted.partition)
        return same_partition and found.first_offset <= wanted.offset <= found.source.offset
    if found.id is None:  # no JSON, or cut: the id may be in it all the same
        return wanted.beginning.encode() in (found.record.value or b"")
    # As it is on the topic, or as `tail` and the page show it.
    return found.id.startswith(wanted.beginning) or clean(found.id).startswith(wanted.beginning)


async def _about_source(session: Session, wanted: WantedSource) -> str:
    """Return why a place of the source topic has no record, in one sentence; "" where it may have one."""
    name, partition = session.settings.source_topic, wanted.partition
    async with session.admin() as admin:
        topic = (await session.topics(admin, name)).get(name)
    if topic is None:
        return f"There is no topic {name}."
    if partition >= topic.partitions:
        return f"Topic {name} has no partition {partition}, only 0 to {topic.partitions - 1}."
    tp = TopicPartition(name, partition)
    async with session.connected(session.reader()) as reader:
        first, end = (await reader.beginning_offsets([tp]))[tp], (await reader.end_offsets([tp]))[tp]
    if wanted.offset >= end:
        return f"Partition {partition} of {name} ends before offset {end}: nothing is published there yet."
    if wanted.offset < first:
        return f"Partition {partition} of {name} begins at offset {first} now: Kafka has deleted that record."
    return ""


def _letter_json(letter: DeadLetter) -> str:
    """Return the dead letter as one line of JSON, as `tail` writes it."""
    return clean_json(as_json(letter, letter.key, letter.record.value, letter.record.headers).decode())


def _letter_text(found: Hit, others: Sequence[Hit]) -> RenderableType:
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


def _ambiguous_text(target: str, hits: Sequence[Hit]) -> str:
    """Return the error for the beginning of several ids; it lists the newest ones."""
    ids = list(dict.fromkeys(hit.id for hit in hits if hit.id is not None))
    listed = "".join(f"\n  kp-worker explain {shlex.quote(clean(one))}" for one in ids[:MOST_LISTED])
    more = f"\n  and {len(ids) - MOST_LISTED} more" if len(ids) > MOST_LISTED else ""
    return f"{target} is the beginning of {len(ids)} trace ids; name one (newest first):{listed}{more}"


def _not_found_text(target: str, wanted: Wanted, searched: Searched, note: str) -> str:
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
