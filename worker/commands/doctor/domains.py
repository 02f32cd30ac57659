"""The doctor's check of domains: which ones, of the last scored traces, take the default profile, and near misses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct

from worker.commands.doctor.finding import Finding, ok, warn
from worker.commands.shared.scored_topics import read_outputs
from worker.commands.shared.shown import shown_name
from worker.config import ConfigError, Settings
from worker.core.domains import unused_profiles, without_profile

LAST_OFFSETS: Final = 200
"""Offsets of each partition that are looked at, from its end."""

SECONDS: Final = 10.0
"""Longest time for reading them."""

NAMED: Final = 5
"""Domains that are named; the rest is counted."""


class _DomainOnly(Struct):
    task_domain: str


class _DocumentDomain(Struct):
    metadata: _DomainOnly


async def check_domains(settings: Settings) -> list[Finding]:
    """Return the findings on the domains of the last scored traces, and on profiles that none of them takes."""
    traces: Counter[str] = Counter()
    decoder = msgspec.json.Decoder(_DocumentDomain)

    def take(value: bytes | None, _where: str, _record_ms: int) -> None:
        try:
            traces[decoder.decode(value or b"").metadata.task_domain] += 1
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # not the worker's

    try:
        async with asyncio.timeout(SECONDS):
            await read_outputs(settings, take, None, LAST_OFFSETS)
    except TimeoutError:
        unread = f"the last scored traces could not be read within {SECONDS:.0f} s"
    except ConfigError as error:
        unread = f"no scored traces were looked at: {error}"
    else:
        unread = "" if traces else "no trace is scored yet"
    findings = [*_near_domains(settings, traces), *_unused_profiles(settings, traces)]
    return [*findings, ok("domains", unread or _summary(settings, traces))]


def _near_domains(settings: Settings, traces: Counter[str]) -> Iterator[Finding]:
    near = [domain for domain in without_profile(traces, settings.scoring_profiles()) if domain.near is not None]
    for domain in near[:NAMED]:
        yield warn(
            "domains",
            f"the domain {shown_name(domain.name)} ({domain.traces} of the last {traces.total()} scored traces) takes "
            f"the profile default; did you mean {shown_name(domain.near or '')}?",
            "correct the agents' metadata.task_domain, or add a profile of this name",
        )
    if len(near) > NAMED:
        yield warn("domains", f"{len(near) - NAMED} more domains are close to a profile", "kp-worker report lists them")


def _unused_profiles(settings: Settings, traces: Counter[str]) -> Iterator[Finding]:
    for profile in unused_profiles(settings.scoring_profiles(), traces):
        if profile.near is not None:
            yield warn(
                "domains",
                f"none of the last {traces.total()} scored traces takes the profile {shown_name(profile.name)} of the "
                f"settings; did you mean {shown_name(profile.near)}?",
                "correct the profile's name: it is taken by the exact metadata.task_domain",
            )


def _summary(settings: Settings, traces: Counter[str]) -> str:
    without = without_profile(traces, settings.scoring_profiles())
    told = f"{len(traces)} in the last {traces.total()} scored traces"
    if not without:
        return f"{told}, each with its own profile"
    named = ", ".join(f"{shown_name(domain.name)} ({domain.traces})" for domain in without[:NAMED])
    more = f" and {len(without) - NAMED} more" if len(without) > NAMED else ""
    return f"{told}; without a profile of their own: {named}{more}"
