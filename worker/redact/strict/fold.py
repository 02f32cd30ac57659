"""Texts without disguises: full-width letters, invisible characters, and the escapes of JSON, HTML, URLs, terminals."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple


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


_FEW: Final = 16


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
    if len(changed) <= _FEW and sum(map(text.count, changed)) < len(text) // 4:
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
