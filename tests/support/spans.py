"""Spans of made-up agents as OTLP, in both encodings, and the traces that belong to them; made from numbers alone."""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tests.support import otlp
from worker.assemble.open_runs import packed
from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.runs.otlp.mapping import assembled
from worker.runs.otlp.rules import Rules, parse_rules
from worker.runs.otlp.spans import decoded, split

RULES: Rules = parse_rules(confidence="0.8", domain="code", visibility="org", privacy="private")
SETTINGS = {
    "KP_ASSEMBLE_CONFIDENCE": "0.8", "KP_ASSEMBLE_DOMAIN": "code", "KP_ASSEMBLE_VISIBILITY": "org",
    "KP_ASSEMBLE_PRIVACY": "private",
}  # fmt: skip

Span = dict[str, Any]
"""A span as OTLP/JSON has it, with its attributes as a plain mapping."""

START_NS = 1_790_000_000_000_000_000


def trace_id(number: int) -> str:
    return hashlib.sha256(b"trace %d" % number).hexdigest()[:32]


def span_id(number: int, name: str) -> str:
    return hashlib.sha256(b"span %d %s" % (number, name.encode())).hexdigest()[:16]


def run_spans(number: int, turns: int = 2, start_ns: int = START_NS, size: int = 0) -> list[Span]:
    """Return the spans of a run in the order in which they end: the agent's, the root, is the last.

    Each turn but the last calls a tool; each call of the model repeats what was said before. `size`: more characters in
    each result.
    """
    second = 1_000_000_000
    begin = start_ns + number * second
    agent = span_id(number, "agent")
    past: list[dict[str, Any]] = [_message("user", {"type": "text", "content": f"Do task {number}."})]
    spans = []
    for turn in range(turns):
        last = turn == turns - 1
        call = f"call-{number}-{turn}"
        text: dict[str, Any] = {"type": "text", "content": f"Task {number} is done." if last else f"I look, {turn}."}
        ask = {"type": "tool_call", "id": call, "name": "look", "arguments": {"at": turn}}
        answer = _message("assistant", *([text] if last else [text, ask]))
        attributes = {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
            "gen_ai.input.messages": json.dumps(past), "gen_ai.output.messages": json.dumps([answer]),
        }  # fmt: skip
        at = begin + (2 * turn + 1) * second
        spans.append(_span(number, f"chat {turn}", agent, at, attributes))
        if not last:
            result = f"seen {turn} " + "x" * size
            past += [answer, _message("tool", {"type": "tool_call_response", "id": call, "response": result})]
            tool = {
                "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look",
                "gen_ai.tool.call.id": call, "gen_ai.tool.call.result": result,
            }  # fmt: skip
            spans.append(_span(number, f"execute_tool look {turn}", agent, at + second, tool))
    root = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"agent-{number % 5}"}
    return [*spans, _span(number, "agent", "", begin, root, seconds=2 * turns + 1)]


def _message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def _span(number: int, name: str, parent: str, start_ns: int, attributes: dict[str, Any], seconds: int = 1) -> Span:
    return {
        "traceId": trace_id(number), "spanId": span_id(number, name), "parentSpanId": parent, "name": name,
        "kind": 1, "startTimeUnixNano": start_ns, "endTimeUnixNano": start_ns + seconds * 1_000_000_000 - 1,
        "attributes": attributes,
    }  # fmt: skip


def document(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the spans as OTLP's JSON: numbers of 64 bits are strings."""
    rows = [
        {key: str(value) if key.endswith("Nano") else value for key, value in each.items()}
        | {"attributes": otlp.pairs(each["attributes"])}
        for each in spans
    ]
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "agent.loop"}, "spans": rows}]}]}


def as_protobuf(spans: Iterable[Span]) -> bytes:
    """Return the spans as one record of the Collector with the encoding otlp_proto."""
    return otlp.as_protobuf(document(spans))


def as_json(spans: Iterable[Span]) -> bytes:
    """Return the spans as one record with the encoding otlp_json."""
    return json.dumps(document(spans)).encode()


def records(spans: Sequence[Span], rng: random.Random) -> list[bytes]:
    """Return the spans as records of some spans each, each record in one of the encodings."""
    rows, rest = [], list(spans)
    while rest:
        count = rng.randint(1, 3)
        rows.append(rng.choice((as_protobuf, as_json))(rest[:count]))
        rest = rest[count:]
    return rows


def content(spans: Sequence[Span]) -> bytes:
    """Return the packed content of a part with spans of one trace."""
    (part,) = split(as_protobuf(spans)).values()
    return packed(part)


def as_logs(spans: Iterable[Span]) -> bytes:
    """Return a log event of each span, as a record of the Collector."""
    ids = ("traceId", "spanId")
    rows = [
        {name: each[name] for name in ids}
        | {"timeUnixNano": str(each["startTimeUnixNano"]), "eventName": "gen_ai.user.message"}
        | {"body": otlp.any_value(each["name"])}
        for each in spans
    ]
    return otlp.as_protobuf({"resourceLogs": [{"scopeLogs": [{"logRecords": rows}]}]})


def documents(spans: Iterable[Span], limits: Limits = DEFAULT_LIMITS) -> list[bytes]:
    """Return the traces of the spans of one OpenTelemetry trace, without any Kafka between."""
    found, rules = decoded(as_protobuf(spans)), replace(RULES, limits=limits)
    return [each.value for each in assembled(found.spans, found.logs, rules) if each.value is not None]
