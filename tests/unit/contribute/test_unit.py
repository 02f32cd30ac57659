"""What is posted for an accepted record, what is kept back, and when two units are the same."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from tests.support.contribute import accepted_document
from tests.support.made_secrets import made as made_secret
from worker.contribute.unit import Gate, Refusal, Skip, Unit, same_unit, unit_from
from worker.core.redaction import Rules
from worker.core.redaction_patterns import own_pattern
from worker.core.trace import CONTEXT, LEGACY_CONTEXT, Limits

GATE = Gate(frozenset({"network"}), frozenset({"aggregated"}))
OPEN = Gate(frozenset({"network", "org", "private"}), frozenset({"aggregated", "federated", "private"}))


def made(document: dict[str, Any] | bytes | None, gate: Gate = GATE) -> Unit | Skip | Refusal:
    return unit_from(json.dumps(document).encode() if isinstance(document, dict) else document, gate, Limits())


def unit(document: dict[str, Any], gate: Gate = GATE) -> Unit:
    found = made(document, gate)
    assert isinstance(found, Unit), found
    return found


def test_the_schemas_fields_alone_are_posted_and_the_context_is_the_current_one() -> None:
    document = accepted_document("kp:trace:1", agent_id="a", framework="f", validated_by=["v"], team="x")
    document |= {"@context": LEGACY_CONTEXT, "source_skill": "s", "extra": 1}
    document["task"] |= {"input_schema": {"type": "object", "extra": 1}, "extra": 1}
    document["steps"][1]["tool"] |= {"mcp_server": "m", "extra": 1}
    document["steps"][1] |= {"input": {"any": {"thing": 1}}, "latency_ms": 5, "extra": 1}
    document["outcome"]["extra"] = 1
    document["knowledge_graph_delta"] = {
        "entities": [{"name": "n", "type": "t", "extra": 1}],
        "relationships": [{"fact": "f", "valid_from": "v", "extra": 1}],
        "extra": 1,
    }
    posted = unit(document)
    text = posted.body.decode()
    assert "extra" not in text.replace('"input_schema":{"type":"object","extra":1}', "")
    assert "team" not in text
    assert "scoring" not in text
    sent = json.loads(posted.body)
    assert sent["@context"] == CONTEXT
    assert sent["task"]["input_schema"] == {"type": "object", "extra": 1}
    assert sent["steps"][1]["input"] == {"any": {"thing": 1}}
    assert sent["knowledge_graph_delta"]["entities"] == [{"name": "n", "type": "t"}]
    assert sent["metadata"]["validated_by"] == ["v"]
    again = unit(sent)
    assert again.body == posted.body


@pytest.mark.parametrize(
    ("visibility", "privacy", "reason"),
    [("org", "aggregated", "visibility"), ("private", "private", "visibility"), ("network", "federated", "privacy"),
     ("network", "private", "privacy")],
)  # fmt: skip
def test_the_gate_keeps_back_what_it_does_not_name(visibility: str, privacy: str, reason: str) -> None:
    document = accepted_document("kp:trace:1", visibility=visibility, privacy_level=privacy)
    assert made(document) == Skip(reason)
    assert isinstance(made(document, OPEN), Unit)


def test_the_level_of_redaction_is_the_traces_own() -> None:
    document = accepted_document("kp:trace:1", privacy_level="private")
    document["task"]["objective"] = "mail bob@example.com, password=hunter2"
    sent = json.loads(unit(document, OPEN).body)
    assert sent["task"]["objective"] == "mail bob@example.com, password=[REDACTED:password]"
    document["metadata"]["privacy_level"] = "federated"
    redacted = unit(document, OPEN)
    assert json.loads(redacted.body)["task"]["objective"] == "mail [REDACTED:email], password=[REDACTED:password]"
    assert dict(redacted.redactions) == {"email": 1, "password": 1}


def test_redaction_is_stable_so_that_a_redriven_trace_is_the_same_unit() -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][0]["content"] = "Bearer abcdefghijklmnopqrstuvwxyz, token: abc, /home/bob/x, 10.1.2.3"
    document["steps"][1]["input"] = {"password": "x", "nested": [{"api_key": "y", "bob@example.com": 1}]}
    once = unit(document)
    assert unit(json.loads(once.body)).body == once.body


@pytest.mark.parametrize("secret", ["sk-abcdefghijklmnopqrstuvwx", "kp_0123456789abcdef0123", "bob@example.com"])
def test_an_id_with_a_secret_is_refused_and_not_quoted(secret: str) -> None:
    found = made(accepted_document(f"kp:trace:{secret}"))
    assert isinstance(found, Refusal)
    assert (found.reason, found.path) == ("secret_in_id", "id")
    assert secret not in repr(found)


def test_digits_in_an_id_are_no_telephone() -> None:
    unit(accepted_document("kp:trace:a0123456-7890-4abc-8def-012345678901"))


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b'{"id": "password=hunter2"}'])
def test_what_is_no_trace_is_refused_without_quoting_it(value: bytes | None) -> None:
    found = made(value)
    assert isinstance(found, Refusal)
    assert found.reason == "invalid_trace"
    assert "hunter2" not in repr(found)


def stored(document: dict[str, Any]) -> Any:
    """As JavaScript reads and writes it: all numbers are doubles."""

    def double(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        number = float(value)
        return None if number in (float("inf"), float("-inf")) else number

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: walk(item) for name, item in reversed(value.items())}
        return [walk(item) for item in value] if isinstance(value, list) else double(value)

    return walk(document)


def test_the_same_content_is_the_same_unit_however_it_is_written() -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][0]["input"] = {
        "large": 9007199254740993, "zero": -0.0, "one": 1, "flag": True, "none": None, "__proto__": {"x": 1},
    }  # fmt: skip
    ours = unit(document)
    assert b"__proto__" not in ours.body
    theirs = stored(json.loads(ours.body))
    assert same_unit(ours.document, theirs)
    theirs["metadata"]["validated_by"] = ["kp:validator:x"]
    theirs["unknown"] = 1
    assert same_unit(ours.document, theirs)
    huge = msgspec.json.decode(ours.body)
    huge["steps"][0]["input"] = {"x": 1e400}
    assert same_unit(huge, json.loads(json.dumps(huge).replace("Infinity", "null")))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("task", "objective"), "other"),
        (("metadata", "quality_score"), 0.81),
        (("metadata", "agent_id"), "another"),
        (("steps", 0, "input"), {"flag": 1}),
        (("steps", 0, "input"), {"flag": "true"}),
        (("steps", 0, "input"), {}),
        (("outcome", "confidence"), True),
    ],
)
def test_other_content_is_another_unit(path: tuple[Any, ...], value: Any) -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][0]["input"] = {"flag": True}
    document["outcome"]["confidence"] = 1
    ours = unit(document)
    theirs = json.loads(ours.body)
    *parents, name = path
    place = theirs
    for each in parents:
        place = place[each]
    place[name] = value
    assert not same_unit(ours.document, theirs)


@pytest.mark.parametrize("theirs", [None, [], "x", {}, {"metadata": None}])
def test_what_is_no_unit_is_another_one(theirs: Any) -> None:
    assert not same_unit(unit(accepted_document("kp:trace:1")).document, theirs)


def test_a_unit_that_nests_without_end_is_another_one() -> None:
    theirs: Any = {}
    inner = theirs.setdefault("steps", [{}])[0]
    for _ in range(100_000):
        inner["input"] = {}
        inner = inner["input"]
    assert not same_unit(unit(accepted_document("kp:trace:1")).document, theirs)


def redacted_by(rules: str, document: dict[str, Any]) -> Unit:
    gate = Gate(frozenset({"network"}), frozenset({"aggregated"}), Rules(rules))
    found = unit_from(json.dumps(document).encode(), gate, Limits())
    assert isinstance(found, Unit), found
    return found


def test_what_was_posted_by_other_rules_is_the_same_unit(seed: int) -> None:
    """At a replay, and after a redrive, whose record was redacted by the strict rules."""
    rng = random.Random(seed)
    for _ in range(100):
        document = accepted_document("kp:trace:1")
        document["task"]["objective"] = "\n".join(made_secret(rng).text for _ in range(3))
        document["steps"][0]["input"] = {
            "env": [{"name": "DB_PASSWORD", "value": "hunter2x"}],
            "clientSecret": "a1b2c3",
        }
        strict, reference = redacted_by("strict", document), redacted_by("reference", document)
        assert strict.body != reference.body
        redriven = redacted_by("strict", json.loads(strict.body))
        for ours, theirs in ((strict, reference), (reference, strict), (redriven, reference), (strict, redriven)):
            assert same_unit(ours.document, json.loads(theirs.body), ours.rules), f"seed {seed}"
        other = json.loads(reference.body)
        other["outcome"]["result_summary"] = "other"
        assert not same_unit(strict.document, other, strict.rules)


def test_what_was_posted_before_a_pattern_was_added_is_the_same_unit() -> None:
    document = accepted_document("kp:trace:1")
    document["task"]["objective"] = "for customer KD-12345678"
    before = unit(document)
    gate = Gate(frozenset({"network"}), frozenset({"aggregated"}), Rules("strict", (own_pattern("kd", "KD-[0-9]+"),)))
    after = unit(document, gate)
    assert b"[REDACTED:kd]" in after.body
    assert same_unit(after.document, json.loads(before.body), after.rules)


def test_the_default_is_strict() -> None:
    document = accepted_document("kp:trace:1")
    document["task"]["objective"] = "DB_PASSWORD=hunter2x"
    assert b"hunter2x" not in unit(document).body
    assert b"hunter2x" in redacted_by("reference", document).body
