"""An independent, slow reading of the redaction rules, and texts to compare on.

The rules are read as JavaScript reads them: over UTF-16 code units, one naive pattern after the other, with
JavaScript's white space spelt out. Nothing here cares about time.
"""

import random
import re
from typing import Any

_WHITE = "".join(map(chr, [*range(9, 14), 0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F]))
_WHITE += "\u3000\ufeff"
_ENDS_URL = "'\"`,)}]"
_ENDS_PATH = "'\"`,;)}]"
_WORD = r"(?<![0-9A-Za-z_])(?=[0-9A-Za-z_])"
_WORD_ENDS = r"(?<=[0-9A-Za-z_])(?![0-9A-Za-z_])"


def _but(signs: str) -> str:
    return f"[^{re.escape(signs + _WHITE)}]"


_S = f"[{re.escape(_WHITE)}]"
_GAP = f"[{re.escape('-.' + _WHITE)}]"
_BYTE = (
    "(" + "|".join(sorted({f"{n:0{width}}" for n in range(256) for width in (1, 2, 3)}, key=len, reverse=True)) + ")"
)
_SCHEMES = "postgresql postgres mysql redis rediss mongodb mongodb+srv amqp amqps"
_KEYS = "password passwd secret token api_key apikey api_secret access_token auth_token"


def _any_case(words: str) -> str:
    """Return a pattern of these words in any case of their ASCII letters."""
    spelt = ["".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in w) for w in words.split()]
    return f"({'|'.join(spelt)})"


_KEY_AND_SIGN = f"{_WORD}{_any_case(_KEYS)}{_S}*[=:]{_S}*"
_NOT_MARKED = rf"(?!\[{_any_case('REDACTED')})"

SECRETS = (
    ("connection_string", f"{_any_case(_SCHEMES)}://{_but(_ENDS_URL)}+", ""),
    ("bearer_token", rf"Bearer{_S}+(?!kp_)[A-Za-z0-9_\-.~+/=]{{20,}}", "Bearer "),
    ("api_key", "sk-[A-Za-z0-9]{20,}", ""),
    ("api_key", "(ghp|gho|gha|ghs)_[A-Za-z0-9]{36,}", ""),
    ("api_key", "AKIA[A-Z0-9]{16}", ""),
    ("api_key", "kp_[a-f0-9]{16,}", ""),
    ("api_key", "(xoxb|xoxp|xoxr|xoxa|xoxs)-[-A-Za-z0-9]+", ""),
    (
        "password",
        rf"(?P<kept>{_KEY_AND_SIGN}){_NOT_MARKED}('[^'\"]*'|\"[^'\"]*\"|{_but(_ENDS_PATH + '[')}{{2,}})",
        r"\g<kept>",
    ),
)
IDENTIFIERS = (
    ("email", r"[a-zA-Z0-9._%+\-]+@[a-zA-Z0-9.\-]+\.[a-zA-Z]{2,}", ""),
    ("phone", rf"(\+1{_GAP}|1{_GAP}|\+1|1|)\(?[0-9]{{3}}\)?{_GAP}?{_S}?[0-9]{{3}}{_GAP}[0-9]{{4}}{_WORD_ENDS}", ""),
    ("phone", rf"\+[1-9][0-9]{{6,14}}{_WORD_ENDS}", ""),
    ("ip", rf"{_WORD}{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}{_WORD_ENDS}", ""),
    ("filepath", rf"/(home|Users)/[a-zA-Z0-9._\-]+(/{_but(_ENDS_PATH)}*)?", ""),
    ("filepath", rf"[A-Z]:\\Users\\[a-zA-Z0-9._\-]+(\\{_but(_ENDS_PATH)}*)?", ""),
)


def slow_redact_text(text: str, level: str) -> tuple[str, list[tuple[str, int]]]:
    """Return the cleaned text and the number of markers by type, in the order of the rules."""
    units = text.encode("utf-16-le", "surrogatepass")
    script = "".join(chr(units[i] | units[i + 1] << 8) for i in range(0, len(units), 2))
    counts: dict[str, int] = {}
    for kind, pattern, kept in SECRETS if level == "private" else SECRETS + IDENTIFIERS:
        script, found = re.subn(pattern, f"{kept}[REDACTED:{kind}]", script)
        if found:
            counts[kind] = counts.get(kind, 0) + found
    cleaned = b"".join(ord(unit).to_bytes(2, "little") for unit in script)
    return cleaned.decode("utf-16-le", "surrogatepass"), list(counts.items())


# -- texts: parts that come close to the patterns

_DIGITS, _ALNUM = "0123456789", "0123456789abcxyzABCXYZ"
_ODD: list[str] = [
    *_WHITE, *"\u200b\u180e\x85\x1c\x00\u212a\u017f\u0130\u0131é日\u0301",
    *"🙂\U0010ffff٣３ａ",  # noqa: RUF001 digits and letters beyond ASCII
]  # fmt: skip
_SIGNS = [*"'\"`,;:=)}]([{.@-_+/\\%~!?#<>|& \n\t"]
_MARKERS = ["[REDACTED:password]", "[redacted", "[REDACTED:email]", "[Redacted:ip]"]

Piece = str | tuple[str, int, int] | list[Any]
"""A text, so many characters of an alphabet, or one of several pieces."""

_SPACE: Piece = ["", "", " ", " ", "  ", "\n", _ODD]
_GAP_PIECE: Piece = ["", "-", ".", " ", "\xa0", ") ", ")", "--", _ODD]
_LABEL: list[Piece] = [("ab1-Z", 0, 3), "."]
_TAIL: Piece = ("ab1/\\.;' é", 0, 8)
_THREE: Piece = [*[(_DIGITS, 3, 3)] * 18, (_DIGITS, 2, 2), (_DIGITS, 4, 4)]
_OCTET: Piece = ["0", "00", "007", "25", "99", "199", "249", "255", "256", "300", "1234"]


def _cases(*words: str) -> Piece:
    return [[word, word.upper(), word.title()] for word in words]


_NEAR_SECRETS: list[list[list[Piece]]] = [  # kinds, each of which has several forms, each of pieces
    [[_cases(*_SCHEMES.split(), "http", "postgre", "my\u017fql"), ["://", "://", "://", ":/", ":"],
      (_ALNUM + "@:/?.%=é", 0, 14)]],
    [[["Bearer", "Bearer", "Bearer", "bearer", "Beare"], _SPACE, ["", "", "kp_"], (_ALNUM + "-._~+/=", 0, 26)]],
    [[["sk-", "sk-", "sk_", "SK-", "sk-proj-"], (_ALNUM, 17, 23)]],
    [["gh", [*"poaspxu"], [*"___-"], (_ALNUM, 33, 39)]],
    [[["AKIA", "AKIA", "akia", "AKI"], ("ABCXYZ0123456789", 14, 18)]],
    [[["kp_", "kp_", "KP_", "kp-"], ("0123456789abcdef", 13, 19), ["", "g", "A"]]],
    [["xox", [*"bprasx"], "-", (_ALNUM + "-", 0, 9)]],
    [[["", "", "my_", "x-", "é", ".", "\u212a"],
      _cases(*_KEYS.split(), "pasword", "Secret", "toKen", "to\u212aen", "pa\u017fsword", "API-KEY"),
      _SPACE, [*"==::> "], _SPACE, quote,
      [*[(_ALNUM + more, 0, 6) for more in ("", "é🙂", "'\"", " []") * 3], *[_MARKERS] * 4, *["🙂"] * 4],
      [quote, quote, "'"]] for quote in ("", "", "", "'", '"', "`")],
]  # fmt: skip
_NEAR_IDENTIFIERS: list[list[list[Piece]]] = [
    [[("abZ09._%+-", 0, 6), "@", *_LABEL * labels, ("ab1-Z", 0, 3),
      [".com", ".c", ".co.uk", ".x1", "", ".com.", "."]] for labels in range(3)],
    [[["", "", "+1", "1", "+", "+11"], ["", _GAP_PIECE, "("], _THREE, _GAP_PIECE, _THREE, _GAP_PIECE, (_DIGITS, 3, 5)]],
    [["+", (_DIGITS, 5, 17)]],
    [[_OCTET, *[".", _OCTET] * dots, ["", "", ".", ".1", "a"]] for dots in (3, 3, 3, 2)],
    [[["/home/", "/Users/", "/home", "/HOME/", "home/"], ("abZ9._-é", 0, 5), "/", _TAIL],
     [["C:", "C:", "c:", "CD:", ""], ["\\Users\\", "\\\\Users\\\\"], _TAIL]],
]  # fmt: skip


def _drawn(rng: random.Random, piece: Piece) -> str:
    if isinstance(piece, list):
        return _drawn(rng, rng.choice(piece))
    return piece if isinstance(piece, str) else "".join(rng.choices(piece[0], k=rng.randint(*piece[1:])))


def random_text(rng: random.Random) -> str:
    """Return a short text of parts that come close to the patterns, and of what may stand between them."""
    parts = []
    for _ in range(rng.randint(1, 6)):
        form = rng.choice(rng.choice(rng.choice([_NEAR_SECRETS, _NEAR_IDENTIFIERS])))
        part = "".join(_drawn(rng, piece) for piece in form)
        if rng.random() < 0.1:
            place = rng.randrange(len(part) + 1)
            part = part[:place] + rng.choice(_ODD + _SIGNS + _MARKERS) + part[place + rng.randint(0, 1) :]
        parts += [part, _drawn(rng, ["", "", " ", ", ", "\n", _SIGNS, _ODD, _MARKERS])]
    return "".join(parts)
