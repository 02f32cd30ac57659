"""`kp-worker demo` and `kp-worker broker`: the whole product on one machine, to look at.

Lives here: starting the parts, sending the sample traces, showing what comes out. Must not live here: anything that
the worker needs; it runs as a child process, exactly as in production, and is seen only through Kafka and HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from worker.broker.embedded_kafka import KAFKA_VERSION, BrokerError, EmbeddedKafka
from worker.commands.demo_view import (
    COLOURS,
    STORY,
    Document,
    dead_letters_table,
    dead_position,
    explanation,
    position,
    scores_table,
    story,
)
from worker.config import Settings
from worker.core.terminal import clean
from worker.core.trace import CONTEXT
from worker.observe.metrics import quantile

SOURCE, ACCEPTED, REJECTED, DEAD_LETTER = (
    str(Settings.model_fields[name].default)
    for name in ("source_topic", "accepted_topic", "rejected_topic", "dead_letter_topic")
)
PARTITIONS: Final = 2
SAMPLES: Final = Path(__file__).parents[1] / "data" / "demo_traces.jsonl"
PASSED_ON: Final = (
    "KP_EMBEDDER", "KP_MODEL", "KP_PRECISION", "KP_MAX_TOKENS", "KP_EMBED_THREADS", "KP_THRESHOLD", "KP_PROFILES",
    "KP_CACHE_MAX_ELEMENTS", "KP_CACHE_TTL_SECONDS", "KP_DELIVERY",
)  # fmt: skip
"""Settings worth playing with here; any other of the caller's could aim the worker at real topics."""

READY_SECONDS: Final = 600.0  # a first start may download a model
STALL_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
FIGURES_SECONDS: Final = 0.5  # each look at /metrics takes time from the embedder
LOG_TAIL_LINES: Final = 15


class DemoError(Exception):
    """The demo cannot go on; the message is for the user."""


# --- sample records -----------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A record to publish; the key is the agent, so that its traces stay in order and meet in one cache."""

    key: bytes
    value: bytes | None


def samples() -> list[Sample]:
    """Return the sample traces in the order of the story, with the broken ones among them."""
    lines = SAMPLES.read_bytes().splitlines()
    result = [Sample(msgspec.json.decode(line)["metadata"]["agent_id"].encode(), line) for line in lines]
    for number, value in enumerate(broken_values(lines[0]), 1):
        result.insert(10 * number, Sample(b"kp:agent:gremlin-%02d" % number, value))
    return result


def broken_values(trace: bytes) -> list[bytes | None]:
    """Return values that are no valid trace, each in its own way."""
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


# --- what came out ------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Everything that was published and read back; positions are (partition, offset) on the source topic."""

    published: list[tuple[int, int]] = field(default_factory=list)
    scored: list[Document] = field(default_factory=list)
    dead: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.scored) + len(self.dead)

    def count(self, decision: str) -> int:
        """Return how many traces got this decision."""
        return sum(document["scoring"]["decision"] == decision for document in self.scored)

    def add(self, topic: str, value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> None:
        """Take one record of an output topic."""
        if topic == DEAD_LETTER:
            self.dead.append({name: text.decode() for name, text in headers})
        else:
            self.scored.append(msgspec.json.decode(value or b""))

    def sort(self) -> None:
        """Bring everything into the order of the source topic."""
        self.scored.sort(key=position)
        self.dead.sort(key=dead_position)

    def imbalance(self) -> str | None:
        """Say which records are missing or came out more than once; None when all came out exactly once."""
        came = Counter([*map(position, self.scored), *map(dead_position, self.dead)])
        sent = Counter(self.published)
        if came == sent:
            return None
        return (
            f"the counts do not add up: published {len(self.published)}, but accepted {self.count('accepted')} + "
            f"rejected {self.count('rejected')} + dead letters {len(self.dead)} = {len(self)}; "
            f"missing (partition, offset): {sorted(sent - came) or 'none'}, too many: {sorted(came - sent) or 'none'}"
        )


# --- the parts ----------------------------------------------------------------------------------------------


class _Worker:
    """The worker as a child process, with its log in `directory`."""

    def __init__(self, bootstrap: str, http_port: int | None, directory: Path) -> None:
        self.port = http_port or _free_port()
        self.log = directory / "worker.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
        environment |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {
            "KP_BOOTSTRAP_SERVERS": bootstrap,
            "KP_CREATE_TOPICS": "true",
            "KP_TOPIC_PARTITIONS": str(PARTITIONS),
            "KP_HTTP_HOST": "127.0.0.1",
            "KP_HTTP_PORT": str(self.port),
            "KP_STATUS_PAGE": "true",
            "KP_STATUS_TEXTS": "true",
            # -P below: a directory of the user's that is called worker must not be run instead of this package.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.getenv("PYTHONPATH")))),
        }
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker", "run"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops the worker in its own time
            )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # After a regular stop() there is nothing left; after an error its broker goes away too, so nothing to drain.
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of an HTTP GET; 0 while nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException):
                return 0, "starting"

    def check(self) -> None:
        """Raise DemoError with the end of the log if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"the worker ended with exit code {code}.\n{self.tail()}")

    def wait_ready(self, say: Callable[[str], None]) -> None:
        """Return when it is ready for traces."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            status, body = self.get("/readyz")
            if status == 200:
                return
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"the worker was not ready in {READY_SECONDS:.0f} s: {body}.\n{self.tail()}")
            say(body.strip())
            time.sleep(0.1)

    def stop(self) -> None:
        """Ask it to stop and wait; raise DemoError unless it says that everything is committed."""
        self.process.terminate()
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the worker did not stop in {STOP_SECONDS:.0f} s.\n{self.tail()}") from None
        if code != 0:
            raise DemoError(f"the worker stopped with exit code {code} instead of 0.\n{self.tail()}")

    def tail(self) -> str:
        """Return the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(["The end of its log:", *lines])

    def figures(self) -> str:
        """Say how fast it evaluates and how far it is behind, from /metrics."""
        buckets: dict[float, float] = {}
        lag = 0.0
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == "kp_evaluation_duration_seconds_bucket":
                    buckets[float(sample.labels["le"])] = sample.value
                elif sample.name == "kp_consumer_lag":
                    lag += sample.value
        p50, p99 = quantile(buckets, 0.5) * 1000, quantile(buckets, 0.99) * 1000
        return f"evaluation p50 {p50:.3g} ms, p99 {p99:.3g} ms, consumer lag {lag:.0f}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _flow(bootstrap: str, worker: _Worker, console: Console) -> Outcome:
    """Publish the samples and read the three output topics until every record came out, or none comes any more."""
    outcome = Outcome()
    began = time.monotonic()
    async with (
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True) as producer,
        AIOKafkaConsumer(
            *(ACCEPTED, REJECTED, DEAD_LETTER),
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
    ):
        records = samples()
        sent = [await producer.send(SOURCE, key=record.key, value=record.value) for record in records]
        outcome.published = [(data.partition, data.offset) for data in await asyncio.gather(*sent)]
        with Live(console=console, transient=True, refresh_per_second=10) as live:
            progress, figures, read = time.monotonic(), "", 0.0
            while len(outcome) < len(records) and time.monotonic() - progress < STALL_SECONDS:
                worker.check()
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    for record in batch:
                        outcome.add(record.topic, record.value, record.headers)
                    progress = time.monotonic()
                outcome.seconds = progress - began
                if console.is_terminal:
                    if time.monotonic() - read > FIGURES_SECONDS:
                        figures, read = await asyncio.to_thread(worker.figures), time.monotonic()
                    live.update(Group(_counts(outcome), Text(f"  {figures}", "dim")))
        for batch in (await consumer.getmany(timeout_ms=300)).values():  # nothing may come twice
            for record in batch:
                outcome.add(record.topic, record.value, record.headers)
    outcome.sort()
    return outcome


def _counts(outcome: Outcome) -> Text:
    rate = len(outcome) / outcome.seconds if outcome.seconds else 0.0
    return Text.assemble(
        f"  published {len(outcome.published)}   ",
        (f"accepted {outcome.count('accepted')}   ", COLOURS["accepted"]),
        (f"rejected {outcome.count('rejected')}   ", COLOURS["rejected"]),
        (f"dead letters {len(outcome.dead)}   ", "yellow"),
        f"{rate:.0f} traces/s",
    )


# --- the commands -------------------------------------------------------------------------------------------


def demo(keep_running: bool = False, http_port: int | None = None) -> int:
    """Show the whole worker on an embedded broker; return the exit code (0, 1 failed, 130 interrupted)."""
    console = _console()
    console.print("A real Kafka, a real worker and some sample traces; about half a minute, the first time longer.\n")
    try:
        with (
            _interruptible(),
            tempfile.TemporaryDirectory(prefix="kp-demo-") as directory,
            _kafka(console, EmbeddedKafka()) as kafka,
            _Worker(kafka.bootstrap_servers, http_port, Path(directory)) as worker,
        ):
            with _step(console, "worker") as say:
                worker.wait_ready(say)
                say(f"ready, metrics at http://127.0.0.1:{worker.port}/metrics")
            outcome = asyncio.run(_flow(kafka.bootstrap_servers, worker, console))
            _report(console, outcome, worker)
            problem = outcome.imbalance()
            if problem is not None:
                raise DemoError(f"{problem}.\n{worker.tail()}")
            if keep_running:
                _stay(console, kafka, worker)
            with _step(console, "stop") as say:
                say("worker drains, commits and leaves its group")
                worker.stop()
                say("worker ended with exit code 0")
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        return 130
    except (DemoError, BrokerError, KafkaError, OSError) as error:
        _complain(console, error)
        return 1
    hint = "" if keep_running else " To look around in it yourself: kp-worker demo --keep-running"
    console.print(f"Everything is stopped.{hint}")
    return 0


def broker(port: int | None = None, data_dir: Path | None = None) -> int:
    """Run the embedded broker until Ctrl-C or SIGTERM; return the exit code (0, 1 failed, 130 interrupted early)."""
    console = _console()
    started = False
    try:
        with _interruptible(), _kafka(console, EmbeddedKafka(port=port, data_dir=data_dir)) as kafka:
            started = True
            address = kafka.bootstrap_servers
            kept = "temporary, gone when it stops" if data_dir is None else str(data_dir)
            _lines(
                console,
                f"data     {kept}",
                f"worker   KP_BOOTSTRAP_SERVERS={address} KP_CREATE_TOPICS=true kp-worker run",
                f"send     kcat -P -b {address} -t {SOURCE} -l {SAMPLES}",
                f"read     {_kcat(address, ACCEPTED)}",
                "stop     Ctrl-C",
            )
            while kafka.alive(0):
                time.sleep(0.2)
            raise BrokerError(f"the broker ended by itself:\n{kafka.node_log(0).read_text(errors='replace')[-2000:]}")
    except KeyboardInterrupt:
        console.print("broker stopped")
        return 0 if started else 130
    except (BrokerError, OSError) as error:
        _complain(console, error)
        return 1


def _report(console: Console, outcome: Outcome, worker: _Worker) -> None:
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
            Text("\nThe same incident, told three times", "bold"),
            told,
            Text("\nThe second one explained", "bold"),
            explanation(retold, outcome.scored),
            "",
            sep="\n",
        )


def _stay(console: Console, kafka: EmbeddedKafka, worker: _Worker) -> None:
    """Say where everything is and wait for Ctrl-C; raise DemoError if the worker ends by itself."""
    address = kafka.bootstrap_servers
    with contextlib.suppress(KeyboardInterrupt):
        console.print(Text("Still running", "bold"))
        _lines(
            console,
            f"look at  http://127.0.0.1:{worker.port}/   the status page, live",
            f"metrics  http://127.0.0.1:{worker.port}/metrics   health  /healthz, /readyz",
            f"topics   {SOURCE} -> {ACCEPTED}, {REJECTED}, {DEAD_LETTER}",
            f"read     {_kcat(address, ACCEPTED)}",
            f"         kcat -Ceq -b {address} -t {DEAD_LETTER} -f '%h\\n'",
            f"send     kcat -P -b {address} -t {SOURCE} -l {SAMPLES}",
            f"log      {worker.log}",
            "stop     Ctrl-C",
        )
        while True:
            worker.check()
            time.sleep(0.2)


def _kcat(address: str, topic: str) -> str:
    return f"kcat -Ceq -b {address} -t {topic} | jq -c '[.id, .scoring.score]'"


def _lines(console: Console, *lines: str) -> None:
    """Print lines that can be copied: never wrapped, never styled."""
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)


def _complain(console: Console, error: Exception) -> None:
    console.print(Text(clean(f"Error: {error}", "\n"), "red"), soft_wrap=True)


def _console() -> Console:
    """Return the console, as wide as the tables need where the output is no terminal; Kafka's clients fall silent."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # traces are in all languages, terminals are not
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end everything in order, as Ctrl-C does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _step(console: Console, name: str) -> Iterator[Callable[[str], None]]:
    """Show a step while it lasts, and one line when it is done; the value takes what is happening now."""
    began = time.monotonic()
    now = ""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name)

        def say(text: str) -> None:
            nonlocal now
            now = text
            progress.update(task, description=f"{name:<7} {text}")

        yield say
    done = Text(f"  {name:<7} {now}, {time.monotonic() - began:.1f} s")
    console.print(Text("ok", "green") + done, soft_wrap=True)


@contextlib.contextmanager
def _kafka(console: Console, embedded: EmbeddedKafka) -> Iterator[EmbeddedKafka]:
    """Start the broker with its progress shown; stop it at the end."""
    with contextlib.ExitStack() as stack:
        with _step(console, "kafka") as say, _Listener(console, say):
            say(f"starting Apache Kafka {KAFKA_VERSION}")
            stack.enter_context(embedded)
            say(f"Apache Kafka {KAFKA_VERSION} at {embedded.bootstrap_servers}")
        yield embedded


class _Listener(logging.Handler):
    """Shows what the broker logs (the download of the jars, once) as the step's progress; as lines in a pipe."""

    def __init__(self, console: Console, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say if console.is_terminal else lambda text: console.print(Text(text), soft_wrap=True)
        self._log = logging.getLogger("worker")

    def __enter__(self) -> None:
        self._log.setLevel(logging.INFO)
        self._log.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._say(clean(record.getMessage()))
