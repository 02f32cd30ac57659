"""Message logs as agents write them, made here, and what must become of them by an independent reading.

The logs are of a desk that books flights: a system prompt, a user over several turns, tool calls (also several at
once, whose results come in any order), errors, contents in parts, refusals, and runs that end with a call.
"""

import json
import random
from typing import Any

ERROR = "Error: "
WORDS = ("flight", "seat", "bag", "fare", "Oslo", "April", "card", "dépôt", "東京", "🧳", "\u2028", "<b>", "\\")
TOOLS = ("find_booking", "search_flights", "price_of", "change_seat", "refund", "think")


def message_log(seed: int) -> dict[str, Any]:
    """Return a run: messages, and the fields beside them that a team logs."""
    rng = random.Random(seed)
    messages = [{"role": rng.choice(["system", "developer"]), "content": _text(rng, 40)}]
    messages.append({"role": "user", "content": _text(rng, 12)})
    for turn in range(rng.randint(1, 12)):
        messages += rng.choice([_answer, _calls, _calls, _calls, _old_call])(rng, f"{seed}-{turn}")
    if rng.random() < 0.8:
        messages.append({"role": "assistant", "content": _text(rng, 9)})
    elif not any(_texts(each) for each in messages if each["role"] == "assistant"):
        messages.append({"role": "assistant", "content": "done"})
    return {
        "run": seed, "task": f"task-{seed % 50}", "reward": rng.choice([0.0, 1.0]), "messages": messages,
        "finished": f"2026-04-{rng.randint(10, 28)}T08:{rng.randint(10, 59)}:00+02:00", "model": "desk-model",
    }  # fmt: skip


def expected_parts(run: dict[str, Any]) -> tuple[str, list[tuple[Any, ...]]]:
    """Return the objective and the parts of a run in their order: ("text", ...), ("call", ...), ("got", ...)."""
    parts: list[tuple[Any, ...]] = []
    for message in run["messages"]:
        text = _texts(message)
        if message["role"] in ("tool", "function", "user"):
            parts.append(("got", text))
        elif message["role"] == "assistant":
            parts += [("text", it) for it in (text, message.get("refusal")) if it]
            called = [call["function"] for call in message.get("tool_calls", [])]
            called += [message["function_call"]] if "function_call" in message else []
            parts += [("call", each["name"], each["arguments"]) for each in called]
    first = next(at for at, message in enumerate(run["messages"]) if message["role"] == "user")
    assert all(each["role"] in ("system", "developer") for each in run["messages"][:first])
    return parts[0][1], parts[1:]


def _texts(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _text(rng: random.Random, most: int) -> str:
    return " ".join(["Then", *rng.choices(WORDS, k=rng.randint(1, most))]) + rng.choice([".", "?", "\n- a\n- b", ""])


def _content(rng: random.Random) -> Any:
    if rng.random() < 0.7:
        return _text(rng, 20)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    return [{"type": "text", "text": _text(rng, 8)}, *rng.choices([image], k=rng.randint(0, 2)),
            {"type": "text", "text": _text(rng, 8)}]  # fmt: skip


def _answer(rng: random.Random, _: str) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": _content(rng)}
    if rng.random() < 0.1:
        answer = {"role": "assistant", "content": None, "refusal": _text(rng, 6)}
    return [answer, {"role": "user", "content": _content(rng)}]


def _calls(rng: random.Random, turn: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = [
        {"id": f"call-{turn}-{number}", "type": "function",
         "function": {"name": rng.choice(TOOLS), "arguments": json.dumps({"a": rng.random(), "b": _text(rng, 4)})}}
        for number in range(rng.choice([1, 1, 1, 2, 3]))
    ]  # fmt: skip
    asked: dict[str, Any] = {"role": "assistant", "content": rng.choice([None, "", _text(rng, 6)]), "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"],
         "content": rng.choice([ERROR, "", "{}"]) + _text(rng, 15)}
        for call in rng.sample(calls, len(calls))
    ]  # fmt: skip
    return [asked, *results]


def _old_call(rng: random.Random, _: str) -> list[dict[str, Any]]:
    called = {"name": rng.choice(TOOLS), "arguments": rng.choice(["", "{}", '{"n": 1}', "not JSON"])}
    return [
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": called["name"], "content": _text(rng, 10)},
    ]
