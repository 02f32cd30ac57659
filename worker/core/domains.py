"""Domains without their own profile, and the profile that each may mean. A near miss is reported, never corrected."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from worker.core.scoring import DEFAULT_PROFILE, PROFILES

LEAST_SIMILARITY: Final = 0.82
"""Least difflib ratio of two near names: one wrong letter of seven is near ("finanse"), one of four is not ("node")."""


@dataclass(frozen=True, slots=True)
class DomainWithoutProfile:
    """A domain that is scored with the profile `default`."""

    name: str
    traces: int  # of the domain
    near: str | None  # the profile that it may mean


@dataclass(frozen=True, slots=True)
class UnusedProfile:
    """A profile that no trace uses."""

    name: str
    near: str | None  # the domain or built-in profile that it may mean


def without_profile(traces: Mapping[str, int], profiles: Collection[str]) -> list[DomainWithoutProfile]:
    """Return the domains (with their number of traces) without a profile: near misses first, then the most frequent."""
    found = [
        DomainWithoutProfile(domain, count, near_miss(domain, profiles))
        for domain, count in traces.items()
        if domain not in profiles and domain != DEFAULT_PROFILE
    ]
    return sorted(found, key=lambda domain: (domain.near is None, -domain.traces, domain.name))


def unused_profiles(profiles: Collection[str], domains: Collection[str]) -> list[UnusedProfile]:
    """Return the profiles that are neither built in nor used by any of the domains, near misses first."""
    unused = [name for name in profiles if name not in PROFILES and name not in domains]
    others = dict.fromkeys([*PROFILES, *domains])
    found = [UnusedProfile(name, near_miss(name, others)) for name in unused]
    return sorted(found, key=lambda profile: (profile.near is None, profile.name))


def near_miss(domain: str, profiles: Iterable[str]) -> str | None:
    """Return the profile that a domain without one may mean; None if the domain has a profile or none is near.

    Another spelling ("Finance", "customer-service", "finance ") is nearer than a misspelling ("finanse"). Names that
    differ in their digits are never near, and no domain means `default`.
    """
    names = [name for name in profiles if name != DEFAULT_PROFILE]
    if domain in names or domain == DEFAULT_PROFILE:
        return None
    wanted = _letters(domain)
    found = {_letters(name): name for name in reversed(names)}  # the first of equal ones
    alike = [key for key in found if key and _digits(key) == _digits(wanted)]
    close = difflib.get_close_matches(wanted, alike, n=1, cutoff=LEAST_SIMILARITY) if wanted else []
    close += [key for key in alike if len(key) == len(wanted) and sorted(key) == sorted(wanted)]  # "leagl"
    return found[close[0]] if close else None


def _letters(name: str) -> str:
    """Return the letters and digits of a name, without the case and punctuation in which spellings differ."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", name).casefold()))


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
