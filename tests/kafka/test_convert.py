"""`kp-worker convert | kp-worker publish -`: message logs on the topic, each run scored once, no dead letter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.commands import Desk
from tests.support.kafka_fixtures import wait_until
from tests.support.message_logs import expected_parts, message_log
from tests.support.stage import Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka

OPTIONS = (
    "--success", "@reward", "--confidence", "0.8", "--domain", "customer_service", "--visibility", "private",
    "--privacy", "private", "--created-at", "@finished", "--agent-id", "desk", "--keep", "x_run=@run",
)  # fmt: skip


def test_message_logs_are_scored_without_a_dead_letter(
    kafka: EmbeddedKafka, workers: Workers, tmp_path: Path, seed: int
) -> None:
    desk = Desk(kafka, partitions=1)
    workers(desk.settings).wait_ready()
    runs = [message_log(seed + number) for number in range(80)]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(run) + "\n" for run in runs))
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with (
        desk.start("convert", "--from", "chat", *OPTIONS, str(file), **pipes) as convert,
        desk.start("publish", "-", stdin=convert.stdout, stderr=subprocess.PIPE) as publish,
    ):
        said = publish.communicate(timeout=90)[1].decode()
        assert convert.stderr is not None
        said += convert.stderr.read().decode()
    assert (convert.returncode, publish.returncode) == (0, 0), said
    assert "80 runs read, 80 written, 0 refused" in said
    assert f"80 traces published to topic {desk.name}" in said
    assert wait_until(lambda: len([*desk.read("accepted"), *desk.read("rejected")]) >= 80)
    scored = [*desk.read("accepted"), *desk.read("rejected")]
    assert not desk.read("dead-letter")
    documents = {document["x_run"]: document for document in (json.loads(record.value) for record in scored)}
    assert all(record.key == b"desk" for record in scored)
    for run in runs:
        objective, parts = expected_parts(run)
        assert documents[run["run"]]["task"]["objective"] == objective
        assert len(documents[run["run"]]["steps"]) == len(parts)
