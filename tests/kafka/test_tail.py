"""`kp-worker tail`: which records it shows, and how, on a terminal and in a pipe."""

import json
import re
import signal
import subprocess
from typing import Any

import pytest

from tests.support.builders import T0, make_record, trace_bytes
from tests.support.kafka_fixtures import produce
from tests.support.stage import Desk
from tests.support.terminal import command_on_terminal
from worker.core.dead_letters import dead_letter
from worker.core.scorer import PartitionScorer
from worker.core.trace import InvalidTrace, Reason
from worker.lab.broker.embedded_kafka import EmbeddedKafka

DOMAINS = ("finance", "code", "customer_service")


def fill(desk: Desk, first: int, count: int) -> list[dict[str, Any]]:
    """Put scored traces on the two topics, a second apart, each in a write of its own; returns the documents."""
    scorer = PartitionScorer(dimensions=8)
    documents = []
    for number in range(first, first + count):
        raw = trace_bytes(
            f"kp:trace:{number:08d}", domain=DOMAINS[number % 3], confidence=number % 10 / 10, created_at=T0 + number
        ).replace(b", ", b",\n")  # as a producer that writes pretty JSON
        documents.append(json.loads(desk.put(scorer, raw, number, partition=number % 2)))
    return documents


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def filled(kafka: EmbeddedKafka) -> tuple[Desk, list[dict[str, Any]]]:
    """Topics with 24 scored traces, their documents, and two dead letters."""
    desk = Desk(kafka)
    documents = fill(desk, 0, 24)
    desk.letters([(Reason.NOT_JSON, b"{"), (Reason.NOT_UTF8, b"\xff")])
    return desk, documents


def test_the_last_ones_the_filters_and_all(filled: tuple[Desk, list[dict[str, Any]]]) -> None:
    desk, documents = filled
    decisions = [document["scoring"]["decision"] for document in documents]
    assert set(decisions) == {"accepted", "rejected"}

    def tail(*options: str) -> list[dict[str, Any]]:
        done = desk.run("tail", "--no-follow", *options)
        assert (done.returncode, done.stderr) == (0, "")
        return lines(done.stdout)

    assert tail() == documents[-10:]
    assert tail("--last", "3") == documents[-3:]
    assert tail("--last", "0") == []
    assert tail("--last", "5", "--domain", "code") == [d for i, d in enumerate(documents) if i % 3 == 1][-5:]
    accepted = [document for document in documents if document["scoring"]["decision"] == "accepted"]
    assert tail("--accepted", "--last", "99") == accepted
    high = [document for document in documents if document["scoring"]["score"] >= 0.7]
    assert tail("--min-score", "0.7", "--last", "99") == high
    everything = tail("--from-beginning")
    assert sorted(everything, key=lambda document: str(document["id"])) == documents
    for more in (("--last", "1"), ("--from-beginning",)):  # the former looks back in several steps
        done = desk.run("tail", "--no-follow", "--domain", "Code", *more)
        assert done.stdout == ""
        assert done.stderr.startswith("no trace of the domain Code so far (case counts); there are: ")
        assert sorted(map(int, re.findall(r"\((\d+)\)", done.stderr))) == [8, 8, 8]


def test_dead_letters_as_json(filled: tuple[Desk, list[dict[str, Any]]]) -> None:
    desk, _ = filled
    first, second = lines(desk.run("tail", "--dead-letters", "--no-follow").stdout)
    assert (first["reason"], first["value"], first["key"]) == ("not_json", "{", "key-0")
    assert (second["reason"], second["value_base64"]) == ("not_utf8", "/w==")
    assert ["kp-error-reason", "not_utf8"] in second["headers"]


def test_it_follows_and_ends_with_ctrl_c(desk: Desk) -> None:
    before = fill(desk, 0, 2)
    with desk.start("tail", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        try:
            assert command.stdout is not None
            assert [json.loads(command.stdout.readline()) for _ in range(2)] == before
            after = fill(desk, 2, 3)  # from here on each topic's order is kept, not that of the two
            came = [json.loads(command.stdout.readline()) for _ in range(3)]
            assert sorted(came, key=lambda document: str(document["id"])) == after
            command.send_signal(signal.SIGINT)
            assert command.communicate(timeout=20) == (b"", b"")
            assert command.returncode == 0
        finally:
            command.kill()


def on_terminal(desk: Desk, columns: int, *args: str) -> list[str]:
    """Run a command on a terminal of that width; return the lines it leaves there, without colours."""
    code, output = command_on_terminal(desk.env, columns, *args)
    assert code == 0
    assert b"\x1b[32maccepted" in output or "--dead-letters" in args
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    return [line for line in text.replace("\r", "").split("\n") if line.strip()]


def test_the_table_fits_a_terminal(filled: tuple[Desk, list[dict[str, Any]]]) -> None:
    desk, documents = filled
    head, day, *rows = on_terminal(desk, 80, "tail", "--no-follow")
    assert day == "2026-04-14"
    assert head.split() == ["id", "time", "domain", "C", "N", "D", "O", "score", "decision", "nearest", "sim."]
    assert len(rows) == 10
    assert max(map(len, [head, *rows])) <= 80
    for row, document in zip(rows, documents[-10:], strict=True):
        scoring = document["scoring"]
        cells = [str(document["id"])[-8:], "08:00", document["metadata"]["task_domain"]]
        assert row.split()[:3] == cells
        assert row.split()[7:9] == [f"{scoring['score']:.3f}", scoring["decision"]]
    head, _, row, _ = on_terminal(desk, 80, "tail", "--no-follow", "--dead-letters")
    assert head.split() == ["source", "time", "reason", "message"]
    assert row.split()[:3] == ["0:0", "08:00:00", "not_json"]
    rows = on_terminal(desk, 120, "tail", "--no-follow", "--accepted", "--dead-letters", "--last", "99")
    assert "overrides" in rows[0]
    assert any("not_json" in row and " dead " in row for row in rows)
    for columns in (80, 120):
        lines = on_terminal(desk, columns, "tail", "--no-follow", "--objective")
        assert [line.strip() for line in lines[3::2]] == ["Explain"] * 10
        assert max(map(len, lines)) <= columns


def test_two_overrides_are_shown_in_full(desk: Desk) -> None:
    raw = trace_bytes(steps=["error_recovery:a", "error_recovery", "error_recovery"])
    document = desk.put(PartitionScorer(), raw)
    done = desk.run("tail", "--no-follow", "--text")
    assert "error_recovery_bonus, low_tool_diversity_penalty\n" in done.stdout
    accepted = document.replace(b"rejected", b"accepted")
    produce(desk.bootstrap, desk.topics["accepted"], [(None, accepted, (), 0, T0)])
    for columns in (107, 120):
        lines = on_terminal(desk, columns, "tail", "--no-follow")
        assert max(map(len, lines)) <= columns
        for name in ("error_recovery_bonus", "low_tool_diversity_penalty"):
            assert any(name in line for line in lines)


def test_the_table_in_a_pipe_is_neither_cut_nor_wrapped(desk: Desk) -> None:
    raw = trace_bytes(domain="a domain of more than sixteen letters", objective="long " * 60)
    desk.put(PartitionScorer(threshold=0.0), raw)
    reason = "x" * 40 + " " + "y" * 200
    source = make_record(b"{", topic=desk.name)
    letter = dead_letter(source, InvalidTrace(Reason.NOT_JSON, "", reason))
    produce(desk.bootstrap, desk.topics["dead-letter"], [(letter.key, letter.value, letter.headers, 0, T0)])
    shown = desk.run("tail", "--no-follow", "--text", "--objective").stdout.splitlines()
    assert shown[1] == "2026-04-14"
    assert "a domain of more than sixteen letters" in shown[2]
    assert shown[3].strip() == ("long " * 60).strip()
    assert len(shown) == 4
    head, _, row = desk.run("tail", "--no-follow", "--text", "--dead-letters").stdout.splitlines()
    assert head.split() == ["source", "time", "reason", "message"]
    assert row.rstrip().endswith(reason)
    both = desk.run("tail", "--no-follow", "--text", "--dead-letters", "--accepted").stdout.splitlines()
    assert any(line.startswith("0:0 ") and " dead " in line for line in both)


def test_options_that_do_not_go_together_and_missing_topics(desk: Desk) -> None:
    for options, text in {
        "--last 3 --from-beginning": "cannot be used together",
        "--dead-letters --domain code": "remove --domain",
    }.items():
        done = desk.run("tail", *options.split())
        assert done.returncode == 2
        assert text in done.stderr
    missing = desk.run("tail", KP_ACCEPTED_TOPIC="nowhere")
    assert missing.returncode == 2
    assert "topic nowhere" in missing.stderr
