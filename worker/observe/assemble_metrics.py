"""Every metric of `kp-worker assemble`: name, unit, buckets, meaning. As in metrics.py, labels are closed sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Info

from worker.core.trace import Reason
from worker.observe.metrics import Histogram, counter_at_zero, drop

CAUSES: Final = ("root_ended", "gap", "too_large", "memory")
DELAY_SECONDS: Final = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 90.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 21_600.0, 86_400.0)


class AssembleMetrics:
    """The metrics of one `assemble` process, registered in `registry`. Counters start with all their series at 0."""

    def __init__(
        self, registry: CollectorRegistry, missing: Iterable[str] = (), conventions: Iterable[str] = ()
    ) -> None:
        self.registry = registry
        counter, gauge = partial(counter_at_zero, registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.records = counter("kp_assemble_records_total", "Records read from KP_SPANS_TOPIC.")
        self.parts = counter("kp_assemble_parts_total", "Parts of records given to runs: one per trace in a record.")
        self.repeated = counter("kp_assemble_repeated_parts_total", "Parts that came again while their run was open.")
        self.spans = counter("kp_assemble_spans_total", "Spans of closed runs.")
        self.closed = counter(
            "kp_assemble_closed_runs_total",
            "Closed runs.",
            cause=CAUSES,
        )
        self.traces = counter("kp_assemble_traces_total", "Traces written to the worker's source topic.")
        self.shortened = counter(
            "kp_assemble_shortened_traces_total",
            "Traces whose longest texts were cut to fit KP_MAX_MESSAGE_BYTES and the topic.",
        )
        self.without_trace = counter(
            "kp_assemble_without_trace_total", "Runs that did not become a trace.", reason=missing
        )
        self.unread_runs = counter(
            "kp_assemble_unread_runs_total",
            "Runs with likely content in attributes that are not read.",
        )
        self.conventions = counter(
            "kp_assemble_conventions_total",
            "Runs by their attributes' naming convention.",
            convention=conventions,
        )
        self.late = counter("kp_assemble_late_parts_total", "Parts that came after their run was closed: dead letters.")
        self.dead_letters = counter(
            "kp_assemble_dead_letters_total", "Committed dead letters.", reason=map(str, Reason)
        )
        self.lost = counter("kp_assemble_lost_records_total", "Records that retention deleted before they were read.")
        self.delay = histogram(
            "kp_assemble_delay_seconds",
            "Time from the end of a run's last span to the commit of its trace.",
            buckets=DELAY_SECONDS,
        )
        self.open_runs = gauge("kp_assemble_open_runs", "Open runs.", ["partition"])
        self.open_bytes = gauge("kp_assemble_open_bytes", "Approximate memory of the open runs.", ["partition"])
        self.oldest = gauge("kp_assemble_oldest_run_seconds", "Age of the oldest open run.", ["partition"])
        self.remembered = gauge("kp_assemble_remembered_runs", "Closed runs that are remembered.", ["partition"])
        self.stream_time = gauge(
            "kp_assemble_stream_time_seconds",
            "Time up to which all spans have been read, in seconds since 1970.",
            ["partition"],
        )
        self.lag = gauge("kp_assemble_lag", "Records not yet processed.", ["topic", "partition"])
        self.ready = gauge("kp_assemble_ready", "1 while /readyz answers 200.")
        self.build = Info("kp_assemble_build", "Version and consumer group.", registry=registry)

    def count(self, counts: Mapping[tuple[str, str], int], ends: Iterable[float], now: float) -> None:
        """Add what a committed batch did: numbers by counter and label. `ends`: of published runs, s since 1970."""
        for (name, label), number in counts.items():
            counter = getattr(self, name)
            (counter.labels(label) if label else counter).inc(number)
        for end in ends:
            self.delay.observe(max(0.0, now - end))

    def forget_partition(self, topic: str, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        gauges = (self.open_runs, self.open_bytes, self.oldest, self.remembered, self.stream_time)
        drop(gauges, str(partition))
        drop((self.lag,), topic, str(partition))
