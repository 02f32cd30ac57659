"""The screen on files of traces, and its speed: python -m tests.runs.screen TRACES.jsonl ...

Each rule is named with the traces in which it matches, over all files; then the slowest of the texts that try for more
than linear time.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from worker.core.findings import SCREEN_OFF, SCREEN_RULES
from worker.redact.screen import screen_json

FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"

PARTS = [
    "a", " ", "\t", "\n", "\r\n", "\0", "#", "-", "\n-", "\n>", "\n \n\t", "ignore ", "ignore all previous ",
    "forget all ", "forget all your ", "disregard ", "override your ", "new ", "updated instructions ", "instructions:",
    "from now on ", "### system ", "send this ", "output to the ", "to the ", "output to the following ", "you are now",
    "you are \n", "\nyou\n", "\nact ", "\n- act ", "\npretend to ", "\nimagine\n", "[inst", "<|im_start|", "<<sys>",
    f"{'A' * 99} ", f"{' ' * 20}x", "```", "```x", "```http://a ", "```http://localhost ```", "http://localhost ", ":1",
    "é", "字", "🏽", "İ", "\uff21", "\ufb01", "\ufdfa", "a\u0300\u0316", "\u0300\u0316", "\u00ad", "\u200b", "a\u200b",
    "\u200b\u200ba", "\ufe0f", "\u202a", "\u2066", "\u202a\u202c", "\u2066\u2069", "\U000e0041", FLAG, FLAG[0],
    FLAG[:2], "new n new u \nyou x ### s send this x 字\u200b",
]  # fmt: skip
"""What is repeated to a text. For the SDK's patterns some of them take quadratic time."""

STARTS = ["", "ignore", "output ", "output \u200b", "```", "```http://", "\nyou", "字"]

MAX_SECONDS = 0.5


def slowest(size: int = 1 << 20, starts: Sequence[str] = STARTS) -> list[tuple[float, str]]:
    """Return the seconds of CPU for `size` bytes of JSON of each part, as one string and as many, the slowest first.

    `starts`: what comes before the parts of the one string.
    """
    times = []
    for part in PARTS:
        length = len(msgspec.json.encode(part)) - 2  # with escapes, as a topic's limit counts it
        documents = {start + part: [start + part * (size // length)] for start in starts}
        documents[f"strings {part}"] = [part] * (size // (length + 3))
        for name, document in documents.items():
            raw = msgspec.json.encode(document)
            begun = time.process_time()
            screen_json(raw, frozenset(SCREEN_RULES))
            times.append((time.process_time() - begun, name))
    return sorted(times, reverse=True)


def main() -> None:
    traces, matched = 0, Counter[str]()
    seconds, size = 0.0, 0
    for name in sys.argv[1:]:
        for line in Path(name).read_bytes().splitlines():
            begun = time.process_time()
            matched.update(screen_json(line, frozenset(SCREEN_RULES)).rules)
            seconds += time.process_time() - begun
            traces, size = traces + 1, size + len(line)
    if traces:
        print(f"{traces} traces, {size / seconds / 1e6:.1f} MB/s, {seconds / traces * 1000:.2f} ms each")
    for rule, count in matched.most_common():
        print(f"  {rule}: {count} ({count / traces:.2%}){', off by default' * (rule in SCREEN_OFF)}")
    times = slowest()
    print("slowest for 1 MiB of JSON:", *(f"  {taken:.3f} s {part!a}" for taken, part in times[:5]), sep="\n")
    if times[0][0] > MAX_SECONDS:
        sys.exit(f"slower than {MAX_SECONDS} s")


if __name__ == "__main__":
    main()
