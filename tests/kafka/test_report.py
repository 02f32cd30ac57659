"""`kp-worker report` and the doctor's look at domains, on topics that hold scored traces."""

import asyncio
import json
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from click import ClickException

from tests.support.builders import T0, trace_bytes
from tests.support.kafka_fixtures import create_topics_async, produce, unique
from tests.support.reports import outputs, scored
from tests.support.stage import Desk, Diagnosis
from worker.commands.report.numbers import Traces
from worker.commands.shared.session import read_topics
from worker.config import ConfigError, Settings
from worker.lab.broker.embedded_kafka import EmbeddedKafka

DOMAINS = ["finance", "Finance", "legal", "customer-service"]


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """120 scored traces on the two topics, a second apart, one record that nobody scored, and one that was aborted."""
    desk = Desk(kafka)
    sources = [trace_bytes(f"kp:trace:{n}", domain=DOMAINS[n % 4], confidence=n / 120) for n in range(120)]
    records: dict[str, list[Any]] = {"accepted": [], "rejected": []}
    for number, (verdict, document) in enumerate(scored(sources)):
        kind = "accepted" if verdict.accepted else "rejected"
        records[kind].append((None, document, [], number % 2, T0 + 1000 * number))
    records["rejected"].append((None, b"{", [], 0, T0))
    for kind, those in records.items():
        produce(desk.bootstrap, desk.topics[kind], those)
    (other,) = outputs([trace_bytes("kp:trace:aborted")])  # equal documents count once
    asyncio.run(abort(desk.bootstrap, desk.topics["accepted"], other))
    return desk


async def abort(bootstrap: str, topic: str, value: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=unique("report")) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, value)
        await producer.abort_transaction()


def test_it_reads_the_topics(desk: Desk) -> None:
    result = desk.run("report", "--from-kafka", "--set", "threshold=0.4", "--set", "profiles.legal.threshold=1")
    assert result.returncode == 0, result.stderr
    assert f"{desk.name}.rejected/0 offset " in result.stderr
    found = json.loads(result.stdout)
    assert found["total"]["traces"] == 120
    by_name = {row["domain"]: row for row in found["domains"]}
    assert by_name["legal"]["after"]["profile"] == "legal"
    assert by_name["legal"]["after"]["accepted"] == 0 == by_name["legal"]["to_accepted"]
    assert by_name["finance"]["to_accepted"] > 0
    last = json.loads(desk.run("report", "--from-kafka", "--last", "6").stdout)
    assert last["total"]["traces"] == 6  # of both topics together
    since = json.loads(desk.run("report", "--from-kafka", "--since", "2026-04-14T08:01:55Z").stdout)
    assert since["total"]["traces"] == 5


def test_outcomes_of_the_topics(desk: Desk) -> None:
    """Stream-time order, over partitions and topics, is that of the runs: the same topics give the same figures."""
    options = ("--outcome", "outcome.confidence", "--verdicts", "50%", "--late", "3")
    first, second = (desk.run("report", "--from-kafka", *options).stdout for _ in range(2))
    assert first == second
    assert json.loads(first)["outcome"]["record"]["accepted"]["value"] >= 0
    assert json.loads(first)["outcome"]["files"][0]["name"] == "the topics"


def test_the_doctor_names_near_misses(desk: Desk) -> None:
    found = Diagnosis({**desk.env, "KP_PROFILES": '{"legl": {"threshold": 0.9}}'}).of("domains")
    assert [level for level, _ in found] == ["warn"] * 4
    messages = "\n".join(message for _, message in found)
    for domain, meant in (("Finance", "finance?"), ("customer-service", ""), ("legal", "legl?")):
        text = f"the domain {domain} (30 of the last 120 scored traces) takes the profile default; did you mean {meant}"
        assert text in messages
    assert "takes the profile legl of the settings; did you mean legal?" in messages
    named = {**desk.env, "KP_PROFILES": '{"Finance": {}, "customer-service": {}}'}
    summary = "4 in the last 120 scored traces; without their own profile: legal (30)"
    assert Diagnosis(named).of("domains") == [("ok", summary)]


def test_the_doctor_without_scored_traces(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    assert Diagnosis(desk.env).of("domains") == [("ok", "no trace is scored yet")]
    missing = {**desk.env, "KP_ACCEPTED_TOPIC": f"{desk.name}.none", "KP_PROFILES": '{"finanse": {}}'}
    [(level, message)] = Diagnosis(missing).of("domains")
    assert level == "warn"
    assert "takes the profile finanse of the settings; did you mean finance?" in message


async def test_empty_and_missing_topics(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, rejected = unique("accepted"), unique("rejected")
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, accepted_topic=accepted, rejected_topic=rejected
    )  # fmt: skip
    traces = Traces(settings)
    with pytest.raises(ConfigError, match=f"missing on .*: topic {accepted}, {rejected}\\. Correct the name"):
        await read_topics(settings, (settings.accepted_topic, settings.rejected_topic), traces.add, last=None)
    await create_topics_async(kafka.bootstrap_servers, {accepted: 1, rejected: 1})
    assert await read_topics(settings, (settings.accepted_topic, settings.rejected_topic), traces.add, last=5) == 0
    with pytest.raises(ClickException, match="no documents"):
        traces.report("x")
    nobody = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"=127\.0\.0\.1:1: connection refused"):
        await read_topics(nobody, (nobody.accepted_topic, nobody.rejected_topic), traces.add, last=None)
