"""Load and violence: numbered traces at a steady rate, a supervised fleet of workers, seeded disturbances.

Only processes that were started here are ever signalled.
"""

import asyncio
import contextlib
import copy
import json
import logging
import random
import re
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from tests.support.builders import ANOTHER_ID, read_jsonl, rfc3339
from tests.support.kafka_fixtures import Record, WorkerProcess, committed, produce, unique, wait_until
from tests.support.surroundings import topic_settings
from worker import make_verdict, sign_verdict
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def settings(bootstrap: str, name: str | None = None, **extra: str) -> dict[str, str]:
    """Return the settings of a group of workers with topics of their own and a small, short-lived cache."""
    small = {"KP_SESSION_TIMEOUT_SECONDS": "6", "KP_CACHE_MAX_ELEMENTS": "50", "KP_CACHE_TTL_SECONDS": "60"}
    return topic_settings(bootstrap, name or unique("chaos"), **small | extra)


JUDGES: Final = {"ci": b"c" * 40, "reviewer": b"r" * 40}


def judging(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return the settings with which the verdicts of `with_verdicts` count, and make the scores."""
    keys = directory / "judges.key"
    keys.write_bytes(b"".join(b"%s %s\n" % (name.encode(), key) for name, key in JUDGES.items()))
    names = {"KP_VERDICT_KEY_FILE": str(keys), "KP_JUDGED_TOPIC": f"{env['KP_GROUP_ID']}.judged"}
    return {**names, "KP_CONFIDENCE": "record"}


def topics(env: Mapping[str, str], partitions: int = 4) -> dict[str, tuple[int, dict[str, str]]]:
    """Return the source, and a changelog that Kafka compacts every few seconds: a restore must not mind."""
    hasty = {
        "cleanup.policy": "compact",
        "segment.ms": "2000",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "3000",
        "delete.retention.ms": "100",
    }
    return {env["KP_SOURCE_TOPIC"]: (partitions, {}), f"{env['KP_GROUP_ID']}-novelty-changelog": (partitions, hasty)}


# --- traces -------------------------------------------------------------------------------------------------


def traces(seed: int, partitions: int) -> Iterator[Record]:
    """Yield records without end: about 5 % broken, unique ids, in dense and sparse stretches of event time.

    In a dense stretch the cache overflows, in a sparse one its entries expire. Times jitter, so that some traces are
    late; some claim to come from the future, which their record's timestamp must bound.
    """
    rng = random.Random(seed)
    samples = read_jsonl("traces.jsonl")
    start = (time.time() - 5 * 86400) * 1000  # room for 200,000 traces, and within the default retention
    clocks = [start] * partitions
    paces = [0.2] * partitions  # mean seconds between two traces of a partition
    number = 0
    while True:
        partition = rng.randrange(partitions)
        if rng.random() < 0.02:
            paces[partition] = rng.choice([0.05, 0.2, 8.0, 15.0])
        clocks[partition] += rng.expovariate(1 / paces[partition]) * 1000
        document = copy.deepcopy(rng.choice(samples))
        number += 1
        document["id"] = f"kp:trace:{seed}-{number:06d}"
        if rng.random() < 0.8:  # the rest repeats a text word by word
            document["steps"][0]["content"] = f"{document['steps'][0].get('content', '')} Case {rng.randrange(10**6)}."
        created = clocks[partition] + rng.gauss(0, 3000)
        document["metadata"]["created_at"] = "2099-01-01T00:00:00Z" if rng.random() < 0.01 else rfc3339(round(created))
        value: bytes | None = json.dumps(document, ensure_ascii=False).encode()
        if rng.random() < 0.05:
            value = _broken(rng, document)
        headers = [("traceparent", b"00-%032x-%016x-01" % (number, number))] if rng.random() < 0.5 else []
        timestamp = round(clocks[partition] + rng.uniform(-2000, 6000))
        yield Record(document["metadata"]["agent_id"].encode(), value, headers, partition, timestamp)


def with_verdicts(
    seed: int, records: Iterator[Record], topic: str, topic_id: str, share: float = 0.2
) -> Iterator[Record]:
    """Yield the records, and verdicts among them on a share of the traces: on one of the partition's last 20.

    So some are corrections. A tenth is forged, a tenth for another topic; a fifth is sent again later, and some are
    issued later than their record says.
    """
    rng = random.Random(seed)
    recent: dict[int | None, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=20))
    sent: dict[int | None, deque[Record]] = defaultdict(lambda: deque(maxlen=10))
    ends: Counter[int | None] = Counter()
    for record in records:
        yield record
        ends[record.partition] += 1
        try:
            document = json.loads(record.value or b"")
            offset = ends[record.partition] - 1
            recent[record.partition].append({"id": document["id"], "metadata": document["metadata"], "offset": offset})
        except (ValueError, KeyError, TypeError):
            continue
        if rng.random() > share or record.timestamp_ms is None or dict(record.headers).get("kp-control"):
            continue
        if rng.random() < 0.2 and sent[record.partition]:
            yield rng.choice(sent[record.partition])._replace(timestamp_ms=record.timestamp_ms)
            ends[record.partition] += 1
            continue
        metadata = rng.choice(recent[record.partition])
        judge = rng.choice(list(JUDGES))
        line = {
            "trace_id": metadata["id"], "agent_id": metadata["metadata"]["agent_id"],
            "task_domain": metadata["metadata"]["task_domain"], "partition": record.partition or 0,
            "offset": metadata["offset"], "success": rng.choice([True, False, 0.25]), "judge": judge,
        }  # fmt: skip
        issued = datetime.fromtimestamp((record.timestamp_ms + rng.uniform(-20_000, 2_000)) / 1000, UTC)
        signed_for = ANOTHER_ID if rng.random() < 0.1 else topic_id
        key = b"x" * 40 if rng.random() < 0.1 else JUDGES[judge]
        try:
            verdict = make_verdict(line, topic=topic, topic_id=signed_for, issued_at=issued)
        except ValueError:
            continue  # the trace is broken
        signed = sign_verdict(verdict, key)
        made = Record(signed.key, signed.value, signed.headers, record.partition, record.timestamp_ms)
        sent[record.partition].append(made)
        yield made
        ends[record.partition] += 1


def _broken(rng: random.Random, document: dict[str, Any]) -> bytes | None:
    kind = rng.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        document["steps"] = []
    if kind == 2:
        del document["outcome"]
    if kind == 3:
        document["metadata"]["created_at"] = "yesterday"
    value = json.dumps(document, ensure_ascii=False).encode()
    if kind == 4:
        return value[: len(value) // 2]
    return value + b"\xff" if kind == 5 else value


def produce_some(env: Mapping[str, str], records: Iterator[Record], count: int, ends: dict[int, int]) -> None:
    """Produce so many of the records; note in `ends` by partition the offset after the last one."""
    for partition, offset in produce(env["KP_BOOTSTRAP_SERVERS"], env["KP_SOURCE_TOPIC"], islice(records, count)):
        ends[partition] = max(offset + 1, ends.get(partition, 0))


class Load(threading.Thread):
    """Produces at least `total` records at `rate` a second, whatever happens to the broker, each of them once.

    It ends after `total` records, or where `open_end` is set, once `enough` is set, too. It bears a broker's outage of
    `timeout_s`.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        records: Iterator[Record],
        total: int,
        rate: float,
        *,
        open_end: bool = False,
        timeout_s: int = 180,
    ) -> None:
        super().__init__(name="load", daemon=True)
        self._timeout_ms = timeout_s * 1000
        self._arguments = bootstrap, topic, records, total, rate
        self.enough = threading.Event()
        if not open_end:
            self.enough.set()
        self.sent = 0
        self.acknowledged = 0
        self.ends: Counter[int] = Counter()
        """By partition the offset after the last record. Complete when the thread has ended."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._produce(*self._arguments))
        except BaseException as error:  # told by finish()
            self.failure = error

    def finish(self, timeout: float) -> Counter[int]:
        """Wait until everything is produced; return `ends`."""
        self.enough.set()
        self.join(timeout)
        if self.is_alive() or self.failure is not None:
            raise AssertionError(f"the producer of the test: {self.failure or 'still at work'}")
        return self.ends

    def _acknowledged(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            metadata = future.result()
            self.acknowledged += 1
            self.ends[metadata.partition] = max(self.ends[metadata.partition], metadata.offset + 1)
        else:
            self.failure = self.failure or future.exception()

    async def _produce(self, bootstrap: str, topic: str, records: Iterator[Record], total: int, rate: float) -> None:
        async with AIOKafkaProducer(
            bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, request_timeout_ms=self._timeout_ms
        ) as producer:
            began = time.monotonic()
            while self.sent < total or not self.enough.is_set():
                r = next(records)
                future = await producer.send(topic, r.value, r.key, r.partition, r.timestamp_ms, list(r.headers))
                future.add_done_callback(self._acknowledged)
                self.sent += 1
                ahead = began + self.sent / rate - time.monotonic()
                if ahead > 0.02:
                    await asyncio.sleep(ahead)
            await producer.flush()


# --- workers ------------------------------------------------------------------------------------------------


@dataclass
class Exit:
    """One end of a worker process: its slot, its status (negative for a signal), how long it lived (s)."""

    slot: int
    code: int
    lived: float
    expected: bool


@dataclass
class Slot:
    """A place in the fleet that the supervisor keeps occupied while it is wanted."""

    number: int
    process: WorkerProcess
    since: float
    wanted: bool = True
    frozen: bool = False
    protected: bool = False
    """Chaos lets it live."""
    expected: set[int] = field(default_factory=set)


class Fleet:
    """Workers under a supervisor that restarts whatever exits, as systemd or Kubernetes would."""

    def __init__(
        self, env: Mapping[str, str], logs: Path, module: str = "tests.support.crash_worker", args: Sequence[str] = ()
    ) -> None:
        self.env = dict(env)
        self.exits: list[Exit] = []
        self.logs = logs
        self.module = module
        self._args = args
        self._slots: dict[int, Slot] = {}
        self._count = 0
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._supervisor.join()
        for slot in self._slots.values():
            slot.process.close()

    def running(self) -> list[Slot]:
        """Return the slots that are wanted, frozen ones apart."""
        with self._lock:
            return [slot for slot in self._slots.values() if slot.wanted and not slot.frozen]

    def all_ready(self) -> bool:
        """Whether each of the running ones is ready."""
        return all(map(ready, self.running()))

    def add(self, **extra: str) -> Slot:
        """Start a worker; `extra` settings do not hold for its restarts."""
        with self._lock:
            slot = Slot(self._count, self._start(self._count, extra), time.monotonic())
            self._slots[self._count] = slot
            self._count += 1
            return slot

    def remove(self, slot: Slot) -> None:
        with self._lock:
            slot.wanted = False
            self.terminate(slot)

    def kill(self, slot: Slot) -> None:
        """Kill a worker by SIGKILL; the supervisor starts it again."""
        with self._lock:
            slot.expected |= {-9}
            slot.process.process.kill()

    def terminate(self, slot: Slot) -> None:
        """Stop a worker by SIGTERM; the supervisor starts it again."""
        with self._lock:
            slot.expected |= {0, -15}  # -15: it was still importing
            slot.process.terminate()

    def stop_all(self) -> list[int]:
        """Ask all workers to stop, once they are all ready; return their exit codes."""
        wait_until(self.all_ready)
        with self._lock:
            slots = [slot for slot in self._slots.values() if slot.wanted]
            for slot in slots:
                self.remove(slot)
        return [slot.process.wait() for slot in slots]

    def unexpected(self) -> list[Exit]:
        return [event for event in self.exits if not event.expected]

    def tails(self) -> str:
        """Return the ends of all logs, for a failure's message, and what the workers wait for."""
        running = self.running() if self.module == "tests.support.crash_worker" else []
        for slot in running:
            slot.process.process.send_signal(signal.SIGUSR2)
        if running:
            time.sleep(1)
        lines = 80 if running else 15
        texts = [(path.name, path.read_text(errors="replace").splitlines()) for path in sorted(self.logs.glob("*.log"))]
        return "\n".join(f"--- {name}\n" + "\n".join(text[-lines:]) for name, text in texts)

    def _start(self, number: int, extra: Mapping[str, str]) -> WorkerProcess:
        log = self.logs / f"worker-{number}.log"
        return WorkerProcess({**self.env, **extra}, self._args, log_path=log, module=self.module)

    def _supervise(self) -> None:
        while not self._closing.wait(0.1):
            with self._lock:
                for slot in list(self._slots.values()):
                    code = slot.process.returncode
                    if code is None:
                        continue
                    self.exits.append(Exit(slot.number, code, time.monotonic() - slot.since, code in slot.expected))
                    if slot.wanted:
                        slot.expected.clear()
                        slot.process = self._start(slot.number, {})
                        slot.since = time.monotonic()
                        slot.frozen = False
                    else:
                        del self._slots[slot.number]


def ready(slot: Slot) -> bool:
    return slot.process.readyz()[0] == 200


def wait_settled(bootstrap: str, env: Mapping[str, str], ends: Mapping[int, int], timeout: float) -> bool:
    """Return whether the group has committed up to `ends` in time (seconds)."""

    def settled() -> bool:
        with contextlib.suppress(KafkaError, TimeoutError):
            done = committed(bootstrap, env["KP_GROUP_ID"], env["KP_SOURCE_TOPIC"])
            return all(done.get(partition, 0) >= end for partition, end in ends.items())
        return False

    return wait_until(settled, timeout, 0.3)


# --- disturbances -------------------------------------------------------------------------------------------


class Chaos:
    """Does what a plan says, at random moments; one line for each action on standard output."""

    def __init__(
        self, kafka: EmbeddedKafka, fleet: Fleet, seed: int, *, most: int = 3,
        more: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:  # fmt: skip
        """`most`: the most workers at a time; `more`: actions by name, beside the methods."""
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.zombies: list[str] = []
        self._kafka = kafka
        self._fleet = fleet
        self._most = most
        self._more = more or {}
        self._began = time.monotonic()

    def run(self, plan: Sequence[str], pause: tuple[float, float] = (0.3, 3.0)) -> None:
        """Do the actions one after the other, each at a moment of its own."""
        for action in plan:
            if self.rng.random() < 0.7:  # the others may hit a worker that starts, restores or waits
                wait_until(lambda: any(map(ready, self._fleet.running())), 40)
            time.sleep(self.rng.uniform(*pause))
            (self._more.get(action) or getattr(self, action))()
            self.done[action] += 1

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def sigkill(self) -> None:
        slot = self._victim()
        self.say(f"SIGKILL worker {slot.number}" + ("" if ready(slot) else " (not ready)"))
        self._fleet.kill(slot)

    def sigterm(self) -> None:
        """Stop one worker and let the supervisor start it again."""
        slot = self._victim()
        self.say(f"SIGTERM worker {slot.number}" + ("" if ready(slot) else " (not ready)"))
        self._fleet.terminate(slot)

    def zombie(self) -> None:
        """Freeze one worker for longer than the session timeout while another takes over, then let it go on."""
        while len(self._fleet.running()) < 2:
            self._fleet.add()
        wait_until(self._fleet.all_ready, 60)
        slot = self._victim()
        process = slot.process
        self.say(f"SIGSTOP worker {slot.number}")
        slot.frozen = True
        process.stop()
        time.sleep(float(self._fleet.env["KP_SESSION_TIMEOUT_SECONDS"]) + 3)
        wait_until(lambda: any(map(ready, self._fleet.running())), 60)
        slot.expected |= {1}
        process.cont()
        slot.frozen = False
        dropped_out = wait_until(lambda: process.returncode is not None, 4)
        self.zombies.append(f"exit {process.returncode}" if dropped_out else "dropped out and joined again")
        self.say(f"SIGCONT worker {slot.number}: {self.zombies[-1]}")

    def join(self) -> None:
        """Add a worker; where the fleet is full, one leaves first."""
        if len(self._fleet.running()) >= self._most:
            self.leave()
        self.say(f"join: worker {self._fleet.add().number}")

    def leave(self) -> None:
        """Remove a worker for good; where it is the last, one joins first."""
        if sum(not slot.protected for slot in self._fleet.running()) < 2:
            self.join()
        slot = self._victim()
        self.say(f"leave: worker {slot.number}")
        self._fleet.remove(slot)

    def restart_broker(self) -> None:
        """Stop the first broker, by SIGTERM or SIGKILL, and start it again."""
        kill = self.rng.random() < 0.5
        away = self.rng.uniform(0.5, 6)
        self.say(f"broker {'SIGKILL' if kill else 'SIGTERM'}, away for {away:.1f} s")
        (self._kafka.kill_node if kill else self._kafka.stop_node)(0)
        time.sleep(away)
        self._kafka.start_node(0)
        self.say("broker is back")

    def _victim(self) -> Slot:
        return self.rng.choice([slot for slot in self._fleet.running() if not slot.protected])


def shuffled(seed: int, **counts: int) -> list[str]:
    """Return a plan with each action as often as said, in an order that the seed decides."""
    plan = [action for action, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(plan)
    return plan


def quiet_clients() -> None:
    """Silence the test's own Kafka clients, which complain by the thousand while a broker is away."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


# --- logs ---------------------------------------------------------------------------------------------------


def log_report(logs: Path) -> str:
    """Summarise the workers' logs: lines, stack traces, and the most frequent warnings and errors."""
    lines = [line for path in sorted(logs.glob("*.log")) for line in path.read_text(errors="replace").splitlines()]
    traces_seen = sum(line.startswith("Traceback") for line in lines)
    kinds: Counter[str] = Counter()
    for line in lines:
        found = re.match(r"\S+Z (WARNING|ERROR|CRITICAL) (.*)", line)
        if found:
            kinds[f"{found[1]} {re.sub(r'[0-9]+', 'N', found[2])[:150]}"] += 1
        elif not re.match(r"\S+Z INFO ", line) and not line.startswith((" ", "Traceback", "TEST")):
            kinds["unformatted " + re.sub(r"[0-9]+", "N", line)[:120]] += 1
    top = "\n".join(f"{count:6d}  {kind}" for kind, count in kinds.most_common(40))
    return f"{len(lines)} log lines, {traces_seen} stack traces\n{top}"
