"""`kp-worker explain` for records on the topics: the search, and the explanation of its result.

The search reads the accepted, rejected and dead-letter topics from the newest records to the oldest. It reads committed
records, joins no group and commits nothing.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
from aiokafka import TopicPartition
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.text import Text

from worker.commands.shared.console import CommandError, text_console, write_line
from worker.commands.shared.explanation import explain_trace, named_rows
from worker.commands.shared.session import Session, SessionError, read_to, run_session
from worker.commands.shared.shown import Pasted
from worker.config import Settings
from worker.core.dead_letters import NO_VALUE, DeadLetter, read_dead_letter
from worker.core.dead_letters import as_json as letter_json
from worker.core.documents import RecordPlace, ScoringSource, rfc3339
from worker.core.records import SourceRecord
from worker.core.terminal import clean, clean_json, number_of
from worker.core.trace import InvalidTrace

Wanted = str | RecordPlace
"""A trace id or a prefix of one, always with kp:trace:, or the place of a record on the worker's topics."""


class Hit(NamedTuple):
    """A scored document, or a dead letter."""

    record: SourceRecord
    id: str | None  # None: the dead letter's value has none
    source: RecordPlace  # the record of the source topic, or the last one if there were several
    first_offset: int  # of the first one
    letter: DeadLetter | None = None

    @property
    def place(self) -> RecordPlace:
        """Return the place of the record."""
        return RecordPlace(self.record.topic, self.record.partition, self.record.offset)


def output_topics(settings: Settings) -> tuple[str, str, str]:
    """Return the topics to which a trace may be written."""
    return settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic


def find(target: str, wanted: Wanted, settings: Settings, options: str) -> list[Hit]:
    """Return the records of one trace, newest first. Raises CommandError if there is none, or the id is ambiguous.

    `options`: those that give a printed command the same settings.
    """
    try:
        with Console(stderr=True).status("searching; press Ctrl-C to stop"):
            hits = run_session(_search(Session(settings), target, wanted))
    except CommandError as error:
        if isinstance(wanted, str) and wanted != target:
            error.message += f"; there is no file {target}, so it was taken for a trace id"
        raise
    if isinstance(hits, str):
        raise CommandError(hits)
    exact = [hit for hit in hits if hit.id == wanted] or hits
    ids = list(dict.fromkeys(hit.id for hit in exact if hit.id is not None))
    if isinstance(wanted, str) and len(ids) > 1:
        listed = "".join(f"\n  kp-worker explain{options} {shlex.quote(clean(one))}" for one in ids[:10])
        more = f"\n  and {len(ids) - 10} more" if len(ids) > 10 else ""
        raise CommandError(f"{target} is the beginning of {len(ids)} trace ids; name one (newest first):{listed}{more}")
    return exact


def explain_found(hit: Hit, others: Sequence[Hit], novelty: float | None, settings: Settings) -> SimpleNamespace:
    """Explain a scored document, and name the other records of its trace. Raises CommandError."""
    raw = hit.record.value or b""
    # It was scored, so it was within the limits of that time.
    limits = replace(settings.limits, max_bytes=len(raw), max_steps=sys.maxsize, strict_context=False)
    try:
        explanation = explain_trace(raw, settings, novelty, limits)
    except InvalidTrace as error:
        raise CommandError(f"{hit.place}: {error.reason}: {error.message}") from None
    explanation.record, explanation.record_time = hit.place, rfc3339(hit.record.time_ms)
    explanation.also = [str(other.place) for other in others]
    return explanation


class _Head(Struct):
    """The fields that are read of each document; a dead letter's value has no `scoring`."""

    id: str
    scoring: ScoringSource | None = None


_head = msgspec.json.Decoder(_Head)


async def _search(session: Session, target: str, wanted: Wanted) -> list[Hit] | str:
    """Return the matching records, newest first; if there is none, an error that says where was looked.

    Portions of all partitions are read backwards from their ends, each four times as long as the one before, until one
    has a match; the first includes what `tail` and the status page show. Raises ConfigError, SessionError, KafkaError.
    """
    settings = session.settings
    source = wanted if isinstance(wanted, RecordPlace) and wanted.topic == settings.source_topic else None
    one = wanted if isinstance(wanted, RecordPlace) and source is None else None
    names = output_topics(settings) if one is None else (one.topic,)
    async with session.admin() as admin:
        topics = await session.topics(admin, *names)
    tps = [tp for topic in topics.values() for tp in topic.tps]
    read, oldest_ms, hits = Counter[str](), dict[str, int](), list[Hit]()
    # A portion ends somewhere within its last fetch: so a fetch is small.
    async with session.connected(session.reader(max_partition_fetch_bytes=1 << 20)) as reader:
        starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
        if one is not None and tps:
            starts, ends = _bounds(one, starts, ends)
        stride = 1000
        while not hits and any(starts[tp] < end for tp, end in ends.items()):
            lower = {tp: max(starts[tp], end - stride) for tp, end in ends.items()}
            async for record in read_to(reader, lower, ends):
                read[record.topic] += 1
                oldest_ms[record.topic] = min(record.time_ms, oldest_ms.get(record.topic, record.time_ms))
                hit = _hit(record, settings)
                if hit is not None and _is_meant(hit, wanted, source):
                    hits.append(hit)
            ends, stride = lower, 4 * stride
    if hits:
        return sorted(hits, key=lambda hit: (hit.record.time_ms, hit.record.offset), reverse=True)
    if one is not None and topics:
        return f"the record {target} was not written by the worker: it is a transaction marker, or of another producer"
    lines = [f"no record of {target} is on these topics:"]
    for name in names:
        if (topic := topics.get(name)) is None:
            lines.append(f"  {name}: there is no such topic")
            continue
        count = f"{number_of(read[name], 'record')}, back to {rfc3339(oldest_ms[name])}" if read[name] else "no records"
        kept = "" if topic.retention_ms is None else f", kept for {topic.retention_ms / 86_400_000:g} days"
        lines.append(f"  {name}: {count}{kept}")
    note = (
        "It may not be scored yet (kp-worker doctor shows the lag), it may be older than the topics' retention, "
        "or it is on other topics (KP_ACCEPTED_TOPIC, KP_REJECTED_TOPIC, KP_DEAD_LETTER_TOPIC)."
    )
    why = "" if source is None else await _about_source(session, source)
    return "\n".join([*lines, why or note])


def _hit(record: SourceRecord, settings: Settings) -> Hit | None:
    """Return a scored document or dead letter; None if the worker did not write it."""
    try:
        head = _head.decode(record.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        head = None
    if record.topic != settings.dead_letter_topic:
        if head is None or head.scoring is None:
            return None
        return Hit(record, head.id, head.scoring.source, head.scoring.source.offset)
    letter = read_dead_letter(record)
    if letter is None:
        return None
    source = RecordPlace(letter.source_topic, letter.source_partition, letter.source_offset)
    first = source.offset if letter.first_offset is None else letter.first_offset
    return Hit(record, None if head is None else head.id, source, first, letter)


def _is_meant(hit: Hit, wanted: Wanted, source: RecordPlace | None) -> bool:
    if isinstance(wanted, str):
        if hit.id is None:  # not JSON, or truncated: it may contain the id all the same
            return wanted.encode() in (hit.record.value or b"")
        # As on the topic, or as shown by `tail` and the status page.
        return hit.id.startswith(wanted) or clean(hit.id).startswith(wanted)
    if source is None:
        return True
    same_partition = (hit.source.topic, hit.source.partition) == (source.topic, source.partition)
    return same_partition and hit.first_offset <= source.offset <= hit.source.offset


def _bounds(
    place: RecordPlace, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the bounds of one record. Raises SessionError if its partition has no such offset."""
    tp = TopicPartition(place.topic, place.partition)
    if tp not in ends:
        raise SessionError(f"topic {tp.topic} has no partition {tp.partition}, only 0 to {len(ends) - 1}")
    if not starts[tp] <= place.offset < ends[tp]:
        raise SessionError(
            f"partition {tp.partition} of {tp.topic} has no offset {place.offset}, only {starts[tp]} to {ends[tp] - 1}"
            if starts[tp] < ends[tp]
            else f"partition {tp.partition} of {tp.topic} is empty"
        )
    return {tp: place.offset}, {tp: place.offset + 1}


async def _about_source(session: Session, place: RecordPlace) -> str:
    """Return why a place of the source topic has no record, in one sentence; "" if it may have one."""
    async with session.admin() as admin:
        topic = (await session.topics(admin, place.topic)).get(place.topic)
    if topic is None:
        return f"There is no topic {place.topic}."
    if place.partition >= topic.partitions:
        return f"Topic {place.topic} has no partition {place.partition}, only 0 to {topic.partitions - 1}."
    tp = TopicPartition(place.topic, place.partition)
    async with session.connected(session.reader()) as reader:
        first, end = (await reader.beginning_offsets([tp]))[tp], (await reader.end_offsets([tp]))[tp]
    if place.offset >= end:
        return f"Partition {tp.partition} of {tp.topic} ends before offset {end}: nothing is published there yet."
    if place.offset < first:
        return f"Partition {tp.partition} of {tp.topic} begins at offset {first} now: Kafka has deleted that record."
    return ""


# -- a dead letter


def show_letter(hit: Hit, letter: DeadLetter, others: Sequence[Hit], options: str, *, as_json: bool) -> None:
    """Show a dead letter, or write it as JSON like `tail`; `others`: more records that the search found."""
    if as_json:
        write_line(clean_json(letter_json(letter, letter.key, letter.record.value, letter.record.headers).decode()))
        return
    table = named_rows()
    table.add_row(Text("reason", "bold"), Text(clean(letter.reason), "bold yellow"))
    if letter.path:
        table.add_row("path", Text(clean(letter.path)))
    table.add_row("message", Text(clean(letter.message)))
    table.add_row("dead letter", Text(clean(str(hit.place))))
    several = hit.first_offset != letter.source_offset
    offsets = f", offsets {hit.first_offset} to {letter.source_offset}" if several else f":{letter.source_offset}"
    table.add_row("source", Text(clean(f"{letter.source_topic}:{letter.source_partition}{offsets}")))
    if letter.timestamp_ms is not None:
        table.add_row("record time", rfc3339(letter.timestamp_ms))
    if letter.redriven:
        times = number_of(letter.redriven, "time")
        table.add_row("redriven", f"{times}, the last time from here or an earlier dead letter")
    for other in others:
        table.add_row("also", Pasted(clean(f"kp-worker explain{options} {other.place}")))
    partition, offset = letter.record.partition, letter.record.offset
    command = f"kp-worker redrive{options} --partition {partition} --offset {offset}"
    remedy: list[RenderableType] = [
        Text("Write it to a file, correct the trace in its `value`, and publish that (kp-worker publish):"),
        Pasted(f"{command} --to-file letter-{partition}-{offset}.jsonl --execute"),
        Text("Or send it unchanged, to a worker that accepts it now:"),
        Pasted(f"{command} --execute"),
    ]
    if letter.reason in NO_VALUE:
        remedy = [Text(f"It does not contain its source record: {NO_VALUE[letter.reason]}.")]
    head = Text(clean(hit.id or "a record without a trace id"), "bold")
    outcome = Text("not scored: it is a dead letter", "yellow")
    text_console().print(Group(head, outcome, "", table, "", *remedy))
