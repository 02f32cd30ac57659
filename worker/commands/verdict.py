"""`kp-worker verdict`: what became of traces, as signed control records in their partitions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from worker.commands.shared.console import Command
from worker.commands.shared.options import read_settings, settings_options

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from worker.commands.shared.json_lines import Line
    from worker.commands.shared.session import Session
    from worker.core.control import Judges
    from worker.core.verdicts import SignedVerdict

IN_FLIGHT: Final = 500
"""Verdicts that are sent together, and then waited for."""

SHOWN: Final = 5
"""Wrong lines that are named; the others are counted."""


@click.command(cls=Command)
@click.argument("file", type=click.Path(allow_dash=True))
@settings_options
def verdict(file: str) -> None:
    """Say what became of traces: write one signed verdict for each line of a JSON Lines file.

    A line is a scored document of the accepted or rejected topic with success (true, false or a number from 0 to 1) and
    judge beside its fields; or {"trace_id", "agent_id", "task_domain", "partition", "success", "judge"}. The judges'
    keys are in KP_VERDICT_KEY_FILE, and the workers need the same file. FILE may be - for standard input.

    Exit codes: 0 all written; 1 a line is wrong, or not all could be written; 2 wrong usage, settings or topic.
    """
    settings = read_settings()
    from worker.commands.shared.console import ArgumentError, CommandError, errors_for_the_user, open_file, say
    from worker.commands.shared.json_lines import read_lines
    from worker.commands.shared.session import Session, run_session
    from worker.config import ConfigError
    from worker.config.control_keys import judge_keys

    counts = {"written": 0, "wrong": 0}

    def wrong(line: int, problem: str) -> None:
        counts["wrong"] += 1
        if counts["wrong"] <= SHOWN:
            say(f"{file}:{line}: {problem}")

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
        lines = read_lines(source, settings.max_message_bytes)
        try:
            with errors_for_the_user():
                run_session(_write(session, judges, lines, wrong, counts))
        except KeyboardInterrupt:
            say(f"interrupted; {counts['written']} verdicts are written")
            sys.exit(130)
        except CommandError as error:
            raise (
                error.adding(f"; {counts['written']} verdicts were written before") if counts["written"] else error
            ) from None
    hidden = counts["wrong"] - SHOWN
    if hidden > 0:
        say(f"{hidden} more lines are wrong")
    written = f"{counts['written']} verdict{'s' * (counts['written'] != 1)} written to topic {settings.source_topic}"
    say(written + (f", {counts['wrong']} lines wrong" if counts["wrong"] else ""))
    sys.exit(1 if counts["wrong"] else 0)


async def _write(
    session: Session,
    judges: Judges,
    lines: Iterable[Line],
    wrong: Callable[[int, str], None],
    counts: dict[str, int],
) -> None:
    """Write a verdict for each line; keep the counts up to date. Raises ConfigError, SessionError.

    `wrong` gets the number of a line that is not a verdict, and why.
    """
    from worker.commands.shared.session import SessionError
    from worker.config import ConfigError
    from worker.kafka.cluster.connections import idempotent_producer, while_sending
    from worker.kafka.cluster.describe import topic_id

    topic = session.settings.source_topic
    (source,) = await session.existing(topic)
    async with session.admin() as admin:
        identity = await topic_id(admin, topic)
    if identity is None:
        raise ConfigError(
            f"the brokers report no id of topic {topic}: verdicts are signed for it, and Kafka has ids since 2.8"
        )
    read = _read(lines, source.partitions, judges, topic, identity, wrong)
    producer = idempotent_producer(session.client, session.settings.transaction_timeout_seconds)
    async with session.connected(producer):
        while together := list(islice(read, IN_FLIGHT)):
            results = await while_sending(producer, _send(producer, together))
            failed = [str(it) or type(it).__name__ for it in results if isinstance(it, BaseException)]
            counts["written"] += len(results) - len(failed)
            if failed:
                raise SessionError(f"{len(failed)} verdicts were not written: {failed[0]}; run the command again")


async def _send(producer: AIOKafkaProducer, verdicts: Iterable[SignedVerdict]) -> list[object]:
    """Send verdicts and await them; return their metadata, or an error in its place."""
    sends = (producer.send_and_wait(it.topic, it.value, it.key, it.partition, headers=it.headers) for it in verdicts)
    results: list[object] = await asyncio.gather(*sends, return_exceptions=True)
    return results


def _read(
    lines: Iterable[Line], partitions: int, judges: Judges, topic: str, topic_id: str, wrong: Callable[[int, str], None]
) -> Iterator[SignedVerdict]:
    """Yield the signed verdict of each line."""
    import msgspec

    from worker.core.verdicts import make_verdict, sign_verdict

    for line in lines:
        if line.problem is None and not line.data.strip():
            continue
        try:
            if line.problem is not None:
                raise ValueError(line.problem)
            judged = msgspec.json.decode(line.data)
            verdict = make_verdict(judged, topic=topic, topic_id=topic_id, issued_at=datetime.now(UTC))
            if verdict.partition >= partitions:
                raise ValueError(f"partition {verdict.partition}: topic {topic} has only 0 to {partitions - 1}")
            if verdict.judge not in judges:
                raise ValueError(f"KP_VERDICT_KEY_FILE has no key of judge {verdict.judge}")
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            wrong(line.number, str(error))
        else:
            yield sign_verdict(verdict, judges[verdict.judge][0])
