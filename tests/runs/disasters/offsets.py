"""The group's offsets are deleted: once they are restored from the outputs as the page says, once they are not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.runs.disasters.scene import GroupTool, Scene, Verdict
from tests.support import oracle
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import committed
from tests.support.surroundings import DOCS
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PAGE: Final = DOCS / "operations.md"


def from_outputs(s: Scene, directory: Path) -> dict[int, int]:
    """Run the page's block in the directory: offsets.csv. Return by source partition the offset that it holds."""
    block = re.search(r"```console\n(kp-worker tail .*?)```", PAGE.read_text(), re.DOTALL)
    assert block, "docs/operations.md has no command that reads the offsets from the outputs"
    command = block[1].replace('f"traces,', f'f"{s.source},')
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env={**os.environ, **s.env, "PATH": path},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = (line.split(",") for line in (directory / "offsets.csv").read_text().splitlines())
    return {int(partition): int(offset) for _, partition, offset in rows}


def delete(s: Scene, tool: GroupTool) -> dict[int, int]:
    """Delete the group; return the offsets that it had."""
    before = committed(s.bootstrap, s.group, s.source)
    tool.run("--delete")
    left = {p: offset for p, offset in committed(s.bootstrap, s.group, s.source).items() if offset >= 0}
    s.verdict.expect(not left, f"the group's offsets are deleted; left: {left}")
    s.say("the group's offsets are deleted")
    return before


def restore(s: Scene, tool: GroupTool, directory: Path, before: dict[int, int]) -> None:
    """Restore the offsets as the page says."""
    offsets = from_outputs(s, directory)
    s.verdict.expect(offsets == before, f"the outputs name the offsets that were committed: {offsets}")
    tool.run("--reset-offsets", "--from-file", str(directory / "offsets.csv"), "--execute")
    s.say("the offsets are restored from the outputs")


def run(work: Path, seed: int) -> Verdict:
    with EmbeddedKafka() as kafka:
        name = "the group's offsets are deleted"
        with Scene(kafka.bootstrap_servers, work / "logs", name, seed=seed) as s:
            tool = GroupTool(s.bootstrap, s.group, work / "tools")
            s.begin()
            time.sleep(10)
            s.end_load()
            s.stop_workers()
            s.begin_load()  # producers go on
            began = time.monotonic()
            before = delete(s, tool)
            restore(s, tool, work, before)
            s.verdict.seen.append(f"reading the outputs and Kafka's tool took {time.monotonic() - began:.0f} s")
            slot = s.fleet.add()
            s.alive_again("with restored offsets")
            restored = s.metrics(slot)["kp_restored_entries_total"]
            s.verdict.expect(restored > 0, f"the caches were restored: {restored:.0f} entries")
            time.sleep(5)
            verdict = s.finish()
            without_restoring(s, tool)
            return verdict


def without_restoring(s: Scene, tool: GroupTool) -> None:
    """Delete the offsets again, and start a worker without them: it publishes all again, the very same documents."""
    delete(s, tool)
    slot = s.fleet.add()
    s.alive_again("without offsets")
    s.end_load()
    restored = s.metrics(slot)["kp_restored_entries_total"]
    s.stop_workers()
    report = oracle.check(s.bootstrap, s.env, hash_vector)
    s.verdict.expect(restored == 0, f"without offsets the caches start empty: {restored:.0f} entries restored")
    wrong = report.problems(at_least_once=True)
    again = f"{report.duplicates} of {report.source} outputs came again, {report.differing_copies} of them differ"
    s.verdict.expect(not wrong and report.duplicates == report.source, f"without offsets: {again} {'; '.join(wrong)}")
