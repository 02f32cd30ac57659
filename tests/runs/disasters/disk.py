"""A broker's disk fills: its log directory is on a small tmpfs, where a foreign file takes all space. Needs root.

`disk`: the only broker. `disk-of-three`: one of three, with three replicas and min.insync.replicas=2.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runs.disasters.partition import coordinator
from tests.runs.disasters.scene import MissingError, Scene, Verdict
from tests.support.figures import OVERDUE_MS, open_transactions
from worker.lab.broker.embedded_kafka import EmbeddedKafka

SIZE_MIB = 64


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a small tmpfs on the directory. Raises MissingError without the right to mount."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "kp-disaster", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"a small disk needs root and the right to mount (tmpfs): {done.stderr.strip()}")
    try:
        yield
    finally:
        for _ in range(20):
            if subprocess.run(["umount", str(directory)], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.5)
        else:
            subprocess.run(["umount", "--lazy", str(directory)], check=False)


def enlarge(directory: Path) -> None:
    """Give the disk eight times its size."""
    subprocess.run(["mount", "-o", f"remount,size={8 * SIZE_MIB}m", str(directory)], check=True)


def free_kib(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize // 1024


def what_kafka_said(kafka: EmbeddedKafka, node: int) -> str:
    """Return the line with which the broker explains its end."""
    lines = kafka.node_log(node).read_text(errors="replace").splitlines()
    telling = [line for line in lines if "No space left" in line or "log dirs" in line or "Halting" in line]
    return telling[-1] if telling else (lines[-1] if lines else "nothing")


def fill_and_wait(s: Scene, kafka: EmbeddedKafka, node: int, disk: Path) -> None:
    """Fill a node's disk, and wait for its end."""
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    s.say(f"the disk of broker {node} is full ({free_kib(disk)} KiB free)")
    s.wait(lambda: not kafka.alive(node), f"broker {node} has ended")
    s.say(f"Kafka: {what_kafka_said(kafka, node)[:200]}")


def run_alone(work: Path, seed: int) -> Verdict:
    disk = work / "kafka" / "node-0" / "data"
    with small_disk(disk), EmbeddedKafka(data_dir=work / "kafka") as kafka:
        name = "the only broker's disk is full"
        with Scene(kafka.bootstrap_servers, work / "logs", name, seed=seed) as s:
            s.begin()
            fill_and_wait(s, kafka, 0, disk)
            began = time.monotonic()
            s.fleet.kill(s.fleet.running()[0])

            def ended(code: int) -> bool:
                return code in {event.code for event in s.fleet.exits}

            s.wait(lambda: ended(2), "a worker that was started meanwhile ended with 2", 300)
            # KP_TRANSACTION_TIMEOUT_SECONDS, twice on a busy machine.
            done = "the other one has ended with 1, or had no transaction open"
            s.wait(lambda: ended(1) or time.monotonic() > began + 120, done)
            codes = [event.code for event in s.fleet.exits]
            s.verdict.seen.append(f"exit codes during the outage: {codes}")
            s.verdict.expect(bool(s.logged("no Kafka broker answers")), "a worker says that no broker answers")
            enlarge(disk)
            s.say(f"the disk is larger ({free_kib(disk)} KiB free), the broker starts")
            kafka.start_node(0)
            s.alive_again("after the repair")
            time.sleep(5)
            return s.finish(exits=(1, 2))


def run_of_three(work: Path, seed: int) -> Verdict:
    disk = work / "kafka" / "node-1" / "data"
    with small_disk(disk), EmbeddedKafka(3, data_dir=work / "kafka") as kafka:
        name = "the disk of one of three brokers is full"
        with Scene(kafka.bootstrap_servers, work / "logs", name, seed=seed) as s:
            s.begin()
            fill_and_wait(s, kafka, 1, disk)
            time.sleep(30)
            s.say(f"longest time without a commit: {s.eye.longest_stall:.1f} s")
            s.verdict.expect(s.eye.longest_stall < 20, f"the workers went on after {s.eye.longest_stall:.1f} s")
            enlarge(disk)
            kafka.start_node(1)
            s.say(f"the disk is larger ({free_kib(disk)} KiB free), the broker is back")
            end_hanging_transactions(s, kafka)
            s.alive_again("after the repair")
            time.sleep(10)
            return s.finish(exits=(1,))


def end_hanging_transactions(s: Scene, kafka: EmbeddedKafka) -> None:
    """Restart the coordinator of each transaction that stays open, as the page says.

    A broker whose disk is full answers a commit marker with an unknown error, and Kafka 4.1's coordinator then gives
    the transaction up without ending it: it stays PrepareCommit until its coordinator starts again.
    """
    time.sleep(OVERDUE_MS / 1000)
    hanging = asyncio.run(open_transactions(s.bootstrap, s.group, OVERDUE_MS))
    s.say(f"transactions that stay open: {hanging or 'none'}")
    s.verdict.seen.append(f"transactions that stayed open until their coordinator was restarted: {hanging or 'none'}")
    for node in sorted({coordinator(s.bootstrap, name, 1) for name in hanging}):
        kafka.stop_node(node)
        kafka.start_node(node)
        s.say(f"broker {node}, their coordinator, was restarted")
