"""`kp-worker report` of topics."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.builders import T0
from tests.support.kafka_fixtures import create_topics, produce, unique
from tests.support.reports import dump, parsed, run, scored_document
from worker.commands.analysis.documents import NoDocuments
from worker.commands.analysis.report_numbers import Traces, summarize
from worker.commands.shared.scored_topics import read_outputs
from worker.config import Settings
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_the_topics_are_read_committed_to_their_end(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, rejected = unique("accepted"), unique("rejected")
    # The times are months old: by the broker's default Kafka would delete such records at its next look.
    create_topics(kafka.bootstrap_servers, dict.fromkeys((accepted, rejected), (2, {"retention.ms": "-1"})))
    for topic, score in ((accepted, 0.9), (rejected, 0.3)):
        records = [
            (None, dump(scored_document(n, score=score, time_ms=T0 + n * 1000)), [], n % 2, T0 + n * 1000)
            for n in range(40)
            if n % 4 == 0 or topic == rejected
        ]
        produce(kafka.bootstrap_servers, topic, records)
    asyncio.run(_abort(kafka.bootstrap_servers, accepted))
    monkeypatch.setenv("KP_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KP_ACCEPTED_TOPIC", accepted)
    monkeypatch.setenv("KP_REJECTED_TOPIC", rejected)

    result = run("--from-kafka", "-o", "-")
    assert result.exit_code == 0, result.output
    assert "50 traces: 10 accepted, 40 rejected" in result.stderr
    parsed(result.stdout)
    # Ten seconds from the end: 10 rejected, and those accepted of them.
    since = "2026-04-14T08:00:30Z"
    assert "12 traces: 2 accepted, 10 rejected" in run("--from-kafka", "--since", since, "-o", "-").stderr
    # The last ones of both topics together: the accepted topic, with fewer records, reaches no further back.
    assert "6 traces: 1 accepted, 5 rejected" in run("--from-kafka", "--last", "6", "-o", "-").stderr


async def _abort(bootstrap: str, topic: str) -> None:
    from aiokafka import AIOKafkaProducer

    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=unique("report")) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, dump(scored_document(999)))
        await producer.abort_transaction()


async def test_empty_and_missing_topics(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.kafka_fixtures import create_topics_async
    from worker.config import ConfigError

    accepted, rejected = unique("accepted"), unique("rejected")
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, accepted_topic=accepted, rejected_topic=rejected
    )  # fmt: skip
    traces = Traces()
    with pytest.raises(ConfigError, match=f"missing on .*: topic {accepted}, {rejected}\\. Correct the name"):
        await read_outputs(settings, traces.add, None, None)
    await create_topics_async(kafka.bootstrap_servers, {accepted: 1, rejected: 1})
    assert await read_outputs(settings, traces.add, None, 5) == 0
    with pytest.raises(NoDocuments, match="no documents"):
        summarize(traces)
    nobody = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"=127\.0\.0\.1:1: connection refused"):
        await read_outputs(nobody, traces.add, None, None)
