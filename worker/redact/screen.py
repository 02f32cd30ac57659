"""The screen: which rules match in a document that other agents will read.

The rules for prompt injection come from the KnowledgePulse SDK's classifier for skills (OpenKnowledgePulse, commit
9ff0e3f4, packages/sdk/src/utils/injection-classifier.ts: patterns, names, weights, thresholds). In ASCII texts the same
rules match, except that the http of a URL may be upper-case here. In other texts they also match a phrase disguised by
zero-width characters, full-width letters or the like, and they accept directional formatting that is closed. The rules
for hidden text find characters that a person does not see and a model reads.

Time is linear in the length of the document. No pattern reads a character from more than a bounded number of places: a
run is read only from its beginning, and unbounded repeats never backtrack.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache
from itertools import islice
from typing import Any, Final

import msgspec

from worker.core.findings import SCREEN_DEFAULT, SCREEN_RULES, SCREEN_WEIGHTS, Screening

SUSPICIOUS: Final = 0.3
REJECTED: Final = 0.6
"""The SDK's verdict thresholds."""

_MOST: Final = sum(SCREEN_WEIGHTS.values())


def screen_texts(texts: Iterable[str], rules: Set[str] = SCREEN_DEFAULT) -> Screening:
    """Screen some texts. Each text begins a line."""
    texts = list(texts)
    found: set[str] = set()
    # One text: a document may have 300,000 of them. No pattern crosses the separator.
    whole = _SEPARATOR.join(["", *texts])
    characters = frozenset() if whole.isascii() else frozenset(map(ord, set(whole)))  # most need no closer look
    if not characters.isdisjoint(_not_seen()):
        found.update(name for name, finds in _HIDDEN_TEXT.items() if finds(whole))
    found.update(name for name, has in _RUNS.items() if has(whole))
    for read in _readings(whole, characters):
        found.update(_phrases(read))
    if any(_foreign_url(text) for text in texts if "```" in text):
        found.add("suspicious-url-in-code-block")
    matched = tuple(name for name in SCREEN_RULES if name in found and name in rules)
    score = min(sum(SCREEN_WEIGHTS.get(name, 0.0) for name in matched) / _MOST, 1.0)
    verdict = "rejected" if score >= REJECTED else "suspicious" if score >= SUSPICIOUS else "safe"
    return Screening(matched, math.floor(score * 1000 + 0.5) / 1000, verdict)


def screen_json(raw: bytes, rules: Set[str] = SCREEN_DEFAULT) -> Screening:
    """Screen all strings of a JSON document: values, member names, and duplicates. `raw` must be valid JSON."""
    strings: list[str] = msgspec.json.decode(b"[%b]" % b",".join(_STRING.findall(raw)))
    return screen_texts(strings, rules)


def place_of(document: dict[str, Any], rules: Set[str]) -> str:
    """Return the first member, or member of a step, in which one of the rules matches, such as steps.3.content."""

    def first(members: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
        return next(
            (member for member in members if screen_json(msgspec.json.encode(member[1]), rules).rules), ("", "")
        )

    name, value = first(document.items())
    if name != "steps":
        return str(name)
    index, step = first(enumerate(value))
    return f"steps.{index}.{first(step.items())[0]}"


_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_SEPARATOR: Final = "\n\0\n"

# -- hidden text, in the unchanged text

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
def _not_seen() -> frozenset[int]:
    ranges = re.findall("(.)(?:-(.))?", f"{_DIRECTIONS}{_TAGS}{_ZERO_WIDTH}\u2028\u2029\ufff9-\ufffb", re.DOTALL)
    return frozenset(code for first, last in ranges for code in range(ord(first), ord(last or first) + 1))


# Three of the SDK's four characters; no script has six of the others in a row, and emoji have at most two.
_ZERO_WIDTH_RUN: Final = re.compile(f"[\u200b-\u200d\ufeff]{{3}}|[{_ZERO_WIDTH}]{{6}}")
_MOST_STRAY: Final = 5
"""Maximum number of invisible characters in a document at places where no script needs them, such as a pasted one."""
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
    return sum(1 for _ in islice(_STRAY.finditer(text), _MOST_STRAY + 1)) > _MOST_STRAY


_DIRECTION_OVERRIDE: Final = re.compile("[\u202d\u202e]")
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

    Software that writes Arabic or Hebrew closes each one; the SDK's pattern matches all.
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
    "direction-override": _DIRECTION_OVERRIDE.search,
    "tag-characters": lambda text: any(match[1] for match in _TAG.finditer(text)),
    "invisible-in-word": _INVISIBLE_IN_WORD.search,
}

_BASE64: Final = bytes(
    65 if byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=" else 32 for byte in range(256)
)
# A substring search is linear; a pattern would start again at each character of a shorter run.
_RUNS: Final[dict[str, Callable[[str], bool]]] = {
    "long-base64-block": lambda text: b"A" * 100 in text.encode("utf-8", "surrogatepass").translate(_BASE64),
    "excessive-whitespace-encoding": lambda text: " " * 21 in text.replace("\t", " "),
}

# -- phrases, in lower case and without disguises


_UNSEEN: Final = "\ufeff"
"""Stands for each invisible character."""


@cache  # 2 ms, for the first text that is not ASCII
def _undisguised() -> dict[int, str]:
    """Return the replacement of each character: the ASCII of its compatibility form (NFKC), or _UNSEEN.

    By character, since NFKC of a text takes quadratic time if many combining marks follow each other (CPython 3.11).
    """
    compatible = (
        (0xA0, 0x300), (0x1D00, 0x1DC0), (0x2000, 0x2190), (0x2460, 0x2500), (0x3000, 0x3001), (0x3200, 0x3400),
        (0xFB00, 0xFB07), (0xFE10, 0xFE70), (0xFF01, 0xFFE7), (0x1D400, 0x1D800), (0x1F100, 0x1F200),
    )  # fmt: skip
    forms = {code: unicodedata.normalize("NFKC", chr(code)) for block in compatible for code in range(*block)}
    return {code: form for code, form in forms.items() if form.isascii()} | dict.fromkeys(_not_seen(), _UNSEEN)


def _readings(text: str, characters: Set[int]) -> list[str]:
    """Return the text in lower case without invisible characters, and again with a space in place of each."""
    if characters and not characters.isdisjoint(_undisguised()):
        text = text.translate(_undisguised())
    text = text.lower()
    return [text.replace(_UNSEEN, seen) for seen in ("", " ")] if _UNSEEN in text else [text]


_LITERALS: Final = {
    "llama-inst-tag": "[inst]",
    "llama-inst-close-tag": "[/inst]",
    "chatml-im-start": "<|im_start|>",
    "chatml-im-end": "<|im_end|>",
    "llama-sys-open": "<<sys>>",
    "llama-sys-close": "<</sys>>",
    "system-tag-bracket": "[system]",
}

_PATTERNS: Final = {
    name: re.compile(pattern)
    for name, pattern in {
        "ignore-previous-instructions": r"ignore\s++(?:all\s++)?previous\s++instructions",
        "forget-instructions": r"forget\s++(?:all\s++)?(?:(?:your|prior)\s++)?instructions",
        "disregard-instructions": r"disregard\s++(?:all\s++)?(?:(?:your|above)\s++)?instructions",
        "override-prompt": r"override\s++(?:(?:your|system)\s++)?prompt",
        "new-updated-instructions": r"(?:new|updated)\s++instructions\s*+:",
        "from-now-on-you": r"from\s++now\s++on,?\s++you",
        "markdown-role-header": r"###\s*+(?:system|human|assistant)\s*+:",
        "send-data-pattern": r"send\s++(?:this|the|all)\s++(?:to|via)(?![0-9a-z_])",
        "output-to-endpoint": r"output\s++(?:(?:to|the)\s++)++(?:following|this)\s++(?:url|endpoint|webhook)",
    }.items()
}

_AT_LINE_START: Final = {
    "you-are-now": r"you\s++are\s++now\s()",
    "pretend-to-be": r"pretend\s++(?:you\s++are|to\s++be)()",
    "act-as": r"act\s++as\s()",
    "imagine-you-are": r"imagine\s++you\s++are()",
}
"""Each has a group, which tells which phrase begins a line. A phrase may continue on the next line."""
_LINE: Final = re.compile(rf"\n[^\S\n]*+(?:[-*>][^\S\n]*+)?(?={'|'.join(_AT_LINE_START.values())})")


def _phrases(text: str) -> Iterator[str]:
    yield from (name for name, literal in _LITERALS.items() if literal in text)
    yield from (name for name, pattern in _PATTERNS.items() if pattern.search(text))
    names = (*_AT_LINE_START,)
    yield from (names[line.lastindex - 1] for line in _LINE.finditer(text) if line.lastindex)


_KNOWN_HOSTS: Final = (
    "localhost", "127.0.0.1", "example.com", "example.org", "github.com", "githubusercontent.com", "npmjs.com",
    "knowledgepulse.org", "openknowledgepulse.org", "schemas.openknowledgepulse.org",
)  # fmt: skip
"""Hosts that the SDK trusts, with their subdomains."""

_URL_HOST: Final = re.compile(r"https?://([^\s/)\"'`]++)")
_PORT: Final = re.compile(r":[0-9]++\Z")


def _foreign_url(text: str) -> bool:
    """Return whether a URL in a fenced code block has an unknown host."""
    blocks = text.lower().split("```")[1:-1:2]
    hosts = {_PORT.sub("", host) for block in blocks for host in _URL_HOST.findall(block)}
    return any(host not in _KNOWN_HOSTS and not host.endswith(_SUBDOMAINS) for host in hosts)


_SUBDOMAINS: Final = tuple(f".{host}" for host in _KNOWN_HOSTS)
