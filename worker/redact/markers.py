"""Places of secrets in a text: how a rule finds them, how many are examined, and the markers that replace them.

A rule has a pattern for one form of secrets, and a hint. One automaton looks for all hints at once (strict.py), so a
rule costs nothing in a text without its hint. Time is linear in the length of the text: every repeat in a pattern is
bounded or never backtracks, lookahead after a match is bounded, and so is the number of secrets of one rule.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Final, NamedTuple

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


def rule(kind: str, hint: str, pattern: re.Pattern[str], check: Callable[[str], bool] | None = None) -> Rule:
    """Return the rule for a pattern: the secret is its group `secret`, or the whole match, if `check` accepts it."""
    group = "secret" if "secret" in pattern.groupindex else 0

    def find(text: str, _lowered: str) -> Iterator[Found]:
        for match in pattern.finditer(text):
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
    pieces: list[str] = []
    done = 0
    for start, end, kind in _apart(_merged(found), text):
        pieces += (text[done:start], f"[REDACTED:{kind}]" if marker is None else marker)
        counts[kind] = counts.get(kind, 0) + 1
        done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _merged(found: list[Found]) -> list[Found]:
    merged: list[Found] = []
    for place in sorted(found):
        if merged and place.start < merged[-1].end:
            start, end, kind = merged[-1]
            kind = place.kind if kind == "password" else kind  # the more specific one
            merged[-1] = Found(start, max(end, place.end), kind)
        else:
            merged.append(place)
    return merged


def _apart(found: list[Found], text: str) -> Iterator[Found]:
    """Yield the places minus existing markers; the rest of a text (`bounded`), which may have many, includes them."""
    markers = [match.span() for match in MARKER.finditer(text)] if "[REDACTED:" in text else []
    starts, ends = [start for start, _ in markers], [end for _, end in markers]
    for start, end, kind in found:
        kept = markers[bisect_right(ends, start) : bisect_left(starts, end)]
        begin = start
        for marker_start, marker_end in kept if len(kept) <= 1000 else ():
            if marker_start > begin:
                yield Found(begin, marker_start, kind)
            begin = marker_end
        if begin < end:
            yield Found(begin, end, kind)


# -- a team's own patterns, in time linear in the text for any pattern
#
# They run on RE2, which never backtracks: at worst it takes one step for each character and each instruction of a
# pattern's program, so all programs together are limited (MOST_INSTRUCTIONS). For each match that it returns, RE2 may
# read to the end of the line, so many matches on one long line could take quadratic time: after MOST_ON_A_LINE of
# them, or too many steps, the rest of the line becomes one marker.

MOST_INSTRUCTIONS: Final = 4000
"""Limit for the programs of all patterns. RE2 takes up to 6 ns per instruction and byte of text: 25 s for 1 MiB."""

MOST_ON_A_LINE: Final = 200

_NAME: Final = re.compile("[a-z][a-z0-9_]{0,63}")


class OwnPattern(NamedTuple):
    """A pattern and its replacement."""

    name: str  # the type under which its markers are counted
    replacement: str
    compiled: Any  # RE2's pattern

    @property
    def instructions(self) -> int:
        """Return the size of the pattern's RE2 program."""
        return int(self.compiled.programsize)


def own_pattern(name: str, pattern: str, replacement: str | None = None) -> OwnPattern:
    """Return the pattern, in RE2's syntax; a match ends with its line. `replacement`: by default [REDACTED:name].

    Raises ValueError for a name that is not a word of a-z, 0-9 and _, and for a pattern that is invalid, matches the
    empty text, or finds its own replacement.
    """
    import re2  # 1.5 MB, needed only by a team with its own patterns

    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name; use a-z, 0-9 and _, at most 64 characters, such as customer_number")
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True  # no match reads beyond its line
    options.never_capture = True
    try:
        compiled = re2.compile(f"(?m:{pattern})".encode(), options)
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"{reason}; the syntax is RE2's, without back-references and lookarounds") from None
    if "\\C" in pattern:
        raise ValueError(r"\C would cut characters into bytes; use . instead")
    if compiled.search(b"") or any(match.start() == match.end() for match in compiled.finditer(b"a 1-\xc3\xa9")):
        raise ValueError("it matches the empty text; ask for one character at least")
    replacement = f"[REDACTED:{name}]" if replacement is None else replacement
    if compiled.search(replacement.encode()):
        raise ValueError(f"it finds its own replacement {replacement!r}; choose another one")
    return OwnPattern(name, replacement, compiled)


def replace_own(patterns: tuple[OwnPattern, ...], text: str, counts: dict[str, int]) -> str:
    """Return the text after replacement by each pattern in turn; existing markers are kept."""
    # Limit of the bytes read again after matches, times instructions, for all patterns: 12 s for 1 MiB.
    steps = (1 << 23) + 2048 * len(text)
    for pattern in patterns:
        raw = text.encode("utf-8", "surrogatepass")
        places, steps = _byte_places(pattern, raw, steps)
        if places:
            parts = pairwise([0, *chain.from_iterable(places)])
            lengths = (len(raw[start:end].decode("utf-8", "surrogatepass")) for start, end in parts)
            starts_and_ends = accumulate(lengths)  # in characters
            found = [
                Found(start, end, pattern.name) for start, end in zip(starts_and_ends, starts_and_ends, strict=True)
            ]
            text = put_markers(text, found, counts, pattern.replacement)
    return text


def _byte_places(pattern: OwnPattern, raw: bytes, steps: int) -> tuple[list[tuple[int, int]], int]:
    """Return the places that a pattern finds, and the steps left."""
    search, instructions = pattern.compiled.search, pattern.instructions
    found: list[tuple[int, int]] = []
    place = line_end = on_line = 0
    while match := search(raw, place):
        start, place = match.span()
        if start >= line_end:
            newline = raw.find(b"\n", place)
            line_end, on_line = len(raw) if newline < 0 else newline, 0
        on_line += 1
        steps -= (line_end - place) * instructions
        if on_line > MOST_ON_A_LINE or steps < 0:
            place = line_end
        if place > start:
            found.append((start, place))
        elif place < len(raw):  # an empty match, by \b or the like
            place += 1
        else:
            break
    return found, steps
