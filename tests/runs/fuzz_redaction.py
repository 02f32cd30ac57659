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
from typing import Any

from tests.support.made_secrets import HARMLESS, Made, made
from tests.support.redaction_oracle import random_text, slow_redact_text
from tests.support.surroundings import DATA
from worker.core.records import LEVELS
from worker.redact.documents import redact_json, redact_text

TEXTS: dict[str, Any] = json.loads((DATA / "redaction_parts.json").read_text("utf-8"))
PARTS: list[str] = TEXTS["reference"]
"""What is repeated to a text of 1 MiB. For the SDK's patterns several of them take hours."""
STRICT_PARTS = [*PARTS, *TEXTS["strict"]]
LABELS: list[str] = TEXTS["labels"]

MAX_SECONDS = 0.5
"""Of CPU, on a core on which `calibration` takes 0.036 s."""


def check_texts(seed: int, texts: int) -> Counter[str]:
    """Compare random texts; return the markers by type. Raises AssertionError with the first difference."""
    rng = random.Random(seed)
    markers: Counter[str] = Counter()
    for number in range(texts):
        text, level = random_text(rng), rng.choice(LEVELS)
        cleaned, counts = redact_text(text, level)
        slow = slow_redact_text(text, level)
        assert (cleaned, list(counts.items())) == slow, f"seed {seed}, text {number}, {level}: {text!r}"
        markers.update(counts)
    return markers


def check_strict(seed: int, texts: int) -> Counter[str]:
    """Check what must hold of strict rules; return the markers by type. Raises AssertionError with the first text."""
    rng = random.Random(seed)
    markers: Counter[str] = Counter()
    left: list[Made] = []
    for number in range(texts):
        where, secret = f"seed {seed}, text {number}", made(rng)
        around = [rng.choice(HARMLESS), random_text(rng), made(rng).text]
        text = rng.choice(around) + rng.choice(["\n", "\n\n", " | "]) + secret.text
        cleaned, counts = redact_text(secret.text, "aggregated", "strict")
        markers.update(counts)
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
    return markers


def grammar_text(rng: random.Random, depth: int = 3) -> str:
    """Return a text of labels, signs and values, in quotes, brackets and escapes that nest, or that do not end."""

    def inner() -> str:
        return grammar_text(rng, depth - 1)

    kind = rng.random()
    if depth == 0 or kind < 0.15:
        return str(rng.choice(rng.choice((LABELS, TEXTS["values"], TEXTS["signs"]))))
    if kind < 0.6:
        label = rng.choice(LABELS)
        if rng.random() < 0.3:
            label = "".join(rng.choice((str.upper, str.lower))(letter) for letter in label)
        return label + str(rng.choice(TEXTS["signs"])) + inner()
    if kind < 0.75:
        return inner() + rng.choice(["", " ", "\n", ", ", ";", "&"]) + inner()
    if kind < 0.8:
        name = rng.choice(["name", "element", "label", "key", *LABELS])
        members = {name: inner(), "value": rng.choice(TEXTS["values"])}
        return json.dumps(members, ensure_ascii=rng.random() < 0.5)
    if kind < 0.83:
        return rng.choice((made(rng).text, random_text(rng), rng.choice(HARMLESS)))
    if kind < 0.86:
        return str(rng.choice(STRICT_PARTS)) * rng.randrange(1, 4)
    if kind < 0.9:
        text = inner()
        at = rng.randrange(len(text) + 1)
        odd = rng.choice(["\u200b", "\x1b[0m", "\\", '"', "\n", "\ud800", "\u0130", "=", ":", "."])
        return text[:at] + odd + text[at:]
    begin, end = rng.choice(TEXTS["wraps"])
    return str(begin) + inner() + str(end)


def hunt(seed: int, seconds: float, out: str) -> int:
    """Look for texts at which the strict rules raise an error, or that a second pass changes; append them to `out`."""
    problems = number = 0
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
            problems += 1
            file.write(json.dumps(problem) + "\n")
            file.flush()
    print(f"{number} texts of the grammar, seed {seed}: {problems} problems, see {out}")
    return problems


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


def slowest(rules: str, parts: list[str]) -> list[tuple[float, float, str]]:
    """Return for the slowest texts the seconds of CPU for 1 MiB, and for how many times an eighth of it."""
    size = 1 << 20

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
    markers = check_texts(arguments.seed, arguments.texts)
    print(f"{arguments.texts} texts, seed {arguments.seed}: all equal; {dict(markers.most_common())}")
    made_up = arguments.texts // 10
    markers = check_strict(arguments.seed, made_up)
    print(f"{made_up} texts by strict, seed {arguments.seed}: all rules hold; {dict(markers.most_common())}")
    failed = hunt(arguments.seed, 60, arguments.out) > 0
    slower = max(1.0, calibration() / 0.036)
    for rules, parts in (("reference", PARTS), ("strict", STRICT_PARTS)):
        for seconds, growth, text in slowest(rules, parts):
            # A busy machine slows its processes down, also in time of CPU. Growth: 8 if it is linear, 64 if quadratic.
            failed |= seconds > 1.5 * MAX_SECONDS * slower or growth > 16
            print(f"{seconds * 1000:6.0f} ms for 1 MiB, {growth:.1f} times an eighth, of {text!r} by {rules}")
    print(f"this core is {slower:.2f} times as slow as that of the limit, {MAX_SECONDS} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
