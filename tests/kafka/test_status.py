"""The status page of a worker on real Kafka."""

import asyncio
from pathlib import Path

import msgspec

from tests.support.snippets import shell
from tests.support.stage import LINES, Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.observe.status import KEPT_TRACES, PAGE

HTML = PAGE.read_text("utf-8")


def test_a_worker_shows_what_it_committed_where_it_is_asked_to(
    kafka: EmbeddedKafka, workers: Workers, tmp_path: Path
) -> None:
    shy = workers(Stage(kafka).env)
    stage = Stage(kafka, KP_STATUS_PAGE="true")
    worker = workers(stage.env).wait_ready()
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES[:100])] + [(None, b"<b>", (), 0)])
    stage.wait_committed(101)
    asyncio.run(asyncio.sleep(1.5))  # gauges are a second old
    assert worker.get("/") == (200, HTML)
    shown = msgspec.json.decode(worker.get("/status.json")[1])
    assert (shown["problem"], shown["group"], shown["embedder"]) == (None, stage.name, "none")
    assert shown["verdicts"]["accepted"] == worker.metric("kp_traces_total", decision="accepted") > 0
    assert shown["verdicts"]["rejected"] == worker.metric("kp_traces_total", decision="rejected") > 0
    assert shown["verdicts"]["reasons"] == {"not_json": 1}
    assert shown["evaluation"]["count"] == 101
    assert [row["partition"] for row in shown["partitions"]] == [0, 1, 2, 3]
    assert sum(row["committed"] for row in shown["partitions"]) == 101
    assert [row["lag"] for row in shown["partitions"]] == [0, 0, 0, 0]
    assert len({(row["partition"], row["offset"]) for row in shown["traces"]}) == KEPT_TRACES
    bare = {name: value for name, value in stage.env.items() if not name.startswith("KP_")}
    explained = shell(f"{shown['explain']} {shown['traces'][0]['id']} --json", bare, tmp_path)
    assert explained.returncode == 0, explained.stderr
    assert msgspec.json.decode(explained.stdout)["id"] == shown["traces"][0]["id"]
    shy.wait_ready()
    assert shy.get("/")[0] == shy.get("/status.json")[0] == 404
