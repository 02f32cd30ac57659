"""Every metric of the worker: name, unit, buckets, meaning. The registry is an argument, so each test has its own.

Labels are closed sets or partition numbers of this worker's assignment; never a trace, an agent or a raw domain.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from worker.core.findings import SCREEN_RULES, STRICT_TYPES
from worker.core.records import ACCEPTED, REJECTED
from worker.core.scoring import DEFAULT_PROFILE, PROFILES
from worker.core.trace import Reason
from worker.core.verdicts import Ruling

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter, for the time of its creation

STAGES = ("parse", "embed", "novelty", "score", "publish")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Buckets of an evaluation. The latency budget, 0.1, must be a bucket's bound so that the SLO is exact."""

STAGE_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *SECONDS)
"""The stages parse and novelty take microseconds."""

END_TO_END_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""Up to an hour, because this one shows a backlog."""

SCORES = tuple(round(0.05 * i, 2) for i in range(1, 21))
COMMIT_TRACES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
TURN_WAITS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram(Collector):
    """A histogram for one thread: 0.14 us an observation where prometheus_client's takes 0.78 us (measured).

    A record takes eight observations, and without a model all of its processing takes about 60 us. Exposition is
    prometheus_client's own. Observe only from the event loop's thread.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        label: str | None = None,
        values: Sequence[str] = ("",),
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = tuple(buckets)
        self._series = {value: Series(self._bounds) for value in values}
        registry.register(self)

    def labels(self, value: str) -> Series:
        """Return the series of one label value, one of the closed set given at the start."""
        return self._series[value]

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Count a value of a histogram without labels. `trace_id`: OpenTelemetry's (hex), as its bucket's exemplar."""
        self._series[""].observe(value, trace_id)

    def observe_all(self, values: Iterable[float]) -> None:
        """Count values of a histogram without labels, in their order."""
        self._series[""].observe_all(values)

    def counts(self) -> tuple[int, ...]:
        """Return the counts of the buckets of a histogram without labels, not cumulated; the last is beyond all."""
        return tuple(self._series[""].counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Give prometheus_client the current state."""
        labels = [] if self._label is None else [self._label]
        family = HistogramMetricFamily(self._name, self._documentation, labels=labels)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        for value, series in self._series.items():
            cumulated, exemplars = accumulate(series.counts), map(series.exemplars.get, range(len(bounds)))
            buckets = list(zip(bounds, cumulated, exemplars, strict=True))
            family.add_metric([value][: len(labels)], buckets, series.total)  # type: ignore[arg-type]
        yield family


class Series:
    """Bucket counts and sum of one series. `exemplars`: a bucket's last value with a trace id, for OpenMetrics."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0.0

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Count a value."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_all(self, values: Iterable[float]) -> None:
        """Count values, in their order: the sum has the same bits as after `observe` for each."""
        bounds, counts, total = self._bounds, self.counts, self.total
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total = total


class Metrics:
    """The worker's metrics, registered in `registry`.

    Every counter with labels starts with all its series at 0. `rate` and `increase` do not see the first value of a
    series, so a series that appeared with its first event would hide that event. `profiles`: those of the settings.
    """

    def __init__(self, registry: CollectorRegistry, profiles: Iterable[str] = PROFILES) -> None:
        self.registry = registry
        self.evaluation = Histogram(
            "kp_evaluation_duration_seconds",
            "Time to score one trace, from leaving the queue; includes the wait for the embedder.",
            buckets=SECONDS,
            registry=registry,
        )
        self.stage = Histogram(
            "kp_stage_duration_seconds",
            "Time of one stage of a trace; embed includes the wait for the embedder, publish is one transaction.",
            buckets=STAGE_SECONDS,
            registry=registry,
            label="stage",
            values=STAGES,
        )
        self.stages = {stage: self.stage.labels(stage) for stage in STAGES}
        self.end_to_end = Histogram(
            "kp_end_to_end_latency_seconds",
            "Time from the source record's timestamp to the commit of its output.",
            buckets=END_TO_END_SECONDS,
            registry=registry,
        )
        self.over_budget = Counter(
            "kp_evaluations_over_budget_total",
            "Evaluations slower than KP_LATENCY_BUDGET_SECONDS.",
            registry=registry,
        )
        self.consumed = Counter(
            "kp_records_consumed_total",
            "Source records with a committed output: accepted, rejected, dead letter or receipt.",
            registry=registry,
        )
        self.traces = Counter(
            "kp_traces_total", "Committed traces by decision and profile.", ["decision", "profile"], registry=registry
        )
        self.dead_letters = Counter(
            "kp_dead_letters_total", "Committed dead letters by reason.", ["reason"], registry=registry
        )
        self.redactions = Counter(
            "kp_redactions_total",
            "Secrets and personal data replaced by markers in committed traces, by type.",
            ["type"],
            registry=registry,
        )
        self.screened = Counter(
            "kp_screened_total", "Committed traces in which a rule of the screen matched, by rule.", ["rule"],
            registry=registry,
        )  # fmt: skip
        self.score = Histogram("kp_score", "Scores of committed traces.", buckets=SCORES, registry=registry)
        self.commit_traces = Histogram(
            "kp_commit_traces", "Records in one commit.", buckets=COMMIT_TRACES, registry=registry
        )
        self.turn_wait = Histogram(
            "kp_turn_wait_seconds",
            "How long a partition with waiting records waited for its turn.",
            buckets=TURN_WAITS,
            registry=registry,
        )
        self.truncated = Counter(
            "kp_truncated_texts_total",
            "Texts longer than KP_MAX_TOKENS whose end was not embedded.",
            registry=registry,
        )
        self.truncated_objectives = Counter(
            "kp_truncated_objectives_total",
            "Objectives longer than the model reads whose end was not embedded (KP_EMBED_TEXT=objective).",
            registry=registry,
        )
        self.remembered = Counter(
            "kp_embedding_hits_total", "Texts whose embedding was reused instead of computed again.", registry=registry
        )
        self.service_requests = Counter(
            "kp_embedder_requests_total", "Requests to the embedding service, by result (KP_EMBEDDER=http).",
            ["result"], registry=registry,
        )  # fmt: skip
        self.service_texts = Counter(
            "kp_embedder_texts_total", "Texts in requests that the embedding service answered.", registry=registry
        )
        self.service_seconds = Counter(
            "kp_embedder_request_seconds_total", "Time of all requests to the embedding service.", registry=registry
        )
        self.service_down = Gauge(
            "kp_embedder_down", "1 while texts wait for an embedding service that does not answer.", registry=registry
        )
        self.cache_entries = Gauge(
            "kp_cache_entries", "Unexpired entries of the novelty cache.", ["partition"], registry=registry
        )
        self.cache_evictions = Counter(
            "kp_cache_evictions_total",
            "Entries evicted from the novelty cache, by cause.",
            ["cause"],
            registry=registry,
        )
        self.embed_in_flight = Gauge(
            "kp_embed_in_flight",
            "Texts that may run side by side under load: KP_EMBED_IN_FLIGHT, or a mean of what the budget permits.",
            registry=registry,
        )
        self.cache_reach = Gauge(
            "kp_cache_reach_seconds",
            "Age at which a full novelty cache evicts its oldest entry, in stream time; absent while it is not full.",
            ["partition"],
            registry=registry,
        )
        self.cache_ttl = Gauge(
            "kp_cache_ttl_seconds", "KP_CACHE_TTL_SECONDS; 0: entries do not expire.", registry=registry
        )
        self.forgotten_entries = Counter(
            "kp_forgotten_entries_total",
            "Cache entries and changelog records removed by control records (KP_FORGET).",
            registry=registry,
        )
        self.control_records = Counter(
            "kp_control_records_total",
            "Control records read with KP_FORGET=true, by result.",
            ["result"],
            registry=registry,
        )
        self.verdicts = Counter(
            "kp_verdicts_total",
            "Committed verdicts that count, by profile and decision of the trace; unknown: made without its document.",
            ["profile", "decision"],
            registry=registry,
        )
        self.verdict_successes = Counter(
            "kp_verdict_successes_total",
            "Sum of their successes, 0 to 1 each.",
            ["profile", "decision"],
            registry=registry,
        )
        self.verdict_errors = Counter(
            "kp_verdict_squared_error_total",
            "Sum of (confidence used - success) squared over compared verdicts; by their number: the Brier score.",
            ["profile"],
            registry=registry,
        )
        self.verdicts_compared = Counter(
            "kp_verdicts_compared_total",
            "Committed verdicts that name the confidence that was used.",
            ["profile"],
            registry=registry,
        )
        self.verdicts_late = Counter(
            "kp_verdicts_superseded_total",
            "Committed verdicts that change nothing: copies, or older than what stands.",
            registry=registry,
        )
        self.track_records = Gauge(
            "kp_track_records", "Track records: agents by domain with a verdict.", ["partition"], registry=registry
        )
        self.stream_time = Gauge(
            "kp_stream_time_seconds",
            "Stream time: the greatest event time seen, in seconds since 1970.",
            ["partition"],
            registry=registry,
        )
        self.lag = Gauge("kp_consumer_lag", "Source records not yet committed.", ["partition"], registry=registry)
        self.lag_seconds = Gauge(
            "kp_consumer_lag_seconds",
            "Age of the oldest uncommitted source record, by its timestamp; 0 if there is none.",
            ["partition"],
            registry=registry,
        )
        self.committed_offset = Gauge(
            "kp_committed_offset",
            "Committed offset: the offset of the next source record to commit.",
            ["partition"],
            registry=registry,
        )
        self.restore = Histogram(
            "kp_restore_duration_seconds",
            "Time to restore the partitions of one assignment from the changelog.",
            buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
            registry=registry,
        )
        self.restored_entries = Counter(
            "kp_restored_entries_total", "Changelog entries restored into a cache.", registry=registry
        )
        self.skipped_entries = Counter(
            "kp_changelog_entries_skipped_total",
            "Changelog entries skipped by a restore or by the group view: corrupt, or from another model.",
            ["cause"],
            registry=registry,
        )
        self.group_lag = Gauge(
            "kp_group_view_lag_seconds",
            "With KP_NOVELTY_SCOPE=group: time since the view of all partitions was last complete.",
            registry=registry,
        )
        self.group_entries = Gauge(
            "kp_group_view_entries", "Entries in the view of all partitions, expired ones included.", registry=registry
        )
        self.group_bytes = Gauge(
            "kp_group_view_bytes", "Memory of the vectors in the view of all partitions.", registry=registry
        )
        self.lost = Counter(
            "kp_source_records_lost_total",
            "Source records deleted by retention before they were scored.",
            registry=registry,
        )
        self.rebalances = Counter(
            "kp_rebalances_total", "Partition assignments received from the consumer group.", registry=registry
        )
        self.partitions = Gauge(
            "kp_assigned_partitions", "Source partitions assigned to this worker.", registry=registry
        )
        self.ready = Gauge("kp_ready", "1 while /readyz answers 200.", registry=registry)
        self.build = Info("kp_build", "Version, consumer group and embedder.", registry=registry)
        self._profiles = frozenset(profiles)
        for decision, profile in product((ACCEPTED, REJECTED), self._profiles):
            self.traces.labels(decision, profile)
        for decision, profile in product((ACCEPTED, REJECTED, "unknown"), self._profiles):
            self.verdicts.labels(profile, decision)
            self.verdict_successes.labels(profile, decision)
        for profile in self._profiles:
            self.verdict_errors.labels(profile)
            self.verdicts_compared.labels(profile)
        for reason in Reason:
            self.dead_letters.labels(str(reason))
        for kind in STRICT_TYPES:
            self.redactions.labels(kind)
        for rule in SCREEN_RULES:
            self.screened.labels(rule)
        for result in ("answered", "failed"):
            self.service_requests.labels(result)
        for cause in ("capacity", "expired"):
            self.cache_evictions.labels(cause)
        for result in ("honoured", "refused"):
            self.control_records.labels(result)
        for cause in ("corrupt", "other_model"):
            self.skipped_entries.labels(cause)

    def judge(self, ruling: Ruling) -> None:
        """Count a committed verdict."""
        verdict = ruling.verdict
        if not ruling.counts:
            self.verdicts_late.inc()
            return
        profile = verdict.task_domain if verdict.task_domain in self._profiles else DEFAULT_PROFILE
        labels = (profile, verdict.decision or "unknown")
        self.verdicts.labels(*labels).inc()
        self.verdict_successes.labels(*labels).inc(verdict.success)
        if verdict.used is not None:
            self.verdict_errors.labels(profile).inc((verdict.used - verdict.success) ** 2)
            self.verdicts_compared.labels(profile).inc()

    def forget_partition(self, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        for gauge in (
            self.cache_entries, self.cache_reach, self.track_records, self.stream_time, self.lag, self.lag_seconds,
            self.committed_offset,
        ):  # fmt: skip
            with contextlib.suppress(KeyError):  # never set
                gauge.remove(str(partition))


def quantile(buckets: Mapping[float, float], q: float) -> float:
    """Estimate a quantile from cumulative buckets (bound -> count), as Prometheus does; nan without data."""
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return float("nan")
    rank, lower, below = q * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            break
        lower, below = bound, buckets[bound]
    if bound == float("inf"):
        return lower
    return lower + (bound - lower) * (rank - below) / max(1.0, buckets[bound] - below)


def lag_seconds(lag: int, timestamp_ms: int | None, now: float) -> float | None:
    """Return the lag in seconds of a partition with `lag` uncommitted records; None where it is not known.

    `timestamp_ms` is that of the oldest one, None where it is not fetched yet or has none; `now` in seconds since 1970.
    A partition with nothing to commit has no lag, however old its last record is.
    """
    if lag == 0:
        return 0.0
    if timestamp_ms is None or timestamp_ms < 0:
        return None
    return max(0.0, now - timestamp_ms / 1000)


def process_registry() -> CollectorRegistry:
    """Return a registry with the process's own metrics (memory, CPU, file descriptors, Python's collector)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
