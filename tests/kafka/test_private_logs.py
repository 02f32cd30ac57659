"""What traces say stays out of the logs: a real worker, fed with a marker in every place that a producer fills."""

from __future__ import annotations

import json
from typing import Any

from tests.support.builders import trace_document
from tests.support.stage import Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka

MARKER = "marmalade"


def documents() -> list[bytes]:
    """Return traces whose content holds the marker: good ones, and broken ones with it at the broken place."""
    good = trace_document(
        objective=f"{MARKER} objective",
        domain=f"{MARKER} domain",
        steps=[{"type": "tool_call", "content": f"{MARKER} step", "tool": {"name": f"{MARKER} tool", "input": MARKER}}],
    )
    good["outcome"]["result_summary"] = f"{MARKER} result"
    good[MARKER] = {MARKER: MARKER}
    broken: list[Any] = [
        {**good, "steps": [{"step_id": 0, "type": MARKER}]},
        {**good, "metadata": {**good["metadata"], "created_at": MARKER}},
        {**good, "outcome": {"result_summary": "", "confidence": MARKER}},
        {**good, "@context": MARKER},
        {**good, "task": {"objective": [MARKER]}},
        {**good, "id": {MARKER: 1}},
        {MARKER: MARKER},
        MARKER,
    ]
    cut = json.dumps(good)[:-3]
    return [
        *(json.dumps(it).encode() for it in [good, *broken]),
        cut.encode(),
        cut.encode() + b"\xff",
        b"\x80" + cut.encode(),
    ]


def test_what_a_trace_says_is_in_no_log_above_debug(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_LOG_LEVEL="debug", KP_LOG_FORMAT="json", KP_LATENCY_BUDGET_SECONDS="0.000001")
    worker = workers(stage.env).wait_ready()
    sent = documents() * 3
    stage.produce([(MARKER.encode(), value, [(MARKER, MARKER.encode())], 0) for value in sent])
    stage.wait_committed(len(sent))
    letters = len(stage.outputs()["dead-letter"])
    worker.terminate()
    assert worker.wait() == 0
    events = [json.loads(line) for line in worker.log().splitlines()]  # every line is one event
    levels = {event["level"] for event in events}
    assert {"debug", "info"} <= levels
    above = [event for event in events if event["level"] != "debug"]
    assert not [event for event in above if MARKER in json.dumps(event)]
    assert [event for event in events if MARKER in json.dumps(event)], "at debug, the reason is told in full"

    told = [event for event in above if event["message"].startswith("dead letter")]
    assert 0 < len(told) < letters == len(sent) - 3  # repeated ones are held back
    assert {event["reason"] for event in told} >= {"not_json", "invalid_value"}
    assert all(event["topic"] == stage.name and event["partition"] == 0 for event in told)
    slow = [event for event in events if event["message"].startswith("over KP_LATENCY_BUDGET_SECONDS")]
    assert len(slow) == len(sent)
    assert {event["level"] for event in slow} == {"debug"}
    assert [event["offset"] for event in slow] == list(range(len(sent)))
