"""Traces that are too large: what is cut, and that everything else stays."""

import json
import random
from typing import Any

from worker.core.scoring import score_trace
from worker.core.trace import Limits, parse_trace
from worker.runs.shorten import LEAST, shortened

ROOMY = Limits(max_bytes=1 << 24)
ALPHABET = 'ab \n"\\\0é漢😀'


def size_of(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def made(rng: random.Random, steps: int, longest: int) -> dict[str, Any]:
    def text() -> str:
        return "".join(rng.choices(ALPHABET, k=rng.randrange(1, longest) if rng.random() < 0.5 else 5))

    def step(number: int) -> dict[str, Any]:
        if rng.random() < 0.5:
            return {"step_id": number, "type": rng.choice(["thought", "observation"]), "content": text()}
        given = {"path": text(), "lines": [text(), 7, None], "deep": {"er": text()}}
        return {"step_id": number, "type": "tool_call", "tool": {"name": rng.choice("abc")}, "input": given}

    return {
        "@context": "https://openknowledgepulse.org/schema/v1",
        "@type": "ReasoningTrace",
        "id": "kp:trace:made",
        "metadata": {
            "created_at": "2026-11-23T00:00:00Z", "task_domain": "code", "success": True, "quality_score": 0,
            "visibility": "org", "privacy_level": "private",
        },
        "task": {"objective": text()},
        "steps": [step(number) for number in range(steps)],
        "outcome": {"result_summary": text(), "confidence": 0.5},
    }  # fmt: skip


def texts(document: dict[str, Any]) -> list[str]:
    listed: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            listed.append(value)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(each)

    walk([document["task"], [[step.get("content"), step.get("input")] for step in document["steps"]]])
    return [*listed, document["outcome"]["result_summary"]]


def test_the_longest_texts_are_cut_to_one_length_and_all_else_stays(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        document = made(rng, rng.randint(1, 30), rng.choice([300, 3000, 20_000]))
        size = size_of(document)
        most = rng.randint(size // 4, size - 1)
        result = shortened(document, size, most)
        if result is None:  # what is not text, or the least that each keeps, is too much
            sizes = [size_of(text) for text in texts(document)]
            assert size - sum(sizes) + sum(min(LEAST, each) for each in sizes) > most
            continue
        short, cut = result
        assert size_of(short) <= most
        parse_trace(json.dumps(short).encode(), ROOMY)
        pairs = list(zip(texts(document), texts(short), strict=True))
        changed = [(before, after) for before, after in pairs if before != after]
        lost = 0
        for before, after in changed:
            kept, _, mark = after.rpartition(" [")
            assert before.startswith(kept)
            assert mark == f"{len(before) - len(kept)} characters cut]"
            lost += len(before) - len(kept)
        assert lost == cut > 0
        shortest = min(size_of(before) for before, _ in changed)
        assert all(size_of(before) <= shortest for before, after in pairs if before == after)
        assert most - size_of(short) <= 1000 * len(changed), "more could have been kept"
        assert shortened(document, size, most) == (short, cut)
        for step, other in zip(document["steps"], short["steps"], strict=True):
            assert {k: v for k, v in step.items() if k not in ("content", "input")} == {
                k: v for k, v in other.items() if k not in ("content", "input")
            }
        whole = parse_trace(json.dumps(document).encode(), ROOMY)
        assert score_trace(parse_trace(json.dumps(short).encode(), ROOMY)) == score_trace(whole)


def test_a_word_is_left_out_whole_where_it_would_be_cut_in_two() -> None:
    document = made(random.Random(1), 1, 6)
    secret = "token-" + "x" * 60
    document["steps"] = [{"step_id": 0, "type": "thought", "content": " ".join(["word"] * 100 + [secret] * 300)}]
    for most in range(2000, 2100):
        short, _ = shortened(document, size_of(document), most) or ({}, 0)
        words = short["steps"][0]["content"].rpartition(" [")[0].split()
        assert words == ["word"] * 100 + [secret] * (len(words) - 100)
        assert len(words) > 105


def test_a_trace_of_many_short_steps_cannot_be_shortened() -> None:
    document = made(random.Random(1), 2000, 6)
    assert shortened(document, size_of(document), size_of(document) // 2) is None
