"""The capacity in docs/models.md: `python -m tests.runs.model_elsewhere`.

Traces a second of one worker over 64 partitions, with a stand-in that answers 32 texts in 5 ms; each comes out once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from tests.support.chaos import quiet_clients
from tests.support.embedding_service import MODEL
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce
from tests.support.stage import LINES, OUTPUTS, Stage
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.ports import free_ports

PARTITIONS = 64
TRACES = 30_000
MILLISECONDS = "5"


def carry() -> None:
    quiet_clients()
    port = free_ports(1)[0]
    service = subprocess.Popen([sys.executable, "-m", "tests.support.embedding_service", str(port), MILLISECONDS])
    try:
        with EmbeddedKafka() as kafka:
            for embedder, requests in (("http", 1), ("http", 4), ("http", 16), ("none", 4)):
                _carry(kafka, service.pid, f"http://127.0.0.1:{port}", embedder, requests)
    finally:
        service.kill()


def _carry(kafka: EmbeddedKafka, service: int, url: str, embedder: str, requests: int) -> None:
    stage = Stage(
        kafka, KP_EMBEDDER=embedder, KP_EMBEDDER_URL=url, KP_MODEL=MODEL, KP_EMBED_IN_FLIGHT=str(requests),
        KP_SESSION_TIMEOUT_SECONDS="15",
    )  # fmt: skip
    create_topics(kafka.bootstrap_servers, {stage.name: PARTITIONS})
    produce(kafka.bootstrap_servers, stage.name, _records())
    brokers = [int(pid) for pid in subprocess.run(["pgrep", "-P", str(os.getpid()), "java"], capture_output=True, check=False).stdout.split()]  # fmt: skip  # noqa: E501
    with WorkerProcess(stage.env) as worker:
        worker.wait_ready()
        seen: list[tuple[float, ...]] = []
        while not seen or seen[-1][1] < TRACES:
            done = worker.metric("kp_records_consumed_total")
            seen.append((time.monotonic(), done, _cpu(worker.pid), _cpu(service), sum(map(_cpu, brokers))))
            time.sleep(0.25)
        first, *_, last = [it for it in seen if 0.1 * TRACES <= it[1] <= 0.9 * TRACES]
        seconds, traces, *cores = (after - before for before, after in zip(first, last, strict=True))
        print(
            f"{embedder}, {requests} requests at once: {traces / seconds:.0f} traces/s; cores of worker, service, "
            f"broker: {', '.join(f'{it / seconds:.2f}' for it in cores)}; evaluation "
            f"{1000 * _mean(worker, 'kp_evaluation_duration_seconds'):.0f} ms, texts a request "
            f"{worker.metric('kp_embedder_texts_total') / max(1, worker.metric('kp_embedder_requests_total')):.0f}"
        )
        worker.terminate()
        assert worker.wait() == 0
    ids = [
        json.loads(it.value)["id"] for kind in OUTPUTS for it in consume_all(stage.bootstrap, f"{stage.name}.{kind}")
    ]
    assert len(ids) == len(set(ids)) == TRACES, (len(ids), len(set(ids)))


def _records() -> Iterator[tuple[Any, ...]]:
    samples = [json.loads(line) for line in LINES]
    for number in range(TRACES):
        document = samples[number % len(samples)]
        task = {**document["task"], "objective": f"{number} {document['task']['objective']}"}
        trace = {**document, "id": f"kp:trace:{uuid.UUID(int=number)}", "task": task}
        yield None, json.dumps(trace).encode(), (), number % PARTITIONS


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _mean(worker: WorkerProcess, name: str) -> float:
    return worker.metric(f"{name}_sum") / worker.metric(f"{name}_count")


if __name__ == "__main__":
    carry()
