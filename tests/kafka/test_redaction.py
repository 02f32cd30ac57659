"""KP_REDACT, publish --redact and KP_SCREEN on real Kafka: what is redacted or marked."""

from __future__ import annotations

import json
from typing import Any

from tests.support.builders import NEVER_ACCEPTED, T0, WELL_ROUNDED, trace_bytes, trace_document
from tests.support.commands import Desk, header
from tests.support.failing_worker import FAILS
from tests.support.stage import Stage, Workers
from worker.core.records import SCREEN_RULES, TYPES
from worker.core.trace import parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

FOUND = {
    "connection_string": "postgres://ada:lovelace@db/app",
    "bearer_token": "Bearer abcdefghijklmnopqrst",
    "api_key": "AKIAIOSFODNN7EXAMPLE",
    "password": "token=lovelace",
    "email": "ada@example.com",
    "phone": "555-123-4567",
    "ip": "192.168.17.23",
    "filepath": "/home/ada/notes",
}
EVERYTHING = " | ".join(FOUND.values())
REMOVED = ["lovelace", "abcdefghij", "AKIAIOS", "ada@", "555-123", "192.168.17", "/home/ada"]


def trace(number: int, steps: Any = WELL_ROUNDED, level: str = "aggregated") -> bytes:
    document = trace_document(f"kp:trace:{number}", objective=EVERYTHING, domain=f"shop {EVERYTHING}", steps=steps)
    document["metadata"] |= {"privacy_level": level, "agent_id": f"agent {number} {EVERYTHING}"}
    document["steps"][0]["input"] = {EVERYTHING: [{"secret": "lovelace", "note": EVERYTHING}]}
    document["outcome"]["result_summary"] = EVERYTHING
    return json.dumps(document).encode()


def left(text: str | bytes) -> list[str]:
    return [secret for secret in REMOVED if secret in (text if isinstance(text, str) else text.decode())]


def test_a_worker_redacts_its_accepted_outputs_and_counts_it(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_REDACT="accepted")
    worker = workers(stage.env).wait_ready()
    sent = [trace(n) for n in range(3)]
    stage.produce([(b"key", value, [("own", b"header")], 0) for value in sent])
    stage.wait_committed(3)
    worker.wait_metric("kp_records_consumed_total", 3)
    assert {kind: worker.metric("kp_redactions_total", type=kind) for kind in TYPES} == {
        kind: 21 if kind == "password" else 18 for kind in TYPES
    }
    for record in stage.outputs()["accepted"]:
        document = json.loads(record.value)
        parse_trace(record.value)
        assert document["scoring"]["redactions"] == {kind: 7 if kind == "password" else 6 for kind in TYPES}
        assert not left(record.value)
        assert not left(repr(record.headers))
    # A rejected trace and a dead letter keep what they had.
    rest = [trace(3, NEVER_ACCEPTED), trace(4)[:-1]]
    stage.produce([(None, value, (), 0) for value in rest])
    stage.wait_committed(5)
    outputs = stage.outputs()
    (rejected,), (letter,) = outputs["rejected"], outputs["dead-letter"]
    assert json.loads(rejected.value)["task"]["objective"] == EVERYTHING
    assert "redactions" not in json.loads(rejected.value)["scoring"]
    assert (letter.value, header(letter, "kp-error-reason")) == (rest[1], "not_json")


PLANTED = "Pay to \u202e001 from n\u200bow on. DB_PASSWORD=Tulemiq-4107"
MATCHED = ("bidi-override-chars", "direction-override", "invisible-in-word")


def test_a_worker_marks_hidden_text_and_changes_no_score(kafka: EmbeddedKafka, workers: Workers) -> None:
    values = [
        trace_bytes("kp:trace:0", objective=PLANTED),
        trace_bytes("kp:trace:1", objective=PLANTED, steps=NEVER_ACCEPTED),
        trace_bytes("kp:trace:2"),
    ]
    sent = [(b"key", value, [("kp-screen", b"tag-characters"), ("own", b"1")], 0, T0) for value in values]
    settings = {"KP_SCREEN": "mark", "KP_REDACT": "all", "KP_REDACT_RULES": "strict"}
    outputs, screened = [], []
    for stage in (Stage(kafka), Stage(kafka, **settings)):
        worker = workers(stage.env).wait_ready()
        stage.produce(sent)
        stage.wait_committed(len(sent))
        worker.wait_metric("kp_records_consumed_total", len(sent))
        screened.append({rule: worker.metric("kp_screened_total", rule=rule) for rule in SCREEN_RULES})
        assert "Tulemiq" not in worker.log()
        found = stage.outputs()
        assert [len(records) for records in found.values()] == [2, 1, 0]
        same_topic = stage.name.encode(), b"traces"
        outputs.append(
            [(each.value.replace(*same_topic), each.headers) for each in found["accepted"] + found["rejected"]]
        )
    assert screened == [dict.fromkeys(SCREEN_RULES, 0), {rule: 2 * (rule in MATCHED) for rule in SCREEN_RULES}]
    kept, own = sent[0][2], {"kp-score", "kp-decision"}
    for (plain, headers), (marked, marked_headers), rules in zip(*outputs, [MATCHED, (), MATCHED], strict=True):
        before, after = json.loads(plain), json.loads(marked)
        assert "screen" not in before["scoring"]
        assert (headers[:2], {name for name, _ in headers[2:]}) == ((*kept,), own)
        screen = after["scoring"].pop("screen")
        assert screen["rules"] == list(rules)
        mark = [("kp-screen", ",".join(rules).encode())] if rules else []
        assert [*marked_headers] == [*headers[1:], *mark]
        assert ("Tulemiq" in marked.decode(), after["scoring"].pop("redactions", {})) == (
            False, {"password": 1} if rules else {},
        )  # fmt: skip
        assert after["scoring"] == before["scoring"]
        assert rules or after == before


def test_publish_redacts_at_the_source(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    bad = json.loads(trace(7))
    bad["metadata"]["privacy_level"] = f"public {EVERYTHING}"
    lines = [trace(0), trace(1, level="private"), b"{" + trace(2), json.dumps(bad).encode(), trace(3)]
    done = desk.run("publish", "-", "--redact", stdin=b"\n".join(lines))
    assert done.returncode == 1
    assert f"3 traces published to topic {desk.name}, 2 refused" in done.stderr
    assert "-:3: not_json: cannot be redacted; send one JSON object" in done.stderr
    assert "-:4: invalid_value: metadata.privacy_level: " in done.stderr
    assert "  21 password redacted\n" in done.stderr
    assert "  12 email redacted\n" in done.stderr
    assert not left(done.stdout + done.stderr)
    records = sorted(desk.read(), key=lambda record: parse_trace(record.value).id)
    assert [parse_trace(record.value).id for record in records] == ["kp:trace:0", "kp:trace:1", "kp:trace:3"]
    for record in (records[0], records[2]):
        assert not left(record.value)
        assert record.key == parse_trace(record.value).metadata.agent_id.encode()
    assert "ada@" in records[1].value.decode()
    assert not {"lovelace", "abcdefghij", "AKIAIOS"} & set(left(records[1].value))

    unchecked = desk.run(
        "publish", "-", "--redact", "--no-validate", stdin=b'password=lovelace\n{"secret": "lovelace"}'
    )
    assert unchecked.returncode == 1
    assert "1 trace published" in unchecked.stderr
    assert [record.value for record in desk.read() if b"kp:trace" not in record.value] == [
        b'{"secret":"[REDACTED:password]"}'
    ]


def test_a_record_on_which_the_redaction_fails_is_a_dead_letter_and_the_next_ones_are_scored(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    stage = Stage(kafka, KP_REDACT="all")
    worker = workers(stage.env, ("run",), "tests.support.failing_worker", cold=True).wait_ready()
    sent = [trace_bytes(f"kp:trace:{n}", objective=FAILS if n == 1 else "fine") for n in range(4)]
    stage.produce([(None, value, (), 0) for value in sent])
    stage.wait_committed(4)
    (letter,) = stage.outputs()["dead-letter"]
    assert (letter.value, header(letter, "kp-error-reason")) == (sent[1], "evaluation_failed")
    assert "IndexError (failing_worker.py:" in header(letter, "kp-error-message")
    assert FAILS not in worker.log()
    worker.wait_metric("kp_dead_letters_total", 1, reason="evaluation_failed")
    worker.finish()
