"""Spans and log events, as values and as OTLP in both encodings."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from worker.runs.otlp.spans import LogEvent, Span, SpanEvent

TRACE = "0af7651916cd43dd8448eb211c80319c"
SECOND = 1_000_000_000
NOW = 1_795_000_000 * SECOND


def span_id(number: int) -> str:
    return f"{number:016x}"


def span(
    number: int, name: str = "chat m", attributes: Mapping[str, Any] | None = None, *, parent: int = 0, status: int = 0,
    message: str = "", events: Sequence[SpanEvent] = (), scope: str = "made.up", start: int | None = None,
    seconds: float = 1, trace: str = TRACE, resource: Mapping[str, Any] | None = None, remote: bool = False,
) -> Span:  # fmt: skip
    """Return a span. `number` is its id; it starts that many seconds after the trace, unless `start` says otherwise."""
    begin = NOW + (number if start is None else start) * SECOND
    return Span(
        trace, span_id(number), span_id(parent) if parent else "", name, 1, begin, begin + int(seconds * SECOND),
        status, message, dict(attributes or {}), tuple(events), dict(resource or {"service.name": "desk"}), scope, "",
        0, remote,
    )  # fmt: skip


def failure(text: str) -> SpanEvent:
    return SpanEvent("exception", NOW, {"exception.type": "SeatTaken", "exception.message": text})


def log(number: int, name: str, body: Any, *, at: int = 0, **attributes: Any) -> LogEvent:
    """Return a log event of the span `number`."""
    return LogEvent(TRACE, span_id(number), name, NOW + at, body, attributes, {}, "made.up")


def shape(document: Mapping[str, Any]) -> list[str]:
    """Return the steps of a trace in short."""
    return [
        f"tool_call: {step['tool']['name']} {json.dumps(step['input'])}"
        if step["type"] == "tool_call"
        else f"{step['type']}: {step['content']}"
        for step in document["steps"]
    ]


# Records


def any_value(value: Any) -> dict[str, Any]:
    """Return a value as OTLP's JSON has it."""
    if value is None:
        return {}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": pairs(value)}}
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(value)]: str(value) if type(value) is int else value}


def pairs(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in found.items()]


def as_json(spans: Sequence[Span]) -> dict[str, Any]:
    """Return spans as OTLP's JSON, each in a scope of its own."""
    return {"resourceSpans": [{
        "resource": {"attributes": pairs(each.resource)},
        "scopeSpans": [{"scope": {"name": each.scope}, "spans": [{
            "traceId": each.trace_id, "spanId": each.span_id, "name": each.name, "kind": each.kind,
            "startTimeUnixNano": str(each.start_ns), "endTimeUnixNano": str(each.end_ns),
            "attributes": pairs(each.attributes),
            "status": ({"code": each.status} if each.status else {})
                      | ({"message": each.status_message} if each.status_message else {}),
            **({"parentSpanId": each.parent_id} if each.parent_id else {}),
            **({"flags": 0x300} if each.remote_parent else {}),
            **({"droppedAttributesCount": each.dropped_attributes} if each.dropped_attributes else {}),
            "events": [{"name": event.name, "timeUnixNano": str(event.time_ns), "attributes": pairs(event.attributes)}
                       for event in each.events],
        }]}],
    } for each in spans]}  # fmt: skip


def logs_as_json(logs: Sequence[LogEvent]) -> dict[str, Any]:
    """Return log events as OTLP's JSON."""
    return {"resourceLogs": [{"resource": {"attributes": pairs(each.resource)}, "scopeLogs": [{
        "scope": {"name": each.scope}, "logRecords": [{
            "traceId": each.trace_id, "spanId": each.span_id, "eventName": each.name, "timeUnixNano": str(each.time_ns),
            "attributes": pairs(each.attributes), "body": any_value(each.body),
        }]}]} for each in logs]}  # fmt: skip


def as_protobuf(document: Mapping[str, Any]) -> bytes:
    """Return OTLP's JSON as protobuf, by protobuf's own parser, which takes the ids for base64."""

    def encoded(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: encoded(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [encoded(inner) for inner in value]
        return b64encode(bytes.fromhex(value)).decode() if name in ("traceId", "spanId", "parentSpanId") else value

    message = LogsData() if "resourceLogs" in document else TracesData()
    return bytes(ParseDict(encoded(document), message).SerializeToString())
