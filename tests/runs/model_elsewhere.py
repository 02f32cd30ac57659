"""The figures of docs/models.md: `python -m tests.runs.model_elsewhere carry`, or one of the others.

carry: traces a second of one worker over 64 partitions, with a stand-in that answers 32 texts in 5 ms; each comes out
once. service URL MODEL: texts a second of a real service with 1, 4 and 16 requests at once, and how far its vectors are
from the recorded ones. precisions: how far vectors of all-MiniLM-L6-v2 in half precision are from those in fp32, and
from those of a text alone (needs torch).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.chaos import quiet_clients
from tests.support.embedding_service import MODEL
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce
from tests.support.stage import LINES, OUTPUTS, Stage
from worker.config import load
from worker.core.changelog import probe_distance
from worker.core.novelty import unit
from worker.core.trace import embedded_texts, parse_trace
from worker.embed.embedder import packaged_weights
from worker.embed.export_source import TEXTS, recorded_vectors
from worker.embed.http_embedder import HttpEmbedder
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.ports import free_ports

PARTITIONS = 64
TRACES = 30_000
MILLISECONDS = "5"
ASKED = 150


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


def service(url: str, model: str) -> None:
    texts = [embedded_texts(parse_trace(line), "whole")[0] for line in LINES]
    recorded = {text: it.vector for text, it in zip(TEXTS, recorded_vectors(), strict=True) if text.strip()}
    for requests in (1, 4, 16):
        embedder = HttpEmbedder(
            load(embedder="http", embedder_url=url, model=model, embed_in_flight=requests, stuck_seconds=300)
        )
        if requests == 1 and embedder.identity.dimensions == 384:
            farthest = max(probe_distance(vector, embedder.embed(text).vector) for text, vector in recorded.items())
            print(f"farthest from the recorded vectors of all-MiniLM-L6-v2: {farthest:.2g}")
        started = time.monotonic()
        futures = [embedder.submit(f"{number} {texts[number]}") for number in range(ASKED)]
        for future in futures:
            future.result()
        seconds, counts = time.monotonic() - started, embedder.counts()
        print(f"{requests} requests at once: {ASKED / seconds:.1f} texts/s, {counts['failures']:.0f} failures")
        embedder.close()


def precisions() -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(str(packaged_weights()), device="cpu")
    texts = [embedded_texts(parse_trace(line), "whole")[0] for line in LINES[:64]]
    texts += [text for text in TEXTS if text.strip()]

    def embed(batch_size: int = 32) -> Any:
        found = model.encode(texts, batch_size=batch_size, convert_to_numpy=False)
        return np.array([unit(it.float().detach().numpy(), 384) for it in found], np.float64)

    exact = embed()
    for kind in (torch.float16, torch.bfloat16):
        model = model.to(kind)
        other = embed()
        distances = np.linalg.norm(exact - other, axis=1)
        similarities = np.abs(exact @ exact.T - other @ other.T)
        batches = np.linalg.norm(other - embed(1), axis=1)
        print(
            f"{kind}: distance {statistics.median(distances):.2g} (at most {distances.max():.2g}); a text alone and "
            f"with 31 others: at most {batches.max():.2g}; similarity: at most {similarities.max():.2g} off, the "
            f"default profile's score {0.35 * similarities.max():.2g}",
            flush=True,
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["service", url, model]:
            service(url, model)
        case ["precisions"]:
            precisions()
        case _:
            carry()
