"""Random texts through the redaction, and its speed: python -m tests.runs.fuzz_redaction --texts 200000 --seed 7.

With --hunt=HOURS it only looks for texts of a grammar at which the strict rules fail, or that twice changes.

Every text must come out by `reference` as by the slow reading of the rules (tests/support/redaction_oracle.py). By
`strict` twice is once, JSON stays JSON with the same members, a harmless text stays, and a made-up secret goes.
What breaks a rule is printed with the seed, what the grammar finds is written to a file. Afterwards the slowest of
the texts that try for more than linear time are named; it fails if their time of CPU grows faster than the text, or
is beyond the limit by a half.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.support.made_secrets import HARMLESS, Made, made
from tests.support.redaction_oracle import random_text, slow_redact_text
from worker.core.records import LEVELS
from worker.redact.documents import redact_json, redact_text

PARTS = [
    "a", "0", "1", "9", "-", ".", " ", "/", ":", "=", "@", "+", "(", "'", '"', "_", "\\", "[", "é", "\xa0", "🙂",
    "a@", "@a", "@a.", "a.", "a-", "a@a", "a@a.", "a@a.aa", "a@a.aa1", "eyJ", "1.", "1.1.1.", "255.255.255.255", "11-",
    "111-", "111-1111", "(111) 111-1111", "111 111 1111x", "+1", "+1 (", "1111111-", "+1111111", "+111111111111111x",
    "password", "password ", "password=", "password='", "password=\"'", "password:  ", "token: ", "api_", "api_key=a",
    "Bearer ", "Bearer  kp_", "Bearer a", "sk-", "sk-aaaaaaaaaaaaaaaaaaa ", "gh", "ghp_", "ghp_a", "AKIA", "kp_",
    "kp_a", "xox", "xoxb-", "xoxb-a", "postgres", "postgres:", "postgres://", "mongodb+srv:/", "://", "amqp://a ",
    "/home/", "/home/a", "/home/a/", "A:\\Users\\", "A:\\Users\\a\\", "[REDACTED:", "token=[REDACTED:",
]  # fmt: skip
"""What is repeated to a text of 1 MiB. For the SDK's patterns several of them take hours."""

STRICT_PARTS = [
    *PARTS, "pw ", "token = str = ", '"tokens": ["a1b2c3d4e5", ', "{'passwords': {'a':'b', ", "password={",
    "password={a:b,", '{"value": "x", "name": "A_SECRET"}', "value=a,name=b ", 'value="', 'token is "',
    "token is for x: ", "secret /* ", 'password: # x\n', "%22%3A%22", "%7B%22password%22%3A%22a1%22%7D", "%22", "%",
    "٤", "::ffff:1.2.3.4 ", "::[REDACTED:ip]", "jdbc:oracle:thin:a/", "-----END PRIVATE KEY-----",
    'A' * 64 + '\n-----END RSA PRIVATE KEY-----\n', 'auth("a","', 'jwt.sign(a, "', 'password").send_keys("',
    'net use \\', "mysql '", 'mysql "', "mysql -p'a;", "curl -u a:$9", '[REDACTED:password]\n a',
    '[REDACTED:password];a"', "=[REDACTED:password]a;b=", "**a:[REDACTED:password] ", "&#39;",
    '| token | a1b2c3d4 |\n', 'a,token\n1,a1b2c3d4\n', "token,", 'token|\n', "key_" * 12 + " ", "token-" * 9 + "=",
    "passwordpassword", "x_token=ab,", "a1token ", "ﬁ", "ﬁ password=a1 ", "?sig=aaaaaa&", "authorization: hmac ",
    "-u a -p ", "login ", "sudo <<<", "passport number ", "a%40", "v2.local.", "0/1111111111:", "dni 1 ", "a:b@tcp(",
    "password is ", "пароль ", "密码", "密码是a1b2c3d4 ", "a is the password", '{"label":"password","text":"a1b2c3d4",',
    '{"a',     "insert into t (password) values ('a'),", "insert into a (", "seed abandon ", "AUTH a1b2c3 ",
    'form-data; name="pw"\n\n', "kind: Secret\n", "kind: Secret\ndata:\n a: b1b1b1\n", "\x1b[0m", "\x1b[0",
    "password:\x1b[0m a1", 'redis-cli "-a",',
]  # fmt: skip

MAX_SECONDS = 0.5
MARGIN = 1.5
"""A machine that is busy slows its processes down, also in time of CPU."""
CALIBRATION_SECONDS = 0.036
"""What `calibration` takes on the core that the limit is for."""
HUNT_SECONDS = 60
MAX_GROWTH = 16
"""Of the time for eight times the text: 8 if it is linear, 64 if it is quadratic."""


def check_texts(seed: int, texts: int) -> Counter[str]:
    """Compare random texts; return the markers by type. Raises AssertionError with the first difference."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    for number in range(texts):
        text, level = random_text(rng), rng.choice(LEVELS)
        cleaned, counts = redact_text(text, level)
        slow = slow_redact_text(text, level)
        assert (cleaned, list(counts.items())) == slow, f"seed {seed}, text {number}, {level}: {text!r}"
        found.update(counts)
    return found


def check_strict(seed: int, texts: int) -> Counter[str]:
    """Check what must hold of strict rules; return the markers by type. Raises AssertionError with the first text."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    left: list[Made] = []
    for number in range(texts):
        where, secret = f"seed {seed}, text {number}", made(rng)
        around = [rng.choice(HARMLESS), random_text(rng), made(rng).text]
        text = rng.choice(around) + rng.choice(["\n", "\n\n", " | "]) + secret.text
        cleaned, counts = redact_text(secret.text, "aggregated", "strict")
        found.update(counts)
        if secret.secret in secret.text and secret.secret in cleaned:
            left.append(secret)
        assert redact_text(cleaned, "aggregated", "strict")[0] == cleaned, f"{where}: twice: {secret.text!r}"
        harmless = rng.choice(HARMLESS)
        kept = redact_text(harmless, "aggregated")[0]
        assert redact_text(harmless, "aggregated", "strict")[0] == kept, f"{where}: {harmless!r} is harmless"
        document = {"input": text, "argv": [text, harmless], "note": {"result": json.dumps({"text": text})}}
        read = json.loads(redact_json(json.dumps(document).encode(), "strict")[0])
        assert [*read] == [*document], f"{where}: {text!r} changes a member"
    assert len(left) <= 0.005 * texts, f"seed {seed}: {len(left)} secrets stay, such as {left[:3]}"
    return found


LABELS = [
    "password", "userPassword", "DB_PASSWORD", "api_key", "API key", "clientSecret", "token", "secret", "auth", "pw",
    "pass", "pin", "key", "AWS_SECRET_ACCESS_KEY", "Kennwort", "Passwort", "mot de passe", "contraseña", "senha",
    "пароль", "密码", "パスワード", "비밀번호", "كلمة المرور", "şifre", "seed phrase", "--password", "-p", "cookie",
    "authorization", "x-api-key", "session_id", "%70assword", "\uff50\uff41\uff53\uff53\uff57\uff4f\uff52\uff44",
    "pass\u200bword", "AUTH", "requirepass", "client-key-data",
]  # fmt: skip
SIGNS = [
    "=", ":", " = ", ": ", " := ", "=>", " => ", " -> ", " → ", " ← ", "<-", "|", " | ", "\t", "\n", " is ", " ist ",
    " est : ", " は ", "\uff1a", "\uff1d", " ", "==", "?=", "||=", "=:", ":=:", ": :", "=.", ",", ", ", "%3D", "%3A",
    "\\n", "&#58;", " to ", "::", ": [", ": {", "({", "](", ">", "/>", "</", "\x1b[0m=", " /* x */ ", " # x\n",
    ": |\n  ", ": !!str ", " or ", " || ", "-", "--", "…", "/",
]  # fmt: skip
VALUES = [
    "hunter2", "Tr0ub4dor&3", "a1b2c3d4e5f6", "x", "", ".", ":.", "...", "{secret}", "${SECRET}", "<password>", "***",
    "correct horse battery staple", "null", "12345678", "AKIAIOSFODNN7EXAMPLE",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "eyJhbGciOi.eyJzdWIi.c2ln", "user:pw@host", "postgres://u:p@h/d", "été9é9é9", "密码9密码9", "[REDACTED:password]",
    "[REDACTED:email]", "a@b.cc", "192.168.0.1", "/home/bob/x", "Bearer abcdefghij0123456789", "process.env.X",
    "f(x)", "${a:-b9c9d9e9}", "%s", "😀😀9a", "aGVsbG8gd29ybGQ=", "555-123-4567", "4111 1111 1111 1111",
    "DE89 3704 0044 0532 0130 00", "legal winner thank year wave sausage worth useful legal winner thank yellow",
    "\x1b[31m",
]  # fmt: skip
WRAPS = [
    ("", ""), ('"', '"'), ("'", "'"), ("`", "`"), ('\\"', '\\"'), ('\\\\\\"', '\\\\\\"'), ("(", ")"), ("[", "]"),
    ("{", "}"), ("<", ">"), ("f'", "'"), ('b"', '"'), ("“", "”"), ("«", "»"), ("**", "**"), ("&quot;", "&quot;"),
    ("%22", "%22"), ("\x1b[1m", "\x1b[0m"), ("<b>", "</b>"), ("```", "```"), ('["', '"]'), ("${", "}"), ("{{", "}}"),
    ("$(", ")"), ('"', ""), ("", '"'), ("\\", "\\"), ("\n", "\n"), (" ", ";"), ("+", "+"),
    ("[REDACTED:password]", ""), ("", "[REDACTED:password]"),
]  # fmt: skip


def grammar_text(rng: random.Random, depth: int = 3) -> str:
    """Return a text of labels, signs and values, in quotes, brackets and escapes that nest, or that do not end."""
    kind = rng.random()
    if depth == 0 or kind < 0.15:
        return rng.choice(rng.choice((LABELS, VALUES, SIGNS)))
    if kind < 0.6:
        parts = [rng.choice(LABELS), rng.choice(SIGNS), grammar_text(rng, depth - 1)]
        if rng.random() < 0.3:
            parts[0] = "".join(rng.choice((str.upper, str.lower))(letter) for letter in parts[0])
    elif kind < 0.75:
        parts = [
            grammar_text(rng, depth - 1),
            rng.choice(["", " ", "\n", ", ", ";", "&"]),
            grammar_text(rng, depth - 1),
        ]
    elif kind < 0.8:
        members = {
            rng.choice(["name", "element", "label", "key", *LABELS]): grammar_text(rng, depth - 1),
            "value": rng.choice(VALUES),
        }
        parts = [json.dumps(members, ensure_ascii=rng.random() < 0.5)]
    elif kind < 0.83:
        parts = [rng.choice((made(rng).text, random_text(rng), rng.choice(HARMLESS)))]
    elif kind < 0.86:
        parts = [rng.choice(STRICT_PARTS)] * rng.randrange(1, 4)
    elif kind < 0.9:
        text = grammar_text(rng, depth - 1)
        at = rng.randrange(len(text) + 1)
        parts = [
            text[:at],
            rng.choice(["\u200b", "\x1b[0m", "\\", '"', "\n", "\ud800", "\u0130", "=", ":", "."]),
            text[at:],
        ]
    else:
        begin, end = rng.choice(WRAPS)
        parts = [begin, grammar_text(rng, depth - 1), end]
    return "".join(parts)


def hunt(seed: int, seconds: float, out: str) -> int:
    """Look for texts at which the strict rules raise an error, or that a second pass changes; append them to `out`."""
    found = number = 0
    end = time.monotonic() + seconds
    with open(out, "a", encoding="utf-8", errors="backslashreplace") as file:
        while time.monotonic() < end:
            rng = random.Random(f"{seed}-{number}")
            number += 1
            text, level = grammar_text(rng, rng.randrange(1, 5)), rng.choice(LEVELS)
            try:
                once = redact_text(text, level, "strict")[0]
                twice = redact_text(once, level, "strict")[0]
                if once == twice:
                    continue
                problem = {"text": text, "level": level, "once": once, "twice": twice}
            except Exception as error:
                problem = {"text": text, "level": level, "error": repr(error)}
            found += 1
            file.write(json.dumps(problem) + "\n")
            file.flush()
    print(f"{number} texts of the grammar, seed {seed}: {found} found, see {out}")
    return found


def calibration() -> float:
    """Return the seconds of CPU that a loop of a million steps takes here, the least of five."""

    def loop() -> None:
        total = 0
        for number in range(1_000_000):
            total += number & 7

    return least_seconds(loop, 5)


def least_seconds(run: Callable[[], object], times: int) -> float:
    """Return the least seconds of CPU of some runs."""
    least = float("inf")
    for _ in range(times):
        begun = time.process_time()
        run()
        least = min(least, time.process_time() - begun)
    return least


def slowest(rules: str, parts: list[str], size: int = 1 << 20) -> list[tuple[float, float, str]]:
    """Return for the slowest texts the seconds of CPU for `size` characters, and for how many times an eighth of it."""

    def seconds(text: str, times: int) -> float:
        return least_seconds(lambda: redact_text(text, "aggregated", rules), times)

    texts = {}
    for part in parts:
        for start in ("", "a@a.aa token=aa 1.1.1.1 postgres://a /home/a Bearer + 111-111-1111 "):
            texts[start + part] = (start + part * (size // len(part) + 1))[:size]
    first = sorted(((seconds(text, 1), part) for part, text in texts.items()), reverse=True)
    worst = []
    for _, part in first[:10]:
        whole, eighth = seconds(texts[part], 3), seconds(texts[part][: size // 8], 3)
        worst.append((whole, whole / eighth, part))
    return sorted(worst, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hunt", type=float, default=0.0, metavar="HOURS", help="only search, for so many hours")
    parser.add_argument("--out", default="fuzz-redaction.jsonl", help="what the search finds [%(default)s]")
    arguments = parser.parse_args()
    if arguments.hunt:
        sys.exit(hunt(arguments.seed, 3600 * arguments.hunt, arguments.out) > 0)
    found = check_texts(arguments.seed, arguments.texts)
    print(f"{arguments.texts} texts, seed {arguments.seed}: all equal; {dict(found.most_common())}")
    made_up = arguments.texts // 10
    found = check_strict(arguments.seed, made_up)
    print(f"{made_up} texts by strict, seed {arguments.seed}: all rules hold; {dict(found.most_common())}")
    failed = hunt(arguments.seed, HUNT_SECONDS, arguments.out) > 0
    slower = max(1.0, calibration() / CALIBRATION_SECONDS)
    for rules, parts in (("reference", PARTS), ("strict", STRICT_PARTS)):
        for seconds, growth, text in slowest(rules, parts):
            failed |= seconds > MAX_SECONDS * MARGIN * slower or growth > MAX_GROWTH
            print(f"{seconds * 1000:6.0f} ms for 1 MiB, {growth:.1f} times an eighth, of {text!r} by {rules}")
    print(f"this core is {slower:.2f} times as slow as that of the limit, {MAX_SECONDS} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
