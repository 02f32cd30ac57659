"""The workers' wall clock jumps by hours, back and forth (Debian's libfaketime); only theirs: brokers keep the time.

The package is downloaded by apt and unpacked into the user's cache; nothing is installed.
"""

import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.runs.disasters.scene import MissingError, Scene, Verdict
from tests.support.assemble import Workshop, expected_documents, judged, made_records
from tests.support.kafka_fixtures import wait_until
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_jars import default_cache


def library() -> Path:
    """Return libfaketime, fetched at first use. Raises MissingError."""
    cache = default_cache() / "faketime"
    libraries = sorted(cache.glob("usr/lib/*/faketime/libfaketimeMT.so.1"))
    if libraries:
        return libraries[0]
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise MissingError("libfaketime is missing, and there is no apt-get to fetch it (a Debian package)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        fetched = subprocess.run(
            ["apt-get", "download", "libfaketime"], cwd=temporary, capture_output=True, text=True, check=False
        )
        packages = sorted(Path(temporary).glob("libfaketime*.deb"))
        if not packages:
            raise MissingError(f"apt-get download libfaketime: {fetched.stderr.strip()} (apt-get update first?)")
        subprocess.run(["dpkg", "-x", str(packages[0]), str(cache)], check=True)
    return library()


def _faked(clock: Path) -> dict[str, str]:
    """Return the environment of a process whose clock is what a file says."""
    return {
        "LD_PRELOAD": str(library()),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # as a step of the system's clock does not move it, either
        "PATH": os.environ["PATH"],
    }


def jump(s: Scene, clock: Path, seconds: str) -> None:
    """Set the workers' clock, and look at them for a while."""
    part = clock.with_suffix(".part")
    part.write_text(f"{seconds}s\n")
    part.replace(clock)
    s.eye.reset()
    s.eye.most_lag_seconds = 0.0
    s.say(f"the workers' clocks are {seconds} s from the true time")
    before = len(s.fleet.exits)
    time.sleep(20)
    exits = [event.code for event in s.fleet.exits[before:]]
    s.verdict.expect(not exits, f"clock {seconds} s: exits {exits}")
    s.verdict.expect(s.eye.longest_stall < 15, f"clock {seconds} s: {s.eye.longest_stall:.1f} s without a commit")
    s.verdict.seen.append(f"clock {seconds} s: greatest kp_consumer_lag_seconds {s.eye.most_lag_seconds:.0f}")
    s.wait(s.fleet.all_ready, "the workers are ready")
    for slot in s.fleet.running():
        least = min((v for name, v in slot.process.metrics().items() if name.startswith("kp_")), default=0.0)
        s.verdict.expect(least >= 0, f"worker {slot.number}: least of its metrics {least}")


def run(work: Path, seed: int) -> Verdict:
    work.mkdir(parents=True, exist_ok=True)
    clock = work / "clock"
    clock.write_text("+0s\n")
    faked = _faked(clock)
    with EmbeddedKafka() as kafka:
        name = "the workers' clocks jump by hours"
        with Scene(kafka.bootstrap_servers, work / "logs", name, seed=seed, rate=5, env=faked) as s:
            s.begin()
            # Below and beyond the hour by which Kafka 4 lets a record's timestamp be ahead.
            for seconds in ("+3000", "-3000", "+18000", "-18000", "+0"):
                jump(s, clock, seconds)
            clock.write_text("+18000s\n")
            s.say("a worker starts with a clock that is 5 hours ahead")
            s.fleet.kill(s.fleet.running()[0])
            time.sleep(2)
            s.alive_again("restart with a wrong clock")
            jump(s, clock, "+18000")
            clock.write_text("+0s\n")
            return s.finish()


def assemble(work: Path, seed: int) -> Verdict:
    """Run `assemble-clock`: assemble's own clock is wrong from its start, and jumps while runs are open."""
    work.mkdir(parents=True, exist_ok=True)
    verdict = Verdict("assemble's clock is wrong")
    clock = work / "clock"
    with EmbeddedKafka() as kafka:
        for first, then in (
            ("+365d", "+365d"), ("-1h", "-1h"), ("+0s", "+365d"), ("+0s", "-1d"), ("+365d", "-1h"),
        ):  # fmt: skip
            clock.write_text(f"{first}\n")
            runs = made_records(random.Random(seed), 60)
            workshop = Workshop(kafka.bootstrap_servers, grace=4, gap=15)
            workshop.env |= _faked(clock)
            expected = expected_documents(value for run in runs for value in run)
            fleet = [workshop.start(work / f"assemble{first}{then}-{number}.log").wait_ready() for number in range(2)]
            try:
                workshop.put([run[0] for run in runs])
                clock.write_text(f"{then}\n")
                time.sleep(2)
                workshop.put([value for run in runs for value in run[1:]])
                began = time.monotonic()
                complete = wait_until(lambda: len(workshop.documents()) >= len(expected), 60, 0.5)  # noqa: B023
                took = time.monotonic() - began
                problems = judged(workshop, expected)
            finally:
                for each in fleet:
                    each.close()
            seen = f"clock {first}, then {then}: {len(expected)} traces after {took:.0f} s, problems {problems}"
            verdict.expect(complete and not problems, seen)
    return verdict
