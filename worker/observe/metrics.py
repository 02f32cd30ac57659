"""Every metric of the worker, `contribute` and `assemble`: name, unit, buckets, meaning.

The registry is an argument, so each test has its own. Labels are closed sets or partition numbers of this process's
assignment; never a trace, an agent or a raw domain.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from worker.core.records import ACCEPTED, REJECTED, SCREEN_RULES, STRICT_TYPES
from worker.core.scorer import Decision
from worker.core.scoring import DEFAULT_PROFILE, PROFILES, ScoredTrace
from worker.core.trace import InvalidTrace, Reason
from worker.core.verdicts import Ruling

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter, for the time of its creation

STAGES = ("parse", "embed", "novelty", "score", "publish")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Buckets of an evaluation. The latency budget, 0.1, must be a bucket's bound so that the SLO is exact."""

STAGE_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *SECONDS)
"""The stages parse and novelty take microseconds."""

WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SCORES = tuple(round(0.05 * i, 2) for i in range(1, 21))


class Series:
    """Bucket counts and sum of one series. `exemplars`: a bucket's last value with a trace id, for OpenMetrics."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # not cumulated; the last is beyond all bounds
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0.0

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Count a value. `trace_id`: OpenTelemetry's (hex), as its bucket's exemplar."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_all(self, values: Iterable[float]) -> None:
        """Count values, in their order: the sum has the same bits as after `observe` for each."""
        bounds, counts, total = self.bounds, self.counts, self.total
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total = total


class Histogram(Collector):
    """A histogram for the event loop's thread: 0.14 us an observation where prometheus_client's takes 0.78 us.

    A record takes eight, and without a model all of its processing about 60 us. Exposition is prometheus_client's own.
    `series` has one for each value of the label; a histogram without labels is its only series.
    """

    def __init__(
        self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry,
        label: str | None = None, values: Sequence[str] = ("",),
    ) -> None:  # fmt: skip
        self._name, self._documentation, self._label = name, documentation, label
        self.series = {value: Series(tuple(buckets)) for value in values}
        if label is None:
            (only,) = self.series.values()
            self.observe, self.observe_all, self.counts = only.observe, only.observe_all, only.counts
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Give prometheus_client the current state."""
        labels = [] if self._label is None else [self._label]
        family = HistogramMetricFamily(self._name, self._documentation, labels=labels)
        for value, series in self.series.items():
            bounds = [floatToGoString(bound) for bound in (*series.bounds, math.inf)]  # type: ignore[no-untyped-call]
            cumulated, exemplars = accumulate(series.counts), map(series.exemplars.get, range(len(bounds)))
            buckets = list(zip(bounds, cumulated, exemplars, strict=True))
            family.add_metric([value][: len(labels)], buckets, series.total)  # type: ignore[arg-type]
        yield family


def counter_at_zero(registry: CollectorRegistry, name: str, documentation: str, **labels: Iterable[str]) -> Counter:
    """Return a counter with all its series at 0; `labels`: the closed set of values of each.

    `rate` and `increase` do not see the first value of a series, so a series that appeared with its first event would
    hide that event.
    """
    made = Counter(name, documentation, [*labels], registry=registry)
    if labels:
        for values in product(*labels.values()):
            made.labels(*values)
    return made


def drop(gauges: Iterable[Gauge], *labels: str) -> None:
    """Drop the series with these labels, as of a partition that is no longer assigned."""
    for gauge in gauges:
        with contextlib.suppress(KeyError):  # never set
            gauge.remove(*labels)


def set_or_drop(gauge: Gauge, value: float | None, *labels: str) -> None:
    """Set a series, or drop it where its value is not known: a former value would look like a present one."""
    if value is None:
        drop([gauge], *labels)
    else:
        gauge.labels(*labels).set(value)


class Metrics:
    """The worker's metrics, registered in `registry`. `profiles`: those of the settings."""

    def __init__(self, registry: CollectorRegistry, profiles: Iterable[str] = PROFILES) -> None:
        self.registry = registry
        self._profiles = profiles = frozenset(profiles)
        counter, gauge = partial(counter_at_zero, registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.evaluation = histogram(
            "kp_evaluation_duration_seconds",
            "Time to score a trace, with the wait for the embedder, without queueing.",
            buckets=SECONDS,
        )
        self.stage = histogram(
            "kp_stage_duration_seconds",
            "Time of a stage; embed includes the wait for the embedder, publish is one transaction.",
            buckets=STAGE_SECONDS,
            label="stage",
            values=STAGES,
        )
        self.stages = self.stage.series
        self.end_to_end = histogram(
            "kp_end_to_end_latency_seconds",
            "From the source record's timestamp to the commit of its output.",
            buckets=(*WAIT_SECONDS, 300.0, 1800.0, 3600.0),  # up to an hour, because this one shows a backlog
        )
        self.over_budget = counter("kp_evaluations_over_budget_total", "Evaluations over KP_LATENCY_BUDGET_SECONDS.")
        self.consumed = counter("kp_records_consumed_total", "Committed records: traces, dead letters and verdicts.")
        self.traces = counter("kp_traces_total", "Committed traces.", decision=(ACCEPTED, REJECTED), profile=profiles)
        self.dead_letters = counter("kp_dead_letters_total", "Committed dead letters.", reason=map(str, Reason))
        self.redactions = counter("kp_redactions_total", "Markers in committed traces.", type=STRICT_TYPES)
        self.screened = counter("kp_screened_total", "Committed traces that the screen marked.", rule=SCREEN_RULES)
        self.score = histogram("kp_score", "Scores of committed traces.", buckets=SCORES)
        self.commit_traces = histogram(
            "kp_commit_traces", "Records in one commit.", buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
        )
        self.turn_wait = histogram(
            "kp_turn_wait_seconds",
            "Wait of a partition with records for its turn.",
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
        )
        self.truncated = counter("kp_truncated_texts_total", "Texts beyond KP_MAX_TOKENS, whose end was not embedded.")
        self.truncated_objectives = counter(
            "kp_truncated_objectives_total", "Objectives whose end was not embedded (KP_EMBED_TEXT=objective)."
        )
        self.remembered = counter("kp_embedding_hits_total", "Texts that got the embedding of a recent one.")
        self.service_requests = counter(
            "kp_embedder_requests_total", "Requests to the embedding service.", result=("answered", "failed")
        )
        self.service_texts = counter("kp_embedder_texts_total", "Texts that the embedding service embedded.")
        self.service_seconds = counter("kp_embedder_request_seconds_total", "Time of all embedding service requests.")
        self.service_down = gauge("kp_embedder_down", "1 while texts wait: the embedding service does not answer.")
        self.cache_entries = gauge("kp_cache_entries", "Unexpired entries of the novelty cache.", ["partition"])
        self.cache_evictions = counter(
            "kp_cache_evictions_total", "Entries evicted from the novelty cache.", cause=("capacity", "expired")
        )
        self.embed_in_flight = gauge("kp_embed_in_flight", "KP_EMBED_IN_FLIGHT, or the number that auto has chosen.")
        self.cache_reach = gauge(
            "kp_cache_reach_seconds", "Age in stream time of the oldest entry of a full cache.", ["partition"]
        )
        self.cache_ttl = gauge("kp_cache_ttl_seconds", "KP_CACHE_TTL_SECONDS; 0: no expiry.")
        self.verdicts = counter(
            "kp_verdicts_total",
            "Committed verdicts that count; decision unknown: made without the document.",
            profile=profiles,
            decision=(ACCEPTED, REJECTED, "unknown"),
        )
        self.verdict_successes = counter(
            "kp_verdict_successes_total",
            "Sum of the successes of verdicts that count, 0 to 1 each.",
            profile=profiles,
            decision=(ACCEPTED, REJECTED, "unknown"),
        )
        self.verdict_errors = counter(
            "kp_verdict_squared_error_total",
            "Sum of (confidence used - success)^2; divided by kp_verdicts_compared_total: the Brier score.",
            profile=profiles,
        )
        self.verdicts_compared = counter(
            "kp_verdicts_compared_total", "Committed verdicts that name the confidence used.", profile=profiles
        )
        self.verdicts_late = counter(
            "kp_verdicts_superseded_total", "Committed verdicts that change nothing: copies and older ones."
        )
        self.track_records = gauge("kp_track_records", "Track records: agents with verdicts, by domain.", ["partition"])
        self.stream_time = gauge("kp_stream_time_seconds", "Stream time, in seconds since 1970.", ["partition"])
        self.lag = gauge("kp_consumer_lag", "Uncommitted source records; absent if no broker answers.", ["partition"])
        self.lag_seconds = gauge(
            "kp_consumer_lag_seconds",
            "Age of the oldest uncommitted source record, by its timestamp; 0: none.",
            ["partition"],
        )
        self.open_transaction_offsets = gauge(
            "kp_open_transaction_offsets", "Source offsets behind a producer's open transaction.", ["partition"]
        )
        self.open_transaction_seconds = gauge(
            "kp_open_transaction_seconds",
            "Time for which this worker has seen a producer's transaction open; 0: none.",
            ["partition"],
        )
        self.committed_offset = gauge("kp_committed_offset", "Committed source offset.", ["partition"])
        self.restore = histogram(
            "kp_restore_duration_seconds",
            "Time to restore an assignment's partitions.",
            buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
        )
        self.restored_entries = counter("kp_restored_entries_total", "Changelog entries restored into a cache.")
        self.skipped_entries = counter(
            "kp_changelog_entries_skipped_total",
            "Changelog entries that a restore skipped.",
            cause=("corrupt", "other_model"),
        )
        self.lost = counter("kp_source_records_lost_total", "Records deleted by retention before they were scored.")
        self.rebalances = counter("kp_rebalances_total", "Partition assignments.")
        self.partitions = gauge("kp_assigned_partitions", "Source partitions assigned to this worker.")
        self.ready = gauge("kp_ready", "1 while /readyz answers 200.")
        self.build = Info("kp_build", "Version, consumer group and embedder.", registry=registry)

    def committed(self, decisions: Sequence[Decision], seconds: float, now: float) -> None:
        """Count what one commit published. `seconds`: its duration; `now`: its end, s since 1970."""
        self.stages["publish"].observe(seconds)
        self.commit_traces.observe(len(decisions))
        self.consumed.inc(len(decisions))
        traces: Tally[tuple[str, str]] = Tally()  # finding a labelled counter costs more than counting
        letters: Tally[str] = Tally()
        redactions: Tally[str] = Tally()
        screened: Tally[str] = Tally()
        ages: list[float] = []
        scores: list[float] = []
        rulings: list[Ruling] = []
        for record, result, output, _, _, _ in decisions:
            if record.timestamp_ms is not None and record.timestamp_ms >= 0:
                ages.append(max(0.0, now - record.timestamp_ms / 1000))
            if isinstance(result, ScoredTrace):
                traces[output.kind, result.profile] += 1
                scores.append(result.score)
                if output.redactions:
                    redactions.update(output.redactions)
                if output.screened:
                    screened.update(output.screened)
            elif isinstance(result, InvalidTrace):
                letters[str(result.reason)] += 1
            else:
                rulings.append(result)
        self.end_to_end.observe_all(ages)
        self.score.observe_all(scores)
        if rulings:
            self._judge(rulings)
        for labels, count in traces.items():
            self.traces.labels(*labels).inc(count)
        for counter, counts in (
            (self.dead_letters, letters), (self.redactions, redactions), (self.screened, screened)
        ):  # fmt: skip
            for label, count in counts.items():
                counter.labels(label).inc(count)

    def _judge(self, rulings: Iterable[Ruling]) -> None:
        sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])
        late = 0
        for verdict, counts, _ in rulings:
            if not counts:
                late += 1
                continue
            profile = verdict.task_domain if verdict.task_domain in self._profiles else DEFAULT_PROFILE
            of = sums[profile, verdict.decision or "unknown"]
            of[0] += 1
            of[1] += verdict.success
            if verdict.used is not None:
                of[2] += 1
                of[3] += (verdict.used - verdict.success) ** 2
        if late:
            self.verdicts_late.inc(late)
        for labels, (count, successes, compared, errors) in sums.items():
            self.verdicts.labels(*labels).inc(count)
            self.verdict_successes.labels(*labels).inc(successes)
            self.verdicts_compared.labels(labels[0]).inc(compared)
            self.verdict_errors.labels(labels[0]).inc(errors)

    def forget_partition(self, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        gauges = (
            self.cache_entries, self.cache_reach, self.track_records, self.stream_time, self.lag, self.lag_seconds,
            self.committed_offset, self.open_transaction_offsets, self.open_transaction_seconds,
        )  # fmt: skip
        drop(gauges, str(partition))


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
    """Return a partition's lag in seconds, 0 with nothing to commit; None where it is not known.

    `timestamp_ms`: of the oldest uncommitted record, None where it is not fetched yet or has none; `now`: s since 1970.
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


# -- of `kp-worker contribute`

REFUSAL_REASONS = (
    "conflict", "invalid_unit", "too_large", "invalid_trace", "secret_in_id", "id_too_long", "unreadable",
    "unanswerable", "screened", "evaluation_failed",
)  # fmt: skip
RETRY_CAUSES = (
    "server_error", "timeout", "connection", "redirect", "unexpected_answer", "rate_limit", "stored_answer", "key_file",
)  # fmt: skip


class ContributeMetrics:
    """The metrics of one `contribute` process, registered in `registry`. Counters start with all their series at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        counter, gauge = partial(counter_at_zero, registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.posted = counter("kp_contribute_posted_total", "Traces that the registry stored (201).")
        self.found = counter("kp_contribute_found_total", "Traces that the registry already had with the same content.")
        self.refused = counter("kp_contribute_refused_total", "Traces refused for good.", reason=REFUSAL_REASONS)
        self.skipped = counter(
            "kp_contribute_skipped_total",
            "Traces kept back by their visibility or privacy, or deleted by retention (lost).",
            reason=("visibility", "privacy", "lost"),
        )
        self.redactions = counter("kp_contribute_redactions_total", "Markers in posted traces.", type=STRICT_TYPES)
        self.lag = gauge("kp_contribute_lag", "Accepted records not yet processed.", ["partition"])
        self.held = gauge(
            "kp_contribute_held", "Traces that wait because something other than the registry answers.", ["partition"]
        )
        self.rate_left = gauge("kp_contribute_rate_left", "POSTs that the registry still allows.")
        self.duration = histogram(
            "kp_contribute_request_duration_seconds",
            "Time of a request to the registry, answered or not.",
            buckets=WAIT_SECONDS,
        )
        self.late = counter("kp_contribute_late_total", "Requests that took effect after a look-up had found nothing.")
        self.retries = counter("kp_contribute_retries_total", "Failed requests that are retried.", cause=RETRY_CAUSES)
        self.ready = gauge("kp_contribute_ready", "1 while /readyz answers 200.")
        self.build = Info("kp_contribute_build", "Version and consumer group.", registry=registry)

    def forget_partition(self, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        drop((self.lag, self.held), str(partition))


# -- of `kp-worker assemble`


class AssembleMetrics:
    """The metrics of one `assemble` process, registered in `registry`. Counters start with all their series at 0."""

    def __init__(
        self, registry: CollectorRegistry, missing: Iterable[str] = (), conventions: Iterable[str] = ()
    ) -> None:
        self.registry = registry
        counter, gauge = partial(counter_at_zero, registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.records = counter("kp_assemble_records_total", "Records read from KP_SPANS_TOPIC.")
        self.parts = counter("kp_assemble_parts_total", "Parts of records: one for each trace in a record.")
        self.repeated = counter("kp_assemble_repeated_parts_total", "Parts that came again while their run was open.")
        self.spans = counter("kp_assemble_spans_total", "Spans of closed runs.")
        self.closed = counter(
            "kp_assemble_closed_runs_total", "Closed runs.", cause=("root_ended", "gap", "too_large", "memory")
        )
        self.traces = counter("kp_assemble_traces_total", "Traces written to the worker's source topic.")
        self.shortened = counter("kp_assemble_shortened_traces_total", "Traces whose longest texts were cut to fit.")
        self.without_trace = counter("kp_assemble_without_trace_total", "Runs that became no trace.", reason=missing)
        self.unread_runs = counter("kp_assemble_unread_runs_total", "Runs with likely content in unread attributes.")
        self.conventions = counter(
            "kp_assemble_conventions_total", "Runs by their attributes' naming convention.", convention=conventions
        )
        self.late = counter("kp_assemble_late_parts_total", "Parts that came after their run had closed.")
        self.dead_letters = counter(
            "kp_assemble_dead_letters_total", "Committed dead letters.", reason=map(str, Reason)
        )
        self.lost = counter("kp_assemble_lost_records_total", "Records deleted by retention before they were read.")
        self.delay = histogram(
            "kp_assemble_delay_seconds",
            "From the end of a run's last span to the commit of its trace.",
            buckets=(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 90.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 21_600.0, 86_400.0),
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
