"""Numbers and addresses of persons and machines: cards, IBANs, national numbers, phones, IPv6.

Checksums say which numbers are some.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import Final

from worker.redact.markers import Found, Rule, rule

_MANY_DIGITS: Final = "[0-9](?:[ ./()-]{0,3}[0-9]){6}"
"""Cards, IBANs and phone numbers have so many digits in a row."""

_TWICE: Final = bytes(sum(divmod(2 * (digit - 48), 10)) if 48 <= digit < 58 else 0 for digit in range(256))


def _is_card(secret: str) -> bool:
    """Whether the digits have Luhn's checksum."""
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
    for match in _IBAN.finditer(text):
        end = _iban_end(text, match.start())
        if end is not None:
            yield Found(match.start(), end, "iban")


def _iban_end(text: str, start: int) -> int | None:
    """Return where an IBAN ends; None: its checksum or its country is wrong."""
    country = text[start : start + 2]
    length = _IBAN_LENGTHS.get(country.upper())
    if length is None or not (country.isupper() or country.islower()):
        return None
    end, characters = start, ""
    while len(characters) < length and (piece := _IBAN_PIECE.match(text, end)):
        end = min(piece.end(), piece.start(1) + length - len(characters))
        characters += text[piece.start(1) : end]
    if len(characters) < length or text[end : end + 1].isalnum():
        return None
    number = (characters[4:] + characters[:4]).upper().translate(_IBAN_DIGITS)
    return end if int(number) % 97 == 1 else None


def _is_ipv6(secret: str) -> bool:
    """Whether the groups are those of an address, and not `a::b` of a program, a time or a slice."""
    groups = secret.split(":")
    longest = max(map(len, groups))
    if longest < 3 or longest > 4 or secret.isalpha() or not any(map(str.isdigit, secret)):
        return False
    if "::" in secret and len(groups) < 5 and secret[0] not in "23fF" and sum(map(bool, groups)) < 3:
        return False
    if (secret[0] == ":" and secret[1] != ":") or ":::" in secret or secret.count("::") > 1:
        return False
    whole = sum(map(bool, groups))
    return 1 < whole < 8 if "::" in secret else whole == 8


_NUMBERS: Final = (
    rule(
        "card",
        _MANY_DIGITS,
        r"(?=[2-6])(?<![0-9A-Za-z_])(?<![0-9][.-])(?:3[47][0-9]{2}(?P<a>[ -]?)[0-9]{6}(?P=a)[0-9]{5}"
        r"|3(?:0[0-5]|[68][0-9])[0-9](?P<d>[ -]?)[0-9]{6}(?P=d)[0-9]{4}"
        r"|(?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|6[0-9]{3}|35[2-8][0-9]|50[0-9]{2}|5[6-8][0-9]{2})"
        r"(?P<s>[ .-]?|[ ]{2})[0-9]{4}(?P=s)[0-9]{4}(?P=s)[0-9]{4}[0-9]{0,3}|4[0-9]{12})"
        r"(?![0-9A-Za-z_]|[.-][0-9])",
        _is_card,
    ),
    rule(
        "ssn",
        "[0-9]{3}-[0-9]{2}-[0-9]{4}",
        r"(?=[0-9]{3}-)(?<![0-9A-Za-z_])(?<![0-9][.-])(?!000|666|9[0-9]{2}-[0-4])[0-9]{3}-(?!00)[0-9]{2}"
        r"-(?!0000)[0-9]{4}(?![0-9A-Za-z_]|-[0-9])",
    ),
    rule(
        "ssn",
        "ssn|social",
        r"(?=[Ss])(?i:ssn|social[ _-]?security(?:[ _-]?(?:number|no\.?|nr|#))?|social)\)?(?:\\{0,7}[\"'])?[ \t]{0,4}"
        r"(?:[:=#]|is)?[ \t]{0,4}(?:\\{0,7}[\"'])?(?P<secret>[0-9]{3}[ .-]?[0-9]{2}[ .-]?[0-9]{4})(?![0-9])",
    ),
)
_NATIONAL: Final = rule(  # numbers of persons in other countries, behind what they are called there
    "ssn",
    "national insurance|nino|dni|nie:|nif|cpf|pan card|fiscale|steuer|aadhaar|passport|pesel|bsn|curp"
    "|r licen|r's licen|personnummer|tax id",
    r"(?=[NnDdCcPpSsAaBbTt])(?<![A-Za-z0-9])(?i:national insurance(?: number| no\.?)?|nino|dni|nie|nif|cpf"
    r"|pan card|codice fiscale"
    r"|steuer-?id(?:nummer)?|aadhaar(?: number| no\.?)?"
    r"|passport[ _](?:number|no\.?|nr\.?)|pesel|bsn|curp|personnummer"
    r"|driver'?s licen[cs]e(?: number| no\.?)?|tax id)(?:\\{0,7}[\"'])?[ ]?[:=#]?[ ]{0,3}(?:\\{0,7}[\"'])?"
    r"(?P<secret>[A-Z0-9][A-Z0-9./-]{0,5}(?:[ ]?[A-Z0-9./-]{1,9}){0,5}[A-Z0-9])(?![A-Za-z0-9])",
    lambda secret: 8 <= sum(map(str.isalnum, secret)) <= 18 and any(map(str.isdigit, secret)),
)
_PHONES: Final = (
    rule(
        "phone",
        r"(?:\+ ?|00)[1-9][0-9 ./()-]{5}",
        r"(?=[+0])(?<![0-9A-Za-z+.])(?<![0-9][ .-])(?!\+1[ ]?[01])"
        r"(?:\+[ ]?[1-9][0-9]{0,2}|00[1-9][0-9]{0,2}(?=[ ./()-]))[ ./-]{0,2}"
        r"(?:\(0?[0-9]{0,4}\)[ ./-]{0,2})?[0-9]{1,5}(?:[ ./-]{1,3}[0-9]{2,8}){1,6}(?![0-9A-Za-z])",
        lambda secret: 8 <= sum(map(str.isdigit, secret)) <= 17,
    ),
    rule(
        "phone",
        r"(?:phone|tele?f?o?n?|mobile?|fax|whatsapp|cell)(?:[ _-]?n[a-z.]+)?[^a-z0-9\]][^a-z]*[0-9]",
        r"(?=[PpTtMmFfWwCc])(?<![A-Za-z])(?i:phone|telephone|telefon|tel|mobile|mobil|fax|whatsapp|cell)"
        r"(?i:[ _-]?(?:number|no\.?|nr\.?))?(?:\\{0,7}[\"'])?[ \t]{0,4}[:=.]{1,2}[ \t]{0,4}(?:\\{0,7}[\"'])?"
        r"(?P<secret>\(?\+?[0-9](?:[ ()./-]{0,2}[0-9]){7,14})(?![0-9A-Za-z])",
    ),
)
_IPV6: Final = rule(
    "ip",
    "::|(?:[0-9a-f]{1,4}:){7}",
    r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?<=::))(?![0-9A-Za-z_]|:[0-9A-Za-z:])",
    _is_ipv6,
)
_ESCAPED_ADDRESS: Final = rule(
    "email", "%40", r"(?<![A-Za-z0-9._+%-])[A-Za-z0-9._+-]{1,64}+%40[A-Za-z0-9-]{1,60}(?:\.[A-Za-z0-9-]{2,30}){1,4}"
)
_MAPPED: Final = rule(
    "ip",
    r":\[redacted:ip\]",
    r"(?<![0-9A-Za-z:])(?P<secret>[0-9A-Fa-f:]{0,30}::[0-9A-Fa-f:]{0,8}(?<=:))(?=\[REDACTED:ip\])",
)
"""What stands before an IPv4 address in an IPv6 one: ::ffff:, 64:ff9b::"""

PERSONAL: Final = (Rule(_MANY_DIGITS, _ibans), *_NUMBERS, _NATIONAL)
"""What goes at each level of privacy."""
IDENTIFIERS: Final = (_ESCAPED_ADDRESS, _IPV6, _MAPPED, *_PHONES)
"""What stays at `private`."""
