"""Spans of a worker at a collector, and without one."""

import time
from typing import Any

from tests.support.servers import Collector
from tests.support.stage import LINES, Stage, Workers, header, origin
from worker.lab.broker.embedded_kafka import EmbeddedKafka

STATE = b"vendor=opaque,other=1"


def test_each_record_has_its_span_at_the_collector(kafka: EmbeddedKafka, workers: Workers) -> None:
    parents = [b"00-%032x-%016x-01" % (i + 1, i + 1) for i in range(100)]
    values = [*LINES[:99], b"no json"]
    with Collector() as collector:
        stage = Stage(kafka, OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test", **collector.settings)
        worker = workers(stage.env).wait_ready()
        rows = [(b"k", value, [("traceparent", parents[i]), ("tracestate", STATE)]) for i, value in enumerate(values)]
        places = stage.produce([(*row, i % 4) for i, row in enumerate(rows)])
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


def test_a_collector_that_is_away_disturbs_nothing_and_without_tracing_headers_pass_through(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    values = []
    for tracing in ("true", "false"):
        stage = Stage(kafka, KP_TRACING=tracing, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
        worker = workers(stage.env).wait_ready()
        headers = [("traceparent", b"00-%032x-%016x-01" % (7, 7)), ("tracestate", STATE), ("n", b"1")]
        stage.produce([(b"k", line, headers, 0, 1_770_000_000_000) for line in LINES])
        stage.wait_committed(1000)
        metrics = worker.metrics()
        began = time.monotonic()
        worker.finish()
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
