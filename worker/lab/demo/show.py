"""The output of `kp-worker demo`, step by step: the whole product on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from worker.commands.shared.console import program
from worker.commands.shared.explanation import explain_trace, explanation_text
from worker.commands.shared.samples import samples
from worker.commands.shared.scored_rows import COLOURS, rows
from worker.commands.shared.shown import shown_score
from worker.config import Settings
from worker.core.terminal import clean
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.demo.console import interruptible, print_error, print_lines, running_kafka, step, wide_console
from worker.lab.demo.flow import ACCEPTED, DEAD_LETTER, REJECTED, SOURCE, DemoOutcome, Document, run_flow
from worker.lab.demo.otlp import running_assemble, show_spans
from worker.lab.demo.process import DemoError, DemoProcess, Stage, figures, worker_variables
from worker.lab.demo.verdicts import running_judged, show_verdicts

STORY: Final = ("kp:trace:7310a055", "kp:trace:7c3a6bc1", "kp:trace:e949175c")
"""Beginnings of the ids of one incident reported three times: first, 39 minutes later, 69 minutes after that."""


class Parts(NamedTuple):
    """The optional parts of the demo."""

    otlp: bool
    verdicts: bool
    keep_running: bool  # until Ctrl-C


def run_demo(settings: Settings, http_port: int | None, parts: Parts) -> int:
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
            with stage.running("worker", "the worker", ["run"], variables, port=http_port) as worker:
                _show(stage, worker, settings, parts)
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
    hint = "" if parts.keep_running else f" To explore it yourself: {program()} demo --keep-running"
    console.print(f"Everything is stopped.{hint}")
    return 0


def _show(stage: Stage, worker: DemoProcess, settings: Settings, parts: Parts) -> None:
    """Send the samples through everything and show the results."""
    console, assemble = stage.console, None
    with contextlib.ExitStack() as stack:
        with Live(console=console, transient=True, refresh_per_second=10) as live:
            flow = run_flow(stage.bootstrap, samples(), worker, lambda outcome: live.update(_counts(outcome)))
            outcome = asyncio.run(flow)
        _print_outcome(console, outcome, worker, settings)
        if problem := outcome.imbalance():
            raise DemoError(f"{problem}.\n{worker.tail()}")
        if parts.otlp:
            assemble = stack.enter_context(running_assemble(stage))
            show_spans(stage, assemble)
        if parts.verdicts:
            judged, key = stack.enter_context(running_judged(stage))
            show_verdicts(stage, judged, key)
            judged.stop()
        if parts.keep_running:
            _stay(stage, worker)
        if assemble is not None:
            assemble.stop()


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
    told = story(outcome.scored)
    console.print(
        "",
        _counts(outcome),
        Text(f"  {figures(worker)}\n", "dim"),
        Text("Scored traces, by partition and offset", "bold"),
        Text("C complexity, N novelty, D tool diversity, O outcome confidence", "dim"),
        rows([it for it in outcome.records if it.dead_letter is None]),
        Text("\nDead letters, with the reason in their headers", "bold"),
        rows(outcome.dead, only_dead_letters=True),
        sep="\n",
    )
    if told is not None:
        retold = next(document for document in outcome.scored if document["id"].startswith(STORY[1]))
        console.print(
            Text("\nThe same incident, reported three times", "bold"),
            told,
            Text("\nThe second one explained", "bold"),
            explanation_text(explain_trace(msgspec.json.encode(retold), settings)),
            "",
            sep="\n",
        )


def story(documents: Sequence[Document]) -> Text | None:
    """Return how the incident that was reported three times was scored each time; None if it is missing."""
    told = [document for document in documents if document["id"].startswith(STORY)]
    if len(told) != len(STORY):
        return None
    lines: list[Text] = []
    for document in told:
        scoring, nearest = document["scoring"], document["scoring"]["nearest"]
        if nearest is None:
            chapter = "no embedder: novelty is neutral" if scoring["embedder"] is None else "the cache is still empty"
        elif nearest["id"] in {it["id"] for it in told}:
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
