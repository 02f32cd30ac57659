"""The status page: the page for people at `/` of the HTTP port, and its numbers at `/status.json`.

Numbers that /metrics also has come from Metrics. Without KP_STATUS_PAGE none of this is created.
"""

import base64
import functools
import hashlib
import re
import shlex
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from worker.config import Settings
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, DEAD_LETTER, REJECTED, OutputRecord, SourceRecord
from worker.core.scorer import Decision
from worker.core.scoring import FORMULAS, ScoredTrace, accepts_too_few, arithmetic, near_miss
from worker.core.terminal import clean, clean_json_bytes
from worker.core.trace import InvalidTrace
from worker.observe.http_server import Page
from worker.observe.metrics import SCORES, SECONDS, Metrics, quantile
from worker.version import __version__

KEPT_TRACES: Final = 50
KEPT_DEAD_LETTERS: Final = 20

KEPT_DOMAINS: Final = 50  # domains that are known by name; the one that came longest ago goes first
KEPT_OF_DOMAIN: Final = 20  # traces of one domain that are kept, so that the filter finds those of a rare one, too

KEPT_OBJECTIVES: Final = 2000
"""Traces whose objective is known to a later one that has them as its nearest; only where texts may be shown."""

TEXT_LENGTH: Final = 200  # most characters of an objective that are kept
DOMAIN_LENGTH: Final = 100  # most characters of a domain that are kept: these distinguish domains


# Raw fields: of a key given twice the last value counts, as for the parser, and 1e400 elsewhere is not an error.
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text: Final = msgspec.json.Decoder(str)


Row = dict[str, Any]  # of the page's JSON; a trace's is completed by `_explained`, because most rows are never shown


def _explained(row: Row) -> Row:
    """Return a trace's row with the steps that lead to its score; components, weights and parts in their order."""
    components, weights = row["components"], row["weights"]
    steps = arithmetic(components, weights, row["overrides"])
    return row | {
        "id": _shown(row["id"], CACHED_ID_LENGTH),
        "nearest": None if row["nearest"] is None else _shown(row["nearest"], CACHED_ID_LENGTH),
        "components": [getattr(components, name) for name in FORMULAS],
        "weights": [getattr(weights, name) for name in FORMULAS],
        "parts": list(steps.parts.values()),
        "weighted_sum": steps.weighted_sum,
        "overrides": steps.overrides,
        "before_clamp": steps.before_clamp,
    }


@dataclass(slots=True)
class _Domain:
    traces: int = 0
    profile: str = ""
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT_OF_DOMAIN))


class LastRows:
    """The last records. All methods are called from the event loop's thread."""

    def __init__(self, settings: Settings) -> None:
        self._texts = settings.status_texts
        self._number = 0
        self._traces: deque[Row] = deque(maxlen=KEPT_TRACES)
        self._dead_letters: deque[Row] = deque(maxlen=KEPT_DEAD_LETTERS)
        self._domains: OrderedDict[str, _Domain] = OrderedDict()
        self._objectives: OrderedDict[str, str] = OrderedDict()
        profiles = tuple(settings.scoring_profiles())
        self._domain_name = functools.lru_cache(2 * KEPT_DOMAINS)(lambda domain: _shown(domain, DOMAIN_LENGTH))
        self._near = functools.lru_cache(2 * KEPT_DOMAINS)(lambda domain: near_miss(domain, profiles))

    def committed(self, decision: Decision) -> None:
        """Note what a commit published of one record, unless it was a verdict."""
        record, scored, output, *_ = decision
        if isinstance(scored, InvalidTrace):
            self._dead_letters.append(self._dead_letter(record, output))
        if not isinstance(scored, ScoredTrace):
            return
        row = self._trace(record, output, scored)
        self._traces.append(row)
        if row["objective"] is not None:
            _keep_last(self._objectives, row["id"], row["objective"], KEPT_OBJECTIVES)
        domain = self._domains.get(row["domain"]) or _Domain()
        _keep_last(self._domains, row["domain"], domain, KEPT_DOMAINS)
        domain.traces += 1
        domain.profile = scored.profile
        domain.rows.append(row)

    def traces(self, domain: str | None = None) -> list[Row]:
        """Return the last traces, newest first: of all, or of one domain."""
        rows = self._traces if domain is None else self._domains.get(domain, _Domain()).rows
        return [_explained(row) for row in reversed(rows)]

    def dead_letters(self) -> list[Row]:
        """Return the last dead letters, newest first."""
        return list(reversed(self._dead_letters))

    def domains(self) -> list[dict[str, Any]]:
        """Return the domains by name, with their traces, profile, and the profile that one without its own may mean."""
        return [
            {"name": name, "traces": domain.traces, "profile": domain.profile, "near": self._near(name)}
            for name, domain in sorted(self._domains.items())
        ]

    def _trace(self, record: SourceRecord, output: OutputRecord, scored: ScoredTrace) -> Row:
        self._number += 1
        nearest = scored.nearest
        nearest_id = None if nearest is None else nearest.trace_id[:CACHED_ID_LENGTH]
        domain, objective = self._texts_of(record, output, scored)
        return {
            "number": self._number,  # of the worker's traces
            "committed_ms": now_ms(),
            "partition": record.partition,
            "offset": record.offset,
            "id": scored.trace_id[:CACHED_ID_LENGTH],
            "decision": output.kind,
            "score": scored.score,
            "threshold": scored.threshold,
            "domain": domain,
            "profile": scored.profile,
            "components": scored.components,
            "weights": scored.weights,
            "overrides": scored.overrides,
            "nearest": nearest_id,
            "similarity": None if nearest is None else nearest.similarity,
            "objective": objective,  # None unless texts may be shown
            "nearest_objective": None if nearest_id is None else self._objectives.get(nearest_id),
        }

    def _texts_of(self, record: SourceRecord, output: OutputRecord, scored: ScoredTrace) -> tuple[str, str | None]:
        """Return the start of the trace's domain, and of its objective if texts may be shown.

        What a redacted document no longer contains is shown nowhere. It is only parsed again where it must be.
        """
        if output.redactions is None and not self._texts:
            return self._domain_name(scored.domain[:DOMAIN_LENGTH]), None
        domain, objective = _texts(record.value if output.redactions is None else output.value)
        return domain, objective if self._texts else None

    def _dead_letter(self, record: SourceRecord, output: OutputRecord) -> Row:
        headers = dict(output.headers)
        row: Row = {"committed_ms": now_ms(), "partition": record.partition, "offset": record.offset}
        for name in ("reason", "path", "message"):
            row[name] = clean(headers[f"kp-error-{name}"].decode("utf-8", "replace"))
        row["message"] = row["message"][:TEXT_LENGTH] if self._texts else None  # it quotes the record
        return row


def _keep_last(kept: OrderedDict[str, Any], name: str, value: Any, most: int) -> None:
    """Keep a value as the newest; drop the oldest beyond `most`."""
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > most:
        kept.popitem(last=False)


def now_ms() -> int:
    """Return the time, ms since 1970."""
    return time.time_ns() // 1_000_000


def _texts(value: bytes | None) -> tuple[str, str]:
    document = _fields.decode(value or b"")
    metadata, task = _fields.decode(document["metadata"]), _fields.decode(document["task"])
    domain, objective = _text.decode(metadata["task_domain"]), _text.decode(task["objective"])
    return _shown(domain, DOMAIN_LENGTH), _shown(objective, TEXT_LENGTH)


def _shown(text: str, length: int) -> str:
    return clean(text[:length])[:length]


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


_OPTIONS: Final = {"bootstrap_servers": "-b ", "group_id": "-g "} | {
    name: f"--set {name}="
    for name in ("source_topic", "accepted_topic", "rejected_topic", "dead_letter_topic", "changelog_topic")
}
"""How `explain` is told where it finds a record."""


def explain_command(settings: Settings) -> str:
    """Return `kp-worker explain` with the options by which it finds this worker's records, wherever it is entered."""
    options = [
        option + shlex.quote(value)
        for name, option in _OPTIONS.items()
        if (value := getattr(settings, name)) != Settings.model_fields[name].default
    ]
    return " ".join(["kp-worker explain", *options])


class Status:
    """The page's data. `problem` says why the worker is not ready; `warning` what should be changed."""

    def __init__(
        self, settings: Settings, metrics: Metrics, problem: Callable[[], str | None], warning: str | None = None
    ) -> None:
        self._settings = settings
        self._warning = warning
        self._metrics = metrics
        self._problem = problem
        self._rows = LastRows(settings)
        self._moments: deque[_Moment] = deque(maxlen=WINDOW_SECONDS + 1)
        self._started_ms = now_ms()
        self._profiles = settings.scoring_profiles()
        self._explain = explain_command(settings)
        self.tick(time.monotonic())

    def committed(self, decisions: Iterable[Decision]) -> None:
        """Note the traces and dead letters of a commit."""
        for decision in decisions:
            self._rows.committed(decision)

    def tick(self, now: float) -> None:
        """Note the counters of this second (monotonic); call it once a second."""
        metrics = self._metrics
        self._moments.append(
            _Moment(now, _value(metrics.consumed), _value(metrics.over_budget), tuple(metrics.evaluation.counts))
        )

    def snapshot(self, domain: str | None = None) -> dict[str, Any]:
        """Return everything that the page shows; *_ms is ms since 1970. `domain`: only its traces."""
        settings, metrics, verdicts = self._settings, self._metrics, self._verdicts()
        build = _samples(metrics.build)
        return {
            "version": __version__,
            "group": settings.group_id,
            "embedder": build[0][0].get("embedder", "") if build else "",
            "explain": self._explain,
            "problem": self._problem(),
            "warning": self._warning or self._few_accepted(verdicts),
            "now_ms": now_ms(),
            "started_ms": self._started_ms,
            "texts": settings.status_texts,
            "rate": self._rate(),
            "evaluation": self._evaluation(),
            "verdicts": verdicts,
            "scores": {
                "bounds": SCORES,
                "counts": metrics.score.counts,
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
        verdicts = _samples(self._metrics.traces, "kp_traces_total")
        letters = _samples(self._metrics.dead_letters, "kp_dead_letters_total")
        counts = {
            decision: sum(value for labels, value in verdicts if labels["decision"] == decision)
            for decision in (ACCEPTED, REJECTED)
        }
        reasons = {labels["reason"]: value for labels, value in letters if value}
        return counts | {DEAD_LETTER: sum(reasons.values()), "reasons": reasons}

    def _few_accepted(self, verdicts: Mapping[str, Any]) -> str | None:
        """Return a warning if the threshold accepts almost no trace."""
        accepted = round(verdicts[ACCEPTED])
        traces = accepted + round(verdicts[REJECTED])
        if not accepts_too_few(accepted, traces):
            return None
        return (
            f"{accepted or 'none'} of {traces} traces {'is' if accepted < 2 else 'are'} accepted at the threshold "
            f"{self._settings.threshold:g}: kp-worker report --from-kafka shows what others would accept"
        )

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

    Trusted Types take `innerHTML` and its like away from the script itself: data can only be inserted as text.
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
    samples = (sample for family in metric.collect() for sample in family.samples)
    return [(sample.labels, sample.value) for sample in samples if name in (None, sample.name)]


def _value(counter: Any) -> float:
    return _samples(counter)[0][1]
