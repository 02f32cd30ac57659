"""The score of one trace: components, weights by domain, rule overrides, and the steps that explain it.

The formula is specified by the KnowledgePulse SDK's `evaluateValue`. The order of the floating-point operations is part
of it, because it decides the last bit: tests/data/scoring_cases.jsonl checks it.
"""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from worker.core.trace import Fraction, ReasoningTrace, Step

if TYPE_CHECKING:
    from worker.core.novelty import Neighbour, Vector

NEUTRAL_NOVELTY = 0.5  # novelty of a trace with nothing to compare it to (empty cache, or no embedder)

NOVELTY_ROUNDING = 2e-3
"""How far a novelty may lie outside 0..2: a float32 similarity may exceed 1 by 2e-7, and a vector written by another
program may be too long by novelty.LENGTH_TOLERANCE. No trace fails this check; a wrong argument does."""

DEFAULT_PROFILE = "default"
DEFAULT_THRESHOLD = 0.75

OVERRIDE_SINGLE_THOUGHT = "single_thought"
OVERRIDE_ERROR_RECOVERY = "error_recovery_bonus"
OVERRIDE_LOW_TOOL_DIVERSITY = "low_tool_diversity_penalty"


@dataclass(frozen=True, slots=True)
class Weights:
    """The share of each component in the score; the four sum to 1 (ValueError otherwise)."""

    complexity: float
    novelty: float
    tool_diversity: float
    outcome_confidence: float

    def __post_init__(self) -> None:
        values = (self.complexity, self.novelty, self.tool_diversity, self.outcome_confidence)
        if not all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in values):
            raise ValueError(f"each weight must lie in 0..1, got {values}")
        if not math.isclose(math.fsum(values), 1.0, abs_tol=1e-9):
            raise ValueError(f"weights must sum to 1, got {values} with sum {math.fsum(values):g}")


def weights_by_verdicts(weights: Weights) -> Weights:
    """Return weights for confidences by verdicts: the outcome's is 0.6, and the others keep their proportions."""
    rest = 0.4 / (1 - weights.outcome_confidence) if weights.outcome_confidence < 1 else 0.0
    others = (weights.complexity * rest, weights.novelty * rest, weights.tool_diversity * rest)
    return Weights(*others, 0.6) if weights.outcome_confidence < 0.6 else weights


@dataclass(frozen=True, slots=True)
class Profile:
    """How traces of one task domain are scored."""

    weights: Weights
    threshold: float | None = None  # for acceptance, 0..1; None: the general one

    def threshold_or(self, general: float) -> float:
        """Return the threshold that holds: the profile's own, or else the general one."""
        return general if self.threshold is None else self.threshold


PROFILES: Mapping[str, Profile] = {
    DEFAULT_PROFILE: Profile(Weights(0.25, 0.35, 0.15, 0.25)),
    "finance": Profile(Weights(0.20, 0.25, 0.10, 0.45)),
    "code": Profile(Weights(0.20, 0.30, 0.30, 0.20)),
    "medical": Profile(Weights(0.15, 0.20, 0.10, 0.55)),
    "customer_service": Profile(Weights(0.20, 0.30, 0.20, 0.30)),
}


@dataclass(frozen=True, slots=True)
class Components:
    """The four parts of a score, before weighting: 0..1, except novelty."""

    complexity: float
    novelty: float  # 0..2
    tool_diversity: float
    outcome_confidence: float


class Score(Struct, frozen=True):
    """A score (0..1) and everything that explains it."""

    score: float
    components: Components
    profile: str
    weights: Weights
    overrides: tuple[str, ...] = ()


class Counts(Struct, frozen=True):
    """The figures of a trace that the formulas use."""

    unique_step_types: int
    error_recoveries: int
    steps: int
    unique_tools: int
    confidence: float
    success: bool


class Formula(NamedTuple):
    """The formula of one component."""

    text: str  # with placeholders, which become words or figures
    value: Callable[[Counts], float]

    def words(self) -> str:
        """Return the formula in words."""
        return self.text.format_map(_WORDS)

    def numbers(self, counts: Counts) -> str:
        """Return the formula with a trace's figures."""
        figures = {
            "types": counts.unique_step_types,
            "recovery": 0.3 if counts.error_recoveries else 0,
            "steps": counts.steps,
            "tools": counts.unique_tools,
            "confidence": f"{counts.confidence:.6g}",
            "success": 1 if counts.success else 0.3,
        }
        return self.text.format_map(figures)


_WORDS: Final = {
    "types": "unique step types",
    "recovery": "(0.3 if any error_recovery)",
    "steps": "steps",
    "tools": "unique tool names",
    "confidence": "confidence",
    "success": "(1 if success, else 0.3)",
}
COMPLEXITY: Final = Formula(
    "min(1, {types} / 4 * 0.5 + {recovery} + {steps} / 20 * 0.2)",
    lambda it: min(
        1.0, (it.unique_step_types / 4) * 0.5 + (0.3 if it.error_recoveries > 0 else 0) + (it.steps / 20) * 0.2
    ),
)
TOOL_DIVERSITY: Final = Formula(
    "min(1, {tools} / {steps} * 3)", lambda it: min(1.0, (it.unique_tools / max(1, it.steps)) * 3)
)
OUTCOME_CONFIDENCE: Final = Formula("{confidence} * {success}", lambda it: it.confidence * (1.0 if it.success else 0.3))
FORMULAS: Final[Mapping[str, str]] = {
    "complexity": COMPLEXITY.words(),
    "novelty": "1 - similarity to the nearest cached trace; 0.5 if there is none",
    "tool_diversity": TOOL_DIVERSITY.words(),
    "outcome_confidence": OUTCOME_CONFIDENCE.words(),
}
"""The formula of each component in words, in the order in which they are summed."""


class Rule(NamedTuple):
    """The rule of an override."""

    words: str
    applies: Callable[[Counts, Sequence[Step]], bool]
    change: Callable[[float], float]  # from the score so far to the new one


OVERRIDES: Final[Mapping[str, Rule]] = {
    OVERRIDE_SINGLE_THOUGHT: Rule(
        "a single step of type thought: 0.1, whatever the sum",
        lambda it, steps: it.steps == 1 and steps[0].type == "thought",
        lambda _: 0.1,
    ),
    OVERRIDE_ERROR_RECOVERY: Rule(
        "more than 2 error recoveries, and success: + 0.1, at most 1",
        lambda it, _: it.error_recoveries > 2 and it.success,
        lambda score: min(1.0, score + 0.1),
    ),
    OVERRIDE_LOW_TOOL_DIVERSITY: Rule(
        "exactly one tool: - 0.1, at least 0",
        lambda it, _: it.unique_tools == 1,
        lambda score: max(0.0, score - 0.1),
    ),
}
"""The overrides by name, in the order in which they apply."""


def score_trace(
    trace: ReasoningTrace,
    novelty: float = NEUTRAL_NOVELTY,
    profiles: Mapping[str, Profile] = PROFILES,
    confidence: float | None = None,
) -> Score:
    """Score one trace, given its novelty. Raises ValueError if the novelty is not in 0..2.

    `confidence` (0..1) replaces the stated one. A domain without a profile uses `profiles["default"]`. Only the final
    result is clamped to 0..1: each override works on the raw result of the one before.
    """
    if not -NOVELTY_ROUNDING <= novelty <= 2.0 + NOVELTY_ROUNDING:
        raise ValueError(f"novelty must lie in 0..2 (1 - cosine similarity), got {novelty}")
    counts = counted(trace, confidence)
    components = Components(
        COMPLEXITY.value(counts), novelty, TOOL_DIVERSITY.value(counts), OUTCOME_CONFIDENCE.value(counts)
    )
    domain = trace.metadata.task_domain
    profile = domain if domain in profiles else DEFAULT_PROFILE
    weights = profiles[profile].weights
    score = _weighted(components, weights)[1]
    overrides: tuple[str, ...] = ()
    for name, rule in OVERRIDES.items():
        if rule.applies(counts, trace.steps):
            score, overrides = rule.change(score), (*overrides, name)
    return Score(min(1.0, max(0.0, score)), components, profile, weights, overrides)


def counted(trace: ReasoningTrace, confidence: float | None = None) -> Counts:
    """Return the figures that the formulas need. `confidence` replaces the stated one."""
    step_types: set[str] = set()
    tool_names: set[str] = set()
    error_recoveries = 0
    for step in trace.steps:
        step_types.add(step.type)
        if step.type == "error_recovery":
            error_recoveries += 1
        if step.tool is not None:
            tool_names.add(step.tool.name)
    return Counts(
        len(step_types), error_recoveries, len(trace.steps), len(tool_names),
        trace.outcome.confidence if confidence is None else confidence, trace.metadata.success,
    )  # fmt: skip


def _weighted(it: Components, weights: Weights) -> tuple[tuple[float, float, float, float], float]:
    """Return each component times its weight, and the total. sum() would round differently since Python 3.12."""
    parts = (
        it.complexity * weights.complexity,
        it.novelty * weights.novelty,
        it.tool_diversity * weights.tool_diversity,
        it.outcome_confidence * weights.outcome_confidence,
    )
    return parts, parts[0] + parts[1] + parts[2] + parts[3]


class Override(Struct, frozen=True):
    """One override and its effect."""

    name: str
    rule: str  # in words
    before: float
    after: float


class Arithmetic(Struct, frozen=True):
    """The steps from the components to the score."""

    parts: dict[str, float]  # value times weight, by component
    weighted_sum: float
    overrides: list[Override]
    before_clamp: float


def arithmetic(components: Components, weights: Weights, overrides: Sequence[str]) -> Arithmetic:
    """Return the steps of a score. `overrides`: the names of the ones that applied."""
    parts, weighted_sum = _weighted(components, weights)
    value, steps = weighted_sum, []
    for name in overrides:
        rule = OVERRIDES[name]
        steps.append(Override(name, rule.words, value, rule.change(value)))
        value = steps[-1].after
    return Arithmetic(dict(zip(FORMULAS, parts, strict=True)), weighted_sum, steps, value)


class Confidence(Struct, frozen=True):
    """The outcome confidence with KP_CONFIDENCE=record."""

    stated: Fraction  # by the trace
    used: Fraction  # in the score
    judged: Annotated[int, Meta(ge=0)]  # verdicts kept on the agent in the domain
    succeeded: Annotated[float, Meta(ge=0)]  # the sum of their successes


class ScoredTrace(Score, frozen=True, kw_only=True):
    """The decision on one trace and everything that explains it."""

    trace_id: str
    domain: str  # the trace's task domain, which decides the profile
    accepted: bool
    threshold: float
    nearest: Neighbour | None
    stream_time_ms: int  # the partition's, after this trace
    sequence: int | None  # in the cache; None without a vector
    vector: Vector | None  # unit length, as in the cache
    confidence: Confidence | None = None  # None if the stated one counts


def accepts_too_few(accepted: int, traces: int) -> bool:
    """Return whether a threshold lets almost nothing pass: less than 1 % of at least a hundred traces."""
    return traces >= 100 and accepted < traces / 100


# -- domains without their own profile, and the profile that each may mean: a near miss is reported, never corrected


@dataclass(frozen=True, slots=True)
class DomainWithoutProfile:
    """A domain that is scored with the profile `default`."""

    name: str
    traces: int  # of the domain
    near: str | None  # the profile that it may mean


@dataclass(frozen=True, slots=True)
class UnusedProfile:
    """A profile that no trace uses."""

    name: str
    near: str | None  # the domain or built-in profile that it may mean


def without_profile(traces: Mapping[str, int], profiles: Collection[str]) -> list[DomainWithoutProfile]:
    """Return the domains (with their number of traces) without a profile: near misses first, then the most frequent."""
    without = [
        DomainWithoutProfile(domain, count, near_miss(domain, profiles))
        for domain, count in traces.items()
        if domain not in profiles and domain != DEFAULT_PROFILE
    ]
    return sorted(without, key=lambda domain: (domain.near is None, -domain.traces, domain.name))


def unused_profiles(profiles: Collection[str], domains: Collection[str]) -> list[UnusedProfile]:
    """Return the profiles that are neither built in nor used by any of the domains, near misses first."""
    unused = [name for name in profiles if name not in PROFILES and name not in domains]
    others = dict.fromkeys([*PROFILES, *domains])
    named = [UnusedProfile(name, near_miss(name, others)) for name in unused]
    return sorted(named, key=lambda profile: (profile.near is None, profile.name))


def near_miss(domain: str, profiles: Iterable[str]) -> str | None:
    """Return the profile that a domain without one may mean; None if the domain has a profile or none is near.

    Another spelling ("Finance", "customer-service", "finance ") is nearer than a misspelling ("finanse"). Names that
    differ in their digits are never near, and no domain means `default`.
    """
    names = [name for name in profiles if name != DEFAULT_PROFILE]
    if domain in names or domain == DEFAULT_PROFILE:
        return None
    wanted = _letters(domain)
    spelt = {_letters(name): name for name in reversed(names)}  # the first of equal ones
    alike = [key for key in spelt if key and _digits(key) == _digits(wanted)]
    # One wrong letter of seven is near ("finanse"), one of four is not ("node").
    close = difflib.get_close_matches(wanted, alike, n=1, cutoff=0.82) if wanted else []
    close += [key for key in alike if len(key) == len(wanted) and sorted(key) == sorted(wanted)]  # "leagl"
    return spelt[close[0]] if close else None


def _letters(name: str) -> str:
    """Return the letters and digits of a name, without the case and punctuation in which spellings differ."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", name).casefold()))


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
