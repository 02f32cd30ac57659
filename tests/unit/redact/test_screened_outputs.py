"""KP_SCREEN: what is marked, what of it changes, and that nothing else does."""

from __future__ import annotations

import json

from tests.support.builders import TextEmbedder, make_record, trace_bytes, trace_document
from tests.support.output_embedding import score_file
from tests.support.schemas import VALIDATORS
from worker import PartitionScorer, parse_trace
from worker.core.documents import scored_record
from worker.core.records import SCREEN_RULES, Clean, OutputRecord
from worker.kafka.writing.publisher import OWN_HEADERS
from worker.redact.documents import redact_json
from worker.redact.screen import screen_json

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
    assert [it["scoring"].pop("screen")["rules"] for it in marked] == [list(MATCHED)] * 3
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
