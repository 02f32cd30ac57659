"""Figures of a worker and its Kafka over a long run, and whether they grew: memory, threads, files, transactions..."""

import asyncio
import contextlib
import http.client
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiokafka.errors import KafkaError
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from tests.support.kafka_fixtures import WorkerProcess
from worker.kafka.aiokafka_private import ask_once, split_servers

OVERDUE_MS: Final = 75_000
"""KP_TRANSACTION_TIMEOUT_SECONDS, and what the broker takes to notice: no transaction of the worker is open longer."""

WARM_S: Final = 300.0
"""Until then a worker loads, restores and fills its buffers."""

_TAGS: Final = ("tags", TaggedFields)


class ListTransactionsResponse(Response):  # type: ignore[misc]  # aiokafka is untyped
    """The transactions of one broker's coordinators."""

    API_KEY = 66
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_state_filters", CompactArray(CompactString())),
        (
            "transactions",
            CompactArray(
                ("transactional_id", CompactString()), ("producer_id", Int64), ("state", CompactString()), _TAGS
            ),
        ),
        _TAGS,
    )


class ListTransactionsStruct(RequestStruct):  # type: ignore[misc]
    """Version 1 (Kafka 3.8) can ask for those that are open for longer than some milliseconds."""

    FLEXIBLE_VERSION = True
    API_KEY = 66
    API_VERSION = 1
    RESPONSE_TYPE = ListTransactionsResponse
    SCHEMA = Schema(
        ("state_filters", CompactArray(CompactString())),
        ("producer_id_filters", CompactArray(Int64)),
        ("duration_filter", Int64),
        _TAGS,
    )


class ListTransactionsRequest(Request[ListTransactionsStruct]):  # type: ignore[misc]
    """Ask one broker for the transactions that its coordinators hold open."""

    API_KEY = 66

    def __init__(self, longer_than_ms: int) -> None:
        self._longer_than_ms = longer_than_ms

    def build(self, request_struct_class: type[Any]) -> Any:
        return request_struct_class(["Ongoing", "PrepareCommit", "PrepareAbort"], [], self._longer_than_ms, {})


async def open_transactions(bootstrap: str, group: str, longer_than_ms: int = -1) -> list[str]:
    """Return the transactional ids of a group's workers with an open transaction, over all brokers that answer.

    Raises KafkaError, OSError or TimeoutError where none answers.
    """
    found: list[str] = []
    servers = split_servers(bootstrap)
    for number, (host, port) in enumerate(servers):
        try:
            answer = await ask_once(host, port, ListTransactionsRequest(longer_than_ms), request_timeout_ms=5000)
        except (KafkaError, OSError, TimeoutError):
            if number == len(servers) - 1 and not found:
                raise
            continue
        found += [name for name, *_ in answer.transactions if name.startswith(f"{group}-")]
    return found


def changelog_bytes(data: Path, topic: str) -> int:
    """Return the bytes of a topic's segments in a broker's data directory, without those about to be deleted."""
    total = 0
    for segment in data.glob(f"{topic}-*/*.log"):
        with contextlib.suppress(FileNotFoundError):
            total += segment.stat().st_size
    return total


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
    open: int | None = None
    overdue: int | None = None
    changelog: int = 0
    lag: float | None = None
    broker_rss: float | None = None

    def __str__(self) -> str:
        lag = "?" if self.lag is None else f"{self.lag:.0f}"
        broker = "?" if self.broker_rss is None else f"{self.broker_rss:.0f}"
        return (
            f"{self.at / 60:6.1f} min  pid {self.pid}  RSS {self.rss:6.1f} MiB  {self.threads} threads  "
            f"{self.files} files  open transactions {'?' if self.open is None else self.open} "
            f"(overdue {'?' if self.overdue is None else self.overdue})  "
            f"changelog {self.changelog / 1e6:.2f} MB  lag {lag}  broker {broker} MiB"
        )


@dataclass(frozen=True)
class Source:
    """Where figures come from: the watched worker (None: it is away), the broker, its data, the group."""

    worker: Callable[[], WorkerProcess | None]
    bootstrap: str
    group: str
    data: Path
    broker_pid: Callable[[], int]

    def take(self, at: float) -> Figure | None:
        """Take a figure now; None where there is no worker."""
        worker = self.worker()
        if worker is None:
            return None
        try:
            status, files = _status(worker.pid), len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
            rss, threads = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])
        except (OSError, KeyError):  # gone, or a zombie of the system
            return None
        lag = broker_rss = still_open = overdue = None
        with contextlib.suppress(OSError, http.client.HTTPException):
            lag = worker.metric("kp_consumer_lag")
        with contextlib.suppress(Exception):  # the broker is away: chaos does that
            broker_rss = memory_mib(self.broker_pid())
            still_open = len(asyncio.run(open_transactions(self.bootstrap, self.group)))
            overdue = len(asyncio.run(open_transactions(self.bootstrap, self.group, OVERDUE_MS)))
        size = changelog_bytes(self.data, f"{self.group}-novelty-changelog")
        return Figure(at, worker.pid, rss, threads, files, still_open, overdue, size, lag, broker_rss)


class Watch(threading.Thread):
    """Takes figures at intervals, and passes each to `keep`."""

    def __init__(self, source: Source, interval: float, keep: Callable[[Figure], None]) -> None:
        super().__init__(name="watch", daemon=True)
        self._source = source
        self._interval = interval
        self._keep = keep
        self._began = time.monotonic()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(self._interval):
            self.take()

    def take(self) -> Figure | None:
        figure = self._source.take(time.monotonic() - self._began)
        if figure is not None:
            self._keep(figure)
        return figure

    def finish(self) -> None:
        self._stop_asked.set()
        if self.is_alive():
            self.join()


def at_marks(figures: Sequence[Figure], marks: Sequence[float]) -> list[Figure]:
    """Return the first complete figure at or after each mark (minutes), and the last one."""
    complete = [figure for figure in figures if figure.open is not None] or list(figures)
    found = [next((figure for figure in complete if figure.at >= mark * 60), None) for mark in marks]
    return list(dict.fromkeys([figure for figure in found if figure is not None] + complete[-1:]))


def growth(figures: Sequence[Figure], *, mib: float, threads: int, files: int) -> tuple[list[str], list[str]]:
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
        first = [figure for figure in mine if figure.at < middle]
        second = [figure for figure in mine if figure.at >= middle]
        limits = {"rss": mib, "threads": float(threads), "files": float(files)}
        most = {name: [max(getattr(figure, name) for figure in half) for half in (first, second)] for name in limits}
        slope = statistics.linear_regression([f.at / 3600 for f in second], [f.rss for f in second]).slope
        text = ", ".join(f"{name} {before:.1f} -> {after:.1f}" for name, (before, after) in most.items())
        lines.append(
            f"pid {pid}, minutes {mine[0].at / 60:.0f} to {mine[-1].at / 60:.0f}, greatest values of both halves: "
            f"{text}; second half {slope:+.1f} MiB an hour"
        )
        wrong += [
            f"{name} of pid {pid} grew from {before:.1f} to {after:.1f}"
            for name, (before, after) in most.items()
            if after - before > limits[name]
        ]
    return lines, wrong
