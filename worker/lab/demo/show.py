"""The output of `kp-worker demo`, step by step: the whole product on one machine."""

import asyncio
import contextlib
import dataclasses
import json
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from aiokafka.errors import KafkaError
from rich import box
from rich.console import Console
from rich.live import Live
from rich.text import Text

from worker.commands.shared.console import program
from worker.commands.shared.explanation import explain_trace, explanation_text
from worker.commands.shared.options import SAMPLES
from worker.commands.shared.scored_rows import COLOURS, TailRecord, rows
from worker.commands.shared.shown import PlainTable, shown_score
from worker.config import Settings
from worker.core.scoring import PROFILES, weights_by_verdicts
from worker.core.terminal import clean
from worker.core.trace import CONTEXT
from worker.core.verdicts import make_verdict, sign_verdict
from worker.kafka.connections import admin_client
from worker.kafka.describe import topic_id
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.console import interruptible, print_error, print_lines, running_kafka, step, wide_console
from worker.lab.demo.process import (
    ACCEPTED,
    DEAD_LETTER,
    REJECTED,
    SOURCE,
    DemoError,
    DemoOutcome,
    DemoProcess,
    Document,
    Stage,
    clients,
    run_flow,
    samples,
    scored,
    worker_variables,
)

STORY = ("kp:trace:7310a055", "kp:trace:7c3a6bc1", "kp:trace:e949175c")
"""Beginnings of the ids of one incident reported three times: first, 39 minutes later, 69 minutes after that."""


SPANS = "otlp_spans"


def run_demo(settings: Settings, http_port: int | None, *, otlp: bool, verdicts: bool, keep_running: bool) -> int:
    """Show the whole worker on an embedded broker; return the exit code (0, 1 failed, 130 interrupted)."""
    console = wide_console()
    console.print("A real Kafka, a real worker and sample traces; takes about half a minute, longer the first time.\n")
    try:
        with (
            interruptible(),
            tempfile.TemporaryDirectory(prefix="kp-demo-") as directory,
            running_kafka(console, EmbeddedKafka()) as kafka,
        ):
            stage = Stage(console, kafka.bootstrap_servers, Path(directory))
            variables = worker_variables(settings)
            with stage.running("worker", "the worker", "run", variables, port=http_port) as worker:
                _show_samples(stage, worker, settings)
                with showing_spans(stage) if otlp else contextlib.nullcontext():
                    if verdicts:
                        show_verdicts(stage)
                    if keep_running:
                        _stay(stage, worker)
                with step(console, "stop") as say:
                    say("worker drains, commits and leaves its group")
                    worker.stop()
                    say("worker ended with exit code 0")
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        return 130
    except (DemoError, BrokerError, KafkaError, OSError) as error:
        print_error(console, error)
        return 1
    hint = "" if keep_running else f" To explore it yourself: {program()} demo --keep-running"
    console.print(f"Everything is stopped.{hint}")
    return 0


def _show_samples(stage: Stage, worker: DemoProcess, settings: Settings) -> None:
    """Send the samples through the worker and show the results. Raises DemoError."""
    with Live(console=stage.console, transient=True, refresh_per_second=10) as live:
        flow = run_flow(stage.bootstrap, samples(), worker, lambda outcome: live.update(_counts(outcome)))
        outcome = asyncio.run(flow)
    _print_outcome(stage.console, outcome, worker, settings)
    if problem := outcome.imbalance():
        raise DemoError(f"{problem}.\n{worker.tail()}")


def _counts(outcome: DemoOutcome) -> Text:
    rate = len(outcome.records) / outcome.seconds if outcome.seconds else 0.0
    return Text.assemble(
        f"  published {len(outcome.published)}   ",
        (f"accepted {outcome.count('accepted')}   ", COLOURS["accepted"]),
        (f"rejected {outcome.count('rejected')}   ", COLOURS["rejected"]),
        (f"dead letters {len(outcome.dead)}   ", "yellow"),
        f"{rate:.0f} traces/s",
    )


def _print_outcome(console: Console, outcome: DemoOutcome, worker: DemoProcess, settings: Settings) -> None:
    console.print(
        "",
        _counts(outcome),
        Text(f"  {worker.figures()}\n", "dim"),
        Text("Scored traces, by partition and offset", "bold"),
        Text("C complexity, N novelty, D tool diversity, O outcome confidence", "dim"),
        rows([it for it in outcome.records if it.dead_letter is None]),
        Text("\nDead letters, with the reason in their headers", "bold"),
        rows(outcome.dead, only_dead_letters=True),
        sep="\n",
    )
    if (incident := story(outcome.scored)) is not None:
        retold = next(document for document in outcome.scored if document["id"].startswith(STORY[1]))
        console.print(
            Text("\nThe same incident, reported three times", "bold"),
            incident,
            Text("\nThe second one explained", "bold"),
            explanation_text(explain_trace(msgspec.json.encode(retold), settings)),
            "",
            sep="\n",
        )


def story(documents: Sequence[Document]) -> Text | None:
    """Return how the incident that was reported three times was scored each time; None if it is missing."""
    reports = [document for document in documents if document["id"].startswith(STORY)]
    if len(reports) != len(STORY):
        return None
    lines: list[Text] = []
    for document in reports:
        scoring, nearest = document["scoring"], document["scoring"]["nearest"]
        if nearest is None:
            chapter = "no embedder: novelty is neutral" if scoring["embedder"] is None else "the cache is still empty"
        elif nearest["id"] in [it["id"] for it in reports]:
            chapter = f"seen before: similarity {nearest['similarity']:.2f}"
        else:
            chapter = "the others have expired: new again" if lines else "nothing similar in the cache"
        lines.append(Text.assemble(
            f"  {document['metadata']['created_at'][11:16]}  {clean(document['id'][9:17])}  ",
            f"novelty {scoring['components']['novelty']:.2f}  ",
            f"score {shown_score(scoring['score'], scoring['threshold'])}  ",
            (f"{scoring['decision']}  ", COLOURS[scoring["decision"]]),
            chapter,
        ))  # fmt: skip
    return Text("\n").join(lines)


def _stay(stage: Stage, worker: DemoProcess) -> None:
    """Print all addresses and wait for Ctrl-C. Raises DemoError if a process stops by itself."""
    address = stage.bootstrap
    with contextlib.suppress(KeyboardInterrupt):
        stage.console.print(Text("Still running", "bold"))
        print_lines(
            stage.console,
            f"look at  {worker.url}/   the status page, live",
            f"metrics  {worker.url}/metrics   health  /healthz, /readyz",
            f"topics   {SOURCE} -> {ACCEPTED}, {REJECTED}, {DEAD_LETTER}",
            f"read     {program()} tail -b {address}",
            f"         {program()} tail -b {address} --dead-letters",
            f"send     {program()} publish samples -b {address}",
            f"log      {worker.log}",
            "stop     Ctrl-C",
        )
        while True:
            worker.check()
            time.sleep(0.2)


# -- spans


@contextlib.contextmanager
def showing_spans(stage: Stage) -> Iterator[None]:
    """Publish the spans, print the scores of their runs, and keep `assemble` running. Raises DemoError if one lacks.

    The worker must be ready, because it creates the topics.
    """
    variables = {
        "TOPIC_PARTITIONS": "2", "ASSEMBLE_GRACE_SECONDS": "1", "ASSEMBLE_CONFIDENCE": "0.9",
        "ASSEMBLE_DOMAIN": "general", "ASSEMBLE_VISIBILITY": "private", "ASSEMBLE_PRIVACY": "private",
    }  # fmt: skip
    records = SAMPLES.with_name("demo_spans.jsonl").read_bytes().splitlines()  # of three runs
    with stage.running("spans", "assemble", "assemble", variables, says="assemble") as assemble:
        with step(stage.console, "spans") as say:
            say(f"published {len(records)} records on {SPANS}; a run is complete a second after its last span")
            scores = asyncio.run(_scores(stage.bootstrap, records, assemble))
        title = Text(f"\nFrom OpenTelemetry: {len(scores)} runs in {len(records)} records of spans", "bold")
        stage.console.print(title, rows(scores), "", sep="\n")
        yield
        assemble.stop()


async def _scores(bootstrap: str, records: Sequence[bytes], assemble: DemoProcess) -> list[TailRecord]:
    ids = {f"kp:trace:{UUID(trace_id)}" for trace_id in re.findall(r'"traceId": "(\w+)"', str(records))}
    async with clients(bootstrap, ACCEPTED, REJECTED) as (producer, consumer):
        for record in records:
            await producer.send_and_wait(SPANS, record)
        return await scored(consumer, assemble, len(ids), ids)


# -- verdicts: one agent overstates its confidence and loses it, the other keeps its word


JUDGED = "demo.judged-runs"
JUDGE = "tests"
ROUNDS = 5
RUNS = 6
"""Runs of each agent in a round; the judge sees all of them before the next round."""

THRESHOLD = 0.6  # nothing here reaches 0.75: no embedder, so novelty is 0.5

AGENTS = {"boaster": (0.99, 1 / 6), "steady": (0.8, 5 / 6)}
"""The confidence that each agent states for every run, and the share of its runs that succeed."""


def show_verdicts(stage: Stage) -> None:
    """Start a worker that uses confidence from verdicts, publish rounds of runs, and print a line for each.

    Each round is judged before the next. Raises DemoError.
    """
    key = secrets.token_hex(32).encode()
    keys = stage.directory / "judges.key"
    keys.write_bytes(b"%s %s\n" % (JUDGE.encode(), key))
    variables = {
        "GROUP_ID": "demo-verdicts", "TOPIC_PARTITIONS": "1", "EMBEDDER": "none", "SOURCE_TOPIC": JUDGED,
        "ACCEPTED_TOPIC": f"{JUDGED}.accepted", "REJECTED_TOPIC": f"{JUDGED}.rejected",
        "DEAD_LETTER_TOPIC": f"{JUDGED}.dead-letter", "VERDICT_KEY_FILE": str(keys), "CONFIDENCE": "record",
        "THRESHOLD": str(THRESHOLD),
    }  # fmt: skip
    with stage.running("judge", "verdicts", "run", variables, says="worker with KP_CONFIDENCE=record") as worker:
        with step(stage.console, "judge") as say:
            say(f"{ROUNDS} rounds of {RUNS} runs for each agent, each judged before the next")
            rounds = asyncio.run(_judged_rounds(stage.bootstrap, worker, key))
        stage.console.print(
            Text("\nVerdicts: what agents say, and what becomes of it", "bold"),
            Text("says: the stated confidence; judged: successes so far; used: the outcome confidence.", "dim"),
            Text(f"Each row is an agent's last run in a round; a score of {THRESHOLD} is accepted.", "dim"),
            Text("at 0.6: the score with weights where the outcome has 0.6 (docs/verdicts.md).", "dim"),
            _verdict_table(rounds),
            "",
            sep="\n",
        )
        worker.stop()


def _verdict_table(rounds: list[dict[str, Document]]) -> PlainTable:
    """Tabulate the last scored run of each agent in each round."""
    columns = ("round", "agent", "says", "judged", "used", "score", "decision", "at 0.6")
    weights = dataclasses.asdict(weights_by_verdicts(PROFILES["code"].weights))
    table = PlainTable(*columns, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for number, last in enumerate(rounds, 1):
        for place, (agent, document) in enumerate(last.items()):
            scoring = document["scoring"]
            confidence = scoring["confidence"]
            table.add_row(
                "" if place else str(number), agent, f"{confidence['stated']:.2f}",
                f"{confidence['succeeded']:.0f} of {confidence['judged']}", Text(f"{confidence['used']:.2f}", "bold"),
                f"{scoring['score']:.2f}", Text(scoring["decision"], COLOURS[scoring["decision"]]),
                f"{sum(weights[name] * value for name, value in scoring['components'].items()):.2f}",
                end_section=bool(place) and number < len(rounds),
            )  # fmt: skip
    return table


def _run_of(number: int, agent: str, claimed: float) -> dict[str, Any]:
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


async def _judged_rounds(bootstrap: str, worker: DemoProcess, key: bytes) -> list[dict[str, Document]]:
    """Return the last scored run of each agent, by round."""
    rounds: list[dict[str, Document]] = []
    async with admin_client({"bootstrap_servers": bootstrap}) as admin:
        identity = await topic_id(admin, JUDGED)
    async with clients(bootstrap, f"{JUDGED}.accepted", f"{JUDGED}.rejected") as (producer, consumer):
        for number in range(ROUNDS):
            for run in range(RUNS):
                for place, (agent, (claimed, _)) in enumerate(AGENTS.items()):
                    value = json.dumps(_run_of((number * RUNS + run) * len(AGENTS) + place, agent, claimed)).encode()
                    await producer.send_and_wait(JUDGED, value, agent.encode())
            documents = [record.document or {} for record in await scored(consumer, worker, RUNS * len(AGENTS))]
            runs = {agent: [it for it in documents if it["metadata"]["agent_id"] == agent] for agent in AGENTS}
            rounds.append({agent: documents[-1] for agent, documents in runs.items()})
            for agent, (_, rate) in AGENTS.items():
                for run, document in enumerate(runs[agent]):
                    line = document | {"success": run < round(rate * RUNS), "judge": JUDGE}
                    verdict = make_verdict(line, topic=JUDGED, topic_id=identity, issued_at=datetime.now(UTC))
                    signed = sign_verdict(verdict, key)
                    await producer.send_and_wait(
                        JUDGED, signed.value, signed.key, signed.partition, headers=signed.headers
                    )
    return rounds
