"""The numbers of a report, as values: what report_summary.py computes and report_page.py shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from worker.core.domains import DomainWithoutProfile, UnusedProfile
from worker.core.records import EmbedderIdentity

THRESHOLDS: Final = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Thresholds of the table; the curve has all hundredths."""

CURVE: Final = tuple(step / 100 for step in range(101))
SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.5)
PASTED_SHARE: Final = SHARES[1]
"""The share that the config below the table accepts of each domain."""

SCORE_BINS: Final = 40
"""Bars of 0.025, so that the usual thresholds fall between two bars."""


@dataclass(frozen=True, slots=True)
class Example:
    """One trace, as the report shows it. Times in ms; `similarity` None: nothing to compare with."""

    id: str
    objective: str
    domain: str
    profile: str
    score: float
    threshold: float
    accepted: bool
    components: tuple[float, ...]
    overrides: tuple[str, ...]
    similarity: float | None
    steps: int
    latency_ms: float
    time_ms: int


@dataclass(frozen=True, slots=True)
class Group:
    """Traces of one domain or profile.

    `curve`: share of them that reaches each threshold of CURVE; `passing`: of THRESHOLDS.
    `cutoffs`: the greatest threshold that lets at least each of SHARES pass.
    """

    name: str
    profile: str
    count: int
    accepted: int
    quartiles: tuple[float, float, float]
    histogram: tuple[int, ...]
    curve: tuple[float, ...]
    passing: tuple[float, ...]
    cutoffs: tuple[float, ...]
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class ProfileNumbers:
    """One profile of weights: `threshold` and `weights` are those of its last trace, `setups` how many it had.

    `means`: of the components. `shares`: of the weighted sum. `spread`: share of the weighted sum's variance, by the
    covariance of each weighted component with it; they sum to 1, and one can be negative. None: all sums are equal.
    """

    group: Group
    threshold: float
    weights: tuple[float, ...]
    setups: int
    means: tuple[float, ...]
    shares: tuple[float, ...]
    spread: tuple[float, ...] | None
    above: list[Example]
    below: list[Example]


@dataclass(frozen=True, slots=True)
class Moment:
    """Traces that follow each other in stream time. Novelty's 10th, 50th and 90th percentile; share accepted."""

    time_ms: int
    count: int
    novelty: tuple[float, float, float]
    accepted: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Traces that are linked by their nearest neighbours. `similarity`: median of those links."""

    size: int
    accepted: int
    similarity: float
    first_ms: int
    last_ms: int
    examples: list[Example]


@dataclass(frozen=True, slots=True)
class ReportNumbers:
    """Everything that a report shows, in the order in which it shows it.

    `config`: thresholds that accept PASTED_SHARE of each of the domains, as lines of a config file.
    """

    total: Group
    first_ms: int
    last_ms: int
    partitions: int
    repeated: int
    bad: int
    bad_shown: list[tuple[str, str]]
    makers: list[tuple[EmbedderIdentity | None, str, int]]
    profiles: list[ProfileNumbers]
    domains: list[Group]
    other_domains: int
    config: str
    without_profile: list[DomainWithoutProfile]
    unused_profiles: list[UnusedProfile]
    components: dict[str, tuple[int, ...]]
    compared: int
    overrides: list[tuple[str, int, int]]
    moments: list[Moment]
    limit: float
    near_duplicates: int
    near_duplicates_accepted: int
    cluster_count: int
    clustered: int
    clusters: list[Cluster]
    longest: list[Example]
    timed: int
    slowest: list[Example]
    texts_hidden: bool = field(default=False)
