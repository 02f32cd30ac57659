"""The doctor's checks of the registry, for `kp-worker contribute`. Changes nothing: it only looks an id up.

Look-ups are allowed without a key, so the answer alone does not show whether the key is valid. The rate limit does: the
registry states a different one for a known key.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Final

from prometheus_client import CollectorRegistry

from worker.commands.doctor.finding import Finding, fail, ok, warn
from worker.config import ConfigError, Settings
from worker.config.token import Token
from worker.contribute.answers import Absent, Denied, Doubtful, HttpAnswer, Limited, judge_look_up, stated_rate
from worker.contribute.registry_client import NoAnswerError, RegistryClient, registry_key
from worker.observe.contribute_metrics import ContributeMetrics

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
