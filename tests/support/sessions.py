"""Session files of coding agents, made by ourselves: lines as Claude Code and Codex write them."""

import json
import uuid
from datetime import UTC, datetime
from typing import Any

NAMESPACE = uuid.UUID(int=41)
VALUES = ("--confidence", "0.8", "--domain", "code", "--visibility", "private", "--privacy", "aggregated")
"""What `publish --from` is told of every session."""

BEGAN = 1_795_000_000.0
"""When the sessions began, seconds since 1970."""


def request_id(session: str, number: int) -> str:
    """Return the UUID of a request's line, which is what its trace is named after."""
    return str(uuid.uuid5(NAMESPACE, f"{session}/{number}"))


def claude_line(session: str, name: str, role: str, content: Any, at: float = BEGAN, **more: Any) -> bytes:
    """Return a line of a session of Claude Code; `name` makes its UUID."""
    line = {
        "type": role, "uuid": str(uuid.uuid5(NAMESPACE, f"{session}/{name}")), "sessionId": session,
        "timestamp": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z"), "cwd": "/home/me/work",
        "version": "2.0.1", "isSidechain": False, "message": {"role": role, "content": content}, **more,
    }  # fmt: skip
    return json.dumps(line).encode() + b"\n"


def claude_request(session: str, number: int, steps: int = 1, at: float = BEGAN) -> list[bytes]:
    """Return the lines of a request and of what the agent does: `steps` calls with their results, and an answer."""
    lines = [claude_line(session, str(number), "user", f"Task {number} of {session}", at)]
    for step in range(steps):
        call = f"call-{number}-{step}"
        use = {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": f"make {number}-{step}"}}
        result = {"type": "tool_result", "tool_use_id": call, "content": f"done {number}-{step}"}
        lines.append(claude_line(session, f"{number}u{step}", "assistant", [use], at + step))
        lines.append(claude_line(session, f"{number}r{step}", "user", [result], at + step))
    answer = [{"type": "text", "text": f"Task {number} of {session} is done."}]
    return [*lines, claude_line(session, f"{number}a", "assistant", answer, at + steps)]


def codex_session(session: str, requests: int) -> list[bytes]:
    """Return the lines of a rollout file of Codex, each request with one call."""
    lines: list[tuple[str, Any]] = [("session_meta", {"id": session, "cwd": "/home/me/work", "cli_version": "0.60.0"})]
    for number in range(requests):
        lines += [
            ("response_item", message("user", "input_text", f"Task {number} of {session}")),
            ("event_msg", {"type": "user_message", "message": f"Task {number} of {session}"}),
            ("response_item", {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": f"c{number}"}),
            ("response_item", {"type": "function_call_output", "call_id": f"c{number}", "output": "done"}),
            ("response_item", message("assistant", "output_text", f"Task {number} is done.")),
        ]
    return [
        json.dumps({"timestamp": datetime.fromtimestamp(BEGAN + at, UTC).isoformat(), "type": kind, "payload": payload})
        .encode() + b"\n"
        for at, (kind, payload) in enumerate(lines)
    ]  # fmt: skip


def message(role: str, kind: str, text: str) -> dict[str, Any]:
    """Return a message as the Responses API has it."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
