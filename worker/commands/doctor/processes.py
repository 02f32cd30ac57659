"""The doctor's checks of `kp-worker contribute` (its registry) and `assemble` (rules, extra, topics). Changes nothing.

The registry is only asked for an id. Look-ups are allowed without a key, so the answer alone does not show whether the
key is valid. The rate limit does: the registry states a different one for a known key.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from worker.commands.doctor.finding import Examination, Finding, fail, ok, reading, warn
from worker.commands.shared.console import CommandError, require_extra
from worker.config import ConfigError, Settings
from worker.config.keys import Token
from worker.contribute.registry import (
    Absent,
    Denied,
    Doubtful,
    HttpAnswer,
    Limited,
    RegistryClient,
    judge_look_up,
    registry_key,
    stated_rate,
)
from worker.kafka.cluster.connections import connected_admin, prepare_clients
from worker.kafka.cluster.errors import error_text
from worker.kafka.cluster.topics import deleted_early
from worker.observe.metrics import ContributeMetrics


async def check_registry(examination: Examination) -> AsyncIterator[Finding]:
    """Check the registry and its key; nothing if KP_REGISTRY_URL is not set."""
    settings = examination.settings
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
    seconds = min(10.0, settings.contribute_timeout_seconds)
    async with RegistryClient(url, key, seconds, ContributeMetrics(CollectorRegistry())) as client:
        answer = await client.look_up(trace_id)
    if isinstance(answer, Doubtful):
        return fail("registry", answer.words, "check KP_REGISTRY_URL, the network and the registry")
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
    check, ours, anybodys = "registry key", stated_rate(known), stated_rate(nobody)
    if ours is None or anybodys is None:
        message = "the registry states no limits: the first POST will show whether it knows the key"
        return warn(check, message, "read the log of kp-worker contribute")
    if ours.limit == anybodys.limit:
        return fail(
            check,
            f"the registry does not know the key of {source}: it allows {ours.limit} requests a minute, as without "
            "a key",
            "the key is wrong or revoked: get a new one (docs/contribute.md)",
        )
    return ok(check, f"the registry knows it, and allows {ours.limit} look-ups a minute")


async def check_assemble(examination: Examination) -> AsyncIterator[Finding]:
    """Check rules, extra and topics; nothing if no setting of `assemble` is set."""
    settings, check, remedy = examination.settings, "assemble", "assemble exits with code 2 (docs/opentelemetry.md)"
    if not (settings.assembles and examination.reachable):
        return
    try:
        require_extra("otlp")
        from worker.assemble.steps import rules_from
        from worker.assemble.topics import assemble_problems, look_for_assemble, missing_topics, small_topics

        rules_from(settings)
        async with connected_admin(settings, prepare_clients(settings)) as admin:
            observed = await look_for_assemble(admin, settings)
    except (CommandError, ConfigError, KafkaError) as error:
        yield fail(check, error_text(error) if isinstance(error, KafkaError) else str(error), remedy)
        return
    missing, problems = missing_topics(settings, observed), assemble_problems(settings, observed)
    for problem in problems:
        yield fail(check, problem, remedy)
    for name in settings.span_topics:
        for early in deleted_early(observed, name, "assembled"):
            yield warn(check, early.message, early.remedy)
    for small, larger in small_topics(settings, observed):
        yield warn(check, small, f"{larger} (docs/opentelemetry.md)")
    if missing and not settings.create_topics:
        yield fail(check, f"missing: {', '.join(missing)}", "create them: kp-worker topics --create")
    elif not problems:
        yield ok(check, f"reads {settings.spans_topic}, writes {settings.source_topic}")
        if not missing:
            async for finding in reading(_unread_content, check, "the newest spans", 10.0, "run this again")(
                examination
            ):
                yield finding


async def _unread_content(examination: Examination) -> AsyncIterator[Finding]:
    """Yield a finding for each scope whose newest spans have content in attributes that nothing reads."""
    from worker.assemble.steps import rules_from
    from worker.commands.shared.preview import Preview, read_newest

    preview = Preview(rules_from(examination.settings))
    for topic in examination.settings.span_topics:
        await read_newest(examination.settings, topic, 50, preview)  # of each partition
    await asyncio.to_thread(lambda: list(preview.lines()))
    for line in preview.unread.lines():
        yield warn("assemble", line, "their runs lack it: report the library (docs/opentelemetry.md)")
