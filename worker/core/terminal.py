r"""Escape the characters that control a terminal, or hide or reverse text.

All text from a record, a broker, a file or a file name passes through here before it is printed or logged.
"""

import re
from typing import Final

_UNSAFE: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1: a terminal obeys ESC and its 8-bit twin U+009B
    "\xad\u200b\u2060-\u2065\ufeff"  # hide in a word
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # turn the direction of what follows
    "\u2028\u2029"  # end a line for some readers
    "\u180e\ufff9-\ufffb\U0001343c-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # format scripts and music
    "\U000e0000-\U000e007f"  # tags: a whole text that stays invisible
    "\ud800-\udfff\ufffe\uffff"  # lone surrogates and non-characters: neither UTF-8 nor XML can carry them
    "]"
)
"""The joiners U+200C and U+200D stay: Persian and Hindi words and some emoji are written with them."""


def number_of(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 trace", "2,000 traces". `many`: the plural, if it is irregular."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def clean(text: str, keep: str = "") -> str:
    r"""Return the text with its unsafe characters as Python escapes them (`\x1b`, `\u202e`), except those in `keep`.

    `keep`: "\n" if the text may have several lines.
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def clean_json(text: str) -> str:
    r"""Return the same JSON with its unsafe characters escaped (`\u001b`); line breaks between values stay."""
    return _UNSAFE.sub(_escape, text)


def clean_json_bytes(document: bytes) -> bytes:
    """Return the same JSON, as `clean_json` does; `document` is UTF-8."""
    return clean_json(document.decode()).encode()


def _escape(match: re.Match[str]) -> str:
    if match[0] in "\t\r\n":  # only between values: a string may not hold them
        return "\n" if match[0] == "\n" else " "
    raw = match[0].encode("utf-16-be", "surrogatepass")  # two escapes beyond U+FFFF
    return "".join(f"\\u{raw[at : at + 2].hex()}" for at in range(0, len(raw), 2))
