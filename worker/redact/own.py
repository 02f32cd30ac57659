"""A team's own patterns of redaction, in time that is linear in the text whatever the patterns are.

They run on RE2, which never backtracks. But it may read to the end of the line for each match that it returns, so many
matches on one long line could still take quadratic time: after MOST_ON_A_LINE the rest of the line becomes one marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from worker.redact.markers import Found, put_markers

MOST_ON_A_LINE: Final = 200

_NAME: Final = re.compile("[a-z][a-z0-9_]{0,63}")


class OwnPattern(NamedTuple):
    """A pattern, the type under which its markers are counted, and the text that replaces what it finds."""

    name: str
    replacement: str
    compiled: Any


def own_pattern(name: str, pattern: str, replacement: str | None = None) -> OwnPattern:
    """Return the pattern, in RE2's syntax; a match ends with its line. `replacement`: by default [REDACTED:name].

    Raises ValueError for a name that is no word of a-z, 0-9 and _, and for a pattern that is wrong, that matches the
    empty text, or that finds its own replacement.
    """
    import re2  # 1.5 MB that only a team with patterns of its own needs

    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name; use a-z, 0-9 and _, at most 64 characters, such as customer_number")
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True  # what is read for a match ends with the line
    options.never_capture = True
    try:
        compiled = re2.compile(f"(?m:{pattern})".encode(), options)
    except re2.error as error:
        said = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"{said}; the syntax is RE2's, without back-references and lookarounds") from None
    if "\\C" in pattern:
        raise ValueError(r"\C would cut characters into bytes; use . instead")
    if compiled.search(b"") or any(match.start() == match.end() for match in compiled.finditer(b"a 1-\xc3\xa9")):
        raise ValueError("it matches the empty text; ask for one character at least")
    replacement = f"[REDACTED:{name}]" if replacement is None else replacement
    if compiled.search(replacement.encode()):
        raise ValueError(f"it finds its own replacement {replacement!r}; choose another one")
    return OwnPattern(name, replacement, compiled)


def replace_own(patterns: tuple[OwnPattern, ...], text: str, counts: dict[str, int]) -> str:
    """Return the text with the patterns' replacements, each pattern on the result of the one before.

    Markers that are there stay.
    """
    for pattern in patterns:
        found = list(_places(pattern, text))
        if found:
            text = put_markers(text, found, counts, pattern.replacement)
    return text


def _places(pattern: OwnPattern, text: str) -> Iterator[Found]:
    """Yield what a pattern finds, with places in characters."""
    raw = text.encode("utf-8", "surrogatepass")
    same = len(raw) == len(text)
    read = characters = 0
    for start, end in _byte_places(pattern.compiled, raw):
        if same:
            yield Found(start, end, pattern.name)
            continue
        begin = characters + len(raw[read:start].decode("utf-8", "surrogatepass"))
        read, characters = end, begin + len(raw[start:end].decode("utf-8", "surrogatepass"))
        yield Found(begin, characters, pattern.name)


def _byte_places(compiled: Any, raw: bytes) -> Iterator[tuple[int, int]]:
    place = line_end = on_line = 0
    while match := compiled.search(raw, place):
        start, place = match.span()
        if start >= line_end:
            newline = raw.find(b"\n", place)
            line_end, on_line = len(raw) if newline < 0 else newline, 0
        on_line += 1
        if on_line > MOST_ON_A_LINE:
            place = line_end
        if place > start:
            yield start, place
        elif place < len(raw):  # the empty text, by \b or the like
            place += 1
        else:
            return
