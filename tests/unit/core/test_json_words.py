"""What is wrong with a JSON value, in JSON's words."""

import json
from typing import Any

import msgspec
import pytest

from tests.support.builders import trace_document
from worker.core.trace import InvalidTrace, excerpt, in_json_words, parse_trace


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("steps.0.content", None, "null is not allowed; give a string, or leave the field out"),
        ("task.objective", None, "null is not allowed; give at least one character"),
        ("outcome.result_summary", None, "null is not allowed; give a string"),
        ("steps.0.content", 1.5, "a number is not allowed; give a string"),
        ("steps.0.type", 3, "a number is not allowed; use one of thought, tool_call, observation, error_recovery"),
        ("steps.0.step_id", "1", "a string is not allowed; give an integer of at least 0"),
        ("steps.0.tool", [], "an array is not allowed; give an object"),
        ("steps", {}, "an object is not allowed; give at least one step"),
        ("metadata.success", "yes", "a string is not allowed; give true or false"),
        ("metadata.quality_score", True, "a boolean is not allowed; give a number from 0 to 1"),
        ("metadata.task_domain", "", '"" is not allowed; give at least one character'),
        ("@type", None, "null is not allowed; give ReasoningTrace; other knowledge units belong on other topics"),
        ("@context", {"a": [True, None]}, "{\"a\": [...]} is not allowed; give"),
    ],
)  # fmt: skip
def test_a_field_is_told_in_the_words_of_json(path: str, value: Any, message: str) -> None:
    document: Any = trace_document()
    inner = document
    *parents, name = path.split(".")
    for part in parents:
        inner = inner[int(part) if part.isdigit() else part]
    inner[name] = value
    with pytest.raises(InvalidTrace) as error:
        parse_trace(json.dumps(document))
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_document_of_another_type_too() -> None:
    with pytest.raises(InvalidTrace, match=r"^document: an array is not allowed; give an object$"):
        parse_trace(b"[1]")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"), (False, "false"), (1e300, "1e+300"), (float("inf"), "a number beyond 1.8e308"),
        ('a"é\n\u202e', '"a\\"é\\n\\u202e"'), (["a", None], '["a", null]'), ({"b": {"c": 1}}, '{"b": {...}}'),
    ],
)  # fmt: skip
def test_values_are_spelt_as_json_spells_them(value: Any, shown: str) -> None:
    assert excerpt(value) == shown


def test_a_long_string_loses_its_middle() -> None:
    assert excerpt("x" * 60) == '"' + "x" * 60 + '"'
    assert excerpt("x" * 9000) == '"' + "x" * 28 + "..." + "x" * 28 + '"'


class Inner(msgspec.Struct):
    score: float
    kind: str | None = None


class Outer(msgspec.Struct):
    inner: Inner


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ('{"inner": {"score": null}}', "inner.score: null is not allowed; give a number"),
        ('{"inner": {"score": 1, "kind": 1}}', "inner.kind: a number is not allowed; give a string or null"),
        ('{"inner": {}}', "inner: the field `score` is missing; add it"),
        ("[]", "an array is not allowed; give an object"),
    ],
)
def test_messages_of_msgspec(document: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(document, type=Outer)
    assert in_json_words(str(error.value)) == words
