"""Control records: which ones are honoured, their receipts, and the keys that sign them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import make_record
from tests.support.forgetting import ANOTHER_ID, KEY, TOPIC_ID, control_record, of_version_1
from worker.config import ConfigError, load
from worker.config.control_keys import forget_keys
from worker.core.control import FORGET, control_headers, control_kind
from worker.core.forgetting import (
    LISTED_BYTES,
    MAX_BEHIND,
    MAX_REQUESTS,
    MAX_TRACE_IDS,
    Forgetting,
    Kept,
    Processed,
    Removed,
    decode_processed,
    encode_processed,
    read_receipt,
    read_request,
    receipt_record,
)
from worker.core.novelty import Label, VectorCache
from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace, Reason

OTHER_KEY = b"another key, just as long as that"
REQUIRED_BY_VERSION_1 = {"version", "request_id", "issued_at", "topic", "partition", "end_offsets"}


def refused(record: SourceRecord, *keys: bytes, topic_id: str | None = TOPIC_ID) -> str:
    with pytest.raises(InvalidTrace) as caught:
        read_request(record, keys or [KEY], topic_id)
    assert caught.value.reason is Reason.BAD_CONTROL
    return caught.value.message


def signed(body: bytes, **changes: Any) -> SourceRecord:
    return make_record(body, headers=control_headers(FORGET, body, KEY))._replace(**changes)


def changed(**fields: Any) -> SourceRecord:
    body = json.loads(control_record(agent_id="ada").value or b"") | fields
    return signed(json.dumps({name: value for name, value in body.items() if value is not None}).encode())


def changed_unsigned(record: SourceRecord, **fields: Any) -> SourceRecord:
    """Return the record with another body and the same signature."""
    return record._replace(value=json.dumps(json.loads(record.value or b"") | fields).encode())


def test_a_request_is_read_and_cut_as_the_cache_cuts() -> None:
    request = read_request(control_record(5, agent_id="ada"), [KEY], TOPIC_ID)
    assert request.matcher()(Label("kp:trace:1", "ada", 3))
    assert not request.matcher()(Label("ada", "bob", 3))
    request = read_request(control_record(5, trace_ids=["a", "b"]), [OTHER_KEY, KEY], TOPIC_ID)
    assert [request.matcher()(Label(name, "x", 3)) for name in "abc"] == [True, True, False]


def test_only_the_exact_bytes_that_a_known_key_signed_are_honoured() -> None:
    record = control_record(agent_id="ada")
    assert "not the signature" in refused(record, OTHER_KEY)
    assert "not the signature" in refused(record._replace(value=(record.value or b"") + b" "))
    assert "needs one header" in refused(record._replace(headers=record.headers[:1]))
    assert "needs one header" in refused(record._replace(headers=[*record.headers, record.headers[1]]))
    assert "not the signature" in refused(record._replace(headers=[record.headers[0], (record.headers[1][0], None)]))  # type: ignore[list-item]
    assert control_kind([("kp-control", b"forget me")]) is None
    assert control_kind([("kp-control", None)]) is None  # type: ignore[list-item]


@pytest.mark.parametrize(
    "fields",
    [
        *({"version": version} for version in (0, 3, "2", None)),
        *({"topic_id": topic_id} for topic_id in (None, "", TOPIC_ID + "A")),
        *({"agent_id": agent_id} for agent_id in (None, "", "x" * 257)),
        *({"agent_id": None, "trace_ids": ids} for ids in ([], ["a"] * (MAX_TRACE_IDS + 1))),
        *({"end_offsets": ends} for ends in ([], [-1])),
        *({"trace_ids": ["a"]}, {"request_id": "a b"}, {"unknown": 1}, {"partition": None}),
    ],
    ids=str,
)
def test_a_body_that_is_not_of_the_schema_is_refused(fields: dict[str, Any]) -> None:
    assert refused(changed(**fields))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000], ids=lambda it: repr(it[:4]))
def test_rubbish_is_refused_even_if_it_is_signed(body: bytes) -> None:
    assert refused(signed(body))


def test_a_record_of_another_place_is_refused() -> None:
    record = control_record(100, agent_id="ada")
    for place in ({"topic": "other"}, {"partition": 1}):
        assert "another topic or partition" in refused(record._replace(**place))
    assert "honoured up to" in refused(record._replace(offset=99))
    read_request(record._replace(offset=100 + MAX_BEHIND), [KEY], TOPIC_ID)
    assert "honoured up to" in refused(record._replace(offset=101 + MAX_BEHIND))
    assert "honoured up to" in refused(changed(end_offsets=[0], partition=1)._replace(partition=1))


def test_a_record_of_another_topic_of_this_name_is_refused() -> None:
    """Of an earlier topic, whose offsets and name are the same; or of another cluster's."""
    record = control_record(100, agent_id="ada")
    read_request(record, [KEY], TOPIC_ID)
    said = refused(record, topic_id=ANOTHER_ID)
    assert TOPIC_ID in said
    assert ANOTHER_ID in said
    assert "run kp-worker forget again" in said
    assert "not the signature" in refused(changed_unsigned(record, topic_id=ANOTHER_ID), topic_id=ANOTHER_ID)


def test_without_a_topic_id_no_record_is_honoured() -> None:
    assert "Kafka has ids since 2.8" in refused(control_record(100, agent_id="ada"), topic_id=None)
    for unknown in ("", "A" * 22):
        assert refused(changed(topic_id=unknown), topic_id=None)


def test_a_record_of_version_1_is_refused_and_says_what_to_do() -> None:
    record = of_version_1(control_record(100, agent_id="ada"))
    assert json.loads(record.value or b"").keys() == REQUIRED_BY_VERSION_1 | {"agent_id"}
    for topic_id in (TOPIC_ID, None):
        said = refused(record, topic_id=topic_id)
        assert "version 1" in said
        assert "run kp-worker forget again" in said
    assert "not the signature" in refused(record, OTHER_KEY)
    assert "not the signature" in refused(changed_unsigned(record, version=2, topic_id=TOPIC_ID))
    assert "not the signature" in refused(changed_unsigned(control_record(100, agent_id="ada"), version=1))


def test_a_receipt_lists_what_fits() -> None:
    record = control_record(7, agent_id="ada")
    request = read_request(record, [KEY], TOPIC_ID)
    removed = [Removed("kp:trace:" + "x" * 247, n, n, n % 2 == 0) for n in range(3000)]
    output = receipt_record(record, request, "group", reversed(removed))
    assert len(output.value or b"") < LISTED_BYTES + 1000
    receipt = read_receipt(output.value)
    assert receipt is not None
    assert (receipt.removed.count, receipt.removed.cached) == (3000, 1500)
    assert receipt.removed.entries == removed[: receipt.removed.listed]
    assert 500 < receipt.removed.listed < 3000
    assert read_receipt(record.value) is None
    assert read_receipt(None) is None


@pytest.mark.slow
def test_requests_are_kept_while_they_matter() -> None:
    """A copy is refused by the kept request, or by its offset; what it matched has expired when it goes."""
    kept = {b"k": Kept(0, Label("t", "ada", 0))}
    state = Forgetting(kept, [], 1, "m", ttl_ms=1000)
    cache = VectorCache(4, 2)
    request = read_request(control_record(0, agent_id="ada"), [KEY], TOPIC_ID)
    first = state.forget(request, cache, 0, 5000)
    assert [key for key, _ in first.rows] == [b"k", b"forgotten:1:0"]
    assert state.earlier(request, 1) == 0
    assert state.earlier(request, 0) is None  # the same record, read again
    other = read_request(control_record(9, request_id="r-2", agent_id="bob"), [KEY], TOPIC_ID)
    assert len(state.forget(other, cache, 9, 9000).rows) == 1  # expired, but a copy could still come
    late = MAX_BEHIND + 1
    assert len(state.forget(other, cache, late, 5999).rows) == 1
    assert state.forget(other, cache, late + 20, 6000).rows[1:] == [(b"forgotten:1:0", None)]
    for number in range(MAX_REQUESTS + 5):
        state.forget(other, cache, late + 100 + number, 6001)
    assert len(state.processed) == MAX_REQUESTS


@pytest.mark.slow
def test_no_copy_is_honoured_because_its_request_has_left_the_full_list() -> None:
    """More requests than are kept, on a quiet partition: the first one is forgotten, but its offset still counts."""
    state, cache = Forgetting({}, [], 1, "m", ttl_ms=None), VectorCache(4, 2)
    total = MAX_REQUESTS + 10
    requests = [
        read_request(control_record(n, request_id=f"r-{n}", agent_id="a"), [KEY], TOPIC_ID) for n in range(total)
    ]
    for offset, request in enumerate(requests):
        assert state.refusal(request, offset) is None
        state.forget(request, cache, offset, 0)
    assert total < MAX_BEHIND
    refusals = [state.refusal(request, total) for request in requests]
    assert all(it is not None and it.reason is Reason.BAD_CONTROL for it in refusals)
    assert "signed before the last 2048 requests" in str(refusals[0])
    assert "was processed at offset 2057" in str(refusals[-1])
    assert state.refusal(requests[0], 0) is None  # the record itself, read again
    late = read_request(control_record(20, request_id="late", agent_id="a"), [KEY], TOPIC_ID)
    assert state.refusal(late, total) is None


def test_a_processed_request_has_the_same_bytes_everywhere() -> None:
    done = Processed(1, "r", 3, 1, None, 7, "m", frozenset({bytes([n] * 16) for n in range(9)}), (4, 5))
    assert decode_processed(encode_processed(done)) == done
    assert encode_processed(done).index(bytes([0] * 16)) < encode_processed(done).index(bytes([1] * 16))
    for bad in (b"", b"rubbish", encode_processed(done)[:-1]):
        with pytest.raises(ValueError, match="not the record"):
            decode_processed(bad)
    with pytest.raises(ValueError, match="version 2"):
        decode_processed(encode_processed(Processed(2, "r", 3, 1, None, 7, "m", frozenset())))


def test_keys_come_from_the_variable_or_the_lines_of_a_file(tmp_path: Path) -> None:
    assert forget_keys(load(forget_key=KEY.decode())) == (KEY,)
    file = tmp_path / "keys"
    file.write_bytes(b"\n" + OTHER_KEY + b"\r\n\n" + KEY + b"\n")
    assert forget_keys(load(forget_key_file=file)) == (OTHER_KEY, KEY)
    for content, words in ((b"\n", "empty"), (KEY + b"\nshort", "less than 32 bytes")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            forget_keys(load(forget_key_file=file))
        assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        forget_keys(load(forget_key_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="control records are signed"):
        forget_keys(load())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"forget": True}, "KP_FORGET_KEY_FILE or KP_FORGET_KEY"),
        ({"forget": True, "forget_key": "x" * 32, "embedder": "none"}, "needs an embedder"),
        ({"forget_key": "x" * 32, "forget_key_file": "/x"}, "both set"),
        ({"forget": True, "forget_key": "x" * 32, "forgotten_topic": "traces"}, "six topics must differ"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**fields)
