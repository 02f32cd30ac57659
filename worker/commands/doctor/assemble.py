"""The doctor's checks of `kp-worker assemble`: its rules, its extra and its topics. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from aiokafka.errors import KafkaError

from worker.commands.doctor.finding import Finding, fail, ok, warn
from worker.commands.doctor.traces import read_within
from worker.commands.shared.console import CommandError, require_extra
from worker.config import ConfigError, Settings
from worker.kafka.cluster.client import prepare_clients
from worker.kafka.cluster.connections import connected_admin
from worker.kafka.cluster.errors import error_text

REMEDY = "assemble exits with code 2 (docs/opentelemetry.md)"

LAST_RECORDS: Final = 50
"""How many records to read at the end of each partition of the span topics."""

READ_SECONDS: Final = 10.0
"""Time limit for each of these topics."""


async def check_assemble(settings: Settings) -> AsyncIterator[Finding]:
    """Yield the findings; none if no setting of `assemble` is set."""
    if not settings.assembles:
        return
    try:
        require_extra("otlp")
    except CommandError as error:
        yield fail("assemble", error.message, REMEDY)
        return
    from worker.assemble.topics import assemble_problems, look_for_assemble, missing_topics, small_topics
    from worker.assemble.traces import rules_from

    try:
        rules_from(settings)
        async with connected_admin(settings, prepare_clients(settings)) as admin:
            found = await look_for_assemble(admin, settings)
    except ConfigError as error:
        yield fail("assemble", str(error), REMEDY)
        return
    except KafkaError as error:
        yield fail("assemble", error_text(error), REMEDY)
        return
    missing, problems = missing_topics(settings, found), assemble_problems(settings, found)
    for problem in problems:
        yield fail("assemble", problem, REMEDY)
    for small, remedy in small_topics(settings, found):
        yield warn("assemble", small, f"{remedy} (docs/opentelemetry.md)")
    if missing and not settings.create_topics:
        yield fail("assemble", f"missing: {', '.join(missing)}", "create them: kp-worker topics --create")
    elif not problems:
        yield ok("assemble", f"reads {settings.spans_topic}, writes {settings.source_topic}")
        if not missing:
            async for finding in _what_is_not_read(settings):
                yield finding


async def _what_is_not_read(settings: Settings) -> AsyncIterator[Finding]:
    """Yield a finding for each scope whose newest spans have content in attributes that nothing reads."""
    from worker.assemble.traces import rules_from
    from worker.commands.shared.preview import Preview, read_newest

    preview = Preview(rules_from(settings))
    for topic in settings.span_topics:
        reading = read_newest(settings, topic, LAST_RECORDS, preview)
        unread = await read_within(READ_SECONDS, reading, "assemble", "the newest spans", "run this again")
        if unread is not None:
            yield unread
            return
    await asyncio.to_thread(lambda: list(preview.lines()))
    for line in preview.unread.lines():
        yield warn("assemble", line, "their runs lack it: report the library (docs/opentelemetry.md)")
