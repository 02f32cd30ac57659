"""Secrets recognisable by their form: keys and private keys, requests, commands, and numbers of persons and machines.

Keys of many services are known by their beginning; headers, cookies and URLs have places for secrets, commands have
options and arguments. Cards, IBANs and national numbers are confirmed by a checksum if they have one.
"""

import binascii
import re
import string
from base64 import b64decode
from collections.abc import Iterator
from typing import Final

from worker.redact.markers import Found, Rule, rule
from worker.redact.names import (
    DATA,
    IF_RANDOM,
    PLACEHOLDER,
    WORDS,
    harmless,
    has_digit,
    has_no_words,
    is_clear,
    is_given,
    is_random,
    is_typed,
    is_value,
    looks_secret,
    pattern,
    strength_of,
)  # fmt: skip

# -- private keys

_PEM_BEGIN: Final = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_PEM_END: Final = re.compile(r"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_PEM_CUT: Final = re.compile(
    r"""(?:(?:\\{1,8}[nrt]|[\s"'`+,|>#*\\]|(?:Proc-Type|DEK-Info|Version|Comment|Hash):[^\n\\]{0,200})*+"""
    r"[A-Za-z0-9+/=_]{16,}+)*+(?:(?:\\{1,8}[nrt]|[\s\"'+])*+[A-Za-z0-9+/]{1,15}={1,2})?"
)
"""The part of a truncated private key: lines of base64."""

_PEM_BASE64: Final = re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/=_-]{60,}+")
_MOST_PEM: Final = 20_000


def _private_keys(text: str, _lowered: str) -> Iterator[Found]:
    if "PRIVATE KEY" in text:
        place = 0
        while begin := _PEM_BEGIN.search(text, place):
            dashes = text.find("----", begin.end(), begin.end() + _MOST_PEM)
            end = _PEM_END.match(text, dashes) if dashes >= 0 else None
            place = (end or _PEM_CUT.match(text, begin.end()) or begin).end()
            yield Found(begin.start(), place, "private_key")
        yield from _private_key_ends(text)
    if "LS0tLS1CRUdJTi" in text:  # -----BEGIN in base64
        for match in _PEM_BASE64.finditer(text):
            if b"PRIVATE KEY" in (decoded(match[0][:80]) or b""):
                yield Found(match.start(), match.end(), "private_key")
    if "Private-Lines:" in text:  # PuTTY
        for match in _PUTTY.finditer(text):
            yield Found(match.start(1), match.end(1), "private_key")
    if '"kty' in text or "'kty" in text:
        for match in _JWK.finditer(text):
            yield Found(match.start(1), match.end(1), "private_key")


_PEM_LINES: Final = re.compile(
    r"(?:(?:\\{1,8}[nr]|[\s>|#*+\"',])*+[A-Za-z0-9+/=]{16,}+)++(?:\\{1,8}[nr]|[\s>|#*+\"',])*+"
)


def _private_key_ends(text: str) -> Iterator[Found]:
    """Find the lines before the end of a private key whose beginning is missing."""
    done = 0
    for end in _PEM_END.finditer(text):
        first = text.rfind("----", max(done, end.start() - _MOST_PEM), end.start()) + 4
        begin = max(first if first > 3 else 0, done, end.start() - _MOST_PEM)
        done = end.end()
        for lines in _PEM_LINES.finditer(text, begin, end.start()):
            if lines.end() == end.start():
                yield Found(lines.start(), end.end(), "private_key")


_PUTTY: Final = re.compile(r"Private-Lines: ?[0-9]{1,3}((?:(?:\\[nr]|\s){1,4}[A-Za-z0-9+/=]{8,80}){1,200}+)")
_JWK: Final = re.compile(r"""["'](?:d|p|q|dp|dq|qi|k)\\{0,7}["']\s{0,4}:\s{0,4}\\{0,7}["']([A-Za-z0-9_-]{20,2048}+)""")


def decoded(text: str) -> bytes | None:
    """Decode base64; None: the text is not base64."""
    text = text.rstrip("=")
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        return None


# -- requests

_AUTHORIZATION: Final = pattern(
    r"""
    (?=[Aa]) (?i:authorization) (?&quotes) [\])]? \s{0,8} (?: [:=,] | => ) \s{0,8} (?&quotes) (?!["'\[<${%]) (?:f["'])?
    (?: (?P<scheme>[A-Za-z][A-Za-z0-9-]{1,24}) (?:[ \t:=]|%20){1,4} (?![<${%\[]) )?
    (?P<value>[^\s"'`<>\\,;(){}\[\]]{6,8192}+)
    """
)
_END_OF_HEADER: Final = re.compile(r"[\n'`]|\\n")
_AUTH_PART: Final = pattern(
    r"""
    (?=[SROCNMHsrocnmh])
    (?i: signature | response | oauth_token | oauth_consumer_key | oauth_signature | credential | nonce | mac | hmac )
    = \\{0,3} "? ([^\s",;\\]{6,1024})
    """
)


def _authorizations(text: str, _lowered: str) -> Iterator[Found]:
    """Find the secrets of `Authorization` headers, with any scheme."""
    done = 0
    for match in _AUTHORIZATION.finditer(text):
        value, scheme = match["value"], (match["scheme"] or "").lower()
        start, end = match.span("value")
        if not scheme:
            if looks_secret(value):
                yield Found(start, end, "bearer_token")
        elif scheme.startswith(("aws4", "digest", "oauth", "hmac")):
            line_end = _END_OF_HEADER.search(text, max(end, done), start + 4096)
            until = line_end.start() if line_end else start + 4096
            for part in _AUTH_PART.finditer(text, max(start, done), until):
                yield Found(part.start(1), part.end(1), "basic_auth")
            done = max(done, until)
        elif (scheme in WORDS["schemes"] and not harmless(value)) or looks_secret(value):
            yield Found(start, end, "basic_auth" if scheme == "basic" else "bearer_token")


_COOKIES_NAME: Final = re.compile(r"cookies[\"']?\s{0,4}[:=]")
_LISTED_COOKIE: Final = pattern(
    r"""
    name (?&quotes) \s{0,4}[:=]\s{0,4} (?&quotes) [^\s"'`\\]{1,100}+ (?&quotes) ,\s{0,20}
    (?&quotes) value (?&quotes) \s{0,4}[:=]\s{0,4} (?&quotes) (?P<secret>[^\s"'`\\]{16,4096}+)
    """
)


def _listed_cookies(text: str, _lowered: str) -> Iterator[Found]:
    """Find cookies in a list, as browser tools write them: "cookies": [{"name": "sid", "value": "x"}]."""
    done = 0
    for begin in _COOKIES_NAME.finditer(text):
        end = begin.end() + 20_000
        for match in _LISTED_COOKIE.finditer(text, max(begin.end(), done), end):
            if is_random(match["secret"]):
                yield Found(*match.span("secret"), "cookie")
        done = max(done, end)


_PART: Final = pattern(
    r"""
    form-data; [^\n"]{0,40} name=\\{0,7}"(?P<name>[^"\\\n]{1,80})\\{0,7}" [^\n]{0,120} [\r\n]{1,4}
    (?: [A-Za-z-]{1,30}: [^\r\n]{0,200} [\r\n]{1,4} ){0,4}? [\r\n]{1,4} (?P<secret>[^\r\n]{1,4000}+)
    """
)


def _parts(text: str, _lowered: str) -> Iterator[Found]:
    for match in _PART.finditer(text):
        strength = strength_of(match["name"])
        if strength > IF_RANDOM and is_given(match["secret"], strength):
            yield Found(*match.span("secret"), "password")


_SIGNED: Final = pattern(
    r"""
    (?: [?&;] | %3F | %26 | \\u0026 ) (?:amp;)?
    (?P<name> (?i:
        x-(?:amz|goog|oss|cos|obs|ms)-(?:signature|credential|security-token) | signature | sig | policy
      | key-pair-id | awsaccesskeyid | googleaccessid | ossaccesskeyid
      | (?:access_|id_|refresh_|auth_|api_)?token | api_?key | appid | key | auth | code | client_secret | hmac | hdnts
      | verify | secret | password | passwd | pwd | sessionid | session | sid | jwt | ticket | sas
    ) )
    (?: = | %3D ) (?P<value>[^\s&"'`<>\\;,)\]}\[\#]{6,4096}+)
    """
)


def _signed_urls(text: str, _lowered: str) -> Iterator[Found]:
    for match in _SIGNED.finditer(text):
        name, value = match["name"].lower(), match["value"]
        sure = name.startswith("x-") or (name in WORDS["signatures"] and len(value) >= 16)
        if (sure and not PLACEHOLDER.fullmatch(value)) or looks_secret(value):
            yield Found(*match.span("value"), "signed_url")


# -- options of commands

_WHOLE_COMMAND: Final = re.compile(r"(?:\"[^\"\n]{0,300}+\"|'[^'\n]{0,300}+'|(?!\\n|[|&]{2})[^\n;])*+")


def _option_rule(
    command: str, option: str, value: str = "(?&argument)", hint: str = "", kind: str = "password"
) -> Rule:
    """Return the rule for an option within 600 characters after a command; the secret is its last group."""
    name = pattern(f"(?<![A-Za-z0-9_])(?:{command})(?![A-Za-z0-9_])")
    with_value = pattern(rf"(?<![A-Za-z0-9-])(?:{option}){value}")

    def find(text: str, _lowered: str) -> Iterator[Found]:
        if not with_value.search(text):
            return
        done = 0
        for match in name.finditer(text):
            if match.start() < done:
                continue
            done = (_WHOLE_COMMAND.match(text, match.end(), match.end() + 600) or match).end()
            for found in with_value.finditer(text, match.end(), done):
                group = found.lastindex or 0
                if not harmless(found[group]):
                    yield Found(*found.span(group), kind)

    # the pattern of a command is one of RE2, too, but for its blanks
    return Rule(hint or re.sub(r"\s+(?![\]?])", "", command), find)


# -- what a secret must be besides


def _is_key(key: str) -> bool:
    """Return whether what follows the prefix is random, with letters of both cases and digits, but no words."""
    key = key.rpartition("_")[2]
    return is_clear(key) and has_no_words(key)


def _is_basic(secret: str) -> bool:
    read = decoded(secret.replace("-", "+").replace("_", "/"))
    return read is not None and b":" in read and all(32 <= byte < 127 or byte >= 0xC3 for byte in read)


def _is_base64(secret: str) -> bool:
    return len(decoded(secret) or b"") >= 3


def _is_no_placeholder(secret: str) -> bool:
    return not PLACEHOLDER.fullmatch(secret)


def _is_national_number(secret: str) -> bool:
    return 8 <= sum(map(str.isalnum, secret)) <= 18 and has_digit(secret)


def _is_phone_number(secret: str) -> bool:
    return 8 <= sum(map(str.isdigit, secret)) <= 17


_TWICE: Final = bytes(sum(divmod(2 * (digit - 48), 10)) if 48 <= digit < 58 else 0 for digit in range(256))


def _is_card(secret: str) -> bool:
    """Return whether the digits have a valid Luhn checksum."""
    digits = secret.replace(" ", "").replace("-", "").replace(".", "").encode()
    odd = digits[-1::-2]
    total = sum(odd) - 48 * len(odd) + sum(digits[-2::-2].translate(_TWICE))
    return total % 10 == 0 and len(set(digits)) > 1


_IBAN: Final = re.compile(r"[A-Za-z]{2}[0-9]{2}(?<![0-9A-Za-z]....)(?=[ -]?[0-9A-Za-z]{4})")
_IBAN_LENGTHS: Final = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip
"""Length of an IBAN by country: SWIFT's IBAN registry."""

_IBAN_PIECE: Final = re.compile(r"[ -]?([0-9A-Za-z]{1,34})")
_IBAN_DIGITS: Final = {ord(letter): str(int(letter, 36)) for letter in string.ascii_uppercase}


def _ibans(text: str, _lowered: str) -> Iterator[Found]:
    """Yield the IBANs with a known country, its length and a valid checksum."""
    for match in _IBAN.finditer(text):
        country, end, characters = match[0][:2], match.start(), ""
        length = _IBAN_LENGTHS.get(country.upper(), 0) if country.isupper() or country.islower() else 0
        while len(characters) < length and (piece := _IBAN_PIECE.match(text, end)):
            end = min(piece.end(), piece.start(1) + length - len(characters))
            characters += text[piece.start(1) : end]
        if length and len(characters) == length and not text[end : end + 1].isalnum():
            number = (characters[4:] + characters[:4]).upper().translate(_IBAN_DIGITS)
            if int(number) % 97 == 1:
                yield Found(match.start(), end, "iban")


def _is_ipv6(secret: str) -> bool:
    """Return whether the groups form an address, and not `a::b` in a program, a time or a slice."""
    groups = secret.split(":")
    longest = max(map(len, groups))
    if longest < 3 or longest > 4 or secret.isalpha() or not has_digit(secret):
        return False
    if "::" in secret and len(groups) < 5 and secret[0] not in "23fF" and sum(map(bool, groups)) < 3:
        return False
    if (secret[0] == ":" and secret[1] != ":") or ":::" in secret or secret.count("::") > 1:
        return False
    whole = sum(map(bool, groups))
    return 1 < whole < 8 if "::" in secret else whole == 8


# -- the rules

_CHECKS: Final = {
    check.__name__.lstrip("_"): check
    for check in (
        has_digit, is_random, is_typed, is_value, looks_secret, _is_base64, _is_basic, _is_card, _is_ipv6, _is_key,
        _is_national_number, _is_no_placeholder, _is_phone_number,
    )
}  # fmt: skip


def rules_of(group: str) -> list[Rule]:
    """Return the rules of a group of strict.toml."""
    return [
        rule(
            entry.get("kind", "password"),
            entry["hint"],
            pattern(entry["pattern"], re.ASCII),
            _CHECKS[entry["check"]] if "check" in entry else None,
        )
        for entry in DATA[group]
    ]


def _keys(forms: list[list[str]], before: str = "") -> Rule:
    """Return one rule for all forms: a text is searched once, however many of their beginnings it has."""
    whole = "|".join(f"(?:{begin}){rest}" for begin, rest in forms)
    return rule("api_key", f"(?-i:{'|'.join(begin for begin, _ in forms)})", pattern(f"{before}(?:{whole})", re.ASCII))


SECRETS: Final = (
    _keys(DATA["services"]["anywhere"]),
    _keys(DATA["services"]["at_words"], "(?&begins)"),
    *rules_of("keys"),
    Rule("private key|LS0tLS1CRUdJTi|private-lines:|kty", _private_keys),
    *rules_of("requests"),
    Rule(
        r"(?:[?&;]|%3f|%26|u0026)(?:amp;)?(?:x-[a-z-]+|[a-z_]*(?:signature|sig|policy|id|token|key|auth|code|secret|hmac"
        r"|hdnts|verify|password|passwd|pwd|session|sid|jwt|ticket|sas))(?:=|%3d)",
        _signed_urls,
    ),
    Rule("authorization", _authorizations),
    Rule("cookies", _listed_cookies),
    Rule("form-data;", _parts),
    *(_option_rule(**option) for option in DATA["options"]),
    *rules_of("arguments"),
    Rule("[0-9](?:[ ./()-]{0,3}[0-9]){6}", _ibans),
    *rules_of("personal"),
)
"""Replaced at every privacy level."""

IDENTIFIERS: Final = rules_of("identifiers")
"""Kept at `private`."""
