"""A team's own redaction patterns, in time linear in the text for any pattern.

They run on RE2, which never backtracks: at worst it takes one step for each character and each instruction of a
pattern's program, so all programs together are limited (MOST_INSTRUCTIONS). For each match that it returns, RE2 may
read to the end of the line, so many matches on one long line could take quadratic time: after MOST_ON_A_LINE of them,
or after _STEPS, the rest of the line becomes one marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from worker.redact.markers import Found, put_markers

MOST_INSTRUCTIONS: Final = 4000
"""Limit for the programs of all patterns. RE2 takes up to 6 ns per instruction and byte of text: 25 s for 1 MiB."""

MOST_ON_A_LINE: Final = 200
_STEPS: Final = 1 << 23
_STEPS_A_CHARACTER: Final = 2048
"""Limit of the bytes read again after matches, times instructions, for all patterns: 12 s for 1 MiB."""

_NAME: Final = re.compile("[a-z][a-z0-9_]{0,63}")


class OwnPattern(NamedTuple):
    """A pattern and its replacement."""

    name: str  # the type under which its markers are counted
    replacement: str
    compiled: Any  # RE2's pattern

    @property
    def instructions(self) -> int:
        """Return the size of the pattern's RE2 program."""
        size: int = self.compiled.programsize
        return size


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
    steps = _STEPS + _STEPS_A_CHARACTER * len(text)
    for pattern in patterns:
        raw = text.encode("utf-8", "surrogatepass")
        places, steps = _byte_places(pattern, raw, steps)
        if places:
            found = [Found(*place, pattern.name) for place in _in_characters(places, raw, text)]
            text = put_markers(text, found, counts, pattern.replacement)
    return text


def _in_characters(places: list[tuple[int, int]], raw: bytes, text: str) -> Iterator[tuple[int, int]]:
    if len(raw) == len(text):
        yield from places
        return
    read = characters = 0
    for start, end in places:
        begin = characters + len(raw[read:start].decode("utf-8", "surrogatepass"))
        read, characters = end, begin + len(raw[start:end].decode("utf-8", "surrogatepass"))
        yield begin, characters


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
