"""Which control records are verdicts that count, and what a verdict is made of."""

import hmac
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.builders import make_record
from worker.config import ConfigError, load
from worker.config.keys import judge_keys
from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.core.verdicts import (
    SIGNATURE_HEADER,
    Verdict,
    control_headers,
    control_kind,
    make_verdict,
    read_verdict,
    sign_verdict,
)

KEY, OTHER = b"k" * 32, b"o" * 32
TOPIC_ID = "abcdefghijklmnopqrstuv"
JUDGES = {"ci": [KEY], "reviewer": [b"r" * 32, OTHER]}
LINE = {
    "trace_id": "kp:trace:1", "agent_id": "ada", "task_domain": "code", "partition": 3, "offset": 7,
    "success": True, "judge": "ci",
}  # fmt: skip
DOCUMENT = {
    "id": "kp:trace:1",
    "metadata": {"agent_id": "ada", "task_domain": "code", "success": True},
    "scoring": {
        "score": 0.61, "decision": "rejected", "source": {"topic": "traces", "partition": 3, "offset": 7},
        "confidence": {"stated": 0.95, "used": 0.5, "judged": 0, "succeeded": 0},
    },
    "success": 0.25,
    "judge": "ci",
}  # fmt: skip
NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


def verdict(line: dict[str, Any] = LINE, **changes: Any) -> Verdict:
    return make_verdict(line | changes, topic="traces", topic_id=TOPIC_ID, issued_at=NOW)


def record(of: Verdict | None = None, key: bytes = KEY, **changes: Any) -> SourceRecord:
    signed = sign_verdict(of or verdict(), key)
    where = {"topic": signed.topic, "partition": signed.partition, "key": signed.key}
    return make_record(signed.value, 8, headers=signed.headers, **where)._replace(**changes)


def refused(record: SourceRecord, topic_id: str | None = TOPIC_ID, judges: Any = JUDGES) -> str:
    with pytest.raises(InvalidTrace) as caught:
        read_verdict(record, judges, topic_id)
    assert caught.value.reason is Reason.BAD_CONTROL
    return str(caught.value)


def test_a_verdict_is_made_of_a_scored_document_or_of_its_fields_alone() -> None:
    short, of_document = verdict(), verdict(DOCUMENT)
    assert (short.score, short.decision, short.used) == (None, None, None)
    assert (of_document.score, of_document.decision, of_document.used) == (0.61, "rejected", 0.5)
    assert of_document.success == 0.25
    for name in ("trace_id", "agent_id", "task_domain", "partition", "offset", "judge", "issued_at"):
        assert getattr(short, name) == getattr(of_document, name)


@pytest.mark.parametrize("written", ["bob", 7, None, {}])
def test_no_member_that_an_agent_writes_into_its_trace_says_what_is_judged(written: Any) -> None:
    """A trace may have members of any name: its failures would count for another agent, or for none."""
    for name in ("trace_id", "agent_id", "task_domain", "partition", "offset", "issued_at", "topic"):
        assert verdict(DOCUMENT | {name: written}) == verdict(DOCUMENT)


@pytest.mark.parametrize(
    ("success", "kept"), [(True, 1_000_000), (False, 0), (1, 1_000_000), (0.5, 500_000), (1e-9, 0)]
)
def test_success_is_true_false_or_a_number(success: Any, kept: int) -> None:
    assert verdict(success=success).millionths == kept


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(("success", LINE | {"success": it}) for it in (None, "yes", -0.1, 1.1, float("nan"), float("inf"), [1])),
        *(("judge", LINE | {"judge": it}) for it in ("", "a b", "x" * 65, "ci\n")),  # as in a line of the key file
        *((missing, {name: value for name, value in LINE.items() if name != missing}) for missing in LINE),
    ],
)
def test_a_field_that_is_wrong_or_missing_is_named(name: str, line: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"`(\$\.)?{name}`|^{name} must"):  # not only in what is to be given
        verdict(line)


def test_the_key_decides_the_judge() -> None:
    assert read_verdict(record(), JUDGES, TOPIC_ID) == verdict()
    assert read_verdict(record(verdict(judge="reviewer"), OTHER), JUDGES, TOPIC_ID).judge == "reviewer"
    assert "not the signature" in refused(record(verdict(judge="reviewer"), KEY))  # ci's key
    assert "no key of judge stranger" in refused(record(verdict(judge="stranger"), KEY))
    assert "KP_VERDICT_KEY_FILE" in refused(record(), judges={})


def test_only_the_exact_bytes_that_were_signed_count() -> None:
    signed = record()
    assert "not the signature" in refused(signed._replace(value=(signed.value or b"").replace(b"1.0", b"0.0", 1)))
    assert "needs one header" in refused(signed._replace(headers=signed.headers[:1]))
    assert "needs one header" in refused(signed._replace(headers=[*signed.headers, signed.headers[1]]))
    assert "not the signature" in refused(signed._replace(headers=[signed.headers[0], (SIGNATURE_HEADER, b"\xff")]))


@pytest.mark.parametrize("size", [32, 63, 64, 65, 200])
def test_the_signature_is_hmac_sha256_whatever_the_key_s_length(size: int) -> None:
    key = bytes(range(size))
    for body in (b"", b"verdict", b"x" * 1000):
        (_, signature) = control_headers(body, key)[1]
        assert signature == hmac.new(key, body, "sha256").hexdigest().encode()


@pytest.mark.parametrize("value", [None, b"", b"{}", b"[1]", b"\xff", b'{"version": 2}', b"[" * 2000])
def test_an_unreadable_verdict_is_refused(value: bytes | None) -> None:
    headers = control_headers(value or b"", KEY)
    assert "not a verdict" in refused(make_record(value, headers=headers, topic="traces", partition=3))


def test_an_unknown_field_is_refused_as_what_is_signed_must_be_understood() -> None:
    body = msgspec.json.encode(msgspec.to_builtins(verdict()) | {"weight": 5})
    assert "weight" in refused(make_record(body, headers=control_headers(body, KEY), topic="traces"))


@pytest.mark.parametrize("line", [DOCUMENT, LINE | {"topic": "traces"}])
def test_a_trace_of_another_topic_is_a_wrong_line(line: dict[str, Any]) -> None:
    assert verdict(line).topic == "traces"
    with pytest.raises(ValueError, match="read from topic traces, and the verdict would be written to staging"):
        make_verdict(line, topic="staging", topic_id=TOPIC_ID, issued_at=NOW)


def test_a_verdict_is_about_a_record_before_it() -> None:
    for offset in (7, 6):
        assert "about offset 7" in refused(record(offset=offset))


def test_a_verdict_by_an_earlier_build_has_no_offset_and_still_counts() -> None:
    body = msgspec.json.encode({k: v for k, v in msgspec.to_builtins(verdict()).items() if k != "offset"})
    old = make_record(body, 3, headers=control_headers(body, KEY), topic="traces", partition=3)
    assert read_verdict(old, JUDGES, TOPIC_ID) == msgspec.structs.replace(verdict(), offset=None)


def test_a_verdict_counts_in_its_partition_of_its_topic_alone() -> None:
    assert "another topic or partition" in refused(record(partition=4))
    assert "another topic or partition" in refused(record(topic="other"))
    assert "recreated" in refused(record(), "zzzzzzzzzzzzzzzzzzzzzz")
    assert "recreated" in refused(record(), None)


@pytest.mark.parametrize("kind", [b"forget", b"Verdict", b""])
def test_an_unknown_control_record_is_refused(kind: bytes) -> None:
    signed = record()
    assert "unknown control record" in refused(signed._replace(headers=[("kp-control", kind), signed.headers[1]]))


def test_every_record_with_the_header_is_a_control_record() -> None:
    assert control_kind([("kp-control", b"verdict")]) == b"verdict"
    assert control_kind([("kp-control", b"forget")]) == b"forget"
    assert control_kind([("kp-control", None)]) == b""  # type: ignore[list-item]
    assert control_kind([("Kp-Control", b"verdict")]) is None
    assert control_kind([]) is None


def test_keys_come_from_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\nci " + OTHER + b"\r\n\nci " + KEY + b"\n")
    assert judge_keys(load(verdict_key_file=file)) == {"ci": [OTHER, KEY]}
    for content, words in (
        (b"\n", "empty"),
        (b"ci " + KEY + b"\nann short", "less than 32 bytes"),
        (b"ci " + KEY + b"\nann " + KEY, "the same key as ci"),
        (b"c i " + KEY + b"\nnobody", "a line is JUDGE KEY"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            judge_keys(load(verdict_key_file=file))
        assert "short" not in str(caught.value)
        assert KEY.decode() not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        judge_keys(load(verdict_key_file=tmp_path / "none"))
    assert judge_keys(load()) == {}
