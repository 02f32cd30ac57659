"""Every metric of `kp-worker contribute`: name, unit, buckets, meaning. As in metrics.py, labels are closed sets."""

from __future__ import annotations

import contextlib
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from worker.core.findings import STRICT_TYPES
from worker.observe.metrics import Histogram

SKIP_REASONS: Final = ("visibility", "privacy", "lost")
REFUSAL_REASONS: Final = (
    "conflict", "invalid_unit", "too_large", "invalid_trace", "secret_in_id", "id_too_long", "unreadable",
    "unanswerable", "screened", "evaluation_failed",
)  # fmt: skip
RETRY_CAUSES: Final = (
    "server_error", "timeout", "connection", "redirect", "unexpected_answer", "rate_limit", "stored_answer", "key_file",
)  # fmt: skip

REQUEST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ContributeMetrics:
    """The metrics of one `contribute` process, registered in `registry`. Counters start with all their series at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.posted = Counter(
            "kp_contribute_posted_total", "Traces that the registry has stored (201).", registry=registry
        )
        self.found = Counter(
            "kp_contribute_found_total",
            "Traces that the registry already had with the same content; they were not posted again.",
            registry=registry,
        )
        self.refused = Counter(
            "kp_contribute_refused_total", "Traces refused for good, by reason.", ["reason"], registry=registry
        )
        self.skipped = Counter(
            "kp_contribute_skipped_total",
            "Traces kept back by KP_CONTRIBUTE_VISIBILITY or KP_CONTRIBUTE_PRIVACY, or deleted by retention (lost).",
            ["reason"],
            registry=registry,
        )
        self.redactions = Counter(
            "kp_contribute_redactions_total", "Markers set in posted traces, by type.", ["type"], registry=registry
        )
        self.lag = Gauge("kp_contribute_lag", "Accepted records not yet processed.", ["partition"], registry=registry)
        self.held = Gauge(
            "kp_contribute_held",
            "Traces that wait because something other than the registry answers.",
            ["partition"],
            registry=registry,
        )
        self.rate_left = Gauge(
            "kp_contribute_rate_left", "POSTs that the registry still allows now, by its answers.", registry=registry
        )
        self.duration = Histogram(
            "kp_contribute_request_duration_seconds",
            "Time of one request to the registry, with or without an answer.",
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.late = Counter(
            "kp_contribute_late_total",
            "Requests that took effect after the look-up had found nothing, as far as can be seen.",
            registry=registry,
        )
        self.retries = Counter(
            "kp_contribute_retries_total",
            "Requests that failed and are tried again, by cause.",
            ["cause"],
            registry=registry,
        )
        self.ready = Gauge("kp_contribute_ready", "1 while /readyz answers 200.", registry=registry)
        self.build = Info("kp_contribute_build", "Version and consumer group.", registry=registry)
        for counter, values in (
            (self.refused, REFUSAL_REASONS),
            (self.skipped, SKIP_REASONS),
            (self.redactions, STRICT_TYPES),
            (self.retries, RETRY_CAUSES),
        ):
            for value in values:
                counter.labels(value)

    def forget_partition(self, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        for gauge in (self.lag, self.held):
            with contextlib.suppress(KeyError):
                gauge.remove(str(partition))
