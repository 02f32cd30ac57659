"""Load that goes on whatever happens to the services, and the judgement on all that came out."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.runs.compose.project import BOOTSTRAP, PATIENCE_S, Project
from tests.runs.engine.checks import Checks
from tests.support import oracle
from tests.support.chaos import Load, traces, wait_settled
from tests.support.kafka_fixtures import committed, consume_all, wait_until
from worker.embed.load import load_embedder

SETTINGS: Final = {
    "KP_GROUP_ID": "kp-worker",
    "KP_SOURCE_TOPIC": "traces",
    "KP_ACCEPTED_TOPIC": "traces.accepted",
    "KP_REJECTED_TOPIC": "traces.rejected",
    "KP_DEAD_LETTER_TOPIC": "traces.dead-letter",
}
PARTITIONS: Final = 4
RATE: Final = 10.0
"""Records a second: two cores have Kafka, Prometheus and three workers to run as well."""
PEAK: Final = """
import pathlib
for name in ("memory/memory.max_usage_in_bytes", "memory.peak"):
    path = pathlib.Path("/sys/fs/cgroup", name)
    if path.exists():
        print(path.read_text())
"""


@contextlib.contextmanager
def load(check: Checks, seed: int, total: int = 0, rate: float = RATE) -> Iterator[None]:
    """Publish from this machine while the block runs, then wait until the group has committed all of it.

    total: at least as many records; rate: records a second.
    """
    sender = Load(BOOTSTRAP, SETTINGS["KP_SOURCE_TOPIC"], traces(seed, PARTITIONS), total, rate, open_end=True)
    sender.start()
    try:
        yield
    finally:
        ends = sender.finish(PATIENCE_S)
    check("everything published is taken", wait_settled(BOOTSTRAP, SETTINGS, ends, PATIENCE_S), True)
    print(f"      {sender.sent} records were published meanwhile")


def progress() -> None:
    """Return when the group has committed more than now."""

    def position() -> int:
        return sum(committed(BOOTSTRAP, SETTINGS["KP_GROUP_ID"], SETTINGS["KP_SOURCE_TOPIC"]).values())

    before = position()
    if not wait_until(lambda: position() > before, PATIENCE_S, 1):
        raise AssertionError(f"nothing was committed for {PATIENCE_S:.0f} s under load")


def check_disturbed(check: Checks, project: Project) -> None:
    """Restart, kill, remove and multiply what runs, under load."""
    with load(check, 1):
        progress()
        project.compose("restart", "worker")
        project.wait_healthy()
        progress()
        project.compose("kill", "worker")
        project.compose("up", "--detach", "worker")
        project.wait_healthy()
        progress()
        crash(check, project)
        progress()
        project.compose("restart", "kafka")
        project.wait_healthy("kafka")
        progress()
        project.compose("down")
        project.compose("up", "--detach")
        project.wait_healthy()
        progress()
        project.compose("up", "--detach", "--scale", "worker=3", "worker")
        project.wait_healthy(count=3)
        progress()
        check("partitions of each of three workers", sorted(map(bool, assigned(project))), [True] * 3)
        check("partitions of all workers", sum(assigned(project)), PARTITIONS)
    project.compose("up", "--detach", "--scale", "worker=1", "worker")
    project.wait_healthy()


def crash(check: Checks, project: Project) -> None:
    """Kill the worker's process, as the kernel does when memory runs out; Docker starts it again by its policy."""
    state = project.container("worker")["State"]
    if Path(f"/proc/{state['Pid']}").exists():
        os.kill(state["Pid"], signal.SIGKILL)
        again = wait_until(lambda: project.container("worker")["RestartCount"] == 1, PATIENCE_S)
        check("restarted by its policy after SIGKILL", again, True)
        project.wait_healthy()


def assigned(project: Project) -> list[int]:
    """Return the number of partitions that each worker has."""
    found = []
    for container in project.containers("worker"):
        lines = project.fetch(container["Id"], "http://127.0.0.1:9108/metrics").splitlines()
        (value,) = (line.split()[1] for line in lines if line.startswith("kp_assigned_partitions "))
        found.append(round(float(value)))
    return found


def check_memory(check: Checks, project: Project, override: Path) -> None:
    """A worker with 1 GiB stays below it under load."""
    override.write_text(json.dumps({"services": {"worker": {"mem_limit": "1g"}}}))  # JSON is YAML
    project.compose("up", "--detach", "worker", override=override)
    project.wait_healthy()
    with load(check, 2, total=1000, rate=500.0):  # more than it can take: it always has work
        progress()
    container = project.container("worker")
    check("memory limit in bytes", container["HostConfig"]["Memory"], 1 << 30)
    check("killed for memory, restarts", (container["State"]["OOMKilled"], container["RestartCount"]), (False, 0))
    peak = int(project.execute(container["Id"], "python", "-c", PEAK)) / 2**20
    check("its peak stayed below", peak < 1024, True)
    print(f"      peak {peak:.0f} MiB, with the page cache")


def check_contribute(check: Checks, project: Project) -> None:
    """The profile posts accepted traces to the stand-in for the registry, each once."""
    project.compose("--profile", "contribute", "up", "--detach")
    units = "http://127.0.0.1:8080/_stand-in/units"

    def posted() -> list[str]:
        with contextlib.suppress(Exception):
            return project.fetch(project.container("registry")["Id"], units).splitlines()
        return []

    check("accepted traces are posted", wait_until(lambda: len(posted()) >= 10, PATIENCE_S, 1), True)
    check("posted twice", len(posted()) - len(set(posted())), 0)


def check_everything(check: Checks) -> None:
    """Score the whole source topic anew with the same model, by brute force, and compare it with what came out."""
    embedder = load_embedder("auto", None, 256, 0, "fp32")
    assert embedder is not None
    embed = functools.cache(lambda text: embedder.embed(text).vector)
    report = oracle.check(BOOTSTRAP, SETTINGS, embed)
    print(f"      {report}")
    check("lost, repeated, out of order, damaged or wrong", report.problems(), [])


def source_records() -> int:
    """Return how many records the source topic has."""
    return len(consume_all(BOOTSTRAP, SETTINGS["KP_SOURCE_TOPIC"]))
