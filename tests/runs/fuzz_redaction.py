"""Random texts through the redaction, and its speed: python -m tests.runs.fuzz_redaction --texts 200000 --seed 7.

Every text must come out as by the slow reading of the rules (tests/support/redaction_oracle.py); a difference prints
the seed and the text. Afterwards the slowest of the texts that try for more than linear time is named.
"""

import argparse
import random
import sys
import time
from collections import Counter

from tests.support.redaction_oracle import random_text, slow_redact_text
from worker.core.redaction import LEVELS, redact_text

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

MAX_SECONDS = 0.5


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


def slowest(size: int = 1 << 20) -> list[tuple[float, str]]:
    """Return the seconds of CPU for `size` characters of each part, the slowest first."""
    times = []
    for part in PARTS:
        for start in ("", "a@a.aa token=aa 1.1.1.1 postgres://a /home/a Bearer + 111-111-1111 "):
            text = (start + part * (size // len(part) + 1))[:size]
            begun = time.process_time()
            redact_text(text, "aggregated")
            times.append((time.process_time() - begun, start + part))
    return sorted(times, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = check_texts(arguments.seed, arguments.texts)
    print(f"{arguments.texts} texts, seed {arguments.seed}: all equal; {dict(found.most_common())}")
    times = slowest()
    for seconds, text in times[:5]:
        print(f"{seconds * 1000:6.0f} ms for 1 MiB of {text!r}")
    sys.exit(times[0][0] > MAX_SECONDS)


if __name__ == "__main__":
    main()
