"""Records of OTLP in both encodings, whole, split by trace, and damaged."""

import base64
import json
import random
import time
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.support.otlp import TRACE, as_json, as_protobuf, failure, log, logs_as_json, span
from worker.runs.otlp.spans import MAX_DEPTH, Decoded, InvalidSpans, Span, SpanEvent, decoded, fields_in, split

OTHER = "1" * 32

VALUES = {
    "text": "Zürich \U0001f9f3", "empty": "", "true": True, "int": -(1 << 63), "big": (1 << 63) - 1, "float": 0.1,
    "none": None, "list": ["a", 1, [True, None]], "map": {"a": {"b": [1.5]}, "": ""}, "no items": [], "no fields": {},
}  # fmt: skip


def sample() -> list[Span]:
    return [
        span(1, "POST /ask", VALUES, seconds=9, resource=VALUES),
        span(
            2, "chat", {"a": 1}, parent=1, status=2, message="gone",
            events=[failure("no"), SpanEvent("e", 2**64 - 1, VALUES)],
        ),
        span(3, "far", {}, parent=7, trace=OTHER, remote=True),
        span(4, "chat", {"a": 2}, parent=1),
    ]  # fmt: skip


def refused(value: bytes) -> InvalidSpans:
    with pytest.raises(InvalidSpans) as caught:
        decoded(value)
    with pytest.raises(InvalidSpans):
        split(value)
    return caught.value


def test_both_encodings_say_the_same() -> None:
    document = as_json(sample())
    for value in (json.dumps(document).encode(), json.dumps(document, indent=2).encode(), as_protobuf(document),
                  b"\n\t " + json.dumps(document).encode()):  # fmt: skip
        assert decoded(value) == Decoded(tuple(sample()), ())


def test_log_events_in_both_encodings() -> None:
    logs = [log(2, "gen_ai.user.message", {"content": "hi", "of": [1]}, at=5, a="b"), log(3, "gen_ai.choice", "text")]
    document = logs_as_json(logs)
    untraced = json.loads(json.dumps(document))
    del untraced["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]["traceId"]
    for value in (json.dumps(document).encode(), as_protobuf(document)):
        assert decoded(value) == Decoded((), tuple(logs))
    for value in (json.dumps(untraced).encode(), as_protobuf(untraced)):
        assert decoded(value) == Decoded((), tuple(logs[1:]), untraced=1)
        assert list(split(value)) == [TRACE]


def test_an_event_may_have_its_name_in_an_attribute_and_its_time_in_observed() -> None:
    record = {"traceId": TRACE, "observedTimeUnixNano": "7", "attributes": [
        {"key": "event.name", "value": {"stringValue": "gen_ai.choice"}}]}  # fmt: skip
    (event,) = decoded(json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}).encode()).logs
    assert (event.name, event.time_ns, event.span_id, event.body) == ("gen_ai.choice", 7, "", None)


@pytest.mark.parametrize("value", [b"", b"{}", b' {"resourceSpans": []} ', b'{"resourceSpans": null}'])
def test_no_spans(value: bytes) -> None:
    assert decoded(value) == Decoded((), ())
    assert split(value) == {}


def test_a_record_is_split_by_trace_and_loses_nothing() -> None:
    for value in (json.dumps(as_json(sample())).encode(), as_protobuf(as_json(sample()))):
        parts = split(value)
        assert list(parts) == [TRACE, OTHER]
        again = [each for part in parts.values() for each in decoded(part).spans]
        assert again == [each for trace in (TRACE, OTHER) for each in sample() if each.trace_id == trace]
        assert split(value) == parts
        for trace, part in parts.items():
            assert split(part) == {trace: part}
    logs = [log(1, "a", "b"), log(2, "c", "d")]
    (part,) = split(json.dumps(logs_as_json(logs)).encode()).values()
    assert decoded(part).logs == tuple(logs)


def test_a_protobuf_record_may_begin_as_json_does() -> None:
    """0x0a is also a line break, and the length after it may be any character: 0x7b, 0x5b, 0x20."""
    begun = set()
    for length in range(200):
        value = as_protobuf(as_json([span(1, "x" * length, {}, resource={"a": "b"}, scope="")]))
        assert decoded(value).spans[0].name == "x" * length
        assert decoded(split(value)[TRACE]).spans[0].name == "x" * length
        begun.add(value[:2])
    assert {b"\n{", b"\n["} <= begun


def spans_json(**more: Any) -> bytes:
    one: dict[str, Any] = {"traceId": TRACE, "spanId": "1" * 16, **more}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}).encode()


def test_what_other_writers_do() -> None:
    (read,) = decoded(spans_json(traceId=base64.b64encode(bytes.fromhex(TRACE)).decode(), spanId="AQEBAQEBAQE=",
                                  parentSpanId="", startTimeUnixNano=5, endTimeUnixNano="6", kind="SPAN_KIND_CLIENT",
                                  status={"code": "STATUS_CODE_ERROR"}, droppedAttributesCount=3, unknown={"a": 1},
                                  events=None)).spans  # fmt: skip
    assert (read.trace_id, read.span_id, read.parent_id) == (TRACE, "01" * 8, "")
    assert (read.start_ns, read.end_ns, read.kind, read.status, read.dropped_attributes) == (5, 6, 3, 2, 3)
    (read,) = decoded(spans_json(traceId=TRACE.upper(), parentSpanId="0" * 16)).spans
    assert (read.trace_id, read.parent_id) == (TRACE, "")
    values = [{"key": "a", "value": {"doubleValue": "NaN"}}, {"key": "b", "value": {"doubleValue": 1}},
              {"key": "c", "value": {"bytesValue": "AAE="}}, {"key": "d"}, {"key": "e", "value": {"stringValue": None}},
              {"key": "b", "value": {"intValue": 7}}]  # fmt: skip
    (read,) = decoded(spans_json(attributes=values)).spans
    assert str(read.attributes.pop("a")) == "nan"  # type: ignore[attr-defined]
    assert read.attributes == {"b": 7, "c": b"\x00\x01", "d": None, "e": None}
    values = [{"key": "a", "value": {"arrayValue": {}}}, {"key": "b", "value": {"kvlistValue": {"values": None}}},
              {"key": "c", "value": {"arrayValue": {"values": [{"kvlistValue": {}}, {}]}}}]  # fmt: skip
    value = spans_json(attributes=values).replace(b'"scopeSpans": [{', b'"resource": [], "scopeSpans": [{"scope": [], ')
    (read,) = decoded(value).spans
    assert (read.attributes, read.resource, read.scope) == ({"a": [], "b": {}, "c": [{}, None]}, {}, "")


PLACE = "resourceSpans.0.scopeSpans.0.spans.0"


@pytest.mark.parametrize(
    ("value", "reason", "path", "said"),
    [
        (b"[]", "not_otlp", "", "a JSON list"),
        (b'{"resourceMetrics": []}', "not_otlp", "", "an object with resourceMetrics; OTLP has resourceSpans or"),
        (b'{"resourceSpans": [], "resourceLogs": []}', "not_otlp", "", "both resourceSpans and resourceLogs"),
        (b'{"resourceSpans": ', "not_json", "", "one whole JSON object"),
        (b'{"\xff": []}', "not_json", "", "utf-8"),
        (b'{"resourceSpans": {}}', "invalid_type", "resourceSpans", "Expected `array | null`, got `object`"),
        (b'{"resourceSpans": [1]}', "invalid_type", "resourceSpans.0", "Expected `object`, got `int`"),
        (b"\x00\x01hello", "not_otlp", "", "cut off, not UTF-8, or in another encoding"),
        (b"plain text", "not_otlp", "", "cut off, not UTF-8, or in another encoding"),
        (spans_json(spanId=""), "invalid_value", PLACE, "a spanId of 8, not all of them 0"),
        (spans_json(traceId="0" * 32), "invalid_value", PLACE, "a traceId of 16 bytes"),
        (spans_json(traceId="xyz"), "invalid_value", f"{PLACE}.traceId", "an id of 32 hex digits is expected"),
        (spans_json(spanId="é" * 16), "invalid_value", f"{PLACE}.spanId", "an id of 16 hex digits is expected"),
        (spans_json(spanId=7), "invalid_type", f"{PLACE}.spanId", "a text is expected"),
        (spans_json(name=[]), "invalid_type", f"{PLACE}.name", "Expected `str | null`, got `array`"),
        (spans_json(startTimeUnixNano="soon"), "invalid_type", f"{PLACE}.startTimeUnixNano", "an integer is expected"),
        (spans_json(startTimeUnixNano=-1), "invalid_value", f"{PLACE}.startTimeUnixNano", "an integer from 0 to"),
        (spans_json(endTimeUnixNano=1 << 64), "invalid_value", f"{PLACE}.endTimeUnixNano", "an integer from 0 to"),
        (spans_json(kind=True), "invalid_type", f"{PLACE}.kind", "an integer is expected"),
        (spans_json(status=1), "invalid_type", f"{PLACE}.status", "Expected `object | null`, got `int`"),
        (spans_json(attributes=[{"key": "a", "value": {"intValue": "x"}}]), "invalid_type",
         f"{PLACE}.attributes.0.value.intValue", "an integer is expected"),
        (spans_json(attributes=[{"key": "a", "value": {"boolValue": 1}}]), "invalid_type",
         f"{PLACE}.attributes.0.value.boolValue", "Expected `bool | null`, got `int`"),
        (spans_json(attributes=[{"key": "a", "value": {"bytesValue": "%"}}]), "invalid_value",
         f"{PLACE}.attributes.0.value.bytesValue", "bytesValue is base64"),
    ],
)  # fmt: skip
def test_a_bad_record_is_refused_with_its_place(value: bytes, reason: str, path: str, said: str) -> None:
    error = refused(value)
    assert (error.reason, error.path) == (reason, path)
    assert said in error.message
    assert str(error).startswith(path or "record")


def test_ids_of_protobuf_are_checked_and_spans_are_never_taken_for_logs() -> None:
    message = TracesData()
    spans = message.resource_spans.add().scope_spans.add().spans
    spans.add(trace_id=bytes.fromhex(TRACE), span_id=b"12345678")
    for bad in ({"trace_id": b""}, {"trace_id": bytes(16)}, {"span_id": b"1"}, {"parent_span_id": b"1"}):
        del spans[1:]
        spans.add(**({"trace_id": bytes.fromhex(TRACE), "span_id": b"12345678"} | bad))
        if spans[0].span_id != b"12345678":
            raise AssertionError
        read = decoded(message.SerializeToString())
        assert (len(read.spans), read.refused and read.refused.count) == (1, 1)
        error = read.refused.error if read.refused else None
        assert error is not None
        assert (error.reason, error.path) == ("invalid_value", "resourceSpans.0.scopeSpans.0.spans.1")
    del spans[:]
    spans.add(name="neither id")
    assert refused(message.SerializeToString()).reason == "not_otlp"


def test_a_byte_that_is_not_utf_8_costs_its_span_alone_and_half_of_a_surrogate_pair_its_record() -> None:
    value = json.dumps(as_json(sample())).encode().replace(b'"chat"', b'"\xff"', 1)
    read = decoded(value)
    assert read.refused is not None
    assert (len(read.spans), read.refused.count) == (3, 1)
    assert b'"\xff"' in read.refused.value
    assert read.refused.error.path == "resourceSpans.1.scopeSpans.0.spans.0"
    before, _, after = value.rpartition(b"\\uddf3")
    assert refused(before + after).reason == "not_json"


def test_a_bad_scope_or_resource_costs_its_own_spans_in_both_encodings() -> None:
    for place, name in (("resource", "resourceSpans.1"), ("scope", "resourceSpans.1.scopeSpans.0")):
        value = as_protobuf(as_json(sample()))
        message = TracesData.FromString(value)
        target = message.resource_spans[1]
        url = target if place == "resource" else target.scope_spans[0]
        url.schema_url = "https://bad"
        wrong = message.SerializeToString().replace(b"https://bad", b"https://\xff\xff\xff")
        read = decoded(wrong)
        assert read.refused is not None
        assert (len(read.spans), read.refused.count, read.refused.error.path) == (3, 1, name)
        assert refused(read.refused.value).reason == "not_otlp"
        document = as_json(sample())
        where = document["resourceSpans"][1]
        if place == "resource":
            where["resource"]["attributes"] = 5
        else:
            where["scopeSpans"][0]["scope"]["name"] = 5
        read = decoded(json.dumps(document).encode())
        assert read.refused is not None
        assert (len(read.spans), read.refused.count) == (3, 1)
        assert read.refused.error.path.startswith(name)
        assert refused(read.refused.value).reason == "invalid_type"


def test_depth_is_bounded_alike_in_both_encodings() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH):
        deep = {"a": [deep]}
    half: Any = "x"
    for _ in range(MAX_DEPTH // 2):
        half = {"a": [half]}
    fine = as_json([span(1, attributes={"deep": half})])
    assert decoded(as_protobuf(fine)).spans == decoded(json.dumps(fine).encode()).spans
    assert refused(json.dumps(as_json([span(1, attributes={"deep": deep})])).encode()).reason == "too_deep"
    assert refused(b'{"resourceSpans":' + b"[" * 100_000).reason in ("too_deep", "not_json", "invalid_type")


def test_a_number_without_end_takes_no_time() -> None:
    began = time.process_time()
    assert fields_in(b"\xff" * (8 << 20)) == 0
    assert refused(b"\xff" * (8 << 20)).reason == "not_otlp"
    assert time.process_time() - began < 1


@pytest.mark.slow
def test_bad_spans_behind_many_empty_scopes_take_no_longer_than_before_them() -> None:
    """To take out one empty scope after the other, and to move all behind it each time, takes 2.4 times as long."""
    empty, bad = b"\x12\x00" * 200_000, b"\x12\x02\x12\x00" * 200_000
    seconds = []
    for scopes in (bad + empty, empty + bad):
        message = TracesData.FromString(as_protobuf(as_json([span(1)])))
        message.resource_spans[0].MergeFromString(scopes)
        value = message.SerializeToString()
        began = time.process_time()
        read = decoded(value)
        seconds.append(time.process_time() - began)
        assert read.refused is not None
        assert (len(read.spans), read.refused.count) == (1, 200_000)
    assert seconds[1] < 1.6 * seconds[0]


def test_a_damaged_record_is_refused_or_read_and_never_half(seed: int) -> None:
    rng = random.Random(seed)
    errors = []
    for value in (as_protobuf(as_json(sample())), json.dumps(as_json(sample())).encode()):
        for _ in range(400):
            damaged = bytearray(value)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            cut = bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.5 else damaged)
            try:
                read = decoded(cut)
            except InvalidSpans as error:
                errors.append(error.message)
                continue
            assert {each.trace_id for each in (*read.spans, *read.logs)} == split(cut).keys()
    assert all(0 < len(message) < 300 for message in errors)
