"""`kp-worker explain` of what is on the topics: by id, by its beginning, and by place."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.kafka_fixtures import produce
from tests.support.processes import run_command
from tests.support.stage import Desk
from tests.support.surroundings import environment
from tests.support.terminal import on_terminal
from worker.core.scorer import PartitionScorer
from worker.core.trace import Reason
from worker.lab.broker.embedded_kafka import EmbeddedKafka

IDS = ("kp:trace:aaaa1111-1", "kp:trace:bbbb2222-1", "kp:trace:bbbb2222-2", "kp:trace:cccc3333-1")
AGAIN = 9
"""Source offset at which the first trace came a second time."""


def scored(desk: Desk, scorer: PartitionScorer, trace_id: str, offset: int) -> dict[str, Any]:
    """Put one scored trace on its topic; return its document."""
    raw = trace_bytes(trace_id, objective=f"About {trace_id}", created_at=T0 + offset)
    document: dict[str, Any] = json.loads(desk.put(scorer, raw, offset, [1.0, offset]))
    return document


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    return Desk(kafka)


@pytest.fixture(scope="module")
def documents(desk: Desk) -> list[dict[str, Any]]:
    scorer = PartitionScorer(dimensions=2)
    found = [scored(desk, scorer, trace_id, offset) for offset, trace_id in enumerate(IDS)]
    desk.letters([(Reason.INVALID_VALUE, b'{"id": "kp:trace:dead-1"}')], first_offset=4)
    desk.letters([(Reason.NOT_JSON, b'{"id": "kp:trace:dead-2", cut')], first_offset=5)
    return [*found, scored(desk, scorer, IDS[0], AGAIN)]


def explain(desk: Desk, *args: str) -> dict[str, Any]:
    done = desk.run("explain", *args)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("target", [IDS[1], "bbbb2222-1", "0:1", "SOURCE:0:1", "SOURCE/0/1"])
def test_all_names_of_a_trace_lead_to_what_is_stored(target: str, desk: Desk, documents: list[dict[str, Any]]) -> None:
    explained, scoring = explain(desk, target.replace("SOURCE", desk.name)), documents[1]["scoring"]
    assert (explained["id"], explained["score"], explained["decision"]) == (
        IDS[1], scoring["score"], scoring["decision"],
    )  # fmt: skip
    assert explained["nearest"] == scoring["nearest"]
    assert explained["source"] == {"topic": desk.name, "partition": 0, "offset": 1}
    assert (explained["created_at"], explained["stream_time"]) == (
        documents[1]["metadata"]["created_at"], scoring["stream_time"],
    )  # fmt: skip
    assert explained["record_time"] == "2026-04-14T08:00:01.000Z"
    place = ":".join(str(explained["record"][name]) for name in ("topic", "partition", "offset"))
    assert explain(desk, place) == explained


def test_the_newest_of_several_is_explained_and_the_others_are_named(
    desk: Desk, documents: list[dict[str, Any]]
) -> None:
    explained = explain(desk, IDS[0])
    assert explained["source"]["offset"] == AGAIN
    assert explained["score"] == documents[-1]["scoring"]["score"]
    [also] = explained["also"]
    assert explain(desk, also)["source"]["offset"] == 0


def test_an_explanation_leads_to_the_nearest_trace(desk: Desk, documents: list[dict[str, Any]]) -> None:
    nearest = documents[1]["scoring"]["nearest"]["id"]
    text = on_terminal(desk.env, "explain", IDS[1]).text
    assert f"kp-worker explain {nearest}" in text
    assert "About kp:trace:bbbb2222-1" in text
    assert f"source       {desk.name}:0:1" in text


@pytest.mark.usefixtures("documents")
def test_the_beginning_of_several_ids_lists_them(desk: Desk) -> None:
    done = desk.run("explain", "bbbb2222")
    assert (done.returncode, done.stdout) == (1, "")
    first, *listed = done.stderr.splitlines()
    assert "bbbb2222 is the beginning of 2 trace ids" in first
    assert listed == [f"  kp-worker explain {IDS[2]}", f"  kp-worker explain {IDS[1]}"]


@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize(
    ("target", "reason", "partition"),
    [("dead-1", "invalid_value", 0), ("kp:trace:dead-2", "not_json", 1), ("1:5", "not_json", 1)],
)
def test_a_dead_letter_says_why_and_how_it_is_sent_again(
    target: str, reason: str, partition: int, desk: Desk, tmp_path: Path
) -> None:
    letter = explain(desk, target)
    assert (letter["reason"], letter["message"]) == (reason, f"broken for a test: {reason}")
    text = desk.run("explain", target, "--text").stdout
    assert f"broken for a test: {reason}" in text
    assert f"{desk.topics['dead-letter']}:{partition}:0" in text
    to_file, to_source = (line.split()[1:] for line in text.splitlines() if line.startswith("kp-worker redrive "))
    assert to_source == ["redrive", "--partition", str(partition), "--offset", "0", "--execute"]
    written = tmp_path / to_file[to_file.index("--to-file") + 1]
    to_file[to_file.index("--to-file") + 1] = str(written)
    assert desk.run(*to_file).returncode == 0
    assert json.loads(written.read_bytes())["reason"] == reason
    dry = desk.run(*to_source[:-1])
    assert (dry.returncode, reason in dry.stdout + dry.stderr) == (0, True)


@pytest.mark.usefixtures("documents")
def test_a_printed_command_needs_no_more_than_its_text(desk: Desk) -> None:
    """Run with options instead of variables; the commands are run as printed, without any variable."""
    settings = {name: value for name, value in desk.env.items() if name.startswith("KP_")}
    given = [f"--set={name.removeprefix('KP_').lower()}={value}" for name, value in settings.items()]
    text = desk.run("explain", IDS[1], "--text", *given).stdout
    printed = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("kp-worker explain ")]
    assert printed
    for _, *command in printed:
        assert run_command("worker", command, environment()).returncode == 0


@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nobody", "SOURCE.accepted: 1 record, back to 2026-04-14T08:00:00.000Z"),
        ("nobody", "SOURCE.dead-letter: 2 records"),
        ("0:77", "Partition 0 of SOURCE ends before offset 0: nothing is published there yet"),
        ("7:0", "Topic SOURCE has no partition 7, only 0 to 1"),
        ("SOURCE.accepted:0:99", "partition 0 of SOURCE.accepted has no offset 99, only 0 to"),
        ("SOURCE.accepted:1:0", "partition 1 of SOURCE.accepted is empty"),
        ("SOURCE.rejected:5:0", "topic SOURCE.rejected has no partition 5, only 0 to 1"),
    ],
)
def test_what_is_not_found_says_where_was_searched(target: str, words: str, desk: Desk) -> None:
    done = desk.run("explain", target.replace("SOURCE", desk.name))
    assert (done.returncode, done.stdout) == (1, "")
    assert words.replace("SOURCE", desk.name) in done.stderr


def test_a_trace_far_back_is_found(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    first = scored(desk, PartitionScorer(dimensions=2), IDS[0], 0)
    foreign = [(None, b'{"id": "kp:trace:other"}', (), 0, T0) for _ in range(6000)]
    produce(desk.bootstrap, desk.topics["accepted"], foreign)
    assert explain(desk, IDS[0])["score"] == first["scoring"]["score"]
    done = desk.run("explain", "other")
    assert "6,001 records" in done.stderr, "what the worker did not write is not a trace of ours"


def test_topics_that_are_missing_and_brokers_that_are_away(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    missing = desk.run("explain", "nobody", KP_REJECTED_TOPIC="nowhere")
    assert missing.returncode == 1
    assert "nowhere: there is no such topic" in missing.stderr
    away = desk.run("explain", "nobody", KP_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert away.returncode == 2
    assert "no Kafka broker answers" in away.stderr
    assert "there is no file nobody, so it was taken for a trace id" in away.stderr
