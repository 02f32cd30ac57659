"""Scored documents, as the worker writes them or made up, their report, and `kp-worker report` in this process."""

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner, Result

from tests.support.builders import T0, make_record, random_trace_bytes, rfc3339, text_vector, trace_document
from worker import PartitionScorer
from worker.cli import cli
from worker.commands.report.numbers import Traces
from worker.commands.report.outcomes import Asked
from worker.config import Settings
from worker.core.scorer import Evaluation, EvaluationConfig
from worker.core.scoring import FORMULAS, PROFILES, Profile, ScoredTrace, Weights
from worker.core.trace import DEFAULT_LIMITS, embedding_text, parse_trace

COMPONENTS = tuple(FORMULAS)
DIMENSIONS = 8
WEIGHTS = {"finance": (0.2, 0.25, 0.1, 0.45), "default": (0.25, 0.35, 0.15, 0.25)}


# -- as the worker writes them


def scored(
    sources: Iterable[bytes], profiles: Mapping[str, Profile] = PROFILES, threshold: float = 0.75, *, embed: bool = True
) -> list[tuple[ScoredTrace, bytes]]:
    """Score traces in the order given, as one partition; return each verdict and its output document."""
    scorer = PartitionScorer(20, 60_000, DIMENSIONS, threshold, profiles)
    evaluation = Evaluation(scorer, None, EvaluationConfig(DEFAULT_LIMITS))
    result = []
    for offset, source in enumerate(sources):
        record = make_record(source, offset)
        trace = parse_trace(source)
        vector = text_vector(embedding_text(trace), DIMENSIONS) if embed else None
        _, verdict, output, *_ = evaluation.decide(record, trace, vector)
        assert isinstance(verdict, ScoredTrace)
        assert output.value is not None
        result.append((verdict, output.value))
    return result


def outputs(
    sources: Iterable[bytes], profiles: Mapping[str, Profile] = PROFILES, threshold: float = 0.75, *, embed: bool = True
) -> list[bytes]:
    return [document for _, document in scored(sources, profiles, threshold, embed=embed)]


def random_sources(rng: random.Random, count: int) -> list[bytes]:
    return [random_trace_bytes(rng, number, T0 + 1000 * number) for number in range(count)]


def random_profiles(rng: random.Random) -> dict[str, Profile]:
    """Return profiles of some domains that random traces have, and of some that they have not."""
    names = rng.sample(["default", "finance", "code", "medical", "gardening", "legal"], rng.randint(0, 6))
    return dict(PROFILES) | {name: Profile(_random_weights(rng), rng.choice([None, rng.random()])) for name in names}


def random_share(rng: random.Random) -> Fraction:
    return rng.choice([Fraction(1, 10), Fraction(1), Fraction(1, 1000), Fraction(rng.randint(1, 999), 1000)])


def _random_weights(rng: random.Random) -> Weights:
    cuts = sorted(rng.random() for _ in range(3))
    return Weights(cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], 1.0 - cuts[2])


def changed(document: bytes, path: str, value: Any) -> bytes:
    """Return a document with another value at a dotted path; the value None takes the field away."""
    decoded = json.loads(document)
    *parents, last = path.split(".")
    place = decoded
    for name in parents:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(decoded).encode()


# -- made up: their figures do not follow from their steps


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
    **fields: Any,
) -> dict[str, Any]:
    document = trace_document(fields.pop("trace_id", f"kp:trace:{number}"), domain=domain, **fields)
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
                components=tuple(rng.random() for _ in COMPONENTS),
                nearest=None if earlier is None else (rng.choice([earlier, "kp:trace:gone"]), rng.random()),
                time_ms=T0 + 1000 * (number // 3),
                partition=number % 2,
            )
        )
        if rng.random() < 0.7:
            rules = rng.sample(["bidi-controls", "tag-characters"], rng.randrange(3))
            documents[-1]["scoring"]["screen"] = {"rules": rules}
    return documents


def dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


# -- their report


def taken(
    documents: Iterable[bytes | dict[str, Any]], asked: Asked | None = None, *, rescore: bool = False, **settings: Any
) -> Traces:
    """Return traces that are scored again if there are settings."""
    traces = Traces(Settings(**settings), rescore=rescore or bool(settings), asked=asked)
    for number, document in enumerate(documents, 1):
        traces.add(document if isinstance(document, bytes) else dump(document), f"line {number}")
    return traces


def report_of(
    documents: Iterable[bytes | dict[str, Any]], share: Fraction | None = None, asked: Asked | None = None,
    **settings: Any,
) -> SimpleNamespace:  # fmt: skip
    return taken(documents, asked, rescore=share is not None, **settings).report("x.jsonl", share=share)


def as_settings(profiles: Mapping[str, Profile], threshold: float) -> dict[str, Any]:
    """Return the settings that give these profiles and this threshold."""
    weights = {name: {part: getattr(it.weights, part) for part in COMPONENTS} for name, it in profiles.items()}
    chosen = {
        name: {"weights": weights[name]} | ({} if it.threshold is None else {"threshold": it.threshold})
        for name, it in profiles.items()
    }
    return {"threshold": threshold, "profiles": chosen}


def rendered(report: SimpleNamespace) -> str:
    from worker.commands.report.view import render  # with jinja2

    return render(report)


def parsed(page: str) -> ET.Element:
    """Return the page as XML: stricter than any browser on tags, nesting and escapes."""
    assert page.lstrip().startswith("<!DOCTYPE html>")
    return ET.fromstring(page[page.index("<html") :])


def words(page: str) -> str:
    return " ".join(" ".join(parsed(page).itertext()).split())


def run(*arguments: str, data: bytes | None = None, **env: str) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments], input=data, env=env)
