"""`kp-worker verdict`, and workers whose scores follow from verdicts, on real Kafka."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.support.builders import NEVER_ACCEPTED, WELL_ROUNDED, trace_document
from tests.support.kafka_fixtures import consume_all, create_topics, wait_until
from tests.support.schemas import VALIDATORS
from tests.support.snippets import shell, snippets
from tests.support.stage import Diagnosis, Stage, Workers, documents
from tests.support.surroundings import DOCS
from worker import PartitionScorer, parse_trace
from worker.cli import cli
from worker.commands.shared.placed_verdicts import read_judged
from worker.core.changelog import RECORD_PREFIX
from worker.core.documents import RecordPlace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

CI, ANN = "c" * 40, "a" * 40
LINE = {
    "trace_id": "kp:trace:0", "agent_id": "ada", "task_domain": "d", "partition": 0, "offset": 0, "success": 1,
    "judge": "ci",
}  # fmt: skip


def stage_of(kafka: EmbeddedKafka, keys: Path, **settings: str) -> Stage:
    keys.write_text(f"ci {CI}\nann {ANN}\n")
    stage = Stage(
        kafka, KP_VERDICT_KEY_FILE=str(keys), KP_CONFIDENCE="record", KP_SESSION_TIMEOUT_SECONDS="2", **settings
    )
    stage.env["KP_JUDGED_TOPIC"] = f"{stage.name}.judged"
    create_topics(stage.bootstrap, {stage.name: 2})
    return stage


@pytest.fixture
def stage(kafka: EmbeddedKafka, tmp_path: Path) -> Stage:
    return stage_of(kafka, tmp_path / "keys")


def trace(number: int, agent: str, *, success: bool = True) -> bytes:
    document = trace_document(f"kp:trace:{number}", objective=f"Explain {number}")
    document["metadata"] |= {"agent_id": agent, "success": success}
    return json.dumps(document).encode()


def verdict(stage: Stage, lines: list[Any], **env: str) -> Result:
    file = Path(stage.env["KP_VERDICT_KEY_FILE"]).with_name("verdicts.jsonl")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return CliRunner().invoke(cli, ["verdict", str(file)], env=stage.env | env, catch_exceptions=False)


def confidences(stage: Stage) -> dict[str, dict[str, Any]]:
    return {str(it["id"]): it["scoring"]["confidence"] for it in documents(stage)}


def judged(stage: Stage) -> list[dict[str, Any]]:
    return [json.loads(record.value) for record in consume_all(stage.bootstrap, stage.env["KP_JUDGED_TOPIC"])]


def rows(stage: Stage, prefix: bytes = RECORD_PREFIX) -> int:
    records = consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog")
    last = {(record.partition, record.key): record.value for record in records}
    return sum(key.startswith(prefix) and value is not None for (_, key), value in last.items())


def test_a_topic_a_file_and_a_call_give_the_same_document(stage: Stage, workers: Workers, tmp_path: Path) -> None:
    worker = workers(stage.env).wait_ready()
    sources = [trace(n, "bob" if n % 3 else "ada", success=n != 5) for n in range(8)]
    domain = json.loads(sources[0])["metadata"]["task_domain"]
    bob = LINE | {"agent_id": "bob", "task_domain": domain}
    lines = [bob | {"trace_id": f"kp:trace:{n}", "offset": n, "success": n == 2} for n in range(3)]
    lines += [lines[2] | {"success": 0.5, "judge": "ann"}, lines[1] | {"success": 1}]
    stage.produce([(None, source, (), 0) for source in sources[:4]])
    stage.wait_committed(4)
    assert verdict(stage, lines).exit_code == 0
    stage.wait_committed(9)
    stage.produce([(None, source, (), 0) for source in sources[4:]])
    stage.wait_committed(13)
    topic = sorted(documents(stage), key=lambda it: it["scoring"]["source"]["offset"])

    traces, verdicts = tmp_path / "traces.jsonl", tmp_path / "verdicts.jsonl"
    traces.write_bytes(b"\n".join(sources))
    said = judged(stage)
    verdicts.write_text("\n".join(json.dumps(line | {"after": 4}) for line in said))
    scored = CliRunner().invoke(cli, ["score", str(traces), "--verdicts", str(verdicts)], env=stage.env)
    file = [json.loads(line) for line in scored.stdout.splitlines()]
    scorer = PartitionScorer(confidence="record")
    for number, (source, of_topic, of_file) in enumerate(zip(sources, topic, file, strict=True)):
        for it in said if number == 4 else []:
            issued = datetime.fromisoformat(it["verdict"].pop("issued_at"))
            names = [it[name] for name in ("trace_id", "agent_id", "task_domain")]
            scorer.judge(*names, **it["verdict"], issued_at=issued, offset=it["trace_offset"])
        called = scorer.score(parse_trace(source), None, 0)
        assert called.score == of_file["scoring"]["score"]
        assert json.loads(msgspec.json.encode(called.confidence)) == of_file["scoring"]["confidence"]
        del of_topic["scoring"]["source"], of_file["scoring"]["source"]
        assert of_topic == of_file
    assert [it["scoring"]["confidence"]["judged"] for it in file] == [0, 0, 0, 0, 4, 4, 0, 4]

    # What the judged topic says of each place is what the worker had there; and the records that it left are listed.
    standings = asyncio.run(read_judged(stage.settings()))
    for offset, document in zip((0, 1, 2, 3, 9, 10, 11, 12), file, strict=True):
        agent, found = document["metadata"]["agent_id"], document["scoring"]["confidence"]
        standing = standings.at(0, offset, agent, document["metadata"]["task_domain"])
        assert (standing.judged, standing.succeeded) == (found["judged"], found["succeeded"])
        assert standing.used == found["used"] or not document["metadata"]["success"]
    used = standings.at(0, 99, "bob", domain).used
    assert Diagnosis(stage.env).of("track records") == [
        ("ok", f"1: bob in {domain}: 2.5 of 4 succeeded, used {used:.4f}")
    ]
    switch = ["report", "--from-kafka", "--json", "--set", "confidence=record", "--outcome", "metadata.success"]
    found = CliRunner().invoke(cli, switch, env=stage.env)
    assert "5 verdicts read" in found.stderr
    told = json.loads(found.stdout)
    assert (told["total"]["traces"], told["outcome"]["runs"], told["outcome"]["record"]["name"]) == (8, 8, "record")
    worker.kill()


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_verdicts_count_for_the_traces_behind_them_over_a_restart(
    kafka: EmbeddedKafka, workers: Workers, tmp_path: Path, delivery: str
) -> None:
    stage = stage_of(kafka, tmp_path / "keys", KP_DELIVERY=delivery)
    worker = workers(stage.env).wait_ready()
    stage.produce([(None, trace(n, "ada"), (), n % 2) for n in range(4)])
    stage.wait_committed(4)
    first = documents(stage)
    for document in first:
        VALIDATORS["scored-trace"].validate(document)
        assert document["scoring"]["confidence"] == {"stated": 0.9, "used": 0.5, "judged": 0, "succeeded": 0.0}
    result = verdict(stage, [it | {"success": False, "judge": "ci"} for it in first])
    assert (result.exit_code, result.stderr) == (0, f"4 verdicts written to topic {stage.name}\n")
    stage.wait_committed(8)
    (profile,) = {it["scoring"]["profile"] for it in first}
    worker.wait_metric("kp_verdicts_total", 4, decision="rejected", profile=profile)
    worker.kill()

    worker = workers(stage.env).wait_ready()
    stage.produce([(None, trace(n, agent), (), 0) for n, agent in ((4, "ada"), (5, "bob"))])
    stage.produce([(None, trace(6, "ada", success=False), (), 0)])
    stage.wait_committed(11)
    found = confidences(stage)
    assert found["kp:trace:4"]["judged"] == 2
    assert found["kp:trace:4"]["used"] < found["kp:trace:5"]["used"] < 0.5
    assert found["kp:trace:6"]["used"] == found["kp:trace:6"]["stated"] == 0.9
    for value in judged(stage):
        VALIDATORS["judged"].validate(value)
        assert value["counts"]
        assert value["used"]["now"] < value["used"]["then"] == 0.5
        assert value["decision"] == "rejected"
    for record in consume_all(stage.bootstrap, stage.name):
        if record.headers:
            VALIDATORS["verdict"].validate(json.loads(record.value))
    assert rows(stage) == 2


def test_what_does_not_count_is_a_dead_letter_with_its_reason_and_can_be_redriven(
    stage: Stage, workers: Workers, tmp_path: Path
) -> None:
    off = {name: value for name, value in stage.env.items() if not name.startswith(("KP_VERDICT", "KP_CONF", "KP_JUD"))}
    worker = workers(off).wait_ready()
    stage.produce([(None, trace(0, "ada"), (), 0)])
    assert verdict(stage, [LINE]).exit_code == 0
    stage.wait_committed(2)
    worker.kill()
    other = tmp_path / "other"
    other.write_text(f"ci {'x' * 40}\nstranger {'s' * 40}\n")
    worker = workers(stage.env).wait_ready()
    assert verdict(stage, [LINE, LINE | {"judge": "stranger"}], KP_VERDICT_KEY_FILE=str(other)).exit_code == 0
    stage.wait_committed(4)
    letters = [dict(record.headers) for record in stage.outputs()["dead-letter"]]
    assert {it["kp-error-reason"] for it in letters} == {b"bad_control"}
    messages = sorted(it["kp-error-message"].decode() for it in letters)
    assert "no key of judge stranger" in messages[0]
    assert "not the signature" in messages[1]
    assert "KP_VERDICT_KEY_FILE" in messages[2]
    result = CliRunner().invoke(
        cli, ["redrive", "--execute", "--reason", "bad_control"], env=stage.env, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    stage.wait_committed(7)
    (counted,) = judged(stage)
    assert counted["trace_id"] == "kp:trace:0"


def test_wrong_lines_are_named_and_the_others_are_written(stage: Stage) -> None:
    lines = [LINE, LINE | {"judge": "nobody"}, LINE | {"partition": 2}, {"success": 1}, LINE, 7]
    result = verdict(stage, [*lines, LINE | {"topic": "traces-staging"}])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"2 verdicts written to topic {stage.name}, 5 lines wrong"
    assert ".jsonl:7: the trace was read from topic traces-staging, and the verdict would" in result.stderr
    assert ".jsonl:2: KP_VERDICT_KEY_FILE has no key of judge nobody" in result.stderr
    assert ".jsonl:3: partition 2" in result.stderr
    assert ".jsonl:6: " in result.stderr
    assert verdict(stage, [LINE], KP_VERDICT_KEY_FILE="").exit_code == 2


def test_an_id_is_enough_where_it_names_one_scored_trace(stage: Stage, workers: Workers) -> None:
    workers(stage.env).wait_ready()
    stage.produce([(None, value, (), 0) for value in (trace(0, "ada"), trace(1, "ada"), trace(1, "bob"))])
    stage.wait_committed(3)
    lines = [{"trace_id": f"kp:trace:{number}", "success": 0, "judge": "ci"} for number in (0, 1, 2)]
    result = verdict(stage, lines)
    assert result.exit_code == 1
    assert "kp:trace:1 is the id of the records " in result.stderr
    assert "kp:trace:2 is the id of no scored trace" in result.stderr
    wait_until(lambda: len(judged(stage)) == 1)
    (counted,) = judged(stage)
    assert (counted["trace_id"], counted["agent_id"], counted["counts"]) == ("kp:trace:0", "ada", True)


def test_a_verdict_is_written_as_soon_as_its_line_is_there(stage: Stage) -> None:
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with stage.start("verdict", "-", **pipes) as command:
        try:
            command.stdin.write(json.dumps(LINE).encode() + b"\n")
            command.stdin.flush()
            assert wait_until(lambda: len(consume_all(stage.bootstrap, stage.name)) == 1, 60)
            command.send_signal(signal.SIGINT)
            assert command.wait(30) == 130
            assert command.stderr.read() == b"interrupted after 1 verdict\n"
        finally:
            command.kill()


@pytest.mark.skipif(shutil.which("jq") is None, reason="the page's commands need jq")
def test_the_three_judges_of_the_page(stage: Stage, workers: Workers, tmp_path: Path) -> None:
    own_id, ci = (each.text for each in snippets("tests/kafka/test_verdicts.py"))
    examples = ("review.sh", "thumbs.py", "send_thumbs.sh")
    reviewer, thumb, loop = ((DOCS / "examples" / name).read_text("utf-8") for name in examples)
    (tmp_path / "keys").write_text("".join(f"{judge} {judge * 20}\n" for judge in ("ci", "reviewer", "users")))
    workers(stage.env).wait_ready()
    sources = [trace(n, "ada") for n in range(4)]
    sources[0] = sources[0].replace(b"Explain", b"\\u001b[2J\\u009b6n\\u202eExplain")
    sent = stage.produce([(None, source, (), n % 2) for n, source in enumerate(sources)])
    (tmp_path / "run.jsonl").write_bytes(trace(9, "bob"))

    def run(line: str, env: dict[str, str] = stage.env) -> str:
        done = shell(line, env, tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr

    run(f"{own_id}echo $TRACES > id")
    stage.wait_committed(5)
    run(f"TRACES=$(cat id)\nSTATUS=0\n{ci}")
    run(f"TRACES='kp:trace:2 kp:trace:3'\nSTATUS=1\n{ci}")
    shown = run(f"({reviewer}) <<< $'y\\ny\\ny\\ny\\ny'")
    assert " [2J 6n Explain 0" in shown
    assert not set(shown) & {"\x1b", "\x9b", "\u202e"}
    names: dict[str, Any] = {}
    exec(thumb, names)
    quick = loop.replace("sleep 60", "sleep 0.2 && [ ! -e done ]").replace(
        "&& rm sending", "&& touch done && rm sending"
    )
    with contextlib.chdir(tmp_path):
        for n, (source, place) in enumerate(zip(sources, sent, strict=True)):
            names["thumb"](json.loads(source), RecordPlace("", *place), n == 0)
    away = stage.env | {"KP_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    assert "127.0.0.1:1" in shell(f"timeout 6 bash -c '{quick}'", away, tmp_path).stderr
    assert len((tmp_path / "sending.jsonl").read_text().splitlines()) == 4, "no click is lost"
    run(f"timeout 60 bash -c '{quick}'; [ -e done ]")
    stage.wait_committed(5 + 1 + 2 + 5 + 4)
    found = {(it["verdict"]["judge"], it["trace_id"]): it["verdict"]["success"] for it in judged(stage)}
    own = (tmp_path / "id").read_text().strip()
    ids = [f"kp:trace:{n}" for n in range(4)]
    assert found == {
        ("ci", own): 1, ("ci", "kp:trace:2"): 0, ("ci", "kp:trace:3"): 0,
        **{("reviewer", each): 1 for each in [*ids, own]},
        **{("users", each): int(each == "kp:trace:0") for each in ids},
    }  # fmt: skip


def verdict_checks(stage: Stage, **env: str) -> list[dict[str, Any]]:
    return [it for it in Diagnosis(stage.env | env).findings if it["check"] == "verdicts"]


def test_the_doctor_tells_of_spread_agents_and_of_what_the_switch_would_accept(
    kafka: EmbeddedKafka, workers: Workers, tmp_path: Path
) -> None:
    stage = stage_of(kafka, tmp_path / "keys", KP_THRESHOLD="0.3")
    stage.env["KP_CONFIDENCE"] = "stated"
    workers(stage.env).wait_ready()
    stage.produce([(None, trace(n, "ada"), (), n % 2) for n in range(4)])
    stage.wait_committed(4)
    assert verdict(stage, [it | {"success": False, "judge": "ci"} for it in documents(stage)]).exit_code == 0
    stage.wait_committed(8)
    spread, switch = verdict_checks(stage)
    assert spread["level"] == "warn"
    assert "1 of 1 agents have traces in several partitions" in spread["message"]
    assert switch["message"].startswith("4 verdicts count; with KP_CONFIDENCE=record ")
    assert "of the last 4 traces would be accepted, now 4 are" in switch["message"]
    *_, switch = verdict_checks(stage, KP_CONFIDENCE="record")
    assert "--verdicts SHARE compares your weights" in switch["message"]


def test_the_doctor_tells_of_judges_that_see_accepted_traces_alone(
    kafka: EmbeddedKafka, workers: Workers, tmp_path: Path
) -> None:
    stage = stage_of(kafka, tmp_path / "keys", KP_THRESHOLD="0.3")
    workers(stage.env).wait_ready()
    documents_ = [trace_document(f"kp:trace:{n}", steps=WELL_ROUNDED if n % 2 else NEVER_ACCEPTED) for n in range(24)]
    stage.produce([(None, json.dumps(document).encode(), (), 0) for document in documents_])
    stage.wait_committed(24)
    accepted = [it for it in documents(stage) if it["scoring"]["decision"] == "accepted"]
    assert verdict(stage, [it | {"success": True, "judge": "ci"} for it in accepted]).exit_code == 0
    stage.wait_committed(24 + len(accepted))
    (warning,) = [it for it in verdict_checks(stage) if it["level"] == "warn"]
    assert "12 of the last 12 accepted traces have a verdict, and 0 of the last 12 rejected ones" in warning["message"]
