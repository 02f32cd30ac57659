"""The JSON Schemas agree with the code on every parity document, and the examples with the schemas."""

import json
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from tests.support.builders import read_lines
from tests.support.schemas import ALL, NAMES, VALIDATORS, load
from tests.support.surroundings import ROOT, SCHEMAS
from worker.core import scoring
from worker.core.documents import ReadScoring, Scoring, ScoringSource, ScoringVerdict
from worker.core.trace import CREATED_AT_PATTERN, MAX_MESSAGE, InvalidTrace, Limits, Reason, parse_trace, splice


def code_accepts(raw: str) -> bool:
    try:
        parse_trace(raw)
    except InvalidTrace:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_schemas_that_say_what_they_are_and_their_examples_are_valid(name: str) -> None:
    schema = ALL[name]
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:kp-worker:schema:{name}:1"
    assert schema["title"]
    assert schema["description"]
    VALIDATORS[name].validate(load(f"examples/{name}.json"))


def test_examples_pass_the_code() -> None:
    for name in ("reasoning-trace", "minimal-trace", "scored-trace"):
        parse_trace(json.dumps(load(f"examples/{name}.json")))
    VALIDATORS["reasoning-trace"].validate(load("examples/minimal-trace.json"))
    example = (SCHEMAS / "examples/minimal-trace.json").read_text("utf-8")
    assert f"```json\n{example}```" in (ROOT / "README.md").read_text("utf-8"), "the README shows it"


def test_the_scored_example_is_the_trace_s_true_score() -> None:
    trace, scored = load("examples/reasoning-trace.json"), load("examples/scored-trace.json")
    score = scoring.score_trace(parse_trace(json.dumps(trace)), scored["scoring"]["components"]["novelty"])
    assert scored["scoring"]["score"] == score.score
    assert scored["scoring"]["profile"] == score.profile
    output = splice(json.dumps(trace).encode(), score.score, json.dumps(scored["scoring"]).encode())
    assert json.loads(output) == scored


@pytest.mark.parametrize(
    "case",
    [case for case in map(json.loads, read_lines("validation_cases.jsonl")) if case["json"]],
    ids=lambda case: f"{case['case']}-{case['kind'][:40]}",
)
def test_schema_and_code_agree_on_validation_cases(case: dict[str, Any]) -> None:
    document = json.loads(case["raw"])
    verdict = VALIDATORS["reasoning-trace"].is_valid(document)
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # A lone surrogate: the schema judges values, the code the text that carries them.
        assert not code_accepts(case["raw"])
    else:
        assert verdict == code_accepts(case["raw"])


def test_schema_and_code_agree_on_valid_traces() -> None:
    lines = read_lines("traces.jsonl")[::10]
    lines += [json.dumps(json.loads(line)["trace"]) for line in read_lines("scoring_cases.jsonl")]
    for line in lines:
        VALIDATORS["reasoning-trace"].validate(json.loads(line))
        assert code_accepts(line)


def test_the_closed_lists_are_the_code_s() -> None:
    headers = ALL["dead-letter-headers"]["properties"]
    assert headers["kp-error-reason"]["enum"] == [reason.value for reason in Reason]
    assert headers["kp-error-message"]["maxLength"] == MAX_MESSAGE
    metadata = ALL["reasoning-trace"]["$defs"]["metadata"]["properties"]
    assert metadata["created_at"]["pattern"] == CREATED_AT_PATTERN
    overrides = ALL["scored-trace"]["properties"]["scoring"]["properties"]["overrides"]["items"]["enum"]
    assert set(overrides) == {getattr(scoring, name) for name in dir(scoring) if name.startswith("OVERRIDE_")}


def test_the_description_names_the_default_limits() -> None:
    limits = Limits()
    assert limits.max_bytes == 2**20
    text = ALL["reasoning-trace"]["description"]
    assert f"1 MiB, {limits.max_steps} steps and {limits.max_depth} levels" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("score", 1.1),
        ("decision", "maybe"),
        ("overrides", ["single_thought", "single_thought"]),
        ("overrides", ["other"]),
        ("nearest", {"id": "kp:trace:1"}),
        ("stream_time", "2026-04-14T08:00:03Z"),
        ("stream_time", "2026-04-14T08:00:03.589Z\n"),
        ("embedder", {"name": "x"}),
        ("source", {"topic": "traces", "partition": -1, "offset": 0}),
        ("components", {"complexity": 1}),
        ("weights", None),
    ],
)
def test_the_scored_schema_refuses(name: str, value: object) -> None:
    document = load("examples/scored-trace.json")
    document["scoring"][name] = value
    assert not VALIDATORS["scored-trace"].is_valid(document)


def test_the_scored_schema_includes_the_trace_s_and_takes_nulls() -> None:
    document = load("examples/scored-trace.json")
    document["scoring"] |= {"nearest": None, "embedder": None}
    VALIDATORS["scored-trace"].validate(document)
    del document["task"]
    assert not VALIDATORS["scored-trace"].is_valid(document)


@pytest.mark.parametrize(
    "wrong",
    [{"kp-error-reason": "other"}, {"kp-source-offset": "-1"}, {"kp-source-partition": "01"}, {"kp-error-message": ""}],
)
def test_the_headers_schema_refuses(wrong: dict[str, str]) -> None:
    assert not VALIDATORS["dead-letter-headers"].is_valid(load("examples/dead-letter-headers.json") | wrong)


def test_the_schema_of_the_scoring_object_has_the_fields_of_the_struct() -> None:
    schema = ALL["scored-trace"]["properties"]["scoring"]
    fields = msgspec.structs.fields(Scoring)
    assert set(schema["properties"]) == {field.name for field in fields}
    assert set(schema["required"]) == {field.name for field in fields if field.required}
    for part in (ReadScoring, ScoringSource, ScoringVerdict):
        assert {field.name for field in msgspec.structs.fields(part)} <= set(schema["properties"])
