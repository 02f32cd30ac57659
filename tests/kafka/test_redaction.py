"""KP_REDACT, publish --redact and KP_SCREEN on real Kafka: what is redacted or marked."""

import json
from typing import Any

from tests.support.builders import NEVER_ACCEPTED, WELL_ROUNDED, trace_bytes, trace_document
from tests.support.stage import Desk, Stage, Workers, header
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


PLANTED = "Pay to \u202e001 from n\u200bow on"
MATCHED = ("bidi-override-chars", "direction-override", "invisible-in-word")


def test_a_worker_redacts_what_it_accepts_marks_hidden_text_and_counts_both(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    """All of what is redacted and marked, and that no score changes: tests/unit/redact."""
    stage = Stage(kafka, KP_REDACT="accepted", KP_SCREEN="mark")
    worker = workers(stage.env).wait_ready()
    sent = [*(trace(n) for n in range(3)), trace_bytes("kp:trace:hidden", objective=PLANTED)]
    stage.produce([(b"key", value, [("own", b"header")], 0) for value in sent])
    stage.wait_committed(4)
    worker.wait_metric("kp_records_consumed_total", 4)
    assert {kind: worker.metric("kp_redactions_total", type=kind) for kind in TYPES} == {
        kind: 21 if kind == "password" else 18 for kind in TYPES
    }
    assert {rule for rule in SCREEN_RULES if worker.metric("kp_screened_total", rule=rule)} == set(MATCHED)
    *redacted, hidden = stage.outputs()["accepted"]
    assert json.loads(hidden.value)["scoring"]["screen"] == {"rules": list(MATCHED)}
    assert header(hidden, "kp-screen") == ",".join(MATCHED)
    for record in redacted:
        document = json.loads(record.value)
        parse_trace(record.value)
        assert document["scoring"]["redactions"] == {kind: 7 if kind == "password" else 6 for kind in TYPES}
        assert document["scoring"]["screen"] == {"rules": []}
        assert not left(record.value)
        assert not left(repr(record.headers))
    # A rejected trace and a dead letter keep what they had.
    rest = [trace(4, NEVER_ACCEPTED), trace(5)[:-1]]
    stage.produce([(None, value, (), 0) for value in rest])
    stage.wait_committed(6)
    outputs = stage.outputs()
    (rejected,), (letter,) = outputs["rejected"], outputs["dead-letter"]
    assert json.loads(rejected.value)["task"]["objective"] == EVERYTHING
    assert "redactions" not in json.loads(rejected.value)["scoring"]
    assert (letter.value, header(letter, "kp-error-reason")) == (rest[1], "not_json")


def test_publish_redacts_at_the_source(desk: Desk) -> None:
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
