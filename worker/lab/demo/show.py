"""What `kp-worker demo` shows, step by step: the whole product on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Final

from aiokafka.errors import KafkaError
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from worker.commands.shared.console import program
from worker.commands.shared.samples import Sample, samples
from worker.config import Settings
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.demo.console import (
    interruptible,
    print_error,
    print_lines,
    running_kafka,
    step,
    wide_console,
)
from worker.lab.demo.flow import ACCEPTED, DEAD_LETTER, REJECTED, SOURCE, DemoOutcome, run_flow
from worker.lab.demo.otlp import running_assemble, show_spans
from worker.lab.demo.process import DemoError, DemoWorker
from worker.lab.demo.registry import Contributed, DemoRegistry, registry_text, running_registry, secret_sample
from worker.lab.demo.verdicts import running_judged, show_verdicts
from worker.lab.demo.view import COLOURS, STORY, dead_letters_table, explanation, scores_table, story

FIGURES_SECONDS: Final = 0.5  # each look at /metrics takes time from the embedder


def run_demo(
    settings: Settings, http_port: int | None, *, keep_running: bool, registry: bool, otlp: bool, verdicts: bool
) -> int:
    """Show the whole worker on an embedded broker; return the exit code (0, 1 failed, 130 interrupted).

    `registry`: also the way of the accepted traces to a registry, a stand-in. `otlp`: also runs that are made of spans.
    `verdicts`: also two agents whose runs are judged.
    """
    console = wide_console()
    console.print("A real Kafka, a real worker and sample traces; takes about half a minute, longer the first time.\n")
    try:
        with (
            interruptible(),
            tempfile.TemporaryDirectory(prefix="kp-demo-") as directory,
            running_kafka(console, EmbeddedKafka()) as kafka,
            DemoWorker(kafka.bootstrap_servers, http_port, Path(directory), settings) as worker,
        ):
            with step(console, "worker") as say:
                worker.wait_ready(say)
                say(f"ready, metrics at http://127.0.0.1:{worker.port}/metrics")
            extras = (Path(directory) if extra else None for extra in (registry, otlp, verdicts))
            _show(console, kafka, worker, *extras, keep_running=keep_running)
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


def _show(
    console: Console,
    kafka: EmbeddedKafka,
    worker: DemoWorker,
    registry_logs: Path | None,
    spans_logs: Path | None,
    verdicts_logs: Path | None,
    *,
    keep_running: bool,
) -> None:
    """Send the samples through everything and show the results.

    `registry_logs`, `spans_logs`, `verdicts_logs`: where to log, with a registry, with spans and with verdicts.
    """
    address, registry, assemble, records = kafka.bootstrap_servers, None, None, samples()
    with contextlib.ExitStack() as stack:
        if registry_logs is not None:
            registry = stack.enter_context(running_registry(console, address, registry_logs))
            records.append(secret_sample())
        outcome = asyncio.run(_flow(address, records, worker, console))
        _print_outcome(console, outcome, worker)
        problem = outcome.imbalance()
        if problem is not None:
            raise DemoError(f"{problem}.\n{worker.tail()}")
        if spans_logs is not None:
            assemble = stack.enter_context(running_assemble(console, address, spans_logs))
            show_spans(console, address, assemble)
        if verdicts_logs is not None:
            judged, key = stack.enter_context(running_judged(console, address, verdicts_logs))
            show_verdicts(console, address, judged, key)
            judged.stop()
        if registry is not None:
            _print_contributed(console, registry.wait(outcome.count("accepted")), outcome)
        if keep_running:
            _stay(console, kafka, worker, registry)
        if assemble is not None:
            assemble.stop()
        if registry is not None:
            registry.stop()


async def _flow(bootstrap: str, records: list[Sample], worker: DemoWorker, console: Console) -> DemoOutcome:
    """Send the records through the worker, and show the counts meanwhile."""
    figures, read = "", 0.0
    with Live(console=console, transient=True, refresh_per_second=10) as live:

        async def show(outcome: DemoOutcome) -> None:
            nonlocal figures, read
            if console.is_terminal:
                if time.monotonic() - read > FIGURES_SECONDS:
                    figures, read = await asyncio.to_thread(worker.figures), time.monotonic()
                live.update(Group(_counts(outcome), Text(f"  {figures}", "dim")))

        return await run_flow(bootstrap, records, worker.check, show)


def _counts(outcome: DemoOutcome) -> Text:
    rate = len(outcome) / outcome.seconds if outcome.seconds else 0.0
    return Text.assemble(
        f"  published {len(outcome.published)}   ",
        (f"accepted {outcome.count('accepted')}   ", COLOURS["accepted"]),
        (f"rejected {outcome.count('rejected')}   ", COLOURS["rejected"]),
        (f"dead letters {len(outcome.dead)}   ", "yellow"),
        f"{rate:.0f} traces/s",
    )


def _print_outcome(console: Console, outcome: DemoOutcome, worker: DemoWorker) -> None:
    told = story(outcome.scored)
    console.print(
        "",
        _counts(outcome),
        Text(f"  {worker.figures().rsplit(',', 1)[0]}\n", "dim"),  # the lag's gauge is a second old
        Text("Scored traces, by partition and offset", "bold"),
        Text("C complexity, N novelty, D tool diversity, O outcome confidence", "dim"),
        scores_table(outcome.scored, console.width),
        Text("\nDead letters, with the reason in their headers", "bold"),
        Text("at: partition and offset", "dim"),
        dead_letters_table(outcome.dead),
        sep="\n",
    )
    if told is not None:
        retold = next(document for document in outcome.scored if document["id"].startswith(STORY[1]))
        console.print(
            Text("\nThe same incident, reported three times", "bold"),
            told,
            Text("\nThe second one explained", "bold"),
            explanation(retold, outcome.scored),
            "",
            sep="\n",
        )


def _print_contributed(console: Console, seen: Contributed, outcome: DemoOutcome) -> None:
    accepted = [document for document in outcome.scored if document["scoring"]["decision"] == "accepted"]
    console.print(
        Text("To the registry (a stand-in): accepted traces, redacted", "bold"),
        Text(
            "skipped: not for the network, or not aggregated (KP_CONTRIBUTE_VISIBILITY, KP_CONTRIBUTE_PRIVACY)", "dim"
        ),
        registry_text(seen, accepted),
        "",
        sep="\n",
    )


def _stay(console: Console, kafka: EmbeddedKafka, worker: DemoWorker, registry: DemoRegistry | None) -> None:
    """Print all addresses and wait for Ctrl-C; raise DemoError if a process stops by itself."""
    address = kafka.bootstrap_servers
    with contextlib.suppress(KeyboardInterrupt):
        console.print(Text("Still running", "bold"))
        print_lines(
            console,
            f"look at  http://127.0.0.1:{worker.port}/   the status page, live",
            f"metrics  http://127.0.0.1:{worker.port}/metrics   health  /healthz, /readyz",
            f"topics   {SOURCE} -> {ACCEPTED}, {REJECTED}, {DEAD_LETTER}",
            f"read     {program()} tail -b {address}",
            f"         {program()} tail -b {address} --dead-letters",
            f"send     {program()} publish samples -b {address}",
            f"log      {worker.log}",
            *([] if registry is None else _registry_lines(registry)),
            "stop     Ctrl-C",
        )
        while True:
            worker.check()
            if registry is not None:
                registry.check()
            time.sleep(0.2)


def _registry_lines(registry: DemoRegistry) -> list[str]:
    return [
        f"registry curl -s {registry.url}/_stand-in/units   key {registry.key}",
        f"contrib. http://127.0.0.1:{registry.contribute.port}/metrics   log {registry.contribute.log}",
    ]
