"""The strict rules of redaction: they find secrets that the reference's patterns miss.

A text goes through these passes (called by `documents.py`):

1. The reference's patterns insert their markers.
2. Disguises and escapes are undone (fold.py), and the reference's patterns run again.
3. One automaton looks for the hints of all rules; the rules whose hints it finds read the text, in the order of _RULES:
   secrets recognisable by their form (forms.py), headers, URLs and protocols, commands and calls (commands.py),
   values assigned to a name (assigned.py), secrets in prose (prose.py), personal numbers (forms.py), and what
   the reference leaves after its markers. Names and values are judged in names.py.
4. Overlapping places become one marker in the original text (markers.py).
5. All of this repeats until the text no longer changes: markers reveal secrets after or between them.

In a document, members whose whole values are secrets are found too (names.py).
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Final

from worker.redact.markers import Found, Rule, bounded, most_secrets
from worker.redact.strict.assigned import ASSIGNED
from worker.redact.strict.commands import COMMANDS, REQUESTS
from worker.redact.strict.forms import IDENTIFIERS, KEYS, PERSONAL
from worker.redact.strict.names import is_value, looks_secret
from worker.redact.strict.prose import IN_PROSE

_RESIDUE: Final = re.compile(
    r"\[REDACTED:password\](?:"
    # the rest of an unquoted value at the end of its line; a value with a tag before it: `!!str x`
    r"(?<=: \[REDACTED:password\])(?P<rest>(?=[^\s\[])\S{3,300}+)(?m:$)"
    r"|(?<=: \[REDACTED:password\])[ ](?P<tagged>[^\s=\[]{6,300}+=*+)(?=[ \t]{0,4}+(?m:$))"
    r"|\n[ \t]{1,40}+(?P<block>[^\s:=#-][^\s:=]{5,300}+=*+)(?m:$)"
    r"|[ ]?(?:\|\||\?\?|or\b|!!str\b|=)[ ]?[\"']?(?P<or>[^\s\"']{4,200}+)"
    # of a quoted value with an escaped quote, of one quoted by &quot;
    r"|(?P<quoted>[^\s'\"`,;)}\[\]&@:/?=\\]{2,300}+)(?=\n?[\"'])"
    r"|;(?P<entity>[^\s\"'`&;\[]{2,300}+)(?=[\"'])"
    # of `**password:** x`, of a connection string
    r"|(?<=:\[REDACTED:password\])[ \t]{1,4}+`?(?P<bold>[^\s\"'`|\[]{4,300}+)"
    r"|(?<==\[REDACTED:password\])(?P<pair>[^\s;\"\[]{1,100}+)(?=;[ ]?[A-Za-z][A-Za-z ]{1,40}=))"
)
"""The rest of a password that the reference left after its marker."""
_CALL: Final = re.compile(r"[A-Za-z_.]+\(")
"""After a type: `password: str = Field(min_length=8)`."""
_RESIDUE_CHECKS: Final[dict[str, Callable[[str], bool]]] = {
    "tagged": looks_secret,
    "block": looks_secret,
    "or": lambda value: is_value(value) and not _CALL.match(value),
}
_BOLD: Final = re.compile(r"\*\*[\w. -]{1,40}:\Z")


def _residues(text: str, _lowered: str) -> Iterator[Found]:
    """Yield the rest of each password that continues after its marker."""
    for match in _RESIDUE.finditer(text):
        group = match.lastgroup or ""
        if not _RESIDUE_CHECKS.get(group, bool)(match[group]):
            continue
        if group != "bold" or _BOLD.search(text, max(0, match.start() - 44), match.start()):
            yield Found(*match.span(group), "password")


_SECRETS: Final = (
    *KEYS,
    *REQUESTS,
    *ASSIGNED,
    *COMMANDS,
    *IN_PROSE,
    *PERSONAL,
    Rule(r"\[redacted:password\]", _residues),
)
"""The rules of every privacy level, in the order in which they run."""
_RULES: Final = (*_SECRETS, *IDENTIFIERS)


@cache
def _hints() -> Any:
    """Return RE2's automaton for all hints: one pass over a text says which of _RULES may find something."""
    import re2  # 1.5 MB, not needed by a worker with the reference's rules

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # bytes as they are, even of lone surrogates
    options.max_mem = 64 << 20
    hints = re2.Set.SearchSet(options)
    for hint, _ in _RULES:
        hints.Add(f"(?i:{hint})".encode())
    hints.Compile()
    return hints


_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

_SHORT: Final = 64
"""Names, ids and times of a trace repeat: results for texts of up to this many characters are cached."""


def find_secrets(text: str, level: str) -> list[Found]:
    """Return the places of secrets in a text without disguises; they may overlap."""
    return list(_found_in_short(text, level)) if len(text) <= _SHORT else _found(text, level)


@lru_cache(maxsize=4096)
def _found_in_short(text: str, level: str) -> tuple[Found, ...]:
    return tuple(_found(text, level))


def _found(text: str, level: str) -> list[Found]:
    if len(text) < 6 or (len(text) < 16 and text.replace(" ", "").replace("_", "").isalpha()):
        return []
    hinted = _hints().Match(text.encode("utf-8", "surrogatepass"))
    if not hinted:
        return []
    length, found = len(text), list[Found]()
    lowered = text.lower()
    if len(lowered) != len(text):  # because of one letter, İ
        lowered = text.translate(_LOWER)
    for number in sorted(hinted):
        if number >= len(_SECRETS) and level == "private":
            break
        places = bounded(_RULES[number].find(text, lowered), length)
        found += places
        if len(places) > most_secrets(length):  # the rest is one secret, so no later rule reads it
            end = places[-1].start
            text, lowered = text[:end], lowered[:end]
    return found
