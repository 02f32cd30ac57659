"""A short fuzz run, and one against an independent judge: Python's json with the JSON Schema."""

import itertools
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.runs.fuzz import documents, read_seeds, run
from tests.support.surroundings import SCHEMAS
from worker.core.trace import InvalidTrace, Reason, parse_trace

SCHEMA = SCHEMAS / "reasoning-trace.schema.json"

# What no JSON Schema can judge.
OUTSIDE_THE_SCHEMA = {Reason.TOO_DEEP, Reason.TOO_LARGE, Reason.TOO_MANY_STEPS}


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def without_surrogates(value: Any) -> Any:
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def read_strictly(raw: bytes) -> Any:
    """Return the value of a JSON text; raises ValueError for what is not JSON or has a lone surrogate.

    Also in a member that a later one of its name replaces.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(without_surrogates(pairs))

    document = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=members)
    return without_surrogates(document)


@pytest.mark.slow
def test_any_bytes_are_parsed_or_refused(seed: int) -> None:
    verdicts = run(5_000, seed)  # `make fuzz`: a million
    # A generator that only makes rubbish would prove little.
    assert verdicts["valid"] > 250
    assert {"not_json", "not_utf8", "missing_field", "invalid_type", "invalid_value", "too_deep"} <= set(verdicts)


def test_verdict_agrees_with_an_independent_judge(seed: int) -> None:
    judge = Draft202012Validator(json.loads(SCHEMA.read_text("utf-8")))
    for raw in itertools.islice(documents(seed, read_seeds()), 800):
        try:
            parse_trace(raw)
            verdict = True
        except InvalidTrace as error:
            if error.reason in OUTSIDE_THE_SCHEMA:
                continue
            verdict = False
        try:
            expected = judge.is_valid(read_strictly(raw))
        except ValueError:
            expected = False
        assert verdict == expected, f"seed {seed}: {raw!r}"
