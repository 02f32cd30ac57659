"""The demo's verdicts: an agent that claims everything and loses its confidence, and one that keeps its word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from rich.console import Console
from rich.text import Text

from worker.core.verdicts import make_verdict, sign_verdict
from worker.kafka.cluster.connections import admin_client
from worker.kafka.cluster.describe import topic_id
from worker.lab.broker.ports import free_ports
from worker.lab.demo.console import step
from worker.lab.demo.flow import STALL_SECONDS
from worker.lab.demo.process import DemoError, DemoProcess
from worker.lab.demo.view import Document, verdicts_table

TOPIC: Final = "demo.judged-runs"
JUDGE: Final = "tests"
ROUNDS: Final = 5
RUNS: Final = 6
"""Runs of each agent in a round; the judge sees all of them before the next round."""

AGENTS: Final[Mapping[str, tuple[float, float]]] = {"boaster": (0.99, 1 / 6), "steady": (0.8, 5 / 6)}
"""What each agent says of each of its runs, and the share of them that succeeds."""


@contextlib.contextmanager
def running_judged(console: Console, bootstrap: str, directory: Path) -> Iterator[tuple[DemoProcess, bytes]]:
    """Start a worker that takes confidence from verdicts; yield it with the judge's key; stop it at the end."""
    (port,) = free_ports(1)
    key = secrets.token_hex(32).encode()
    keys = directory / "judges.key"
    keys.write_bytes(b"%s %s\n" % (JUDGE.encode(), key))
    variables = {
        "KP_BOOTSTRAP_SERVERS": bootstrap, "KP_GROUP_ID": "demo-verdicts", "KP_CREATE_TOPICS": "true",
        "KP_TOPIC_PARTITIONS": "1", "KP_HTTP_HOST": "127.0.0.1", "KP_HTTP_PORT": str(port), "KP_EMBEDDER": "none",
        "KP_SOURCE_TOPIC": TOPIC, "KP_ACCEPTED_TOPIC": f"{TOPIC}.accepted", "KP_REJECTED_TOPIC": f"{TOPIC}.rejected",
        "KP_DEAD_LETTER_TOPIC": f"{TOPIC}.dead-letter", "KP_VERDICT_KEY_FILE": str(keys), "KP_CONFIDENCE": "record",
        "KP_THRESHOLD": "0.6",
    }  # fmt: skip
    with DemoProcess("verdicts", ["run"], variables, port, directory) as worker:
        with step(console, "verdicts") as say:
            worker.wait_ready(say)
            say(f"a worker with KP_CONFIDENCE=record ready, metrics at http://127.0.0.1:{port}/metrics")
        yield worker, key


def show_verdicts(console: Console, bootstrap: str, worker: DemoProcess, key: bytes) -> None:
    """Publish rounds of runs, each judged before the next, and print a line for each. Raises DemoError."""
    with step(console, "verdicts") as say:
        say(f"{ROUNDS} rounds of {RUNS} runs for each agent, each judged before the next")
        rounds = asyncio.run(_rounds(bootstrap, worker, key))
    console.print(
        Text("\nVerdicts: what agents say, and what becomes of it", "bold"),
        Text("used: the outcome confidence; judged: verdicts so far, and how many of them are successes", "dim"),
        verdicts_table(rounds),
        "",
        sep="\n",
    )


def _trace(number: int, agent: str, claimed: float) -> dict[str, Any]:
    steps = [
        {"step_id": 0, "type": "observation", "content": f"Test {number} fails."},
        {"step_id": 1, "type": "tool_call", "content": "Look for the cause.", "tool": {"name": "grep"}},
        {"step_id": 2, "type": "tool_call", "content": "Run the test again.", "tool": {"name": "pytest"}},
        {"step_id": 3, "type": "thought", "content": "The test passes."},
    ]
    return {
        "@context": "https://openknowledgepulse.org/schema/v1", "@type": "ReasoningTrace",
        "id": f"kp:trace:run-{number}",
        "task": {"objective": f"Mend test {number}"}, "steps": steps,
        "outcome": {"result_summary": "Mended.", "confidence": claimed},
        "metadata": {
            "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"), "agent_id": agent,
            "task_domain": "code", "success": True, "quality_score": 0.0, "visibility": "private",
            "privacy_level": "private",
        },
    }  # fmt: skip


async def _rounds(bootstrap: str, worker: DemoProcess, key: bytes) -> list[dict[str, Document]]:
    """Return the last scored run of each agent, by round."""
    rounds: list[dict[str, Document]] = []
    client = {"bootstrap_servers": bootstrap}
    async with admin_client(client) as admin:
        identity = await topic_id(admin, TOPIC)
    async with (
        AIOKafkaProducer(**client, acks="all", enable_idempotence=True) as producer,
        AIOKafkaConsumer(
            f"{TOPIC}.accepted", f"{TOPIC}.rejected", **client, isolation_level="read_committed",
            auto_offset_reset="earliest", enable_auto_commit=False,
        ) as consumer,
    ):  # fmt: skip
        for number in range(ROUNDS):
            for run in range(RUNS):
                for place, (agent, (claimed, _)) in enumerate(AGENTS.items()):
                    value = json.dumps(_trace((number * RUNS + run) * len(AGENTS) + place, agent, claimed)).encode()
                    await producer.send_and_wait(TOPIC, value, agent.encode())
            scored = await _scored(consumer, worker, RUNS * len(AGENTS))
            rounds.append({agent: [it for it in scored if it["metadata"]["agent_id"] == agent][-1] for agent in AGENTS})
            for agent, (_, rate) in AGENTS.items():
                mine = [it for it in scored if it["metadata"]["agent_id"] == agent]
                for run, document in enumerate(mine):
                    line = document | {"success": run < round(rate * RUNS), "judge": JUDGE}
                    verdict = make_verdict(line, topic=TOPIC, topic_id=identity or "", issued_at=datetime.now(UTC))
                    signed = sign_verdict(verdict, key)
                    await producer.send_and_wait(
                        TOPIC, signed.value, signed.key, signed.partition, headers=signed.headers
                    )
    return rounds


async def _scored(consumer: AIOKafkaConsumer, worker: DemoProcess, count: int) -> list[Document]:
    """Return so many scored runs, in the order of the source."""
    found: list[Document] = []
    began = time.monotonic()
    while len(found) < count:
        worker.check()
        if time.monotonic() - began > STALL_SECONDS:
            raise DemoError(f"{len(found)} of {count} runs were scored.\n{worker.tail()}")
        for batch in (await consumer.getmany(timeout_ms=100)).values():
            found += [msgspec.json.decode(each.value or b"") for each in batch]
    return sorted(found, key=lambda it: it["scoring"]["source"]["offset"])
