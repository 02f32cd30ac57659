"""`kp-worker assemble` as processes on topics of spans, and a judgement on the traces that come out."""

import asyncio
import base64
import itertools
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiokafka.errors import KafkaConnectionError

from tests.support import spans
from tests.support.chaos import Chaos, Fleet, shuffled
from tests.support.kafka_fixtures import (
    WorkerProcess,
    consume_all,
    create_topics,
    produce,
    produce_async,
    unique,
    wait_until,
)
from tests.support.surroundings import topic_settings
from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.runs.otlp.mapping import assembled
from worker.runs.otlp.spans import LogEvent, Span, decoded


class Workshop:
    """The topics of one test, and the settings of its `assemble`. The grace period and the gap are seconds.

    `create`: whether the topics with spans are there from the start.
    """

    def __init__(
        self, bootstrap: str, partitions: int = 3, grace: float = 2, gap: float = 8, *, create: bool = True,
        **settings: str,
    ) -> None:  # fmt: skip
        self.bootstrap = bootstrap
        self.name = unique("workshop")
        self.spans = f"{self.name}.spans"
        self.traces = f"{self.name}.traces"
        self.dead = f"{self.name}.dead"
        self.partitions = partitions
        self.env = topic_settings(bootstrap, self.name) | {
            "KP_SPANS_TOPIC": self.spans, "KP_SOURCE_TOPIC": self.traces, "KP_DEAD_LETTER_TOPIC": self.dead,
            "KP_TOPIC_PARTITIONS": "2", "KP_ASSEMBLE_GRACE_SECONDS": f"{grace:g}",
            "KP_ASSEMBLE_GAP_SECONDS": f"{gap:g}", "KP_COMMIT_INTERVAL_SECONDS": "0.2",
            "KP_SESSION_TIMEOUT_SECONDS": "6", **spans.SETTINGS, **settings,
        }  # fmt: skip
        if create:
            create_topics(bootstrap, dict.fromkeys(self.env["KP_SPANS_TOPIC"].split(","), partitions))

    def put(self, values: Sequence[bytes], topic: str | None = None, **record: Any) -> None:
        """Write records of spans, in turn to each partition."""
        rows = [(None, value, (), number % self.partitions, *record.values()) for number, value in enumerate(values)]
        produce(self.bootstrap, topic or self.spans, rows)

    def start(self, log_path: Path | None = None) -> WorkerProcess:
        return WorkerProcess(self.env, ("assemble",), log_path=log_path)

    def documents(self) -> list[bytes]:
        """Return the traces so far."""
        return [each.value for each in consume_all(self.bootstrap, self.traces)]

    def letters(self) -> list[Any]:
        return consume_all(self.bootstrap, self.dead)

    def wait(self, count: int, timeout: float = 60.0) -> list[bytes]:
        """Return the traces, as soon as there are so many."""
        assert wait_until(lambda: len(self.documents()) >= count, timeout, 0.2), f"{len(self.documents())} of {count}"
        return self.documents()


def expected_documents(values: Iterable[bytes], limits: Limits = DEFAULT_LIMITS) -> list[bytes]:
    """Return the traces of records of spans and logs by trace id, without any Kafka between."""
    found: dict[str, list[Span]] = defaultdict(list)
    logs: dict[str, list[LogEvent]] = defaultdict(list)
    for value in values:
        read = decoded(value)
        for span in read.spans:
            found[span.trace_id].append(span)
        for log in read.logs:
            logs[log.trace_id].append(log)
    rules = replace(spans.RULES, limits=limits)
    made = (assembled(each, logs[trace_id], rules) for trace_id, each in found.items())
    return [each.value for several in made for each in several if each.value is not None]


def shared_records(paths: Iterable[Path]) -> list[bytes]:
    """Return the values of records that are kept as JSON Lines: {"value": base64, ...}."""
    lines = (json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines())
    return [base64.b64decode(line["value"]) for line in lines if "value" in line]


def by_run(values: Iterable[bytes]) -> list[list[bytes]]:
    """Return records in groups that have no trace in common: a record may have spans of several."""
    groups: list[tuple[set[str], list[bytes]]] = []
    for value in values:
        read = decoded(value)
        ids = {span.trace_id for span in read.spans} | {log.trace_id for log in read.logs}
        common = [group for group in groups if group[0] & ids]
        groups = [group for group in groups if not group[0] & ids]
        groups.append((ids.union(*(each for each, _ in common)), [*itertools.chain(*(v for _, v in common)), value]))
    return [values for _, values in groups]


def made_records(rng: random.Random, runs: int, size: int = 0) -> list[list[bytes]]:
    """Return records of made-up runs, a list for each run; both encodings are mixed."""
    return [spans.records(spans.run_spans(number, rng.randint(1, 4), size=size), rng) for number in range(runs)]


@dataclass
class Trial:
    """What a crash run does. `seconds`: how long records are written and processes killed.

    `joins`: how often a process joins, or leaves in order. `restarts`: of the broker.
    """

    kills: int
    joins: int
    restarts: int = 0
    seconds: float = 12.0
    grace: float = 10.0
    gap: float = 40.0


def crash_run(
    kafka: EmbeddedKafka, folder: Path, seed: int, runs: Sequence[Sequence[bytes]], trial: Trial
) -> dict[str, object]:
    """Write records of runs while processes are killed, join and leave, let the rest be assembled, and judge.

    Prints figures, and returns what no run may show; documents are named by their ids.
    """
    workshop = Workshop(kafka.bootstrap_servers, grace=trial.grace, gap=trial.gap)
    began = time.monotonic()
    writing = threading.Thread(target=_write, args=(workshop, seed, runs, trial))
    expected = expected_documents(value for run in runs for value in run)
    joins, leaves = trial.joins - trial.joins // 2, trial.joins // 2
    plan = shuffled(seed, sigkill=trial.kills, join=joins, leave=leaves, restart_broker=trial.restarts)
    with Fleet(workshop.env, folder, "worker", ("assemble",)) as fleet:
        for slot in [fleet.add() for _ in range(2)]:
            slot.process.wait_ready()
        writing.start()
        try:
            pause = trial.seconds / len(plan)
            Chaos(kafka, fleet, seed, most=2 + trial.joins).run(plan, (0.5 * pause, 1.5 * pause))
        finally:
            writing.join()
        wait_until(
            lambda: not _open_runs(workshop) and len(workshop.documents()) >= len(expected),
            120 + trial.grace + trial.gap, 0.5,
        )  # fmt: skip
        open_runs = _open_runs(workshop)
        assert set(fleet.stop_all()) == {0}, fleet.tails()
        assert trial.restarts or not fleet.unexpected(), fleet.tails()
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return judged(workshop, expected, open_runs)


def _write(workshop: Workshop, seed: int, runs: Sequence[Sequence[bytes]], trial: Trial) -> None:
    """Write each run's records about in their order, among those of the others, on random partitions; some twice."""
    rng = random.Random(seed)
    due: list[tuple[float, bytes]] = []
    for run in runs:
        begin = rng.uniform(0, trial.seconds)
        for value in run:
            due += [(begin + rng.uniform(0, 3), value) for _ in range(1 + (rng.random() < 0.1))]
    due.sort()
    began = time.monotonic()

    async def write() -> None:
        rest = due
        while rest:
            now = time.monotonic() - began
            ready = [value for at, value in rest if at <= now]
            rest = rest[len(ready) :]
            rows = [(None, value, (), rng.randrange(workshop.partitions)) for value in ready]
            while True:
                try:
                    await produce_async(workshop.bootstrap, workshop.spans, rows)
                    break
                except KafkaConnectionError:  # the broker is being restarted
                    await asyncio.sleep(0.25)
            await asyncio.sleep(0.25)

    asyncio.run(write())


def _open_runs(workshop: Workshop) -> int:
    """Return how many parts of open runs the state holds."""
    rows: dict[bytes, bytes | None] = {}
    for record in consume_all(workshop.bootstrap, f"{workshop.name}-assemble-state"):
        rows[record.key] = record.value
    return sum(value is not None and key.startswith(b"open:") for key, value in rows.items())


def judged(workshop: Workshop, expected: Sequence[bytes], open_runs: int = 0) -> dict[str, object]:
    """Compare the traces that came out with the expected ones; return the problems."""
    wanted: Mapping[str, bytes] = {json.loads(each)["id"]: each for each in expected}
    assert len(wanted) == len(expected)
    found = workshop.documents()
    ids = Counter(json.loads(each)["id"] for each in found)
    print(f"{len(found)} traces", flush=True)
    problems = {
        "missing": sorted(wanted.keys() - ids.keys()),
        "twice": sorted(each for each, number in ids.items() if number > 1),
        "wrong": sorted({json.loads(each)["id"] for each in found if wanted.get(json.loads(each)["id"]) != each}),
        "letters": Counter(dict(each.headers)["kp-error-reason"].decode() for each in workshop.letters()),
        "left open": open_runs,
    }
    return {name: value for name, value in problems.items() if value}
