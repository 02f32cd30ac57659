"""The status page: what the HTTP port shows a person at `/`, and the numbers behind it at `/status.json`.

Lives here: the history for "in the last minutes", the snapshot as JSON, and the page with its security headers. Must
not live here: HTTP itself (http_server.py), the last traces (status_rows.py). Numbers that /metrics also has come from
Metrics, so that both say the same. Without KP_STATUS_PAGE none of this is created.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from worker.config import Settings
from worker.core.explanation import FORMULAS
from worker.core.records import ACCEPTED, DEAD_LETTER, REJECTED, OutputRecord, SourceRecord
from worker.core.scorer import ScoredTrace
from worker.core.terminal import clean_json_bytes
from worker.observe.http_server import Page
from worker.observe.metrics import SCORES, SECONDS, Metrics, quantile
from worker.observe.status_rows import LastRows, now_ms
from worker.version import __version__

PAGE: Final = Path(__file__).parents[1] / "data" / "status.html"

WINDOW_SECONDS: Final = 300
"""The "last minutes" of the latency percentiles, long enough for a p99 at a few traces a second."""

RATE_SECONDS: Final = 10
"""The rate is the mean of this many seconds, because behind a backlog there is one commit a second."""

CHART_SECONDS: Final = 120


class _Moment(NamedTuple):
    """Counters at one time (monotonic seconds); `evaluations` are the counts of the histogram's buckets."""

    at: float
    consumed: float
    over_budget: float
    evaluations: tuple[int, ...]


class Status:
    """The page's data. `problem` says why the worker is not ready, None when it is.

    All methods are called from the event loop's thread.
    """

    def __init__(self, settings: Settings, metrics: Metrics, problem: Callable[[], str | None]) -> None:
        self._settings = settings
        self._metrics = metrics
        self._problem = problem
        self._rows = LastRows(settings)
        self._moments: deque[_Moment] = deque(maxlen=WINDOW_SECONDS + 1)
        self._started_ms = now_ms()
        self._profiles = settings.scoring_profiles()
        self.tick(time.monotonic())

    def committed(self, record: SourceRecord, output: OutputRecord, scored: ScoredTrace | None) -> None:
        """Note one record whose output is committed; `scored` is None for a dead letter."""
        self._rows.committed(record, output, scored)

    def forgotten(self) -> None:
        """Show no record that was committed before: a control record is committed, and some may be its traces."""
        self._rows.clear()

    def tick(self, now: float) -> None:
        """Note the counters of this second (monotonic); call it once a second."""
        metrics = self._metrics
        self._moments.append(
            _Moment(now, _value(metrics.consumed), _value(metrics.over_budget), metrics.evaluation.counts())
        )

    def snapshot(self, domain: str | None = None) -> dict[str, Any]:
        """Return everything that the page shows; times in ms since 1970 where the name ends in _ms.

        `domain`: of the traces only those of this one; None: of all.
        """
        settings, metrics = self._settings, self._metrics
        build = _samples(metrics.build)
        return {
            "version": __version__,
            "group": settings.group_id,
            "embedder": build[0][0].get("embedder", "") if build else "",
            "problem": self._problem(),
            "now_ms": now_ms(),
            "started_ms": self._started_ms,
            "texts": settings.status_texts,
            "rate": self._rate(),
            "evaluation": self._evaluation(),
            "verdicts": self._verdicts(),
            "scores": {
                "bounds": SCORES,
                "counts": metrics.score.counts(),
                "threshold": settings.threshold,
                "thresholds": {n: p.threshold for n, p in self._profiles.items() if p.threshold is not None},
            },
            "cache_max": settings.cache_max_elements,
            "partitions": self._partitions(),
            "formulas": FORMULAS,
            "domains": self._rows.domains(),
            "traces": self._rows.traces(domain),
            "dead_letters": self._rows.dead_letters(),
        }

    def pages(self) -> Mapping[str, Page]:
        """Return the pages by path."""
        html = PAGE.read_bytes()
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": content_security_policy(html)}
        encode = msgspec.json.Encoder().encode
        return {
            "/": lambda _: (html, headers),
            "/status.json": lambda query: (
                clean_json_bytes(encode(self.snapshot(query.get("domain")))),
                {"Content-Type": "application/json"},
            ),
        }

    def _verdicts(self) -> dict[str, Any]:
        """Return accepted and rejected traces, dead letters, and the reasons of these."""
        verdicts = _samples(self._metrics.traces, "kp_traces_total")
        letters = _samples(self._metrics.dead_letters, "kp_dead_letters_total")
        counts = {
            decision: sum(value for labels, value in verdicts if labels["decision"] == decision)
            for decision in (ACCEPTED, REJECTED)
        }
        reasons = {labels["reason"]: value for labels, value in letters if value}
        return counts | {DEAD_LETTER: sum(reasons.values()), "reasons": reasons}

    def _rate(self) -> dict[str, Any]:
        """Return traces/s over the last seconds, and of each second for the chart (oldest first)."""
        recent = list(self._moments)[-CHART_SECONDS - 1 :]
        first, last = recent[max(0, len(recent) - 1 - RATE_SECONDS)], recent[-1]
        seconds = last.at - first.at
        return {
            "now": (last.consumed - first.consumed) / seconds if seconds else 0.0,
            "over_seconds": RATE_SECONDS,
            "chart": [round((b.consumed - a.consumed) / (b.at - a.at), 2) for a, b in pairwise(recent)],
            "chart_seconds": CHART_SECONDS,
        }

    def _evaluation(self) -> dict[str, Any]:
        """Return percentiles (ms; None without data) of the evaluations in the window, as Prometheus estimates them."""
        first, last = self._moments[0], self._moments[-1]
        counts = [b - a for a, b in zip(first.evaluations, last.evaluations, strict=True)]
        buckets = dict(zip((*SECONDS, inf), map(float, accumulate(counts)), strict=True))
        percentiles = {name: quantile(buckets, q) * 1000 for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
        return {
            **{name: value if isfinite(value) else None for name, value in percentiles.items()},
            "count": sum(counts),
            "over_budget": last.over_budget - first.over_budget,
            "budget": self._settings.latency_budget_seconds * 1000,
            "longest": SECONDS[-1] * 1000,  # slower ones are only known to be slower
            "over_seconds": round(last.at - first.at),
        }

    def _partitions(self) -> list[dict[str, Any]]:
        """Return the assigned partitions with their gauges; None where a gauge was never set."""
        metrics = self._metrics
        rows: dict[str, dict[str, Any]] = {}
        for name, gauge in (
            ("committed", metrics.committed_offset),
            ("lag", metrics.lag),
            ("lag_seconds", metrics.lag_seconds),
            ("stream_time", metrics.stream_time),
            ("cache", metrics.cache_entries),
        ):
            for labels, value in _samples(gauge):
                rows.setdefault(labels["partition"], {"partition": int(labels["partition"])})[name] = value
        return sorted(rows.values(), key=lambda row: int(row["partition"]))


def content_security_policy(html: bytes) -> str:
    """Return the header that lets the page run its own script and style, talk to its own port, and nothing else.

    Trusted Types take `innerHTML` and its like away from the script itself: all data can only be inserted as text.
    """
    allowed = {}
    for element in (b"script", b"style"):
        content = re.findall(rb"<%s>(.*?)</%s>" % (element, element), html, re.DOTALL)
        allowed[element] = " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(c).digest()).decode()}'" for c in content
        )
    return (
        f"default-src 'none'; script-src {allowed[b'script']}; style-src {allowed[b'style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _samples(metric: Any, name: str | None = None) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of a metric's samples, of those called `name` where it is given."""
    found = (sample for family in metric.collect() for sample in family.samples)
    return [(sample.labels, sample.value) for sample in found if name in (None, sample.name)]


def _value(counter: Any) -> float:
    """Return the value of a counter without labels."""
    return _samples(counter)[0][1]
