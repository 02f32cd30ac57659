"""The strict rules of redaction: where a text holds secrets and personal data that the reference's patterns miss.

`find_secrets` returns places; `redaction.py` puts the markers. Facts about keys (prefix, alphabet, length) are those of
gitleaks 8 (config/gitleaks.toml) and of the providers' documentation. Where a kind has a checksum (cards, IBAN) or can
be decoded (Basic, IPv6), that decides, and not the pattern.

Time is linear in the length of the text: every repeat in a pattern has a bound or never gives back what it has read,
and what is read behind a match is bounded, too.
"""

from __future__ import annotations

import binascii
import math
import re
import string
import unicodedata
from base64 import b64decode
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

TYPES: Final = ("private_key", "basic_auth", "jwt", "cookie", "signed_url", "webhook", "card", "iban", "ssn")
"""Types of markers that only the strict rules set; the others are the reference's."""

MARKER: Final = re.compile(r"\[REDACTED:[a-z0-9_]{1,64}\]")


class Found(NamedTuple):
    """A place of a text, and the type of its marker."""

    start: int
    end: int
    kind: str


class Folded(NamedTuple):
    """A text without disguises and escapes, and where its parts stand in it and in the original; empty: the same."""

    text: str
    places: Sequence[int]
    originals: Sequence[int]

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
        """Whether a part has as many characters as its original."""
        return self.places[part + 1] - self.places[part] == self.originals[part + 1] - self.originals[part]


_ALSO_FOLDED: Final = {ord(c): to for to, chars in {
    '"': "\u201c\u201d\u201e\u201f\u00ab\u00bb", "'": "\u2018\u2019\u201a\u201b", "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
    ":": "\u2236", "/": "\u2044\u2215", "": "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0",
}.items() for c in chars}  # fmt: skip
"""What NFKC leaves, and a reader sees as ASCII, or not at all."""

_ESCAPED: Final = r"\\{1,8}+(?:u[0-9A-Fa-f]{4}|[nrt])|&(?:quot|apos|amp|lt|gt|#39|#34|#x27|#x22);"
_ESCAPE: Final = re.compile(_ESCAPED)
_UNESCAPED: Final = {"n": "\n", "r": "\n", "t": "\t", "&quot;": '"', "&apos;": "'", "&amp;": "&", "&lt;": "<", "&gt;": ">",
                     "&#39;": "'", "&#x27;": "'", "&#34;": '"', "&#x22;": '"'}  # fmt: skip


def fold(text: str) -> Folded:
    """Return the text with NFKC's ASCII for full-width and similar characters, and without invisible ones.

    Escapes of JSON and HTML are read, too: behind an escaped line break DB_PASSWORD is no nDB_PASSWORD.
    """
    changed: dict[str, str] = {}
    if not text.isascii():
        changed = {character: to for character in set(text) if (to := _folded(character)) != character}
    if ("\\" in text or "&" in text) and _ESCAPE.search(text):
        return _fold_parts(text, changed)
    if not changed:
        return Folded(text, [], [])
    if all(len(to) == 1 for to in changed.values()):
        return Folded(text.translate({ord(character): to for character, to in changed.items()}), [], [])
    folded = [changed.get(character, character) for character in text]
    return Folded("".join(folded), list(accumulate(map(len, folded), initial=0)), range(len(text) + 1))


def _fold_parts(text: str, changed: dict[str, str]) -> Folded:
    odd = "".join(map(re.escape, sorted(changed)))
    pattern = f"{_ESCAPED}|[^{odd}\\\\&]++|[\\\\&]" + (f"|[{odd}]" if odd else "")
    parts = re.findall(pattern, text, re.DOTALL)
    folded = [
        changed[part] if part in changed else part if part[0] not in "\\&" else _unescaped(part) for part in parts
    ]
    return Folded(
        "".join(folded), list(accumulate(map(len, folded), initial=0)), list(accumulate(map(len, parts), initial=0))
    )


def _unescaped(part: str) -> str:
    if len(part) == 1:
        return part
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
    compatible = unicodedata.normalize("NFKC", character)
    return compatible if compatible.isascii() else character


# --- Keys that say what they are --------------------------------------------------------------------------------------

_BEGINS: Final = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f][0-9A-Fa-f]))"
"""Where a word begins, also behind an escape of a URL."""


class _Key(NamedTuple):
    """One form of keys, and texts without one of which it does not occur."""

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    kind: str = "api_key"


def _key(hints: str, pattern: str, kind: str = "api_key") -> _Key:
    return _Key(tuple(hints.split()), re.compile(pattern, re.ASCII), kind)


_KEYS: Final = (
    _key("gho_ ghp_ ghu_ ghs_ ghr_ gha_", "gh[pousra]_[A-Za-z0-9]{30,255}+"),  # GitHub
    _key("github_pat_", "github_pat_[A-Za-z0-9_]{22,255}+"),
    _key("glpat- gldt- glrt- glcbt- glptt- glft- glimt- glagent- gloas- glsoat- glffct- glrtr- glwt-",
         "gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|rtr|wt)-[A-Za-z0-9_.=-]{16,512}+"),  # GitLab
    _key("GR1348941", "GR1348941[A-Za-z0-9_-]{16,64}+"),
    _key("sk-", _BEGINS + "sk-(?=[A-Za-z0-9_-]{0,200}?[0-9])[A-Za-z0-9_-]{20,512}+"),  # OpenAI, Anthropic and others
    _key("k_live_ k_test_ k_prod_", "(?:sk|rk|pk)_(?:live|test|prod)_[A-Za-z0-9]{10,255}+"),  # Stripe
    _key("whsec_", "whsec_[A-Za-z0-9+/=]{16,255}+"),
    _key("AIza", "AIza[A-Za-z0-9_-]{30,45}+"),  # Google
    _key("GOCSPX-", "GOCSPX-[A-Za-z0-9_-]{20,64}+"),
    _key("ya29.", r"ya29\.[A-Za-z0-9_.-]{20,2048}+"),
    _key("1//0", _BEGINS + "1//0[A-Za-z0-9_-]{30,512}+"),
    _key("xox xwfp", r"(?:xox[a-z]|xoxe\.xox[bp]|xwfp)-[A-Za-z0-9-]{10,512}+"),  # Slack
    _key("xapp-", r"xapp-[0-9]-[A-Za-z0-9-]{10,512}+"),
    _key("AKIA ASIA ABIA ACCA A3T", _BEGINS + r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}(?![A-Za-z0-9])"),  # AWS
    _key("npm_", _BEGINS + "npm_[A-Za-z0-9]{30,64}+"),
    _key("pypi-", _BEGINS + "pypi-[A-Za-z0-9_-]{32,1024}+"),
    _key("hf_ api_org_", _BEGINS + "(?:hf|api_org)_[A-Za-z0-9]{30,64}+"),  # Hugging Face
    _key("SG.", _BEGINS + r"SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,128}+"),  # SendGrid
    _key("hvs. hvb. hvr.", _BEGINS + r"hv[sbr]\.[A-Za-z0-9_-]{20,512}+"),  # Vault
    _key("s.", r"(?<![A-Za-z0-9_.])s\.(?=[A-Za-z]{0,23}[0-9])[A-Za-z0-9]{24}(?![A-Za-z0-9_.(])"),
    _key("doo_v1_ dop_v1_ dor_v1_", "do[opr]_v1_[a-f0-9]{40,64}+"),  # DigitalOcean
    _key("dapi", _BEGINS + "dapi[a-f0-9]{32}(?:-[0-9])?(?![A-Za-z0-9])"),  # Databricks
    _key("dckr_", "dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,64}+"),  # Docker
    _key("shpat_ shpca_ shppa_ shpss_", "shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}"),  # Shopify
    _key("sq0 EAAA", _BEGINS + "(?:sq0[a-z]{3}-[A-Za-z0-9_-]{22,64}+|EAAA[A-Za-z0-9_-]{50,100}+)"),  # Square
    _key("EAA", _BEGINS + "EAA(?=[A-Za-z]{0,200}[0-9])[A-Za-z0-9]{90,400}+"),  # Meta
    _key("glsa_ glc_", _BEGINS + "(?:glsa|glc)_[A-Za-z0-9+/=_]{32,512}+"),  # Grafana
    _key("NRAK- NRJS- NRII- NRRA-", "NR(?:AK|JS|II|RA)-[A-Za-z0-9]{19,64}+"),  # New Relic
    _key("lin_api_ lin_oauth_", "lin_(?:api|oauth)_[A-Za-z0-9]{32,64}+"),
    _key("ntn_ secret_", _BEGINS + "(?:ntn_[A-Za-z0-9]{40,64}+|secret_[A-Za-z0-9]{43}(?![A-Za-z0-9]))"),  # Notion
    _key("pat", _BEGINS + r"pat[A-Za-z0-9]{14}\.[a-f0-9]{64}"),  # Airtable
    _key("ATATT ATCTT ATBB", _BEGINS + "(?:AT[AC]TT3|ATBB)[A-Za-z0-9_=-]{20,512}+"),  # Atlassian
    _key("pul- PMAK- dp. pscale_ sbp_ nfp_ fo1_", _BEGINS + r"(?:pul-[a-f0-9]{40}|PMAK-[a-f0-9]{24}-[a-f0-9]{34}"
         r"|dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9_.-]{20,100}+|pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{30,64}+"
         r"|sbp_[a-f0-9]{40}|nfp_[A-Za-z0-9]{36,64}+|fo1_[A-Za-z0-9_-]{43})"),
    _key("r8_ gsk_ xai- pplx- tvly- pcsk_ lsv2_ sntry rubygems_ figd_ CFPAT- tfp_ rzp_ FLWSECK AGE-SECRET-KEY- HRKU-",
         _BEGINS + "(?:r8_[A-Za-z0-9]{37,64}+|gsk_[A-Za-z0-9]{40,64}+|xai-[A-Za-z0-9]{40,100}+|pplx-[A-Za-z0-9]{40,64}+"
         "|tvly-[A-Za-z0-9-]{20,64}+|pcsk_[A-Za-z0-9_]{40,100}+|lsv2_(?:pt|sk)_[a-f0-9_]{32,64}+"
         "|sntry[su]_[A-Za-z0-9+/=_]{40,512}+|rubygems_[a-f0-9]{48}|figd_[A-Za-z0-9_-]{40,64}+|CFPAT-[A-Za-z0-9_-]{40,64}+"
         "|tfp_[A-Za-z0-9_.=-]{40,80}+|rzp_(?:live|test)_[A-Za-z0-9]{14,32}+|FLWSECK(?:_TEST)?-[A-Za-z0-9-]{12,64}+"
         "|AGE-SECRET-KEY-1[A-Z0-9]{58}|HRKU-[A-Za-z0-9_-]{30,80}+)"),
    _key("Q~", r"[A-Za-z0-9_.~]{3}[0-9]Q~[A-Za-z0-9_.~-]{31,40}+"),  # Entra ID
    _key(".atlasv1.", r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,100}+"),  # Terraform
    _key("-us", _BEGINS + "[a-f0-9]{32}-us[0-9]{1,2}(?![A-Za-z0-9])"),  # Mailchimp
    _key("key-", _BEGINS + "key-[a-f0-9]{32}(?![A-Za-z0-9])"),  # Mailgun
    _key("SK", _BEGINS + "SK[a-f0-9]{32}(?![A-Za-z0-9])"),  # Twilio
    _key("AKCp", _BEGINS + "AKCp[A-Za-z0-9]{60,80}+"),  # Artifactory
    _key(":", r"(?<![A-Za-z0-9])(?:bot)?[0-9]{8,10}:(?=[A-Za-z0-9_-]{0,34}[A-Z])(?=[A-Za-z0-9_-]{0,34}[a-z])"
              r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),  # Telegram
    _key(".", _BEGINS + r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}(?![A-Za-z0-9_-])"),  # Discord
    _key("eyJ", r"eyJ[A-Za-z0-9_-]{8,8192}+(?:\.[A-Za-z0-9_-]{4,8192}+){1,4}+\.?", "jwt"),
    _key("hooks.slack.com", "hooks\\.slack\\.com/[a-z]{1,20}/[A-Za-z0-9_/+-]{10,200}+", "webhook"),
    _key("/webhooks/", r"/api/(?:v[0-9]{1,2}/)?webhooks/[0-9]{5,25}/[A-Za-z0-9_-]{20,200}+", "webhook"),  # Discord
    _key("webhookb2/ office.com/webhook/", r"[a-z0-9-]{0,63}\.?(?:webhook\.)?office\.com/webhook(?:b2)?/[A-Za-z0-9@/_-]{20,400}+", "webhook"),
    _key("hooks.zapier.com", r"hooks\.zapier\.com/hooks/[A-Za-z0-9/_-]{8,200}+", "webhook"),
    _key("/bot/v2/hook/ /with/key/", r"/(?:bot/v2/hook|with/key)/[A-Za-z0-9_-]{16,100}+", "webhook"),
    _key("/hooks/", r"/hooks/[a-z0-9]{26}(?![A-Za-z0-9])", "webhook"),  # Mattermost
)  # fmt: skip
"""Facts: gitleaks 8, config/gitleaks.toml, and the providers' pages on the forms of their keys."""

_LONG_WORDS: Final = re.compile(r"[A-Za-z0-9_.~+/=:@-]{16,}+")
"""Every key has so many such characters in a row."""


_DIGIT: Final = re.compile("[0-9]")


def _keys(text: str, _lowered: str) -> Iterator[Found]:
    words = " ".join(_LONG_WORDS.findall(text))
    if not _DIGIT.search(words) and "hf_" not in words and "api_org_" not in words:
        return
    for key in _KEYS:
        for hint in key.hints:
            if hint in words:
                for match in key.pattern.finditer(text):
                    yield Found(match.start(), match.end(), key.kind)
                break


# --- Private keys -----------------------------------------------------------------------------------------------------

_PEM_BEGIN: Final = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_PEM_END: Final = re.compile(r"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_PEM_CUT: Final = re.compile(
    r"""(?:(?:\\{1,8}[nrt]|[\s"'`+,|>#*\\]|(?:Proc-Type|DEK-Info|Version|Comment|Hash):[^\n\\]{0,200})*+"""
    r"[A-Za-z0-9+/=_]{16,}+)*+(?:(?:\\{1,8}[nrt]|[\s\"'+])*+[A-Za-z0-9+/]{1,15}={1,2})?"
)
"""What belongs to a private key that is cut off: lines of base64."""

_PEM_BASE64: Final = re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/=_-]{60,}+")
_MOST_PEM: Final = 20_000


def _private_keys(text: str, _lowered: str) -> Iterator[Found]:
    if "PRIVATE KEY" in text:
        place = 0
        while begin := _PEM_BEGIN.search(text, place):
            dashes = text.find("----", begin.end(), begin.end() + _MOST_PEM)
            end = _PEM_END.match(text, dashes) if dashes >= 0 else None
            place = end.end() if end else _end_of(_PEM_CUT.match(text, begin.end()))
            yield Found(begin.start(), place, "private_key")
    if "LS0tLS1CRUdJTi" in text:  # -----BEGIN in base64
        for match in _PEM_BASE64.finditer(text):
            if b"PRIVATE KEY" in (_decoded(match[0][:80]) or b""):
                yield Found(match.start(), match.end(), "private_key")
    if "Private-Lines:" in text:  # PuTTY
        for match in _PUTTY.finditer(text):
            yield Found(match.start(1), match.end(1), "private_key")
    if '"kty' in text or "'kty" in text:
        for match in _JWK.finditer(text):
            yield Found(match.start(1), match.end(1), "private_key")


_PUTTY: Final = re.compile(r"Private-Lines: ?[0-9]{1,3}((?:(?:\\[nr]|\s){1,4}[A-Za-z0-9+/=]{8,80}){1,200}+)")
_JWK: Final = re.compile(r"""["'](?:d|p|q|dp|dq|qi|k)\\{0,7}["']\s{0,4}:\s{0,4}\\{0,7}["']([A-Za-z0-9_-]{20,2048}+)""")


def _end_of(match: re.Match[str] | None) -> int:
    if match is None:
        raise AssertionError("this is a bug: the pattern matches the empty text")
    return match.end()


def _decoded(text: str) -> bytes | None:
    """Return what a text is in base64; None: it is none."""
    text = text.rstrip("=")
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        return None


# --- Headers and URLs -------------------------------------------------------------------------------------------------

_QUOTES: Final = r"""(?:\\{0,7}["'`])?"""

_AUTHORIZATION: Final = re.compile(
    r"(?=[Aa])(?i:authorization)" + _QUOTES + r"[\])]?\s{0,8}(?:[:=,]|=>)\s{0,8}" + _QUOTES +
    r"(?![\"'\[<${%])(?:f[\"'])?(?:(?P<scheme>[A-Za-z][A-Za-z0-9-]{1,24})(?:[ \t:=]|%20){1,4}(?![<${%\[]))?(?P<value>[^\s\"'`<>\\,;(){}\[\]]{6,8192}+)"
)  # fmt: skip
_BEARER: Final = re.compile(
    r"(?=[Bb])(?i:bearer)(?:\s{1,4}|%20|\+|[:=]\s{0,2})((?=[A-Za-z0-9_.~+/=-]{0,200}?[0-9])[A-Za-z0-9_.~+/-]{12,8192}+=*+)"
)
_BASIC: Final = re.compile(r"(?=[Bb])(?i:basic)(?:\s{1,4}|%20)([A-Za-z0-9+/_-]{6,2048}+={0,2}+)")
_COOKIE: Final = re.compile(
    r"(?=[CcSs])(?i:(set-)?cookie)" + _QUOTES + r"[\])]?\s{0,4}[:=,]\s{0,4}" + _QUOTES +
    r"(?=[A-Za-z0-9_.%$-]{1,100}=)([^\r\n\"'\\]{3,8192}+)"
)  # fmt: skip
_COOKIE_OPTION: Final = re.compile(
    r"(?<![A-Za-z0-9-])(?:-b|--cookie)[ =]{1,3}[\"']?((?=[A-Za-z0-9_.%-]{1,100}=)[^\r\n\"']{3,8192}+)"
)
_USER_INFO: Final = re.compile(
    r"://(?:(?P<user>[^\s/?#@:\"'`<>\\]{0,100}+):(?P<password>[^\s@/\"'`<>\\]{1,300}+(?:@[^\s@/\"'`<>\\]{1,100}+(?=@))*+)|(?P<token>[A-Za-z0-9_.~%-]{16,300}+))(?:@|(?=\[REDACTED:email\]))"
)
_ENCODED_USER_INFO: Final = re.compile(
    r"%3A%2F%2F[A-Za-z0-9_.-]{0,100}+%3A(?P<password>(?:[^\s%&\"'`<>\\]|%(?!40|2F)[0-9A-Fa-f]{2}){1,300}+)%40"
)
_SIGNED: Final = re.compile(
    r"(?:[?&;]|%3F|%26|\\u0026)(?:amp;)?(?P<name>(?i:x-(?:amz|goog|oss|cos|obs|ms)-(?:signature|credential|security-token)|signature|sig|policy|key-pair-id"
    r"|awsaccesskeyid|googleaccessid|ossaccesskeyid|(?:access_|id_|refresh_|auth_|api_)?token|api_?key|appid|key|auth|code|client_secret|hmac|hdnts|verify|secret|password|passwd|pwd|sessionid|session|sid|jwt|ticket|sas))"
    r"(?:=|%3D)(?P<value>[^\s&\"'`<>\\;,)\]}\[#]{6,4096}+)"
)
_SIGNATURES: Final = frozenset(
    {"signature", "sig", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid", "hmac", "hdnts"}
)


def _headers(text: str, lowered: str) -> Iterator[Found]:
    if "authorization" in lowered:
        yield from _authorizations(text)
    if "bearer" in lowered:
        for match in _BEARER.finditer(text):
            yield Found(match.start(1), match.end(), "bearer_token")
    if "basic" in lowered:
        for match in _BASIC.finditer(text):
            decoded = _decoded(match[1].replace("-", "+").replace("_", "/"))
            if decoded is not None and b":" in decoded and all(32 <= byte < 127 or byte >= 0xC3 for byte in decoded):
                yield Found(match.start(1), match.end(1), "basic_auth")
    if "cookie" in lowered:
        for match in _COOKIE.finditer(text):
            first = text.find(";", match.start(2), match.end(2)) if match[1] else -1
            yield Found(match.start(2), match.end(2) if first < 0 else first, "cookie")
    if "-b" in text or "--cookie" in text:
        for match in _COOKIE_OPTION.finditer(text):
            yield Found(match.start(1), match.end(1), "cookie")


def _authorizations(text: str) -> Iterator[Found]:
    """Find what a header `Authorization` holds, whatever its scheme is."""
    done = 0
    for match in _AUTHORIZATION.finditer(text):
        value, scheme = match["value"], (match["scheme"] or "").lower()
        start, end = match.span("value")
        if not scheme:
            if _looks_secret(value):
                yield Found(start, end, "bearer_token")
        elif scheme.startswith(_PARTED_SCHEMES):
            line_end = _END_OF_HEADER.search(text, max(end, done), start + 4096)
            until = line_end.start() if line_end else start + 4096
            for part in _AUTH_PART.finditer(text, max(start, done), until):
                yield Found(part.start(1), part.end(1), "basic_auth")
            done = max(done, until)
        elif (scheme in _SCHEMES and not harmless(value)) or _looks_secret(value):
            yield Found(start, end, "basic_auth" if scheme == "basic" else "bearer_token")


_PARTED_SCHEMES: Final = ("aws4", "digest", "oauth", "hmac")
_END_OF_HEADER: Final = re.compile(r"[\n'`]|\\n")
_SCHEMES: Final = frozenset(
    {
        "basic",
        "bearer",
        "token",
        "apikey",
        "api-key",
        "key",
        "negotiate",
        "ntlm",
        "sharedkey",
        "sharedkeylite",
        "bot",
        "digest",
        "oauth",
        "hmac",
        "aws4-hmac-sha256",
        "splunk",
        "snowflake",
        "genie",
        "genie_key",
        "sso-key",
        "pat",
        "jwt",
        "klaviyo-api-key",
        "deepl-auth-key",
        "discogs",
        "qbox",
        "secret",
    }
)
_AUTH_PART: Final = re.compile(
    r"(?i:signature|response|oauth_token|oauth_consumer_key|oauth_signature|credential|nonce|mac|hmac)=\\{0,3}\"?([^\s\",;\\]{6,1024})"
)


def _urls(text: str, _lowered: str) -> Iterator[Found]:
    if "://" in text:
        for match in _USER_INFO.finditer(text):
            part = "password" if match["token"] is None else "token"
            if _random(match["token"]) if match["token"] else not _PLACEHOLDER.fullmatch(match["password"]):
                yield Found(*match.span(part), "password")
    if "%3A%2F%2F" in text:
        for match in _ENCODED_USER_INFO.finditer(text):
            yield Found(*match.span("password"), "password")
    if ("=" in text or "%3D" in text) and ("?" in text or "&" in text or "%" in text or "\\u0026" in text):
        for match in _SIGNED.finditer(text):
            name, value = match["name"].lower(), match["value"]
            sure = name.startswith("x-") or (name in _SIGNATURES and len(value) >= 16)
            if (sure and not _PLACEHOLDER.fullmatch(value)) or _looks_secret(value):
                yield Found(match.start("value"), match.end("value"), "signed_url")


# --- What is assigned to a name ---------------------------------------------------------------------------------------

_NAME_CHARACTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_.-"
_STEMS: Final = r"(?:pass|pwd|psw|pw(?![a-z])|secret|sess|sig(?:nature|(?![a-z]))|sid(?![a-z])|token|key|cred|cv[vc](?![a-z])|auth(?!orization)|jwt|otp|pin(?:code|(?![a-z]))|bindpw|requirepass|mnemonic|hmac|recovery)"
_TYPE_NAMES: Final = r"(?:&'?static str|&str|string\??|str|secretstr|optional\[str\]|str \| none|varchar)"
_ASSIGNED: Final = re.compile(
    _STEMS + r"[a-z0-9_.-]{0,48}+(?:"
    # "name": value   name=value   ["name"] = value   name: str = value   name%3Dvalue
    r"(?P<assign>(?:\\{0,7}[\"'`])?[\])]{0,2}[ \t]{0,40}(?::=|=>|={1,3}+|:(?!:)|%3[ad])(?:[ \t]{0,40}" + _TYPE_NAMES + r"[ \t]{0,4}=)?(?:\*{1,2}(?=[ \t]))?[ \t]{0,40})"
    # name: NAME, value: value   name="NAME" value="value"   "NAME" { default = "value"
    r"|(?P<value>(?:\\{0,7}[\"'`])?[ \t]{0,4}[,;{]?(?:[ \t\r\n]|\\{1,7}[nrt]|-[ \t]){0,40}(?:type[ \t]{0,8}=[ \t]{0,4}[a-z]{1,10}(?:[ \t\r\n]|\\{1,7}[nrt]){0,40}|sensitive[ \t]{0,8}=[ \t]{0,4}[a-z]{4,5}(?:[ \t\r\n]|\\{1,7}[nrt]){0,40}|description[ \t]{0,8}=[ \t]{0,4}\\{0,7}\"[^\"\n]{0,100}\"(?:[ \t\r\n]|\\{1,7}[nrt]){0,40}){0,3}(?:\\{0,7}[\"'])?(?:value|default|plaintext)(?:\\{0,7}[\"'])?[ \t]{0,8}[:=][ \t]{0,8})"
    # <name>value   --name value   "name", "value"   NAME value   | name | value
    r"|(?P<tag>>)"
    r"|(?P<list>(?:\\{0,7}[\"'`])[ \t]{0,4},[ \t\r\n]{0,40}(?=\\{0,7}[\"'`]))"
    r"|(?P<loose>(?:\\{0,7}[\"'`*]{1,2})?(?:[ \t]{1,40}(?:\|[ \t]{0,40})?|\|[ \t]{0,40})(?=[^\s|=:]))"
    r")(?!\\{0,7}[\"'`]?\[redacted:)(?=[rbfu]{0,2}\\{0,7}[\"'`]|(?!\W?(?:key|sig|sid|jwt|otp|pin|auth|cred|pass|sess|token|secret)=)[^\s\"'`<>]{4})"
)  # fmt: skip
"""A name and what stands between it and a value, in lower case."""

_VALUE: Final = re.compile(
    r"(?P<prefix>[rbfuRBFU]{0,2})(?P<escapes>\\{0,7}+)(?P<quote>[\"'`])(?P<quoted>(?:(?!(?<!\\)(?P=escapes)(?P=quote))[^\r\n]){1,4096}+)"
    r"|(?P<bare>[^\s\"'`<>,;&|\\(){}\[\]]{1,4096}+)"
)
_WEAK_VALUE: Final = re.compile(
    r"(?P<prefix>)(?P<escapes>\\{0,7}+)(?P<quote>[\"'`])(?P<quoted>[A-Za-z0-9+/_.~%=:!$|-]{16,4096}+)(?P=escapes)(?P=quote)"
    r"|(?P<bare>[A-Za-z0-9+/_.~%-]{16,4096}+={0,2}+)"
)
"""A value without what may be a name and a separator, so that no text is read twice."""

_ENV_VALUE: Final = re.compile(r"[^\s\"'`\\]{1,4096}+")
_REST_OF_LINE: Final = re.compile(r"[^\r\n\"'\\]{1,300}")

_PASSWORD_WORDS: Final = frozenset(
    [
        "password",
        "passwd",
        "passphrase",
        "passwort",
        "passcode",
        "pass",
        "pwd",
        "psw",
        "pw",
        "pswd",
        "dbpass",
        "userpass",
        "mypass",
        "smtppass",
        "rootpass",
        "sshpass",
        "adminpass",
        "bindpw",
        "requirepass",
        "masterauth",
        "mnemonic",
        "pincode",
        "passwords",
        "passphrases",
        "kennwort",
        "contrasena",
    ]
)
_TOKEN_WORDS: Final = frozenset(
    [
        "secret",
        "secrets",
        "token",
        "tokens",
        "credential",
        "credentials",
        "cred",
        "creds",
        "apikey",
        "apikeys",
        "apisecret",
        "accesskey",
        "secretkey",
        "authkey",
        "privatekey",
        "signingkey",
        "encryptionkey",
        "masterkey",
        "accountkey",
        "sharedkey",
        "accesstoken",
        "authtoken",
        "clientsecret",
    ]
)
_WEAK_WORDS: Final = frozenset(
    [
        "key",
        "keys",
        "auth",
        "signature",
        "sig",
        "sessionid",
        "session",
        "sess",
        "sessid",
        "phpsessid",
        "jsessionid",
        "sid",
        "jwt",
        "hmac",
        "otp",
        "oauth",
        "oauth2",
        "bearer",
        "cookie",
        "pin",
        "cvv",
        "cvc",
        "recovery",
    ]
)
_LONG_STEMS: Final = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "secretkey",
    "accesskey",
    "credentials",
)
_KEYS_OF: Final = frozenset(
    [
        "api",
        "access",
        "secret",
        "private",
        "signing",
        "encryption",
        "decryption",
        "account",
        "master",
        "shared",
        "storage",
        "auth",
        "subscription",
        "service",
        "session",
        "admin",
        "function",
        "app",
        "application",
        "license",
        "deploy",
        "ssh",
        "aes",
        "crypto",
        "hmac",
        "jwt",
        "rsa",
        "webhook",
        "provider",
        "project",
        "server",
        "client",
        "integration",
        "ingest",
        "write",
        "read",
    ]
)
_ENDINGS: Final = frozenset(
    [
        "prod",
        "production",
        "stage",
        "staging",
        "dev",
        "test",
        "old",
        "new",
        "value",
        "plain",
        "b64",
        "base64",
        "confirm",
        "confirmation",
        "again",
        "primary",
        "secondary",
        "base",
        "hex",
        "text",
        "txt",
        "string",
        "str",
        "current",
        "default",
        "live",
        "sandbox",
        "backup",
        "key1",
        "key2",
    ]
)
_OTHER_THINGS: Final = frozenset(
    [
        "existing",
        "image",
        "pull",
        "max",
        "min",
        "num",
        "total",
        "is",
        "has",
        "use",
        "require",
        "required",
        "requires",
        "no",
        "count",
        "invalid",
        "missing",
        "expired",
        "expires",
        "next",
        "page",
        "per",
        "avg",
        "mean",
        "prompt",
        "completion",
        "input",
        "output",
        "cached",
        "reasoning",
        "remaining",
        "used",
        "n",
    ]
)
_WORDS: Final = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_NO, _IF_IT_LOOKS_SO, _TOKEN, _PASSWORD = range(4)
"""Whether a name is that of a secret."""


@lru_cache(maxsize=8192)
def _strength(name: str) -> int:
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1] in _ENDINGS or words[-1].isdigit()):
        words.pop()
    if len(words) > 2 and words[-1].startswith("v") and words[-1][1:].isdigit():
        words.pop()
    if not words:
        return _NO
    last = words[-1]
    if last in ("authorization", "cookie"):
        return _TOKEN
    if len(words) > 1 and words[0] in _OTHER_THINGS:
        return _NO
    if (
        last in _PASSWORD_WORDS
        or last.endswith(_LONG_STEMS[:3])
        or (len(words) > 1 and last == "phrase" and words[-2] in ("pass", "seed", "recovery", "secret"))
    ):
        return _PASSWORD
    if last in _TOKEN_WORDS or last.endswith(_LONG_STEMS[3:]):
        return _TOKEN
    if last in ("key", "keys") and len(words) > 1 and words[-2] in _KEYS_OF:
        return _TOKEN
    if last == "word" and len(words) > 1 and words[-2] == "pass":
        return _PASSWORD
    if last in _WEAK_WORDS or (last == "id" and len(words) > 1 and words[-2] in ("session", "sess")):
        return _IF_IT_LOOKS_SO
    return _NO


_PLACEHOLDER: Final = re.compile(
    r"\$\{.*|\$\(.*|\{\{.*|\{%.*|<.*|%(?:\([a-z_]*\))?[sdvq]|%[A-Z_]+%|\$[A-Z_][A-Z0-9_]*|\$[a-z_]+|\{\w*\}|[*xX.#_•-]{3,}|\?+|\.\.\.|(?i:your|my|the|some|insert|enter|example|sample|dummy|placeholder|redacted|hidden|masked|removed|omitted|\(redacted\)|n/a|todo|tbd)(?:[-_ ].{0,40})?"
)
_WORD_VALUES: Final = frozenset(
    [
        "none",
        "null",
        "nil",
        "undefined",
        "true",
        "false",
        "yes",
        "no",
        "on",
        "off",
        "str",
        "string",
        "int",
        "integer",
        "bytes",
        "bool",
        "boolean",
        "float",
        "number",
        "object",
        "array",
        "list",
        "dict",
        "any",
        "type",
        "text",
        "optional",
        "required",
        "self",
        "this",
        "cls",
        "env",
        "new",
        "await",
        "async",
        "function",
        "lambda",
        "return",
        "not",
        "if",
        "else",
        "and",
        "or",
        "in",
        "is",
        "char",
        "varchar",
        "secretstr",
        "void",
        "unknown",
        "empty",
        "default",
        "auto",
        "hidden",
        "masked",
        "missing",
        "invalid",
        "expired",
        "set",
        "unset",
        "disabled",
        "enabled",
        "password",
        "username",
        "same-origin",
        "include",
        "omit",
    ]
)
_CODE: Final = re.compile(
    r"(?:self|this|cls|config|conf|cfg|settings|options|opts|args|kwargs|params|props|state|process|os|env|environ|req|request|res|response|ctx|context|event|data|body|form|user|account|session|secrets?|creds?|credentials?|auth|input|values|vars?|local|module|resource|each|github|steps|inputs|item|row|result|payload|headers?|json|app|client|server|db|model|parser|ns|flask|django|st|tokenizer|batch|outputs?|np|torch|keys?|tokens?|passwords?)(?:\??\.\w+)+!?|[A-Za-z_]\w*(?:::\w+)+"
)
_STOP_WORDS: Final = frozenset(
    [
        "the",
        "is",
        "are",
        "must",
        "be",
        "been",
        "a",
        "an",
        "to",
        "of",
        "for",
        "and",
        "or",
        "should",
        "not",
        "at",
        "least",
        "required",
        "with",
        "your",
        "you",
        "it",
        "this",
        "that",
        "was",
        "were",
        "has",
        "have",
        "will",
        "can",
        "cannot",
        "may",
        "from",
        "in",
        "on",
        "by",
        "as",
        "if",
        "please",
        "contain",
        "contains",
        "length",
        "characters",
        "when",
        "than",
    ]
)
_DATE_OR_NUMBER: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9:.]{4,15}(?:Z|[+-][0-9:]{4,6})?)?|[+-]?[0-9]+(?:[.,:][0-9]+)*[%a-z]?|v?[0-9]+(?:\.[0-9a-z]+){1,4}(?:[-+][0-9A-Za-z.]+)?|0x[0-9a-fA-F]{1,8}"
)
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PATH: Final = re.compile(
    r"(?:[A-Za-z]:\\|~/|\.{0,2}/)[\w ./@+-]*|(?:https?|file|s3|gs)://[^\s@?]*|[\w-]+(?:/[\w.-]+)+\.\w{1,5}|[\w.-]+\.(?:ya?ml|json|txt|pem|key|crt|env|py|js|ts|go|rs|java|rb|sh|cfg|conf|ini|toml)"
)


@lru_cache(maxsize=1024)
def harmless(value: str) -> bool:
    """Whether a value that is assigned to a secret's name is a placeholder, code or prose instead."""
    lowered = value.lower().strip(".:;!?")
    if len(value) < 3 or lowered in _WORD_VALUES or _PLACEHOLDER.fullmatch(value) or _CODE.fullmatch(value):
        return True
    if _PATH.fullmatch(value):
        return not any(_random(part) for part in value.split("/") if "/" in value)
    words = lowered.split()
    return len(words) > 2 and not _STOP_WORDS.isdisjoint(words)


@lru_cache(maxsize=1024)
def _looks_secret(value: str) -> bool:
    """Whether a value looks like a secret whatever its name is: mixed characters, no word, number, date, path or id."""
    if (
        len(value) < 6
        or value.isalpha()
        or harmless(value)
        or _DATE_OR_NUMBER.fullmatch(value)
        or _UUID.fullmatch(value)
    ):
        return False
    digits = any(character.isdigit() for character in value)
    letters = any(character.isalpha() for character in value)
    if not (digits and letters):
        return letters and len(value) >= 8 and any(character in "!@#$%^&*+=~?" for character in value)
    return not _PLAIN_ID.fullmatch(value)


_PLAIN_ID: Final = re.compile(
    r"[a-z]{2,}(?:[-_.][a-z]{1,})*[-_.]?[0-9]{1,4}|[A-Z]{1,5}-?[0-9]{1,10}|[0-9]+[a-z]{1,8}|[a-z]+[0-9]?(?:[-_./:][a-z0-9]{1,12}){1,6}"
)


def _random(value: str) -> bool:
    """Whether a value looks random: at least 16 characters, letters and digits, more than 3 bits a character."""
    if len(value) < 16 or not _looks_secret(value):
        return False
    value = value[:256]
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values()) > 3


def _likely(value: str, strength: int) -> bool:
    """Whether a value is a secret where the text hardly says that it belongs to the name."""
    if _looks_secret(value):
        return True
    return (
        strength == _PASSWORD
        and len(value) >= 6
        and not harmless(value)
        and not _DATE_OR_NUMBER.fullmatch(value)
        and _DIGIT.search(value) is not None
    )


_ENV_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]*")


_STEM: Final = re.compile(
    "pass|pw|secret|token|key|cred|auth|sig|sess|sid|jwt|otp|pin|psw|cvv|cvc|mnemonic|hmac|recovery|bindpw|cookie"
)


def _assigned(text: str, lowered: str) -> Iterator[Found]:
    if not _STEM.search(lowered):
        return
    place = 0
    while match := _ASSIGNED.search(lowered, place):
        place = match.end()
        how = match.lastgroup or ""
        start, name_end = match.start(), match.start(how)
        begin = start
        if start and text[start - 1] in _NAME_CHARACTERS:
            begin -= len(before := text[max(0, start - 48) : start]) - len(before.rstrip(_NAME_CHARACTERS))
            if start - begin >= 2 and text[begin - 1 : begin] == "%":
                begin += 2
        name = text[begin:name_end]
        strength = _strength(name)
        if strength == _NO or (strength == _IF_IT_LOOKS_SO and not _WEAK_VALUE.match(text, place)):
            place = name_end
            continue
        found = _value(text, match, how, name, strength, text[begin - 1 : begin])
        if found is None:
            place = max(name_end, start + 1)
        else:
            yield found
            place = found.end


def _value(text: str, match: re.Match[str], how: str, name: str, strength: int, before: str) -> Found | None:
    """Return the place of the secret behind a name. `before`: the character in front of the name."""
    value = (_WEAK_VALUE if strength == _IF_IT_LOOKS_SO else _VALUE).match(text, match.end())
    if value is None:
        return None
    quoted = value["quoted"]
    part = "quoted" if quoted is not None else "bare"
    start, end = value.span(part)
    content = value[part]
    if quoted is None:
        if how == "assign" and "=" in match[how] and " " not in match[how] and _ENV_NAME.fullmatch(name):
            whole = _ENV_VALUE.match(text, start)
            if whole is not None and not whole[0].startswith(("$(", "${")):
                end, content = whole.end(), whole[0]
        elif text[end : end + 1] in ("(", "[") or text.startswith(("::", "=="), end):
            return None
        if strength == _PASSWORD and how == "assign" and content.isalpha() and content.islower():
            line = _REST_OF_LINE.match(text, start)
            words = line[0].split() if line else []
            if (
                4 <= len(words) <= 24
                and all(word.isalpha() and word.islower() for word in words)
                and _STOP_WORDS.isdisjoint(words)
            ):
                end, content = start + len(line[0].rstrip()) if line else end, "a" * 9
            elif len(words) > 1 and words[1].isalpha() and words[1].islower():
                return None
        content = content.rstrip(".:") if content[-1:] in ".:" else content
        end = min(end, start + len(content)) if part == "bare" and content and text.startswith(content, start) else end
    if (
        how == "assign"
        and quoted is None
        and content.replace("_", "").isalpha()
        and ("_" in content or _strength(content) != _NO)
        and not content.isupper()
    ):
        return None
    if not _accepted(content, how, name, strength, before, quoted is not None):
        return None
    return Found(start, end, "password")


def _accepted(content: str, how: str, name: str, strength: int, before: str, quoted: bool) -> bool:
    if how == "tag":
        return before in ("<", ":") and not harmless(content) and strength > _IF_IT_LOOKS_SO
    if strength == _IF_IT_LOOKS_SO:
        return how in ("assign", "value") and _random(content) and " " not in content
    if how == "loose":
        flag = name.startswith("-")
        if flag:
            return (
                not content.startswith("-")
                and not harmless(content)
                and (strength == _PASSWORD or not content.isalpha() or quoted)
            )
        compound = _ENV_NAME.fullmatch(name) or "_" in name
        return bool(compound) and _likely(content, strength)
    if how == "list":
        return (name.startswith("-") and not harmless(content)) or _likely(content, strength)
    if harmless(content) or (
        not quoted and content.isalpha() and content.islower() and name.lower() in ("pw", "pwd", "pass")
    ):
        return False
    if strength == _TOKEN:
        return not _DATE_OR_NUMBER.fullmatch(content) and not (
            content.isalpha() and not quoted and content.islower() and len(content) < 12
        )
    return True


# --- Commands ---------------------------------------------------------------------------------------------------------

_ARGUMENT: Final = r"""(?:"([^"\n]{2,300})"|'([^'\n]{2,300})'|((?![-$<{\[*])[^\s"'`;|&<>\\]{2,300}))"""
_COMMANDS: Final = tuple(
    (hints.split(), re.compile(rf"(?<![A-Za-z0-9_])(?:{command})(?![A-Za-z0-9_])"), re.compile(rf"(?<![\w-]){option}" + _ARGUMENT))
    for hints, command, option in (
        ("mysql maria", "mysql(?:dump|admin|import|show|check|sh)?|mariadb(?:-dump|-admin)?",
         r"-p(?!rint|ath|rune|rotocol|lugin|rofile|ager)"),
        ("sshpass zip 7z rar", "sshpass|7z[ar]?|zip|unzip|rar|unrar", "-[pP][ ]?"),
        ("mongo", "mongo(?:sh|dump|restore|import|export)?", "-p[ ]{1,4}"),
        ("login", "[a-z]{2,12} [a-z -]{0,20}login", "-p[ ]{1,4}"),
        ("rabbit sqlcmd bcp isql osql mosquitto ipmi cqlsh nodetool client sqlplus vsql beeline",
         "rabbitmqadmin|sqlcmd|bcp|[io]sql|mosquitto_(?:pub|sub)|ipmitool|cqlsh|nodetool|clickhouse-client|sqlplus|vsql|beeline",
         "-(?:p|P|pw|u)[ ]{1,4}"),
        ("plink pscp psftp putty", r"(?:plink|pscp|psftp|putty)(?:\.exe)?", "-pw[ ]{1,4}"),
        ("redis", "redis-cli", "-a[ ]{1,4}"),
        ("ldap", "ldap(?:search|add|modify|delete|whoami|passwd)", "-[wW][ ]{0,4}"),
        ("htpasswd", "htpasswd", r"-\w{0,5}b\w{0,5}[ ]{1,4}\S{1,200}[ ]{1,4}\S{1,100}[ ]{1,4}"),
        ("openssl", "openssl", "-(?:pass(?:in|out)?|k|K)[ ]{1,4}(?:pass:)?+"),
        ("rdesktop freerdp", "x?freerdp|rdesktop", "/p:"),
        ("snmp", "snmp[a-z]{1,10}", "-[AX][ ]{1,4}"),
    )
)  # fmt: skip
_USER_OPTION: Final = re.compile(
    r"(?<![A-Za-z0-9-])(?:-u|-U|-a|--user|--proxy-user|--auth|--creds|--credentials)(?:[ =]{0,4}|\\{0,7}[\"'],[ ]{0,4}\\{0,7}[\"'])\\{0,7}[\"']?(?P<user>[A-Za-z0-9_.@+\\/-]{1,100}+)[:%](?P<password>(?![/$<{\\])[^\s\"'`\\]{3,300}+)"
)
_USER_COMMANDS: Final = re.compile(r"\b(?:curl|wget|http|https|xh|smbclient|skopeo|rpcclient|svn)(?![A-Za-z0-9_])")
_LOGIN: Final = re.compile(
    r"\blogin[\s]{1,20}\S{1,200}[\s]{1,20}(?:account\s{1,20}\S{1,200}\s{1,20})?password[\s]{1,20}(?P<secret>\S{1,300})"
)
_PGPASS: Final = re.compile(
    r"(?:^|(?<=\\n)|(?<=[\n\"'`]))[A-Za-z0-9_.*-]{1,100}+:(?:[0-9]{2,5}|\*):[^:\s\"'\\]{1,64}+:[^:\s\"'\\]{1,64}+:([^\s\"'\\]{2,200}+)"
)
_SQL_PASSWORD: Final = re.compile(
    r"(?=[IPip])(?i:identified(?: with [a-z0-9_]{1,40})? by|password|passwd)[ ]{1,4}\\{0,7}(['\"])(?P<secret>[^'\"\n\\]{3,200})\\{0,7}\1"
)
_SET_SPACE: Final = re.compile(
    r"(?=[rmsbRMSB])(?i:requirepass|masterauth|masterpass|bindpw|set password|spring\.datasource\.password|sasl_passwd)[ \t]{1,8}(?P<secret>[^\s\"'\\]{4,200})"
)
_PIPED: Final = re.compile(
    r"\b(?:echo|printf)[ ](?:-n |'%s' )?[\"']?(?P<secret>[^\s\"'|$\\]{4,200})[\"']?[ ]?\|[ ]?(?:sudo -S|\S{1,40} login|docker login|passwd|chpasswd|openssl)"
)
_VAULT_LOGIN: Final = re.compile(
    r"\b(?:vault login|npm config set \S{1,100}|git config \S{0,60}token)[ ](?P<secret>[A-Za-z0-9_.-]{16,200})"
)


def _commands(text: str, lowered: str) -> Iterator[Found]:
    if _OPTION.search(text) or "/p:" in text:
        for hints, command, option in _COMMANDS:
            for hint in hints:
                if hint in lowered:
                    yield from _options(text, command, option, (1, 2, 3), "password")
                    break
        if any(hint in lowered for hint in _USER_HINTS):
            yield from _options(text, _USER_COMMANDS, _USER_OPTION, ("password",), "basic_auth")
    for hint, pattern in _ARGUMENTS:
        if hint in lowered:
            for match in pattern.finditer(text):
                if not harmless(match["secret"]):
                    yield Found(match.start("secret"), match.end("secret"), "password")
    if text.count(":") >= 4 and _PORT.search(text):
        for match in _PGPASS.finditer(text):
            if not harmless(match[1]):
                yield Found(match.start(1), match.end(1), "password")


_USER_HINTS: Final = ("curl", "wget", "http", "xh", "smbclient", "skopeo", "rpcclient", "svn")
_PORT: Final = re.compile(r":(?:[0-9]{4,5}|\*):")
_OPTION: Final = re.compile(r"-(?<=[\s\"'`,\[(]-)[A-Za-z-]")
_ARGUMENTS: Final = (
    ("login", _LOGIN), *((hint, _SET_SPACE) for hint in ("requirepass", "masterpass", "set password", "datasource.password ", "sasl_passwd")), ("masterauth", _SET_SPACE), ("bindpw", _SET_SPACE), ("identified", _SQL_PASSWORD), ("password '", _SQL_PASSWORD), ('password "', _SQL_PASSWORD), ("password \\", _SQL_PASSWORD),
    ("echo ", _PIPED), ("printf ", _PIPED), ("vault login", _VAULT_LOGIN), (" config ", _VAULT_LOGIN),
)  # fmt: skip


_END_OF_COMMAND: Final = re.compile(r"[\n;]|\\n|[|&]{2}")
_MOST_COMMAND: Final = 600


def _options(
    text: str, command: re.Pattern[str], option: re.Pattern[str], groups: tuple[int | str, ...], kind: str
) -> Iterator[Found]:
    done = 0
    for match in command.finditer(text):
        if match.start() < done:
            continue
        done = match.end() + _MOST_COMMAND
        end = _END_OF_COMMAND.search(text, match.end(), done)
        if end is not None:
            done = end.start()
        for found in option.finditer(text, match.end(), done):
            for group in groups:
                if found[group] and not harmless(found[group]):
                    yield Found(found.start(group), found.end(group), kind)


# --- Personal data ----------------------------------------------------------------------------------------------------

_CARD: Final = re.compile(
    r"(?=[2-6])(?<![0-9A-Za-z_])(?<![0-9][.-])(?:3[47][0-9]{2}(?P<a>[ -]?)[0-9]{6}(?P=a)[0-9]{5}|3(?:0[0-5]|[68][0-9])[0-9](?P<d>[ -]?)[0-9]{6}(?P=d)[0-9]{4}"
    r"|(?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|6[0-9]{3}|35[2-8][0-9]|50[0-9]{2}|5[6-8][0-9]{2})(?P<s>[ -]?)[0-9]{4}(?P=s)[0-9]{4}(?P=s)[0-9]{4}(?:(?P=s)[0-9]{1,3})?|4[0-9]{12})"
    r"(?![0-9A-Za-z_]|[.-][0-9])"
)
_IBAN: Final = re.compile(r"(?:[A-Z]{2}|[a-z]{2})[0-9]{2}(?<![0-9A-Za-z]....)(?=[ -]?[0-9A-Za-z]{4})")
_IBAN_LENGTHS: Final = {
    code[:2]: int(code[2:]) for code in
    ["AD24", "AE23", "AL28", "AT20", "AZ28", "BA20", "BE16", "BG22", "BH22", "BI27", "BR29", "BY28", "CH21", "CR22", "CY28", "CZ24", "DE22", "DJ27", "DK18", "DO28", "EE20", "EG29", "ES24", "FI18", "FK18", "FO18", "FR27", "GB22", "GE22", "GI23", "GL18", "GR27", "GT28", "HN28", "HR21", "HU28", "IE22", "IL23", "IQ23", "IS26", "IT27", "JO30", "KW30", "KZ20", "LB28", "LC32", "LI21", "LT20", "LU20", "LV21", "LY25", "MC27", "MD24", "ME22", "MK19", "MN20", "MR27", "MT31", "MU30", "NI28", "NL18", "NO15", "OM23", "PK24", "PL28", "PS29", "PT25", "QA29", "RO24", "RS22", "RU33", "SA24", "SC31", "SD18", "SE24", "SI19", "SK24", "SM27", "SO23", "ST25", "SV28", "TL23", "TN24", "TR26", "UA29", "VA22", "VG24", "XK20", "YE30"]
}  # fmt: skip
"""Length of an IBAN by country: SWIFT's IBAN registry."""

_SSN: Final = re.compile(
    r"(?=[0-9]{3}-)(?<![0-9A-Za-z_])(?<![0-9][.-])(?!000|666|9[0-9]{2}-[0-4])[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![0-9A-Za-z_]|-[0-9])"
)
_NAMED_SSN: Final = re.compile(
    r"(?=[Ss])(?i:ssn|social[ _-]?security(?:[ _-]?(?:number|no\.?|nr|#))?|social)(?:\\{0,7}[\"'])?[ \t]{0,4}(?:[:=#]|is)?[ \t]{0,4}(?:\\{0,7}[\"'])?([0-9]{3}[ .-]?[0-9]{2}[ .-]?[0-9]{4})(?![0-9])"
)
_IPV6: Final = re.compile(
    r"(?<![0-9A-Za-z:.])(?=[0-9A-Fa-f:]{2,45}(?![0-9A-Za-z:_]))(?=[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{4,45}(?![0-9A-Za-z:_])"
)
_PHONE: Final = re.compile(
    r"(?=[+0])(?<![0-9A-Za-z+.])(?<![0-9][ .-])(?:\+[ ]?[1-9][0-9]{0,2}|00[1-9][0-9]{0,2}(?=[ ./()-]))[ ./-]{0,2}(?:\(0?[0-9]{0,4}\)[ ./-]{0,2})?[0-9]{1,5}(?:[ ./-]{1,2}[0-9]{2,8}){1,6}(?![0-9A-Za-z])"
)
_NAMED_PHONE: Final = re.compile(
    r"(?=[PpTtMmFfWwCc])(?<![A-Za-z])(?i:phone|telephone|tel|mobile|mobil|fax|whatsapp|cell)(?i:[ _-]?(?:number|no\.?|nr\.?))?(?:\\{0,7}[\"'])?[ \t]{0,4}[:=.][ \t]{0,4}(?:\\{0,7}[\"'])?(\(?\+?[0-9](?:[ ()./-]{0,2}[0-9]){7,14})(?![0-9A-Za-z])"
)


_MANY_DIGITS: Final = re.compile(r"[0-9](?:[ ./()-]{0,3}[0-9]){6}")
"""Cards, IBANs, social security numbers and phone numbers have so many digits in a row."""


def _luhn(digits: str) -> bool:
    total = sum(map(int, digits[-1::-2])) + sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return total % 10 == 0


def _numbers(text: str, lowered: str) -> Iterator[Found]:
    """Find cards, IBANs and social security numbers."""
    for match in _CARD.finditer(text):
        digits = match[0].replace(" ", "").replace("-", "")
        if _luhn(digits) and len(set(digits)) > 1:
            yield Found(match.start(), match.end(), "card")
    for match in _IBAN.finditer(text):
        end = _iban_end(text, match.start())
        if end is not None:
            yield Found(match.start(), end, "iban")
    if "-" in text:
        for match in _SSN.finditer(text):
            yield Found(match.start(), match.end(), "ssn")
    if "ssn" in lowered or "social" in lowered:
        for match in _NAMED_SSN.finditer(text):
            yield Found(match.start(1), match.end(1), "ssn")


def _iban_end(text: str, start: int) -> int | None:
    """Return where an IBAN ends; None: its checksum or its country is wrong."""
    length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
    if length is None:
        return None
    end, characters = start, ""
    while len(characters) < length and (piece := _IBAN_PIECE.match(text, end)):
        end = min(piece.end(), piece.start(1) + length - len(characters))
        characters += text[piece.start(1) : end]
    if len(characters) < length or text[end : end + 1].isalnum():
        return None
    number = (characters[4:] + characters[:4]).upper().translate(_IBAN_DIGITS)
    return end if int(number) % 97 == 1 else None


_IBAN_PIECE: Final = re.compile(r"[ -]?([0-9A-Za-z]{1,34})")
_IBAN_DIGITS: Final = {ord(letter): str(int(letter, 36)) for letter in string.ascii_uppercase}


def _ipv6_addresses(text: str) -> Iterator[Found]:
    if text.count(":") >= 2 and _COLONS.search(text):
        for match in _IPV6.finditer(text):
            if _is_ipv6(match[0]):
                yield Found(match.start(), match.end(), "ip")


_COLONS: Final = re.compile(r":[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]")


def _phones(text: str, lowered: str) -> Iterator[Found]:
    if "+" in text or "00" in text:
        for match in _PHONE.finditer(text):
            if 8 <= sum(map(str.isdigit, match[0])) <= 17:
                yield Found(match.start(), match.end(), "phone")
    for hint in ("phone", "tel", "mobil", "fax", "whatsapp", "cell"):
        if hint in lowered:
            for match in _NAMED_PHONE.finditer(text):
                yield Found(match.start(1), match.end(1), "phone")
            break


def _is_ipv6(text: str) -> bool:
    groups = [group for group in text.split(":") if group]
    if not any(len(group) > 2 for group in groups) or (
        "::" in text and len(groups) < 3 and text[:1].lower() not in ("2", "3", "f")
    ):
        return False
    if len(groups) < 2 or not any(character.isdigit() for character in text):
        return False
    if any(len(group) > 4 for group in groups) or ":::" in text or text.count("::") > 1:
        return False
    if (text[0] == ":" and text[1] != ":") or (text[-1] == ":" and text[-2] != ":"):
        return False
    return len(groups) < 8 if "::" in text else len(groups) == 8


# --- All --------------------------------------------------------------------------------------------------------------

_RESIDUE: Final = re.compile(
    r"\[REDACTED:password\]([^\s'\"`,;)}\[\]&@:/?=\\]{2,300}+)(?=[\"'])"
    r"|\*\*[\w. -]{1,40}:\[REDACTED:password\][ \t]{1,4}([^\s\"'`|\[]{4,300}+)"
    r"|\[REDACTED:password\];([^\s\"'`&;\[]{2,300}+)(?=[\"'])"
)
"""What the reference leaves of a quoted password with an escaped quote in it, of `**password:** x`, and of one that is
quoted by `&quot;`."""

_FINDERS: Final[tuple[Callable[[str, str], Iterator[Found]], ...]] = (
    _private_keys,
    _keys,
    _urls,
    _headers,
    _assigned,
    _commands,
)


_LOWER: Final = {ord(upper): upper.lower() for upper in string.ascii_uppercase}


_SHORT: Final = 64
"""Names, ids and times of a trace are repeated: up to this many characters, what was found is remembered."""


def find_secrets(text: str, level: str) -> list[Found]:
    """Return the places of secrets in a text without disguises; they may overlap."""
    return list(_found_in_short(text, level)) if len(text) <= _SHORT else _found(text, level)


@lru_cache(maxsize=4096)
def _found_in_short(text: str, level: str) -> tuple[Found, ...]:
    return tuple(_found(text, level))


def _found(text: str, level: str) -> list[Found]:
    if len(text) < 6 or (len(text) < 16 and text.replace(" ", "").replace("_", "").isalpha()):
        return []
    lowered = text.lower()
    if len(lowered) != len(text):  # as of one letter, İ
        lowered = text.translate(_LOWER)
    found: list[Found] = []
    for finder in _FINDERS:
        found += finder(text, lowered)
    many_digits = _MANY_DIGITS.search(text) is not None
    if many_digits:
        found += _numbers(text, lowered)
    if level != "private":
        found += _ipv6_addresses(text)
        if many_digits:
            found += _phones(text, lowered)
    if "[REDACTED:password]" in text:
        found += [Found(*match.span(match.lastindex or 1), "password") for match in _RESIDUE.finditer(text)]
    return found


def put_markers(text: str, found: list[Found], counts: dict[str, int], marker: str | None = None) -> str:
    """Return the text with markers in the places, one for places that overlap; markers that are there stay.

    `marker`: what is put; None: that of the type.
    """
    kept = [match.span() for match in MARKER.finditer(text)] if "[REDACTED:" in text else []
    pieces: list[str] = []
    done = 0
    for start, end, kind in _apart(_merged(found), kept):
        pieces += (text[done:start], f"[REDACTED:{kind}]" if marker is None else marker)
        counts[kind] = counts.get(kind, 0) + 1
        done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _merged(found: list[Found]) -> Iterator[Found]:
    last: Found | None = None
    for place in sorted(found):
        if last is not None and place.start < last.end:
            kind = place.kind if last.kind == "password" else last.kind  # the more special one
            last = Found(last.start, max(last.end, place.end), kind)
        else:
            if last is not None:
                yield last
            last = place
    if last is not None:
        yield last


def _apart(found: Iterator[Found], kept: list[tuple[int, int]]) -> Iterator[Found]:
    """Yield the places without those of markers."""
    marker = 0
    for start, end, kind in found:
        begin = start
        while marker < len(kept) and kept[marker][1] <= begin:
            marker += 1
        place = marker
        while place < len(kept) and kept[place][0] < end:
            if kept[place][0] > begin:
                yield Found(begin, kept[place][0], kind)
            begin = max(begin, kept[place][1])
            place += 1
        if begin < end:
            yield Found(begin, end, kind)


def is_secret_member(name: str, value: Any, *, named: bool) -> bool:
    """Whether the value of a member is a secret as a whole. `named`: `is_named_secret` of its object."""
    strength = _strength(fold(name).text.strip().strip("-.:"))
    if named and name.lower() in _VALUE_MEMBERS:
        strength = max(strength, _TOKEN)
    if strength == _NO:
        return False
    if isinstance(value, str):
        value = fold(value).text.strip()
        return _random(value) and " " not in value if strength == _IF_IT_LOOKS_SO else not harmless(value)
    if isinstance(value, dict | list):
        # numbers alone are a usage (`"tokens": {"prompt": 5}`)
        parts = value.values() if isinstance(value, dict) else value
        return strength > _IF_IT_LOOKS_SO and any(isinstance(part, str | dict | list) for part in parts)
    return strength == _PASSWORD and isinstance(value, int | float) and not isinstance(value, bool)


def is_named_secret(source: dict[str, Any]) -> bool:
    """Whether an object gives the name of a secret and its value in two members: {"name": "DB_PASSWORD", "value": "x"}."""
    if len(source) > 8:
        return False
    return any(
        name.lower() in _NAME_MEMBERS
        and isinstance(value, str)
        and len(value) <= 100
        and _strength(value) > _IF_IT_LOOKS_SO
        for name, value in source.items()
    )


_NAME_MEMBERS: Final = frozenset(("name", "key", "header", "variable", "field", "env", "param", "parameter", "option"))
_VALUE_MEMBERS: Final = frozenset(("value", "val", "content", "default", "data", "text"))


def is_secret_after(before: str, value: str) -> bool:
    """Whether an item of an array is a secret because of the item before it: ["--password", "x"]."""
    if len(before) > 100 or _strength(before.strip("-:")) <= _IF_IT_LOOKS_SO:
        return False
    return not harmless(value) and not value.startswith("-") if before.startswith("--") else _looks_secret(value)
