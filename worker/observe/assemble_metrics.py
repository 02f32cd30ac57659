"""Every metric of `kp-worker assemble`: name, unit, buckets, meaning. As in metrics.py, labels are closed sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from worker.core.trace import Reason
from worker.observe.metrics import Histogram

CAUSES: Final = ("root_ended", "gap", "too_large", "memory")
DELAY_SECONDS: Final = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 90.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 21_600.0, 86_400.0)


class AssembleMetrics:
    """The metrics of one `assemble` process, registered in `registry`. Counters start with all their series at 0.

    `missing` and `conventions`: the closed sets of what runs lack, and of conventions.
    """

    def __init__(
        self, registry: CollectorRegistry, missing: Iterable[str] = (), conventions: Iterable[str] = ()
    ) -> None:
        self.registry = registry
        self.records = Counter(
            "kp_assemble_records_total", "Records read from the topics with spans or logs.", registry=registry
        )
        self.parts = Counter(
            "kp_assemble_parts_total",
            "Parts of records, one for each trace in a record, given to runs.",
            registry=registry,
        )
        self.repeated = Counter(
            "kp_assemble_repeated_parts_total", "Parts that came again while their run was open.", registry=registry
        )
        self.spans = Counter("kp_assemble_spans_total", "Spans of closed runs.", registry=registry)
        self.closed = Counter(
            "kp_assemble_closed_runs_total",
            "Closed runs by cause: the root had ended, no span came for KP_ASSEMBLE_GAP_SECONDS, the run was too "
            "large, or memory was short.",
            ["cause"],
            registry=registry,
        )
        self.traces = Counter(
            "kp_assemble_traces_total", "Traces written to the worker's source topic.", registry=registry
        )
        self.without_trace = Counter(
            "kp_assemble_without_trace_total", "Runs that did not become a trace, by reason.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.conventions = Counter(
            "kp_assemble_conventions_total",
            "Runs by the naming convention of their attributes.",
            ["convention"],
            registry=registry,
        )
        self.late = Counter(
            "kp_assemble_late_parts_total",
            "Parts that came after their run was closed; they become dead letters.",
            registry=registry,
        )
        self.dead_letters = Counter(
            "kp_assemble_dead_letters_total", "Dead letters, by reason.", ["reason"], registry=registry
        )
        self.lost = Counter(
            "kp_assemble_lost_records_total", "Records that retention deleted before they were read.", registry=registry
        )
        self.delay = Histogram(
            "kp_assemble_delay_seconds",
            "Time from the end of a run's last span until its trace was committed.",
            buckets=DELAY_SECONDS,
            registry=registry,
        )
        self.open_runs = Gauge("kp_assemble_open_runs", "Open runs.", ["partition"], registry=registry)
        self.open_bytes = Gauge(
            "kp_assemble_open_bytes", "Approximate memory of the open runs.", ["partition"], registry=registry
        )
        self.oldest = Gauge(
            "kp_assemble_oldest_run_seconds", "Age of the oldest open run.", ["partition"], registry=registry
        )
        self.remembered = Gauge(
            "kp_assemble_remembered_runs", "Closed runs that are remembered.", ["partition"], registry=registry
        )
        self.stream_time = Gauge(
            "kp_assemble_stream_time_seconds",
            "Time up to which all spans have been read, in seconds since 1970.",
            ["partition"],
            registry=registry,
        )
        self.lag = Gauge("kp_assemble_lag", "Records not yet processed.", ["topic", "partition"], registry=registry)
        self.ready = Gauge("kp_assemble_ready", "1 while /readyz answers 200.", registry=registry)
        self.build = Info("kp_assemble_build", "Version and consumer group.", registry=registry)
        for counter, values in (
            (self.closed, CAUSES),
            (self.without_trace, missing),
            (self.conventions, conventions),
            (self.dead_letters, map(str, Reason)),
        ):
            for value in values:
                counter.labels(value)

    def count(self, counts: Mapping[tuple[str, str], int], ends: Iterable[float], now: float) -> None:
        """Add what a committed batch did: numbers by counter and label. `ends`: of published runs, s since 1970."""
        for (name, label), number in counts.items():
            counter = getattr(self, name)
            (counter.labels(label) if label else counter).inc(number)
        for end in ends:
            self.delay.observe(max(0.0, now - end))

    def forget_partition(self, topic: str, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        for gauge in (self.open_runs, self.open_bytes, self.oldest, self.remembered, self.stream_time):
            with contextlib.suppress(KeyError):
                gauge.remove(str(partition))
        with contextlib.suppress(KeyError):
            self.lag.remove(topic, str(partition))
