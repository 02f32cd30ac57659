"""The demo: its sample data, what it shows for given documents, and a whole run of it."""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka.partitioner import DefaultPartitioner

from worker import InvalidTrace, PartitionScorer, parse_trace
from worker.commands.shared.options import SAMPLES
from worker.commands.shared.scored_rows import TailRecord
from worker.core.documents import scored_record
from worker.core.records import SourceRecord
from worker.core.scorer import event_time_ms
from worker.lab.demo import show as demo_view
from worker.lab.demo.show import PARTITIONS, DemoOutcome, _environment, samples
from worker.observe.metrics import quantile

LINES = SAMPLES.read_bytes().splitlines()
DOCUMENTS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
FIRST, RETOLD, LATE = demo_view.STORY


def scored(similarity: dict[str, tuple[str, float]] | None = None, *, embedder: bool = True) -> list[dict[str, Any]]:
    """Return the samples as the worker publishes them; `similarity`: id -> (nearest id, similarity), set by hand."""
    scorer = PartitionScorer(dimensions=1)
    result = []
    for offset, line in enumerate(LINES):
        record = SourceRecord("traces", 0, offset, None, None, line)
        trace = parse_trace(line)
        value = scored_record(record, scorer.score(trace, None, event_time_ms(trace, None)), None).value
        document = json.loads(value or b"")
        scoring = document["scoring"]
        if embedder:
            scoring["embedder"] = {"name": "by hand"}
        for beginning, (nearest, near) in (similarity or {}).items():
            if document["id"].startswith(beginning):
                scoring["nearest"] = {"id": nearest, "similarity": near}
                delta = (0.5 - near) * scoring["weights"]["novelty"]
                scoring["components"]["novelty"] = 1 - near
                scoring["score"] += delta
                scoring["decision"] = "accepted" if scoring["score"] >= scoring["threshold"] else "rejected"
        result.append(document)
    return result


def full_id(beginning: str) -> str:
    return next(str(document["id"]) for document in DOCUMENTS if document["id"].startswith(beginning))


def test_samples_are_valid_varied_and_in_order() -> None:
    traces = [parse_trace(line) for line in LINES]
    assert 60 <= len(traces) <= 90
    domains = Counter(trace.metadata.task_domain for trace in traces)
    assert set(domains) == {"code", "finance", "medical", "customer_service", "legal", "research", "agriculture"}
    assert min(domains.values()) >= 8
    text = b"\n".join(LINES).decode()
    assert all(re.search(letters, text) for letters in ("[\u4e00-\u9fff]", "[ñáéó]", "[äöüß]"))
    assert len({len(trace.steps) for trace in traces}) >= 8
    assert any(len(trace.steps) == 1 for trace in traces)
    assert len({step.tool.name for trace in traces for step in trace.steps if step.tool}) >= 40

    seen: dict[str, bytes] = {}
    for line, trace in zip(LINES, traces, strict=True):
        assert seen.setdefault(trace.id, line) == line, "a trace that is sent again is the same to the last byte"
    assert len(traces) - len(seen) == 2
    times = list(dict.fromkeys(trace.metadata.created_at for trace in traces))
    assert times == sorted(times)


def test_the_story_spans_the_ttl_in_one_partition() -> None:
    incident = [document["metadata"] for document in DOCUMENTS if document["id"].startswith(demo_view.STORY)]
    minutes = [int(when["created_at"][11:13]) * 60 + int(when["created_at"][14:16]) for when in incident]
    assert len(incident) == 3
    assert minutes[1] - minutes[0] < 60 < minutes[2] - minutes[1]
    assert len({partition_of(metadata["agent_id"]) for metadata in incident}) == 1
    assert {partition_of(document["metadata"]["agent_id"]) for document in DOCUMENTS} == {0, 1}


def partition_of(agent: str) -> int:
    partitions = list(range(PARTITIONS))
    return int(DefaultPartitioner()(agent.encode(), partitions, partitions))


def test_broken_samples_are_broken_in_different_ways() -> None:
    values = [value for _, value in samples()]
    broken = [value for value in values if value not in LINES]
    assert [value for value in values if value in LINES] == LINES
    reasons = []
    for value in broken:
        with pytest.raises(InvalidTrace) as refused:
            parse_trace(value)
        reasons.append(str(refused.value.reason))
    assert sorted(reasons) == [
        "empty_value", "invalid_value", "missing_field", "not_json", "not_json", "not_utf8", "wrong_context",
    ]  # fmt: skip


def test_story() -> None:
    documents = scored({RETOLD: (full_id(FIRST), 0.9861), LATE: (DOCUMENTS[0]["id"], 0.31)})
    first, second, third = str(demo_view.story(documents)).splitlines()
    assert first.endswith("accepted  the cache is still empty")
    assert second.endswith("rejected  seen before: similarity 0.99")
    assert third.endswith("accepted  the others have expired: new again")
    assert demo_view.story(documents[:5]) is None
    assert str(demo_view.story(scored(embedder=False))).count("novelty is neutral") == 3


def test_imbalance_names_what_is_missing_and_what_came_twice() -> None:
    documents = [TailRecord(None, document, None) for document in scored()]  # type: ignore[arg-type]
    outcome = DemoOutcome([(0, offset) for offset in range(len(documents))], documents)
    assert outcome.imbalance() is None
    outcome.records = [*documents[1:], documents[2]]
    problem = outcome.imbalance()
    assert problem.startswith(f"the counts do not add up: published {len(documents)}, but accepted ")
    assert problem.endswith("missing (partition, offset): [(0, 0)], too many: [(0, 2)]")


def test_quantile() -> None:
    assert math.isnan(quantile({}, 0.5))
    assert math.isnan(quantile({0.1: 0.0, math.inf: 0.0}, 0.5))
    buckets = {0.01: 10.0, 0.1: 30.0, math.inf: 40.0}
    assert math.isclose(quantile(buckets, 0.25), 0.01)
    assert math.isclose(quantile(buckets, 0.5), 0.055)
    assert quantile(buckets, 0.99) == 0.1


def test_a_process_of_the_demo_runs_this_package() -> None:
    """Not one of the user's own that is named worker: `python -P -m worker` takes the first on its path."""
    assert (Path(_environment({})["PYTHONPATH"].split(os.pathsep)[0]) / "worker" / "__main__.py").is_file()
