"""`kp-worker forget` and workers that honour it, or do not, on real Kafka."""

import json
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner, Result

from tests.support.builders import trace_document
from tests.support.forgetting import KEY
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics
from tests.support.schemas import VALIDATORS
from tests.support.stage import Stage
from worker.broker.embedded_kafka import EmbeddedKafka
from worker.cli import cli
from worker.core import changelog
from worker.core.forgetting import FORGOTTEN_PREFIX
from worker.core.passes import MARKER_KEY

Hashing = Callable[[dict[str, str]], WorkerProcess]


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


def forget(stage: Stage, *options: str, **env: str) -> Result:
    args = ["forget", "--json", *options]
    return CliRunner().invoke(cli, args, env=stage.env | env, catch_exceptions=False)


def rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def live(stage: Stage) -> dict[bytes, bytes]:
    """Return the changelog's live records of both partitions."""
    last: dict[tuple[int, bytes], Any] = {}
    for record in consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog"):
        last[record.partition, record.key] = record.value
    return {key: value for (_, key), value in last.items() if value is not None}


def entries(stage: Stage) -> list[str]:
    others = (MARKER_KEY, FORGOTTEN_PREFIX)
    return sorted(changelog.decode(v).trace_id for k, v in live(stage).items() if not k.startswith(others))


def nearest(stage: Stage, number: int) -> str | None:
    outputs = stage.outputs()
    found = [json.loads(record.value) for kind in ("accepted", "rejected") for record in outputs[kind]]
    (near,) = [it["scoring"]["nearest"] for it in found if it["id"] == f"kp:trace:{number}"]
    return None if near is None else str(near["id"])


def test_an_agent_and_a_trace_are_forgotten_in_every_partition(kafka: EmbeddedKafka, hashing: Hashing) -> None:
    stage = stage_of(kafka)
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
    written = [changelog.decode(value) for key, value in live(stage).items() if not key.startswith(others)]
    assert {it.trace_id: it.sequence for it in written}["kp:trace:8"] == 4


def test_without_the_setting_or_with_another_key_it_is_a_dead_letter(kafka: EmbeddedKafka, hashing: Hashing) -> None:
    stage = stage_of(kafka)
    worker = hashing(stage.env).wait_ready()
    stage.produce([(None, trace(n, "ada"), (), 0) for n in range(3)])
    stage.wait_committed(3)
    assert forget(stage, "--trace", "kp:trace:2", "--wait").exit_code == 0
    other = forget(stage, "--agent", "ada", "--wait", KP_FORGET_KEY="another key, it has as many bytes")
    assert other.exit_code == 1
    assert {it["reason"] for it in rows(other)} == {"bad_control"}
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
    assert sum(key.startswith(FORGOTTEN_PREFIX) for key in live(stage)) == 2


def test_wrong_usage_is_told(kafka: EmbeddedKafka) -> None:
    stage = stage_of(kafka)
    for options in ((), ("--agent", "a", "--trace", "b"), ("--trace", "")):
        assert forget(stage, *options).exit_code == 2
    assert forget(stage, "--trace", "a", KP_FORGET_KEY="too short").exit_code == 2
    unanswered = forget(stage, "--trace", "a", "--wait")
    assert unanswered.exit_code == 2  # no worker ever created the topic of receipts
    assert stage.env["KP_FORGOTTEN_TOPIC"] in unanswered.stderr
