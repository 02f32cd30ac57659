"""`kp-worker verdict`: the outcomes of traces, as signed control records in their partitions."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from worker.commands.shared.console import Command
from worker.commands.shared.options import read_settings, settings_options
from worker.core.terminal import number_of

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from worker.commands.shared.console import BadLines
    from worker.commands.shared.json_lines import Line
    from worker.commands.shared.session import Session
    from worker.core.control import Judges
    from worker.core.verdicts import SignedVerdict

IN_FLIGHT: Final = 500
"""Verdicts in flight to the broker at once."""


@click.command(cls=Command)
@click.argument("file", type=click.Path(allow_dash=True))
@settings_options
def verdict(file: str) -> None:
    """Say whether traces succeeded: write a signed verdict for each line of a JSON Lines file.

    A line is a scored document with success (true, false or 0 to 1) and judge beside its fields, or {"trace_id",
    "agent_id", "task_domain", "partition", "offset", "success", "judge"}, where partition and offset are those of the
    trace on the source topic. KP_VERDICT_KEY_FILE has the judges' keys; the workers need the same file. FILE may be -
    for standard input. Exit code 1: a line is wrong, or not all could be written.
    """
    settings = read_settings()
    from worker.commands.shared.console import (
        ArgumentError,
        BadLines,
        CommandError,
        errors_for_the_user,
        open_file,
        say,
    )
    from worker.commands.shared.session import Session, run_session
    from worker.config import ConfigError
    from worker.config.keys import judge_keys

    counts, wrong = {"written": 0}, BadLines(file)
    with errors_for_the_user():
        judges = judge_keys(settings)
        if not judges:
            raise ConfigError("verdicts are signed: set KP_VERDICT_KEY_FILE, with a line JUDGE KEY for each judge")
        session = Session(settings)
    try:
        source = open_file(file, "rb")
    except OSError as error:
        raise ArgumentError("FILE", f"{file}: {error.strerror}") from None
    with source:
        try:
            with errors_for_the_user():
                run_session(_write(session, judges, source, wrong, counts))
        except KeyboardInterrupt:
            say(f"interrupted after {number_of(counts['written'], 'verdict')}")
            sys.exit(130)
        except CommandError as error:
            raise (
                error.adding(f"; {number_of(counts['written'], 'verdict was', 'verdicts were')} written before")
                if counts["written"]
                else error
            ) from None
    wrong.say_rest("correct these as well")
    written = f"{number_of(counts['written'], 'verdict')} written to topic {settings.source_topic}"
    say(written + (f", {number_of(wrong.count, 'line')} wrong" if wrong.count else ""))
    sys.exit(1 if wrong.count else 0)


async def _write(session: Session, judges: Judges, source: BinaryIO, wrong: BadLines, counts: dict[str, int]) -> None:
    """Write a verdict for each valid line as it arrives; keep the counts up to date.

    Raises ConfigError, SessionError.
    """
    from worker.commands.shared.json_lines import lines_as_they_come
    from worker.kafka.cluster.connections import idempotent_producer, while_sending

    topic, most = session.settings.source_topic, session.settings.max_message_bytes
    (target,) = await session.existing(topic)
    identity = await session.topic_id(topic)

    def count(sent: asyncio.Future[object]) -> None:
        counts["written"] += not sent.cancelled() and sent.exception() is None

    async def send_all(producer: AIOKafkaProducer) -> None:
        waiting: deque[asyncio.Future[object]] = deque()
        async for line in lines_as_they_come(source, most):
            if line.problem is None and not line.data.strip():
                continue
            try:
                it = _signed(line, target.partitions, judges, topic, identity)
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                wrong.name(f"{line.number}: {error}")
                continue
            waiting.append(await producer.send(it.topic, it.value, it.key, it.partition, headers=it.headers))
            waiting[-1].add_done_callback(count)
            while len(waiting) == IN_FLIGHT or (waiting and waiting[0].done()):
                await waiting.popleft()
        for each in waiting:
            await each

    unconnected = idempotent_producer(session.client, session.settings.transaction_timeout_seconds)
    async with session.connected(unconnected) as producer:
        await while_sending(producer, send_all(producer))


def _signed(line: Line, partitions: int, judges: Judges, topic: str, topic_id: str) -> SignedVerdict:
    """Return the signed verdict of a line. Raises ValueError, RecursionError."""
    import msgspec

    from worker.core.verdicts import make_verdict, sign_verdict

    if line.problem is not None:
        raise ValueError(line.problem)
    judged = msgspec.json.decode(line.data, type=dict[str, Any])
    verdict = make_verdict(judged, topic=topic, topic_id=topic_id, issued_at=datetime.now(UTC))
    if verdict.partition >= partitions:
        raise ValueError(f"partition {verdict.partition}: topic {topic} has only 0 to {partitions - 1}")
    if verdict.judge not in judges:
        raise ValueError(f"KP_VERDICT_KEY_FILE has no key of judge {verdict.judge}")
    return sign_verdict(verdict, judges[verdict.judge][0])
