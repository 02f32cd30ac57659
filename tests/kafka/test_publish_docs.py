"""docs/examples/publish_aiokafka.py does what it says."""

import json
import runpy
from collections.abc import Awaitable, Callable

import pytest

from tests.support.builders import read_jsonl
from tests.support.kafka_fixtures import consume_all_async, create_topics_async, unique
from tests.support.surroundings import DOCS
from worker.core.trace import parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka


async def test_the_aiokafka_example_publishes_traces(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    names = runpy.run_path(str(DOCS / "examples/publish_aiokafka.py"))
    publish: Callable[..., Awaitable[list[tuple[int, int]]]] = names["publish"]
    topic = unique("docs")
    await create_topics_async(kafka.bootstrap_servers, {topic: 3})
    monkeypatch.setenv("KP_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KP_SOURCE_TOPIC", topic)
    traces = [trace for trace in read_jsonl("traces.jsonl") if "agent_id" in trace["metadata"]][:20]
    async with names["new_producer"]() as producer:
        places = await publish(producer, traces[:10], "00-1-2-01")
        places += await publish(producer, traces[10:], "00-1-2-01")
    records = {
        (record.partition, record.offset): record for record in await consume_all_async(kafka.bootstrap_servers, topic)
    }
    assert len(records) == len(traces) == 20
    for place, trace in zip(places, traces, strict=True):
        record = records[place]
        assert record.key == trace["metadata"]["agent_id"].encode()
        assert record.headers == (("traceparent", b"00-1-2-01"),)
        assert json.loads(record.value) == trace
        parse_trace(record.value)
