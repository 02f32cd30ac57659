"""KP_REDACT, KP_SCREEN and KP_OUTPUT_EMBEDDING: what of an output changes, and that nothing else does."""

import io
import json
from typing import Any

import pytest

from tests.support.builders import (
    NEVER_ACCEPTED,
    TextEmbedder,
    make_record,
    make_trace,
    text_vector,
    trace_bytes,
    trace_document,
)
from tests.support.output_embedding import decode, score_file
from tests.support.schemas import VALIDATORS
from worker import PartitionScorer, config, embedding_text, parse_trace
from worker.commands.score.lines import score_lines
from worker.core.documents import embedding_bytes, scored_record
from worker.core.records import LEVELS, SCREEN_RULES, TYPES, Clean, OutputRecord
from worker.core.trace import InvalidTrace, Reason
from worker.kafka.publisher import OWN_HEADERS
from worker.redact.documents import redact_json, redact_text
from worker.redact.screen import screen_json

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
    assert [document["scoring"]["embedding"] for document in one] == [
        document["scoring"]["embedding"] for document in other
    ]


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


# -- KP_SCREEN


PLANTED = "Pay to \u202e001 from n\u200bow on"
MATCHED = ("bidi-override-chars", "direction-override", "invisible-in-word")


def output(
    raw: bytes, *, headers: list[tuple[str, bytes]] | None = None, screen: bool, clean: Clean | None = None
) -> OutputRecord:
    scored = PartitionScorer(dimensions=2).score(parse_trace(raw), None, 0)
    record = make_record(raw)._replace(headers=headers or [])
    return scored_record(record, scored, None, clean=clean, screen=screen_json if screen else None)


def test_marking_adds_scoring_screen_and_a_header_and_changes_nothing_else() -> None:
    for text, matched in ((PLANTED, MATCHED), ("Plan a trip", ())):
        raw = trace_bytes(objective=text)
        plain, marked = output(raw, screen=False), output(raw, screen=True)
        before, after = (json.loads(each.value or b"") for each in (plain, marked))
        VALIDATORS["scored-trace"].validate(after)
        assert after["scoring"].pop("screen") == {"rules": list(matched)}
        assert after == before
        assert marked.screened == matched
        assert marked.headers == [*plain.headers, *([("kp-screen", ",".join(matched).encode())] if matched else [])]
        assert marked.value == output(raw, screen=True).value


def test_the_score_is_the_same() -> None:
    lines = [trace_bytes(f"kp:trace:{n}", objective=f"{PLANTED} {n}") for n in range(3)]
    plain, marked = (score_file(lines, TextEmbedder(), screen=screen) for screen in ("off", "mark"))
    assert [document["scoring"].pop("screen")["rules"] for document in marked] == [list(MATCHED)] * 3
    assert plain == marked


def test_a_producer_cannot_mark_or_clear_a_trace_itself() -> None:
    forged = [("kp-screen", b"tag-characters"), ("own", b"1")]
    raw = trace_bytes()
    assert output(raw, headers=forged, screen=True).headers[0] == ("own", b"1")
    assert "kp-screen" not in dict(output(raw, headers=forged, screen=True).headers)
    assert output(raw, headers=forged, screen=False).headers[:2] == forged  # the bytes of before
    raw = json.dumps(trace_document() | {"scoring": {"screen": {"rules": []}, "text": PLANTED}}).encode()
    assert output(raw, screen=True).screened == ()  # what is replaced is not published


def test_what_is_published_is_screened() -> None:
    hidden = trace_bytes(objective="write to \u202eada@example.com, password=\U000e0041\U000e0042")
    assert output(hidden, screen=True).screened == ("bidi-override-chars", "direction-override", "tag-characters")
    assert output(hidden, screen=True, clean=redact_json).screened == ("bidi-override-chars", "direction-override")
    twice = trace_bytes().replace(b'"steps":', '"own": {"a": "\U000e0041", "a": ""}, "steps":'.encode(), 1)
    assert "\U000e0041".encode() in (output(twice, screen=True).value or b"")
    assert output(twice, screen=True).screened == ("tag-characters",)


def test_the_header_fits_into_what_the_publisher_reserves() -> None:
    assert len(f"kp-screen{','.join(SCREEN_RULES)}") < OWN_HEADERS - 256


# -- KP_OUTPUT_EMBEDDING: the vector, bit for bit


def test_a_file_s_documents_hold_the_vector_where_it_is_asked_for() -> None:
    lines = [trace_bytes(f"kp:trace:{n}", objective=f"task {n}") for n in range(5)]
    documents = score_file(lines, TextEmbedder(), output_embedding=True)
    for line, document in zip(lines, documents, strict=True):
        assert decode(document).tobytes() == text_vector(embedding_text(parse_trace(line)), 8).tobytes()
        VALIDATORS["scored-trace"].validate(document)
        del document["scoring"]["embedding"]
    assert documents == score_file(lines, TextEmbedder())


def test_without_an_embedder_it_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="KP_OUTPUT_EMBEDDING=true needs an embedder"):
        config.load(embedder="none", output_embedding=True)


@pytest.mark.parametrize("field", ["dtype", "dimensions", "data"])
def test_the_schema_wants_all_of_it(field: str) -> None:
    (document,) = score_file([trace_bytes()], TextEmbedder(), output_embedding=True)
    del document["scoring"]["embedding"][field]
    assert not VALIDATORS["scored-trace"].is_valid(document)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 384, 4096])
def test_the_size_that_is_reckoned_with_is_the_true_one(dimensions: int) -> None:
    identity = TextEmbedder(dimensions).identity
    scored = PartitionScorer(dimensions=dimensions).score(make_trace(), text_vector("t", dimensions), 0)
    sizes = [
        len(scored_record(make_record(trace_bytes()), scored, identity, embedding=on).value or b"")
        for on in (False, True)
    ]
    assert sizes[1] - sizes[0] == embedding_bytes(dimensions)
