"""`kp-worker publish`: what arrives on the topic, what is refused and how that is said."""

import json
import os
import signal
import statistics
import subprocess
from pathlib import Path

from tests.support.builders import trace_bytes, trace_document
from tests.support.kafka_fixtures import create_topics, wait_until
from tests.support.message_logs import message_log
from tests.support.stage import Desk, Workers
from worker.commands.publish.send import key_of
from worker.commands.shared.options import SAMPLES
from worker.core.trace import parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def by_agent(agent: str, number: int) -> bytes:
    document = trace_document(f"kp:trace:{number}")
    document["metadata"]["agent_id"] = agent
    return json.dumps(document).encode()


def test_published_scored_and_shown(desk: Desk, workers: Workers, tmp_path: Path) -> None:
    workers(desk.env).wait_ready()
    good = SAMPLES.read_bytes().splitlines()
    bad = {5: b"{", 20: trace_bytes(confidence=90), 21: b'{"id": "\xff"}'}
    lines = [*good[:4], bad[5], *good[4:18], bad[20], bad[21], b"", *good[18:]]
    assert all(lines[number - 1] == line for number, line in bad.items())
    file = tmp_path / "traces.jsonl"
    file.write_bytes(b"\r\n".join(lines))
    done = desk.run("publish", str(file))
    assert done.returncode == 1
    assert f"{len(good)} traces published to topic {desk.name}, 3 refused" in done.stderr
    assert f"{file}:5: not_json: " in done.stderr
    assert f"{file}:20: invalid_value: outcome.confidence: 90 is not allowed; give a number from 0 to 1" in done.stderr
    assert f"{file}:21: not_utf8: " in done.stderr
    records = desk.read()
    assert sorted(record.value for record in records) == sorted(good)
    assert all(record.key == parse_trace(record.value).metadata.agent_id.encode() for record in records)
    for partition in range(2):  # an agent's traces stay in order
        values = [record.value for record in records if record.partition == partition]
        assert values == [line for line in good if line in values]

    unchecked = desk.run("publish", "-", "--no-validate", stdin=b"\n".join(bad.values()))
    assert unchecked.returncode == 0
    assert "3 traces published" in unchecked.stderr
    assert wait_until(lambda: len(desk.read("dead-letter")) >= 3)
    shown = desk.run("tail", "--from-beginning", "--no-follow")
    documents = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {document["id"] for document in documents} == {json.loads(line)["id"] for line in good}
    assert all(0 <= document["scoring"]["score"] <= 1 for document in documents)
    letters = [json.loads(line) for line in desk.run("tail", "--dead-letters", "--no-follow").stdout.splitlines()]
    assert sorted(letter["reason"] for letter in letters) == ["invalid_value", "not_json", "not_utf8"]


def test_keys() -> None:
    line = by_agent("kp:agent:1", 7)
    assert key_of(line, "agent") == b"kp:agent:1"
    assert key_of(line, "id") == b"kp:trace:7"
    assert key_of(line, "domain") == b"finance"
    assert key_of(line, "none") is None
    assert key_of(trace_bytes(), "agent") is None  # the field is optional
    for anything in (b"{", b"\xff", b"[]", b"{}", b'{"metadata":{}}', b'{"metadata":{"agent_id":3}}', b"[" * 100_000):
        assert key_of(anything, "agent") is None


def test_a_slow_pipe_is_sent_as_it_comes_and_ctrl_c_ends_it(desk: Desk) -> None:
    with desk.start("publish", "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        try:
            assert command.stdin is not None
            command.stdin.write(by_agent("a", 1) + b"\n")
            command.stdin.flush()
            assert wait_until(desk.read)
            command.send_signal(signal.SIGINT)
            assert command.wait(20) == 130
            assert command.stderr is not None
            said = command.stderr.read().decode().strip()
        finally:
            command.kill()
    assert said == f"1 trace published to topic {desk.name}, 0 refused, then interrupted"


def test_what_convert_writes_goes_through_a_pipe(desk: Desk, tmp_path: Path, seed: int) -> None:
    """That each run is scored: unit/commands/test_convert.py."""
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(message_log(seed + number)) + "\n" for number in range(80)))
    options = [
        "--from", "chat", "--success", "@reward", "--confidence", "0.8", "--domain", "desk", "--visibility", "private",
        "--privacy", "private", "--created-at", "@finished", "--agent-id", "desk", "--keep", "x_run=@run",
    ]  # fmt: skip
    with (
        desk.start("convert", *options, str(file), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as convert,
        desk.start("publish", "-", stdin=convert.stdout, stderr=subprocess.PIPE) as publish,
    ):
        said = publish.communicate(timeout=90)[1].decode()
        assert convert.stderr is not None
        assert "80 runs read, 80 written, 0 refused" in convert.stderr.read().decode()
    assert (convert.returncode, publish.returncode) == (0, 0), said
    assert f"80 traces published to topic {desk.name}" in said
    assert sorted(json.loads(record.value)["x_run"] for record in desk.read()) == list(range(seed, seed + 80))
    assert {record.key for record in desk.read()} == {b"desk"}


def test_the_rate_holds(desk: Desk) -> None:
    lines = b"\n".join(by_agent("a", number) for number in range(31))
    assert desk.run("publish", "-", "--rate", "50", stdin=lines).returncode == 0
    times = [record.timestamp for record in desk.read()]
    assert len(times) == 31
    # Not from the first to the last: on a busy machine the first may be late, and the last is not later for it.
    assert statistics.median(later - earlier for earlier, later in zip(times, times[10:], strict=False)) >= 180
    assert times[-1] - times[0] < 3000
    assert max(later - earlier for earlier, later in zip(times, times[3:], strict=False)) < 1000


def test_what_the_topic_refuses_is_named_and_does_not_stop_the_rest(desk: Desk) -> None:
    small = f"{desk.name}.small"
    create_topics(desk.bootstrap, {small: (1, {"max.message.bytes": "3000"})})
    large = trace_bytes(objective="x" * 5000)
    lines = b"\n".join([by_agent("a", 1), large, by_agent("a", 2)])
    done = desk.run("publish", "-", "--topic", small, stdin=lines)
    assert done.returncode == 1
    assert "-:2: too_large: " in done.stderr
    assert "max.message.bytes is 3000" in done.stderr
    assert f"2 traces published to topic {small}, 1 refused" in done.stderr


def test_a_line_that_is_too_long_is_not_read_and_does_not_stop_the_rest(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    with file.open("wb") as stream:
        stream.write(by_agent("a", 1) + b"\n")
        stream.seek(64 << 20, os.SEEK_CUR)  # a hole: a line of 64 MiB
        stream.write(b"\n" + by_agent("a", 2))
    for options in ((), ("--no-validate", "--redact")):
        done = desk.run("publish", str(file), *options)
        assert done.returncode == 1
        assert f"{file}:2: too_large: longer than {32 << 20} bytes, 32 times KP_MAX_MESSAGE_BYTES" in done.stderr
        assert "2 traces published" in done.stderr
    assert [json.loads(record.value)["id"] for record in desk.read()] == ["kp:trace:1", "kp:trace:2"] * 2


def test_what_is_wrong_from_the_start_ends_with_code_2(desk: Desk) -> None:
    for args, text in (
        (("samples", "--topic", "nowhere"), "topic nowhere"),
        (("/nowhere.jsonl",), "/nowhere.jsonl: No such file"),
        (("samples", "--rate", "0"), "--rate"),
        (("samples", "--key", "colour"), "--key"),
    ):
        done = desk.run("publish", *args)
        assert done.returncode == 2
        assert text in done.stderr
    away = desk.run("publish", "samples", KP_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert away.returncode == 2
    assert "no Kafka broker answers at KP_BOOTSTRAP_SERVERS=127.0.0.1:1" in away.stderr


def test_of_a_file_of_another_kind_five_lines_are_named(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\n" * 3300)
    done = Desk(kafka).run("publish", str(file))
    assert done.returncode == 1
    assert done.stderr.count(f"{file}:") == 6
    assert f"{file}: 3295 more like these; kp-worker score {file} --embedder none" in done.stderr
    assert "0 traces published" in done.stderr
