"""The demo's OpenTelemetry part: made-up spans, as a Collector writes them, and the `assemble` that reads them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from rich.text import Text

from worker.commands.shared.scored_rows import TailRecord, rows
from worker.lab.demo.console import step
from worker.lab.demo.flow import ACCEPTED, REJECTED, clients, scored
from worker.lab.demo.process import DemoProcess, Stage

TOPIC: Final = "otlp_spans"
SECOND: Final = 1_000_000_000
ROOT: Final = "f" * 16

RUNS: Final = (
    # agent, task, tool calls with their results, answer
    ("sre-bot", "Why do uploads fail since noon?", (("read_log", "403 from the store"), ("rotate_key", "done")),
     "The store's key had expired; it is rotated."),
    ("sre-bot", "Why is the disk of db-2 full?", (("df", "96 % used"), ("clean", "12 GB freed"), ("df", "61 % used")),
     "Old logs filled it; they are removed."),
    ("tutor", "What is the capital of Peru?", (), "Lima."),
)  # fmt: skip
TRACE_IDS: Final = tuple(uuid.uuid5(uuid.NAMESPACE_OID, f"demo {number}") for number in range(len(RUNS)))


def demo_spans(now_ns: int) -> list[bytes]:
    """Return OTLP/JSON records with two spans each; the root span of a run comes last."""
    records = []
    for trace_id, run in zip(TRACE_IDS, RUNS, strict=True):
        spans = _run(trace_id.hex, now_ns, *run)
        for start in range(0, len(spans), 2):
            scope = {"scope": {"name": "agent.loop"}, "spans": spans[start : start + 2]}
            records.append(json.dumps({"resourceSpans": [{"scopeSpans": [scope]}]}).encode())
    return records


def _run(
    trace_id: str, now_ns: int, agent: str, task: str, calls: Sequence[tuple[str, str]], answer: str
) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []

    def add(operation: str, at_ns: int = now_ns, span_id: str = "", parent: str = ROOT, **attributes: str) -> None:
        """Add a span; `attributes` are gen_ai ones, with __ for each dot in a name."""
        named = {"operation.name": operation, **{key.replace("__", "."): text for key, text in attributes.items()}}
        spans.append({
            "traceId": trace_id, "spanId": span_id or f"{len(spans) + 1:016x}", "parentSpanId": parent,
            "name": operation, "kind": 1, "startTimeUnixNano": str(at_ns), "endTimeUnixNano": str(at_ns + SECOND),
            "attributes": [{"key": f"gen_ai.{key}", "value": {"stringValue": text}} for key, text in named.items()],
        })  # fmt: skip

    said: list[dict[str, Any]] = [{"role": "user", "parts": [{"type": "text", "content": task}]}]
    for turn, (tool, result) in enumerate([*calls, ("", answer)]):
        at_ns, call = now_ns + turn * SECOND, f"call-{turn}"
        parts: list[dict[str, Any]] = [{"type": "text", "content": f"I call {tool}." if tool else answer}]
        if tool:
            parts.append({"type": "tool_call", "id": call, "name": tool, "arguments": {}})
        message = {"role": "assistant", "parts": parts}
        sent = {"input__messages": json.dumps(said), "output__messages": json.dumps([message])}
        add("chat", at_ns, provider__name="openai", **sent)
        if tool:
            add("execute_tool", at_ns + 1, tool__name=tool, tool__call__id=call, tool__call__result=result)
            response = {"type": "tool_call_response", "id": call, "response": result}
            said += [message, {"role": "tool", "parts": [response]}]
    add("invoke_agent", span_id=ROOT, parent="", agent__name=agent)
    return spans


def running_assemble(stage: Stage) -> AbstractContextManager[DemoProcess]:
    """Start `assemble`; kill it at the end. The worker must be ready, because it creates the topics."""
    variables = {
        "TOPIC_PARTITIONS": "2", "ASSEMBLE_GRACE_SECONDS": "1", "ASSEMBLE_CONFIDENCE": "0.9",
        "ASSEMBLE_DOMAIN": "general", "ASSEMBLE_VISIBILITY": "private", "ASSEMBLE_PRIVACY": "private",
    }  # fmt: skip
    says = "assemble ready, metrics at {url}/metrics"
    return stage.running("spans", "assemble", ["assemble"], variables, says=says)


def show_spans(stage: Stage, assemble: DemoProcess) -> None:
    """Publish the spans, wait for the scores of their runs, and print them. Raises DemoError if one is missing."""
    records = demo_spans(time.time_ns())
    with step(stage.console, "spans") as say:
        say(f"published {len(records)} records on {TOPIC}; a run is complete a second after its last span")
        found = asyncio.run(_scores(stage.bootstrap, records, assemble))
    stage.console.print(
        Text(f"\nFrom OpenTelemetry: {len(RUNS)} runs in {len(records)} records of spans", "bold"),
        rows(found),
        "",
        sep="\n",
    )


async def _scores(bootstrap: str, records: Sequence[bytes], assemble: DemoProcess) -> list[TailRecord]:
    async with clients(bootstrap, ACCEPTED, REJECTED) as (producer, consumer):
        for record in records:
            await producer.send_and_wait(TOPIC, record)
        return await scored(consumer, assemble, len(RUNS), {f"kp:trace:{trace_id}" for trace_id in TRACE_IDS})
