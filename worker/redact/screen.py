"""The screen: find text in a document that a person does not see and a model reads.

Its rules find invisible characters, directional formatting that is not closed, and variation selectors, wherever no
writing and no emoji needs them. They use no model and do not read what a text says.

Time is linear in the length of the document: a run is read only from its beginning, and no unbounded repeat backtracks.
"""

import re
from collections.abc import Callable, Iterable, Set
from functools import cache
from itertools import islice
from typing import Any, Final

import msgspec

from worker.core.records import SCREEN_HIDDEN, SCREEN_RULES, Screening


def screen_texts(texts: Iterable[str], rules: Set[str] = frozenset(SCREEN_RULES)) -> Screening:
    """Screen some texts. Each text begins a line."""
    # One text: a document may have 300,000 of them. No pattern crosses the separator.
    whole = _SEPARATOR.join(["", *texts])
    if whole.isascii() or _not_seen().isdisjoint(whole):  # most need no closer look
        return Screening(())
    return Screening(tuple(name for name in SCREEN_RULES if name in rules and _HIDDEN_TEXT[name](whole)))


def screen_json(raw: bytes, rules: Set[str] = frozenset(SCREEN_RULES)) -> Screening:
    """Screen all strings of a JSON document: values, member names, and duplicates. `raw` must be valid JSON."""
    strings: list[str] = msgspec.json.decode(b"[%b]" % b",".join(_STRING.findall(raw)))
    return screen_texts(strings, rules)


def place_of(document: dict[str, Any]) -> str:
    """Return the first member, or member of a step, with hidden text (SCREEN_HIDDEN), such as steps.3.content."""

    def first(members: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
        return next(
            (member for member in members if screen_json(msgspec.json.encode(member[1]), SCREEN_HIDDEN).rules), ("", "")
        )

    name, value = first(document.items())
    if name != "steps":
        return str(name)
    index, step = first(enumerate(value))
    return f"steps.{index}.{first(step.items())[0]}"


_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_SEPARATOR: Final = "\n\0\n"

_DIRECTIONS: Final = "\u202a-\u202e\u2066-\u2069"
_TAGS: Final = "\U000e0000-\U000e007f"
_ZERO_WIDTH: Final = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0080-\U000e0fff"
)
"""For use in a character class: Unicode's Default_Ignorable_Code_Point (DerivedCoreProperties.txt), in three parts."""

_FLAGS: Final = tuple(
    "\U0001f3f4" + "".join(chr(0xE0000 + ord(letter)) for letter in code) + "\U000e007f"
    for code in ("gbeng", "gbsct", "gbwls")
)
"""England, Scotland, Wales: the only emoji with tags that Unicode recommends (emoji-test.txt, RGI)."""


@cache
def _not_seen() -> frozenset[str]:
    ranges = re.findall("(.)(?:-(.))?", f"{_DIRECTIONS}{_TAGS}{_ZERO_WIDTH}\u2028\u2029\ufff9-\ufffb", re.DOTALL)
    return frozenset(chr(code) for first, last in ranges for code in range(ord(first), ord(last or first) + 1))


# No script has three of the first characters in a row, nor six of the others; emoji have at most two.
_ZERO_WIDTH_RUN: Final = re.compile(f"[\u200b-\u200d\ufeff]{{3}}|[{_ZERO_WIDTH}]{{6}}")
_SELECTORS: Final = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
# Variation selectors choose a form of the character before them. Letters, blanks, selectors and ASCII signs have no
# forms, except the digits, # and * of keycaps; emoji have only the last two forms. Then: operators and reserved signs.
_STRAY: Final = re.compile(
    f'(?<=[\\s!"$-)+-/:-~{_SELECTORS}\u00c0-\u024f\u0370-\u052f])[{_SELECTORS}]'
    "|(?<=[\U0001f000-\U0001faff])[\ufe00-\ufe0d\U000e0100-\U000e01ef]"
    "|[\u2061-\u2065\u206a-\u206f\ufff0-\ufff8\U000e0080-\U000e00ff\U000e01f0-\U000e0fff]"
)


def _hides_text(text: str) -> bool:
    """Return whether invisible characters carry a message: a run, or too many stray ones at any distance."""
    if _ZERO_WIDTH_RUN.search(text):
        return True
    # A pasted text may have some at places where no script needs them.
    return sum(1 for _ in islice(_STRAY.finditer(text), 6)) > 5


_TAG: Final = re.compile(f"(?:{'|'.join(_FLAGS)})|([{_TAGS}])")
# The invisible characters that the SDK's sanitizer rejects, where no script needs them. U+202F is a space.
_INVISIBLE_IN_WORD: Final = re.compile(
    "(?<=[0-9A-Za-z])[\u200b-\u200f\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb]++(?=[0-9A-Za-z])"
)
_DIRECTION: Final = re.compile(f"[{_DIRECTIONS}]")
_LINE_END: Final = re.compile("[\n\r\u2029]")
_OPENS: Final = dict.fromkeys("\u202a\u202b", "\u202c") | dict.fromkeys("\u2066\u2067\u2068", "\u2069")


def _direction_left_open(text: str) -> bool:
    """Return whether the text has an override, or an embedding or isolate that is not closed in its line.

    Software that writes Arabic or Hebrew closes each one.
    """
    closing: list[str] = []
    at = 0
    for match in _DIRECTION.finditer(text):
        if closing and _LINE_END.search(text, at, match.start()):
            return True
        at, character = match.end(), match[0]
        if character in _OPENS:
            closing.append(_OPENS[character])
        elif not closing or closing.pop() != character:  # includes an override, which closes nothing
            return True
    return bool(closing)


_HIDDEN_TEXT: Final[dict[str, Callable[[str], object]]] = {
    "bidi-override-chars": _direction_left_open,
    "zero-width-steganography": _hides_text,
    "direction-override": re.compile("[\u202d\u202e]").search,
    "tag-characters": lambda text: any(match[1] for match in _TAG.finditer(text)),
    "invisible-in-word": _INVISIBLE_IN_WORD.search,
}
