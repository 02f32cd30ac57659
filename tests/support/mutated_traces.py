"""Mutated traces: each must be parsed, or refused with InvalidTrace, in bounded time; what is parsed survives `splice`.

A failure prints the seed and the document.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.support.builders import read_lines
from worker.core.trace import MAX_MESSAGE, InvalidTrace, ReasoningTrace, created_at_ms, parse_trace, splice

# JSON texts that are traps for one parser or the other; some are no JSON.
TRAPS = r"""
    null true false 0 1 -1 -0 0.0 1.0 1.5 -0.5 2 1e0 0e5 1E2 1e-400 -1e-400 1e300 1e308 1e309 1e400 -1e400
    9007199254740993 18446744073709551616 123456789012345678901234567890 0.1e1 1.00000000000000000001 5e-324
    1e999999 01 -01 00 1. .5 +1 - 1e 1e+ 0x1 1_0 NaN Infinity -Infinity undefined nul truex
    "" "a" "0" "\u0000" "\u0061" "\/" "\x" "\u12" "\ud800" "\udc00" "\ud83d\ude00" "\ude00\ud83d" "\ud83dx"
    "\ud83d\ud83d\ude00" "\ud83d\u0041" "\uD83D\uDE00" 'a' "a "é" "😀" [] [1] [null] [[]] ["a"] ["a",1]
    [1,] [,1] [,] {} {"a":1} {"a":null} {"a":1,} {,} {a:1} {1:2} {"a"} {"a":1,"a":2} {"a":{"a":[{}]}}
    {"__proto__":{"a":1}} {"constructor":1} {"toString":null}
    {"name":""} {"name":null} {"name":"x","mcp_server":null} {"name":"x","name":1}
    {"entities":[],"relationships":[]} {"entities":[{"name":"a","type":"b"}],"relationships":[]}
    {"entities":[{"name":"a"}],"relationships":[{"fact":"a","valid_from":1}]} {"entities":[]}
    {"step_id":1.0,"type":"thought","tool":null} {"step_id":0,"type":"thought","input":{"a":[{"b":1e400}]}}
    [{"step_id":0,"type":"thought"}] [{"step_id":0,"type":"thought"},null]
    "ReasoningTrace" "reasoningtrace" "ToolCallPattern" "thought" "tool_call" "Thought" "error_recovery"
    "kp:trace:" "kp:trace:\u0000" "KP:trace:1" "private" "org" "network" "federated" "aggregated" "Private"
    "https://openknowledgepulse.org/schema/v1" "https://openknowledgepulse.org/schema/v1/"
    "https://knowledgepulse.dev/schema/v1"
"""
VALUES = TRAPS.split()
VALUES += [*('"a\nb"', '"a\tb"', '"\x7f"', '"\x01"', '"\u2028"', '"\ufeff"', '{"a":1 "b":2}', " 1 ", "\v1", "\xa01")]
VALUES += ["1 2", "/**/1", "[" * 30 + "]" * 30, "[" * 100 + "]" * 100, '{"":' * 70 + "0" + "}" * 70]
VALUES += ["1" + "0" * 308, "1" + "0" * 309, "1" + "0" * 4299, "1" + "0" * 5000, "0." + "1" * 5000]

BYTES = [
    *(b"\x00", b"\x1f", b"\x7f", b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5", b"\xff", b"\xef\xbb\xbf"),
    *(b'"', b"\\", b"\\u", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\x0b", b"0", b"-"),
    *(b".", b"e", b"/", b"'", b"null", b"NaN", b'"":0,', b"\xe2\x80\xa8", b"\xc2\x85", b"\xf0\x9f\x98\x80"),
]

FIELDS = """
    @context @type id source_skill metadata task steps outcome knowledge_graph_delta created_at agent_id
    framework task_domain success quality_score visibility privacy_level validated_by objective input_schema
    step_id type content tool input output_summary latency_ms name mcp_server result_summary confidence
    scoring entities __proto__ constructor toString then extra
"""
NAMES = [*FIELDS.split(), "", "\0", "中文"]


def read_seeds() -> list[str]:
    """Return the texts to mutate: real traces, and the parity cases: valid, invalid, no JSON."""
    traces = read_lines("traces.jsonl")
    return traces[::5] + [json.loads(case)["raw"] for case in read_lines("validation_cases.jsonl")] * 2


def documents(seed: int, seeds: list[str]) -> Iterator[bytes]:
    """Yield mutated documents for ever, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        text = rng.choice(seeds)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            text = mutate_structure(rng, text)
        raw = text.encode("utf-8", "surrogatepass")
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            raw = mutate_bytes(rng, raw)
        yield raw


def mutate_structure(rng: random.Random, text: str) -> str:
    """Change one place of a JSON document; text that is not JSON comes back as it is."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    containers = [value for value in _walk(document) if isinstance(value, (dict, list)) and value]
    if not containers:
        return rng.choice(VALUES)
    # json.dumps cannot write a trap such as 1.0e400 or a duplicate key: a marker stands for it until the end.
    marker, trap = "\ue000trap\ue001", rng.choice(VALUES)
    target = rng.choice(containers)
    place = rng.choice(list(target) if isinstance(target, dict) else range(len(target)))
    action = rng.random()
    if action < 0.2:
        del target[place]
    elif action < 0.3 and isinstance(target, dict):
        target[rng.choice(NAMES)] = target.pop(place)
    elif action < 0.5 and isinstance(target, dict):
        target[rng.choice(NAMES)] = marker
    elif action < 0.6 and place == "created_at":
        target[place] = random_timestamp(rng)
    elif action < 0.7 and isinstance(target, dict):
        target["\ue002"] = marker
        return _dump(rng, document).replace('"\ue002"', json.dumps(place)).replace(f'"{marker}"', trap)
    else:
        target[place] = marker
    return _dump(rng, document).replace(f'"{marker}"', trap)


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Change, drop, repeat or insert some bytes anywhere."""
    at = rng.randrange(len(raw) + 1)
    end = min(len(raw), at + rng.choice((1, 1, 1, 2, 5, 50)))
    match rng.randrange(5):
        case 0:
            return raw[:at] + raw[end:]
        case 1:
            return raw[:at] + rng.choice(BYTES) + raw[at:]
        case 2:
            return raw[:at] + rng.choice(BYTES) + raw[end:]
        case 3:
            return raw[:at] + raw[at:end] * 2 + raw[end:]
        case _:
            return raw[:at] if rng.random() < 0.2 else raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]


def random_timestamp(rng: random.Random) -> str:
    """Return a text on either side of the border between valid and invalid times."""
    year = rng.choice(("0000", "0001", "0004", "0100", "0400", "1900", "1970", "2000", "2023", "2024", "2026", "9999"))
    text = f"{year}-{rng.randrange(14):02}-{rng.choice((0, 1, 28, 29, 30, 31, 32)):02}"
    text += rng.choice("TTTTTt ") + f"{rng.choice((0, 9, 23, 24)):02}:{rng.choice((0, 59, 60)):02}"
    text += rng.choice(("", ":00", ":59", ":60", ":1")) + rng.choice(("", ".", ".1", ".123", ".1239", ".000123456789"))
    return text + rng.choice(("Z", "Z", "Z", "Z", "", "z", "+00:00", "-01:00", "Z\n", "ZZ", " Z"))


def check(raw: bytes) -> str:
    """Return the verdict on one document, "valid" or the reason; raises AssertionError on misbehaviour."""
    start = time.thread_time()
    outcome: Any
    try:
        outcome = parse_trace(raw)
    except InvalidTrace as error:
        outcome = error
    elapsed = time.thread_time() - start
    # Typical are 20 us of CPU: what is not linear is caught, and not the garbage collector at work in a big process.
    assert elapsed < 1.0, f"took {elapsed:.3f} s"
    if isinstance(outcome, InvalidTrace):
        assert 0 < len(outcome.message) <= MAX_MESSAGE
        assert (outcome.message + outcome.path).encode()
        return outcome.reason.value
    assert type(outcome) is ReasoningTrace
    created_at_ms(outcome)
    check_splice(raw, outcome)
    return "valid"


def check_splice(raw: bytes, trace: ReasoningTrace) -> None:
    """Compare the spliced document, as Python's own json reads it, with the expected one."""
    output = splice(raw, 0.1, b'{"score":0.1}')
    again = parse_trace(output)
    assert again.metadata.quality_score == 0.1
    assert again.steps == trace.steps
    expected = json.loads(raw)
    expected["metadata"]["quality_score"] = 0.1
    expected.pop("scoring", None)
    expected["scoring"] = {"score": 0.1}
    # As text: equal values in equal order, and -0.0, inf and 1.0 not mixed up with 0, 1e999 and 1.
    assert json.dumps(json.loads(output)) == json.dumps(expected)


def run(count: int, seed: int) -> Counter[str]:
    """Check `count` documents and return how often each verdict came; raises AssertionError with the seed."""
    verdicts: Counter[str] = Counter()
    for number, raw in enumerate(documents(seed, read_seeds())):
        if number == count:
            break
        try:
            verdicts[check(raw)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, document {number}: {error!r} on {raw[:4000]!r}") from error
    return verdicts


def _walk(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _walk(item)


def _dump(rng: random.Random, document: Any) -> str:
    """Return JSON text in one of several spellings."""
    indent, separators = rng.choice(((None, (",", ":")), (None, (",", ":")), (None, (", ", " : ")), (1, None)))
    return json.dumps(document, ensure_ascii=rng.random() < 0.2, indent=indent, separators=separators)
