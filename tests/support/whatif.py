"""Documents as the worker writes them, with any profiles, and `kp-worker whatif` on them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from click.testing import CliRunner, Result

from tests.support.builders import T0, make_record, random_trace_bytes, text_vector
from worker import PartitionScorer
from worker.cli import cli
from worker.commands.analysis.whatif_numbers import RescoredTraces
from worker.core.scorer import Evaluation, EvaluationConfig
from worker.core.scoring import PROFILES, Profile, ScoredTrace, Weights
from worker.core.trace import DEFAULT_LIMITS, embedding_text

DIMENSIONS = 8


def scored(
    sources: Iterable[bytes], profiles: Mapping[str, Profile] = PROFILES, threshold: float = 0.75, *, embed: bool = True
) -> list[tuple[ScoredTrace, bytes]]:
    """Score traces in the order given, as one partition; return each verdict and its output document."""
    scorer = PartitionScorer(20, 60_000, DIMENSIONS, threshold, profiles)
    evaluation = Evaluation(scorer, None, EvaluationConfig(DEFAULT_LIMITS))
    result = []
    for offset, source in enumerate(sources):
        record = make_record(source, offset)
        trace = evaluation.read(record)
        vector = text_vector(embedding_text(trace), DIMENSIONS) if embed else None
        verdict, output = evaluation.evaluate(record, trace, vector)
        assert output.value is not None
        result.append((verdict, output.value))
    return result


def random_sources(rng: random.Random, count: int) -> list[bytes]:
    return [random_trace_bytes(rng, number, T0 + 1000 * number) for number in range(count)]


def random_profiles(rng: random.Random) -> dict[str, Profile]:
    """Return profiles of some domains that random traces have, and of some that they have not."""
    names = rng.sample(["default", "finance", "code", "medical", "gardening", "legal"], rng.randint(0, 6))
    return dict(PROFILES) | {name: Profile(_random_weights(rng), rng.choice([None, rng.random()])) for name in names}


def _random_weights(rng: random.Random) -> Weights:
    cuts = sorted(rng.random() for _ in range(3))
    return Weights(cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], 1.0 - cuts[2])


def rescored(
    documents: Iterable[bytes], profiles: Mapping[str, Profile] = PROFILES, threshold: float = 0.75
) -> RescoredTraces:
    traces = RescoredTraces(profiles, threshold)
    for number, document in enumerate(documents, 1):
        traces.add(document, f"line {number}")
    return traces


def whatif(*arguments: str, data: bytes | None = None, **env: str) -> Result:
    return CliRunner().invoke(cli, ["whatif", *arguments], input=data, env={**env})


def changed(document: bytes, path: str, value: Any) -> bytes:
    """Return a document with another value at a dotted path; the value None takes the field away."""
    import msgspec

    decoded = msgspec.json.decode(document)
    *parents, last = path.split(".")
    place = decoded
    for name in parents:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return msgspec.json.encode(decoded)
