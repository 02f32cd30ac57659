"""`kp-worker verdict`: the outcomes of traces, as signed control records in their partitions."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import msgspec

from worker.commands.shared.console import BadLines, Command, CommandError, open_argument, say
from worker.commands.shared.json_lines import lines_as_they_come
from worker.commands.shared.options import read_settings, settings_options
from worker.core.terminal import number_of

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from worker.commands.shared.session import Session
    from worker.config import Settings
    from worker.core.documents import RecordPlace
    from worker.core.verdicts import Judges


@click.command(cls=Command)
@click.argument("file", type=click.Path(allow_dash=True))
@settings_options
def verdict(file: str) -> None:
    """Say whether traces succeeded: write a signed verdict for each line of a JSON Lines file.

    A line is a scored document with success (true, false or 0 to 1) and judge beside its fields, or {"trace_id",
    "agent_id", "task_domain", "partition", "offset", "success", "judge"}, where partition and offset are those of the
    trace on the source topic. With {"trace_id", "success", "judge"} alone, the trace is looked up on the accepted and
    rejected topics when FILE ends. KP_VERDICT_KEY_FILE has the judges' keys; the workers need the same file. FILE may
    be - for standard input. Exit code 1: a line is wrong, or not all could be written.
    """
    settings = read_settings()
    from worker.commands.shared.session import Session, run_session
    from worker.config import ConfigError
    from worker.config.keys import judge_keys

    wrong, sent = BadLines(file), Counter[str]()
    judges = judge_keys(settings)
    if not judges:
        raise ConfigError("verdicts are signed: set KP_VERDICT_KEY_FILE, with a line JUDGE KEY for each judge")
    session = Session(settings)
    try:
        with open_argument("FILE", file) as source:
            run_session(_write(session, judges, source, wrong, sent))
    except KeyboardInterrupt:
        say(f"interrupted after {number_of(sent.total(), 'verdict')}")
        sys.exit(130)
    except CommandError as error:
        if sent:
            error.message += f"; {number_of(sent.total(), 'verdict was', 'verdicts were')} written before"
        raise
    wrong.say_rest("correct these as well")
    written = f"{number_of(sent.total(), 'verdict')} written to topic {settings.source_topic}"
    say(written + (f", {number_of(wrong.count, 'line')} wrong" if wrong.count else ""))
    sys.exit(1 if wrong.count else 0)


async def _write(session: Session, judges: Judges, source: BinaryIO, wrong: BadLines, written: Counter[str]) -> None:
    """Write a verdict for each valid line as it arrives; count what is written. Raises ConfigError, SessionError."""
    from worker.core.verdicts import make_verdict, sign_verdict
    from worker.kafka.connections import idempotent_producer, while_sending
    from worker.kafka.describe import topic_id

    settings = session.settings
    (topic,) = await session.existing(settings.source_topic)
    async with session.admin() as admin:
        identity = await topic_id(admin, topic.name)

    def count(sent: asyncio.Future[object]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            written["verdicts"] += 1

    async def send_all(producer: AIOKafkaProducer) -> None:
        waiting: deque[asyncio.Future[object]] = deque()
        async for number, judged in _judgements(settings, source, wrong):
            try:
                verdict = make_verdict(judged, topic=topic.name, topic_id=identity, issued_at=datetime.now(UTC))
                if verdict.partition >= topic.partitions:
                    has = f"topic {topic.name} has only 0 to {topic.partitions - 1}"
                    raise ValueError(f"partition {verdict.partition}: {has}")
                if verdict.judge not in judges:
                    raise ValueError(f"KP_VERDICT_KEY_FILE has no key of judge {verdict.judge}")
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                wrong.name(f"{number}: {error}")
                continue
            record = sign_verdict(verdict, judges[verdict.judge][0])
            waiting.append(
                await producer.send(record.topic, record.value, record.key, record.partition, headers=record.headers)
            )
            waiting[-1].add_done_callback(count)
            while len(waiting) == 500 or (waiting and waiting[0].done()):  # in flight to the broker at once
                await waiting.popleft()
        for answer in waiting:
            await answer

    unconnected = idempotent_producer(session.client, settings.transaction_timeout_seconds)
    async with session.connected(unconnected) as producer:
        await while_sending(producer, send_all(producer))


async def _judgements(
    settings: Settings, source: BinaryIO, wrong: BadLines
) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
    """Yield the lines as they arrive, with their numbers; at the end those that only name a trace, with its fields."""
    by_id: list[tuple[int, dict[str, Any]]] = []
    async for line in lines_as_they_come(source, settings.max_message_bytes):
        if line.blank:
            continue
        try:
            judged = msgspec.json.decode(line.content(), type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            wrong.name(f"{line.number}: {error}")
            continue
        if judged.keys() == {"trace_id", "success", "judge"}:
            by_id.append((line.number, judged))
        else:
            yield line.number, judged
    documents = await _scored(settings, {str(judged["trace_id"]) for _, judged in by_id})
    for number, judged in by_id:
        of_id = documents[str(judged["trace_id"])]
        if len(of_id) == 1:
            yield number, next(iter(of_id.values())) | judged
        else:
            there = f"the records {', '.join(map(str, of_id))}: give one's fields" if of_id else "no scored trace"
            wrong.name(f"{number}: {judged['trace_id']} is the id of {there}")


async def _scored(settings: Settings, ids: Collection[str]) -> Mapping[str, dict[RecordPlace, dict[str, Any]]]:
    """Return the scored documents of traces by id and source record. Raises ConfigError."""
    from worker.commands.shared.session import read_topics
    from worker.core.documents import ScoredId

    documents: dict[str, dict[RecordPlace, dict[str, Any]]] = defaultdict(dict)

    def take(value: bytes | None, _where: str, _record_ms: int) -> None:
        with suppress(ValueError, RecursionError):  # not the worker's
            head = msgspec.json.decode(value or b"", type=ScoredId)
            if head.id in ids:
                documents[head.id][head.scoring.source] = msgspec.json.decode(value or b"")

    if ids:
        await read_topics(settings, (settings.accepted_topic, settings.rejected_topic), take)
    return documents
