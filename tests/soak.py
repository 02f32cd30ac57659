"""The long chaos run, and the memory check: `python -m tests.soak --minutes N [--seed S] [--report FILE]`.

Chaos: 20 SIGKILLs, 10 joins and leaves, 2 broker restarts and more over at least 10,000 traces; once more as long as
there is time. `--hostile` mixes the records of hostile.py in, `--forget` control records. `--steady`: one worker under
constant load through 50 forced rebalances. Exit code 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from tests.support import chaos, hostile, oracle
from tests.support.chaos import Chaos, Fleet, Load, settings, shuffled, traces, wait_settled, wait_until
from tests.support.crash_worker import hash_vector
from tests.support.forgetting import KEY
from tests.support.kafka_fixtures import consume_all, create_topics
from tests.support.raw_reader import end_offsets
from worker.broker.embedded_kafka import EmbeddedKafka

TRACES: Final = 10_000
RATE: Final = 60.0
HOSTILE_RATE: Final = 2.0
"""Batches a second of `--hostile`; each holds up to six records."""

REBALANCES: Final = 50
PATIENCE_S: Final = 600.0
GROWTH_MIB: Final = 40.0
"""What 50 rebalances may add to a worker's memory: the first restores take buffers that the allocator keeps. A leak of
one partition's restore (2 MB) in each would add 100."""

PLAN: Final = {
    "sigkill": 20, "sigterm": 4, "zombie": 2, "join": 5, "leave": 5, "restart_broker": 2
}  # fmt: skip


class Sample(NamedTuple):
    """A process at one moment: seconds since the start, memory in MiB, threads, open files."""

    at: float
    pid: int
    rss: float
    threads: int
    files: int

    def __str__(self) -> str:
        return f"{self.at:8.0f} s  pid {self.pid}  RSS {self.rss:6.1f} MiB  {self.threads} threads  {self.files} files"


def sample(pid: int, at: float) -> Sample:
    """Read /proc. Raises OSError when the process is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(at, pid, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files)


class Watch(threading.Thread):
    """Samples one process at intervals."""

    def __init__(self, pid: Callable[[], int | None], interval: float, began: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.samples: list[Sample] = []
        self._pid = pid
        self._interval = interval
        self._began = began
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample."""
        while not self._stop_asked.wait(self._interval):
            self.take()

    def take(self) -> Sample | None:
        """Take one sample now; None where there is no process."""
        pid = self._pid()
        if pid is None:
            return None
        try:
            self.samples.append(sample(pid, time.monotonic() - self._began))
        except OSError:
            return None
        return self.samples[-1]

    def finish(self) -> None:
        """Stop."""
        self._stop_asked.set()
        self.join()


def storm(
    kafka: EmbeddedKafka, logs: Path, seed: int, minutes: float, least: int, *, hostile_records: bool, forget: bool
) -> tuple[list[str], list[str]]:
    """Do the chaos run; return the report's lines and what is wrong."""
    env = settings(kafka.bootstrap_servers, TEST_EMBED_MS="10")
    topics = chaos.topics(env)
    if forget:
        env |= chaos.forgetting(env)
    if hostile_records:
        env["KP_MAX_BATCH_BYTES"] = str(hostile.MAX_BATCH_BYTES)
        topics[env["KP_SOURCE_TOPIC"]] = 4, dict(hostile.SOURCE_CONFIG)
        topics |= {env[f"KP_{kind}_TOPIC"]: (4, dict(hostile.OUTPUT_CONFIG)) for kind in ("ACCEPTED", "REJECTED")}
    create_topics(kafka.bootstrap_servers, topics)
    odd = hostile.HostileLoad(
        kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], hostile.batches(seed, traces(seed + 1, 4)), HOSTILE_RATE
    )
    began = time.monotonic()
    with Fleet(env, logs) as fleet:
        fleet.add()
        records = traces(seed, 4)
        if forget:
            records = chaos.with_requests(seed, records, env["KP_SOURCE_TOPIC"], KEY)
        load = Load(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], records, least, RATE, open_end=True)
        load.start()
        if hostile_records:
            odd.start()
        violence = Chaos(kafka, fleet, seed)
        plan = shuffled(seed, **PLAN)
        half = len(plan) // 2
        violence.run(plan[:half])
        survivor = fleet.add()  # from here on one worker is spared, to be watched
        survivor.protected = True
        watch = Watch(lambda: survivor.process.pid, max(5.0, minutes), began)
        watch.start()
        violence.run(plan[half:])
        while time.monotonic() - began < minutes * 60:
            violence.run(shuffled(violence.rng.randrange(10**6), **PLAN))
        ends = load.finish(PATIENCE_S)
        if hostile_records:
            odd.finish(PATIENCE_S)
            ends = end_offsets(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"])
        settled = wait_settled(kafka.bootstrap_servers, env, ends, PATIENCE_S)
        watch.finish()
        codes = fleet.stop_all()
    print("judging ...", flush=True)
    report = oracle.check(kafka.bootstrap_servers, env, hash_vector, hostile_records=hostile_records)
    entries = consume_all(kafka.bootstrap_servers, f"{env['KP_GROUP_ID']}-novelty-changelog")
    wrong = report.problems()
    if not settled:
        wrong.append("not everything was committed in time")
    if set(codes) != {0}:
        wrong.append(f"exit codes at the end: {codes}")
    if (report.source != sum(ends.values()) and not hostile_records) or report.source < least:
        wrong.append(f"{sum(ends.values())} traces were produced, {report.source} are on the topic")
    done = violence.done
    lines = [
        f"seed {seed}, {time.monotonic() - began:.0f} s",
        *(
            f"{name:28s} {value}"
            for name, value in (
                ("traces", report.source),
                ("accepted/rejected/dead", f"{report.accepted}/{report.rejected}/{report.dead_letters}"),
                ("receipts", report.receipts),
                ("hostile batches", ", ".join(f"{kind} {n}" for kind, n in odd.sent.most_common()) or "none"),
                ("SIGKILL", done["sigkill"]),
                ("SIGTERM", done["sigterm"]),
                ("zombies", f"{done['zombie']} ({'; '.join(violence.zombies)})"),
                ("joins/leaves", f"{done['join']}/{done['leave']}"),
                ("broker restarts", done["restart_broker"]),
                ("missing", report.missing),
                ("duplicates", report.duplicates),
                ("out of order", report.out_of_order),
                ("wrong topic/foreign/damaged", f"{report.wrong_topic}/{report.foreign}/{report.damaged}"),
                ("worst difference", f"{report.worst:.2e}"),
                ("aborted output records", report.aborted),
                ("changelog after compaction", f"{len(entries)} of {report.accepted + report.rejected} entries"),
                ("exits that nobody asked for", "; ".join(map(str, fleet.unexpected())) or "none"),
            )
        ),
        "the spared worker:",
        *map(str, watch.samples[:: max(1, len(watch.samples) // 20)]),
        "its colleagues' and its own logs:",
        chaos.log_report(logs),
    ]
    return lines, wrong


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


def steady(kafka: EmbeddedKafka, logs: Path, seed: int, minutes: float) -> tuple[list[str], list[str]]:
    """Do the memory check; return the report's lines and what is wrong."""
    # the default cache, so that a restore has some size
    env = settings(kafka.bootstrap_servers, KP_CACHE_MAX_ELEMENTS="1000", KP_CACHE_TTL_SECONDS="none")
    create_topics(kafka.bootstrap_servers, chaos.topics(env))
    rng = random.Random(seed)
    began = time.monotonic()
    with Fleet(env, logs) as fleet:
        slot = fleet.add()
        load = Load(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], traces(seed, 4), 6000, 150, open_end=True)
        load.start()
        watch = Watch(lambda: slot.process.pid, max(5.0, minutes * 2), began)
        watch.start()
        time.sleep(max(45.0, minutes * 30))  # all caches full
        before = watch.take()
        for _ in range(REBALANCES):
            asyncio.run(join_and_leave(kafka.bootstrap_servers, env))
            wait_until(lambda: chaos.ready(slot) and slot.process.metric("kp_assigned_partitions") == 4, 60)
            time.sleep(rng.uniform(0, 0.5))
        time.sleep(max(15.0, began + minutes * 60 - time.monotonic()))
        after = watch.take()
        ends = load.finish(PATIENCE_S)
        settled = wait_settled(kafka.bootstrap_servers, env, ends, PATIENCE_S)
        rebalances = slot.process.metric("kp_rebalances_total")
        watch.finish()
        codes = fleet.stop_all()
    report = oracle.check(kafka.bootstrap_servers, env, hash_vector)
    wrong = report.problems()
    if not settled or codes != [0] or fleet.unexpected():
        wrong.append(f"settled: {settled}, exit codes {codes}, other exits {fleet.unexpected()}")
    if before is None or after is None or before.pid != after.pid:
        wrong.append("the worker did not live through it")
    elif after.rss - before.rss > GROWTH_MIB or after.threads > before.threads + 2 or after.files > before.files + 4:
        wrong.append(f"the worker grew: {before} -> {after}")
    if rebalances < 2 * REBALANCES:
        wrong.append(f"only {rebalances:.0f} assignments")
    lines = [
        f"seed {seed}, {time.monotonic() - began:.0f} s, {rebalances:.0f} assignments, {report}",
        f"before {REBALANCES} rebalances: {before}",
        f"after:                {after}",
        *map(str, watch.samples[:: max(1, len(watch.samples) // 40)]),
        chaos.log_report(logs),
    ]
    return lines, wrong


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="least duration [1]")
    parser.add_argument("--traces", type=int, default=TRACES, help="least number of traces [%(default)s]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="[random]")
    parser.add_argument("--report", type=Path, help="file for the report, beside standard output")
    parser.add_argument("--logs", type=Path, help="directory for the workers' logs [temporary]")
    parser.add_argument("--hostile", action="store_true", help="hostile and odd records among the good ones")
    parser.add_argument("--forget", action="store_true", help="control records among the traces (KP_FORGET=true)")
    parser.add_argument("--steady", action="store_true", help="one worker, constant load, 50 rebalances")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chaos.quiet_clients()
    with tempfile.TemporaryDirectory(prefix="kp-soak-") as temporary, EmbeddedKafka() as kafka:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        if options.steady:
            lines, wrong = steady(kafka, logs, options.seed, options.minutes)
        else:
            lines, wrong = storm(
                kafka, logs, options.seed, options.minutes, options.traces,
                hostile_records=options.hostile, forget=options.forget,
            )  # fmt: skip
    lines += ["WRONG:", *wrong] if wrong else ["all right"]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.report:
        options.report.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
