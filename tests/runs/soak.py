"""The long chaos run, and the long quiet one: `python -m tests.runs.soak --minutes N [--seed S]`.

Chaos: 20 SIGKILLs, 10 joins and leaves, 2 broker restarts and more over at least 10,000 traces; once more as long as
there is time. `--hostile` mixes the records of hostile.py in. `--steady`: one worker under
constant load, with 50 forced rebalances after the first minute. `--model`: the real model, at a rate that two cores
bear. Memory, threads, files, open transactions and the changelog's size are reported at 5, 30 and 60 minutes and at the
end. Exit code 1 when anything is wrong, 130 when interrupted.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from tests.support import chaos, hostile, oracle
from tests.support.chaos import Chaos, Fleet, Load, settings, shuffled, traces, wait_settled
from tests.support.crash_worker import hash_vector
from tests.support.figures import Watch, at_marks, growth, open_transactions
from tests.support.kafka_fixtures import consume_all, create_topics, unique, wait_until
from tests.support.processes import interrupt_on_signals
from worker.config import load
from worker.embed.load import load_embedder
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PARTITIONS: Final = 4
TRACES: Final = 10_000
PATIENCE_S: Final = 600.0
REBALANCES: Final = 50
PLAN: Final = {"sigkill": 20, "sigterm": 4, "zombie": 2, "join": 5, "leave": 5, "restart_broker": 2}


def environment(bootstrap: str, given: argparse.Namespace) -> dict[str, str]:
    extra = {} if given.steady else {"TEST_EMBED_MS": "10"}
    if given.model:  # the default session timeout: the model takes the cores that heartbeats need
        extra = {"TEST_REAL_MODEL": "1", "KP_SESSION_TIMEOUT_SECONDS": "15"}
    if given.steady:  # the default cache, so that a restore has some size
        extra |= {"KP_CACHE_MAX_ELEMENTS": "1000", "KP_CACHE_TTL_SECONDS": "none"}
    if given.hostile:
        extra["KP_MAX_BATCH_BYTES"] = str(hostile.MAX_BATCH_BYTES)
    return settings(bootstrap, unique("soak"), **extra)


class Run:
    """One run: a fleet, its load, and the watch over one worker."""

    def __init__(self, kafka: EmbeddedKafka, env: dict[str, str], fleet: Fleet, given: argparse.Namespace) -> None:
        self.kafka, self.env, self.fleet, self.given = kafka, env, fleet, given
        self.bootstrap, self.source = kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"]
        # The real model takes 2 s of CPU to start, and 35 ms for a trace.
        self.traces_a_second = given.rate or (4.0 if given.model else 150.0 if given.steady else 60.0)
        self.pause = (5.0, 25.0) if given.model else (0.3, 3.0)
        """Seconds between two disturbances."""
        self.chaos = Chaos(kafka, fleet, given.seed)
        """What is done to the fleet; it counts the forced rebalances, too."""
        records = traces(given.seed, PARTITIONS)
        self.load = Load(self.bootstrap, self.source, records, given.traces, self.traces_a_second, open_end=True)
        batches = hostile.batches(given.seed, traces(given.seed + 1, PARTITIONS))
        self.odd = hostile.HostileLoad(self.bootstrap, self.source, batches, 0.2 if given.model else 2.0)
        self.watch = Watch(kafka, env["KP_GROUP_ID"], min(30.0, max(5.0, given.minutes)))
        self.end: float = time.monotonic() + 60 * given.minutes

    def start(self) -> None:
        """Create the topics (the workers create the others), and start what produces, and the watch."""
        topics: dict[str, Any] = dict(chaos.topics(self.env, PARTITIONS))
        if self.given.steady:
            del topics[f"{self.env['KP_GROUP_ID']}-novelty-changelog"]  # with the product's settings
        if self.given.hostile:
            topics[self.source] = PARTITIONS, dict(hostile.SOURCE_CONFIG)
            for kind in ("ACCEPTED", "REJECTED"):
                topics[self.env[f"KP_{kind}_TOPIC"]] = PARTITIONS, dict(hostile.OUTPUT_CONFIG)
        create_topics(self.bootstrap, topics)
        for each in (self.load, self.watch, *([self.odd] if self.given.hostile else [])):
            each.start()

    def left(self) -> float:
        return self.end - time.monotonic()

    def finish(self) -> list[str]:
        """End the load, wait for the workers and stop them; return what is wrong."""
        wrong = []
        self.load.finish(PATIENCE_S)
        if self.given.hostile:
            self.odd.finish(PATIENCE_S)
        ends = asyncio.run(end_offsets(self.bootstrap, self.source))
        if not wait_settled(self.bootstrap, self.env, ends, PATIENCE_S):
            wrong.append("not everything was committed in time")
        self.watch.take()
        self.watch.finish()
        codes = self.fleet.stop_all()
        if set(codes) != {0}:
            wrong.append(f"exit codes at the end: {codes}")
        still_open = asyncio.run(open_transactions(self.bootstrap, self.env["KP_GROUP_ID"]))
        if still_open:
            wrong.append(f"open transactions after the workers' end: {still_open}")
        return wrong


async def end_offsets(bootstrap: str, topic: str) -> dict[int, int]:
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        ends = await consumer.end_offsets([TopicPartition(topic, p) for p in range(PARTITIONS)])
        return {partition.partition: offset for partition, offset in ends.items()}


def storm(run: Run) -> list[str]:
    """Disturb until the time is over; return what is wrong."""
    run.start()
    run.fleet.add()
    plan = shuffled(run.given.seed, **PLAN)
    all_at_once = 10 if run.given.model else len(plan) // 2
    run.chaos.run(plan[:all_at_once], run.pause)
    spared = run.watch.slot = run.fleet.add()  # from here on one worker is watched
    spared.protected = True
    run.chaos.run(plan[all_at_once:], run.pause)
    while run.left() > 0:
        for action in shuffled(run.chaos.rng.randrange(10**6), **PLAN):
            if run.left() > 0:
                run.chaos.run([action], run.pause)
    wrong = run.finish()
    ends = [event for event in run.fleet.unexpected() if event.slot == spared.number]
    return wrong + [f"the spared worker ended: {event}" for event in ends]


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


def steady(run: Run) -> list[str]:
    """Load one worker until the time is over, with 50 rebalances after the start; return what is wrong."""
    rng = random.Random(run.given.seed)
    run.start()
    slot = run.watch.slot = run.fleet.add()
    time.sleep(max(45.0, run.given.minutes * 30))  # all caches full
    wrong = []
    before = run.watch.take()
    for _ in range(REBALANCES):
        asyncio.run(join_and_leave(run.bootstrap, run.env))
        wait_until(lambda: chaos.ready(slot) and slot.process.metric("kp_assigned_partitions") == PARTITIONS, 60)
        run.chaos.done["rebalance"] += 1
        time.sleep(rng.uniform(0, 0.5))
    time.sleep(max(15.0, run.left()))
    after = run.watch.take()
    if slot.process.metric("kp_rebalances_total") < 2 * REBALANCES:
        wrong.append(f"only {slot.process.metric('kp_rebalances_total'):.0f} assignments")
    if run.fleet.exits or not before or not after or before.pid != after.pid:
        wrong.append("the worker did not live through it")
    # The first restores take buffers that the allocator keeps. A leak of a partition's restore (2 MB) in each rebalance
    # would add 100 MiB.
    elif after.rss > before.rss + 40 or after.threads > before.threads + 2 or after.files > before.files + 4:
        wrong.append(f"the worker grew: {before} -> {after}")
    return run.finish() + wrong


def judge(run: Run) -> tuple[list[str], list[str]]:
    """Compare all topics with the oracle, and the figures with each other; return a report's lines, what is wrong."""
    print("judging ...", flush=True)
    embed = model_vectors() if run.given.model else hash_vector
    report = oracle.check(run.bootstrap, run.env, embed, hostile_records=run.given.hostile)
    entries = consume_all(run.bootstrap, f"{run.env['KP_GROUP_ID']}-novelty-changelog")
    wrong = report.problems()
    sent = run.load.acknowledged
    if report.source < max(sent, run.given.traces):
        wrong.append(f"{sent} traces were acknowledged, {report.source} are on the topic")
    figures = run.watch.figures
    grown, grew = growth(figures)
    wrong += grew
    wrong += [f"a transaction was open for too long: {figure}" for figure in figures if figure.overdue]
    not_compacted = 900 * run.traces_a_second  # of 15 minutes
    kept = (int(run.env["KP_CACHE_MAX_ELEMENTS"]) + 1024) * PARTITIONS + not_compacted
    if figures and figures[-1].changelog > kept * 2000:  # an entry of the tests takes less
        wrong.append(f"the changelog takes {figures[-1].changelog} bytes, {kept:.0f} entries are to be kept")
    done = run.chaos.done
    rows = {
        "traces": report.source,
        "accepted/rejected/dead": f"{report.accepted}/{report.rejected}/{report.dead_letters}",
        "hostile batches": ", ".join(f"{kind} {n}" for kind, n in run.odd.sent.most_common()) or "none",
        "SIGKILL": done["sigkill"],
        "SIGTERM": done["sigterm"],
        "zombies": f"{done['zombie']} ({'; '.join(run.chaos.zombies)})",
        "joins/leaves": f"{done['join']}/{done['leave']}",
        "forced rebalances": done["rebalance"],
        "broker restarts": done["restart_broker"],
        "missing": report.missing,
        "duplicates": report.duplicates,
        "out of order": report.out_of_order,
        "wrong topic/foreign/damaged": f"{report.wrong_topic}/{report.foreign}/{report.damaged}",
        "worst difference": f"{report.worst:.2e}",
        "aborted output records": report.aborted,
        "changelog after compaction": f"{len(entries)} of {report.accepted + report.rejected} entries",
        "exits that nobody asked for": "; ".join(map(str, run.fleet.unexpected())) or "none",
    }
    lines = [
        *(f"{name:28s} {value}" for name, value in rows.items()),
        "the watched worker at 5, 30 and 60 minutes and at the end:",
        *map(str, at_marks(figures)),
        *grown,
        "the workers' logs:",
        chaos.log_report(run.fleet.logs),
    ]
    return lines, wrong


def model_vectors() -> Callable[[str], Any]:
    """Return the real model's vector of a text."""
    embedder = load_embedder(load(embedder="auto"))
    assert embedder is not None
    return lambda text: embedder.embed(text).vector


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="least duration [1]")
    parser.add_argument("--traces", type=int, help=f"least number of traces [{TRACES}; with --model or --steady 0]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="[random]")
    parser.add_argument("--model", action="store_true", help="the real model, at 4 traces a second")
    parser.add_argument("--rate", type=float, help="traces a second [60; --steady: 150; --model: 4]")
    parser.add_argument("--hostile", action="store_true", help="hostile and odd records among the good ones")
    parser.add_argument("--steady", action="store_true", help="one worker, constant load, 50 rebalances")
    given = parser.parse_args()
    if given.traces is None:
        given.traces = 0 if given.model or given.steady else TRACES
    interrupt_on_signals()
    chaos.quiet_clients()
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    try:
        with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory(prefix="kp-soak-") as logs:
            env = environment(kafka.bootstrap_servers, given)
            with Fleet(env, Path(logs)) as fleet:
                run = Run(kafka, env, fleet, given)
                try:
                    wrong = steady(run) if given.steady else storm(run)
                finally:
                    run.watch.finish()
            lines, problems = judge(run)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {(time.monotonic() - began) / 60:.1f} of {given.minutes:.0f} minutes", flush=True)
        return 130
    wrong += problems
    print(f"seed {given.seed}, {time.monotonic() - began:.0f} s", *lines, sep="\n")
    print(*(["WRONG:", *wrong] if wrong else ["all right"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
