"""Receipts and refused records, byte by byte; no secret in what is posted or written."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from tests.support.builders import T0, make_record
from tests.support.contribute import accepted_document, unit_of
from tests.support.secrets import LEAKS, PLACES, SECRETS, leaks, seeded
from worker.contribute.unit import Gate, Refusal, receipt, refused_record, unit_from
from worker.core.dead_letters import read_dead_letter
from worker.core.records import OutputRecord, SourceRecord
from worker.core.trace import Limits

GATE = Gate(frozenset({"network"}), frozenset({"aggregated", "federated"}))
REFUSED = Refusal("invalid_unit", "the registry refuses the unit (400)", "", 400, '[{"path":"x"}]')
DOCUMENTS = 1000
"""Five times as many with --long."""


def encoded(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


unit = partial(unit_of, gate=GATE)


def test_a_receipt_says_what_was_posted_and_where_it_came_from() -> None:
    posted = unit(accepted_document("kp:trace:1"))
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
    assert letter is not None
    assert (letter.reason, letter.source, letter.timestamp_ms) == ("invalid_unit", "accepted/3/7", T0)
    assert (letter.redriven, letter.original_headers(), letter.key) == (2, [], record.key)
    assert json.loads(letter.record.value) == document
    headers = dict(written.headers)
    assert (headers["kp-error-status"], headers["kp-error-issues"]) == (b"400", b'[{"path":"x"}]')


def test_a_redriven_refused_record_is_the_same_unit() -> None:
    document = seeded(1, "input", " ".join(SECRETS.values()))
    written = refused_record(make_record(encoded(document)), REFUSED)
    assert unit(json.loads(written.value or b"")).body == unit(document).body


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
    for number in range(5 * DOCUMENTS if long else DOCUMENTS):
        secret = kinds[number % len(kinds)]
        document = seeded(number, PLACES[number // len(kinds) % len(PLACES)], secret)
        document["metadata"]["privacy_level"] = rng.choice(["aggregated", "federated"])
        text = rng.choice([secret, f"a {secret} b", f"({secret})", f"x: {secret}\ny"])
        document["steps"][0]["input"] = {"buried": buried(rng, text)}
        assert leaks(json.dumps(document))
        posted = unit(document)
        assert not leaks(posted.body.decode())
        record = make_record(encoded(document), key=secret.encode(), headers=[("note", text.encode()), (text, b"")])
        assert not leaks(shown(refused_record(record, REFUSED)))
        assert not leaks(shown(receipt(record, posted, 201, "")))
        hidden = {**document, "id": f"kp:trace:{secret}"}
        found = unit_from(encoded(hidden), GATE, Limits())
        if isinstance(found, Refusal):
            assert found.reason == "secret_in_id"
            assert not leaks(repr(found) + shown(refused_record(make_record(encoded(hidden)), found)))
        else:
            assert secret in (SECRETS["US telephone"], SECRETS["telephone"])  # an id may have such digits
    assert leaks(" ".join(kinds)) == list(LEAKS)


def test_what_is_no_document_is_redacted_as_text() -> None:
    every = " ".join(SECRETS.values())
    for value in (every.encode(), b"\xff" + every.encode(), encoded({"id": [every]}), encoded({every: every}), b"[1]"):
        found = unit_from(value, GATE, Limits())
        assert isinstance(found, Refusal)
        assert not leaks(repr(found) + shown(refused_record(make_record(value, key=b"\xfe" + every.encode()), found)))
    assert refused_record(make_record(None, key=None), REFUSED).value is None
