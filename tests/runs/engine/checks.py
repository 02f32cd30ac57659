"""What the checks of images and Compose share: their printed form, and the comparison with the reference's scores."""

from __future__ import annotations

import json
from typing import Final

from tests.support.builders import read_jsonl
from tests.support.chaos import LINES
from tests.support.kafka_fixtures import consume_all, produce

TRACES: Final = 60
"""As many of the reference's traces are scored: through one key, and so in one partition, as the reference did."""


class Checks:
    """Prints each check as it is made and counts those that failed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, what: str, found: object, expected: object) -> None:
        good = found == expected
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}: {found}" + ("" if good else f", expected {expected}"), flush=True)


def publish_reference(bootstrap: str, topic: str) -> int:
    """Publish the reference's traces and a record that is not a trace; return how many records that is."""
    values = [*LINES[:TRACES], b"no JSON"]
    produce(bootstrap, topic, [(b"reference", value) for value in values])
    return len(values)


def check_outputs(check: Checks, bootstrap: str) -> None:
    """Compare the topics with the reference implementation's scores."""
    records = [record for name in ("accepted", "rejected") for record in consume_all(bootstrap, f"traces.{name}")]
    scored = {document["id"]: document["scoring"] for document in (json.loads(record.value) for record in records)}
    expected = {line["id"]: line["score"] for line in read_jsonl("traces_scores.jsonl")[:TRACES]}
    check("traces scored", sorted(scored) == sorted(expected) and len(records), TRACES)
    worst = max((abs(scored[it]["score"] - expected[it]) for it in scored.keys() & expected.keys()), default=1.0)
    check("scores differ from the reference by at most 1e-6", worst <= 1e-6, True)
    print(f"greatest difference {worst:.1e}, embedder {[it.get('embedder') for it in scored.values()][:1]}")
    check("dead letters", len(consume_all(bootstrap, "traces.dead-letter")), 1)
