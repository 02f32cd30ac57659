"""The trace model: the verdicts of the reference, traps between JSON parsers, time, splice, messages, mutations."""

import contextlib
import dataclasses
import itertools
import json
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.builders import read_jsonl, trace_document
from tests.support.mutated_traces import documents, read_seeds, run
from tests.support.schemas import VALIDATORS
from worker.core.trace import (
    CONTEXT,
    LEGACY_CONTEXT,
    MAX_MESSAGE,
    InvalidTrace,
    Limits,
    Reason,
    created_at_ms,
    excerpt,
    in_json_words,
    parse_trace,
    splice,
)

GOOD = trace_document(
    created_at="2026-04-14T08:00:03.589Z",
    confidence=0.5,
    steps=[{"type": "thought", "content": "Think"}, "tool_call:search"],
)


def text_with(path: str, value: str) -> str:
    """Return the good document with the JSON text `value` at `path`."""
    document: Any = json.loads(json.dumps(GOOD))
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    target = document
    for part in parents:
        target = target[part]
    target[last] = "@@value@@"
    return json.dumps(document).replace('"@@value@@"', value)


STRICT = Limits(strict_context=True)
"""The reference schema's own verdicts: it does not know the former @context."""


def refusal(raw: Any, limits: Limits | None = None) -> InvalidTrace:
    with pytest.raises(InvalidTrace) as caught:
        parse_trace(raw, limits or STRICT)
    return caught.value


def has_lone_surrogate(raw: str) -> bool:
    try:
        json.dumps(json.loads(raw), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def test_same_verdict_as_the_reference() -> None:
    for case in read_jsonl("validation_cases.jsonl"):
        print(case)
        if case["json"] and has_lone_surrogate(case["raw"]):
            assert case["edge"]
            assert refusal(case["raw"]).reason is Reason.NOT_JSON
        elif case["valid"]:
            parse_trace(case["raw"], STRICT)
        elif case["json"]:
            assert refusal(case["raw"]).path == ".".join(map(str, case["path"]))
        else:
            assert refusal(case["raw"]).reason in (Reason.NOT_JSON, Reason.EMPTY_VALUE)


@pytest.mark.parametrize("kind", [str, bytes, bytearray, memoryview])
def test_accepts_any_spelling_of_bytes(kind: type) -> None:
    text = json.dumps(GOOD)
    assert parse_trace(text if kind is str else kind(text.encode())).id == "kp:trace:1"


def test_gives_names_python_likes() -> None:
    trace = parse_trace(json.dumps(GOOD))
    assert (trace.metadata.created_at, trace.metadata.success) == ("2026-04-14T08:00:03.589Z", True)
    steps = [(step.content, step.tool and step.tool.name) for step in trace.steps]
    assert steps == [("Think", None), ("", "search")]


ACCEPTED: dict[str, tuple[str, ...]] = {
    "steps.0.step_id": (
        "1.0", "1e0", "0e5", "-0", "-0.0", "1e300", "18446744073709551616", "1" + "0" * 300, "1.00000000000000000001",
        "1e-400",
    ),
    "metadata.quality_score": ("1.00000000000000000001", "-1e-400"),
    "outcome.confidence": ("1e0",),
    "steps.0.latency_ms": ("1e308",),
    "steps.0.content": (r'"\u0000"', r'"\ud83d\ude00\/"', '"\x7f\u2028"'),
    "steps.1.tool": ('{"name":""}',),
    "steps.0.input": ('{"":null,"__proto__":1}',),
    "extra": ("1e400", "1" + "0" * 4000, '{"a":[null,{"__proto__":{}}]}'),
    "__proto__": ('{"task":null}',),
    "metadata.task_domain": ('"__proto__"',),
    "metadata.created_at": (
        '"2026-04-14T08:00Z"', '"2024-02-29T00:00:00Z"', '"2000-02-29T00:00:00.1234567890123Z"',
        '"0001-01-01T00:00:00Z"',
    ),
    "id": ('"kp:trace:"',),
    "knowledge_graph_delta": ('{"entities":[],"relationships":[]}',),
}  # fmt: skip


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in ACCEPTED.items() for value in values])
def test_accepts(path: str, value: str) -> None:
    parse_trace(text_with(path, value))


REFUSED: dict[Reason, dict[str, tuple[str, ...]]] = {
    Reason.INVALID_TYPE: {
        "steps.0.step_id": ("true", '"1"'),
        "steps.0.input": ("[]",),
        **dict.fromkeys(("steps.0.output_summary", "source_skill", "metadata.agent_id", "metadata.success"), ("1",)),
        **dict.fromkeys(
            ("steps.0.latency_ms", "steps.0.tool", "steps.0.content", "steps.1.tool.name", "steps.1.tool.mcp_server",
             "task.input_schema", "metadata.framework"), ("null",),
        ),
    },
    Reason.INVALID_VALUE: {
        "steps.0.step_id": ("1.5", "5e-324", "-1", "1e400", "1" + "0" * 400),
        "steps.0.latency_ms": ("1e400", "-1"),
        "steps.0.type": ('"Thought"', '"Expected `str`, got `null`"'),
        "steps": ("[]",),
        "metadata.quality_score": ("1.0000000000000002", "-5e-324"),
        "metadata.task_domain": ('""',),
        "metadata.created_at": (
            '"2023-02-29T00:00:00Z"', '"1900-02-29T00:00:00Z"', '"0000-01-01T00:00:00Z"', '"2026-04-31T00:00:00Z"',
            '"2026-04-14T08:00:60Z"', '"2026-04-14T08:00:03Z\\n"', '"2026-04-14T08:00:03+00:00"',
            '"2026-04-14T08:00:0\u0663Z"',
        ),
        "outcome.confidence": ("1e400",),
        "id": ('"KP:TRACE:1"',),
    },
    Reason.WRONG_TYPE: {"@type": ('"ExpertSOP"', "null")},
    Reason.WRONG_CONTEXT: {"@context": (f'"{CONTEXT}/"', f'"{LEGACY_CONTEXT}"', '{"a":1}')},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "reason", "value"),
    [(path, reason, value) for reason, by in REFUSED.items() for path, values in by.items() for value in values],
)
def test_refuses(path: str, reason: Reason, value: str) -> None:
    error = refusal(text_with(path, value))
    assert (error.reason, error.path) == (reason, path)


NO_JSON = r"""
    01 -01 1. .5 +1 - 1e 1e+ 0x1 NaN Infinity -Infinity undefined nul 'a' "a "\x" "\u12" [1,] [,1] {"a":1,}
    {a:1} {"a"} "\ud800" "\udc00" "\ude00\ud83d" "\ud83d\u0041" {"\ud800":1}
"""


@pytest.mark.parametrize("value", [*NO_JSON.split(), '"\x01"', '"\t"', '"\n"', "1 2", "\v1", "\xa01", "\x00"])
@pytest.mark.parametrize("path", ["extra", "steps.0.extra", "steps.0.content"])
def test_refuses_what_is_no_json_also_in_fields_it_does_not_read(path: str, value: str) -> None:
    assert refusal(text_with(path, value)).reason is Reason.NOT_JSON


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80"],
    ids=["ff", "surrogate", "overlong", "f5"],
)
@pytest.mark.parametrize("place", [b'"extra":"@"', b'"extra@":1', b'"id":"@"'])
def test_refuses_bytes_that_are_no_utf8(place: bytes, raw: bytes) -> None:
    document = b"{" + place.replace(b"@", raw) + b"," + json.dumps(GOOD).encode()[1:]
    assert refusal(document).reason is Reason.NOT_UTF8


def test_an_earlier_duplicate_key_is_not_looked_at() -> None:
    text = json.dumps(GOOD)
    assert parse_trace('{"id":17,"metadata":null,' + text[1:]).id == "kp:trace:1"
    assert refusal(text[:-1] + ',"\\u0069d":17}').path == "id"


def test_white_space_is_json_white_space_only() -> None:
    text = json.dumps(GOOD, indent=2)
    parse_trace(f" \t\r\n{text}\n ")
    for bad in ("\ufeff" + text, text + "\v", "\xa0" + text, text + "\0", text + text, " "):
        assert refusal(bad).reason is Reason.NOT_JSON


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        *((raw, Reason.EMPTY_VALUE) for raw in (None, b"", "", bytearray())),
        ('{"a":"\ud800"}', Reason.NOT_UTF8),  # UTF-8 cannot carry it
        (text_with("extra", "1" * 5000), Reason.INVALID_VALUE),
        ("[" * 64 + "]" * 64, Reason.INVALID_TYPE),
        ("[" * 65 + "]" * 65, Reason.TOO_DEEP),
        ('"' + "[" * 100 + '"', Reason.INVALID_TYPE),
    ],
)
def test_refuses_a_whole_document(raw: Any, reason: Reason) -> None:
    error = refusal(raw)
    assert (error.reason, error.path) == (reason, "")


@pytest.mark.parametrize(
    "field", ["@context", "metadata.created_at", "task", "steps.1.tool.name", "outcome.confidence"]
)
def test_missing_field(field: str) -> None:
    document: Any = json.loads(json.dumps(GOOD))
    *parents, last = field.split(".")
    target = document
    for part in parents:
        target = target[int(part) if part.isdecimal() else part]
    del target[last]
    error = refusal(json.dumps(document))
    assert (error.reason, error.path) == (Reason.MISSING_FIELD, field)
    assert str(error) == f"{field}: required, but missing; add it"


def test_the_first_problem_is_the_first_of_the_schema_not_of_the_document() -> None:
    document = {key: GOOD[key] for key in ("outcome", "steps", "metadata")}
    document = {"knowledge_graph_delta": 1, "id": 1, "@type": "", **document, "@context": CONTEXT}
    assert refusal(json.dumps(document)).path == "@type"
    document["@type"] = "ReasoningTrace"
    assert refusal(json.dumps(document)).path == "id"
    document["id"] = "kp:trace:1"
    assert refusal(json.dumps(document)).path == "task"


def test_context_of_the_former_schema_is_accepted_by_default() -> None:
    parse_trace(text_with("@context", f'"{LEGACY_CONTEXT}"'))
    assert refusal(text_with("@context", '"https://schema.org"'), Limits()).reason is Reason.WRONG_CONTEXT


def test_limits_hold_at_their_borders() -> None:
    text = json.dumps(GOOD)
    parse_trace(text, Limits(max_bytes=len(text), max_steps=2, max_depth=4))
    assert refusal(text, Limits(max_bytes=len(text) - 1)).reason is Reason.TOO_LARGE
    assert refusal(text, Limits(max_depth=3)).reason is Reason.TOO_DEEP
    error = refusal(text, Limits(max_steps=1))
    assert (error.reason, error.path) == (Reason.TOO_MANY_STEPS, "steps")


BIG = 1_048_576
BOMBS: dict[str, Callable[[], bytes]] = {
    "open lists": lambda: b"[" * BIG,
    "open objects": lambda: b'{"a":' * (BIG // 5),
    "closed lists": lambda: b"[" * (BIG // 2) + b"]" * (BIG // 2),
    "wide and deep": lambda: b"[" + b",".join([b"[" * 63 + b"]" * 63] * (BIG // 127 - 1)) + b"]",
    "empty lists": lambda: b"[" + b"[]," * (BIG // 3 - 1) + b"1]",
    "digits": lambda: b"1" * BIG,
    "fraction": lambda: b"0." + b"1" * (BIG - 2),
    "escapes": lambda: b'"' + rb"\u00e9" * (BIG // 6 - 1) + b'"',
    "time": lambda: text_with("metadata.created_at", f'"2026-04-14T08:00:03.{"1" * (BIG - 2000)}"').encode(),
    "context": lambda: text_with("@context", "[" + "1.5," * (BIG // 5) + "1]").encode(),
    "bad last step": lambda: text_with("steps", "[" + '{"step_id":0,"type":"thought"},' * 9999 + "null]").encode(),
}


def seconds(read: Callable[[bytes], object], raw: bytes, tries: int = 3) -> float:
    """Return the least CPU time of so many runs: a shared machine may double the time of one."""
    took = []
    for _ in range(tries):
        start = time.thread_time()
        with contextlib.suppress(InvalidTrace):
            read(raw)
        took.append(time.thread_time() - start)
    return min(took)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_no_document_within_the_limits_takes_long(name: str) -> None:
    raw, flat = BOMBS[name](), b"[" + b"[]," * (BIG // 3 - 1) + b"0]"
    assert len(raw) <= BIG
    limit = 25 * seconds(json.loads, flat)  # 2 s at the speed of two quiet cores
    messages: list[str] = []
    assert any(seconds(lambda it: messages.append(refusal(it).message), raw, tries=1) < limit for _ in range(3))
    assert len(messages[0]) <= MAX_MESSAGE


LONG_LISTS = {
    "metadata.validated_by": ('""', "1"),
    "knowledge_graph_delta.entities": ('{"name":"","type":""}', '{"name":""}'),
    "knowledge_graph_delta.relationships": ('{"fact":"","valid_from":""}', '{"fact":"","valid_from":null}'),
    "steps": ('{"step_id":0,"type":"thought"}', '{"step_id":0,"type":"x - at `$[0].type`"}'),
}


def test_the_last_of_many_items_is_found_in_the_time_of_a_few_readings() -> None:
    """340,000 strings and one integer held the event loop for as long as 25 readings of the document."""
    bad, good = (
        text_with("metadata.validated_by", "[" + '"",' * 340_000 + f"{last}]").encode() for last in ("1", '""')
    )
    assert seconds(parse_trace, bad) < 10 * seconds(parse_trace, good)


@pytest.mark.parametrize("path", LONG_LISTS)
def test_the_first_of_several_bad_items_is_named(path: str, seed: int) -> None:
    rng = random.Random(seed)
    good, bad = LONG_LISTS[path]
    for _ in range(50):
        items = [bad if rng.random() < 0.05 else good for _ in range(rng.randrange(1, 60))]
        delta = '{"entities":[],"relationships":[]}'
        text = text_with("knowledge_graph_delta", delta)
        name = path.rsplit(".", maxsplit=1)[-1]
        listed = f"[{','.join(items)}]"
        raw = text.replace(f'"{name}":[]', f'"{name}":{listed}') if "delta" in path else text_with(path, listed)
        if bad in items:
            assert refusal(raw).path.startswith(f"{path}.{items.index(bad)}")
        else:
            parse_trace(raw)


def test_depth_counts_lists_and_objects_alike(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        deep = rng.randrange(55, 70)  # of the field, which is one level down
        value: Any = []
        for _ in range(deep - 1):
            beside = rng.choice([0, "[{" * 40, [], {}])
            value = rng.choice([[value], [beside, value], {"a": value}, {"b": beside, "a": value}])
        raw = text_with("extra", json.dumps(value))
        if deep + 1 > Limits().max_depth:
            assert refusal(raw).reason is Reason.TOO_DEEP
        else:
            parse_trace(raw)


def test_messages_are_short_and_fit_for_a_header() -> None:
    for path, value in (
        ("id", '"' + "é\\u0000\\n" * 9000 + '"'),
        ("@context", json.dumps({"a" * 5000: ["b" * 5000] * 50})),
        ("steps.0.type", '"' + "x" * 9000 + '"'),
        ("outcome.confidence", "1" + "0" * 4000),
    ):
        error = refusal(text_with(path, value))
        assert len(error.message) <= MAX_MESSAGE
        assert error.message.startswith(f"{path}: ")
        assert error.message.isprintable()
    assert InvalidTrace(Reason.NOT_JSON, "", "\ud800").message == "?"


def test_the_error_survives_pickling() -> None:
    error = refusal(text_with("id", "1"))
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.path) == (error.reason, "id")
    assert str(again) == "id: a number is not allowed; start it with kp:trace:"


@pytest.mark.parametrize(
    ("created_at", "expected"),
    [
        # By Date.parse of Node 20.
        ("2026-01-01T00:00:00.9999Z", 1767225600999),
        ("1969-12-31T23:59:59.9999Z", -1),
        ("1970-01-01T00:00:00Z", 0),
        ("2026-01-01T10:15Z", 1767262500000),
        ("2026-01-01T10:15:30.1Z", 1767262530100),
        ("0001-01-01T00:00:00.0009Z", -62135596800000),
        ("1600-02-29T00:00:00.123456789012345678Z", -11670998399877),
        ("9999-12-31T23:59:59.999Z", 253402300799999),
    ],
)
def test_event_time(created_at: str, expected: int) -> None:
    assert created_at_ms(parse_trace(text_with("metadata.created_at", f'"{created_at}"'))) == expected


def test_splice_keeps_every_byte_of_other_values() -> None:
    head = b'"@context":"%s","@type":"Reasoning\\u0054race","id":"kp:trace:\\u00e9\\/"' % CONTEXT.encode()
    rest = (
        b'"created_at":"2026-04-14T08:00:03Z","task_domain":"\xe4\xbb\xbb","success":true,"visibility":"org",'
        b'"privacy_level":"private","c":[ 1 ,2 ]},"task":{ "objective" : "a" },'
        b'"steps":[{"step_id":1.0 ,"type":"thought"}],"outcome":{"confidence":1e-1,"result_summary":""},'
        b'"big":12345678901234567890123'
    )
    raw = (
        b' {"z":1.50e+1, ' + head + b' ,"scoring":{"old":1},"metadata" : {"b":1E400,"quality_score":0.25,'
        b'"quality_score":1,' + rest + b',"z":-0} \n'
    )
    assert splice(raw, 0.1 + 0.2, b'{"score":0.3}') == (
        b'{"z":-0,'
        + head
        + b',"metadata":{"b":1E400,"quality_score":0.30000000000000004,'
        + rest
        + b',"scoring":{"score":0.3}}'
    )
    parse_trace(raw)


def test_spliced_traces_are_valid_again() -> None:
    for document in read_jsonl("traces.jsonl"):
        raw = json.dumps(document, ensure_ascii=False).encode()
        output = splice(raw, 0.7804, b'{"score":0.7804}')
        assert parse_trace(output).metadata.quality_score == 0.7804
        document["metadata"]["quality_score"] = 0.7804
        assert json.loads(output) == {**document, "scoring": {"score": 0.7804}}


def test_results_cannot_be_changed() -> None:
    trace = parse_trace(json.dumps(GOOD))
    with pytest.raises(AttributeError):
        trace.id = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().max_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize("parsed", [{}, {"id": "kp:trace:1"}, [], 7, Path("trace.json")])
def test_what_is_no_json_text_is_a_mistake_of_the_caller(parsed: Any) -> None:
    with pytest.raises(TypeError, match=r"parse_trace takes the JSON of a trace, .* needs json\.dumps\(\) first"):
        parse_trace(parsed)


# -- what is wrong, in JSON's words


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("steps.0.content", "null", "null is not allowed; give a string, or leave the field out"),
        ("task.objective", "null", "null is not allowed; give at least one character"),
        ("outcome.result_summary", "null", "null is not allowed; give a string"),
        ("steps.0.content", "1.5", "a number is not allowed; give a string"),
        ("steps.0.type", "3", "a number is not allowed; use one of thought, tool_call, observation, error_recovery"),
        ("steps.0.step_id", '"1"', "a string is not allowed; give an integer of at least 0"),
        ("steps.0.tool", "[]", "an array is not allowed; give an object"),
        ("steps", "{}", "an object is not allowed; give at least one step"),
        ("metadata.success", '"yes"', "a string is not allowed; give true or false"),
        ("metadata.quality_score", "true", "a boolean is not allowed; give a number from 0 to 1"),
        ("metadata.task_domain", '""', '"" is not allowed; give at least one character'),
        ("@type", "null", "null is not allowed; give ReasoningTrace; other knowledge units belong on other topics"),
        ("@context", '{"a": [true, null]}', '{"a": [...]} is not allowed; give'),
    ],
)
def test_a_message_names_the_field_and_what_is_allowed(path: str, value: str, message: str) -> None:
    assert str(refusal(text_with(path, value))).startswith(f"{path}: {message}")
    assert str(refusal(b"[1]")) == "document: an array is not allowed; give an object"


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


# -- mutated documents, and an independent judge


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
def test_any_bytes_are_parsed_or_refused(seed: int, long: bool) -> None:
    verdicts = run(100_000 if long else 5_000, seed)
    # A generator that only makes rubbish would prove little.
    assert verdicts["valid"] > 250
    assert {"not_json", "not_utf8", "missing_field", "invalid_type", "invalid_value", "too_deep"} <= set(verdicts)


def test_verdict_agrees_with_an_independent_judge(seed: int) -> None:
    judge = VALIDATORS["reasoning-trace"]
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
