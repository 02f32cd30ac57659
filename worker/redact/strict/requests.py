"""Secrets in requests: headers such as Authorization, cookies, and URLs with passwords, tokens or signatures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from worker.redact.markers import Found, Rule, rule
from worker.redact.strict.forms import decoded
from worker.redact.strict.names import (
    IF_RANDOM,
    PLACEHOLDER,
    harmless,
    has_digit,
    is_given,
    is_random,
    is_typed,
    looks_secret,
    strength_of,
)  # fmt: skip

_QUOTES: Final = r"""(?:\\{0,7}["'`])?"""

_AUTHORIZATION: Final = re.compile(
    rf"(?=[Aa])(?i:authorization){_QUOTES}[\])]?\s{{0,8}}(?:[:=,]|=>)\s{{0,8}}{_QUOTES}(?![\"'\[<${{%])(?:f[\"'])?"
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9-]{1,24})(?:[ \t:=]|%20){1,4}(?![<${%\[]))?"
    r"(?P<value>[^\s\"'`<>\\,;(){}\[\]]{6,8192}+)"
)
_SCHEMES: Final = frozenset(
    ("basic", "bearer", "token", "apikey", "api-key", "key", "negotiate", "ntlm", "sharedkey", "sharedkeylite", "bot")
) | {"splunk", "snowflake", "genie", "sso-key", "pat", "jwt", "klaviyo-api-key", "deepl-auth-key", "discogs", "secret"}
_PARTED_SCHEMES: Final = ("aws4", "digest", "oauth", "hmac")
_END_OF_HEADER: Final = re.compile(r"[\n'`]|\\n")
_AUTH_PART: Final = re.compile(
    r"(?=[SROCNMHsrocnmh])(?i:signature|response|oauth_token|oauth_consumer_key|oauth_signature|credential|nonce|mac|hmac)"
    r"=\\{0,3}\"?([^\s\",;\\]{6,1024})"
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
        elif scheme.startswith(_PARTED_SCHEMES):
            line_end = _END_OF_HEADER.search(text, max(end, done), start + 4096)
            until = line_end.start() if line_end else start + 4096
            for part in _AUTH_PART.finditer(text, max(start, done), until):
                yield Found(part.start(1), part.end(1), "basic_auth")
            done = max(done, until)
        elif (scheme in _SCHEMES and not harmless(value)) or looks_secret(value):
            yield Found(start, end, "basic_auth" if scheme == "basic" else "bearer_token")


_COOKIES_NAME: Final = re.compile(r"cookies[\"']?\s{0,4}[:=]")
_LISTED_COOKIE: Final = re.compile(
    rf"name{_QUOTES}\s{{0,4}}[:=]\s{{0,4}}{_QUOTES}[^\s\"'`\\]{{1,100}}+{_QUOTES},\s{{0,20}}{_QUOTES}value{_QUOTES}\s{{0,4}}[:=]"
    rf"\s{{0,4}}{_QUOTES}(?P<secret>[^\s\"'`\\]{{16,4096}}+)"
)
_MOST_LISTED: Final = 20_000


def _listed_cookies(text: str, _lowered: str) -> Iterator[Found]:
    """Find cookies in a list, as browser tools write them: "cookies": [{"name": "sid", "value": "x"}]."""
    done = 0
    for begin in _COOKIES_NAME.finditer(text):
        end = begin.end() + _MOST_LISTED
        for match in _LISTED_COOKIE.finditer(text, max(begin.end(), done), end):
            if is_random(match["secret"]):
                yield Found(*match.span("secret"), "cookie")
        done = max(done, end)


def _is_basic(secret: str) -> bool:
    read = decoded(secret.replace("-", "+").replace("_", "/"))
    return read is not None and b":" in read and all(32 <= byte < 127 or byte >= 0xC3 for byte in read)


_PART: Final = re.compile(
    r"form-data;[^\n\"]{0,40}name=\\{0,7}\"(?P<name>[^\"\\\n]{1,80})\\{0,7}\"[^\n]{0,120}[\r\n]{1,4}"
    r"(?:[A-Za-z-]{1,30}:[^\r\n]{0,200}[\r\n]{1,4}){0,4}?[\r\n]{1,4}(?P<secret>[^\r\n]{1,4000}+)"
)


def _parts(text: str, _lowered: str) -> Iterator[Found]:
    for match in _PART.finditer(text):
        strength = strength_of(match["name"])
        if strength > IF_RANDOM and is_given(match["secret"], strength):
            yield Found(*match.span("secret"), "password")


_SIGNED: Final = re.compile(
    r"(?:[?&;]|%3F|%26|\\u0026)(?:amp;)?(?P<name>(?i:x-(?:amz|goog|oss|cos|obs|ms)-(?:signature|credential"
    r"|security-token)|signature|sig|policy|key-pair-id|awsaccesskeyid|googleaccessid|ossaccesskeyid"
    r"|(?:access_|id_|refresh_|auth_|api_)?token|api_?key|appid|key|auth|code|client_secret|hmac|hdnts|verify|secret"
    r"|password|passwd|pwd|sessionid|session|sid|jwt|ticket|sas))"
    r"(?:=|%3D)(?P<value>[^\s&\"'`<>\\;,)\]}\[#]{6,4096}+)"
)
_SIGNATURES: Final = frozenset(
    {"signature", "sig", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid", "hmac", "hdnts"}
)


def _signed_urls(text: str, _lowered: str) -> Iterator[Found]:
    for match in _SIGNED.finditer(text):
        name, value = match["name"].lower(), match["value"]
        sure = name.startswith("x-") or (name in _SIGNATURES and len(value) >= 16)
        if (sure and not PLACEHOLDER.fullmatch(value)) or looks_secret(value):
            yield Found(*match.span("value"), "signed_url")


_COOKIES: Final = r"(?=[A-Za-z0-9_.%$-]{1,100}=)"
_USER_INFO: Final = r"://[^\s/]+(?:@|\[redacted:email\])"

REQUESTS: Final = (
    rule("password", _USER_INFO,
        r"://[^\s/?#@:\"'`<>\\]{0,100}+:"
        r"(?P<secret>[^\s@/\"'`<>\\]{1,300}+(?:@[^\s@/\"'`<>\\]{1,100}+(?=@))*+)(?:@|(?=\[REDACTED:email\]))",
        lambda secret: not PLACEHOLDER.fullmatch(secret)),
    rule("password", _USER_INFO, r"://(?P<secret>[A-Za-z0-9_.~%-]{16,300}+)(?:@|(?=\[REDACTED:email\]))", is_random),
    rule("password", "%3a%2f%2f",
        r"%3A%2F%2F[A-Za-z0-9_.-]{0,100}+%3A"
        r"(?P<secret>(?:[^\s%&\"'`<>\\]|%(?!40|2F)[0-9A-Fa-f]{2}){1,300}+)%40"),
    Rule(r"(?:[?&;]|%3f|%26|u0026)(?:amp;)?(?:x-[a-z-]+|[a-z_]*(?:signature|sig|policy|id|token|key|auth|code|secret|hmac"
        r"|hdnts|verify|password|passwd|pwd|session|sid|jwt|ticket|sas))(?:=|%3d)", _signed_urls),
    Rule("authorization", _authorizations),
    rule("bearer_token", "bearer[^a-z0-9]+[a-z0-9_.~+/-]{12}",
        r"(?=[Bb])(?i:bearer)(?:,?\s{1,4}|%20|\+|[:=]\s{0,2})"
        r"(?P<secret>[A-Za-z0-9_.~+/-]{12,8192}+=*+)", has_digit),
    rule("basic_auth", "basic[^a-z0-9]",
        r"(?=[Bb])(?i:basic)(?:\s{1,4}|%20)(?P<secret>[A-Za-z0-9+/_-]{6,2048}+={0,2}+)", _is_basic),
    rule("cookie", "set-cookie",
        rf"(?=[Ss])(?i:set-cookie){_QUOTES}[\])]?\s{{0,4}}[:=,]\s{{0,4}}{_QUOTES}{_COOKIES}"
        r"(?P<secret>[^\r\n\"'\\;]{3,8192}+)"),
    rule("cookie", "cookie",
        rf"(?=[Cc])(?<![Ss][Ee][Tt]-)(?i:cookie){_QUOTES}[\])]?\s{{0,4}}[:=,]\s{{0,4}}{_QUOTES}{_COOKIES}"
        r"(?P<secret>[^\r\n\"'\\]{3,8192}+)"),
    # a cookie file, such as curl's
    rule("cookie", r"\ttrue\t|\tfalse\t",
        r"\t(?:TRUE|FALSE)\t/[^\s]{0,100}+\t(?:TRUE|FALSE)\t[0-9]{1,12}+\t[^\s]{1,100}+\t(?P<secret>[^\s]{3,4096}+)"),
    rule("cookie", "-b[ =]|--cookie[ =]",
        rf"(?<![A-Za-z0-9-])(?:-b|--cookie)[ =]{{1,3}}[\"']?{_COOKIES}(?P<secret>[^\r\n\"']{{3,8192}}+)"),
    Rule("cookies", _listed_cookies),
    Rule("form-data;", _parts),
    rule("password", "auth |authenticate ",
        r"(?:\bAUTH|\bAUTHENTICATE)[ ](?:PLAIN|LOGIN|XOAUTH2|CRAM-MD5|OAUTHBEARER)\s{1,4}(?:\+\s{1,4})?"
        r"(?P<secret>[A-Za-z0-9+/]{8,2000}+={0,2}+)", lambda secret: len(decoded(secret) or b"") >= 3),
    # the answers to "Username:" and "Password:"
    rule("password", "334 (?:UGFzc3dvcmQ6|VXNlcm5hbWU6)",
        r"334 (?:UGFzc3dvcmQ6|VXNlcm5hbWU6)[\s\"',]{1,12}(?:C: ?|> ?)?(?P<secret>[A-Za-z0-9+/]{4,2000}+={0,2}+)"),
    rule("password", " login ",
        r"(?<![^\s>:])[A-Za-z]{0,4}[0-9]{1,6} LOGIN (?:\"[^\"\n]{1,100}\"|[^\s\"]{1,100}) "
        r"\"?(?P<secret>(?:(?<=\")[^\"\n]|[^\s\"]){1}(?:[^\s\"]|(?<=[^\n\"]) (?=[^\n\"]{0,100}\")){1,200})"),
    rule("password", "auth ",
        r"(?:(?<![A-Za-z-])AUTH|(?<=> )auth|(?<=>)auth|sentinel auth-pass) "
        r"(?:(?!PLAIN|LOGIN|XOAUTH|CRAM|FAILED|ERROR|OK)[\w.-]{1,40} )?[\"']?(?P<secret>[^\s\"'<>\[\]{}()]{6,200})",
        is_typed),
)  # fmt: skip
