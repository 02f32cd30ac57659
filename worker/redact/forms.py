"""Secrets recognisable by their form.

Keys of many services by their prefixes, private keys, JWTs and webhooks; and numbers and addresses of persons and
machines (cards, IBANs, national numbers, phones, IPv6), confirmed by a checksum if they have one.
"""

from __future__ import annotations

import binascii
import re
import string
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Final

from worker.redact.markers import Found, Rule, rule
from worker.redact.names import has_digit, has_no_words, is_clear, is_random

_BEGINS: Final = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f][0-9A-Fa-f]))"
"""The beginning of a word, also after a URL escape."""


def _key(hint: str, pattern: str, kind: str = "api_key", check: Callable[[str], bool] | None = None) -> Rule:
    return rule(kind, f"(?-i:{hint})", pattern, check)


def _keys(forms: tuple[tuple[str, str], ...], before: str = "") -> Rule:
    """Return one rule for all forms: a text is searched once, however many of their hints it has."""
    return _key("|".join(hint for hint, _ in forms), f"{before}(?:{'|'.join(pattern for _, pattern in forms)})")


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
            place = end.end() if end else end_of(_PEM_CUT.match(text, begin.end()))
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


def end_of(match: re.Match[str] | None) -> int:
    """Return the end of a match of a pattern that also matches the empty text."""
    if match is None:
        raise AssertionError("this is a bug: the pattern matches the empty text")
    return match.end()


def decoded(text: str) -> bytes | None:
    """Decode base64; None: the text is not base64."""
    text = text.rstrip("=")
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        return None


def _family(prefixes: str, rest: str) -> tuple[str, str]:
    """Return hint and pattern of keys that differ in their prefixes."""
    return prefixes, f"(?:{prefixes}){rest}"


_ANYWHERE: Final = (
    ("gh[pousra]_[A-Za-z0-9]{8}", "gh[pousra]_[A-Za-z0-9]{30,255}+"),  # GitHub
    ("github_pat_", "github_pat_[A-Za-z0-9_]{22,255}+"),
    ("glpat-|gldt-|glrt-|glcbt-|glptt-|glft-|glimt-|glagent-|gloas-|glsoat-|glffct-|glrtr-|glwt-",  # GitLab
     "gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|rtr|wt)-[A-Za-z0-9_.=-]{16,512}+"),
    ("GR1348941", "GR1348941[A-Za-z0-9_-]{16,64}+"),
    ("k_live_|k_test_|k_prod_", "(?:sk|rk|pk)_(?:live|test|prod)_[A-Za-z0-9]{10,255}+"),  # Stripe
    ("whsec_", "whsec_[A-Za-z0-9+/=]{16,255}+"),
    ("AIza", "AIza[A-Za-z0-9_-]{30,45}+"),  # Google
    ("GOCSPX-", "GOCSPX-[A-Za-z0-9_-]{20,64}+"),
    (r"ya29\.", r"ya29\.[A-Za-z0-9_.-]{20,2048}+"),
    ("xox[a-z]-|xoxe|xwfp-", r"(?:xox[a-z]|xoxe\.xox[bp]|xwfp)-[A-Za-z0-9-]{10,512}+"),  # Slack
    ("xapp-", r"xapp-[0-9]-[A-Za-z0-9-]{10,512}+"),
    ("doo_v1_|dop_v1_|dor_v1_", "do[opr]_v1_[a-f0-9]{40,64}+"),  # DigitalOcean
    ("dckr_", "dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,64}+"),  # Docker
    ("shpat_|shpca_|shppa_|shpss_", "shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}"),  # Shopify
    ("NRAK-|NRJS-|NRII-|NRRA-", "NR(?:AK|JS|II|RA)-[A-Za-z0-9]{19,64}+"),  # New Relic
    ("lin_api_|lin_oauth_", "lin_(?:api|oauth)_[A-Za-z0-9]{32,64}+"),
    ("ops_eyJ", "ops_eyJ[A-Za-z0-9_-]{40,4096}+"),  # 1Password
)  # fmt: skip
"""Keys recognised by their prefix anywhere: hint and pattern."""

_AT_WORDS: Final = (
    ("1//0", "1//0[A-Za-z0-9_-]{30,512}+"),
    ("(?:A[KS]IA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]",  # AWS
     "(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}(?![A-Za-z0-9])"),
    (r"SG\.", r"SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,128}+"),  # SendGrid
    (r"hvs\.|hvb\.|hvr\.", r"hv[sbr]\.[A-Za-z0-9_-]{20,512}+"),  # Vault
    ("dapi[a-f0-9]{8}", "dapi[a-f0-9]{32}(?:-[0-9])?(?![A-Za-z0-9])"),  # Databricks
    ("sq0[a-z]{3}-|EAAA", "(?:sq0[a-z]{3}-[A-Za-z0-9_-]{22,64}+|EAAA[A-Za-z0-9_-]{50,100}+)"),  # Square
    ("EAA[A-Za-z0-9]{4}", "EAA(?=[A-Za-z]{0,200}[0-9])[A-Za-z0-9]{90,400}+"),  # Meta
    ("glsa_|glc_", "(?:glsa|glc)_[A-Za-z0-9+/=_]{32,512}+"),  # Grafana
    ("ntn_[A-Za-z0-9]{8}|secret_[A-Za-z0-9]{12}",  # Notion
     "(?:ntn_[A-Za-z0-9]{40,64}+|secret_[A-Za-z0-9]{43}(?![A-Za-z0-9]))"),
    (r"pat[A-Za-z0-9]{14}\.", r"pat[A-Za-z0-9]{14}\.[a-f0-9]{64}"),  # Airtable
    ("ATATT|ATCTT|ATBB", "(?:AT[AC]TT3|ATBB)[A-Za-z0-9_=-]{20,512}+"),  # Atlassian
    ("PMAK-", "PMAK-[a-f0-9]{24}-[a-f0-9]{34}"),  # Postman
    (r"dp\.(?:pt|st|ct|sa|scim|audit)\.", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9_.-]{20,100}+"),  # Doppler
    ("pscale_(?:tkn|pw|oauth)_", "pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{30,64}+"),  # PlanetScale
    ("tvly-", "tvly-[A-Za-z0-9-]{20,64}+"),  # Tavily
    ("lsv2_(?:pt|sk)_", "lsv2_(?:pt|sk)_[a-f0-9_]{32,64}+"),  # LangSmith
    ("sntry[su]_", "sntry[su]_[A-Za-z0-9+/=_]{40,512}+"),  # Sentry
    ("tfp_", "tfp_[A-Za-z0-9_.=-]{40,80}+"),  # Typeform
    ("rzp_(?:live|test)_", "rzp_(?:live|test)_[A-Za-z0-9]{14,32}+"),  # Razorpay
    ("FLWSECK", "FLWSECK(?:_TEST)?-[A-Za-z0-9-]{12,64}+"),  # Flutterwave
    ("AGE-SECRET-KEY-1", "AGE-SECRET-KEY-1[A-Z0-9]{58}"),  # age
    ("fm2_", "(?:FlyV1 )?fm2_[A-Za-z0-9+/=_-]{40,1024}+"),  # Fly
    ("tskey-", "tskey-[a-z]{2,12}-[A-Za-z0-9]{6,32}-[A-Za-z0-9]{20,64}+"),  # Tailscale
    ("fc-", "fc-[a-f0-9]{32}(?![A-Za-z0-9])"),  # Firecrawl
    ("rdme_", "rdme_[a-z0-9]{40,100}+"),  # ReadMe
    ("re_", "re_(?=[A-Za-z_]{0,32}[0-9])[A-Za-z0-9]{8}_[A-Za-z0-9]{20,32}+"),  # Resend
    ("sb_secret_", "sb_secret_[A-Za-z0-9_-]{20,64}+"),  # Supabase
    ("oy2", "oy2[a-z0-9]{43}(?![A-Za-z0-9])"),  # NuGet
    ("cio", "cio(?=[a-z]{0,30}[A-Z0-9])[A-Za-z0-9]{32}(?![A-Za-z0-9])"),  # crates.io
    ("EZ[AT]K", "EZ[AT]K[a-f0-9]{54,64}+"),  # EasyPost
    ("LTAI", "LTAI[A-Za-z0-9]{12,20}(?![A-Za-z0-9])"),  # Alibaba Cloud
    ("AKID", "AKID[A-Za-z0-9]{32}(?![A-Za-z0-9])"),  # Tencent Cloud
    ("xkeysib-", "xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}"),  # Brevo
    (r"mlsn\.", r"mlsn\.[a-f0-9]{60,64}"),  # MailerSend
    (r"dt0c01\.", r"dt0c01\.[A-Z0-9]{24}\.[A-Z0-9]{64}"),  # Dynatrace
    ("xprv", "xprv[A-Za-z0-9]{100,110}"),  # Bitcoin
    ("nsec1", "nsec1[a-z0-9]{58}"),  # Nostr
    ("pat-[a-z]{2,3}[0-9]", "pat-[a-z]{2,3}[0-9]-[a-f0-9]{8}(?:-[a-f0-9]{4}){3}-[a-f0-9]{12}"),  # HubSpot
    ("access-(?:production|sandbox|development)-",  # Plaid
     "access-(?:production|sandbox|development)-[a-f0-9]{8}(?:-[a-f0-9]{4}){3}-[a-f0-9]{12}"),
    (r"sl\.", r"sl\.[A-Za-z0-9_.-]{100,2048}+"),  # Dropbox
    ("[a-f0-9]-us[0-9]", "[a-f0-9]{32}-us[0-9]{1,2}(?![A-Za-z0-9])"),  # Mailchimp
    ("key-[a-f0-9]{8}", "key-[a-f0-9]{32}(?![A-Za-z0-9])"),  # Mailgun
    ("SK[a-f0-9]{8}", "SK[a-f0-9]{32}(?![A-Za-z0-9])"),  # Twilio
    ("AKCp", "AKCp[A-Za-z0-9]{60,80}+"),  # Artifactory
    (r"\.[A-Za-z0-9_-]{6}\.",  # Discord
     r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}(?![A-Za-z0-9_-])"),
    # npm, Hugging Face, Netlify, Replicate, Groq, xAI, Perplexity, Prefect, RunPod, Jina, PostHog, Render, Apify
    _family("npm_|hf_|api_org_|nfp_|r8_|gsk_|xai-|pplx-|pnu_|rpa_|jina_|phx_|rnd_|apify_api_", "[A-Za-z0-9]{28,128}+"),
    # Pulumi, Supabase, RubyGems, Shippo, E2B, SonarQube, Buildkite, Sourcegraph, Clojars
    _family("pul-|sbp_|rubygems_|shippo_(?:live|test)_|e2b_|sq[apu]_|bkua_|slk_|CLOJARS_", "[a-f0-9]{40,64}"),
    # Fly, Figma, Contentful, Together, Weights & Biases, Sourcegraph, CircleCI, Pinecone, NVIDIA, PyPI, Heroku
    _family("fo1_|figd_|CFPAT-|tgp_v1_|wandb_v1_|sgp_|CCIPAT_|pcsk_|nvapi-|pypi-|HRKU-", "[A-Za-z0-9_-]{30,1024}+"),
)  # fmt: skip
"""Keys recognised by their prefix at the beginning of a word."""


def _is_key(key: str) -> bool:
    """Return whether what follows the prefix is random, with letters of both cases and digits, but no words."""
    key = key.rpartition("_")[2]
    return is_clear(key) and has_no_words(key)


KEYS: Final = (
    _keys(_ANYWHERE),
    _keys(_AT_WORDS, _BEGINS),
    _key("[A-Za-z0-9]_[A-Za-z0-9]{32}",  # any other service: kpat_, vcp_
         _BEGINS + r"[A-Za-z](?:[A-Za-z0-9]{1,9}_){1,3}[A-Za-z0-9]{32,256}+(?![A-Za-z0-9])", check=_is_key),
    _key("sk-[A-Za-z0-9_-]{12}",  # OpenAI, Anthropic and others
         _BEGINS + "sk-[A-Za-z0-9_-]{20,512}+", check=has_digit),
    _key(r"s\.[A-Za-z0-9]{24}", r"(?<![A-Za-z0-9_.])s\.(?=[A-Za-z]{0,23}[0-9])[A-Za-z0-9]{24}(?![A-Za-z0-9_.(])"),
    _key("/[0-9]{10}", r"(?<![A-Za-z0-9/.-])[0-2]/[0-9]{10,20}(?:/[0-9]{10,20})?:[a-f0-9]{32}(?![A-Za-z0-9])"),  # Asana
    _key(r"v[1-4]\.(?:local|public)\.",  # PASETO
         _BEGINS + r"v[1-4]\.(?:local|public)\.[A-Za-z0-9_-]{40,4096}+", "jwt"),
    _key("AC[a-f0-9]{8}", r"AC[a-f0-9]{32}[\"']?,[ ]{0,4}[\"']?(?P<secret>[a-f0-9]{32})(?![A-Za-z0-9])"),  # Twilio
    _key("Q~", r"[A-Za-z0-9_.~]{3}[0-9]Q~[A-Za-z0-9_.~-]{31,40}+"),  # Entra ID
    _key(r"\.atlasv1\.", r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,100}+"),  # Terraform
    _key("[0-9]{8}:[A-Za-z0-9_-]{8}",
        r"(?<![A-Za-z0-9])(?:bot)?[0-9]{8,10}:(?=[A-Za-z0-9_-]{0,34}[A-Z])(?=[A-Za-z0-9_-]{0,34}[a-z])"
        r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),  # Telegram
    _key("eyJ[A-Za-z0-9_-]{8}",
        r"(?P<secret>eyJ[A-Za-z0-9_-]{8,8192}+(?:\.[A-Za-z0-9_-]{4,8192}+){1,4}+\.?)"
        "|eyJ[A-Za-z0-9_-]{8,8192}+", "jwt"),
    _key(r"hooks\.slack\.com", "hooks\\.slack\\.com/[a-z]{1,20}/[A-Za-z0-9_/+-]{10,200}+", "webhook"),
    _key("/webhooks/", r"/api/(?:v[0-9]{1,2}/)?webhooks/[0-9]{5,25}/[A-Za-z0-9_-]{20,200}+", "webhook"),  # Discord
    _key(r"office\.com/webhook", r"office\.com/webhook(?:b2)?/[A-Za-z0-9@/_-]{20,400}+", "webhook"),
    _key(r"hooks\.zapier\.com", r"hooks\.zapier\.com/hooks/[A-Za-z0-9/_-]{8,200}+", "webhook"),
    _key("/bot/v2/hook/|/with/key/",
         r"/(?:bot/v2/hook|with/key)/(?:[A-Za-z0-9_-]|\[REDACTED:[a-z]{2,8}\]){16,100}+", "webhook"),
    rule("password", r"\$[0-9a-z-]{1,14}\$", r"\$(?:[156y]|2[abxy]|argon2(?:id|[id])|scrypt|pbkdf2-sha(?:256|512))"
         r"\$(?P<secret>[A-Za-z0-9./+,=$*-]{20,300}+)"),  # hashes of passwords, as in /etc/shadow
    rule("private_key", r"(?:wallet|account|key|pair)\(",
        r"(?i:wallet|privatekeytoaccount|from_?key|fromprivatekey|keypair)\(\s{0,8}"
        r"[\"'](?P<secret>(?:0x)?[a-fA-F0-9]{64})[\"']"),  # of a blockchain
    rule("password", r"\[redacted:api_key\]|(?:AK|AS)IA",
        r"(?:(?:AKIA|ASIA)[A-Z0-9]{16}|\[REDACTED:api_key\])[\s,;:|\"'/\\]{1,12}"
        r"(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])", is_random),
    _key("/hooks/", r"/hooks/[a-z0-9]{26}(?![A-Za-z0-9])", "webhook"),  # Mattermost
    Rule("private key|LS0tLS1CRUdJTi|private-lines:|kty", _private_keys),
)  # fmt: skip
"""Sources: gitleaks 8, config/gitleaks.toml, and the providers' documentation of their keys."""

# -- persons and machines

_MANY_DIGITS: Final = "[0-9](?:[ ./()-]{0,3}[0-9]){6}"
"""Cards, IBANs and phone numbers have this many digits in a row."""

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
    for match in _IBAN.finditer(text):
        end = _iban_end(text, match.start())
        if end is not None:
            yield Found(match.start(), end, "iban")


def _iban_end(text: str, start: int) -> int | None:
    """Return where an IBAN ends; None: its checksum or country is wrong."""
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


PERSONAL: Final = (
    Rule(_MANY_DIGITS, _ibans),
    rule("card", _MANY_DIGITS,
        r"(?=[2-6])(?<![0-9A-Za-z_])(?<![0-9][.-])(?:3[47][0-9]{2}(?P<a>[ -]?)[0-9]{6}(?P=a)[0-9]{5}"
        r"|3(?:0[0-5]|[68][0-9])[0-9](?P<d>[ -]?)[0-9]{6}(?P=d)[0-9]{4}"
        r"|(?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|6[0-9]{3}|35[2-8][0-9]|50[0-9]{2}|5[6-8][0-9]{2})"
        r"(?P<s>[ .-]?|[ ]{2})[0-9]{4}(?P=s)[0-9]{4}(?P=s)[0-9]{4}[0-9]{0,3}|4[0-9]{12})"
        r"(?![0-9A-Za-z_]|[.-][0-9])", _is_card),
    rule("ssn", "[0-9]{3}-[0-9]{2}-[0-9]{4}",
        r"(?=[0-9]{3}-)(?<![0-9A-Za-z_])(?<![0-9][.-])(?!000|666|9[0-9]{2}-[0-4])[0-9]{3}-(?!00)[0-9]{2}"
        r"-(?!0000)[0-9]{4}(?![0-9A-Za-z_]|-[0-9])"),
    rule("ssn", "ssn|social",
        r"(?=[Ss])(?i:ssn|social[ _-]?security(?:[ _-]?(?:number|no\.?|nr|#))?|social)\)?(?:\\{0,7}[\"'])?[ \t]{0,4}"
        r"(?:[:=#]|is)?[ \t]{0,4}(?:\\{0,7}[\"'])?(?P<secret>[0-9]{3}[ .-]?[0-9]{2}[ .-]?[0-9]{4})(?![0-9])"),
    # personal numbers of other countries, after their local names
    rule("ssn",
        "national insurance|nino|dni|nie:|nif|cpf|pan card|fiscale|steuer|aadhaar|passport|pesel|bsn|curp"
        "|r licen|r's licen|personnummer|tax id",
        r"(?=[NnDdCcPpSsAaBbTt])(?<![A-Za-z0-9])(?i:national insurance(?: number| no\.?)?|nino|dni|nie|nif|cpf"
        r"|pan card|codice fiscale"
        r"|steuer-?id(?:nummer)?|aadhaar(?: number| no\.?)?"
        r"|passport[ _](?:number|no\.?|nr\.?)|pesel|bsn|curp|personnummer"
        r"|driver'?s licen[cs]e(?: number| no\.?)?|tax id)(?:\\{0,7}[\"'])?[ ]?[:=#]?[ ]{0,3}(?:\\{0,7}[\"'])?"
        r"(?P<secret>[A-Z0-9][A-Z0-9./-]{0,5}(?:[ ]?[A-Z0-9./-]{1,9}){0,5}[A-Z0-9])(?![A-Za-z0-9])",
        lambda secret: 8 <= sum(map(str.isalnum, secret)) <= 18 and has_digit(secret)),
)  # fmt: skip
"""Replaced at every privacy level."""

IDENTIFIERS: Final = (
    rule("email", "%40",
        r"(?<![A-Za-z0-9._+%-])[A-Za-z0-9._+-]{1,64}+%40[A-Za-z0-9-]{1,60}(?:\.[A-Za-z0-9-]{2,30}){1,4}"),
    rule("ip", "::|(?:[0-9a-f]{1,4}:){7}",
        r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?<=::))(?![0-9A-Za-z_]|:[0-9A-Za-z:])",
        _is_ipv6),
    # the part of an IPv6 address before an embedded IPv4 address: ::ffff:, 64:ff9b::
    rule("ip", r":\[redacted:ip\]",
        r"(?<![0-9A-Za-z:])(?P<secret>[0-9A-Fa-f:]{0,30}::[0-9A-Fa-f:]{0,8}(?<=:))(?=\[REDACTED:ip\])"),
    rule("phone", r"(?:\+ ?|00)[1-9][0-9 ./()-]{5}",
        r"(?=[+0])(?<![0-9A-Za-z+.])(?<![0-9][ .-])(?!\+1[ ]?[01])"
        r"(?:\+[ ]?[1-9][0-9]{0,2}|00[1-9][0-9]{0,2}(?=[ ./()-]))[ ./-]{0,2}"
        r"(?:\(0?[0-9]{0,4}\)[ ./-]{0,2})?[0-9]{1,5}(?:[ ./-]{1,3}[0-9]{2,8}){1,6}(?![0-9A-Za-z])",
        lambda secret: 8 <= sum(map(str.isdigit, secret)) <= 17),
    rule("phone", r"(?:phone|tele?f?o?n?|mobile?|fax|whatsapp|cell)(?:[ _-]?n[a-z.]+)?[^a-z0-9\]][^a-z]*[0-9]",
        r"(?=[PpTtMmFfWwCc])(?<![A-Za-z])(?i:phone|telephone|telefon|tel|mobile|mobil|fax|whatsapp|cell)"
        r"(?i:[ _-]?(?:number|no\.?|nr\.?))?(?:\\{0,7}[\"'])?[ \t]{0,4}[:=.]{1,2}[ \t]{0,4}(?:\\{0,7}[\"'])?"
        r"(?P<secret>\(?\+?[0-9](?:[ ()./-]{0,2}[0-9]){7,14})(?![0-9A-Za-z])"),
)  # fmt: skip
"""Kept at `private`."""
