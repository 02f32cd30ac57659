"""`kp-worker forget`: one control record to each partition of the source topic, and the answers to them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord
from msgspec import UNSET
from rich.text import Text

from worker.commands.shared.console import errors_for_the_user, say, text_console, write_json
from worker.commands.shared.session import Session, SessionError, Topic, run_session
from worker.commands.shared.table import columns
from worker.config import ConfigError, Settings
from worker.config.control_keys import forget_keys
from worker.core.control import FORGET, control_headers
from worker.core.forgetting import REQUEST_VERSION, ForgetRequest, encode_request, read_receipt
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.terminal import clean
from worker.kafka.cluster.connections import idempotent_producer
from worker.kafka.cluster.describe import describe_topics
from worker.kafka.reading.dead_letters import read_dead_letter
from worker.kafka.state.restore import topic_offsets

POLL_MS: Final = 500


@dataclass(slots=True)
class Answer:
    """The result of the control record in one partition."""

    partition: int
    offset: int
    result: str = "written"  # written, forgotten or dead_letter
    removed: int | None = None  # entries
    cached: int | None = None  # those of them that were in the cache
    reason: str | None = None  # of the dead letter
    message: str | None = None


@dataclass(slots=True)
class _Request:
    """A request to forget, and the answers."""

    request_id: str
    what: Mapping[str, Any]
    topic_id: str = ""  # of the topic for which the control records are signed
    recreated: str | None = None  # in words, if that topic was recreated meanwhile
    answers: dict[int, Answer] = field(default_factory=dict)  # by partition

    @property
    def waiting(self) -> list[int]:
        """Return the partitions without an answer."""
        return [partition for partition, answer in self.answers.items() if answer.result == "written"]


def run_forget(
    settings: Settings, trace_ids: Sequence[str], agent_id: str | None, *, wait_seconds: float | None, as_json: bool
) -> int:
    """Ask all partitions to forget, report the answers, and return the exit code. Raises CommandError.

    `wait_seconds`: how long to wait for the receipts; None: do not wait.
    """
    what = (
        {"trace_ids": [it[:CACHED_ID_LENGTH] for it in dict.fromkeys(trace_ids)]}
        if agent_id is None
        else {"agent_id": agent_id[:CACHED_ID_LENGTH]}
    )
    request = _Request(str(uuid.uuid4()), what)
    try:
        with errors_for_the_user():
            run_session(_forget(Session(settings), forget_keys(settings)[0], request, wait_seconds))
    except KeyboardInterrupt:
        say("interrupted; the control records listed here are written, and take effect")
        _print(settings, request, as_json)
        return 130
    _print(settings, request, as_json)
    return _exit_code(request, waited=wait_seconds is not None)


def _exit_code(request: _Request, *, waited: bool) -> int:
    refused = [it.partition for it in request.answers.values() if it.result == "dead_letter"]
    if request.recreated is not None:
        say(
            f"the topic was recreated meanwhile ({request.recreated}), and the control records are signed for the "
            "earlier one: those without a receipt are not honoured. Run the command again"
        )
        return 1
    if refused:
        say(
            f"partitions {refused}: the control record became a dead letter, nothing was forgotten. bad_control: the "
            "workers have another key or another version; any other reason: they run with KP_FORGET=false "
            f"(docs/forget.md). Partition {refused[0]}: {request.answers[refused[0]].message}"
        )
    if waited and request.waiting:
        say(
            f"partitions {request.waiting}: no receipt yet. The control records stay on the topic and take effect when "
            "a worker reads them"
        )
    return 1 if refused or (waited and request.waiting) else 0


async def _forget(session: Session, key: bytes, request: _Request, wait_seconds: float | None) -> None:
    settings = session.settings
    if wait_seconds is None:
        (source,) = await session.existing(settings.source_topic)
        await _write(session, source, key, request)
        return
    source, receipts, letters = await session.existing(
        settings.source_topic, settings.forgotten, settings.dead_letter_topic,
        created_with="KP_FORGET=true and KP_CREATE_TOPICS=true",
    )  # fmt: skip
    async with session.connected(session.reader(), tolerant=True) as consumer:
        tps = [*receipts.tps, *letters.tps]
        consumer.assign(tps)
        for tp, end in (await consumer.end_offsets(tps)).items():
            consumer.seek(tp, end)
        await _write(session, source, key, request)
        if request.recreated is None:
            await _read_answers(consumer, settings, request, wait_seconds)
    if any(answer.result != "forgotten" for answer in request.answers.values()):
        await _note_recreation(session, request)


async def _write(session: Session, source: Topic, key: bytes, request: _Request) -> None:
    """Write one control record to each partition. Raises SessionError that names the partitions with one.

    The topic id is read first: whichever topic the offsets belong to, workers honour records only on the one with this
    id.
    """
    topic = source.name
    request.topic_id = identity = await session.topic_id(topic)
    tps = source.tps
    _, ends = await topic_offsets(session.client, tps)
    issued_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    producer = idempotent_producer(session.client, session.settings.transaction_timeout_seconds)
    async with session.connected(producer):
        sends = []
        for tp in tps:
            body = encode_request(
                ForgetRequest(
                    version=REQUEST_VERSION, request_id=request.request_id, issued_at=issued_at, topic=topic,
                    topic_id=identity, partition=tp.partition, end_offsets=[ends[each] for each in tps],
                    trace_ids=request.what.get("trace_ids", UNSET), agent_id=request.what.get("agent_id", UNSET),
                )
            )  # fmt: skip
            sends.append(
                producer.send_and_wait(
                    topic, body, request.request_id.encode(), tp.partition, headers=control_headers(FORGET, body, key)
                )
            )
        results = await asyncio.gather(*sends, return_exceptions=True)
    failed: list[str] = []
    for tp, result in zip(tps, results, strict=True):
        if isinstance(result, BaseException):
            failed.append(f"partition {tp.partition}: {result!r}")
        else:
            request.answers[tp.partition] = Answer(tp.partition, result.offset)
    if failed:
        raise SessionError(
            f"{'; '.join(failed)}. Partitions {sorted(request.answers)} have their control record. Run the command "
            "again"
        )
    await _note_recreation(session, request)


async def _note_recreation(session: Session, request: _Request) -> None:
    """Note if the topic is no longer the one for which the records were signed."""
    topic = session.settings.source_topic
    try:
        async with session.admin() as admin:
            now = (await describe_topics(admin, [topic]))[topic].topic_id
    except (KafkaError, ConfigError) as error:  # the records are written all the same
        say(f"it is not known whether the topic was recreated meanwhile: {error}")
        return
    if now != request.topic_id:
        request.recreated = f"its id was {request.topic_id}, " + (
            "it is missing now" if now is None else f"now it is {now}"
        )


async def _read_answers(consumer: AIOKafkaConsumer, settings: Settings, request: _Request, wait_seconds: float) -> None:
    until = time.monotonic() + wait_seconds
    while request.waiting and time.monotonic() < until:
        for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
            for record in records:
                if record.topic == settings.forgotten:
                    _note_receipt(record, settings, request)
                else:
                    _note_dead_letter(record, settings, request)


def _note_receipt(record: ConsumerRecord, settings: Settings, request: _Request) -> None:
    receipt = read_receipt(record.value)
    if receipt is None or (receipt.request_id, receipt.group) != (request.request_id, settings.group_id):
        return
    answer = request.answers.get(receipt.source.partition)
    if answer is not None and answer.offset == receipt.source.offset:
        answer.result = "forgotten"
        answer.removed, answer.cached = receipt.removed.count, receipt.removed.cached


def _note_dead_letter(record: ConsumerRecord, settings: Settings, request: _Request) -> None:
    letter = read_dead_letter(record)
    if letter is None or letter.source_topic != settings.source_topic:
        return
    answer = request.answers.get(letter.source_partition)
    if answer is not None and answer.offset == letter.source_offset and answer.result == "written":
        answer.result, answer.reason, answer.message = "dead_letter", letter.reason, letter.message


def _words(what: Mapping[str, Any]) -> str:
    """Return the request in words."""
    if "agent_id" in what:
        return f"all traces of agent {what['agent_id']}"
    first, *others = what["trace_ids"]
    return f"trace {first}" + (f" and {len(others)} more" if others else "")


def _print(settings: Settings, request: _Request, as_json: bool) -> None:
    answers = [request.answers[partition] for partition in sorted(request.answers)]
    if as_json:
        for answer in answers:
            row = {"request_id": request.request_id, "topic": settings.source_topic} | msgspec.to_builtins(answer)
            write_json(row)
        return
    numbers = ("partition", "offset", "removed", "of the cache")
    table = columns("partition", "offset", "result", "removed", "of the cache", right=numbers)
    for answer in answers:
        result = "dead letter: " + str(answer.reason) if answer.result == "dead_letter" else answer.result
        removed, cached = ("-" if it is None else str(it) for it in (answer.removed, answer.cached))
        table.add_row(str(answer.partition), str(answer.offset), Text(clean(result)), removed, cached)
    console = text_console()
    console.print(Text(clean(f"request {request.request_id} on topic {settings.source_topic}: {_words(request.what)}")))
    console.print(table)
