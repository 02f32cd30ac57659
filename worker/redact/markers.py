"""Places of secrets in a text: how a rule finds them, how many are examined, and the markers that replace them.

A rule has a pattern for one form of secrets, and a hint. One automaton looks for all hints at once (strict/), so a
rule costs nothing in a text without its hint. Time is linear in the length of the text: every repeat in a pattern is
bounded or never backtracks, lookahead after a match is bounded, and so is the number of secrets of one rule.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

MARKER: Final = re.compile(r"\[REDACTED:[a-z0-9_]{1,64}\]")


class Found(NamedTuple):
    """A place in a text."""

    start: int
    end: int
    kind: str  # type of the marker


Find = Callable[[str, str], Iterator[Found]]
"""Yields the places of secrets in a text. The second argument is the text in lower case."""


class Rule(NamedTuple):
    """How secrets of one form are found."""

    hint: str
    """A case-insensitive RE2 pattern that matches every text in which `find` finds something."""
    find: Find


def rule(kind: str, hint: str, pattern: str, check: Callable[[str], bool] | None = None) -> Rule:
    """Return the rule for a pattern: the secret is its group `secret`, or the whole match, if `check` accepts it."""
    compiled = re.compile(pattern, re.ASCII)
    group = "secret" if "secret" in compiled.groupindex else 0

    def find(text: str, _lowered: str) -> Iterator[Found]:
        for match in compiled.finditer(text):
            secret = match[group]
            if secret and (check is None or check(secret)):
                yield Found(*match.span(group), kind)

    return Rule(hint, find)


def most_secrets(length: int) -> int:
    """Return how many secrets of one kind are examined in a text of this many characters, so that time is bounded.

    One in 128 characters on average is more than any human-written text has; the rest of the text is one secret.
    """
    return 1000 + length // 128


def most_names(length: int) -> int:
    """Return how many names of secrets are examined in a text, for the same reason."""
    return 20_000 + length // 64


def bounded(places: Iterator[Found], length: int) -> list[Found]:
    """Return the places of a rule; once the limit is reached, the rest of the text is one place."""
    found = list(islice(places, most_secrets(length)))
    if len(found) == most_secrets(length):
        found.append(Found(found[-1].end, length, found[-1].kind))
    return found


def put_markers(text: str, found: list[Found], counts: dict[str, int], marker: str | None = None) -> str:
    """Return the text with markers in the places, one for overlapping places; existing markers are kept.

    `marker`: the replacement; None: the marker of the type.
    """
    kept = [match.span() for match in MARKER.finditer(text)] if "[REDACTED:" in text else []
    pieces: list[str] = []
    done = 0
    for start, end, kind in _apart(_merged(found), kept):
        pieces += (text[done:start], f"[REDACTED:{kind}]" if marker is None else marker)
        counts[kind] = counts.get(kind, 0) + 1
        done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _merged(found: list[Found]) -> Iterator[Found]:
    last: Found | None = None
    for place in sorted(found):
        if last is not None and place.start < last.end:
            kind = place.kind if last.kind == "password" else last.kind  # the more specific one
            last = Found(last.start, max(last.end, place.end), kind)
        else:
            if last is not None:
                yield last
            last = place
    if last is not None:
        yield last


_MOST_KEPT: Final = 1000
"""Markers that are kept within one place. Only the rest of a text (`bounded`) has more."""
_LONG_PLACE: Final = _MOST_KEPT * len("[REDACTED:ip]")


def _apart(found: Iterator[Found], kept: list[tuple[int, int]]) -> Iterator[Found]:
    """Yield the places minus existing markers; the rest of a text (`bounded`) includes them."""
    marker = 0
    starts = [start for start, _ in kept]
    for start, end, kind in found:
        begin = start
        if end - start > _LONG_PLACE and bisect_left(starts, end) - bisect_left(starts, begin) > _MOST_KEPT:
            yield Found(start, end, kind)
            continue
        while marker < len(kept) and kept[marker][1] <= begin:
            marker += 1
        place = marker
        while place < len(kept) and kept[place][0] < end:
            if kept[place][0] > begin:
                yield Found(begin, kept[place][0], kind)
            begin = max(begin, kept[place][1])
            place += 1
        if begin < end:
            yield Found(begin, end, kind)
