"""The demo's verdicts: one agent overstates its confidence and loses it, the other keeps its word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from rich import box
from rich.text import Text

from worker.commands.shared.scored_rows import COLOURS
from worker.commands.shared.shown import PlainTable
from worker.core.trace import CONTEXT
from worker.core.verdicts import make_verdict, sign_verdict
from worker.kafka.cluster.connections import admin_client
from worker.kafka.cluster.describe import topic_id
from worker.lab.demo.console import step
from worker.lab.demo.flow import Document, clients, scored
from worker.lab.demo.process import DemoProcess, Stage

TOPIC: Final = "demo.judged-runs"
JUDGE: Final = "tests"
ROUNDS: Final = 5
RUNS: Final = 6
"""Runs of each agent in a round; the judge sees all of them before the next round."""

THRESHOLD: Final = 0.6  # nothing here reaches 0.75: no embedder, so novelty is 0.5

AGENTS: Final[Mapping[str, tuple[float, float]]] = {"boaster": (0.99, 1 / 6), "steady": (0.8, 5 / 6)}
"""The confidence that each agent states for every run, and the share of its runs that succeed."""


@contextlib.contextmanager
def running_judged(stage: Stage) -> Iterator[tuple[DemoProcess, bytes]]:
    """Start a worker that uses confidence from verdicts; yield it with the judge's key; stop it at the end."""
    key = secrets.token_hex(32).encode()
    keys = stage.directory / "judges.key"
    keys.write_bytes(b"%s %s\n" % (JUDGE.encode(), key))
    variables = {
        "GROUP_ID": "demo-verdicts", "TOPIC_PARTITIONS": "1", "EMBEDDER": "none", "SOURCE_TOPIC": TOPIC,
        "ACCEPTED_TOPIC": f"{TOPIC}.accepted", "REJECTED_TOPIC": f"{TOPIC}.rejected",
        "DEAD_LETTER_TOPIC": f"{TOPIC}.dead-letter", "VERDICT_KEY_FILE": str(keys), "CONFIDENCE": "record",
        "THRESHOLD": str(THRESHOLD),
    }  # fmt: skip
    says = "worker with KP_CONFIDENCE=record ready, metrics at {url}/metrics"
    with stage.running("judge", "verdicts", ["run"], variables, says=says) as worker:
        yield worker, key


def show_verdicts(stage: Stage, worker: DemoProcess, key: bytes) -> None:
    """Publish rounds of runs, each judged before the next, and print a line for each. Raises DemoError."""
    with step(stage.console, "judge") as say:
        say(f"{ROUNDS} rounds of {RUNS} runs for each agent, each judged before the next")
        rounds = asyncio.run(_rounds(stage.bootstrap, worker, key))
    stage.console.print(
        Text("\nVerdicts: what agents say, and what becomes of it", "bold"),
        Text("says: the stated confidence; judged: successes so far; used: the outcome confidence.", "dim"),
        Text(f"Each row is an agent's last run in a round; a score of {THRESHOLD} is accepted.", "dim"),
        _table(rounds),
        "",
        sep="\n",
    )


def _table(rounds: list[dict[str, Document]]) -> PlainTable:
    """Tabulate the last scored run of each agent in each round."""
    columns = ("round", "agent", "says", "judged", "used", "score", "decision")
    table = PlainTable(*columns, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for number, last in enumerate(rounds, 1):
        for place, (agent, document) in enumerate(last.items()):
            scoring = document["scoring"]
            said = scoring["confidence"]
            table.add_row(
                "" if place else str(number), agent, f"{said['stated']:.2f}",
                f"{said['succeeded']:.0f} of {said['judged']}", Text(f"{said['used']:.2f}", "bold"),
                f"{scoring['score']:.2f}", Text(scoring["decision"], COLOURS[scoring["decision"]]),
                end_section=bool(place) and number < len(rounds),
            )  # fmt: skip
    return table


def _trace(number: int, agent: str, claimed: float) -> dict[str, Any]:
    steps = [
        {"step_id": 0, "type": "observation", "content": f"Test {number} fails."},
        {"step_id": 1, "type": "tool_call", "content": "Look for the cause.", "tool": {"name": "grep"}},
        {"step_id": 2, "type": "tool_call", "content": "Run the test again.", "tool": {"name": "pytest"}},
        {"step_id": 3, "type": "thought", "content": "The test passes."},
    ]
    return {
        "@context": CONTEXT, "@type": "ReasoningTrace", "id": f"kp:trace:run-{number}",
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
    async with admin_client({"bootstrap_servers": bootstrap}) as admin:
        identity = await topic_id(admin, TOPIC)
    async with clients(bootstrap, f"{TOPIC}.accepted", f"{TOPIC}.rejected") as (producer, consumer):
        for number in range(ROUNDS):
            for run in range(RUNS):
                for place, (agent, (claimed, _)) in enumerate(AGENTS.items()):
                    value = json.dumps(_trace((number * RUNS + run) * len(AGENTS) + place, agent, claimed)).encode()
                    await producer.send_and_wait(TOPIC, value, agent.encode())
            done = [it.document or {} for it in await scored(consumer, worker, RUNS * len(AGENTS))]
            mine = {agent: [it for it in done if it["metadata"]["agent_id"] == agent] for agent in AGENTS}
            rounds.append({agent: documents[-1] for agent, documents in mine.items()})
            for agent, (_, rate) in AGENTS.items():
                for run, document in enumerate(mine[agent]):
                    line = document | {"success": run < round(rate * RUNS), "judge": JUDGE}
                    verdict = make_verdict(line, topic=TOPIC, topic_id=identity, issued_at=datetime.now(UTC))
                    it = sign_verdict(verdict, key)
                    await producer.send_and_wait(TOPIC, it.value, it.key, it.partition, headers=it.headers)
    return rounds
