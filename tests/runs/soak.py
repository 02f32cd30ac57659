"""The long chaos run, and the long quiet one: `python -m tests.runs.soak --minutes N [--seed S] [--state DIR]`.

Chaos: 20 SIGKILLs, 10 joins and leaves, 2 broker restarts and more over at least 10,000 traces; once more as long as
there is time. `--hostile` mixes the records of hostile.py in. `--steady`: one worker under
constant load, with 50 forced rebalances after the first minute. `--model`: the real model, at a rate that two cores
bear. Memory, threads, files, open transactions and the changelog's size are reported at 5, 30 and 60 minutes and at the
end. With `--state`, a run that was interrupted goes on: broker data, figures and minutes are kept there.
Exit code 1 when anything is wrong, 2 for wrong options, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from tests.support import chaos, hostile, oracle
from tests.support.chaos import Chaos, Fleet, Load, Slot, settings, shuffled, traces, wait_settled
from tests.support.crash_worker import hash_vector
from tests.support.figures import Figure, Source, Watch, at_marks, growth, open_transactions
from tests.support.kafka_fixtures import consume_all, create_topics, unique, wait_until
from tests.support.processes import interrupt_on_signals
from worker.embed.load import load_embedder
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PARTITIONS: Final = 4
TRACES: Final = 10_000
PATIENCE_S: Final = 600.0
REBALANCES: Final = 50
GROWTH_MIB: Final = 40.0
"""What 50 rebalances may add to a worker's memory: the first restores take buffers that the allocator keeps. A leak of
one partition's restore (2 MB) in each would add 100."""

LASTING_GROWTH_MIB: Final = 25.0
"""What the second half of a long run may add to the first."""

ENTRY_BYTES: Final = 2_000
"""More than a cache entry of the tests takes on the changelog."""

MARKS: Final = (5, 30, 60)
"""Minutes at which the figures are reported."""

PLAN: Final = {
    "sigkill": 20, "sigterm": 4, "zombie": 2, "join": 5, "leave": 5, "restart_broker": 2
}  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """How fast a run goes: traces and hostile batches a second, seconds between two disturbances."""

    traces: float
    hostile: float = 2.0
    pause: tuple[float, float] = (0.3, 3.0)


QUICK: Final = Pace(60.0)
STEADY: Final = Pace(150.0)
MODEL: Final = Pace(4.0, hostile=0.2, pause=(5.0, 25.0))
"""A worker with the model takes 2 s of CPU to start, and 35 ms for a trace."""


def environment(kafka: EmbeddedKafka, state: State) -> dict[str, str]:
    o = state.options
    extra = {} if o["steady"] else {"TEST_EMBED_MS": "10"}
    if o["model"]:  # the default session timeout: the model takes the cores that heartbeats need
        extra = {"TEST_REAL_MODEL": "1", "KP_SESSION_TIMEOUT_SECONDS": "15"}
    if o["steady"]:  # the default cache, so that a restore has some size
        extra |= {"KP_CACHE_MAX_ELEMENTS": "1000", "KP_CACHE_TTL_SECONDS": "none"}
    if o["hostile"]:
        extra["KP_MAX_BATCH_BYTES"] = str(hostile.MAX_BATCH_BYTES)
    return settings(kafka.bootstrap_servers, state.group, **extra)


def create(kafka: EmbeddedKafka, env: dict[str, str], state: State) -> None:
    """Create the topics; the workers create the others."""
    topics: dict[str, Any] = dict(chaos.topics(env, PARTITIONS))
    if state.options["steady"]:
        del topics[f"{env['KP_GROUP_ID']}-novelty-changelog"]  # with the product's settings
    if state.options["hostile"]:
        topics[env["KP_SOURCE_TOPIC"]] = PARTITIONS, dict(hostile.SOURCE_CONFIG)
        for kind in ("ACCEPTED", "REJECTED"):
            topics[env[f"KP_{kind}_TOPIC"]] = PARTITIONS, dict(hostile.OUTPUT_CONFIG)
    create_topics(kafka.bootstrap_servers, topics)


class Session:
    """One uninterrupted stretch of a run: a fleet, its load, and the watch over one worker."""

    def __init__(self, kafka: EmbeddedKafka, env: dict[str, str], state: State, fleet: Fleet) -> None:
        self.kafka, self.env, self.state, self.fleet = kafka, env, state, fleet
        self.pace = pace(state)
        self.began = time.monotonic()
        self.before = state.seconds
        self.sent_before = state.sent
        self.watched: Slot | None = None
        records = traces(state.seed, PARTITIONS)
        least = max(0, state.options["traces"] - state.sent)
        self.load = Load(
            kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], records, least, self.pace.traces, open_end=True
        )
        self.odd = hostile.HostileLoad(
            kafka.bootstrap_servers,
            env["KP_SOURCE_TOPIC"],
            hostile.batches(state.seed, traces(state.seed + 1, PARTITIONS)),
            self.pace.hostile,
        )
        source = Source(
            lambda: None if self.watched is None else self.watched.process,
            kafka.bootstrap_servers,
            env["KP_GROUP_ID"],
            kafka.node_log(0).parent / "data",
            lambda: kafka.pid(0),
        )
        self.watch = Watch(source, min(30.0, max(5.0, state.minutes)), self.keep, before=self.before)

    def keep(self, figure: Figure) -> None:
        """Keep a figure, and where the run is."""
        self.state.figures.append(figure)
        self.save()
        print(figure, flush=True)

    def save(self) -> None:
        self.state.seconds = self.before + time.monotonic() - self.began
        self.state.sent = self.sent_before + self.load.acknowledged
        self.state.save()

    def start(self) -> None:
        """Start what produces, and the watch."""
        self.load.start()
        if self.state.options["hostile"]:
            self.odd.start()
        self.watch.start()

    def left(self) -> float:
        return self.state.minutes * 60 - (self.before + time.monotonic() - self.began)

    def finish(self) -> list[str]:
        """End the load, wait for the workers and stop them; return what is wrong."""
        wrong = []
        self.load.finish(PATIENCE_S)
        if self.state.options["hostile"]:
            self.odd.finish(PATIENCE_S)
            self.state.hostile.update(self.odd.sent)
        ends = asyncio.run(end_offsets(self.kafka.bootstrap_servers, self.env["KP_SOURCE_TOPIC"]))
        if not wait_settled(self.kafka.bootstrap_servers, self.env, ends, PATIENCE_S):
            wrong.append("not everything was committed in time")
        self.watch.take()
        self.watch.finish()
        codes = self.fleet.stop_all()
        if set(codes) != {0}:
            wrong.append(f"exit codes at the end: {codes}")
        still_open = asyncio.run(open_transactions(self.kafka.bootstrap_servers, self.env["KP_GROUP_ID"]))
        if still_open:
            wrong.append(f"open transactions after the workers' end: {still_open}")
        self.save()
        return wrong


def pace(state: State) -> Pace:
    chosen = MODEL if state.options["model"] else STEADY if state.options["steady"] else QUICK
    rate = state.options["rate"]
    return chosen if rate is None else Pace(rate, chosen.hostile, chosen.pause)


async def end_offsets(bootstrap: str, topic: str) -> dict[int, int]:
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        found = await consumer.end_offsets([TopicPartition(topic, p) for p in range(PARTITIONS)])
        return {partition.partition: offset for partition, offset in found.items()}


def storm(session: Session) -> list[str]:
    """Disturb until the time is over; return what is wrong."""
    fleet, state = session.fleet, session.state
    fleet.add()
    session.start()
    violence = Chaos(session.kafka, fleet, state.seed)
    violence.done, violence.zombies = state.done, state.zombies
    plan = shuffled(state.seed, **PLAN)
    all_at_once = 10 if state.options["model"] else len(plan) // 2
    violence.run(plan[:all_at_once], session.pace.pause)
    session.watched = fleet.add()  # from here on one worker is spared, to be watched
    session.watched.protected = True
    for action in plan[all_at_once:]:
        violence.run([action], session.pace.pause)
    while session.left() > 0:
        for action in shuffled(violence.rng.randrange(10**6), **PLAN):
            if session.left() > 0:
                violence.run([action], session.pace.pause)
    wrong = session.finish()
    number = session.watched.number
    wrong += [f"the spared worker ended: {event}" for event in fleet.unexpected() if event.slot == number]
    return wrong


async def join_and_leave(bootstrap: str, env: dict[str, str]) -> None:
    """Be a second member of the group until it has partitions; it scores nothing."""
    member = AIOKafkaConsumer(
        env["KP_SOURCE_TOPIC"],
        bootstrap_servers=bootstrap,
        group_id=env["KP_GROUP_ID"],
        enable_auto_commit=False,
        partition_assignment_strategy=[StickyPartitionAssignor],
        rebalance_timeout_ms=60_000,
    )
    async with member:
        for _ in range(600):
            if member.assignment():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the second member got no partition in 30 s")


def steady(session: Session) -> list[str]:
    """Load one worker until the time is over, with some rebalances after the start; return what is wrong."""
    state, bootstrap = session.state, session.kafka.bootstrap_servers
    rng = random.Random(state.seed)
    slot = session.watched = session.fleet.add()
    session.start()
    wanted = state.options["rebalances"]
    time.sleep(max(45.0, state.minutes * 30) if wanted else 0)  # all caches full
    wrong = []
    before = session.watch.take()
    for _ in range(state.done["rebalance"], wanted):
        asyncio.run(join_and_leave(bootstrap, session.env))
        wait_until(lambda: chaos.ready(slot) and slot.process.metric("kp_assigned_partitions") == PARTITIONS, 60)
        state.done["rebalance"] += 1
        time.sleep(rng.uniform(0, 0.5))
    time.sleep(max(15.0, session.left()))
    after = session.watch.take()
    if wanted and slot.process.metric("kp_rebalances_total") < 2 * wanted and not state.session:
        wrong.append(f"only {slot.process.metric('kp_rebalances_total'):.0f} assignments")
    if session.fleet.exits or (before is not None and after is not None and before.pid != after.pid):
        wrong.append("the worker did not live through it")
    elif before is not None and after is not None and wanted:
        grew = after.rss - before.rss > GROWTH_MIB, after.threads > before.threads + 2, after.files > before.files + 4
        if any(grew):
            wrong.append(f"the worker grew: {before} -> {after}")
    return session.finish() + wrong


def judge(kafka: EmbeddedKafka, env: dict[str, str], state: State) -> tuple[list[str], list[str]]:
    """Compare all topics with the oracle, and the figures with each other; return a report's lines, what is wrong."""
    print("judging ...", flush=True)
    hostile_records = bool(state.options["hostile"])
    embed = hash_vector if not state.options["model"] else model_vectors()
    report = oracle.check(kafka.bootstrap_servers, env, embed, hostile_records=hostile_records)
    changelog = f"{env['KP_GROUP_ID']}-novelty-changelog"
    entries = consume_all(kafka.bootstrap_servers, changelog)
    wrong = report.problems()
    if report.source < max(state.sent, state.options["traces"]):
        wrong.append(f"{state.sent} traces were acknowledged, {report.source} are on the topic")
    grown, grew = growth(state.figures, mib=LASTING_GROWTH_MIB, threads=2, files=8)
    wrong += grew
    overdue = [figure for figure in state.figures if figure.overdue]
    wrong += [f"a transaction was open for too long: {figure}" for figure in overdue]
    kept = (int(env["KP_CACHE_MAX_ELEMENTS"]) + 1024) * PARTITIONS + 900 * pace(state).traces  # not compacted: 15 min
    if state.figures and state.figures[-1].changelog > kept * ENTRY_BYTES:
        wrong.append(f"the changelog takes {state.figures[-1].changelog} bytes, {kept:.0f} entries are to be kept")
    d = state.done
    rows = {
        "sessions": state.session + 1,
        "traces": report.source,
        "accepted/rejected/dead": f"{report.accepted}/{report.rejected}/{report.dead_letters}",
        "hostile batches": ", ".join(f"{kind} {n}" for kind, n in state.hostile.most_common()) or "none",
        "SIGKILL": d["sigkill"],
        "SIGTERM": d["sigterm"],
        "zombies": f"{d['zombie']} ({'; '.join(state.zombies)})",
        "joins/leaves": f"{d['join']}/{d['leave']}",
        "forced rebalances": d["rebalance"],
        "broker restarts": d["restart_broker"],
        "missing": report.missing,
        "duplicates": report.duplicates,
        "out of order": report.out_of_order,
        "wrong topic/foreign/damaged": f"{report.wrong_topic}/{report.foreign}/{report.damaged}",
        "worst difference": f"{report.worst:.2e}",
        "aborted output records": report.aborted,
        "changelog after compaction": f"{len(entries)} of {report.accepted + report.rejected} entries",
        "exits that nobody asked for": "; ".join(state.exits) or "none",
    }
    lines = [
        f"seed {state.options['seed']}, {state.seconds:.0f} s",
        *(f"{name:28s} {value}" for name, value in rows.items()),
        "the watched worker at 5, 30 and 60 minutes and at the end:",
        *map(str, at_marks(state.figures, MARKS)),
        *grown,
        "the workers' logs:",
        chaos.log_report(state.logs),
    ]
    return lines, wrong


def model_vectors() -> Callable[[str], Any]:
    """Return the real model's vector of a text."""
    embedder = load_embedder("auto", None, 256, 0, "fp32")
    assert embedder is not None
    return lambda text: embedder.embed(text).vector


def run(state: State) -> tuple[list[str], list[str]]:
    """Go on with a run until its end, and judge it."""
    state.session += 1
    state.logs.mkdir(exist_ok=True)
    with EmbeddedKafka(data_dir=state.data) as kafka:
        env = environment(kafka, state)
        if state.session == 0:
            create(kafka, env, state)
            state.save()
        wrong: list[str] = []
        if state.seconds < state.minutes * 60 or state.session == 0:
            with Fleet(env, state.logs) as fleet:
                session = Session(kafka, env, state, fleet)
                try:
                    wrong = steady(session) if state.options["steady"] else storm(session)
                finally:  # also of an interrupted session
                    session.watch.finish()
                    state.exits += map(str, fleet.unexpected())
                    session.save()
        else:
            wrong = catch_up(kafka, env, state)
        lines, found = judge(kafka, env, state)
    return lines, wrong + found


def catch_up(kafka: EmbeddedKafka, env: dict[str, str], state: State) -> list[str]:
    """Let one worker score what a run of too few cores, or one that was interrupted at its end, has left."""
    with Fleet(env, state.logs) as fleet:
        fleet.add()
        ends = asyncio.run(end_offsets(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"]))
        settled = wait_settled(kafka.bootstrap_servers, env, ends, PATIENCE_S)
        codes = fleet.stop_all()
    return [] if settled and codes == [0] else [f"not everything was committed in time; exit codes {codes}"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="least duration [1]")
    parser.add_argument("--traces", type=int, help=f"least number of traces [{TRACES}; with --model or --steady 0]")
    parser.add_argument("--seed", type=int, help="[random]")
    parser.add_argument("--report", type=Path, help="file for the report, beside standard output")
    parser.add_argument("--state", type=Path, help="directory: an interrupted run goes on with its data [temporary]")
    parser.add_argument("--model", action="store_true", help="the real model, at 4 traces a second")
    parser.add_argument("--rate", type=float, help="traces a second [60; --steady: 150; --model: 4]")
    parser.add_argument("--hostile", action="store_true", help="hostile and odd records among the good ones")
    parser.add_argument("--steady", action="store_true", help="one worker, constant load, some rebalances")
    parser.add_argument("--rebalances", type=int, default=REBALANCES, help="of --steady [%(default)s]")
    found = parser.parse_args()
    if found.traces is None:
        found.traces = 0 if found.model or found.steady else TRACES
    return found


@dataclass
class State:
    """A run over all its sessions. A session ends with the run, or where it was interrupted, even by SIGKILL."""

    directory: Path
    options: dict[str, Any]
    """What must be the same in each session: seed, kind of run, rate."""
    group: str
    minutes: float
    session: int = -1
    seconds: float = 0.0
    """Running time of all sessions."""
    sent: int = 0
    """Traces that the broker acknowledged."""
    done: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    zombies: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Exits of workers that nobody asked for."""
    figures: list[Figure] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, options: dict[str, Any], *, group: str, minutes: float) -> Self:
        """Return the state of a directory, a new one where it has none. Raises ValueError for other options."""
        path = directory / "state.json"
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            return cls(directory, options, group, minutes)
        kept = json.loads(path.read_text())
        if options["seed"] is None:
            options = {**options, "seed": kept["options"]["seed"]}
        if kept["options"] != options:
            raise ValueError(
                f"{path} is of a run with {kept['options']}: repeat its options, or take another directory"
            )
        state = cls(directory, options, kept["group"], minutes)
        for name in ("session", "seconds", "sent", "zombies", "exits"):
            setattr(state, name, kept[name])
        state.done, state.hostile = Counter(kept["done"]), Counter(kept["hostile"])
        state.figures = [Figure(**figure) for figure in kept["figures"]]
        return state

    @property
    def seed(self) -> int:
        """Return the seed of this session: each session sends traces of its own."""
        return int(self.options["seed"]) + 1000 * self.session

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def data(self) -> Path:
        return self.directory / "kafka"

    def save(self) -> None:
        """Write state.json in one step."""
        kept = {name: value for name, value in vars(self).items() if name not in ("directory", "figures")}
        kept["figures"] = [asdict(figure) for figure in self.figures]
        part = self.directory / "state.json.part"
        part.write_text(json.dumps(kept, indent=1))
        part.replace(self.directory / "state.json")


def main() -> int:
    found = options()
    interrupt_on_signals()
    chaos.quiet_clients()
    same = {k: v for k, v in vars(found).items() if k not in ("report", "state", "minutes")}
    with tempfile.TemporaryDirectory(prefix="kp-soak-") as temporary:
        try:
            directory = (found.state or Path(temporary)).resolve()
            state = State.open(directory, same, group=unique("soak"), minutes=found.minutes)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        if state.options["seed"] is None:
            state.options["seed"] = random.SystemRandom().randrange(10**6)
        print(f"seed {state.options['seed']}", flush=True)
        try:
            lines, wrong = run(state)
        except KeyboardInterrupt:
            later = "the same command goes on" if found.state else "with --state DIR it could go on"
            print(f"\ninterrupted after {state.seconds / 60:.1f} of {found.minutes:.0f} minutes; {later}", flush=True)
            return 130
    lines += ["WRONG:", *wrong] if wrong else ["all right"]
    text = "\n".join(lines) + "\n"
    print(text)
    if found.report:
        found.report.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
