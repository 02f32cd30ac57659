"""Verdicts in the commands that compute scores: a file and a call agree, and a score is computed again with `used`."""

import io
import json
import random
import statistics
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tests.support.builders import T0, random_trace_bytes
from tests.support.reports import changed
from worker import PartitionScorer, parse_trace
from worker.cli import cli
from worker.commands.doctor.traces import judged_shares, late_judges, switch_to_record
from worker.commands.report.numbers import Asked, Traces
from worker.commands.score.lines import score_lines
from worker.commands.shared.explanation import agrees, explain_trace
from worker.commands.shared.placed_verdicts import (
    PlacedVerdict,
    Standings,
    in_order,
    judged_verdict,
    read_verdicts,
)
from worker.config import load
from worker.core.documents import ScoredDocument
from worker.core.records import SourceRecord
from worker.core.track_record import TrackRecord
from worker.core.verdicts import Ruling, issued_ms, judged_record, make_verdict

START = datetime(2026, 1, 1, tzinfo=UTC)


def run(command: str, *arguments: str, **env: str) -> Any:
    return CliRunner().invoke(cli, [command, *arguments], env={"KP_EMBEDDER": "none", **env})


def traces(rng: random.Random, count: int) -> list[bytes]:
    made = []
    for number in range(count):
        document = json.loads(random_trace_bytes(rng, number, T0 + number))
        document["metadata"] |= {"agent_id": rng.choice(["ada", "bob"]), "success": rng.random() < 0.8}
        document["id"] = f"kp:trace:{number}"
        if rng.random() < 0.1:
            document["outcome"]["evaluated"] = True
        made.append(json.dumps(document).encode())
    return made


def line(trace: bytes, rng: random.Random, after: int) -> dict[str, Any]:
    document = json.loads(trace)
    success = rng.choice([True, False, 0.25])
    return {
        "trace_id": document["id"], "agent_id": document["metadata"]["agent_id"], "after": after, "success": success,
        "task_domain": document["metadata"]["task_domain"], "judge": rng.choice(["ci", "ann"]), "partition": 0,
    }  # fmt: skip


def placed(lines: list[dict[str, Any]]) -> list[PlacedVerdict]:
    return read_verdicts(io.BytesIO("\n".join(map(json.dumps, lines)).encode()), "v", 10**6)


def file_scored(sources: list[bytes], verdicts: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    output = io.BytesIO()
    settings = load(confidence="record", **fields)
    score_lines([io.BytesIO(b"\n".join(sources))], output, None, settings, None, verdicts=placed(verdicts))
    return [json.loads(it) for it in output.getvalue().splitlines()]


def test_a_file_with_verdicts_is_scored_as_a_call_scores_it(seed: int) -> None:
    rng = random.Random(seed)
    sources = traces(rng, 40)
    verdicts = [line(rng.choice(sources[:after]), rng, after) for after in sorted(rng.choices(range(1, 41), k=30))]
    rng.shuffle(verdicts)  # the order of lines does not matter where places differ
    verdicts.sort(key=lambda it: it["after"])
    documents = file_scored(sources, verdicts)
    scorer, waiting = PartitionScorer(confidence="record"), list(verdicts)
    for offset, (source, document) in enumerate(zip(sources, documents, strict=True)):
        while waiting and waiting[0]["after"] <= offset:
            it = waiting.pop(0)
            scorer.judge(it["trace_id"], it["agent_id"], it["task_domain"], it["success"], judge=it["judge"])
        trace = parse_trace(source)
        expected = scorer.score(trace, None, T0 + offset)
        assert document["scoring"]["score"] == expected.score
        assert document["scoring"]["confidence"] == {
            name: getattr(expected.confidence, name) for name in ("stated", "used", "judged", "succeeded")
        }


def test_without_a_place_all_lines_are_behind_the_verdicts() -> None:
    source = traces(random.Random(1), 2)
    verdicts = [line(source[0], random.Random(1), 0) | {"success": False} for _ in range(1)]
    del verdicts[0]["after"], verdicts[0]["partition"]
    assert file_scored([source[0]], verdicts)[0]["scoring"]["confidence"]["judged"] == 1
    document = file_scored([source[0]], [])[0] | {"success": True, "judge": "ci"}
    assert file_scored([source[0]], [document])[0]["scoring"]["confidence"]["succeeded"] == 1


def test_the_command_takes_verdicts_and_says_what_is_wrong(tmp_path: Path) -> None:
    source = traces(random.Random(2), 1)[0]
    file, verdicts = tmp_path / "traces.jsonl", tmp_path / "verdicts.jsonl"
    file.write_bytes(source)
    verdicts.write_text(json.dumps(line(source, random.Random(2), 0)) + "\n\n")
    result = run("score", str(file), "--verdicts", str(verdicts), "--set", "confidence=record")
    assert (result.exit_code, json.loads(result.stdout)["scoring"]["confidence"]["judged"]) == (0, 1)
    assert run("score", str(file), "--verdicts", str(verdicts)).exit_code == 2
    assert run("score", str(file), "--verdicts", str(file), "--set", "confidence=record").exit_code == 2
    verdicts.write_text(
        '{"success": true}\n[]\n{"after": -1}\n{"success": 2, "judge": "ci", "trace_id": "a"}\nnot json\n'
    )
    result = run("score", str(file), "--verdicts", str(verdicts), "--set", "confidence=record")
    assert (result.exit_code, result.stdout) == (1, "")
    for number in range(1, 6):
        assert f"verdicts.jsonl:{number}: " in result.stderr


# -- what track records say at each place


def test_standings_are_those_of_the_record_at_each_place(seed: int) -> None:
    rng = random.Random(seed)
    sources = traces(rng, 30)
    verdicts = [line(rng.choice(sources), rng, rng.randrange(30)) for _ in range(40)]
    ordered = in_order(it._replace(partition=rng.randrange(2)) for it in placed(verdicts))
    standings = Standings(ordered)
    for partition in range(2):
        for offset in range(30):
            record = TrackRecord()
            for number, each in enumerate(it for it in ordered if it.partition == partition and it.after <= offset):
                record.add(each.verdict, issued_ms(each.verdict, None), number)
            for agent in ("ada", "bob", "eve"):
                for domain in ("finance", "code"):
                    assert standings.at(partition, offset, agent, domain) == record.standing(agent, domain)


def judged_topic_record(verdict: Any, offset: int, *, counts: bool = True) -> bytes:
    record = SourceRecord("traces", verdict.partition, offset, None, None, b"")
    return judged_record(record, Ruling(verdict, counts, 0.5)).value or b""


def test_a_record_of_the_judged_topic_has_its_own_place_and_issue_time() -> None:
    fields = {
        "trace_id": "a", "agent_id": "ada", "task_domain": "code", "partition": 3, "offset": 5, "success": 0.5,
        "judge": "ci",
    }  # fmt: skip
    verdict = make_verdict(fields, topic="traces", topic_id="a" * 22, issued_at=START + timedelta(seconds=1))
    value = judged_topic_record(verdict, 7)
    judged = judged_verdict(value)
    assert (judged.partition, judged.after, judged.verdict.success, judged.verdict.issued_at) == (
        3, 7, 0.5, verdict.issued_at,
    )  # fmt: skip
    assert (judged.verdict.offset, Standings([judged]).judged) == (5, {(3, 5)})
    of_earlier = judged_verdict(value.replace(b'"trace_offset":5,', b""))
    assert (of_earlier.verdict.offset, Standings([of_earlier]).judged) == (None, {(3, "a")})
    assert judged_verdict(judged_topic_record(verdict, 7, counts=False)) is None
    assert placed([json.loads(value)]) == [judged._replace(partition=0, after=0)], "in a file of verdicts"
    with pytest.raises(ValueError, match="trace_id"):
        judged_verdict(b"{}")


# -- a score is computed again with `used`


def documents_by_record(rng: random.Random) -> list[bytes]:
    sources = traces(rng, 30)
    verdicts = [line(rng.choice(sources[:after]), rng, after) for after in range(1, 30)]
    return [json.dumps(it).encode() for it in file_scored(sources, verdicts)]


def test_explain_reproduces_a_score_by_the_record(seed: int) -> None:
    settings = load()
    for document in documents_by_record(random.Random(seed)):
        explained, trace = explain_trace(document, settings), json.loads(document)
        assert agrees(explained)
        assert explained.score == trace["scoring"]["score"]
        assert explained.components["outcome_confidence"].value == trace["scoring"]["components"]["outcome_confidence"]
        assert explained.counts.confidence == explained.confidence.used == trace["scoring"]["confidence"]["used"]
        claims = trace["metadata"]["success"] and not trace["outcome"].get("evaluated")
        assert ("prior" in (explained.used_from or "")) == claims
    text = CliRunner().invoke(cli, ["explain", "-", "--text"], input=document).output
    assert "verdicts on the agent in this domain" in text


def test_report_keeps_the_used_confidence_and_takes_another_where_the_settings_name_one(tmp_path: Path) -> None:
    documents = documents_by_record(random.Random(5))
    file = tmp_path / "scored.jsonl"
    file.write_bytes(b"\n".join(documents))

    def scores(*options: str) -> dict[str, tuple[float, float]]:
        result = run("report", str(file), "--json", "--set", "threshold=0", *options)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert report["inconsistent"]["count"] == 0
        return {it["id"]: (it["before"]["score"], it["after"]["score"]) for it in report["changes"]["decisions"]}

    for options in ((), ("--set", "confidence=record")):
        assert all(before == after for before, after in scores(*options).values())
    plain = {it["id"]: it for it in map(json.loads, documents)}
    stated = scores("--set", "confidence=stated")
    assert len(stated) > 20
    for identity, (_, after) in stated.items():
        document = {name: value for name, value in plain[identity].items() if name != "scoring"}
        assert after == PartitionScorer().score(parse_trace(json.dumps(document).encode()), None, 0).score


def test_report_foresees_the_switch_exactly(seed: int) -> None:
    rng = random.Random(seed)
    sources = traces(rng, 60)
    verdicts = [line(rng.choice(sources[:after]), rng, after) for after in range(1, 60)]
    some = file_scored(sources, verdicts)[0]["scoring"]  # one profile has a threshold of its own: a score that occurs
    thresholds: dict[str, Any] = {"threshold": 0.6, "profiles": {some["profile"]: {"threshold": some["score"]}}}
    by_record = file_scored(sources, verdicts, **thresholds)
    output = io.BytesIO()
    score_lines([io.BytesIO(b"\n".join(sources))], output, None, load(**thresholds), None)
    stated = output.getvalue().splitlines()
    standings = Standings(placed(verdicts))
    settings = load(**thresholds, confidence="record")
    rescored = Traces(settings, rescore=True, asked=Asked("x_won"), standings=standings)
    for number, document in enumerate(stated):
        rescored.add(changed(document, "x_won", number % 3 == 0), "")
    report = rescored.report("x")
    accepted, expected = (
        sum(it["scoring"]["decision"] == "accepted" for it in documents)
        for documents in (map(json.loads, stated), by_record)
    )
    assert (report.total.before.accepted, report.total.after.accepted) == (accepted, expected)
    scores = sorted(it["scoring"]["score"] for it in by_record)
    assert report.total.after.quantiles[2] == pytest.approx(statistics.median(scores))
    kept = report.changes.same_share
    if accepted:
        assert sum(score >= kept for score in scores) >= accepted
        assert sum(score > kept + 0.01 for score in scores) <= accepted
    stated.append(changed(stated[0], "scoring.components.novelty", 7))  # another program's
    documents = [msgspec.json.decode(document, type=ScoredDocument) for document in stated]
    assert switch_to_record(documents, standings, load(**thresholds)) == (accepted, expected, kept)

    # Every run claims success; its confidence by the record is that of the documents that were scored so.
    squares = []
    for number, source in enumerate(map(json.loads, sources)):
        standing = standings.at(0, number, source["metadata"]["agent_id"], source["metadata"]["task_domain"])
        confidence = by_record[number]["scoring"]["confidence"]
        if source["metadata"]["success"] and not source["outcome"].get("evaluated"):
            assert confidence["used"] == standing.used
        squares.append((standing.used - (number % 3 == 0)) ** 2)
    assert report.outcome.record.brier.value == pytest.approx(statistics.mean(squares), abs=1e-4)


def test_the_record_needs_verdicts(tmp_path: Path) -> None:
    output, file = io.BytesIO(), tmp_path / "scored.jsonl"
    score_lines([io.BytesIO(b"\n".join(traces(random.Random(1), 3)))], output, None, load(), None)
    file.write_bytes(output.getvalue())
    result = run("report", str(file), "--set", "confidence=record")
    assert result.exit_code == 1
    assert "confidence=record needs verdicts, and these traces were scored without: read the topics" in result.stderr


def test_a_document_whose_stated_confidence_is_not_its_own_is_left_out(tmp_path: Path) -> None:
    document = documents_by_record(random.Random(1))[0]
    file = tmp_path / "scored.jsonl"
    file.write_bytes(changed(document, "scoring.confidence.stated", 0.123))
    result = run("report", str(file), "--json", "--set", "threshold=0.7")
    assert "confidence.stated is 0.123" in result.stderr


# -- whether judges' clocks are right, and accepted and rejected traces are judged alike


@pytest.mark.parametrize(
    ("late", "warns"),
    [
        ([86_400.0] * 20, True),
        ([None] * 10 + [86_400.0] * 10, True),
        ([None] * 11 + [86_400.0] * 9, False),  # copies, perhaps
        ([86_400.0] * 4, False),
        ([1.0] * 20, False),
        ([None] * 20, False),
    ],
)
def test_doctor_warns_of_a_judge_whose_clock_is_slow(late: list[float | None], warns: bool) -> None:
    warnings = [it.message for it in late_judges({"ci": late, "ann": [None]})]
    assert len(warnings) == warns
    for message in warnings:
        assert f"of the last {len(late)} verdicts of judge ci do not count: they were issued 24.0 hours" in message


@pytest.mark.parametrize(
    ("accepted", "rejected", "warns"),
    [
        ((20, 100), (0, 100), True),
        ((2, 100), (30, 100), True),
        ((5, 5), (0, 5), True),  # five of ten, and just those
        ((20, 100), (11, 100), False),  # less than twice as often
        ((2, 100), (0, 100), False),  # by chance, perhaps
        ((1, 2), (0, 2), False),
        ((0, 100), (0, 100), False),
        ((10, 10), (0, 0), False),  # there is nothing to compare with
    ],
)
def test_doctor_warns_where_one_decision_is_judged_more_often(
    accepted: tuple[int, int], rejected: tuple[int, int], warns: bool
) -> None:
    documents, judged = [], set[tuple[int, int | str]]()
    for decision, (with_verdict, number) in (("accepted", accepted), ("rejected", rejected)):
        for n in range(number):
            trace_id = f"{decision}-{n}".ljust(300, "x")  # verdicts have ids that are cut
            source = SimpleNamespace(partition=n % 3, offset=n + 1000 * (decision == "rejected"))
            documents.append(SimpleNamespace(id=trace_id, scoring=SimpleNamespace(source=source, decision=decision)))
            if n < with_verdict:
                judged.add((n % 3, n if decision == "accepted" else trace_id[:256]))
    findings = list(judged_shares(documents, judged))
    assert len(findings) == warns
    for finding in findings:
        shares = f"{accepted[0]} of the last {accepted[1]} accepted traces have a verdict, and {rejected[0]}"
        assert shares in finding.message
