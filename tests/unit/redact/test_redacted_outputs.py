"""KP_REDACT: which output documents are redacted, what of them changes, and that nothing else does."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.support.builders import NEVER_ACCEPTED, TextEmbedder, make_record, trace_bytes, trace_document
from tests.support.output_embedding import score_file
from tests.support.schemas import VALIDATORS
from worker import PartitionScorer, config, parse_trace
from worker.commands.score.lines import score_lines
from worker.core.documents import scored_record
from worker.core.records import LEVELS, TYPES
from worker.core.trace import InvalidTrace, Reason, splice
from worker.redact.documents import redact_json, redact_text

SECRETS = "Ask ada@example.com, password=hunter2"


def lines(number: int = 4) -> list[bytes]:
    """Return traces with secrets, every second of them never accepted, and one without."""
    steps: list[dict[str, Any]] = [{}, {"steps": NEVER_ACCEPTED}]
    traces = [trace_bytes(f"kp:trace:{n}", objective=f"{SECRETS} {n}", **steps[n % 2]) for n in range(number)]
    return [*traces, trace_bytes("kp:trace:clean")]


def text_of(document: dict[str, Any]) -> str:
    objective: str = document["task"]["objective"]
    return objective


def test_only_the_outputs_that_the_setting_names_are_redacted() -> None:
    plain = score_file(lines(), TextEmbedder())
    assert {document["scoring"]["decision"] for document in plain} == {"accepted", "rejected"}
    for redact, decisions in (("off", ()), ("accepted", ("accepted",)), ("all", ("accepted", "rejected"))):
        for before, document in zip(plain, score_file(lines(), TextEmbedder(), redact=redact), strict=True):
            VALIDATORS["scored-trace"].validate(document)
            if document["scoring"]["decision"] in decisions:
                cleaned, counts = redact_text(text_of(before), "federated")
                assert document["scoring"].pop("redactions") == counts
                assert text_of(document) == cleaned
                document["task"] = before["task"]
            assert document == before


def test_the_vector_is_that_of_the_original_text() -> None:
    one, other = (
        score_file(lines(), TextEmbedder(), output_embedding=True, redact=redact) for redact in ("off", "all")
    )
    assert [it["scoring"]["embedding"] for it in one] == [it["scoring"]["embedding"] for it in other]


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_is_the_document_s_own(level: str) -> None:
    document = trace_document(objective=SECRETS)
    document["metadata"]["privacy_level"] = level
    (scored,) = score_file([json.dumps(document).encode()], None, redact="all")
    assert (text_of(scored), scored["scoring"]["redactions"]) == redact_text(SECRETS, level)
    assert ("ada@example.com" in text_of(scored)) is (level == "private")


def test_a_document_is_written_anew_with_its_values() -> None:
    """A secret may be in an earlier value of a name given twice, and in escapes; numbers keep their spelling."""
    raw = trace_bytes()[:-1] + (
        rb', "own": {"a": "ada@example.com", "a": "", "b": "\u0061da@example.com", "c": 1.0e2, "d": 1e400,'
        rb' "e": 123456789012345678901234567890, "f": -0.0, "g": "\u00e9"}}'
    )
    scored = PartitionScorer(dimensions=2).score(parse_trace(raw), None, 0)
    output = scored_record(make_record(raw), scored, None, clean=redact_json)
    value = output.value or b""
    expected = (
        '"own":{"a":"","b":"[REDACTED:email]","c":1.0e2,"d":1e400,"e":123456789012345678901234567890,"f":-0.0,"g":"é"}'
    )
    assert expected.encode() in value
    assert output.redactions == {"email": 1}
    assert b"ada@" not in value
    assert (output.key, output.headers[-1]) == (b"agent-7", ("kp-decision", output.kind.encode()))


def test_off_leaves_the_bytes() -> None:
    raw = trace_bytes(objective=SECRETS)
    scored = PartitionScorer(dimensions=2).score(parse_trace(raw), None, 0)
    output = scored_record(make_record(raw), scored, None)
    scoring = json.dumps(json.loads(output.value or b"")["scoring"]).encode()
    spelt = splice(raw, scored.score, scoring)
    assert json.loads(spelt) == json.loads(output.value or b"")
    assert (output.value or b"").startswith(spelt[: spelt.index(b'"scoring"')])
    assert output.redactions is None
    assert b"redactions" not in (output.value or b"")


def test_a_file_s_summary_counts_the_markers() -> None:
    for redact, count in (("off", 0), ("accepted", 2), ("all", 4)):
        summary = score_lines(
            [io.BytesIO(b"\n".join(lines()))], io.BytesIO(), None, config.load(redact=redact, embedder="none"), None
        )
        assert summary.redactions == ({"password": count, "email": count} if count else {})


def test_dead_letters_keep_the_original_bytes() -> None:
    letters = io.BytesIO()
    bad = trace_bytes(objective=SECRETS, confidence=7)
    score_lines([io.BytesIO(bad)], io.BytesIO(), letters, config.load(redact="all", embedder="none"), None)
    assert json.loads(letters.getvalue())["value"] == bad.decode()


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"password=hunter2"', b"\xff", b'{"a":' * 5000, b'{"a":"\\ud800"}', b""])
def test_what_is_no_object_is_refused_without_quoting_it(raw: bytes) -> None:
    with pytest.raises(InvalidTrace, match=r"^cannot be redacted; send one JSON object$") as caught:
        redact_json(raw)
    assert caught.value.reason is Reason.NOT_JSON


def test_a_document_without_a_level_is_redacted_as_aggregated() -> None:
    for metadata in ("", '"metadata": 5, ', '"metadata": {"privacy_level": ["private"]}, '):
        cleaned, counts = redact_json(f'{{{metadata}"a": "ada@example.com"}}'.encode())
        assert (json.loads(cleaned)["a"], counts) == ("[REDACTED:email]", {"email": 1})


def test_the_schema_knows_the_types() -> None:
    schema = VALIDATORS["scored-trace"].schema["properties"]["scoring"]["properties"]["redactions"]
    assert schema["propertyNames"]["enum"] == list(TYPES)
