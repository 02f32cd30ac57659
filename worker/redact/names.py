"""What the strict rules share: their data, which names belong to secrets, and which values look like secrets."""

import math
import re
import tomllib
from collections import Counter
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

DATA: Final[dict[str, Any]] = tomllib.loads(files("worker.redact").joinpath("strict.toml").read_text("utf-8"))
"""The words and patterns of the strict rules."""

WORDS: Final = {name: frozenset(words.split()) for name, words in DATA["words"].items()}


def pattern(text: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Compile a verbose pattern; (?&name) stands for one of the parts, as in PCRE."""
    return re.compile(re.sub(r"\(\?&(\w+)\)", lambda call: f"(?:{DATA['parts'][call[1]]})", text), re.VERBOSE | flags)


_PASSWORD_STEMS: Final = ("password", "passwd", "passphrase", "pass", "userpwd")
_TOKEN_STEMS: Final = ("secret", "token", "apikey", "secretkey", "accesskey", "credentials")
_WORDS: Final = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

NO, IF_RANDOM, IF_MIXED, TOKEN, PASSWORD = range(5)
"""How strongly a name says that its value is a secret: not at all, if it `is_random`, if it `looks_secret`, unless it
is `harmless` (the last two)."""


def has_digit(value: str) -> bool:
    """Return whether one of the characters is a digit."""
    return any(map(str.isdigit, value))


@lru_cache(maxsize=8192)
def strength_of(name: str) -> int:
    """Return how strongly a name says that its value is a secret. In GITHUB_TOKEN_RO, what is before RO says it."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1] in WORDS["endings"] or words[-1].isdigit()):
        words.pop()
    if len(words) > 1 and words[-1] == "v":  # of TOKEN_V2
        words.pop()
    if not words:
        return NO
    strength = _strength_of_last(words)
    if strength == NO and words[-1] not in WORDS["properties"]:
        while words.pop() and words:
            if _strength_of_last(words) >= IF_MIXED:
                return IF_MIXED
    return strength


def _strength_of_last(words: list[str]) -> int:
    """Return how strongly a name says it whose last word is that of a secret."""
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("authorization", "cookie"):
        return TOKEN
    if before and words[0] in WORDS["other_things"]:
        return NO
    if (
        last in WORDS["passwords"]
        or (last.endswith(_PASSWORD_STEMS) and last not in WORDS["no_passwords"])
        or (last == "phrase" and before in ("pass", "seed", "recovery", "secret"))
        or (last == "word" and before == "pass")
    ):
        return PASSWORD
    if (
        last in WORDS["tokens"] or last.endswith(_TOKEN_STEMS) or (last == "data" and before == "key")
    ):  # client-key-data
        return TOKEN
    if last == "pat":  # a personal access token
        return IF_MIXED
    if last in ("key", "keys") and before in WORDS["no_secret_keys"]:
        return NO
    if last in ("key", "keys") and before in WORDS["keys_of"]:
        return TOKEN
    if last in WORDS["weak"] or (last == "id" and before in ("session", "sess")):
        return IF_RANDOM
    return NO


PLACEHOLDER: Final = re.compile(
    r"\$\{.*|\$\(.*|\{\{.*|\{%.*|<[^<>]*>?|\[[A-Za-z_ ]{1,20}\]"
    r"|%(?:\([a-z_]*\))?[sdvq]|%[A-Z_]+%|\$[A-Z_][A-Z0-9_]*|\$[a-z_]+|\{\w*\}"
    r"|[*xX.#_\u2022-]{3,}|\?+|\.\.\."
    r"|(?i:your|my|the|some|insert|enter|example|sample|dummy|placeholder|redacted|hidden|masked|removed|omitted"
    r"|\(redacted\)|n/a|todo|tbd)(?:[-_ ].{0,40})?"
)
_CODE: Final = re.compile(
    r"(?:self|this|cls|config|conf|cfg|settings|options|opts|args|kwargs|params|props|state|process|os|env|environ|req"
    r"|request|res|response|ctx|context|event|data|body|form|user|account|session|secrets?|creds?|credentials?|auth"
    r"|input|values|vars?|local|module|resource|each|github|steps|inputs|item|row|result|payload|headers?|json|app"
    r"|client|server|db|model|parser|ns|flask|django|st|tokenizer|batch|outputs?|np|torch|keys?|tokens?|passwords?)"
    r"(?:\??\.\w+)+!?|[A-Za-z_]\w*(?:::\w+)+"
)
DATE_OR_NUMBER: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9:.]{4,15}(?:Z|[+-][0-9:]{4,6})?)?|[+-]?[0-9]+(?:[.,:][0-9]+)*[%a-z]?"
    r"|v?[0-9]+(?:\.[0-9a-z]+){1,4}(?:[-+][0-9A-Za-z.]+)?|0x[0-9a-fA-F]{1,8}"
)
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PATH: Final = re.compile(
    r"(?:[A-Za-z]:\\|~/|\.{0,2}/)[\w ./@+-]*|(?:https?|file|s3|gs)://[^\s@?]*|[\w-]+(?:/[\w.-]+)+\.\w{1,5}"
    r"|[\w.-]+\.(?:ya?ml|json|txt|pem|key|crt|env|py|js|ts|go|rs|java|rb|sh|cfg|conf|ini|toml)"
)


@lru_cache(maxsize=1024)
def harmless(value: str) -> bool:
    """Return whether a value assigned to a secret's name is only a placeholder, code or prose."""
    lowered = value.lower().strip(".:;!?")
    if len(value) < 3 or lowered in WORDS["no_values"] or PLACEHOLDER.fullmatch(value) or _CODE.fullmatch(value):
        return True
    if _PATH.fullmatch(value):
        return not any(is_random(part) for part in value.split("/") if "/" in value)
    words = lowered.split()
    return len(words) > 2 and not WORDS["stop_words"].isdisjoint(words)


@lru_cache(maxsize=1024)
def looks_secret(value: str) -> bool:
    """Return whether a value looks secret under any name: mixed characters, no word, number, date, path or id."""
    if len(value) < 6 or value.isalpha() or harmless(value):
        return False
    if DATE_OR_NUMBER.fullmatch(value) or _UUID.fullmatch(value):
        return False
    letters = any(map(str.isalpha, value))
    if not (letters and has_digit(value)):
        return letters and len(value) >= 8 and any(character in "!@#$%^&*+=~?" for character in value)
    return not _PLAIN_ID.fullmatch(value)


_PLAIN_ID: Final = re.compile(
    r"[a-z]{2,}(?:[-_.][a-z]{1,})*[-_.]?[0-9]{1,4}|[A-Z]{1,5}-?[0-9]{1,10}|[0-9]+[a-z]{1,8}"
    r"|[a-z]+[0-9]?(?:[-_./:][a-z0-9]{1,12}){1,6}"
)


def is_value(value: str) -> bool:
    """Return whether a value is not `harmless`."""
    return not harmless(value)


def is_given(value: str, strength: int) -> bool:
    """Return whether a value that is clearly given to a name is a secret."""
    if strength >= TOKEN:
        return not harmless(value)
    return " " not in value and (looks_secret(value) if strength == IF_MIXED else is_random(value))


def is_random(value: str) -> bool:
    """Return whether a value looks random: at least 16 characters, letters and digits, over 3 bits per character."""
    if len(value) < 16 or not looks_secret(value):
        return False
    value = value[:256]
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values()) > 3


def likely(value: str, strength: int) -> bool:
    """Return whether a value is a secret although the text barely connects it with the name."""
    return looks_secret(value) or (
        strength == PASSWORD
        and len(value) >= 6
        and not harmless(value)
        and not DATE_OR_NUMBER.fullmatch(value)
        and has_digit(value)
    )


def is_mixed(value: str) -> bool:
    """Return whether a value looks secret and mixes three of upper case, lower case, digits, signs, or is random."""
    kinds = any(map(str.isupper, value)) + any(map(str.islower, value)) + has_digit(value)
    return looks_secret(value) and (kinds + (not value.isalnum()) >= 3 or is_random(value))


def is_clear(value: str) -> bool:
    """Return whether a value is a key wherever it follows a name: long, with letters of both cases and digits."""
    return (
        len(value) >= 20
        and sum(map(str.isdigit, value)) >= 3
        and any(map(str.isupper, value))
        and any(map(str.islower, value))
        and is_random(value)
    )


def is_long_word(value: str) -> bool:
    """Return whether a value is a key wherever it follows "secret key" or the like: long, letters and digits."""
    return len(value) >= 24 and value.isalnum() and sum(map(str.isdigit, value)) >= 2 and is_random(value)


_KNOWN: Final = re.compile(
    r"(?i:oauth|sha-?[0-9]|md5|base64|utf-?[0-9]|pbkdf|argon2|bcrypt|python|http|ipv[46]|x509|win(?:32|64)|pkcs|1password"
    r"|pass[a-z]{0,9}[0-9]{0,2}$|[a-z]{1,12}\([^)]*\)?$)"
)
_NUMBER_AND_UNIT: Final = re.compile(r"[0-9]+(?:[-.]?[a-z]+|[-.][0-9]+)*|[a-z]+(?:_[a-z]+)*_?[0-9]{1,2}")


def may_be(value: str, *, quoted: bool) -> bool:
    """Return whether a text where a value may be is a password."""
    if " " in value:
        words = value.split()
        return (
            quoted and 3 <= len(words) <= 24 and all(w.isalpha() and w.islower() for w in words) and not harmless(value)
        )
    return (
        (
            likely(value, PASSWORD)
            and any(map(str.isalpha, value))
            and not _KNOWN.match(value)
            and not _NUMBER_AND_UNIT.fullmatch(value)
        )
        or must_be(value)
        or (len(value) >= 6 and _WORD_AND_NUMBER.fullmatch(value) is not None)
        or is_scrambled(value)
    )


_WORD_AND_NUMBER: Final = re.compile(
    r"(?!step|user|line|page|file|item|field|option|version|input|form|test)[a-z]{4,}[0-9]{1,6}[!?.]?"
)


def is_scrambled(value: str) -> bool:
    """Return whether letters of both cases are neither words nor a name such as LastPass."""
    letters = 8 <= len(value) <= 64 and value.isascii() and value.isalpha()
    return letters and not (value[1:].islower() or value.isupper()) and has_no_words(value)


def has_no_words(value: str) -> bool:
    """Return whether less than half of the characters are in parts that may be words."""
    words = (part for part in _WORDS.findall(value) if _SPOKEN.fullmatch(part.lower()))
    return 2 * sum(map(len, words)) < len(value)


_SPOKEN: Final = re.compile(r"(?=.*[aeiouy])(?!.*[^aeiouy]{4}).{3,}")


def must_be(value: str) -> bool:
    """Return whether a word can only be a password: digits, and letters of both cases or letters and signs."""
    if not 8 <= len(value) <= 64 or not looks_secret(value) or _KNOWN.search(value) or "/" in value or "@" in value[1:]:
        return False
    return (
        has_digit(value)
        and any(map(str.islower, value))
        and (any(map(str.isupper, value)) or any(c in "!#$%^&*?+~" for c in value))
    )


def is_typed(value: str) -> bool:
    """Return whether a text is a password, given that only a password belongs there."""
    return looks_secret(value) or may_be(value, quoted=False) or _HYPHENATED.fullmatch(value) is not None


_HYPHENATED: Final = re.compile(
    r"[a-z0-9]*[0-9][a-z0-9]*(?:[-_][a-z0-9]{1,20}){1,4}|[a-z]+(?:[-_][a-z0-9]{1,20}){0,3}[-_][0-9]{1,6}"
)


def labels_secret(name: str, value: str) -> bool:
    """Return whether a member labels an input field for a secret: {"element": "password field"}."""
    return len(value) <= 100 and name.lower() in _LABELS and _LABEL.search(value) is not None


_LABELS: Final = frozenset(
    ("element", "label", "selector", "locator", "placeholder", "aria-label", "arialabel", "field", "target", "id",
     "type", "question", "prompt", "description", "title", "for", "name")
)  # fmt: skip
"""Names that a form or a browser tool gives the field that it fills."""
_LABEL: Final = re.compile(
    r"(?<![A-Za-z])(?i:(?:new|current|old|user|login|db|confirm|your)?[_ -]?(?:password|passwort|kennwort|passwd"
    r"|passphrase|passcode|api[ _-]?key|mot de passe|contraseña|senha|wachtwoord|lösenord|hasło|heslo|secret key))"
    r"(?![A-Za-z])(?! (?:reset|policy))|[Пп]арол|密码|密碼|パスワード|비밀번호|[Şş]ifre"
)

VALUE_MEMBERS: Final = frozenset(("value", "val", "content", "default", "data", "text"))
