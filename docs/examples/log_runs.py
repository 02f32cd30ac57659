"""Runs an agent with a client in OpenAI's form, and logs each run for `kp-worker convert` (docs/agent-logs.md)."""

import json
from datetime import UTC, datetime


def run_agent(client, request, functions, messages):
    """Answer the last message, and append every message. `request`: model and tools; `functions`: the tools by name."""
    while True:
        # is_error is for the log: the API takes no fields that it does not know
        sent = [{name: value for name, value in each.items() if name != "is_error"} for each in messages]
        answer = client.chat.completions.create(**request, messages=sent).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return
        messages.extend(call_tool(functions, call) for call in answer.tool_calls)


def call_tool(functions, call):
    result = {"role": "tool", "tool_call_id": call.id}
    try:
        output = functions[call.function.name](**json.loads(call.function.arguments))
    except Exception as error:
        return result | {"content": f"{type(error).__name__}: {error}", "is_error": True}
    return result | {"content": output if isinstance(output, str) else json.dumps(output)}


def log_run(path, messages, **fields):
    """Append a run to a JSON Lines file: `fields` are what only you know, such as resolved, agent, domain, run."""
    run = {**fields, "finished": datetime.now(UTC).isoformat(), "messages": messages}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(run, ensure_ascii=False) + "\n")
