"""What the Collector's processor `genainormalizer` makes of spans; its renames are data."""

import json
from dataclasses import replace
from typing import Any

from tests.support.surroundings import DATA
from worker.runs.otlp.spans import Span

_RENAMES = json.loads((DATA / "genainormalizer/renames.json").read_text("utf-8"))


def normalized(span: Span, *, messages: bool, remove: bool = False) -> Span:
    """Return a span after the processor. `remove`: its `remove_originals`. `messages`: flattened ones become JSON."""
    found: dict[str, Any] = dict(span.attributes)
    for source in sorted(_RENAMES["attributes"]):
        for name, target in _RENAMES["attributes"][source].items():
            if name not in found or target in found:
                continue
            value = found[name]
            if target == "gen_ai.operation.name":
                value = _RENAMES["operations"].get(str(value).lower(), value)
            found[target] = [value] if target.endswith("finish_reasons") else value
            if remove:
                del found[name]
        if messages and source == "openinference":
            _aggregate(found, remove=remove)
    return replace(span, attributes=found)


def _aggregate(found: dict[str, Any], *, remove: bool) -> None:
    for prefix, target in (
        ("llm.input_messages.", "gen_ai.input.messages"),
        ("llm.output_messages.", "gen_ai.output.messages"),
    ):
        keys = [key for key in found if key.startswith(prefix) and ".message." in key]
        if not keys or target in found:
            continue
        rows: dict[int, dict[str, Any]] = {}
        for key in keys:
            number, _, path = key.removeprefix(prefix).partition(".message.")
            rows.setdefault(int(number), {})[path] = found[key]
        found[target] = json.dumps([_message(rows[number]) for number in sorted(rows)])
        for key in keys if remove else ():
            del found[key]


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
