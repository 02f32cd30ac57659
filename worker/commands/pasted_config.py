"""Thresholds and profiles as a config file (TOML) to paste: what differs from the built-in ones.

Must not live here: reading a config file (the room config).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from worker.commands.target_share import FEW_TRACES
from worker.core.scoring import DEFAULT_PROFILE, DEFAULT_THRESHOLD, PROFILES, Profile

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def config_to_paste(
    profiles: Mapping[str, Profile], threshold: float, comments: Mapping[str, str] | None = None
) -> str:
    """Return the lines of a config file that give these settings; "" where they are the built-in ones.

    `comments` stand behind the thresholds of the profiles that they name.
    """
    lines = [f"threshold = {threshold!r}"] if threshold != DEFAULT_THRESHOLD else []
    for name in dict.fromkeys((DEFAULT_PROFILE, *profiles)):
        profile = profiles[name]
        if profile != PROFILES.get(name):
            comment = (comments or {}).get(name, "")
            lines += ["", *_table(f"profiles.{_key(name)}", profile, _weights_left_out(name, profiles), comment)]
    return "\n".join(lines).strip("\n")


def thresholds_to_paste(thresholds: Mapping[str, float], comments: Mapping[str, str]) -> str:
    """Return the lines of a config file that give profiles a threshold; weights stay what they are."""
    return "\n\n".join(
        f"[profiles.{_key(name)}]\n{_threshold(value, comments[name])}" for name, value in thresholds.items()
    )


def accepts(accepted: int, traces: int) -> str:
    """Return the comment on a threshold that says what it rests on."""
    few = f"; fewer than {FEW_TRACES} traces say little" if traces < FEW_TRACES else ""
    return f"accepts {accepted} of {traces}{few}"


def _threshold(value: float, comment: str) -> str:
    return f"threshold = {value!r}  # {comment}" if comment else f"threshold = {value!r}"


def _weights_left_out(name: str, profiles: Mapping[str, Profile]) -> Profile | None:
    """Return a profile whose weights this one has when the file gives none; None: the file must give them."""
    if name in PROFILES:
        return PROFILES[name]
    # A new profile takes the default's. Which ones these are depends on the file where it changes the default, too.
    built_in = PROFILES[DEFAULT_PROFILE]
    return built_in if profiles[DEFAULT_PROFILE].weights == built_in.weights else None


def _table(key: str, profile: Profile, left_out: Profile | None, comment: str) -> Iterator[str]:
    given = left_out is None or profile.weights != left_out.weights
    if profile.threshold is not None or not given:
        yield f"[{key}]"
    if profile.threshold is not None:
        yield _threshold(profile.threshold, comment)
    if given:
        yield f"[{key}.weights]"
        yield from (f"{name} = {weight!r}" for name, weight in asdict(profile.weights).items())


def _key(name: str) -> str:
    """Return a name as a TOML key; in quotes, with every character escaped that is not printable."""
    if _BARE_KEY.fullmatch(name):
        return name
    return '"' + "".join(map(_escaped, name)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
