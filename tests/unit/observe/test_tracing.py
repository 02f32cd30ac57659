"""Spans: what they hold, and whose children they are."""

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.builders import make_record, trace_bytes
from tests.support.partition import TaskHarness, settle
from worker import config
from worker.observe.tracing import NO_TRACING, Tracing, start_tracing

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + b"0"
STATE = b"vendor=opaque,other=1"


class Traced:
    """A partition task whose spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.stage = TaskHarness(tracing=Tracing(provider, "kp-group"))

    async def run(self, value: bytes | None, *headers: tuple[str, bytes]) -> tuple[list[Any], Any]:
        """Return the finished spans and the output of one record."""
        submitted = len(self.stage.pool.submitted)
        self.stage.task.take(make_record(value, 42, headers=headers, partition=3))
        await settle()
        if len(self.stage.pool.submitted) > submitted:
            self.stage.pool.finish(submitted)
        await self.stage.task.drain()
        await settle()
        await self.stage.task.close()
        return list(self.exporter.get_finished_spans()), self.stage.publisher.committed[-1].outputs[-1]


async def test_a_span_follows_the_conventions_and_is_the_producer_s_child() -> None:
    value = trace_bytes("kp:trace:7", objective="secret words")
    (span,), output = await Traced().run(value, ("traceparent", PARENT), ("n", b"1"), ("tracestate", STATE))
    assert span.name == "process traces"
    assert span.kind is SpanKind.CONSUMER
    assert f"{span.context.trace_id:032x}" == PARENT[3:35].decode()
    assert f"{span.parent.span_id:016x}" == PARENT[36:52].decode()
    score = json.loads(output.value)["scoring"]["score"]
    assert dict(span.attributes) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "traces",
        "messaging.destination.partition.id": "3",
        "messaging.kafka.offset": 42,
        "messaging.consumer.group.name": "kp-group",
        "messaging.message.body.size": len(value),
        "kp.trace.id": "kp:trace:7",
        "kp.score": score,
        "kp.decision": output.kind,
        "kp.profile": "finance",
    }
    conventions = {value for name, value in vars(messaging_attributes).items() if name.startswith("MESSAGING_")}
    assert {name for name in span.attributes if name.startswith("messaging.")} <= conventions
    assert [event.name for event in span.events] == ["embedded", "scored"]
    assert span.status.status_code is StatusCode.UNSET
    assert "secret" not in span.to_json()

    headers = [name for name, _ in output.headers]
    assert headers == ["n", "kp-score", "kp-decision", "traceparent", "tracestate"]
    mine = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
    assert dict(output.headers)["traceparent"].decode() == mine
    assert dict(output.headers)["tracestate"] == STATE


@pytest.mark.parametrize("headers", [[], [("traceparent", b"nonsense")], [("traceparent", b"\xff\x00")]])
async def test_without_a_valid_parent_a_trace_begins(headers: list[tuple[str, bytes]]) -> None:
    (span,), output = await Traced().run(trace_bytes(), *headers)
    assert span.parent is None
    parents = [value for name, value in output.headers if name == "traceparent"]
    assert parents == [
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}".encode()
    ]


@pytest.mark.parametrize(
    ("value", "reason"), [(b"no json", "not_json"), (None, "empty_value"), (trace_bytes(confidence=7), "invalid_value")]
)
async def test_a_dead_letter_is_an_error_and_keeps_its_headers(value: bytes | None, reason: str) -> None:
    (span,), output = await Traced().run(value, ("traceparent", PARENT))
    assert output.headers[0] == ("traceparent", PARENT)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, reason)
    assert span.attributes.get("messaging.kafka.message.tombstone", False) == (value is None)


async def test_a_span_lasts_until_the_commit() -> None:
    traced = Traced()
    traced.stage.publisher.gate.clear()
    traced.stage.task.take(make_record(b"no json", 0))
    await settle()
    assert not traced.exporter.get_finished_spans()
    traced.stage.publisher.gate.set()
    await traced.stage.task.drain()
    await settle()
    assert len(traced.exporter.get_finished_spans()) == 1
    await traced.stage.task.close()


async def test_what_the_producer_does_not_sample_is_not_exported_and_passed_on_unsampled() -> None:
    spans, output = await Traced().run(trace_bytes(), ("traceparent", UNSAMPLED))
    assert not spans
    passed_on = dict(output.headers)["traceparent"]
    assert passed_on[:36] == UNSAMPLED[:36]
    assert passed_on.endswith(b"-00")


@pytest.mark.parametrize(("parent", "exemplars"), [(PARENT, 1), (UNSAMPLED, 0)], ids=["sampled", "unsampled"])
async def test_a_slow_evaluation_leads_to_its_span_if_that_is_exported(parent: bytes, exemplars: int) -> None:
    traced = Traced()
    await traced.run(trace_bytes(), ("traceparent", parent))
    (family,) = traced.stage.metrics.evaluation.collect()
    exemplar_labels = [sample.exemplar.labels for sample in family.samples if sample.exemplar is not None]
    assert exemplar_labels == [{"trace_id": parent[3:35].decode()}] * exemplars


def test_none_is_the_word_for_spans_that_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    tracing = start_tracing(config.load(tracing=True))
    assert isinstance(tracing, Tracing)
    assert tracing.begin(make_record(b"{}")).is_recording()
    tracing.stop()


def test_an_exporter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_tracing(config.load()) is NO_TRACING
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(config.ConfigError, match="OTEL_TRACES_EXPORTER=pigeon"):
        start_tracing(config.load(tracing=True))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke/signals")
    with pytest.raises(config.ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL=smoke/signals"):
        start_tracing(config.load(tracing=True))
