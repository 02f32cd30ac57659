"""Random scored documents, their summary, and `kp-worker report` in this process."""

import json
import random
import xml.etree.ElementTree as ET
from typing import Any

from click.testing import CliRunner, Result

from tests.support.builders import T0, rfc3339, trace_document
from worker.cli import cli
from worker.commands.analysis.report_numbers import COMPONENTS, Summary, Traces, summarize

WEIGHTS = {"finance": (0.2, 0.25, 0.1, 0.45), "default": (0.25, 0.35, 0.15, 0.25)}


def scored_document(
    number: int = 0,
    *,
    domain: str = "finance",
    score: float = 0.5,
    threshold: float = 0.75,
    components: tuple[float, ...] = (0.5, 0.5, 0.5, 0.5),
    overrides: tuple[str, ...] = (),
    nearest: tuple[str, float] | None = None,
    time_ms: int = T0,
    partition: int = 0,
    latencies: tuple[float, ...] = (0,),
    **fields: Any,
) -> dict[str, Any]:
    steps = [{"type": "thought", "latency_ms": latency} for latency in latencies]
    document = trace_document(fields.pop("trace_id", f"kp:trace:{number}"), domain=domain, steps=steps, **fields)
    profile = domain if domain in WEIGHTS else "default"
    document["scoring"] = {
        "score": score,
        "decision": "accepted" if score >= threshold else "rejected",
        "threshold": threshold,
        "profile": profile,
        "weights": dict(zip(COMPONENTS, WEIGHTS[profile], strict=True)),
        "components": dict(zip(COMPONENTS, components, strict=True)),
        "overrides": list(overrides),
        "nearest": None if nearest is None else {"id": nearest[0], "similarity": nearest[1]},
        "stream_time": rfc3339(time_ms),
        "embedder": None,
        "source": {"topic": "traces", "partition": partition, "offset": number},
        "worker_version": "0.1.0",
    }
    return document


def dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def render(summary: Summary, source: str) -> str:
    """Render the page. The import loads matplotlib, for seconds: not in every process that only collects tests."""
    from worker.commands.analysis.page import render_report

    return render_report(summary, source)


def summary_of(documents: list[dict[str, Any]], **options: Any) -> Summary:
    traces = Traces()
    for number, document in enumerate(documents):
        traces.add(dump(document), f"line {number + 1}")
    assert not traces.unreadable.count
    return summarize(traces, **options)


def random_documents(rng: random.Random, count: int) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = []
    for number in range(count):
        earlier = rng.choice(documents)["id"] if documents and rng.random() < 0.9 else None
        documents.append(
            scored_document(
                number,
                # Now and then an id comes again, or a neighbour is not among the documents.
                trace_id=f"kp:trace:{rng.choice([number, number, number, max(0, number - 3)])}",
                domain=rng.choice(["finance", "finance", "law", "art"]),
                score=rng.choice([rng.random(), 0.75, 0.6]),
                threshold=0.75,
                components=tuple(rng.random() for _ in COMPONENTS),
                overrides=tuple(rng.sample(["single_thought", "error_recovery_bonus"], rng.randrange(3))),
                nearest=None if earlier is None else (rng.choice([earlier, "kp:trace:gone"]), rng.random()),
                time_ms=T0 + 1000 * (number // 3),
                partition=number % 2,
                latencies=tuple(float(rng.randrange(3)) for _ in range(rng.randint(1, 5))),
            )
        )
        if rng.random() < 0.7:
            rules = rng.sample(["invisible-in-word", "tag-characters"], rng.randrange(3))
            documents[-1]["scoring"]["screen"] = {"rules": rules}
    return documents


def parsed(page: str) -> ET.Element:
    """Return the page as XML: stricter than any browser on tags, nesting and escapes."""
    assert page.lstrip().startswith("<!DOCTYPE html>")
    return ET.fromstring(page[page.index("<html") :])


def words(page: str) -> str:
    return " ".join(" ".join(parsed(page).itertext()).split())


def run(*arguments: str, data: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments], input=data)
