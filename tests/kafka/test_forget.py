"""`kp-worker forget` and workers that honour it, or do not, on real Kafka."""

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.builders import trace_document
from tests.support.forgetting import KEY, control_record, of_version_1
from tests.support.kafka_fixtures import (
    LoggedProcess,
    consume_all,
    create_topics,
    produce,
    recreate_topic,
    topic_id,
    wait_until,
)
from tests.support.schemas import VALIDATORS
from tests.support.stage import Stage, Workers
from worker.cli import cli
from worker.commands.forget import request as forget_command
from worker.core import changelog
from worker.core.forgetting import FORGOTTEN_PREFIX
from worker.core.passes import MARKER_KEY
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def stage_of(kafka: EmbeddedKafka) -> Stage:
    stage = Stage(kafka, KP_FORGET="true", KP_FORGET_KEY=KEY.decode(), KP_STATUS_PAGE="true")
    del stage.env["KP_EMBEDDER"]
    stage.env["KP_FORGOTTEN_TOPIC"] = f"{stage.name}.receipts"
    create_topics(stage.bootstrap, {stage.name: 2})
    return stage


def trace(number: int, agent: str, objective: str = "Explain") -> bytes:
    document = trace_document(f"kp:trace:{number}", objective=objective)
    document["metadata"]["agent_id"] = agent
    return json.dumps(document).encode()


def traces(first: int, count: int) -> list[tuple[Any, ...]]:
    """Return traces of one agent, with texts of their own, for both partitions in turn."""
    return [(None, trace(n, "ada", f"Explain {n}"), (), n % 2) for n in range(first, first + count)]


def names(first: int, count: int) -> list[str]:
    return sorted(f"kp:trace:{n}" for n in range(first, first + count))


def controls(stage: Stage) -> list[Any]:
    """Return the control records on the source topic, as somebody who may read it sees them."""
    return [record for record in consume_all(stage.bootstrap, stage.name) if record.headers]


def as_they_are(records: Iterable[Any], topic: str, bootstrap: str, partitions: Sequence[int] = (0, 1)) -> None:
    """Write the records again, without the key: to the partitions that `partitions` gives for theirs."""
    produce(bootstrap, topic, [(it.key, it.value, it.headers, partitions[it.partition]) for it in records])


def refusals(stage: Stage) -> list[str]:
    """Return the messages of the dead letters, which must all be of control records."""
    letters = [dict(record.headers) for record in stage.outputs()["dead-letter"]]
    assert {letter["kp-error-reason"] for letter in letters} <= {b"bad_control"}
    return [letter["kp-error-message"].decode() for letter in letters]


def receipts(stage: Stage) -> int:
    return len(consume_all(stage.bootstrap, stage.env["KP_FORGOTTEN_TOPIC"]))


def forget(stage: Stage, *options: str, **env: str) -> Result:
    args = ["forget", "--json", *options]
    return CliRunner().invoke(cli, args, env=stage.env | env, catch_exceptions=False)


def rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def live(stage: Stage) -> list[tuple[bytes, bytes]]:
    """Return the changelog's live records of both partitions."""
    last: dict[tuple[int, bytes], Any] = {}
    for record in consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog"):
        last[record.partition, record.key] = record.value
    return [(key, value) for (_, key), value in last.items() if value is not None]


def entries(stage: Stage) -> list[str]:
    others = (MARKER_KEY, FORGOTTEN_PREFIX)
    return sorted(changelog.decode(v).trace_id for k, v in live(stage) if not k.startswith(others))


def nearest(stage: Stage, number: int) -> str | None:
    outputs = stage.outputs()
    found = [json.loads(record.value) for kind in ("accepted", "rejected") for record in outputs[kind]]
    (near,) = [it["scoring"]["nearest"] for it in found if it["id"] == f"kp:trace:{number}"]
    return None if near is None else str(near["id"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", ["whole", "objective"])
def test_an_agent_and_a_trace_are_forgotten_in_every_partition(
    kafka: EmbeddedKafka, hashing: Workers, view: str
) -> None:
    stage = stage_of(kafka)
    stage.env["KP_EMBED_TEXT"] = view
    worker = hashing(stage.env).wait_ready()
    stage.produce([(None, trace(n, "ada" if n % 3 else "bob", f"Explain {n}"), (), n % 2) for n in range(8)])
    stage.wait_committed(8)

    result = forget(stage, "--agent", "ada", "--wait")
    assert result.exit_code == 0, result.output
    assert [(it["partition"], it["result"], it["removed"], it["cached"]) for it in rows(result)] == [
        (0, "forgotten", 2, 2),
        (1, "forgotten", 3, 3),
    ]
    assert entries(stage) == ["kp:trace:0", "kp:trace:3", "kp:trace:6"]
    worker.wait_metric("kp_forgotten_entries_total", 5)
    worker.wait_metric("kp_control_records_total", 2, result="honoured")
    assert json.loads(worker.get("/status.json")[1])["traces"] == []
    receipts = consume_all(stage.bootstrap, stage.env["KP_FORGOTTEN_TOPIC"])
    for receipt in receipts:
        VALIDATORS["forget-receipt"].validate(json.loads(receipt.value))
        assert receipt.key.decode() == rows(result)[0]["request_id"]
    controls = [it for it in consume_all(stage.bootstrap, stage.name) if it.headers]
    for control in controls:
        VALIDATORS["forget"].validate(json.loads(control.value))
    assert len(controls) == 2

    # The newest entry goes, and the worker starts again: its sequence number is not used a second time.
    assert forget(stage, "--trace", "kp:trace:3", "--wait").exit_code == 0
    worker.kill()
    hashing(stage.env).wait_ready()
    stage.produce([(None, trace(8, "bob", "Explain 3"), (), 1), (None, trace(9, "bob", "Explain 2"), (), 0)])
    stage.wait_committed(14)
    assert nearest(stage, 8) is None
    assert nearest(stage, 9) in ("kp:trace:0", "kp:trace:6")
    others = (MARKER_KEY, FORGOTTEN_PREFIX)
    written = [changelog.decode(value) for key, value in live(stage) if not key.startswith(others)]
    assert {it.trace_id: it.sequence for it in written}["kp:trace:8"] == 4


def test_without_the_setting_or_with_another_key_it_is_a_dead_letter(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = stage_of(kafka)
    worker = hashing(stage.env).wait_ready()
    stage.produce([(None, trace(n, "ada"), (), 0) for n in range(3)])
    stage.wait_committed(3)
    assert forget(stage, "--trace", "kp:trace:2", "--wait").exit_code == 0
    other = forget(stage, "--agent", "ada", "--wait", KP_FORGET_KEY="another key, it has as many bytes")
    assert other.exit_code == 1
    assert {it["reason"] for it in rows(other)} == {"bad_control"}
    assert "Partition 0: kp-control-signature is not the signature of this value" in other.stderr
    worker.wait_metric("kp_control_records_total", 2, result="refused")
    worker.kill()

    off = {name: value for name, value in stage.env.items() if not name.startswith("KP_FORG")}
    worker = hashing(off).wait_ready()
    assert worker.metric("kp_changelog_entries_skipped_total", cause="corrupt") == 0
    result = forget(stage, "--agent", "ada", "--wait")
    assert result.exit_code == 1
    assert {it["reason"] for it in rows(result)} == {"missing_field"}
    assert "KP_FORGET=false" in result.stderr
    stage.produce([(None, trace(3, "ada"), (), 0)])
    stage.wait_committed(10)
    assert entries(stage) == ["kp:trace:0", "kp:trace:1", "kp:trace:3"]
    assert sum(key.startswith(FORGOTTEN_PREFIX) for key, _ in live(stage)) == 2


def test_wrong_usage_is_told(kafka: EmbeddedKafka) -> None:
    stage = stage_of(kafka)
    for options in ((), ("--agent", "a", "--trace", "b"), ("--trace", "")):
        assert forget(stage, *options).exit_code == 2
    assert forget(stage, "--trace", "a", KP_FORGET_KEY="too short").exit_code == 2
    assert controls(stage) == []
    unanswered = forget(stage, "--trace", "a", "--wait")
    assert unanswered.exit_code == 2  # no worker ever created the topic of receipts
    assert stage.env["KP_FORGOTTEN_TOPIC"] in unanswered.stderr


def test_a_request_is_honoured_nowhere_else(kafka: EmbeddedKafka, hashing: Workers) -> None:
    """Its control records are written again: in the other partition, later, and after the topic was recreated."""
    stage = stage_of(kafka)
    worker = hashing(stage.env).wait_ready()
    stage.produce(traces(0, 6))
    stage.wait_committed(6)
    assert forget(stage, "--agent", "ada", "--wait").exit_code == 0
    captured = controls(stage)
    assert len(captured) == receipts(stage) == 2

    stage.produce(traces(6, 6))
    as_they_are(captured, stage.name, stage.bootstrap)
    as_they_are(captured, stage.name, stage.bootstrap, (1, 0))
    stage.wait_committed(18)
    assert entries(stage) == names(6, 6)
    said = refusals(stage)
    assert sum("this is a copy" in it for it in said) == 2
    assert sum("another topic or partition" in it for it in said) == 2
    worker.terminate()
    assert worker.wait() == 0

    recreate_topic(stage.bootstrap, stage.name, 2)
    stage.produce(traces(20, 6))
    as_they_are(captured, stage.name, stage.bootstrap)
    worker = hashing(stage.env).wait_ready()
    stage.wait_committed(8)
    assert entries(stage) == names(20, 6)
    assert receipts(stage) == 2
    assert sum("another topic of this name" in it for it in refusals(stage)) == 2
    worker.wait_metric("kp_control_records_total", 2, result="refused")
    assert worker.metric("kp_forgotten_entries_total") == 0

    assert forget(stage, "--agent", "ada", "--wait").exit_code == 0
    assert entries(stage) == []


def test_a_worker_that_was_paused_while_the_topic_was_recreated(kafka: EmbeddedKafka, hashing: Workers) -> None:
    """It reads on in the new topic and knows the old one's id; the request is one that it has not read yet."""
    stage = stage_of(kafka)
    stage.env["KP_SESSION_TIMEOUT_SECONDS"] = "40"
    worker = hashing(stage.env).wait_ready()
    stage.produce(traces(0, 6))
    stage.wait_committed(6)
    before = consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog")
    worker.stop()
    time.sleep(1)  # its last fetch of the old topic is over
    assert forget(stage, "--agent", "ada").exit_code == 0
    captured = controls(stage)
    recreate_topic(stage.bootstrap, stage.name, 2)
    as_they_are(captured, stage.name, stage.bootstrap)
    stage.produce(traces(20, 4))
    as_they_are(captured, stage.name, stage.bootstrap)  # at offset 3, the next one that it reads
    worker.cont()
    assert worker.wait() == 1, worker.log()
    by_control, by_watch = (
        f"{stage.name} was recreated while",
        f"{stage.name} (KP_SOURCE_TOPIC) was deleted and created",
    )
    assert by_control in worker.log() or by_watch in worker.log()  # whichever looks first
    assert consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog") == before
    assert receipts(stage) == 0

    worker = hashing(stage.env).wait_ready()
    stage.wait_committed(8)
    assert entries(stage) == names(20, 4)
    assert receipts(stage) == 0
    assert sum("another topic of this name" in it for it in refusals(stage)) == 4


def test_a_copy_on_another_topic_or_cluster_is_refused(kafka: EmbeddedKafka, hashing: Workers) -> None:
    """As a mirror copies it, with its headers: under another name, or under the same name on another cluster."""
    stage = stage_of(kafka)
    hashing(stage.env).wait_ready()
    stage.produce(traces(0, 2))
    stage.wait_committed(2)
    assert forget(stage, "--agent", "ada", "--wait").exit_code == 0
    with EmbeddedKafka() as second:
        elsewhere = stage_of(second)
        for name, value in stage.env.items():
            if value.startswith(stage.name):
                elsewhere.env[name] = value
        elsewhere.name = stage.name
        create_topics(elsewhere.bootstrap, {stage.name: 2})
        renamed = stage_of(kafka)
        for other, words in ((elsewhere, "another topic of this name"), (renamed, "another topic or partition")):
            hashing(other.env).wait_ready()
            other.produce(traces(0, 2))
            as_they_are(controls(stage), other.name, other.bootstrap)
            other.wait_committed(4)
            assert entries(other) == names(0, 2)
            assert [words in it for it in refusals(other)] == [True, True]
            assert receipts(other) == 0


def test_each_group_that_reads_the_topic_honours_the_same_request(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = stage_of(kafka)
    hashing(stage.env).wait_ready()
    stage.produce(traces(0, 6))
    stage.wait_committed(6)
    assert forget(stage, "--agent", "ada", "--wait").exit_code == 0
    second = stage_of(kafka)
    second.env["KP_SOURCE_TOPIC"] = stage.name
    worker = hashing(second.env).wait_ready()
    worker.wait_metric("kp_forgotten_entries_total", 6)
    assert receipts(second) == receipts(stage) == 2
    assert refusals(second) == refusals(stage) == []


def test_a_request_of_version_1_that_is_still_unread_at_the_roll(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = stage_of(kafka)
    place = {"topic": stage.name, "topic_id": topic_id(stage.bootstrap, stage.name), "end_offsets": [3, 3]}
    stage.produce(traces(0, 6))
    as_they_are(
        [of_version_1(control_record(3, partition=partition, agent_id="ada", **place)) for partition in (0, 1)],
        stage.name,
        stage.bootstrap,
    )
    hashing(stage.env).wait_ready()
    stage.wait_committed(8)
    assert entries(stage) == names(0, 6)
    assert receipts(stage) == 0
    assert ["version 1" in it and "run kp-worker forget again" in it for it in refusals(stage)] == [True, True]
    assert forget(stage, "--agent", "ada", "--wait").exit_code == 0
    assert entries(stage) == []


def test_the_command_says_that_the_topic_was_recreated_before_the_records_were_written(
    kafka: EmbeddedKafka, hashing: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(kafka)
    ask = forget_command.topic_offsets

    async def recreate_first(*arguments: Any) -> Any:
        await asyncio.to_thread(recreate_topic, stage.bootstrap, stage.name, 2)
        return await ask(*arguments)

    monkeypatch.setattr(forget_command, "topic_offsets", recreate_first)
    before = topic_id(stage.bootstrap, stage.name)
    result = forget(stage, "--agent", "ada")
    assert result.exit_code == 1
    assert [it["result"] for it in rows(result)] == ["written", "written"]
    assert f"the topic was recreated meanwhile (its id was {before}, now it is" in result.stderr
    assert "Run the command again" in result.stderr
    hashing(stage.env).wait_ready()
    stage.wait_committed(2)
    assert ["another topic of this name" in it for it in refusals(stage)] == [True, True]


def test_the_command_says_that_the_topic_was_recreated_while_it_waited(
    kafka: EmbeddedKafka, hashing: Workers, tmp_path: Path
) -> None:
    stage = stage_of(kafka)
    worker = hashing(stage.env).wait_ready()  # it creates the topics of receipts and dead letters
    worker.terminate()
    assert worker.wait() == 0
    command = LoggedProcess(
        "worker", ["forget", "--agent", "ada", "--wait", "--timeout", "8"], os.environ | stage.env, tmp_path / "forget"
    )
    try:
        assert wait_until(lambda: len(controls(stage)) >= 2), command.log()
        time.sleep(1)  # what it looks at after it has written them
        recreate_topic(stage.bootstrap, stage.name, 2)
        assert command.process.wait(60) == 1
        assert "the topic was recreated meanwhile" in command.log()
    finally:
        command.close()
