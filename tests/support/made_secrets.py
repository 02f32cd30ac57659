"""Made-up secrets and personal data in the surroundings in which agents' transcripts have them; and harmless texts.

Nothing here is real: each value is drawn. The forms are facts from the providers' documentation.
"""

import base64
import json
import random
import re
import string
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.support.builders import read_jsonl

ALNUM = string.ascii_letters + string.digits
URL_SAFE = ALNUM + "-_"
HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits
LOWER = string.ascii_lowercase + string.digits
ALPHABETS = {"ALNUM": ALNUM, "URL_SAFE": URL_SAFE, "HEX": HEX, "UPPER": UPPER, "LOWER": LOWER, "DIGITS": string.digits}

FORMS: dict[str, list[dict[str, Any]]] = defaultdict(list)
"""The surroundings of secrets, by group: "assigned" says by a name that one follows, "bare" does not; "special" is a kind
of secret and the only place in which it is one. «a name» stands for a value, «a name:3» for its beginning, «a name:-3» for
its end, and «ALPHABET 3» for so many characters. "json": how often JSON escapes the secret there."""
for _form in read_jsonl("made_secrets.jsonl"):
    FORMS[_form["group"]].append(_form)


class Made(NamedTuple):
    """A text with a secret in it. `kind`: what it is, `surroundings`: where it stands."""

    kind: str
    surroundings: str
    secret: str
    text: str


def some(rng: random.Random, alphabet: str, length: int) -> str:
    """Return so many characters, letters and digits among them where the alphabet has them."""
    while True:
        text = "".join(rng.choices(alphabet, k=length))
        if length < 8 or any(c.isdigit() for c in text) or not any(c.isdigit() for c in alphabet):
            return text


def password(rng: random.Random) -> str:
    """Return a password as people and generators make them."""
    word = rng.choice(
        ["Summer", "hunter", "dragon", "Falcon", "correct", "Winter", "trustno", "s3cur3", "Qwerty", "monkey"]
    )
    forms: list[Callable[[], str]] = [
        lambda: f"{word}{rng.randint(1, 9999)}",
        lambda: f"{word}{rng.randint(1, 99)}{rng.choice('!@#%^*+-_')}",
        lambda: some(rng, ALNUM, rng.randint(8, 24)),
        lambda: some(rng, ALNUM + "!@#%^*_+-=?.~", rng.randint(10, 24)),
        lambda: f"{word}-{rng.choice(['staple', 'battery', 'horse'])}-{rng.randint(10, 99)}",
        lambda: f"P@ss{rng.choice('w')}0rd{rng.randint(1, 999)}",
    ]
    return rng.choice(forms)()


def with_luhn(rng: random.Random, prefix: str, length: int) -> str:
    body = prefix + some(rng, string.digits, length - len(prefix) - 1)
    total = sum(sum(divmod(int(d) * (2 if i % 2 == 0 else 1), 10)) for i, d in enumerate(reversed(body)))
    return body + str(-total % 10)


def _grouped(rng: random.Random, text: str, signs: str) -> str:
    return rng.choice([text, *(sign.join(re.findall(".{1,4}", text)) for sign in signs)])


def card(rng: random.Random) -> str:
    prefixes = ["4" + some(rng, string.digits, 3)], ["51", "53", "55", "2221", "2720"], ["6011", "65"], ["34", "37"]
    kind = rng.randrange(4)
    number = with_luhn(rng, rng.choice(prefixes[kind]), 15 if kind == 3 else 16)
    if kind < 3:
        return _grouped(rng, number, " -")
    return rng.choice([number, *(sign.join([number[:4], number[4:10], number[10:]]) for sign in " -")])


IBANS = {
    "DE": (22, 0), "GB": (22, 4), "FR": (27, 0), "NL": (18, 4), "ES": (24, 0), "CH": (21, 0), "AT": (20, 0),
    "PL": (28, 0), "NO": (15, 0), "IE": (22, 4),
}  # fmt: skip
"""Length, and how many letters follow the check digits."""


def iban(rng: random.Random) -> str:
    country, (length, letters) = rng.choice(list(IBANS.items()))
    account = some(rng, string.ascii_uppercase, letters) + some(rng, string.digits, length - 4 - letters)
    number = int("".join(str(int(c, 36)) for c in account + country + "00"))
    return _grouped(rng, f"{country}{98 - number % 97:02}{account}", " ")


def ipv6(rng: random.Random) -> str:
    groups = [f"{rng.randrange(65536):x}" for _ in range(8)]
    groups[0] = rng.choice(["2001", "2a02", "fe80", "fd12", "2606"])
    short = ":".join(groups[:3]) + "::" + ":".join(groups[6:])
    return rng.choice(
        [":".join(groups), ":".join(f"{int(g, 16):04x}" for g in groups), short, f"{groups[0]}:db8::{groups[5]}"]
    )


def phone(rng: random.Random) -> str:
    digits = some(rng, "23456789", 10)
    return rng.choice(
        [
            f"+44 20 {digits[:4]} {digits[4:8]}", f"+49 {digits[:3]} {digits[3:10]}", f"+33 {digits[0]} {digits[1:3]} {digits[3:5]} {digits[5:7]} {digits[7:9]}",
            f"+91-{digits[:5]}-{digits[5:]}", f"+81-3-{digits[:4]}-{digits[4:8]}", f"+49 (0)30 {digits[:7]}", f"0044 20 {digits[:4]} {digits[4:8]}",
            f"+61 4{digits[:2]} {digits[2:5]} {digits[5:8]}", f"+55 (11) 9{digits[:4]}-{digits[4:8]}", f"+41 44 {digits[:3]} {digits[3:5]} {digits[5:7]}", f"+86 138 {digits[:4]} {digits[4:8]}",
        ]
    )  # fmt: skip


def ssn(rng: random.Random) -> str:
    return f"{rng.randint(1, 665):03}-{rng.randint(1, 99):02}-{rng.randint(1, 9999):04}"


def jwt(rng: random.Random) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part({'sub': some(rng, string.digits, 10), 'iat': rng.randrange(2**30)})}.{some(rng, URL_SAFE, 43)}"


KEYS: dict[str, Callable[[random.Random], str]] = {
    "github": lambda r: r.choice(["ghp_", "gho_", "ghu_", "ghs_", "ghr_"]) + some(r, ALNUM, 36),
    "github_fine_grained": lambda r: f"github_pat_{some(r, ALNUM, 22)}_{some(r, ALNUM, 59)}",
    "gitlab": lambda r: r.choice(["glpat-", "gldt-", "glrt-", "glptt-"]) + some(r, URL_SAFE, 20),
    "openai_project": lambda r: r.choice(["sk-proj-", "sk-svcacct-", "sk-admin-"]) + some(r, URL_SAFE, r.choice([48, 74, 120])),
    "openai": lambda r: f"sk-{some(r, ALNUM, 20)}T3BlbkFJ{some(r, ALNUM, 20)}",
    "anthropic": lambda r: f"sk-ant-{r.choice(['api03', 'admin01'])}-{some(r, URL_SAFE, 93)}AA",
    "stripe": lambda r: r.choice(["sk_live_", "sk_test_", "rk_live_"]) + some(r, ALNUM, r.choice([24, 99])),
    "stripe_webhook": lambda r: "whsec_" + some(r, ALNUM, 32),
    "google": lambda r: "AIza" + some(r, URL_SAFE, 35),
    "google_oauth": lambda r: r.choice(["GOCSPX-" + some(r, URL_SAFE, 28), "ya29." + some(r, URL_SAFE, 100)]),
    "slack": lambda r: f"xoxb-{some(r, string.digits, 12)}-{some(r, string.digits, 13)}-{some(r, ALNUM, 24)}",
    "slack_app": lambda r: f"xapp-1-A{some(r, UPPER, 10)}-{some(r, string.digits, 13)}-{some(r, HEX, 64)}",
    "npm": lambda r: "npm_" + some(r, ALNUM, 36),
    "pypi": lambda r: "pypi-AgEIcHlwaS5vcmc" + some(r, URL_SAFE, r.choice([60, 130])),
    "hugging_face": lambda r: "hf_" + some(r, string.ascii_letters, 34),
    "sendgrid": lambda r: f"SG.{some(r, URL_SAFE, 22)}.{some(r, URL_SAFE, 43)}",
    "vault": lambda r: r.choice(["hvs.", "hvb."]) + some(r, URL_SAFE, r.choice([24, 95])),
    "digitalocean": lambda r: r.choice(["dop_v1_", "doo_v1_", "dor_v1_"]) + some(r, HEX, 64),
    "databricks": lambda r: "dapi" + some(r, HEX, 32),
    "telegram": lambda r: f"{some(r, '123456789', 10)}:AA{some(r, URL_SAFE, 33)}",
    "aws_id": lambda r: r.choice(["AKIA", "ASIA"]) + some(r, string.ascii_uppercase + "234567", 16),
    "jwt": jwt,
}  # fmt: skip
"""Keys that say themselves what they are."""

PLAIN: dict[str, Callable[[random.Random], str]] = {
    "card": card, "iban": iban, "ssn": ssn, "ipv6": ipv6, "phone": phone,
}  # fmt: skip


NAMES = [
    "DB_PASSWORD", "POSTGRES_PASSWORD", "MYSQL_ROOT_PASSWORD", "REDIS_PASSWORD", "SMTP_PASS", "PGPASSWORD", "ADMIN_PASSWD", "db_password", "dbPassword", "userPassword", "password", "passwd",
    "pwd", "passphrase", "ssh_passphrase", "SECRET_KEY", "DJANGO_SECRET_KEY", "client_secret", "clientSecret", "CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "JWT_SECRET", "api_key", "apiKey",
    "API_KEY", "X_API_KEY", "OPENWEATHER_API_KEY", "access_token", "accessToken", "ACCESS_TOKEN", "refresh_token", "refreshToken", "auth_token", "AUTH_TOKEN", "BOT_TOKEN", "private_key", "encryption_key",
    "ENCRYPTION_KEY", "signing_key", "SIGNING_SECRET", "webhook_secret", "account_key", "AccountKey", "SharedAccessKey", "session_token", "AWS_SESSION_TOKEN", "app_secret", "consumerSecret", "masterKey",
    "spring.datasource.password", "db-password", "api-key", "client-secret", "DB_PASSWORD_PROD", "API_KEY_2", "password_confirmation", "credentials", "Password", "rootPassword",
]  # fmt: skip


def value_for(rng: random.Random, name: str) -> str:
    """Return what such a name would hold."""
    if "pass" in name.lower() or "pwd" in name.lower():
        return password(rng)
    return rng.choice(
        [
            some(rng, ALNUM, rng.choice([16, 20, 32, 40])),
            some(rng, HEX, rng.choice([32, 40, 64])),
            base64.b64encode(rng.randbytes(rng.choice([24, 32]))).decode(),
        ]
    )


def filled(rng: random.Random, group: str, values: Mapping[str, str]) -> Made:
    """Return a form of the group with these values in their places."""
    form = rng.choice(FORMS[group])

    def value(match: re.Match[str]) -> str:
        name, _, cut = match[1].partition(":")
        if name in values:
            return values[name][: int(cut)] if cut and cut[0] != "-" else values[name][int(cut or 0) :]
        alphabet, _, size = name.partition(" ")
        if alphabet == "b64":
            return base64.b64encode(rng.randbytes(int(size))).decode()
        return some(rng, ALPHABETS.get(alphabet, alphabet), int(size))

    secret = re.sub("«(.+?)»", value, form["secret"])
    for _ in range(form.get("json", 0)):
        secret = json.dumps(secret)[1:-1]
    values = {**values, "drawn": secret, **({"secret": secret} if "json" in form else {})}
    return Made(group, form["kind"], secret, re.sub("«(.+?)»", value, form["text"]))


def assigned(rng: random.Random) -> Made:
    """Return surroundings that name the secret."""
    name = rng.choice(NAMES)
    secret = value_for(rng, name)
    upper = name.upper().replace("-", "_").replace(".", "_")
    snake = name.lower().replace("-", "_").replace(".", "_")
    dashed = snake.replace("_", "-")
    plain = secret if not set(secret) & set("!#^*?~&%") else some(rng, ALNUM, 14)
    values = {
        "name": name, "secret": secret, "plain": plain, "quoted": quote(plain, safe=""), "upper": upper, "snake": snake,
        "dashed": dashed, "titled": dashed.title(), "word": name if name.replace("_", "").isalnum() else snake,
        "upper_head": upper[:3], "upper_tail": upper[3:], "full": full_width(upper, str.isalnum),
    }  # fmt: skip
    return filled(rng, "assigned", values)


def special(rng: random.Random) -> Made:
    """Return a kind of secret in a text in which only such a secret stands."""
    secret = password(rng)
    plain = secret if not set(secret) & set("!#^*?~&%@=+") else some(rng, ALNUM, 12)
    pem = base64.b64encode(rng.randbytes(rng.choice([48, 160, 600]))).decode()
    lines = "\n".join(re.findall(".{1,64}", pem))
    label = rng.choice(["RSA ", "EC ", "OPENSSH ", "", "ENCRYPTED ", "DSA "])
    block = f"-----BEGIN {label}PRIVATE KEY-----\n{lines}\n-----END {label}PRIVATE KEY-----"
    escaped = json.dumps(block)[1:-1]
    made = filled(rng, "special", {
        "secret": secret, "quoted_secret": quote(secret, safe=""), "plain": plain, "token": some(rng, ALNUM, 32),
        "basic": base64.b64encode(f"admin:{secret}".encode()).decode(), "ssn": ssn(rng).replace("-", ""),
        "sas": quote(base64.b64encode(rng.randbytes(32)).decode(), safe=""), "pem": pem, "lines": lines, "label": label,
        "block": block, "block in one line": block.replace("\n", "\\n"), "block indented": block.replace("\n", "\n    "),
        "block in JSON": escaped, "block in JSON in JSON": json.dumps(escaped)[1:-1],
        "block in base64": base64.b64encode(block.encode()).decode(),
    })  # fmt: skip
    return made._replace(kind=made.surroundings)


def full_width(text: str, chosen: Callable[[str], bool] = lambda c: "!" <= c <= "~") -> str:
    return "".join(chr(ord(c) + 0xFEE0) if chosen(c) else c for c in text)


def disguised(rng: random.Random, secret: str) -> str:
    """Return a secret with zero-width characters in it, or in full-width ones."""
    place = rng.randint(1, len(secret) - 1)
    one = secret[:place] + rng.choice("\u200b\u200c\u200d\u2060\ufeff\u00ad") + secret[place:]
    return rng.choice([one, full_width(secret), "\u200b".join(secret)])


def made(rng: random.Random) -> Made:
    """Draw a secret in its surroundings."""
    kind = rng.randrange(10)
    if kind < 7:
        return assigned(rng) if kind < 4 else special(rng)
    kinds = KEYS if kind < 9 else PLAIN
    name = rng.choice(list(kinds))
    secret = kinds[name](rng)
    if rng.random() < 0.12:
        secret = disguised(rng, secret)
    return filled(rng, "bare", {"secret": secret})._replace(kind=name)


HARMLESS: list[str] = [case["text"] for case in read_jsonl("redaction_harmless.jsonl")]
"""What looks like a secret and is none: ids, hashes, versions, numbers, code, placeholders and prose."""
