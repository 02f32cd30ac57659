"""Redaction of texts, held against the reference's cases and a slow reading of its rules, and of documents."""

import json
from re._constants import MAXREPEAT
from re._parser import SubPattern, parse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worker
from tests.runs.fuzz_redaction import check_texts
from tests.support.builders import read_jsonl, trace_document
from tests.support.redaction_oracle import slow_redact_text
from worker.core.records import LEVELS
from worker.core.trace import parse_trace
from worker.redact import documents, reference
from worker.redact.documents import redact_document, redact_text

CASES = read_jsonl("redaction_cases.jsonl")

SECRETS = {
    "connection_string": "postgres://admin:pass@db:5432/app",
    "bearer_token": "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx",
    "api_key": "sk-abcdefghij0123456789",
    "password": "password=hunter2",
}
IDENTIFIERS = {
    "email": "ada@example.com",
    "phone": "(555) 123-4567",
    "ip": "192.168.1.100",
    "filepath": "/home/ada/notes.txt",
}


def test_the_cases_of_the_reference() -> None:
    assert len(CASES) == 2000
    for case in CASES:
        cleaned, counts = worker.redact_text(case["text"], case["level"])
        redactions = [{"type": kind, "count": count} for kind, count in counts.items()]
        assert (cleaned, redactions) == (case["cleaned"], case["redactions"]), case


@pytest.mark.slow
def test_random_texts_against_a_slow_reading_of_the_rules(seed: int) -> None:
    markers = check_texts(seed, 4000)
    assert markers.keys() == {*SECRETS, *IDENTIFIERS}, f"seed {seed}: some pattern found nothing"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        # what white space, a word and case are in JavaScript
        ("password\ufeff=\u00a0hunter2", "password\ufeff=\u00a0[REDACTED:password]"),
        ("password\u200b=hunter2", "password\u200b=hunter2"),
        ("password\x85=hunter2", "password\x85=hunter2"),
        ("épassword=hunter2", "épassword=[REDACTED:password]"),
        ("to\u212aen=hunter2", "to\u212aen=hunter2"),
        ("pa\u017f\u017fword=hunter2", "pa\u017f\u017fword=hunter2"),
        ("+4412345678é", "[REDACTED:phone]é"),
        ("٣٣٣-٣٣٣-٣٣٣٣", "٣٣٣-٣٣٣-٣٣٣٣"),
        # the shortest value has two UTF-16 code units
        ("token=🙂", "token=[REDACTED:password]"),
        ("token=é", "token=é"),
        # each pattern works on the result of the one before
        ("Bearer kp_0123456789abcdef", "Bearer [REDACTED:api_key]"),
        ("token: [redacted by hand]", "token: [redacted by hand]"),
        ("a@b.com@c.de@f.gh", "[REDACTED:email]@[REDACTED:email]"),
        ("a@b.com1@c.de", "[REDACTED:email][REDACTED:email]"),
        ("password='it\"s'", "password='it\"s'"),
        ("Bearer\n\n" + "x" * 20, "Bearer [REDACTED:bearer_token]"),
        ("rediss://h MONGODB+SRV://h", "[REDACTED:connection_string] [REDACTED:connection_string]"),
        ("1.2.3.4.5 256.1.1.1", "[REDACTED:ip].5 256.1.1.1"),
        ("C:\\Users\\ada\\a.txt /Users/ada", "[REDACTED:filepath] [REDACTED:filepath]"),
        ("", ""),
        ("a\ud83db", "a\ud83db"),
    ],
    ids=ascii,
)
def test_what_the_patterns_and_the_slow_reading_find(text: str, cleaned: str) -> None:
    assert redact_text(text, "aggregated")[0] == cleaned
    for level in LEVELS:
        found, counts = redact_text(text, level)
        assert (found, list(counts.items())) == slow_redact_text(text, level)


def backs_off(pattern: str) -> bool:
    """Whether a pattern has an unbounded repeat that gives back what it has read, one by one."""

    def walk(parts: Any) -> bool:
        if isinstance(parts, tuple) and parts and str(parts[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
            return parts[1][1] == MAXREPEAT or walk(parts[1])
        return isinstance(parts, tuple | list | SubPattern) and any(walk(part) for part in parts)

    return walk(parse(pattern))


def test_no_pattern_reads_without_bound_and_gives_back() -> None:
    """A pattern that does can take quadratic time; only the address does, between its @ and the last dot."""
    assert backs_off("(?:a|b+)c")
    assert not backs_off("(?:a|b++)c{1,9}")
    (address,) = [rule.pattern for rule in reference._ALL if rule.kind == "email"]
    patterns = [rule.pattern for rule in reference._ALL if rule.kind != "email"]
    patterns += [reference._COUNTRY_CODE, reference._SIGNS, documents._PASSWORD_NAME]
    assert not [pattern.pattern for pattern in patterns if backs_off(pattern.pattern)]
    assert backs_off(address.pattern)
    assert "@" not in reference._LOCAL_PART, "no two addresses share what is between their @ and the last dot"


def test_an_unknown_level_names_the_levels() -> None:
    for call in (lambda: redact_text("", "public"), lambda: redact_document({}, "")):
        with pytest.raises(ValueError, match="use one of aggregated, federated, private"):
            call()


EVERYTHING = " ".join([*SECRETS.values(), *IDENTIFIERS.values()])
CLEAN, EACH = redact_text(EVERYTHING, "aggregated")


def strings(value: Any) -> list[str]:
    """Return every string and every name of a member."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return (
        [text for item in value.items() for part in item for text in strings(part)] if isinstance(value, dict) else []
    )


def test_every_string_of_a_trace_is_cleaned_and_the_trace_stays_valid() -> None:
    document = trace_document(trace_id=f"kp:trace:{IDENTIFIERS['email']}", domain=EVERYTHING, objective=EVERYTHING)
    document["metadata"] |= {"agent_id": EVERYTHING, "framework": EVERYTHING, "validated_by": [EVERYTHING, "Ada"]}
    document["task"]["input_schema"] = {"properties": {EVERYTHING: {"type": "string", "default": EVERYTHING}}}
    document["steps"][1] |= {
        "content": EVERYTHING,
        "output_summary": EVERYTHING,
        "input": {EVERYTHING: [{"deep": [EVERYTHING, 1, None, True, 1.5]}]},
        "tool": {"name": EVERYTHING, "mcp_server": EVERYTHING},
    }
    document["outcome"]["result_summary"] = EVERYTHING
    document["knowledge_graph_delta"] = {
        "entities": [{"name": EVERYTHING, "type": EVERYTHING}],
        "relationships": [{"fact": EVERYTHING, "valid_from": EVERYTHING}],
    }
    document |= {"source_skill": EVERYTHING, "of_ours": {"notes": [[EVERYTHING]]}}
    before = json.dumps(document)
    places = before.count(json.dumps(EVERYTHING))
    assert places == 20

    cleaned, counts = redact_document(document, "aggregated")

    assert json.dumps(document) == before
    assert counts == {kind: places * number for kind, number in EACH.items()}
    assert [CLEAN if text == EVERYTHING else text for text in strings(document)] == strings(cleaned)
    trace = parse_trace(json.dumps(cleaned))
    assert trace.id == document["id"]
    no_id = {"id": {"password=hunter2": ["password=hunter2"]}}
    assert "hunter2" not in str(redact_document(no_id, "aggregated"))  # what is no id is no exception
    assert trace.steps[1].input == {CLEAN: [{"deep": [CLEAN, 1, None, True, 1.5]}]}


@pytest.mark.parametrize(
    "name",
    ["password", "PASSWD", "db_password", "dbPassword", "client-secret", "api_key", "X-API-Key", "apikey", "authToken"],
)
def test_members_with_password_like_names(name: str) -> None:
    values = ["x", 7, 1.5, ["x"], {"nested": {"x": "y"}}]
    document = {"steps": [{"input": {"list": [{name: value} for value in values]}}]}
    cleaned, counts = redact_document(document, "private")
    assert cleaned == {"steps": [{"input": {"list": [{name: "[REDACTED:password]"} for _ in values]}}]}
    assert counts == {"password": len(values)}
    assert redact_document(cleaned, "private") == (cleaned, {})


def test_names_that_are_not_password_like_and_values_that_hold_nothing() -> None:
    document = {
        "input": {"max_tokens": 5, "secretary": "Ada", "password_policy": "long", "tokens": ["a"], "pwd": "/tmp"}
    }
    document["input"] |= {"password": None, "secret": True, "token": "", "api_key": [], "passwd": {}}
    assert redact_document(document, "aggregated") == (document, {})


def test_an_input_schema_stays_a_schema() -> None:
    schema = {"type": "object", "properties": {"password": {"type": "string"}, "token": "x"}, "required": ["password"]}
    cleaned, counts = redact_document(
        {"task": {"input_schema": schema}, "input_schema": {"token": {"a": 1}}}, "private"
    )
    expected = schema | {"properties": {"password": {"type": "string"}, "token": "[REDACTED:password]"}}
    assert cleaned == {"task": {"input_schema": expected}, "input_schema": {"token": "[REDACTED:password]"}}
    assert counts == {"password": 2}


def test_members_whose_names_become_equal_are_all_kept() -> None:
    document = {"ada@a.com": 1, "bob@a.com": 2, "[REDACTED:email]": 3, "eve@a.com": 4, "[REDACTED:email]#3": 5}
    cleaned, counts = redact_document({"input": document}, "federated")
    expected = {"[REDACTED:email]#2": 1, "[REDACTED:email]#4": 2, "[REDACTED:email]": 3}
    assert cleaned == {"input": expected | {"[REDACTED:email]#5": 4, "[REDACTED:email]#3": 5}}
    assert list(cleaned["input"].values()) == [1, 2, 3, 4, 5]
    assert counts == {"email": 3}


@pytest.mark.slow
def test_depth_is_no_limit() -> None:
    document: Any = {"input": "ada@a.com"}
    for level in range(20_000):
        document = {"a": document} if level % 2 else {"b": [document]}
    cleaned, counts = redact_document(document, "aggregated")
    for level in reversed(range(20_000)):
        cleaned = cleaned["a"] if level % 2 else cleaned["b"][0]
    assert (cleaned, counts) == ({"input": "[REDACTED:email]"}, {"email": 1})


NAMES = st.sampled_from(["a", "b", *IDENTIFIERS.values()])
LEAVES = st.sampled_from([*SECRETS.values(), *IDENTIFIERS.values(), "plain", 3, None, True])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=30
)


@given(VALUES, st.sampled_from(LEVELS))
def test_any_document(value: Any, level: str) -> None:
    """The same values in the same order, whatever is an object, an array or a name."""

    def expected(node: Any) -> Any:
        if isinstance(node, str):
            return redact_text(node, level)[0]
        if isinstance(node, list):
            return [expected(item) for item in node]
        if isinstance(node, dict):  # names that stay apart
            return {redact_text(name, level)[0]: expected(item) for name, item in node.items()}
        return node

    document = {"x": value}
    cleaned, counts = redact_document(document, level)
    assert json.dumps(cleaned) == json.dumps(expected(document))
    assert sum(counts.values()) == sum(sum(redact_text(text, level)[1].values()) for text in strings(document))
