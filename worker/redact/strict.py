"""The strict rules of redaction: they find secrets that the reference's patterns miss.

A text goes through these passes (called by `documents.py`):

1. The reference's patterns insert their markers.
2. Disguises and escapes are undone (`fold`), and the reference's patterns run again.
3. One automaton looks for the hints of all rules; the rules whose hints it finds read the text, in the order of _RULES:
   secrets recognisable by their form (forms.py), values assigned to a name (assigned.py), secrets in prose
   (prose.py), and what the reference leaves after its markers. Names and values are judged in names.py. The patterns
   and words are in strict.toml.
4. Overlapping places become one marker in the original text (markers.py).
5. All of this repeats until the text no longer changes: markers reveal secrets after or between them.

In a document, members whose whole values are secrets are found too (documents.py).
"""

import re
import string
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from worker.redact.assigned import ASSIGNED
from worker.redact.forms import IDENTIFIERS, SECRETS
from worker.redact.markers import Found, Rule, bounded, most_secrets, put_markers
from worker.redact.names import is_value, looks_secret
from worker.redact.prose import IN_PROSE
from worker.redact.reference import found_by_reference


def redact_strictly(text: str, level: str, counts: dict[str, int]) -> str:
    """Return the text with the markers of the strict rules, and add them to `counts`."""
    folded = fold(text)
    found = find_secrets(folded.text, level)
    if folded.text is not text:
        found += found_by_reference(folded.text, level)
        found = [Found(*folded.original(start, end), kind) for start, end, kind in found]
    return put_markers(text, found, counts) if found else text


# -- disguises: full-width letters, invisible characters, and the escapes of JSON, HTML, URLs and terminals


class Folded(NamedTuple):
    """A text without disguises and escapes, and the boundaries of its parts (empty: the same in both texts)."""

    text: str
    places: Sequence[int]  # in `text`
    originals: Sequence[int]  # in the original text

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Return the place in the original text."""
        if not self.places:
            return start, end
        first, last = bisect_right(self.places, start) - 1, bisect_left(self.places, end)
        begin = self.originals[first] + (start - self.places[first] if self._alike(first) else 0)
        if self.places[last] == end or not self._alike(last - 1):
            return begin, self.originals[last]
        return begin, self.originals[last - 1] + end - self.places[last - 1]

    def _alike(self, part: int) -> bool:
        """Return whether a part has as many characters as its original."""
        return self.places[part + 1] - self.places[part] == self.originals[part + 1] - self.originals[part]


_ALSO_FOLDED: Final = {
    ord(character): to
    for to, characters in {
        '"': "\u201c\u201d\u201e\u201f\u00ab\u00bb",
        "'": "\u2018\u2019\u201a\u201b",
        "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
        ":": "\u2236",
        "/": "\u2044\u2215",
        "": "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0",
    }.items()
    for character in characters
}
"""Characters that NFKC keeps, but that a reader sees as ASCII or not at all."""

_ANSI: Final = r"(?:\x1b|\\{1,8}+(?:u001[bB]|x1[bB]|033|e))\[[0-9;:?]{0,20}+[A-Za-z]"
"""Colours and the like of a terminal, raw or escaped."""
_ESCAPED: Final = rf"{_ANSI}|\\{{1,8}}+(?:u[0-9A-Fa-f]{{4}}|[nrt/])|&(?:quot|apos|amp|lt|gt|#39|#34|#x27|#x22);"
_ESCAPE: Final = re.compile(_ESCAPED)
_URL_ESCAPED: Final = "%22(?:%3A)?|%(?:7B|7D|5B|5D|2C)(?=%|[0-9])"
_URL_JSON: Final = re.compile("%22(?:%3A|:)(?:%|[0-9])|%22%3A(?:%20|[+])", re.IGNORECASE)
"""Members of JSON in a URL or a form. Elsewhere such an escape belongs to its value."""
_UNESCAPED: Final = {
    "n": "\n", "r": "\n", "/": "/", "t": "\t",
    "%22": '"', "%22%3A": '":', "%7B": "{", "%7D": "}", "%5B": "[", "%5D": "]", "%2C": ",",
    "&quot;": '"', "&#34;": '"', "&#x22;": '"', "&apos;": "'", "&#39;": "'", "&#x27;": "'",
    "&amp;": "&", "&lt;": "<", "&gt;": ">",
}  # fmt: skip


def fold(text: str) -> Folded:
    """Return the text with NFKC's ASCII for full-width and similar characters, and without invisible ones.

    Escapes of JSON and HTML are decoded too: after an escaped line break, DB_PASSWORD must not read as nDB_PASSWORD.
    """
    changed: dict[str, str] = {}
    if not text.isascii():
        changed = {character: to for character in set(text) if (to := _folded(character)) != character}
    url = "%22" in text and _URL_JSON.search(text) is not None
    if url or (("\\" in text or "&" in text or "\x1b" in text) and _ESCAPE.search(text)):
        return _fold_parts(text, changed, "%" if url else "")
    if not changed:
        return Folded(text, [], [])
    if all(len(to) == 1 for to in changed.values()):
        return Folded(text.translate({ord(character): to for character, to in changed.items()}), [], [])
    if len(changed) <= 16 and sum(map(text.count, changed)) < len(text) // 4:
        return _fold_parts(text, changed, "")  # fewer parts than characters
    folded = list(map(changed.get, text, text))
    return Folded("".join(folded), list(accumulate(map(len, folded), initial=0)), range(len(text) + 1))


def _fold_parts(text: str, changed: dict[str, str], url: str) -> Folded:
    """Fold with escapes. `url`: a % if URL escapes are decoded too."""
    odd = "".join(map(re.escape, sorted(changed)))
    escaped = f"{_ESCAPED}|(?i:{_URL_ESCAPED})" if url else _ESCAPED
    pattern = f"{escaped}|[^{odd}\x1b\\\\&{url}]++|[\x1b\\\\&{url}]" + (f"|[{odd}]" if odd else "")
    parts = re.findall(pattern, text, re.DOTALL)
    folded = [
        changed[part] if part in changed else part if part[0] not in "\x1b\\&%" else _unescaped(part) for part in parts
    ]
    places, originals = (list(accumulate(map(len, pieces), initial=0)) for pieces in (folded, parts))
    return Folded("".join(folded), places, originals)


def _unescaped(part: str) -> str:
    if len(part) == 1:
        return part
    if part[-1:].isalpha() and "[" in part:
        return ""
    if part[0] == "%":
        return _UNESCAPED.get(part.upper(), part)
    sign = part.lstrip("\\")
    if sign[0] == "u":
        to = _folded(chr(int(sign[1:], 16)))
        return to if to.isascii() else part
    return _UNESCAPED[sign]


@lru_cache(maxsize=4096)
def _folded(character: str) -> str:
    if character.isascii():
        return character
    code = ord(character)
    if code in _ALSO_FOLDED:
        return _ALSO_FOLDED[code]
    if unicodedata.category(character) == "Cf" or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:
        return ""
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    compatible = unicodedata.normalize("NFKC", character)
    # Signs such as \u2487, "(20)", would make a text four times as long.
    return compatible if compatible.isascii() and len(compatible) <= 2 else character


# -- the rules

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


_SECRETS: Final = (*SECRETS, *ASSIGNED, *IN_PROSE, Rule(r"\[redacted:password\]", _residues))
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


def find_secrets(text: str, level: str) -> list[Found]:
    """Return the places of secrets in a text without disguises; they may overlap."""
    # Names, ids and times of a trace repeat.
    return [*(_found_in_short if len(text) <= 64 else _found)(text, level)]


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


_found_in_short: Final = lru_cache(maxsize=4096)(_found)
