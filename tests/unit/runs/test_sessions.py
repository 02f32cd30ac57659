"""What holds for all sessions: restarts, hostile lines, how long reading takes. Input and output: test_cases.py."""

import gc
import json
import random
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.surroundings import DATA
from worker.commands.shared.session_files import Closed, Position, SessionFiles, read_position
from worker.runs.fields import RunRefused
from worker.runs.messages import Part, Text, ToolCall
from worker.runs.sessions.session import FORMATS, AgentSession, Request, format_of

Line = dict[str, Any]


# lines of Claude Code


class Claude:
    """Writes a session: each line has an id, and the id of the line before."""

    def __init__(self, session: str = "s-1") -> None:
        self.session, self.count = session, 0

    def line(self, kind: str, content: Any = None, **more: Any) -> Line:
        self.count += 1
        line = {
            "type": kind, "uuid": f"{self.session}-{self.count}", "parentUuid": f"{self.session}-{self.count - 1}",
            "sessionId": self.session, "isSidechain": False, "cwd": "/repo", "gitBranch": "main", "version": "2.1.0",
            "timestamp": f"2026-04-14T08:{self.count // 60:02}:{self.count % 60:02}.000Z",
        }  # fmt: skip
        if content is not None:
            line["message"] = {"role": kind, "content": content}
        return line | more

    def user(self, content: Any, **more: Any) -> Line:
        return self.line("user", content, **more)

    def said(self, *blocks: Any, **more: Any) -> Line:
        content = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
        return self.line("assistant", content, **more)

    def result(self, call: str, content: Any = "ok", *, error: bool = False, **more: Any) -> Line:
        block = {"type": "tool_result", "tool_use_id": call, "content": content, "is_error": error}
        return self.user([block], **more)


def use(call: str, name: str = "Bash", **given: Any) -> Line:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def read(lines: Iterable[Any], form: str | None = None) -> list[Request]:
    """Return the requests of a whole session; its lines are values, or bytes as they are."""
    session = AgentSession(None if form is None else FORMATS[form])
    closed = []
    for at, line in enumerate(lines):
        closed += session.feed(line if isinstance(line, bytes) else json.dumps(line).encode(), at)
    return closed + session.close()


def parts_of(request: Request) -> list[tuple[str, Part]]:
    return [(message.role, part) for message in request.messages for part in message.parts]


def test_a_closed_request_never_changes() -> None:
    of, session = Claude(), AgentSession()
    for at, line in enumerate([of.user("Fix it"), of.said(use("c1"))]):
        assert session.add(line, at) == []
    (run,) = session.close()
    assert session.open_since is None
    assert session.add(of.result("c1"), 2) == session.add(of.said("Done."), 3) == session.close() == []
    assert session.counts.dropped["lines that belong to no open request"] == 2
    assert parts_of(run) == [("user", Text("Fix it")), ("assistant", ToolCall("Bash", {}, "c1"))]
    session.add(of.user("Go on"), 4)
    session.add(of.said("Done."), 5)
    assert list(map(parts_of, session.close())) == [[("user", Text("Go on")), ("assistant", Text("Done."))]]


# Codex


def rollout(kind: str, payload: Line, second: int = 0) -> Line:
    return {"timestamp": f"2026-04-14T08:00:{second:02}.000Z", "type": kind, "payload": payload}


def item(second: int = 0, **payload: Any) -> Line:
    return rollout("response_item", payload, second)


def asked(text: str, second: int = 0) -> Line:
    return item(second, type="message", role="user", content=[{"type": "input_text", "text": text}])


def answered(text: str, second: int = 0) -> Line:
    return item(second, type="message", role="assistant", content=[{"type": "output_text", "text": text}])


META = rollout("session_meta", {"id": "t-1", "cwd": "/repo", "cli_version": "0.46", "git": {"branch": "main"}})


# whatever the lines are


HOSTILE = (
    b"not json", b"42", b"[1]", b'"x"', b"{", b"\xff\xfe", b'{"a": NaN}', b'{"type": "user", "type": "user"}',
    b"[" * 5000, b'{"type": 5}', b'{"type": "user", "message": "x"}', b'{"type": "assistant", "message": null}',
    b'{"type": "user", "message": {"role": "user", "content": [5]}}',
    b'{"type": "assistant", "message": {"content": [{"type": "tool_use"}]}, "uuid": "u"}',
)  # fmt: skip
"""Lines that no agent writes."""


def random_lines(chance: random.Random) -> list[Line]:
    """Return a session of either agent, with requests, calls, sub-agents, interruptions and commands at random."""
    of = Claude(f"s-{chance.randrange(1000)}")
    if chance.random() < 0.4:
        lines = [META]
        for number in range(chance.randrange(1, 40)):
            kind = chance.randrange(8)
            if kind == 0:
                lines.append(rollout("event_msg", {"type": "task_started", "turn_id": f"u-{number}"}, number))
            elif kind <= 2:
                lines += [asked(f"request {number}", number)][: chance.randrange(2)]
                lines.append(rollout("event_msg", {"type": "user_message", "message": f"request {number}"}, number))
            elif kind == 3:
                lines.append(rollout("turn_context", {"model": f"m-{number}"}))
            elif kind == 4:
                lines.append(rollout("event_msg", {"type": chance.choice(["turn_aborted", "error", "token_count"])}))
            elif kind == 5:
                lines.append(item(number, type="function_call", name="f", arguments="{}", call_id=f"c{number}"))
            else:
                lines.append(answered(f"answer {number}", number))
        return lines
    lines, before = [], {"": "x"}
    for number in range(chance.randrange(1, 50)):
        side: Any = {}
        if chance.random() < 0.3:
            name = chance.choice("ab")
            side = {"isSidechain": True, "uuid": f"{name}{number}", "parentUuid": before.get(name)}
            side |= {} if chance.random() < 0.5 else {"agentId": name}
            before[name] = f"{name}{number}"
        lines.append(chance.choice([
            lambda side=side, number=number: of.user(f"request {number}", **side),
            lambda side=side, number=number: of.said(f"answer {number}", **side),
            lambda side=side, number=number: of.said(
                use(f"c{number}", "Task", prompt=f"request {number + 1}", subagent_type="Explore"), **side),
            lambda side=side, number=number: of.result(f"c{number - 1}", error=number % 2 == 0, **side),
            lambda: of.user("[Request interrupted by user]"),
            lambda number=number: of.user(f"<command-name>/do {number}</command-name>"),
            lambda: of.user("<local-command-stdout>x</local-command-stdout>"),
            lambda: {"type": "summary", "summary": "x", "leafUuid": "y"},
            lambda: {"type": "system", "subtype": "init", "session_id": of.session, "model": "m"},
            lambda number=number: {"type": "result", "subtype": "success", "result": f"result {number}"},
            lambda number=number: of.said(f"of a call {number}", parent_tool_use_id=f"c{number - 2}"),
        ])())  # fmt: skip
    return lines


def as_far_as_readable(lines: Sequence[bytes]) -> list[Request]:
    """Read a session without its unreadable lines."""
    session, closed = AgentSession(format_of(json.loads(lines[-1]))), list[Request]()
    for at, line in enumerate(lines):
        with suppress(RunRefused):
            closed += session.feed(line, at)
    return closed + session.close()


def told(requests: Iterable[Request]) -> list[tuple[Any, ...]]:
    return [(each.key, each.facts, each.messages, each.created_at, each.success, each.summary) for each in requests]


def test_hostile_lines_change_no_request(seed: int) -> None:
    chance, count = random.Random(seed), 0
    for _ in range(300):
        lines = [json.dumps(line).encode() for line in random_lines(chance)]
        whole = as_far_as_readable(lines)
        count += len(whole)
        mixed = [line for each in lines for line in (*chance.sample(HOSTILE, chance.randrange(3)), each)]
        # An unreadable line may have been the answer.
        unknown = {each.key for each in as_far_as_readable(mixed) if each.success is None}
        requests = [replace(each, success=each.success or False) for each in as_far_as_readable(mixed)]
        assert told(requests) == told(whole)
        assert not unknown & {each.key for each in whole if each.success}
    assert count > 300


def test_a_restart_goes_on_behind_any_position(tmp_path: Path, seed: int) -> None:
    """Whatever the session is, and although a position says nothing of it."""
    chance, count = random.Random(seed), 0

    def followed(*positions: Position) -> list[Closed]:
        files = SessionFiles(tmp_path, form, 600, 1 << 20)
        files.start(positions)
        return [each for closed in files.poll(time.time() + 3600, 0) for each in closed]

    for _ in range(100):
        lines = [json.dumps(line).encode() for line in random_lines(chance)]
        (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n" * chance.randrange(2))
        if (form := format_of(json.loads(lines[-1]))) is None:
            continue
        whole = followed()
        for each in whole:
            if (position := read_position(each.position)) is not None:
                rest = [other.request for other in whole if other.request.first >= position.next]
                assert told(other.request for other in followed(position)) == told(rest)
                count += 1
    assert count > 100


@pytest.mark.parametrize("line", HOSTILE)
def test_a_line_that_cannot_be_read_is_named_and_changes_nothing(line: bytes) -> None:
    of = Claude()
    session = AgentSession(FORMATS["claude-code"])
    session.add(of.user("Fix it"), 0)
    with pytest.raises(RunRefused):
        session.feed(line, 1)
    assert session.feed(b"\n", 2) == []
    session.add(of.said("Done."), 3)
    (run,) = session.close()
    assert parts_of(run) == [("user", Text("Fix it")), ("assistant", Text("Done."))]


def samples(form: str) -> list[Line]:
    """Return the lines of all sessions of an agent in tests/data."""
    lines = (DATA / "runs" / "sessions" / f"{form}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if not line.startswith('{"case":')]


def changed(value: Any, chance: random.Random) -> Any:
    """Return a value with another one somewhere in it."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        copy: Any = value.copy()
        copy[key] = changed(value[key], chance)
        return copy
    return chance.choice([
        None, True, 0, -1, 1e300, 10**30, "", "x", "2026-04-14T08:00:00Z", "text", "user", "tool_result", [], {},
        ["x"], [[]], [{}], [None], {"text": "x"}, {"type": "text"}, {"type": "tool_use", "name": "x"},
        {"type": 5, "role": []},
    ])  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_values_of_any_shape_are_read_or_refused_with_words(form: str, seed: int) -> None:
    chance, lines = random.Random(f"{seed} {form}"), samples(form)
    for _ in range(1500):
        session, faults = AgentSession(chance.choice([None, FORMATS[form]])), list[Any]()
        closed = []
        for at in range(chance.randrange(1, 8)):
            line = changed(chance.choice(lines), chance)
            try:
                closed += session.feed(json.dumps(line).encode(), at)
            except RunRefused as error:
                faults += [(error, line)] if error.reason == "mapping_failed" else []
        assert not faults
        for request in closed + session.close():
            assert all(isinstance(fact, str) for fact in request.facts.values())
            assert request.key == str(request.key)


def test_neither_lines_that_cannot_be_read_nor_earlier_versions_of_a_line_are_kept() -> None:
    of, session = Claude(), AgentSession()
    session.add(of.user("Go"), 0)
    line = json.dumps(of.said("Done.")).replace('"message": {', '"message": {"id": "m", ').encode()

    def feed(begin: int, end: int) -> None:
        for at in range(begin, end):
            session.feed(line, at)
            with suppress(RunRefused):
                session.feed(b"{", at)

    feed(1, 100)
    tracemalloc.start()
    try:
        feed(100, 5000)
        gc.collect()  # refusals are freed by it alone
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000
    (request,) = session.close()
    assert parts_of(request) == [("user", Text("Go")), ("assistant", Text("Done."))]


@pytest.mark.parametrize("text", [
    "<system-reminder>" * 60_000, "</system-reminder>" + "<system-reminder>" * 60_000, "<bash-stdout>" * 60_000,
    "<command-name>" * 60_000, '<teammate-message teammate_id="main">' + "<teammate-message " * 60_000,
    "# Context from my IDE setup\n" * 40_000, " \n" * 500_000, "\n## My request" * 60_000,
])  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    read([Claude().user(text), Claude().said("Done.")])
    read([META, asked(text), item(type="function_call_output", call_id="c", output=text), answered("Done.")])
    assert time.process_time() - began < 2


def test_many_sub_agents_and_parts_take_linear_time() -> None:
    """In quadratic time they took 14 and 23 s. The loaded machine of one try may be quiet in the next."""
    of = Claude()
    lines = [of.user("Go")]
    for n in range(5000):
        lines += [
            of.said(use(f"c{n}", "Task", prompt=f"task {n}")),
            of.user(f"task {n}", isSidechain=True, agentId=f"a{n}"),
        ]
    parts = of.said(*map(str, range(10_000)))
    parts["message"]["id"] = "m"

    def seconds() -> float:
        began = time.process_time()
        read(lines)
        read([of.user("Go"), parts, parts | {"uuid": "u"}])
        return time.process_time() - began

    assert any(seconds() < 4 for _ in range(3))


@pytest.mark.parametrize(("form", "value"), [
    ("claude-code", {"type": "mode", "mode": "normal", "sessionId": "s"}),
    ("claude-code", {"type": "user", "message": {"role": "user", "content": "x"}}),
    ("claude-code", {"type": "queue-operation", "operation": "enqueue"}),
    ("claude-code", {"type": "summary", "summary": "x", "leafUuid": "y"}),
    ("claude-code", {"type": "system", "subtype": "init", "session_id": "s"}),
    ("claude-code", {"loglines": []}),
    ("claude-code", {"type": "started", "key": "v2:1a", "agentId": "a2fc"}),
    ("codex", META), ("codex", answered("x")), ("codex", {"type": "thread.started", "thread_id": "t"}),
    ("codex", {"id": "t", "timestamp": "2026-04-14T08:00:00Z", "instructions": None}),
    ("pi", {"type": "session", "version": 3, "id": "p", "cwd": "/"}),
    ("gemini-cli", {"sessionId": "g", "projectHash": "h"}),
    ("gemini-cli", {"sessionId": "g", "projectHash": "h", "messages": []}),
    ("opencode", {"info": {"id": "o"}, "messages": []}),
    ("opencode", {"type": "step_start", "sessionID": "o", "part": {}}),
])  # fmt: skip
def test_a_session_is_recognised_by_its_first_line(form: str, value: Any) -> None:
    assert format_of(value) is FORMATS[form]


@pytest.mark.parametrize("value", [
    {"messages": [{"role": "user", "content": "x"}]}, {"role": "user", "content": "x"}, [], 5, {"type": "human"},
    {"resourceSpans": []}, {"schema_version": "ATIF-v1.6"}, {"info": {}, "messages": [{"role": "user"}]},
    {"type": "message", "role": "user", "content": "x"}, {"type": "function_call", "name": "f"},
])  # fmt: skip
def test_what_is_no_session(value: Any) -> None:
    assert format_of(value) is None
