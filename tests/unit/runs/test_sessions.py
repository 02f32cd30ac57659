"""Sessions of coding agents, line by line: what is a request, when it closes, and where reading may begin again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from worker.runs.fields import RunRefused
from worker.runs.messages import Reasoning, Text, ToolCall, ToolResult
from worker.runs.sessions.session import FORMATS, Request, Session, format_of

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
    session = Session(None if form is None else FORMATS[form])
    closed = []
    for at, line in enumerate(lines):
        closed += session.feed(line if isinstance(line, bytes) else json.dumps(line).encode(), at)
    return closed + session.close()


def shown(request: Request) -> list[Any]:
    """Return the messages of a request, briefly."""
    found: list[Any] = []
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, ToolCall):
                found.append(f"call {part.name}")
            elif isinstance(part, ToolResult):
                found.append(f"{'error' if part.is_error else 'result'} {part.text}")
            elif isinstance(part, Reasoning):
                found.append(f"thought {part.text}")
            else:
                found.append(f"{message.role}: {part.text}")
    return found


def test_each_request_of_the_user_is_a_run() -> None:
    of = Claude()
    first, second = read([
        {"type": "summary", "summary": "Fixing", "leafUuid": "x"},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        of.user("Fix the build"),
        of.said({"type": "thinking", "thinking": "Where?", "signature": "s"}),
        of.said("I look.", use("c1", command="make")),
        of.result("c1", [{"type": "text", "text": "No rule"}, {"type": "image", "source": {}}], error=True),
        of.said("It builds.", model="m"),
        of.line("system", subtype="turn_duration", durationMs=1),
        {"type": "queue-operation", "operation": "enqueue", "sessionId": "s-1", "content": "Now the tests"},
        of.user([{"type": "text", "text": "Now the tests"}, {"type": "image", "source": {}}]),
        of.said(use("c2")),
    ])  # fmt: skip
    assert shown(first) == [
        "user: Fix the build", "thought Where?", "assistant: I look.", "call Bash", "error No rule",
        "assistant: It builds.",
    ]  # fmt: skip
    assert (first.success, second.success) == (True, False)  # the second was left at a call
    assert first.created_at == "2026-04-14T08:00:05.000Z"
    assert first.facts == {
        "session": "s-1", "request": "s-1-1", "cwd": "/repo", "branch": "main", "version": "2.1.0", "model": "m",
    }  # fmt: skip
    assert (first.first, first.last, second.first) == (2, 6, 9)
    assert first.agent == "claude-code"
    assert shown(second) == ["user: Now the tests", "call Bash"]


@pytest.mark.parametrize("line", [
    Claude().user("Some context", isMeta=True),
    Claude().user("This session is being continued from a previous conversation that ran out of context."),
    Claude().user("A summary", isCompactSummary=True, isVisibleInTranscriptOnly=True),
    Claude().user("<local-command-stdout>Set model to x</local-command-stdout>"),
    Claude().user("<local-command-caveat>Caveat: the messages below</local-command-caveat>"),
    Claude().user("Caveat: The messages below were generated by the user while running local commands."),
    Claude().user("<bash-input>ls</bash-input>"),
    Claude().user("<bash-stdout>a</bash-stdout><bash-stderr></bash-stderr>"),
    Claude().user([{"type": "text", "text": "<system-reminder>Be good</system-reminder>"}]),
    Claude().user([{"type": "text", "text": "<ide_opened_file>a.py</ide_opened_file>"}]),
    Claude().user("Warmup", isSidechain=True, agentId="a"),
    Claude().line("attachment", attachment={"type": "hook_success", "stdout": "{}"}),
    Claude().line("progress", data={"type": "agent_progress", "message": {"type": "user"}}),
    {"type": "ai-title", "aiTitle": "Builds", "sessionId": "s-1"},
])  # fmt: skip
def test_what_is_no_request_of_the_user_changes_no_run(line: Line) -> None:
    of = Claude()
    before = [of.user("Fix the build"), of.said("I look.", use("c1"))]
    after = [of.result("c1"), of.said("It builds.")]
    (with_it,), (without,) = read([*before, line, *after]), read([*before, *after])
    assert with_it.messages == without.messages
    assert (with_it.key, with_it.success, with_it.facts) == (without.key, without.success, without.facts)
    assert read([line], "claude-code") == []


def test_what_claude_code_adds_to_a_text_is_not_the_objective() -> None:
    of = Claude()
    (run,) = read([
        of.user("<system-reminder>Be good\nalways</system-reminder>\nFix it<ide_selection>x</ide_selection>"),
        of.said("Done."),
    ])  # fmt: skip
    assert shown(run) == ["user: Fix it", "assistant: Done."]


def test_a_command_that_the_agent_follows_is_a_request_and_one_that_ran_without_it_is_none() -> None:
    of = Claude()
    first, second = read([
        of.user("Fix the build"), of.said("It builds."),
        of.user("<command-message>model</command-message><command-name>/model</command-name>"),
        of.user("<local-command-stdout>Set model</local-command-stdout>"),
        of.user("<command-name>/context</command-name>"),
        of.line("system", subtype="local_command") | {"content": "<local-command-stdout>9 %</local-command-stdout>"},
        of.said("It still builds."),
        of.user("<command-message>review is running</command-message>\n<command-name>/review</command-name>\n"
                "<command-args>12</command-args>"),
        of.user("You review pull requests. Steps: ...", isMeta=True),
        of.said("I review."),
    ])  # fmt: skip
    assert shown(first) == ["user: Fix the build", "assistant: It builds.", "assistant: It still builds."]
    assert shown(second) == ["user: /review 12", "assistant: I review."]
    assert (second.first, second.facts["request"]) == (9, "s-1-8")


def test_an_interrupted_request_has_failed_and_one_without_an_answer_is_no_run() -> None:
    of = Claude()
    (run,) = read([
        of.user("Fix the build"), of.said(use("c1")),
        of.result("c1", "The user doesn't want to proceed", error=True),
        of.user([{"type": "text", "text": "[Request interrupted by user for tool use]"}]),
        of.user("No, the tests"),
        of.user([{"type": "text", "text": "[Request interrupted by user]"}]),
    ])  # fmt: skip
    assert shown(run) == ["user: Fix the build", "call Bash", "error The user doesn't want to proceed"]
    assert (run.success, run.summary) == (False, "interrupted by the user")


def test_what_the_user_says_on_the_way_is_of_the_same_request() -> None:
    of = Claude()
    queued = {"type": "queued_command", "prompt": "and the docs", "commandMode": "prompt"}
    (run,) = read([
        of.user("Fix the build"), of.user("please"), of.said(use("c1")), of.result("c1"),
        of.line("attachment", attachment=queued),
        of.said("Done."),
        of.user("<task-notification><status>completed</status></task-notification>"),
        of.user("A task has ended", origin={"kind": "task-notification"}),
        of.user("Stop hook feedback:\n- run the tests"),
        of.user('<agent-message from="a1">Found</agent-message>'),
        of.said("All done."),
    ])  # fmt: skip
    assert [each for each in shown(run) if each.startswith("user")] == [
        "user: Fix the build", "user: please", "user: and the docs",
        "user: <task-notification><status>completed</status></task-notification>", "user: A task has ended",
        "user: Stop hook feedback:\n- run the tests", 'user: <agent-message from="a1">Found</agent-message>',
    ]  # fmt: skip
    assert run.success


def test_an_error_of_the_api_is_a_failure_unless_the_agent_goes_on() -> None:
    of = Claude()
    failed = [of.user("Fix it"), of.said("I look."), of.said("API Error: 529", isApiErrorMessage=True)]
    (run,) = read(failed)
    assert (run.success, run.summary, shown(run)) == (False, "API Error: 529", ["user: Fix it", "assistant: I look."])
    (run,) = read([*failed, of.said("Done.")])
    assert (run.success, run.summary) == (True, None)


def test_a_block_of_a_new_type_costs_the_block_alone() -> None:
    of = Claude()
    (run,) = read([of.user("Fix it"), of.said({"type": "fallback", "to": "x"}, "Done.")])
    assert shown(run) == ["user: Fix it", "assistant: Done."]
    assert run.counts.dropped["blocks of other types"] == 1


# sub-agents


def test_the_lines_of_sub_agents_without_a_name_are_told_apart_by_the_line_before() -> None:
    of = Claude()
    spawn = [use("t1", "Task", prompt="Find A", subagent_type="Explore"), use("t2", "Task", prompt="Find B")]
    runs = read([
        of.user("Find both"), of.said(*spawn),
        of.user("Find A", isSidechain=True, uuid="a1", parentUuid=None),
        of.user("Find B", isSidechain=True, uuid="b1", parentUuid=None),
        of.said("A?", use("a"), isSidechain=True, uuid="a2", parentUuid="a1"),
        of.said("B is here.", isSidechain=True, uuid="b2", parentUuid="b1"),
        of.result("a", isSidechain=True, uuid="a3", parentUuid="a2"),
        of.said("A is there.", isSidechain=True, uuid="a4", parentUuid="a3"),
        of.result("t1", "A is there."), of.result("t2", "B is here."), of.said("Found."),
    ])  # fmt: skip
    assert [shown(run) for run in runs] == [
        ["user: Find A", "assistant: A?", "call Bash", "result ok", "assistant: A is there."],
        ["user: Find B", "assistant: B is here."],
        ["user: Find both", "call Task", "call Task", "result A is there.", "result B is here.", "assistant: Found."],
    ]
    assert [run.agent for run in runs] == ["claude-code/Explore", "claude-code/agent", "claude-code"]
    assert len({run.key for run in runs}) == 3


def test_a_sub_agent_of_the_printed_stream_has_its_prompt_from_the_call() -> None:
    of = Claude()
    runs = read([
        {"type": "system", "subtype": "init", "session_id": "s", "cwd": "/repo", "model": "m", "uuid": "i1"},
        of.said(use("t1", "Agent", prompt="Find A", subagent_type="Explore"), parent_tool_use_id=None),
        of.said("A is here.", parent_tool_use_id="t1"),
        of.result("t1", "A is here."),
        of.said("Found."),
        {"type": "result", "subtype": "success", "is_error": False, "result": "Found it.", "session_id": "s"},
        {"type": "system", "subtype": "init", "session_id": "s", "cwd": "/repo", "model": "m", "uuid": "i2"},
        of.said("too late", parent_tool_use_id="t1"),
        of.said(use("c")),
        {"type": "result", "subtype": "error_max_turns", "is_error": False, "session_id": "s"},
    ])  # fmt: skip
    assert [shown(run) for run in runs] == [
        ["user: Find A", "assistant: A is here."],
        ["call Agent", "result A is here.", "assistant: Found."],
        ["call Bash"],
    ]
    assert [(run.agent, run.success, run.summary) for run in runs] == [
        ("claude-code/Explore", True, None), ("claude-code", True, "Found it."), ("claude-code", False, None),
    ]  # fmt: skip


def test_a_printed_stream_that_starts_anew_goes_on_with_the_request_unless_it_has_ended() -> None:
    of = Claude()
    start = {"type": "system", "subtype": "init", "session_id": "s-1", "cwd": "/repo"}
    result = {"type": "result", "subtype": "success", "is_error": False, "result": "Done.", "session_id": "s-1"}
    runs = read([
        start, of.user("Fix it"), of.said("I look."), start, of.said("Hm."), result,
        start, of.said("More."), result, start | {"session_id": "s-2"}, of.said("Other.", sessionId="s-2"),
    ])  # fmt: skip
    assert [shown(run) for run in runs] == [
        ["user: Fix it", "assistant: I look.", "assistant: Hm."], ["assistant: More."], ["assistant: Other."],
    ]  # fmt: skip


def test_the_file_of_a_sub_agent_is_read_by_itself() -> None:
    of = Claude()
    side: Any = {"isSidechain": True, "agentId": "a1"}
    first, second = read([
        of.user("Find A", **side), of.said("Here.", attributionAgent="Explore", **side),
        of.user("And B?", **side), of.said("There.", **side),
    ])  # fmt: skip
    assert (first.agent, shown(first)) == ("claude-code/Explore", ["user: Find A", "assistant: Here."])
    assert shown(second) == ["user: And B?", "assistant: There."]
    assert (first.facts["session"], first.facts["cwd"]) == ("s-1", "/repo")


@pytest.mark.parametrize("agent", ["acompact-fffbd0", "aprompt_suggestion-1a2b3c", "aside_question-c5e5c961a7749e08"])
def test_a_sub_agent_that_repeats_the_session_for_claude_code_itself_is_no_run(agent: str) -> None:
    of = Claude()
    asked = of.user("Fix it"), of.said("Done.")
    side: Any = {"isSidechain": True, "agentId": agent}
    assert read([*(line | side for line in asked), of.user("Sum it up", **side), of.said("So far", **side)]) == []
    (run,) = read([asked[0], of.user("Sum it up", **side), of.said("So far", **side), asked[1]])
    assert shown(run) == ["user: Fix it", "assistant: Done."]
    named = side | {"agentId": "akimi-review-1a2b3c"}
    (run,) = read([of.user("Review it", **named), of.said("Good.", **named)])
    assert shown(run) == ["user: Review it", "assistant: Good."]


def test_a_fork_begins_with_the_session_of_its_parent_and_has_a_request_of_its_own() -> None:
    of = Claude()
    first, second = (of.user("Fix it"), of.said("Fixed.")), (of.user("Now both"), of.said(use("t1", "Agent")))
    whole = read([*first, *second, of.result("t1"), of.said("Done.")])
    side: Any = {"isSidechain": True, "agentId": "a17"}
    rules = {
        "type": "text",
        "text": "<fork-boilerplate>\nYou are a fork.\n</fork-boilerplate>\n\nYour directive: Try A",
    }
    begun = {"type": "tool_result", "tool_use_id": "t1", "content": "Fork started"}
    inherited, own = read([
        *(line | side for line in (*first, *second)), of.user([begun, rules], **side), of.said("A works.", **side),
    ])  # fmt: skip
    assert inherited.key == whole[0].key
    assert shown(own) == ["user: Try A", "assistant: A works."]
    assert own.key not in [run.key for run in whole]


def test_what_the_lead_of_a_team_tells_an_agent_is_its_request() -> None:
    def told(words: str, by: str = "team-lead") -> str:
        return f'<teammate-message teammate_id="{by}" summary="x">\n{words}\n</teammate-message>'

    of = Claude()
    side: Any = {"isSidechain": True, "agentId": "areviewer-68a2a1661c9390c1"}
    first, second = read([
        of.user(told("Look at A"), **side), of.said("I look.", **side), of.user(told("I did B", "ann"), **side),
        of.said("Good.", **side), of.user(f"Another Claude session sent a message:\n{told('And at C')}", **side),
        of.said("Seen.", **side), of.user(told('{"type":"shutdown_request"}'), **side), of.said("Bye.", **side),
    ])  # fmt: skip
    assert shown(first) == [
        "user: Look at A", "assistant: I look.", f"user: {told('I did B', 'ann')}", "assistant: Good.",
    ]  # fmt: skip
    assert [each for each in shown(second) if "shutdown" not in each] == [
        "user: And at C", "assistant: Seen.", "assistant: Bye.",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [
    [{"type": "image", "source": {}}], [{"type": "document", "source": {}}, {"type": "text", "text": " "}],
])  # fmt: skip
def test_an_image_alone_is_a_request_which_has_no_words(content: list[Line]) -> None:
    of = Claude()
    first, second = read([of.user("Fix it"), of.said("Done."), of.user(content), of.said("A cat.")])
    assert shown(first) == ["user: Fix it", "assistant: Done."]
    assert shown(second) == ["assistant: A cat."]
    (whole,) = read([of.user("Fix it"), of.said("Done."), of.user(content, isMeta=True), of.said("A cat.")])
    assert shown(whole) == ["user: Fix it", "assistant: Done.", "assistant: A cat."]


# closing, copies, ids


def test_a_closed_request_never_changes() -> None:
    of, session = Claude(), Session()
    for at, line in enumerate([of.user("Fix it"), of.said(use("c1"))]):
        assert session.add(line, at) == []
    (run,) = session.close()
    assert session.open_since is None
    assert session.add(of.result("c1"), 2) == session.add(of.said("Done."), 3) == session.close() == []
    assert session.counts.dropped["lines that belong to no open request"] == 2
    assert shown(run) == ["user: Fix it", "call Bash"]
    session.add(of.user("Go on"), 4)
    session.add(of.said("Done."), 5)
    assert [shown(each) for each in session.close()] == [["user: Go on", "assistant: Done."]]


def test_a_copied_history_keeps_its_ids() -> None:
    uuid = "0a1b2c3d-4e5f-4061-8071-2a3b4c5d6e7f"
    of, branch = Claude(), Claude("s-2")
    (first,) = read([of.user("Fix it", uuid=uuid), of.said("Done.")])
    origin = {"forkedFrom": {"sessionId": "s-1", "messageUuid": uuid}}
    copied, own = read([
        branch.user("Fix it", uuid=uuid, **origin), branch.said("Done.", **origin), branch.user("Go on"),
        branch.said("Done."),
    ])  # fmt: skip
    assert copied.key == first.key != own.key


def test_a_request_without_an_id_is_known_by_what_it_says() -> None:
    def printed(text: str) -> list[Line]:
        said = {"type": "item.completed", "item": {"id": "item_0", "type": "agent_message", "text": text}}
        return [{"type": "thread.started", "thread_id": "t"}, {"type": "turn.started"}, said]

    (one,), (other,), (again,) = read(printed("4")), read(printed("5")), read(printed("4"))
    assert one.key == again.key != other.key


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


def test_a_rollout_is_read_from_its_items() -> None:
    first, second = read([
        META,
        item(type="message", role="developer", content=[{"type": "input_text", "text": "Be good"}]),
        asked("# AGENTS.md instructions for /repo\n\n<INSTRUCTIONS>x</INSTRUCTIONS>"),
        asked("<environment_context>\n<cwd>/repo</cwd>\n</environment_context>"),
        asked("Fix the build", 1),
        rollout("event_msg", {"type": "user_message", "message": "Fix the build"}, 1),
        rollout("turn_context", {"cwd": "/repo", "model": "m-5"}),
        rollout("event_msg", {"type": "agent_reasoning", "text": "Where?"}),
        item(type="reasoning", summary=[{"type": "summary_text", "text": "Where?"}], encrypted_content="x"),
        item(type="function_call", name="shell", arguments='{"command": ["make"]}', call_id="c1"),
        item(2, type="function_call_output", call_id="c1",
             output=json.dumps({"output": "No rule", "metadata": {"exit_code": 2}})),
        rollout("compacted", {"message": "so far", "replacement_history": []}),
        answered("It builds.", 3),
        rollout("event_msg", {"type": "agent_message", "message": "It builds."}, 3),
        rollout("event_msg", {"type": "token_count", "info": None}, 9),
        asked("# Context from my IDE setup:\n\n## Open tabs:\n- a.py\n\n## My request for Codex:\nNow the tests\n", 10),
        item(type="ghost_snapshot", ghost_commit={}),
        item(type="custom_tool_call", name="apply_patch", input="*** Begin", call_id="c2", status="completed"),
        rollout("event_msg", {"type": "turn_aborted", "reason": "interrupted"}, 12),
        asked("<turn_aborted>\nThe user interrupted</turn_aborted>", 12),
    ])  # fmt: skip
    assert shown(first) == [
        "user: Fix the build", "thought Where?", "call shell", "error No rule", "assistant: It builds.",
    ]  # fmt: skip
    assert first.facts == {
        "session": "t-1", "request": "1", "cwd": "/repo", "version": "0.46", "branch": "main", "model": "m-5",
    }  # fmt: skip
    assert (first.success, first.created_at) == (True, "2026-04-14T08:00:03.000Z")
    assert shown(second) == ["user: Now the tests", "call apply_patch"]
    assert (second.success, second.summary) == (False, "interrupted")


@pytest.mark.parametrize(("output", "text", "failed"), [
    ('{"output":"a\\n","metadata":{"exit_code":0,"duration_seconds":0.1}}', "a\n", False),
    ('{"output":"b","metadata":{"exit_code":1}}', "b", True),
    ("Exit code: 0\nWall time: 0 seconds\nOutput:\na", None, False),
    ("Exit code: 127\nWall time: 0 seconds\nOutput:\na", None, True),
    ("Chunk ID: f9\nWall time: 0.1 seconds\nProcess exited with code 1\nOutput:\na", None, True),
    ("Chunk ID: f9\nProcess exited with code 0\nOutput:\nExit code: 1", None, False),
    ("a\nExit status 1", None, False),
    ("apply_patch verification failed: no such lines", None, True),
    ("exec_command failed for `ls`: denied", None, True),
    ('{"found": 1}', None, False),
    ([{"type": "input_text", "text": "Exit code: 1"}, {"type": "input_image", "image_url": "x"}], "Exit code: 1", True),
    ({"content": "denied", "success": False}, "denied", True),
    ([{"type": "input_text", "text": "Done"}, {"type": "input_text", "text": '{"exit_code":2,"output":"b"}'}],
     'Done\n{"exit_code":2,"output":"b"}', True),
    ([{"type": "input_text", "text": "a"}, {"type": "encrypted_content", "encrypted_content": "x"}], "a", False),
    ([{"type": "input_text", "text": '{"exit_code":0,"output":"b"}'}], '{"exit_code":0,"output":"b"}', False),
    ('{"exit_code":1,"chunk_id":"a","output":"b"}', None, True),
    ("Script failed\nWall time 0.1 seconds\nOutput:\na", None, True),
    ({"type": "input_text", "text": "a"}, "a", False),
    (None, "", False),
])  # fmt: skip
def test_an_exit_code_that_is_not_0_is_an_error(output: Any, text: str | None, failed: bool) -> None:
    (run,) = read([META, asked("x"), item(type="function_call", name="f", arguments="{}", call_id="c"),
                   item(type="function_call_output", call_id="c", output=output)])  # fmt: skip
    (result,) = run.messages[-1].parts
    assert isinstance(result, ToolResult)
    assert (result.text, result.is_error) == (output if text is None else text, failed)


def test_what_the_user_says_within_a_turn_of_codex_is_of_the_same_request() -> None:
    started = [rollout("event_msg", {"type": "task_started", "turn_id": f"u-{turn}"}) for turn in (1, 2)]
    said = [asked(text) for text in ("Fix it", "with care", "Go on")]
    events = [rollout("event_msg", {"type": "user_message", "message": text}) for text in ("with care", "Go on")]
    first, second = read([
        META, started[0], said[0], answered("I look."), said[1], events[0], answered("Done."),
        rollout("event_msg", {"type": "task_complete", "turn_id": "u-1", "last_agent_message": "All done."}),
        started[1], events[1], said[2],
        rollout("event_msg", {"type": "task_complete", "turn_id": "u-2", "error": {"message": "No credit"}}),
        answered("Sorry."),
        rollout("event_msg", {"type": "error", "message": "stream lost"}),
    ])  # fmt: skip
    assert shown(first) == ["user: Fix it", "assistant: I look.", "user: with care", "assistant: Done."]
    assert (first.summary, first.facts["request"]) == ("All done.", "u-1")
    assert shown(second) == ["user: Go on", "assistant: Sorry."]
    assert (second.success, second.summary) == (False, "stream lost")


def test_a_branch_of_a_rollout_has_its_own_session_and_a_sub_agent_its_name() -> None:
    spawned = {"subagent": {"thread_spawn": {"parent_thread_id": "t-0", "agent_role": "explorer"}}}
    (run,) = read([rollout("session_meta", {"id": "t-2", "source": spawned, "forked_from_id": "t-1"}), META,
                   asked("x"), answered("y")])  # fmt: skip
    assert (run.facts["session"], run.agent) == ("t-2", "codex/explorer")


@pytest.mark.parametrize(("source", "name"), [
    ({"subagent": {"thread_spawn": {"agent_nickname": "Linnaeus", "agent_role": None}}}, "codex/agent"),
    ({"subagent": {"other": "guardian"}}, None), ({"subagent": "review"}, "codex/review"), ("cli", "codex"),
])  # fmt: skip
def test_a_sub_agent_of_codex_is_named_after_what_it_does(source: Any, name: str | None) -> None:
    runs = read([META | {"payload": META["payload"] | {"source": source}}, asked("x"), answered("y")])
    assert [run.agent for run in runs] == ([] if name is None else [name])


def test_a_sub_agent_of_codex_begins_with_a_copy_of_which_no_request_is_its_own() -> None:
    def turn(name: str, second: int, *said: Line) -> list[Line]:
        return [rollout("event_msg", {"type": "task_started", "turn_id": name}, second), *said]

    parents, own = "019c8a52-f142-7ac0-af89-33e97f39092a", "019c8a86-f3b9-7ac0-803b-be0e5fc1ebde"
    header = rollout("session_meta", {
        "id": "019c8a83-bbf4-7ad1-afc0-ebb68c0044b8", "cwd": "/repo", "timestamp": "2026-04-14T08:00:30.000Z",
        "source": {"subagent": {"thread_spawn": {"agent_role": "explorer", "agent_path": "/main/look"}}},
    }, 30)  # fmt: skip
    copied = [META, *turn(parents, 20, asked("Fix it", 20), answered("Half", 21))]
    task = [asked("Look at it", 31), answered("Seen.", 32)]
    at_one_time = [line | {"timestamp": header["timestamp"]} for line in copied]
    with_numbers = [line | {"ordinal": number} for number, line in enumerate([header, *at_one_time, *task])]
    with_numbers[0]["payload"] = header["payload"] | {"subagent_history_start_ordinal": len(copied) + 1}
    for lines in (
        [header, META, *copied[2:], *task],  # the copy has its first times,
        [header, *at_one_time, *turn(own, 31, *task)],  # or those of the sub-agent's turn are later,
        with_numbers,  # or the header says where it ends
    ):
        (run,) = read(lines)
        assert shown(run) == ["user: Look at it", "assistant: Seen."]
        assert (run.agent, run.facts["session"]) == ("codex/explorer", header["payload"]["id"])
        assert not {"since", "ordinal"} & run.facts.keys()
    branch = header | {"payload": {**header["payload"], "source": "cli", "forked_from_id": "t-1"}}
    (copy, _), (first,) = read([branch, *copied, *turn(own, 31, *task)]), read(copied)
    assert (copy.key, copy.messages) == (first.key, first.messages)  # a user's branch is a copy word for word


def test_what_agents_of_codex_tell_each_other() -> None:
    def told(kind: str, payload: str, *more: Line) -> Line:
        head = f"Message Type: {kind}\nTask name: /main/look\nSender: /main\nPayload:\n"
        return item(type="agent_message", author="/main", recipient="/main/look",
                    content=[{"type": "input_text", "text": head + payload}, *more])  # fmt: skip

    secret = {"type": "encrypted_content", "encrypted_content": "gAAAA"}
    first, second = read([
        META, told("NEW_TASK", "Look at it"), answered("I look."), told("MESSAGE", "And there"), answered("Seen."),
        rollout("event_msg", {"type": "task_started", "turn_id": "u-2"}), told("NEW_TASK", "", secret), answered("Hm."),
    ])  # fmt: skip
    assert shown(first) == ["user: Look at it", "assistant: I look.", "user: And there", "assistant: Seen."]
    assert shown(second) == ["assistant: Hm."]  # nobody can read what it was asked
    (run,) = read(
        [META, asked("Message Type: NEW_TASK\nTask name: /main/a\nSender: /main\nPayload:\nGo"), answered("x")]
    )
    assert shown(run) == ["user: Go", "assistant: x"]


def test_parts_of_a_message_that_codex_says_are_not_the_users() -> None:
    own = {"turn_id": "t", "content_item_kinds": ["hooks.additional_context", "user.text"]}
    texts = [{"type": "input_text", "text": text} for text in ("Be nice", "Fix it")]
    new = {"type": "hologram", "data": "x"}
    done = item(type="message", role="assistant", content=[{"type": "output_text", "text": "Done."}, new])
    (run,) = read([META, item(type="message", role="user", content=texts,
                              internal_chat_message_metadata_passthrough=own), done])  # fmt: skip
    assert shown(run) == ["user: Fix it", "assistant: Done."]
    assert run.counts.dropped["parts of other types"] == 1


def test_an_image_and_a_message_in_parts() -> None:
    image = {"type": "input_image", "image_url": "x"}
    shows = [{"type": "input_text", "text": "<image>"}, image, {"type": "input_text", "text": "</image>"}]
    words = [{"type": "input_text", "text": text} for text in ("Compare", "them")]
    first, second, third = read([
        META, asked("Fix it"), answered("Done."),
        item(type="message", role="user", content=shows), answered("A cat."),
        item(type="message", role="user", content=[words[0], image, words[1]]),
        rollout("event_msg", {"type": "user_message", "message": "Comparethem"}),
        item(type="tool_search_call", call_id="c", arguments={"query": "x"}),
        item(type="tool_search_output", call_id="c", tools=[{"name": "diff"}]),
    ])  # fmt: skip
    assert shown(first) == ["user: Fix it", "assistant: Done."]
    assert shown(second) == ["assistant: A cat."]
    assert shown(third) == ["user: Compare\nthem", "call tool_search", 'result [{"name": "diff"}]']


def test_an_old_rollout_has_its_items_by_themselves() -> None:
    header = {"id": "t-1", "timestamp": "2026-04-14T08:00:00.000Z", "instructions": None, "git": {"branch": "main"}}
    (run,) = read([header, asked("Fix it")["payload"], {"record_type": "state"}, answered("Done.")["payload"]])
    assert shown(run) == ["user: Fix it", "assistant: Done."]
    assert run.facts == {"session": "t-1", "request": "1", "branch": "main"}


def test_what_codex_exec_prints() -> None:
    def done(kind: str, **fields: Any) -> Line:
        return {"type": "item.completed", "item": {"id": f"i-{kind}", "type": kind, **fields}}

    runs = read([
        {"type": "thread.started", "thread_id": "t-9"}, {"type": "turn.started"},
        done("reasoning", text="Where?"),
        {"type": "item.started", "item": {"id": "i-command_execution", "type": "command_execution"}},
        done("command_execution", command="make", aggregated_output="No rule", exit_code=2, status="failed"),
        done("file_change", changes=[{"path": "a", "kind": "add"}], status="completed"),
        done("mcp_tool_call", server="s", tool="t", arguments={"a": 1}, status="completed",
             result={"content": [{"type": "text", "text": "42"}]}),
        done("mcp_tool_call", server="s", tool="t", error={"message": "no"}, status="failed"),
        done("web_search", query="q"), done("todo_list", items=[]), done("error", message="slow"),
        done("agent_message", text="Done."),
        {"type": "turn.completed", "usage": {}},
        {"type": "turn.started"},
        done("agent_message", text="Hm."),
        {"type": "turn.failed", "error": {"message": "No credit"}},
    ])  # fmt: skip
    assert [shown(run) for run in runs] == [
        ["thought Where?", "call command_execution", "error No rule", "call file_change", "result completed",
         "call s.t", "result 42", "call s.t", 'error {"message": "no"}', "call web_search", "call todo_list",
         "assistant: Done."],
        ["assistant: Hm."],
    ]  # fmt: skip
    assert [(run.success, run.summary, run.facts["session"]) for run in runs] == [
        (True, None, "t-9"), (False, "No credit", "t-9"),
    ]  # fmt: skip


# Pi, Gemini CLI, OpenCode


def test_a_session_of_pi() -> None:
    def entry(second: int, role: str, content: Any, **more: Any) -> Line:
        return {"type": "message", "id": f"{second:08}", "parentId": None, "message": {"role": role, "content": content,
                **more}, "timestamp": f"2026-04-14T08:00:{second:02}.000Z"}  # fmt: skip

    header = {"type": "session", "version": 3, "id": "p-1", "timestamp": "2026-04-14T08:00:00.000Z", "cwd": "/repo"}
    call = {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "make"}}
    lines = [
        header, {"type": "model_change", "id": "x", "parentId": None, "timestamp": "", "modelId": "m"},
        entry(1, "user", "Fix it"), entry(2, "bashExecution", None, command="ls"),
        entry(3, "assistant", [{"type": "thinking", "thinking": "Where?"}, call], stopReason="toolUse"),
        entry(4, "toolResult", [{"type": "text", "text": "No rule"}], toolCallId="c1", toolName="bash", isError=True),
        entry(5, "assistant", [{"type": "text", "text": "Done."}], stopReason="stop", model="m"),
        entry(6, "user", [{"type": "text", "text": "Go on"}]), entry(7, "assistant", [], stopReason="aborted"),
        entry(8, "user", [{"type": "text", "text": "Go on!"}]),
        entry(9, "assistant", [{"type": "text", "text": "Well,"}], stopReason="aborted"),
    ]  # fmt: skip
    first, second = read(lines)
    assert shown(first) == ["user: Fix it", "thought Where?", "call bash", "error No rule", "assistant: Done."]
    assert (first.facts["model"], first.success) == ("m", True)
    assert (shown(second), second.success) == (["user: Go on!", "assistant: Well,"], False)
    branch = header | {"id": "p-2", "timestamp": "2026-04-14T08:00:07.000Z", "parentSession": "p-1.jsonl"}
    copied, own = read([branch, *lines[1:]])
    assert copied.key == first.key != own.key


def test_a_session_of_gemini_cli_in_which_a_line_replaces_an_earlier_one() -> None:
    call = {"id": "c1", "name": "shell", "args": {"command": "make"}}
    answer = {"functionResponse": {"id": "c1", "name": "shell", "response": {"output": "No rule"}}}
    model = {"id": "m2", "timestamp": "2026-04-14T08:00:02.000Z", "type": "gemini", "content": "I look.", "model": "g",
             "thoughts": [{"subject": "Where", "description": "is it?"}]}  # fmt: skip
    messages = [
        {"id": "m1", "timestamp": "2026-04-14T08:00:01.000Z", "type": "user", "content": [{"text": "Fix it"}]},
        model | {"toolCalls": [call | {"status": "error", "result": [answer]}]},
        {"id": "m3", "timestamp": "2026-04-14T08:00:03.000Z", "type": "gemini", "content": "Done."},
    ]
    header = {"sessionId": "g-1", "projectHash": "h", "startTime": "2026-04-14T08:00:00.000Z", "kind": "main"}
    (lines,) = read([header, messages[0], model, {"$set": {"lastUpdated": "x"}}, *messages[1:]])
    assert shown(lines) == [
        "user: Fix it", "thought Where\nis it?", "assistant: I look.", "call shell", "error No rule",
        "assistant: Done.",
    ]  # fmt: skip
    success = answer | {"functionResponse": {"response": {"output": "Exit Code: 7\nExit Code: 0\nSignal: 0"}}}
    failure = answer | {"functionResponse": {"response": {"output": "Output: Exit Code: 0\nExit Code: 2"}}}
    (run,) = read([header, messages[0], model | {"toolCalls": [
        {**call, "name": name, "status": "success", "result": [result]} for name, result in
        (("run_shell_command", success), ("run_shell_command", failure), ("read_file", failure))]},
        {"id": "m4", "type": "model", "parts": [{"text": "Done."}]}])  # fmt: skip
    assert [part.is_error for message in run.messages for part in message.parts if isinstance(part, ToolResult)] == [
        False, True, False,
    ]  # fmt: skip
    assert shown(run)[-1] == "assistant: Done."
    document = header | {"messages": messages}
    form = format_of(document)
    assert form is FORMATS["gemini-cli"]
    (whole,) = read(form.lines(document) or ())
    assert (whole.messages, whole.key, whole.facts) == (lines.messages, lines.key, lines.facts)


def test_a_session_of_opencode() -> None:
    def message(role: str, *parts: Line, **info: Any) -> Line:
        return {"info": {"id": f"m-{len(parts)}", "sessionID": "o-1", "role": role, "time": {"created": 1776153600123},
                         **info}, "parts": list(parts)}  # fmt: skip

    failed = {"type": "tool", "tool": "bash", "callID": "c1",
              "state": {"status": "error", "input": {"command": "make"}, "error": "No rule"}}  # fmt: skip
    document = {
        "info": {"id": "o-1", "directory": "/repo", "version": "1.0"},
        "messages": [
            message("user", {"type": "text", "text": "Fix it"}, {"type": "text", "text": "ctx", "synthetic": True}),
            message("assistant", {"type": "step-start"}, {"type": "reasoning", "text": "Where?"}, failed,
                    {"type": "text", "text": "Done."}, modelID="m"),
        ],
    }  # fmt: skip
    form = format_of(document)
    assert form is FORMATS["opencode"]
    (run,) = read(form.lines(document) or (), "opencode")
    assert shown(run) == ["user: Fix it", "thought Where?", "call bash", "error No rule", "assistant: Done."]
    assert (run.created_at, run.facts["cwd"], run.success) == ("2026-04-14T08:00:00.123000Z", "/repo", True)
    printed = [{"type": kind, "timestamp": 1776153600123, "sessionID": "o-1", "part": part}
               for kind, part in (("step_start", {"type": "step-start"}), ("tool_use", failed))]  # fmt: skip
    exited = {"status": "completed", "output": "No rule", "metadata": {"exit": 2}}
    (run,) = read([{**printed[0]}, {**printed[1], "part": failed | {"state": exited}}])
    assert shown(run) == ["call bash", "error No rule"]
    (stopped,) = read([*printed, {"type": "error", "sessionID": "o-1", "error": {"data": {"message": "No credit"}}}])
    assert (shown(stopped), stopped.success, stopped.summary) == (["call bash", "error No rule"], False, "No credit")


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


def in_pieces(lines: Sequence[bytes], chance: random.Random, restarts: float, closings: set[int]) -> list[Request]:
    """Read a session. `restarts`: how often, each from where it says. `closings`: after which lines to close."""
    session, closed = Session(format_of(json.loads(lines[-1]))), list[Request]()
    for at, line in enumerate(lines):
        with suppress(RunRefused):
            closed += session.feed(line, at)
        if at in closings:
            closed += session.close()
        if chance.random() < restarts:
            since, context = session.open_since, json.loads(json.dumps(session.context, sort_keys=True))
            session = Session(None, context)
            for again in range(at + 1 if since is None else since, at + 1):
                with suppress(RunRefused):
                    assert session.feed(lines[again], again) == []
    return closed + session.close()


def told(requests: Iterable[Request]) -> list[tuple[Any, ...]]:
    return [(each.key, each.facts, each.messages, each.created_at, each.success, each.summary) for each in requests]


def test_restarts_and_hostile_lines_change_no_request(seed: int) -> None:
    chance, count = random.Random(seed), 0
    for _ in range(300):
        lines = [json.dumps(line).encode() for line in random_lines(chance)]
        closings = {at for at in range(len(lines)) if chance.random() < 0.05}
        whole = in_pieces(lines, chance, 0, closings)
        count += len(whole)
        assert told(in_pieces(lines, chance, 0.3, closings)) == told(whole)
        mixed = [line for each in lines for line in (*chance.sample(HOSTILE, chance.randrange(3)), each)]
        assert told(in_pieces(mixed, chance, 0.1, set())) == told(in_pieces(lines, chance, 0, set()))
    assert count > 300


@pytest.mark.parametrize("line", HOSTILE)
def test_a_line_that_cannot_be_read_is_named_and_changes_nothing(line: bytes) -> None:
    of = Claude()
    session = Session(FORMATS["claude-code"])
    session.add(of.user("Fix it"), 0)
    before = session.context
    with pytest.raises(RunRefused):
        session.feed(line, 1)
    assert session.context == before
    assert session.feed(b"\n", 2) == []
    session.add(of.said("Done."), 3)
    (run,) = session.close()
    assert shown(run) == ["user: Fix it", "assistant: Done."]


SAMPLES: dict[str, list[Line]] = {
    "claude-code": [
        Claude().user([{"type": "text", "text": "Fix it"}, {"type": "image", "source": {}}], origin={"kind": "human"}),
        Claude().said({"type": "thinking", "thinking": "Where?"}, use("c1", "Task", prompt="x", subagent_type="y")),
        Claude().result("c1", [{"type": "text", "text": "No"}], agentId="a", isSidechain=True),
        Claude().line("attachment", attachment={"type": "queued_command", "prompt": [{"type": "text", "text": "x"}]}),
        {"type": "result", "subtype": "success", "is_error": False, "result": "x"},
    ],
    "codex": [
        META | {"payload": {**META["payload"], "source": {"subagent": {"thread_spawn": {"agent_role": "x"}}},
                            "timestamp": "2026-04-14T08:00:00Z", "subagent_history_start_ordinal": 1}},
        asked("Fix it"), answered("Done."),
        item(type="reasoning", summary=[{"type": "summary_text", "text": "x"}], content=[{"text": "x"}]),
        item(type="function_call", name="f", arguments="{}", call_id="c"),
        item(type="function_call_output", call_id="c", output='{"output": "a", "metadata": {"exit_code": 1}}'),
        item(type="function_call_output", call_id="c", output=[{"type": "input_text", "text": "a"}]),
        item(type="local_shell_call", call_id="c", action={"type": "exec", "command": ["ls"]}),
        item(type="agent_message", content=[{"type": "input_text", "text": "Message Type: NEW_TASK\nPayload:\nx"}],
             internal_chat_message_metadata_passthrough={"content_item_kinds": ["user.text"]}) | {"ordinal": 1},
        item(type="tool_search_output", call_id="c", tools=[{}]),
        rollout("event_msg", {"type": "task_complete", "error": {"message": "x"}, "last_agent_message": "x"}),
        {"type": "item.completed", "item": {"id": "i", "type": "mcp_tool_call", "server": "s", "tool": "t",
         "result": {"content": [{"type": "text", "text": "x"}]}}},
        {"type": "item.completed", "item": {"id": "i", "type": "collab_tool_call", "tool": "t", "prompt": "x"}},
    ],
    "pi": [
        {"type": "session", "id": "p", "cwd": "/", "timestamp": "2026-04-14T08:00:00Z", "parentSession": "x"},
        {"type": "message", "timestamp": "2026-04-14T08:00:00Z", "message": {"role": "user", "content": "x"}},
        {"type": "message", "message": {"role": "assistant", "stopReason": "error", "errorMessage": "x", "content": [
            {"type": "text", "text": "x"}, {"type": "toolCall", "id": "c", "name": "f", "arguments": {}}]}},
        {"type": "message", "message": {"role": "toolResult", "toolCallId": "c", "content": [{"type": "text"}]}},
    ],
    "gemini-cli": [
        {"sessionId": "g", "projectHash": "h", "kind": "main"},
        {"type": "user", "content": [{"text": "x"}, {"inlineData": {}}], "id": "a"},
        {"type": "gemini", "content": "x", "thoughts": [{"subject": "x", "description": "y"}], "toolCalls": [
            {"id": "c", "name": "f", "args": {}, "status": "success", "result": [
                {"functionResponse": {"response": {"output": "x"}}}, {"text": "x"}]}]},
    ],
    "opencode": [
        {"info": {"id": "m", "sessionID": "o", "role": "user", "time": {"created": 1}},
         "parts": [{"type": "text", "text": "x"}]},
        {"info": {"id": "m", "sessionID": "o", "role": "assistant", "error": {"name": "x", "data": {"message": "y"}}},
         "parts": [{"type": "tool", "tool": "f", "callID": "c", "state": {"status": "error", "error": "x"}}]},
        {"type": "tool_use", "sessionID": "o", "timestamp": 1, "part": {"type": "tool", "tool": "f", "state": {}}},
    ],
}  # fmt: skip


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
    chance = random.Random(f"{seed} {form}")
    for _ in range(1500):
        session, faults = Session(chance.choice([None, FORMATS[form]])), list[Any]()
        closed = []
        for at in range(chance.randrange(1, 8)):
            line = changed(chance.choice(SAMPLES[form]), chance)
            try:
                closed += session.feed(json.dumps(line).encode(), at)
            except RunRefused as error:
                faults += [(error, line)] if error.reason == "mapping_failed" else []
        assert not faults
        for request in closed + session.close():
            assert all(isinstance(fact, str) for fact in request.facts.values())
            assert request.key == str(request.key)


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


def test_half_of_a_surrogate_pair_becomes_a_question_mark() -> None:
    of = Claude()
    (run,) = read([of.user("Fix \ud800 it"), of.said("Done.")])
    (text,) = run.messages[0].parts
    assert text == Text("Fix ? it")


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
