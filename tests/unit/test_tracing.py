"""Spans: what they hold, whose children they are, and that a collector that is away disturbs nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.builders import make_record, trace_bytes
from tests.support.commands import header
from tests.support.kafka_fixtures import WorkerProcess
from tests.support.lane import LaneHarness, settle
from tests.support.stage import LINES, Stage, origin
from worker import config
from worker.embedded_kafka import EmbeddedKafka
from worker.tracing import Tracing, start_tracing

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + b"0"
STATE = b"vendor=opaque,other=1"

Workers = Callable[..., WorkerProcess]


class Traced:
    """A lane whose spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.stage = LaneHarness(tracing=Tracing(provider, "kp-group"))

    async def run(self, value: bytes | None, *headers: tuple[str, bytes]) -> tuple[Any, Any]:
        """Return the span and the output of one record."""
        submitted = len(self.stage.pool.submitted)
        self.stage.lane.take(make_record(value, 42, headers=headers, partition=3))
        await settle()
        if len(self.stage.pool.submitted) > submitted:
            self.stage.pool.finish(submitted)
        await self.stage.lane.drain()
        await settle()
        await self.stage.lane.close()
        (span,) = self.exporter.get_finished_spans()
        return span, self.stage.publisher.committed[-1].outputs[-1]


async def test_a_span_follows_the_conventions_and_is_the_producer_s_child() -> None:
    value = trace_bytes("kp:trace:7", objective="secret words")
    span, output = await Traced().run(value, ("traceparent", PARENT), ("n", b"1"), ("tracestate", STATE))
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
    span, output = await Traced().run(trace_bytes(), *headers)
    assert span.parent is None
    found = [value for name, value in output.headers if name == "traceparent"]
    assert found == [
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}".encode()
    ]


@pytest.mark.parametrize(
    ("value", "reason"), [(b"no json", "not_json"), (None, "empty_value"), (trace_bytes(confidence=7), "invalid_value")]
)
async def test_a_dead_letter_is_an_error_and_keeps_its_headers(value: bytes | None, reason: str) -> None:
    span, output = await Traced().run(value, ("traceparent", PARENT))
    assert output.headers[0] == ("traceparent", PARENT)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, reason)
    assert span.attributes.get("messaging.kafka.message.tombstone", False) == (value is None)


async def test_a_span_lasts_until_the_commit() -> None:
    traced = Traced()
    traced.stage.publisher.gate.clear()
    traced.stage.lane.take(make_record(b"no json", 0))
    await settle()
    assert not traced.exporter.get_finished_spans()
    traced.stage.publisher.gate.set()
    await traced.stage.lane.drain()
    await settle()
    assert len(traced.exporter.get_finished_spans()) == 1
    await traced.stage.lane.close()


async def test_what_the_producer_does_not_sample_is_not_exported_and_passed_on_unsampled() -> None:
    traced = Traced()
    traced.stage.lane.take(make_record(trace_bytes(), 0, headers=[("traceparent", UNSAMPLED)]))
    await settle()
    traced.stage.pool.finish(0)
    await traced.stage.lane.drain()
    assert not traced.exporter.get_finished_spans()
    (output,) = traced.stage.publisher.committed[0].outputs
    passed_on = dict(output.headers)["traceparent"]
    assert passed_on[:36] == UNSAMPLED[:36]
    assert passed_on.endswith(b"-00")
    await traced.stage.lane.close()


def test_an_exporter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_tracing(config.load()) is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(config.ConfigError, match="OTEL_TRACES_EXPORTER=pigeon"):
        start_tracing(config.load(tracing=True))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke/signals")
    with pytest.raises(config.ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL=smoke/signals"):
        start_tracing(config.load(tracing=True))


# -- the worker as a process


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP, as an OpenTelemetry collector does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_spans:
            self.server.resources.append({it.key: it.value.string_value for it in resource.resource.attributes})
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.kafka
def test_each_record_has_its_span_at_the_collector(
    kafka: EmbeddedKafka, workers: Workers, collector: Collector
) -> None:
    stage = Stage(
        kafka,
        KP_TRACING="true",
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_port}",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    worker = workers(stage.env).wait_ready()
    parents = [b"00-%032x-%016x-01" % (i + 1, i + 1) for i in range(100)]
    values = [*LINES[:99], b"no json"]
    places = stage.produce(
        [(b"k", value, [("traceparent", parents[i]), ("tracestate", STATE)], i % 4) for i, value in enumerate(values)]
    )
    stage.wait_committed(100)
    worker.terminate()
    assert worker.wait() == 0  # the last spans are sent before it ends
    assert len(collector.spans) == 100
    resource = collector.resources[0]
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("kp-worker", "test")
    sent = dict(zip(places, parents, strict=True))
    by_place = {place_of(span): span for span in collector.spans}
    assert by_place.keys() == sent.keys()
    for kind, records in stage.outputs().items():
        for record in records:
            span, parent = by_place[origin(record)], sent[origin(record)]
            assert (span.trace_id.hex(), span.parent_span_id.hex()) == (parent[3:35].decode(), parent[36:52].decode())
            assert span.end_time_unix_nano > span.start_time_unix_nano
            given = header(record, "traceparent")
            if kind == "dead-letter":
                assert given == parent.decode()
            else:
                assert given == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
                assert header(record, "tracestate") == STATE.decode()


def place_of(span: Any) -> tuple[int, int]:
    found = {it.key: it.value for it in span.attributes}
    partition = found["messaging.destination.partition.id"].string_value
    return int(partition), found["messaging.kafka.offset"].int_value


@pytest.mark.kafka
def test_a_collector_that_is_away_disturbs_nothing_and_without_tracing_headers_pass_through(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    values = []
    for tracing in ("true", "false"):
        stage = Stage(kafka, KP_TRACING=tracing, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
        worker = workers(stage.env).wait_ready()
        headers = [("traceparent", PARENT), ("tracestate", STATE), ("n", b"1")]
        stage.produce([(b"k", line, headers, 0, 1_770_000_000_000) for line in LINES])
        stage.wait_committed(1000)
        metrics = worker.metrics()
        began = time.monotonic()
        worker.terminate()
        assert worker.wait() == 0
        assert time.monotonic() - began < 8
        assert metrics["kp_evaluation_duration_seconds_count"] == 1000
        assert worker.log().count("\n") < 60, "the exporter's complaints are held back"
        outputs = stage.outputs()
        values.append(
            [r.value.replace(stage.name.encode(), b"NAME") for k in ("accepted", "rejected") for r in outputs[k]]
        )
        for record in outputs["accepted"] + outputs["rejected"]:
            passed = [it for it in record.headers if it[0] in ("traceparent", "tracestate", "n")]
            assert (passed == headers) == (tracing == "false")
    assert values[0] == values[1]
    assert len(values[0]) == 1000
