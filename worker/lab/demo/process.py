"""The demo's processes, commands of kp-worker run as in production, and what it publishes to them and reads back."""

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from worker.commands.shared.options import SAMPLES
from worker.commands.shared.scored_rows import TailFilter, TailRecord
from worker.config import PREFIX, Settings
from worker.core.records import SourceRecord
from worker.core.trace import CONTEXT
from worker.kafka.connections import committed_reader
from worker.kafka.fetches import Reading
from worker.lab.broker.kafka_node import HOST, free_ports
from worker.lab.console import step
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After stop() the process has ended; after an error the broker stops too, so there is nothing to drain.
        self.process.kill()
        self.process.wait()

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
        with DemoProcess(name, command, settings, port, self.directory) as process:
            with step(self.console, label) as say:
                process.wait_ready(say)
                say(f"{says} ready, metrics at {process.url}/metrics".lstrip())
            yield process


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


class Sample(NamedTuple):
    """A record to publish; the key is the agent, so that its traces stay in order and share one cache."""

    key: bytes
    value: bytes | None


def samples() -> list[Sample]:
    """Return the sample traces in the order of the story, with invalid ones among them."""
    lines = SAMPLES.read_bytes().splitlines()
    result = [Sample(msgspec.json.decode(line)["metadata"]["agent_id"].encode(), line) for line in lines]
    for number, value in enumerate(broken_values(lines[0]), 1):
        result.insert(10 * number, Sample(b"kp:agent:gremlin-%02d" % number, value))
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
        records += [it for it in read if it.document and (wanted is None or it.document["id"] in wanted)]
    return sorted(records, key=lambda record: record.source)


async def run_flow(
    bootstrap: str, records: Sequence[Sample], worker: DemoProcess, show: Callable[[DemoOutcome], None]
) -> DemoOutcome:
    """Publish the records, and read until each came out or none has arrived for STALL_SECONDS; show progress."""
    async with clients(bootstrap, ACCEPTED, REJECTED, DEAD_LETTER) as (producer, consumer):
        began = progress = time.monotonic()
        sent = [await producer.send(SOURCE, key=record.key, value=record.value) for record in records]
        outcome = DemoOutcome([(data.partition, data.offset) for data in await asyncio.gather(*sent)])
        while len(outcome.records) < len(records) and time.monotonic() - progress < STALL_SECONDS:
            worker.check()
            if read := _read(await consumer.getmany(timeout_ms=100)):
                progress = time.monotonic()
                outcome.records = sorted([*outcome.records, *read], key=lambda it: it.source)
                outcome.seconds = progress - began
            show(outcome)
        outcome.records += _read(await consumer.getmany(timeout_ms=300))  # to catch duplicates
    return outcome
