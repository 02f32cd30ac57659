"""`kp-worker demo`, step by step: the whole product on one machine.

From top to bottom: the processes, which are commands of kp-worker run as in production; what is published to them and
read back; what is shown.
"""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.live import Live
from rich.text import Text

from worker.commands.shared.console import program
from worker.commands.shared.explanation import explain_trace, explanation_text
from worker.commands.shared.options import SAMPLES
from worker.commands.shared.scored_rows import COLOURS, TailFilter, TailRecord, rows
from worker.commands.shared.shown import PlainTable, shown_score
from worker.config import PREFIX, Settings
from worker.core.records import SourceRecord
from worker.core.scoring import PROFILES, weights_by_verdicts
from worker.core.terminal import clean
from worker.core.trace import CONTEXT
from worker.core.verdicts import make_verdict, sign_verdict
from worker.kafka.connections import admin_client, committed_reader
from worker.kafka.describe import topic_id
from worker.kafka.fetches import Reading
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.broker.kafka_node import HOST, free_ports
from worker.lab.console import interruptible, print_error, print_lines, running_kafka, step, wide_console
from worker.observe.metrics import quantile

PARTITIONS = 2

SOURCE, ACCEPTED, REJECTED, DEAD_LETTER = (
    str(Settings.model_fields[name].default)
    for name in ("source_topic", "accepted_topic", "rejected_topic", "dead_letter_topic")
)
STALL_SECONDS = 60.0

Document = dict[str, Any]


class DemoError(Exception):
    """The demo cannot continue; the message is for the user."""


class DemoProcess:
    """`kp-worker COMMAND` as a child process that serves HTTP on `port`, with its log in `directory`.

    `name`: for messages, such as "the worker". `settings`: environment variables; the caller's KP_ ones are dropped.
    """

    def __init__(self, name: str, command: str, settings: Mapping[str, str], port: int, directory: Path) -> None:
        self.name = name
        self.url = f"http://{HOST}:{port}"
        self.log = directory / f"{name.rsplit(maxsplit=1)[-1]}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603 the caller's own command
                [sys.executable, "-P", "-m", "worker", command],
                env=_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops the process in order
            )

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of an HTTP GET; status 0 while nothing listens."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException):
                return 0, "starting"

    def figures(self) -> str:
        """Return evaluation times from /metrics, as text."""
        name = "kp_evaluation_duration_seconds_bucket"
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        buckets = {float(sample.labels["le"]): sample.value for sample in samples}
        p50, p99 = quantile(buckets, 0.5) * 1000, quantile(buckets, 0.99) * 1000
        return f"evaluation p50 {p50:.3g} ms, p99 {p99:.3g} ms"

    def check(self) -> None:
        """Raise DemoError with the end of the log if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise DemoError(f"{self.name} ended with exit code {code}.\n{self.tail()}")

    def wait_ready(self, say: Callable[[str], None]) -> None:
        """Return when /readyz is answered with 200."""
        deadline = time.monotonic() + 600  # a first start may download a model
        while (answer := self.get("/readyz"))[0] != 200:
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name} was not ready in 10 minutes: {answer[1]}.\n{self.tail()}")
            say(answer[1].strip())
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the process and wait. Raises DemoError unless it exits with 0, having committed everything."""
        self.process.terminate()
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} did not stop in 30 s.\n{self.tail()}") from None
        if code != 0:
            raise DemoError(f"{self.name} stopped with exit code {code} instead of 0.\n{self.tail()}")

    def tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(["The end of its log:", *self.log.read_text(errors="replace").splitlines()[-15:]])


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # With -P: a user's directory named worker must not be run instead of this package.
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.getenv("PYTHONPATH"))))
    return {**others, **settings, "PYTHONPATH": path}


@dataclass(frozen=True)
class Stage:
    """What all parts of a demo use: the terminal, the broker's address, and the directory for logs."""

    console: Console
    bootstrap: str
    directory: Path

    @contextlib.contextmanager
    def running(
        self, label: str, name: str, command: str, variables: Mapping[str, str], *, port: int | None = None,
        says: str = "",
    ) -> Iterator[DemoProcess]:  # fmt: skip
        """Start a command on the demo's broker, print `says` once it is ready, and kill it at the end."""
        port = port or free_ports(1)[0]
        own = {"BOOTSTRAP_SERVERS": self.bootstrap, "CREATE_TOPICS": "true", "HTTP_HOST": HOST, "HTTP_PORT": str(port)}
        settings = {PREFIX + key: value for key, value in {**variables, **own}.items()}
        process = DemoProcess(name, command, settings, port, self.directory)
        try:
            with step(self.console, label) as say:
                process.wait_ready(say)
                say(f"{says} ready, metrics at {process.url}/metrics".lstrip())
            yield process
        finally:  # after stop() it has ended; after an error the broker stops too, so there is nothing to drain
            process.process.kill()
            process.process.wait()


def worker_variables(settings: Settings) -> dict[str, str]:
    """Return the settings of the demo's worker, without their prefix; others could point it to real topics."""
    scoring = {
        "embedder", "embedder_url", "model", "precision", "max_tokens", "embed_threads", "threshold", "profiles",
        "cache_max_elements", "cache_ttl_seconds", "delivery",
    }  # fmt: skip
    given = settings.model_dump(mode="json", include=scoring & settings.model_fields_set, exclude_none=True)
    passed = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in given.items()}
    if "cache_ttl_seconds" in settings.model_fields_set and settings.cache_ttl_seconds is None:
        passed["cache_ttl_seconds"] = "none"
    own = {"topic_partitions": str(PARTITIONS), "status_page": "true", "status_texts": "true"}
    return {name.upper(): value for name, value in (passed | own).items()}


# -- what is published and read back


def samples() -> list[tuple[bytes, bytes | None]]:
    """Return the sample traces in the order of the story, with invalid ones among them: records' keys and values.

    The key is the agent, so that its traces stay in order and share one cache.
    """
    lines = SAMPLES.read_bytes().splitlines()
    result: list[tuple[bytes, bytes | None]] = []
    result += [(msgspec.json.decode(line)["metadata"]["agent_id"].encode(), line) for line in lines]
    for number, value in enumerate(broken_values(lines[0]), 1):
        result.insert(10 * number, (b"kp:agent:gremlin-%02d" % number, value))
    return result


def broken_values(trace: bytes) -> list[bytes | None]:
    """Return values that are not valid traces, each for a different reason."""
    document = msgspec.json.decode(trace)
    del document["task"]
    too_sure = msgspec.json.decode(trace)
    too_sure["outcome"]["confidence"] = 90
    return [
        trace[:300],
        trace.replace(CONTEXT.encode(), b"https://schema.org"),
        msgspec.json.encode(document),
        msgspec.json.encode(too_sure),
        None,
        b"PK\x03\x04\x14\x00\xff\xfe\x9c\x00",
        trace.decode().replace("evening", "Märzabend").encode("latin-1"),
    ]


@dataclass
class DemoOutcome:
    """Everything that was published and read back."""

    published: list[tuple[int, int]] = field(default_factory=list)  # (partition, offset) on the source topic
    records: list[TailRecord] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def scored(self) -> list[Document]:
        """The scored documents."""
        return [record.document for record in self.records if record.document is not None]

    @property
    def dead(self) -> list[TailRecord]:
        """The dead letters."""
        return [record for record in self.records if record.dead_letter is not None]

    def count(self, decision: str) -> int:
        """Return the number of traces with this decision."""
        return sum(document["scoring"]["decision"] == decision for document in self.scored)

    def imbalance(self) -> str | None:
        """Return which records are missing or duplicated; None if all came out exactly once."""
        came = Counter(record.source for record in self.records)
        sent = Counter(self.published)
        if came == sent:
            return None
        return (
            f"the counts do not add up: published {len(self.published)}, but accepted {self.count('accepted')} + "
            f"rejected {self.count('rejected')} + dead letters {len(self.dead)} = {len(self.records)}; "
            f"missing (partition, offset): {sorted(sent - came) or 'none'}, too many: {sorted(came - sent) or 'none'}"
        )


@asynccontextmanager
async def clients(bootstrap: str, *topics: str) -> AsyncIterator[tuple[AIOKafkaProducer, AIOKafkaConsumer]]:
    """Start a producer, and a consumer of these topics' committed records from the first one; stop both at the end."""
    client = {"bootstrap_servers": bootstrap}
    async with (
        AIOKafkaProducer(**client, acks="all", enable_idempotence=True) as producer,
        committed_reader(client, Reading(), *topics) as consumer,
    ):
        yield producer, consumer


def _read(batches: Mapping[TopicPartition, Sequence[SourceRecord]]) -> list[TailRecord]:
    return list(filter(None, map(TailFilter(DEAD_LETTER).read, chain.from_iterable(batches.values()))))


async def scored(
    consumer: AIOKafkaConsumer, process: DemoProcess, count: int, wanted: Container[str] | None = None
) -> list[TailRecord]:
    """Return `count` scored runs with a wanted id (None: any), in source order. Raises DemoError."""
    records: list[TailRecord] = []
    began = time.monotonic()
    while len(records) < count:
        process.check()
        if time.monotonic() - began > STALL_SECONDS:
            raise DemoError(f"{len(records)} of {count} runs were scored.\n{process.tail()}")
        read = _read(await consumer.getmany(timeout_ms=100))
        records += [
            record for record in read if record.document and (wanted is None or record.document["id"] in wanted)
        ]
    return sorted(records, key=lambda record: record.source)


async def run_flow(
    bootstrap: str, records: Sequence[tuple[bytes, bytes | None]], worker: DemoProcess,
    show: Callable[[DemoOutcome], None],
) -> DemoOutcome:  # fmt: skip
    """Publish the records, and read until each came out or none has arrived for STALL_SECONDS; show progress."""
    async with clients(bootstrap, ACCEPTED, REJECTED, DEAD_LETTER) as (producer, consumer):
        began = progress = time.monotonic()
        sent = [await producer.send(SOURCE, key=key, value=value) for key, value in records]
        outcome = DemoOutcome([(data.partition, data.offset) for data in await asyncio.gather(*sent)])
        while len(outcome.records) < len(records) and time.monotonic() - progress < STALL_SECONDS:
            worker.check()
            if read := _read(await consumer.getmany(timeout_ms=100)):
                progress = time.monotonic()
                outcome.records = sorted([*outcome.records, *read], key=lambda record: record.source)
                outcome.seconds = progress - began
            show(outcome)
        outcome.records += _read(await consumer.getmany(timeout_ms=300))  # to catch duplicates
    return outcome


# -- what is shown

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
        rows([record for record in outcome.records if record.dead_letter is None]),
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
        elif nearest["id"] in [report["id"] for report in reports]:
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
            runs = {
                agent: [document for document in documents if document["metadata"]["agent_id"] == agent]
                for agent in AGENTS
            }
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
