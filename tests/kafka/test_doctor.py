"""`kp-worker doctor` as a process: healthy, without a broker, and with wrong settings. Logins: test_security.py."""

import asyncio
import socket
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import UnknownTopicOrPartitionError

from tests.support.kafka_fixtures import admin, commit_offset, committed, create_topics, produce, topic_id
from tests.support.kafka_versions import since
from tests.support.stage import Desk, Diagnosis, untouched
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def topics(kafka: EmbeddedKafka) -> list[str]:
    """All topics of the broker, as a fresh client sees them."""
    return sorted(admin(kafka.bootstrap_servers, lambda client: client.list_topics()))


def test_a_healthy_set_up_and_its_lag(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="2")
    assert stage.run("topics", "--create").returncode == 0
    produce(kafka.bootstrap_servers, stage.name, [(None, b"x", (), number % 2) for number in range(7)])
    committed(kafka.bootstrap_servers, stage.name, stage.name)  # from now on there are coordinators
    diagnosis = Diagnosis(stage.env)
    assert diagnosis.failed() == []
    assert diagnosis.of("permissions") == [("ok", "Read and Write on 5 topics as needed")]
    assert [level for level, _ in diagnosis.of("topic ")] == ["warn"] * 5  # one replica
    assert all("one replica" in message for _, message in diagnosis.of("topic "))
    assert diagnosis.of("group") == [("ok", "does not exist yet")]
    assert diagnosis.of("lag") == [("ok", "7 records wait in 2 partitions")]


def test_markers_of_transactions_are_no_lag(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    create_topics(kafka.bootstrap_servers, {stage.name: 2})

    async def transactions(*values: bytes, commit: bool = True) -> None:
        """Send values to partition 0, each in a transaction of its own: two offsets."""
        producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers, transactional_id=stage.name)
        async with producer:
            for value in values:
                await producer.begin_transaction()
                await producer.send_and_wait(stage.name, value, partition=0)
                await (producer.commit_transaction() if commit else producer.abort_transaction())

    def lag() -> list[tuple[str, str]]:
        return Diagnosis(stage.env).of("lag")

    asyncio.run(transactions(b"1", b"2"))
    committed(kafka.bootstrap_servers, stage.name, stage.name)  # from now on there are coordinators
    assert lag() == [("ok", "2 records wait in 2 partitions")]
    # As a worker does that has scored both; the topic ends at 4.
    commit_offset(kafka.bootstrap_servers, stage.name, stage.name, 3)
    assert lag() == [("ok", "0 records wait in 2 partitions")]
    asyncio.run(transactions(b"3", commit=False))
    assert lag() == [("ok", "0 records wait in 2 partitions")]
    produce(kafka.bootstrap_servers, stage.name, [(None, b"x", (), 1)] * 1001)
    assert lag() == [("ok", "at most 1,001 records wait in 2 partitions")]

    ((level, message),) = Diagnosis(stage.env).of("transactions")
    may_hang = since("4.0") and not since("4.3")
    assert level == ("warn" if may_hang else "ok")
    assert ("KAFKA-20090" in message) == may_hang


def test_it_changes_nothing_and_names_what_is_missing(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    before = topics(kafka)
    diagnosis = Diagnosis(stage.env)
    with pytest.raises(UnknownTopicOrPartitionError):
        topic_id(kafka.bootstrap_servers, stage.name)
    assert topics(kafka) == before
    assert len(diagnosis.failed()) == 1
    assert f"{stage.name}.dead-letter (KP_DEAD_LETTER_TOPIC)" in diagnosis.failed()[0]
    assert Diagnosis({**stage.env, "KP_CREATE_TOPICS": "true"}).failed() == []


def test_topics_that_stop_or_hinder_the_worker(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    names = list(stage.settings().topics.values())
    compacted = (1, {"cleanup.policy": "compact"})
    specs = (2, (1, {"min.insync.replicas": "2"}), compacted, 1, compacted)
    create_topics(kafka.bootstrap_servers, dict(zip(names, specs, strict=True)))
    diagnosis = Diagnosis(stage.env)
    failed = "\n".join(diagnosis.failed())
    assert f"{names[4]} has 1 partition," in failed
    assert "min.insync.replicas=2 with 1 replica: no write is ever acknowledged" in failed
    warned = "\n".join(message for level, message in diagnosis.of("topic") if level == "warn")
    assert "records without a key are refused" in warned
    assert "dead letters of the largest records are truncated" in warned
    assert "segment.ms=604800000 (not 600000)" in warned


def test_without_a_broker_the_other_checks_run_and_time_is_bounded() -> None:
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], 1):
            started = time.monotonic()
            env = {"KP_BOOTSTRAP_SERVERS": f"127.0.0.1:{port}", "KP_TRESHOLD": "1", "KP_HTTP_HOST": "127.0.0.1"}
            diagnosis = Diagnosis(env)
            assert time.monotonic() - started < 60
            assert len(diagnosis.failed()) == 1
            assert diagnosis.failed()[0].startswith(f"broker: 127.0.0.1:{port}")
            assert ("warn", "KP_TRESHOLD is not a setting; did you mean KP_THRESHOLD?") in diagnosis.of("settings")
            assert {it["check"] for it in diagnosis.findings} >= {"model", "model cache", "temporary files", "port"}


def test_wrong_settings_a_missing_model_and_a_taken_port(tmp_path: Path) -> None:
    assert "KP_THRESHOLD='7' is wrong" in Diagnosis({"KP_THRESHOLD": "7"}).failed()[0]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        model = {"KP_EMBEDDER": "openvino", "KP_MODEL": str(tmp_path)}
        http = {"KP_HTTP_HOST": "127.0.0.1", "KP_HTTP_PORT": port}
        failed = "\n".join(Diagnosis({"KP_BOOTSTRAP_SERVERS": "127.0.0.1:1", **model, **http}).failed())
    assert f"model: {tmp_path} is not an exported model" in failed
    assert f"cannot listen on 127.0.0.1:{port}" in failed


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ({"KP_TRACING": "true", "OTEL_TRACES_EXPORTER": "pigeon"}, "tracing"),
        ({"KP_REDACT_PATTERNS_FILE": "/nowhere/patterns.toml"}, "redaction"),
        ({"KP_TLS_CA_FILE": "/nowhere/ca.pem", "KP_SECURITY_PROTOCOL": "SSL"}, "broker"),
        ({"KP_THRESHOLD": "7"}, "settings"),
        ({"KP_MODEL": "/nowhere/model", "KP_EMBEDDER": "openvino"}, "model"),
        ({"KP_HTTP_HOST": "192.0.2.1"}, "port"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_ends_run_with_2_is_found_by_the_doctor(kafka: EmbeddedKafka, wrong: dict[str, str], check: str) -> None:
    desk = Desk(kafka, KP_HTTP_PORT="0", **wrong)
    assert desk.run("run").returncode == 2
    assert [failed.partition(":")[0] for failed in Diagnosis(desk.env).failed()] == [check]


def test_its_last_line_is_what_all_comes_to(kafka: EmbeddedKafka) -> None:
    done = Desk(kafka, KP_REDACT_PATTERNS_FILE="/nowhere/patterns.toml").run("doctor", "--text")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("doctor: 1 problem (redaction), ")
    assert last.endswith("model)")
