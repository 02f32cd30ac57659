"""What is posted for an accepted record, what is kept back, when two units are the same, and what is written."""

import copy
import json
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.builders import T0, make_record
from tests.support.contribute import GATE, accepted_document, unit_of
from tests.support.made_secrets import made as made_secret
from tests.support.registry import as_javascript
from tests.support.secrets import LEAKS, PLACES, SECRETS, leaks, seeded
from worker.contribute.unit import (
    MAX_VALUES,
    Gate,
    Refusal,
    Skip,
    Unit,
    clean_issues,
    known_fields,
    receipt,
    refused_record,
    same_unit,
    unit_from,
)
from worker.core.dead_letters import read_dead_letter
from worker.core.records import OutputRecord, SourceRecord
from worker.core.trace import CONTEXT, LEGACY_CONTEXT, Limits
from worker.redact.documents import Rules
from worker.redact.markers import own_pattern

OPEN = Gate(frozenset({"network", "org", "private"}), frozenset({"aggregated", "federated", "private"}))


def made(document: dict[str, Any] | bytes | None, gate: Gate = GATE) -> Unit | Skip | Refusal:
    return unit_from(json.dumps(document).encode() if isinstance(document, dict) else document, gate, Limits())


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
    posted = unit_of(document)
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
    again = unit_of(sent)
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
    sent = json.loads(unit_of(document, OPEN).body)
    assert sent["task"]["objective"] == "mail bob@example.com, password=[REDACTED:password]"
    document["metadata"]["privacy_level"] = "federated"
    redacted = unit_of(document, OPEN)
    assert json.loads(redacted.body)["task"]["objective"] == "mail [REDACTED:email], password=[REDACTED:password]"
    assert dict(redacted.redactions) == {"email": 1, "password": 1}


@pytest.mark.parametrize("secret", ["sk-abcdefghijklmnopqrstuvwx", "kp_0123456789abcdef0123", "bob@example.com"])
def test_an_id_with_a_secret_is_refused_and_not_quoted(secret: str) -> None:
    refusal = made(accepted_document(f"kp:trace:{secret}"))
    assert (refusal.reason, refusal.path) == ("secret_in_id", "id")
    assert secret not in repr(refusal)


@pytest.mark.parametrize("text", ["x", "\u00e9", "\U0001f600", "\u4e2d"])
def test_an_id_that_is_too_long_for_a_registry_is_refused_before_it_is_asked(text: str) -> None:
    room = (2048 - len("kp:trace:")) // len(text.encode())
    assert unit_of(accepted_document("kp:trace:" + text * room)).trace_id.endswith(text)
    refusal = made(accepted_document("kp:trace:" + text * (room + 1)))
    assert (refusal.reason, refusal.path, refusal.status) == ("id_too_long", "id", None)
    assert len(refusal.message) < 200


def test_a_unit_that_grows_beyond_the_message_limit_is_refused_before_it_is_sent() -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][0]["content"] = "a@b.cc," * 70_000
    assert len(json.dumps(document)) < 500_000
    refusal = made(document)
    assert (refusal.reason, refusal.status) == ("too_large", None)
    assert "KP_MAX_MESSAGE_BYTES=1048576" in refusal.message
    assert isinstance(unit_from(json.dumps(document).encode(), GATE, Limits(max_bytes=2_000_000)), Unit)


def test_digits_in_an_id_are_no_telephone() -> None:
    unit_of(accepted_document("kp:trace:a0123456-7890-4abc-8def-012345678901"))


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b'{"id": "password=hunter2"}'])
def test_what_is_no_trace_is_refused_without_quoting_it(value: bytes | None) -> None:
    refusal = made(value)
    assert refusal.reason == "invalid_trace"
    assert "hunter2" not in repr(refusal)


def test_the_same_content_is_the_same_unit_however_it_is_written() -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][0]["input"] = {
        "large": 9007199254740993, "zero": -0.0, "one": 1, "flag": True, "none": None, "__proto__": {"x": 1},
    }  # fmt: skip
    ours = unit_of(document)
    assert b"__proto__" not in ours.body
    theirs = as_javascript(json.loads(ours.body, object_pairs_hook=lambda pairs: dict(reversed(pairs))))
    assert same_unit(ours.document, theirs)
    theirs["metadata"]["validated_by"] = ["kp:validator:x"]
    theirs["unknown"] = 1
    assert same_unit(ours.document, theirs)
    huge = msgspec.json.decode(ours.body)
    huge["steps"][0]["input"] = {"x": 1e400}
    assert same_unit(huge, json.loads(json.dumps(huge).replace("Infinity", "null")))


def slow_same(ours: Any, theirs: Any) -> bool:
    """Compare copies, as JavaScript reads them, without what does not count."""

    def counted(document: Any) -> str:
        fields = known_fields(document)
        if isinstance(fields, dict) and isinstance(fields.get("metadata"), dict):
            fields["metadata"] = {name: part for name, part in fields["metadata"].items() if name != "validated_by"}
        return json.dumps(as_javascript(fields), sort_keys=True)

    return counted(ours) == counted(theirs)


PARTS: list[Any] = [
    None, True, 0, 1, 1.0, -0.0, "1", "", float("inf"), 10**400, 2**53, 2**53 + 1, [], {}, [1], {"a": 1},
    {"__proto__": 1}, {"a": {"__proto__": 2}}, {"validated_by": 1}, [{"x": 1}],
]  # fmt: skip


@pytest.mark.slow
def test_units_are_compared_as_by_a_slow_reading(seed: int, long: bool) -> None:
    rng = random.Random(seed)

    def changed(times: int) -> dict[str, Any]:
        document = accepted_document("kp:trace:1")
        document["steps"][0]["input"] = {"a": 1, "__proto__": 2, "b": {"__proto__": 1, "c": [1, 2]}}
        for _ in range(times):
            place: Any = document
            while True:
                name = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
                if not place[name] or not isinstance(place[name], dict | list) or rng.random() < 0.2:
                    break
                place = place[name]
            if isinstance(place, dict):
                name = rng.choice([name, name, "extra", "__proto__", "validated_by", "a"])
            place[name] = copy.deepcopy(rng.choice(PARTS))
        return document

    verdicts = []
    for _ in range(20_000 if long else 3000):
        ours, theirs = changed(rng.randrange(2)), changed(rng.randrange(3))
        verdicts.append(same_unit(ours, theirs))
        assert verdicts[-1] == slow_same(ours, theirs), (ours, theirs)
    assert 0.1 < sum(verdicts) / len(verdicts) < 0.9


@pytest.mark.parametrize("theirs", [None, [], "x", {}, {"metadata": None}])
def test_what_is_no_unit_is_another_one(theirs: Any) -> None:
    assert not same_unit(unit_of(accepted_document("kp:trace:1")).document, theirs)


def test_a_unit_that_nests_without_end_is_another_one() -> None:
    theirs: Any = {}
    inner = theirs.setdefault("steps", [{}])[0]
    for _ in range(100_000):
        inner["input"] = {}
        inner = inner["input"]
    assert not same_unit(unit_of(accepted_document("kp:trace:1")).document, theirs)


HIDDEN_TEXT = "pay \u202e001"


@pytest.mark.parametrize(
    ("text", "screen", "found"),
    [
        (HIDDEN_TEXT, True, "direction-override"),
        ("pass\u200bword", True, None),  # marked only: a pasted text may have one
        (HIDDEN_TEXT, False, None),
    ],
)
def test_a_unit_with_hidden_text_is_refused(text: str, screen: bool, found: str | None) -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][1]["input"] = {"query": {text: [1]}}
    work = made(document, replace(GATE, screen=screen))
    if found is None:
        assert isinstance(work, Unit)
        return
    assert (work.reason, work.path, work.status) == ("screened", "steps.1.input", None)
    assert work.message.startswith(f"the screen finds {found}; ")
    assert work.message.isascii()


def test_what_does_not_leave_is_not_screened() -> None:
    """Members that the schema does not have, the worker's own marks among them, and what is redacted."""
    document = accepted_document("kp:trace:1", note=HIDDEN_TEXT)
    document["scoring"]["screen"] = {"rules": ["direction-override"], "text": HIDDEN_TEXT}
    document["steps"][0]["content"] = "password=\U000e0041\U000e0042"
    assert unit_of(document, replace(GATE, screen=True)).redactions == {"password": 1}


@pytest.mark.slow
def test_a_large_answer_is_compared_without_a_copy() -> None:
    ours = unit_of(accepted_document("kp:trace:1")).document
    theirs = {**ours, "steps": [{"input": {"a": [None] * (MAX_VALUES + 1)}}]}
    tracemalloc.start()
    assert not same_unit(ours, theirs)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000


def redacted_by(rules: str, document: dict[str, Any]) -> Unit:
    return unit_of(document, replace(GATE, rules=Rules(rules)))


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
        redriven = redacted_by("strict", json.loads(strict.body))
        assert strict.body == redriven.body != reference.body
        for ours, theirs in ((strict, reference), (reference, strict), (redriven, reference), (strict, redriven)):
            assert same_unit(ours.document, json.loads(theirs.body), ours.rules), f"seed {seed}"
        other = json.loads(reference.body)
        other["outcome"]["result_summary"] = "other"
        assert not same_unit(strict.document, other, strict.rules)


def test_what_was_posted_before_a_pattern_was_added_is_the_same_unit() -> None:
    document = accepted_document("kp:trace:1")
    document["task"]["objective"] = "for customer KD-12345678"
    before = unit_of(document)
    after = unit_of(document, replace(GATE, rules=Rules("strict", (own_pattern("kd", "KD-[0-9]+"),))))
    assert b"[REDACTED:kd]" in after.body
    assert same_unit(after.document, json.loads(before.body), after.rules)


def test_the_default_is_strict() -> None:
    document = accepted_document("kp:trace:1")
    document["task"]["objective"] = "DB_PASSWORD=hunter2x"
    assert b"hunter2x" not in unit_of(document).body
    assert b"hunter2x" in redacted_by("reference", document).body


SECRET = "DB_PASSWORD=Tr0ub4dor"


def fail(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Make a function of the module fail."""

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(f"worker.contribute.unit.{name}", failing)


@pytest.mark.parametrize(
    "name", ["parse_trace", "redact_document", "redact_text", "screen_json", "known_fields", "decode_json"]
)
def test_a_trace_on_which_a_function_fails_is_refused_and_nothing_of_it_leaves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = accepted_document("kp:trace:1")
    document["steps"][0]["content"] = SECRET
    value = json.dumps(document).encode()
    fail(monkeypatch, name, IndexError(SECRET))
    refusal = made(value, replace(GATE, screen=True))
    assert refusal.reason == "evaluation_failed"
    assert "IndexError (test_unit.py:" in refusal.message
    source = SourceRecord("accepted", 0, 7, 1, b"key " + SECRET.encode(), value, [("a", SECRET.encode())])
    refused = refused_record(source, refusal)
    assert SECRET not in repr(refused)
    if name in ("redact_document", "redact_text"):
        assert refused.value == b""
        assert dict(refused.headers)["kp-error-truncated"] == b"0 of %d bytes kept" % len(value)


@pytest.mark.parametrize("error", [MemoryError(), ImportError("re2"), OSError(28, "full")], ids=repr)
def test_a_failure_of_the_machine_refuses_no_trace(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "redact_document", error)
    with pytest.raises(type(error)):
        made(accepted_document("kp:trace:1"))


def test_units_that_cannot_be_compared_are_different_and_issues_that_cannot_be_redacted_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = accepted_document("kp:trace:1")
    ours = unit_of(document)
    theirs = document | {"outcome": {"result_summary": "other", "confidence": 0.5}}
    fail(monkeypatch, "redact_document", IndexError(SECRET))
    assert not same_unit(ours.document, theirs, ours.rules)
    assert SECRET not in clean_issues([SECRET])


# -- receipts and refused records, byte by byte; no secret in what is posted or written

FEDERATED = Gate(frozenset({"network"}), frozenset({"aggregated", "federated"}))
REFUSED = Refusal("invalid_unit", "the registry refuses the unit (400)", "", 400, '[{"path":"x"}]')


def encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def test_a_receipt_says_what_was_posted_and_where_it_came_from() -> None:
    posted = unit_of(accepted_document("kp:trace:1"))
    record = make_record(b"", 7, topic="accepted", partition=3)
    written = receipt(record, posted, 201, "2026-04-14T08:00:00.000Z")
    assert (written.key, written.timestamp_ms, written.headers) == (b"kp:trace:1", None, [])
    value = json.loads(written.value or b"")
    assert value.pop("worker_version")
    assert value == {
        "id": "kp:trace:1", "status": 201, "registry_time": "2026-04-14T08:00:00.000Z", "sha256": posted.sha256,
        "source": {"topic": "accepted", "partition": 3, "offset": 7},
    }  # fmt: skip


def test_redrive_reads_a_refused_record_as_a_dead_letter() -> None:
    document = accepted_document("kp:trace:1")
    record = make_record(encoded(document), 7, topic="accepted", partition=3, headers=[("kp-redrive-count", b"2")])
    written = refused_record(record, REFUSED)
    read = SourceRecord("refused", 0, 0, T0, written.key, written.value, written.headers)
    letter = read_dead_letter(read)
    assert (letter.reason, letter.source, letter.timestamp_ms) == ("invalid_unit", "accepted/3/7", T0)
    assert (letter.redriven, letter.original_headers(), letter.key) == (2, [], record.key)
    assert json.loads(letter.record.value) == document
    headers = dict(written.headers)
    assert (headers["kp-error-status"], headers["kp-error-issues"]) == (b"400", b'[{"path":"x"}]')


def test_a_redriven_refused_record_is_the_same_unit() -> None:
    document = seeded(1, "input", " ".join(SECRETS.values()))
    written = refused_record(make_record(encoded(document)), REFUSED)
    assert unit_of(json.loads(written.value or b"")).body == unit_of(document).body


def shown(written: OutputRecord) -> str:
    return f"{written.key!r} {(written.value or b'').decode('utf-8', 'replace')} {written.headers!r}"


def buried(rng: random.Random, text: str) -> Any:
    """Return a value that holds the text somewhere inside."""
    value: Any = {f"a name {text}": 1} if rng.random() < 0.3 else text
    for _ in range(rng.randrange(8)):
        value = rng.choice([[value], {"a": value}, [1, value, None], {"b": [value], "c": True}])
    return value


@pytest.mark.slow
def test_no_secret_is_posted_or_written_wherever_it_is(seed: int, long: bool) -> None:
    rng = random.Random(seed)
    kinds = list(SECRETS.values())
    for number in range(5000 if long else 1000):
        secret = kinds[number % len(kinds)]
        document = seeded(number, PLACES[number // len(kinds) % len(PLACES)], secret)
        document["metadata"]["privacy_level"] = rng.choice(["aggregated", "federated"])
        text = rng.choice([secret, f"a {secret} b", f"({secret})", f"x: {secret}\ny"])
        document["steps"][0]["input"] = {"buried": buried(rng, text)}
        assert leaks(json.dumps(document))
        posted = unit_of(document, FEDERATED)
        assert not leaks(posted.body.decode())
        record = make_record(encoded(document), key=secret.encode(), headers=[("note", text.encode()), (text, b"")])
        assert not leaks(shown(refused_record(record, REFUSED)))
        assert not leaks(shown(receipt(record, posted, 201, "")))
        hidden = {**document, "id": f"kp:trace:{secret}"}
        refusal = made(encoded(hidden), FEDERATED)
        if isinstance(refusal, Refusal):
            assert refusal.reason == "secret_in_id"
            assert not leaks(repr(refusal) + shown(refused_record(make_record(encoded(hidden)), refusal)))
        else:
            assert secret in (SECRETS["US telephone"], SECRETS["telephone"])  # an id may have such digits
    assert leaks(" ".join(kinds)) == list(LEAKS)


def test_what_is_no_document_is_redacted_as_text() -> None:
    every = " ".join(SECRETS.values())
    for value in (every.encode(), b"\xff" + every.encode(), encoded({"id": [every]}), encoded({every: every}), b"[1]"):
        refusal = made(value)
        assert not leaks(
            repr(refusal) + shown(refused_record(make_record(value, key=b"\xfe" + every.encode()), refusal))
        )
    assert refused_record(make_record(None, key=None), REFUSED).value is None
