"""What the Collector's processor `genainormalizer` makes of spans; its renames are data."""

import json
from dataclasses import replace
from typing import Any

from tests.support.surroundings import DATA
from worker.runs.otlp.spans import Span

_RENAMES = json.loads((DATA / "genainormalizer/renames.json").read_text("utf-8"))


def normalized(span: Span, *, messages: bool) -> Span:
    """Return a span after the processor. `messages`: flattened ones become JSON."""
    attributes: dict[str, Any] = dict(span.attributes)
    for source in sorted(_RENAMES["attributes"]):
        for name, target in _RENAMES["attributes"][source].items():
            if name not in attributes or target in attributes:
                continue
            value = attributes[name]
            if target == "gen_ai.operation.name":
                value = _RENAMES["operations"].get(str(value).lower(), value)
            attributes[target] = [value] if target.endswith("finish_reasons") else value
        if messages and source == "openinference":
            _aggregate(attributes)
    return replace(span, attributes=attributes)


def _aggregate(attributes: dict[str, Any]) -> None:
    for prefix, target in (
        ("llm.input_messages.", "gen_ai.input.messages"),
        ("llm.output_messages.", "gen_ai.output.messages"),
    ):
        keys = [key for key in attributes if key.startswith(prefix) and ".message." in key]
        if not keys or target in attributes:
            continue
        rows: dict[int, dict[str, Any]] = {}
        for key in keys:
            number, _, path = key.removeprefix(prefix).partition(".message.")
            rows.setdefault(int(number), {})[path] = attributes[key]
        attributes[target] = json.dumps([_message(rows[number]) for number in sorted(rows)])


def _message(row: dict[str, Any]) -> dict[str, Any]:
    """Return a message as the processor does: a text next to calls, and contents in parts, are lost."""
    role, text = row.get("role", ""), str(row.get("content", ""))
    if call_id := row.get("tool_call_id"):
        role = "tool" if role == "user" else role
        return {"role": role, "parts": [{"type": "tool_call_response", "id": call_id, "response": text}]}
    calls = sorted({int(path.split(".")[1]) for path in row if path.startswith("tool_calls.")})
    parts: list[dict[str, Any]] = []
    for number in calls:
        given = {
            name: row.get(f"tool_calls.{number}.tool_call.{name}")
            for name in ("id", "function.name", "function.arguments")
        }
        part = {"type": "tool_call", "name": given["function.name"] or ""}
        if given["id"]:
            part["id"] = given["id"]
        if arguments := given["function.arguments"]:
            try:
                part["arguments"] = json.loads(arguments)
            except ValueError:
                part["arguments"] = arguments
        parts.append(part)
    return {"role": role, "parts": parts or ([{"type": "text", "content": text}] if text else [])}
