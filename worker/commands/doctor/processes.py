"""The doctor's checks of `kp-worker contribute` (its registry) and `assemble` (rules, extra, topics). Changes nothing.

The registry is only asked for an id. Look-ups are allowed without a key, so the answer alone does not show whether the
key is valid. The rate limit does: the registry states a different one for a known key.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Final

from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from worker.commands.doctor.finding import Finding, fail, ok, warn
from worker.commands.doctor.traces import read_within
from worker.commands.shared.console import CommandError, require_extra
from worker.config import ConfigError, Settings
from worker.config.keys import Token
from worker.contribute.registry import (
    Absent,
    Denied,
    Doubtful,
    HttpAnswer,
    Limited,
    NoAnswerError,
    RegistryClient,
    judge_look_up,
    registry_key,
    stated_rate,
)
from worker.kafka.cluster.connections import connected_admin, prepare_clients
from worker.kafka.cluster.errors import error_text
from worker.kafka.cluster.topics import deleted_early
from worker.observe.metrics import ContributeMetrics

ANSWER_SECONDS: Final = 10.0


async def check_registry(settings: Settings) -> AsyncIterator[Finding]:
    """Yield the findings; none if KP_REGISTRY_URL is not set."""
    if settings.registry_url is None:
        return
    try:
        key = registry_key(settings)
    except ConfigError as error:
        yield fail("registry key", str(error), "contribute exits with code 2 without it")
        return
    known = await _ask(settings, settings.registry_url, key)
    if isinstance(known, Finding):
        yield known
        return
    yield ok("registry", "it answers")
    nobody = await _ask(settings, settings.registry_url, None)
    yield nobody if isinstance(nobody, Finding) else _about_key(known, nobody, key.source)


async def _ask(settings: Settings, url: str, key: Token | None) -> HttpAnswer | Finding:
    """Look up a random id; return the answer, or the problem."""
    trace_id = f"kp:trace:{uuid.uuid4()}"
    seconds = min(ANSWER_SECONDS, settings.contribute_timeout_seconds)
    async with RegistryClient(url, key, seconds, ContributeMetrics(CollectorRegistry())) as client:
        try:
            answer = await client.look_up(trace_id)
        except NoAnswerError as error:
            return fail("registry", str(error), "check KP_REGISTRY_URL, the network and the registry")
    match judge_look_up(answer, trace_id):
        case Absent():
            return answer
        case Denied(status):
            return fail("registry key", f"the registry denies it ({status})", "get a new one (docs/contribute.md)")
        case Limited():
            return fail("registry", "it answers 429", "wait for an hour: the third 429 within an hour revokes the key")
        case Doubtful(_, words):
            return fail("registry", words, "check KP_REGISTRY_URL: it is the address before /v1")
    return fail("registry", "it says that it has a unit with a new, random id", "check KP_REGISTRY_URL")


def _about_key(known: HttpAnswer, nobody: HttpAnswer, source: str) -> Finding:
    ours, anybodys = stated_rate(known), stated_rate(nobody)
    if ours is None or anybodys is None:
        return warn("registry key", "the registry states no limits: the first POST will show whether it knows the key",
                    "read the log of kp-worker contribute")  # fmt: skip
    if ours.limit == anybodys.limit:
        return fail(
            "registry key",
            f"the registry does not know the key of {source}: it allows {ours.limit} requests a minute, as without "
            "a key",
            "the key is wrong or revoked: get a new one (docs/contribute.md)",
        )
    return ok("registry key", f"the registry knows it, and allows {ours.limit} look-ups a minute")


ASSEMBLE_REMEDY: Final = "assemble exits with code 2 (docs/opentelemetry.md)"


async def check_assemble(settings: Settings) -> AsyncIterator[Finding]:
    """Yield the findings; none if no setting of `assemble` is set."""
    if not settings.assembles:
        return
    try:
        require_extra("otlp")
    except CommandError as error:
        yield fail("assemble", error.message, ASSEMBLE_REMEDY)
        return
    from worker.assemble.steps import rules_from
    from worker.assemble.topics import assemble_problems, look_for_assemble, missing_topics, small_topics

    try:
        rules_from(settings)
        async with connected_admin(settings, prepare_clients(settings)) as admin:
            observed = await look_for_assemble(admin, settings)
    except ConfigError as error:
        yield fail("assemble", str(error), ASSEMBLE_REMEDY)
        return
    except KafkaError as error:
        yield fail("assemble", error_text(error), ASSEMBLE_REMEDY)
        return
    missing, problems = missing_topics(settings, observed), assemble_problems(settings, observed)
    for problem in problems:
        yield fail("assemble", problem, ASSEMBLE_REMEDY)
    for each in (problem for name in settings.span_topics for problem in deleted_early(observed, name, "assembled")):
        yield warn("assemble", each.message, each.remedy)
    for small, remedy in small_topics(settings, observed):
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
    from worker.assemble.steps import rules_from
    from worker.commands.shared.preview import Preview, read_newest

    preview = Preview(rules_from(settings))
    for topic in settings.span_topics:
        # How many records to read at the end of each partition of the span topics
        reading = read_newest(settings, topic, 50, preview)
        unread = await read_within(10.0, reading, "assemble", "the newest spans", "run this again")
        if unread is not None:
            yield unread
            return
    await asyncio.to_thread(lambda: list(preview.lines()))
    for line in preview.unread.lines():
        yield warn("assemble", line, "their runs lack it: report the library (docs/opentelemetry.md)")
