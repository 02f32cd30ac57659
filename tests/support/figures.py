"""Figures of a worker and its Kafka over a long run, and whether they grew: memory, threads, files, transactions..."""

import asyncio
import contextlib
import http.client
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiokafka.errors import KafkaError
from aiokafka.protocol.types import CompactArray, Int16, Int32, Int64

from tests.support.chaos import Slot
from worker.kafka.aiokafka_private import InOneVersion, ask_once, split_servers
from worker.kafka.protocol import TEXT, Fields, fields_array, flexible
from worker.lab.broker.embedded_kafka import EmbeddedKafka

OVERDUE_MS: Final = 75_000
"""KP_TRANSACTION_TIMEOUT_SECONDS, and what the broker takes to notice: no transaction of the worker is open longer."""

WARM_S: Final = 300.0
"""Until then a worker loads, restores and fills its buffers."""


class ListTransactions(
    InOneVersion,
    version=flexible(
        "ListTransactions", 66, 1,
        Fields(("states", CompactArray(TEXT)), ("producer_ids", CompactArray(Int64)), ("longer_than_ms", Int64)),
        Fields(
            ("throttle_time_ms", Int32), ("error_code", Int16), ("unknown_states", CompactArray(TEXT)),
            ("transactions", fields_array(("transactional_id", TEXT), ("producer_id", Int64), ("state", TEXT))),
        ),
    ),
):  # fmt: skip
    """The transactions of one broker's coordinators, in the version (Kafka 3.8) that asks how long they are open."""


async def open_transactions(bootstrap: str, group: str, longer_than_ms: int = -1) -> list[str]:
    """Return the transactional ids of a group's workers with an open transaction, over all brokers that answer.

    Raises KafkaError, OSError or TimeoutError where none answers.
    """
    names: list[str] = []
    servers = split_servers(bootstrap)
    request = ListTransactions(["Ongoing", "PrepareCommit", "PrepareAbort"], [], longer_than_ms)
    for number, (host, port) in enumerate(servers):
        try:
            answer = await ask_once(host, port, request, request_timeout_ms=5000)
        except (KafkaError, OSError, TimeoutError):
            if number == len(servers) - 1 and not names:
                raise
            continue
        names += [name for name, *_ in answer.transactions if name.startswith(f"{group}-")]
    return names


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process. Raises OSError when it is gone."""
    return int(_status(pid)["VmRSS"].split()[0]) / 1024


def peak_memory_mib(pid: int) -> float:
    """Return the most resident memory that a process has had. Raises OSError when it is gone."""
    return int(_status(pid)["VmHWM"].split()[0]) / 1024


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


@dataclass(frozen=True)
class Figure:
    """A worker and its Kafka at one moment. `at`: seconds of running time; memory in MiB; None: could not be read."""

    at: float
    pid: int
    rss: float
    threads: int
    files: int
    changelog: int
    open: int | None = None
    overdue: int | None = None
    lag: float | None = None
    broker_rss: float | None = None

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            return "?" if value is None else f"{value:.0f}"

        return (
            f"{self.at / 60:6.1f} min  pid {self.pid}  RSS {self.rss:6.1f} MiB  {self.threads} threads  "
            f"{self.files} files  open transactions {shown(self.open)} (overdue {shown(self.overdue)})  "
            f"changelog {self.changelog / 1e6:.2f} MB  lag {shown(self.lag)}  broker {shown(self.broker_rss)} MiB"
        )


class Watch(threading.Thread):
    """Takes figures of a worker and its Kafka at intervals (s), prints and keeps them. `slot`: where the worker is."""

    def __init__(self, kafka: EmbeddedKafka, group: str, interval: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.slot: Slot | None = None
        self.figures: list[Figure] = []
        self._kafka, self._group, self._interval = kafka, group, interval
        self._began = time.monotonic()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(self._interval):
            self.take()

    def take(self) -> Figure | None:
        """Take a figure now; None where there is no worker."""
        if self.slot is None:
            return None
        at, worker, kafka = time.monotonic() - self._began, self.slot.process, self._kafka
        try:
            status, files = _status(worker.pid), len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
            rss, threads = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])
        except (OSError, KeyError):  # gone, or a zombie of the system
            return None
        lag = broker_rss = still_open = overdue = None
        with contextlib.suppress(OSError, http.client.HTTPException):
            lag = worker.metric("kp_consumer_lag")
        with contextlib.suppress(Exception):  # the broker is away: chaos does that
            broker_rss = memory_mib(kafka.pid(0))
            still_open = len(asyncio.run(open_transactions(kafka.bootstrap_servers, self._group)))
            overdue = len(asyncio.run(open_transactions(kafka.bootstrap_servers, self._group, OVERDUE_MS)))
        changelog = 0
        for segment in (kafka.node_log(0).parent / "data").glob(f"{self._group}-novelty-changelog-*/*.log"):
            with contextlib.suppress(FileNotFoundError):  # it is deleted just now
                changelog += segment.stat().st_size
        self.figures.append(
            Figure(at, worker.pid, rss, threads, files, changelog, still_open, overdue, lag, broker_rss)
        )
        print(self.figures[-1], flush=True)
        return self.figures[-1]

    def finish(self) -> None:
        self._stop_asked.set()
        if self.is_alive():
            self.join()


def at_marks(figures: Sequence[Figure]) -> list[Figure]:
    """Return the first complete figure at or after 5, 30 and 60 minutes, and the last one."""
    complete = [figure for figure in figures if figure.open is not None] or list(figures)
    at = [next((figure for figure in complete if figure.at >= mark * 60), None) for mark in (5, 30, 60)]
    return list(dict.fromkeys([figure for figure in at if figure is not None] + complete[-1:]))


def growth(figures: Sequence[Figure]) -> tuple[list[str], list[str]]:
    """Compare the two halves of each process's life after WARM_S; return lines for a report, and what is wrong.

    The greatest values are compared: they come back with each rebalance, restore and burst. The slope is a least
    squares line through the second half. A process that lived for less than two WARM_S is not judged.
    """
    lines, wrong = [], []
    for pid in dict.fromkeys(figure.pid for figure in figures):
        mine = [figure for figure in figures if figure.pid == pid]
        mine = [figure for figure in mine if figure.at >= mine[0].at + WARM_S]
        if len(mine) < 4 or mine[-1].at - mine[0].at < WARM_S:
            continue
        middle = (mine[0].at + mine[-1].at) / 2
        second = [figure for figure in mine if figure.at >= middle]
        halves = [figure for figure in mine if figure.at < middle], second
        slope = statistics.linear_regression([f.at / 3600 for f in second], [f.rss for f in second]).slope
        most = []
        for name, limit in (("rss", 25), ("threads", 2), ("files", 8)):
            before, after = (max(getattr(figure, name) for figure in half) for half in halves)
            most.append(f"{name} {before:.1f} -> {after:.1f}")
            if after - before > limit:
                wrong.append(f"{name} of pid {pid} grew from {before:.1f} to {after:.1f}")
        lines.append(
            f"pid {pid}, minutes {mine[0].at / 60:.0f} to {mine[-1].at / 60:.0f}, greatest values of both halves: "
            f"{', '.join(most)}; second half {slope:+.1f} MiB an hour"
        )
    return lines, wrong
