"""A secret in every place that an agent fills, and a search for it in all that comes out anywhere.

docs/redaction.md (What remains) says where the original stays. All else is searched: topics, logs, metrics, pages,
spans, what commands print, and the registry; for the secret as it is, in escapes, in base64 and in hex.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from tests.support import spans
from tests.support.builders import NEVER_ACCEPTED, WELL_ROUNDED, trace_document
from tests.support.contribute import accepted_document
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce, wait_until
from tests.support.registry import RegistryThread
from tests.support.servers import Collector
from tests.support.sessions import VALUES, claude_line, claude_request
from tests.support.stage import Desk, Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka

WORD = b"Kanarienv"
"""Part of each secret; escapes begin behind it."""
KEY = "ghp_" + (3 * "Kanarienvogel")[:36]
TEXT = f"see {KEY} and postgres://ada:Kanarienvögel-77@db.example/app there"
AGENT = f"agent {KEY}"


def _in_base64(shift: int) -> bytes:
    """Return the characters that the word has in base64, whatever stands around it, `shift` bytes behind a group."""
    return base64.b64encode(bytes(shift) + WORD)[-(-shift * 4 // 3) : (shift + len(WORD)) * 4 // 3]


SOUGHT = re.compile(b"|".join([b"(?i:%s|%s)" % (WORD, WORD.hex().encode()), *map(_in_base64, range(3))]))


def leaks(*shown: bytes | str | None) -> list[bytes]:
    """Return each secret that is shown, with what stands around it."""
    raw = [each.encode() if isinstance(each, str) else each or b"" for each in shown]
    return [each[max(0, it.start() - 80) : it.end() + 20] for each in raw for it in SOUGHT.finditer(each)]


def trace(number: int, steps: Any = WELL_ROUNDED, **more: Any) -> dict[str, Any]:
    """Return a document with the secret in each of its texts and names."""
    document = trace_document(f"kp:trace:{number}", objective=TEXT, domain=TEXT, steps=steps)
    document["metadata"] |= {"agent_id": AGENT, "framework": TEXT, "validated_by": [TEXT], "visibility": "network"}
    document["metadata"]["privacy_level"] = "aggregated"
    document["task"]["input_schema"] = {TEXT: [TEXT]}
    document["steps"][0] |= {"content": TEXT, "output_summary": TEXT, "input": {TEXT: [{"deep": TEXT}], "key": KEY}}
    document["steps"][-1]["tool"] = {"name": TEXT, "mcp_server": TEXT, "input": {"file_path": f"/srv/{KEY}/{KEY}.py"}}
    document["outcome"]["result_summary"] = TEXT
    document["knowledge_graph_delta"] = {"entities": [{"name": TEXT, "type": TEXT}], "relationships": []}
    return document | {TEXT: {TEXT: TEXT}, "cwd": f"/srv/{KEY}"} | more


def broken() -> list[bytes]:
    """Return records that are no traces, with the secret at the broken place."""
    good = trace(9)
    wrong: list[Any] = [
        {**good, "steps": [{"step_id": 0, "type": KEY}]},
        {**good, "metadata": {**good["metadata"], "created_at": KEY}},
        {**good, "outcome": {"result_summary": "", "confidence": KEY}},
        {**good, "@context": KEY},
        {**good, "task": {"objective": [KEY]}},
        {**good, "id": {KEY: 1}},
        {KEY: KEY},
        KEY,
    ]
    cut = json.dumps(good)[:-3].encode()
    return [*(json.dumps(each).encode() for each in wrong), cut, cut + b"\xff", b"\x80" + cut]


def run_of_spans() -> bytes:
    """Return a run as spans, with the secret in messages, calls, results and names."""
    run = spans.run_spans(1)
    for each in run:
        each["name"] += f" {KEY}"
        each["attributes"] = {
            name: value.replace("Do task 1.", TEXT).replace("look", KEY).replace("seen 0 ", TEXT)
            for name, value in each["attributes"].items()
        } | {"gen_ai.agent.name": AGENT}
    return spans.as_json(run)


def pages(process: WorkerProcess) -> list[str]:
    return [process.get(path)[1] for path in ("/metrics", "/readyz", "/healthz", "/", "/status.json")]


def stopped(process: WorkerProcess) -> list[dict[str, Any]]:
    """Stop a process; return its log, each line of which is an event."""
    process.finish()
    return [json.loads(line) for line in process.log().splitlines()]


COMMANDS = (
    ("tail", "--no-follow", "--from-beginning"),
    ("tail", "--no-follow", "--text", "--objective"),
    ("explain", "kp:trace:0", "--text"),
    ("explain", "kp:trace:2", "--json"),
    ("report", "--from-kafka"),
    ("report", "--from-kafka", "--json"),
    ("doctor",),
    ("topics",),
)


def test_what_a_worker_redacts_is_shown_nowhere(kafka: EmbeddedKafka, workers: Workers, tmp_path: Path) -> None:
    with RegistryThread() as registry, Collector() as spy:
        stage = Stage(
            kafka,
            KP_REDACT="all", KP_REDACT_RULES="strict", KP_STATUS_PAGE="true", KP_STATUS_TEXTS="true",
            KP_LOG_LEVEL="debug", KP_LOG_FORMAT="json", KP_LATENCY_BUDGET_SECONDS="0.000001",
            KP_REGISTRY_URL=registry.url, KP_REGISTRY_KEY=registry.key, KP_ASSEMBLE_GRACE_SECONDS="1",
            **spy.settings, **spans.SETTINGS,
        )  # fmt: skip
        stage.env["KP_SPANS_TOPIC"] = f"{stage.name}.spans"
        worker = workers(stage.env, (), "tests.support.crash_worker").wait_ready()
        assemble = workers(stage.env, ("assemble",)).wait_ready()
        contribute = workers(stage.env, ("contribute",)).wait_ready()
        produce(kafka.bootstrap_servers, stage.env["KP_SPANS_TOPIC"], [(KEY.encode(), run_of_spans())])
        good = [trace(0), trace(1), trace(2, NEVER_ACCEPTED)]
        own = [("note", KEY.encode()), (KEY, b"")]
        stage.produce([(KEY.encode(), json.dumps(each).encode(), own, 0) for each in good])
        stage.wait_committed(len(good) + 1)
        worker.wait_metric("kp_records_consumed_total", len(good) + 1)
        shown = pages(worker)
        letters = [(KEY.encode(), each, own, 0) for each in 3 * broken()]
        stage.produce(letters)
        stage.wait_committed(len(good) + 1 + len(letters))
        outputs = stage.outputs()
        for arguments in COMMANDS:
            done = stage.run(*arguments)
            assert done.returncode == 0, (arguments, done)
            shown += [done.stdout, done.stderr]
        documents = [json.dumps(accepted_document("kp:trace:raw") | trace(10)), '{"no": "trace", ' + TEXT]
        rows = [(KEY.encode(), each.encode(), own, 0) for each in documents]
        produce(kafka.bootstrap_servers, f"{stage.name}.accepted", rows)
        assert wait_until(lambda: "kp:trace:10" in registry.store.entries), contribute.log()
        shown += [*pages(assemble), *pages(contribute), json.dumps(registry.store.units(), ensure_ascii=False)]

        results = outputs["accepted"] + outputs["rejected"]
        assert all(outputs.values())
        assert len(results) == len(good) + 1
        shown += [each.value for each in results]
        assert {json.loads(each.value)["scoring"]["redactions"].keys() >= {"api_key"} for each in results} == {True}
        receipts = consume_all(kafka.bootstrap_servers, f"{stage.name}.accepted.contributed")
        shown += [part for each in receipts for part in (each.key, each.value)]
        assert wait_until(lambda: consume_all(kafka.bootstrap_servers, f"{stage.name}.accepted.refused"))
        refused = consume_all(kafka.bootstrap_servers, f"{stage.name}.accepted.refused")
        shown += [str(part) for each in refused for part in (each.key, each.value, each.headers)]
        entries = consume_all(kafka.bootstrap_servers, f"{stage.name}-novelty-changelog")
        assert len(entries) >= len(results)
        shown += [part.replace(AGENT.encode(), b"") for each in entries for part in (each.key, each.value or b"")]
        logs = [event for process in (worker, assemble, contribute) for event in stopped(process)]
        shown += [json.dumps(each) for each in logs if each["level"] != "debug"]
        assert len(spy.spans) == len(good) + 1 + len(letters)
        shown += [str(each) for each in spy.spans]
    assert not leaks(*shown)
    # What stays stays whole: a record's key and headers, and the records that could not be processed.
    assert all(
        each.key == KEY.encode() and [*each.headers][:2] == own for each in results if b"kp:trace:0" in each.value
    )
    assert sorted(each.value for each in outputs["dead-letter"]) == sorted(each[1] for each in letters)
    at_debug = [json.dumps(each) for each in logs if each["level"] == "debug"]
    assert [each for each in at_debug if leaks(each)], "at debug, the reason of a dead letter is told in full"
    assert not [each for each in at_debug if leaks(each) and "dead letter" not in each]

    # Repeated warnings are held back, and a slow record costs a line at debug.
    warned = [each for each in logs if each["level"] != "debug" and each["message"].startswith("dead letter")]
    assert 0 < len(warned) < len(letters)
    assert {each["reason"] for each in warned} >= {"not_json", "invalid_value"}
    assert {(each["topic"], each["partition"]) for each in warned} == {(stage.name, 0)}
    slow = [each for each in logs if each["message"].startswith("over KP_LATENCY_BUDGET_SECONDS")]
    assert {each["level"] for each in slow} == {"debug"}
    assert len(slow) == len({(each["partition"], each["offset"]) for each in slow}) == len(good) + 1 + len(letters)


def session() -> list[bytes]:
    """Return a session with the secret wherever it has text, three requests, and lines that cannot be read.

    The second request is a slash command of 1.2 MB, the third one has a line id of that size.
    """
    more = {"cwd": f"/home/{KEY}", "gitBranch": KEY, "version": KEY}
    command = f"<command-name>/{KEY}</command-name><command-args>{KEY} {'x' * 1_200_000}</command-args>"
    result = {"type": "tool_result", "tool_use_id": "call-1-0", "content": f"{TEXT}\n"}
    use = {"type": "tool_use", "name": {KEY: KEY}}
    wrong: list[Any] = [
        *(KEY, [KEY], {"type": KEY}, {"type": "user", "message": KEY}),
        {"type": "assistant", "message": {"content": [use]}},
    ]
    lines = claude_request(KEY, 1)
    lines[2] = claude_line(KEY, "1r0", "user", [result], **more)
    return [
        *lines, KEY.encode() + b"\n", *(json.dumps(line).encode() + b"\n" for line in wrong),
        claude_line(KEY, "2", "user", command, **more),
        claude_line(KEY, "2a", "assistant", [{"type": "text", "text": TEXT}], **more),
        claude_line(KEY, "3", "user", f"Long id {KEY}", uuid=KEY * 30_000, **more),
        claude_line(KEY, "3a", "assistant", [{"type": "text", "text": TEXT}], **more),
    ]  # fmt: skip


def test_what_is_redacted_at_the_source_is_on_no_topic(desk: Desk, workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "projects"
    folder.mkdir()
    file = folder / f"{KEY}.jsonl"
    file.write_bytes(b"".join(session()))
    marks_topic = f"{desk.name}-followed"
    create_topics(desk.bootstrap, {marks_topic: (1, {"cleanup.policy": "compact"})})
    # Version 0.2.0 wrote the session's texts into its marks: they are replaced.
    before = b"claude-code/written-before", json.dumps({"file": "x", "next": 1, "context": {"command": KEY}}).encode()
    produce(desk.bootstrap, marks_topic, [before])

    def follow(*options: str) -> WorkerProcess:
        arguments = ("publish", "--from", "claude-code", "--follow", str(folder), "--idle-minutes", "0.02", *VALUES)
        return workers(desk.env, (*arguments, *options))

    def stop(process: WorkerProcess) -> str:
        process.finish()
        return process.log().replace(str(file), "the file")  # which a log names, and no topic

    following = follow("--keep", "x_cwd=@cwd")
    assert wait_until(lambda: len(desk.read()) == 3), following.log()
    shown: list[bytes | str | None] = [stop(following)]
    marks = consume_all(desk.bootstrap, marks_topic)
    assert [(mark.key, mark.value) for mark in marks[:2]] == [before, (before[0], b"{}")]
    assert len(marks) == 5
    assert not [mark for mark in marks[1:] if len(mark.value) > 120]
    shown += [part for mark in marks[1:] for part in (mark.key, mark.value)]
    refusing = follow("--privacy", "@cwd", "--name", "other", "-g", f"{desk.name}-other")
    refusing.wait_log("3 refused")
    shown.append(stop(refusing))

    converted = desk.run("convert", "--from", "claude-code", str(folder), *VALUES)
    assert leaks(converted.stdout), "converting copies the texts with any secrets in them"
    lines = [*(json.dumps(trace(n)).encode() for n in range(3)), *broken(), converted.stdout.encode()]
    for options in ((), ("--no-validate",), ("--key", "domain")):
        done = desk.run("publish", "-", "--redact", "strict", *options, stdin=b"\n".join(lines))
        assert "traces published" in done.stderr
        shown += [done.stdout, done.stderr]
    published = desk.read()
    assert len(published) > 15
    shown += [part for each in published for part in (each.key, each.value)]
    assert not leaks(*shown)
    assert all(b"[REDACTED:" in each.value for each in published)

    (folder / "more.jsonl").write_bytes(b"".join([*claude_request("more", 1)[:-1], session()[-1]]))
    plain = follow("--redact", "off")
    assert wait_until(lambda: len(desk.read()) == len(published) + 1), plain.log()
    stop(plain)
    assert leaks(*(each.value for each in desk.read()))
