"""Every metric of `kp-worker contribute`: name, unit, buckets, meaning. As in metrics.py, labels are closed sets."""

from __future__ import annotations

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Info

from worker.core.records import STRICT_TYPES
from worker.observe.metrics import Histogram, counter_at_zero, drop

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
        counter, gauge = partial(counter_at_zero, registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.posted = counter("kp_contribute_posted_total", "Traces that the registry stored (201).")
        self.found = counter(
            "kp_contribute_found_total",
            "Traces that the registry already had with the same content.",
        )
        self.refused = counter("kp_contribute_refused_total", "Traces refused for good.", reason=REFUSAL_REASONS)
        self.skipped = counter(
            "kp_contribute_skipped_total",
            "Traces kept back by KP_CONTRIBUTE_VISIBILITY or KP_CONTRIBUTE_PRIVACY, or deleted by retention (lost).",
            reason=SKIP_REASONS,
        )
        self.redactions = counter("kp_contribute_redactions_total", "Markers in posted traces.", type=STRICT_TYPES)
        self.lag = gauge("kp_contribute_lag", "Accepted records not yet processed.", ["partition"])
        self.held = gauge(
            "kp_contribute_held", "Traces that wait because something other than the registry answers.", ["partition"]
        )
        self.rate_left = gauge("kp_contribute_rate_left", "POSTs that the registry still allows, by its answers.")
        self.duration = histogram(
            "kp_contribute_request_duration_seconds",
            "Time of one request to the registry, answered or not.",
            buckets=REQUEST_SECONDS,
        )
        self.late = counter(
            "kp_contribute_late_total",
            "Requests known to have taken effect after a look-up had found nothing.",
        )
        self.retries = counter(
            "kp_contribute_retries_total", "Requests that failed and are tried again.", cause=RETRY_CAUSES
        )
        self.ready = gauge("kp_contribute_ready", "1 while /readyz answers 200.")
        self.build = Info("kp_contribute_build", "Version and consumer group.", registry=registry)

    def forget_partition(self, partition: int) -> None:
        """Drop the gauges of a partition that is no longer assigned."""
        drop((self.lag, self.held), str(partition))
