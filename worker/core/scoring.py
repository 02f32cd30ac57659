"""The score of one trace: components, weights by domain, rule overrides, and the steps that explain it.

The formula is the specification of the KnowledgePulse SDK's `evaluateValue`. The order of the floating point
operations is part of it: it decides the last bit, and tests/data/scoring_cases.jsonl holds it to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from worker.core.trace import ReasoningTrace, Step

if TYPE_CHECKING:
    from worker.core.novelty import Neighbour, Vector

NEUTRAL_NOVELTY = 0.5
"""Novelty of a trace that has nothing to be compared with (empty cache, or no embedder)."""

NOVELTY_ROUNDING = 2e-3
"""How far a novelty may lie outside of 0..2. A similarity in float32 may exceed 1 (by 2e-7, measured), and a vector
that somebody else wrote to the changelog may be longer by novelty.LENGTH_TOLERANCE. This is more than both, so that no
trace can fail here, and far less than a wrong argument."""

DEFAULT_PROFILE = "default"
DEFAULT_THRESHOLD = 0.75

OVERRIDE_SINGLE_THOUGHT = "single_thought"
OVERRIDE_ERROR_RECOVERY = "error_recovery_bonus"
OVERRIDE_LOW_TOOL_DIVERSITY = "low_tool_diversity_penalty"


@dataclass(frozen=True, slots=True)
class Weights:
    """Share of each component in the score; the four sum to 1 (ValueError otherwise)."""

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


@dataclass(frozen=True, slots=True)
class Profile:
    """Weights of one task domain and, where set, its own acceptance threshold (0..1)."""

    weights: Weights
    threshold: float | None = None


PROFILES: Mapping[str, Profile] = {
    DEFAULT_PROFILE: Profile(Weights(0.25, 0.35, 0.15, 0.25)),
    "finance": Profile(Weights(0.20, 0.25, 0.10, 0.45)),
    "code": Profile(Weights(0.20, 0.30, 0.30, 0.20)),
    "medical": Profile(Weights(0.15, 0.20, 0.10, 0.55)),
    "customer_service": Profile(Weights(0.20, 0.30, 0.20, 0.30)),
}


@dataclass(frozen=True, slots=True)
class Components:
    """The four parts of a score, before weighting. Novelty is 0..2, the others are 0..1."""

    complexity: float
    novelty: float
    tool_diversity: float
    outcome_confidence: float


@dataclass(frozen=True, slots=True)
class Score:
    """A score (0..1) and everything that explains it."""

    score: float
    components: Components
    profile: str
    weights: Weights
    overrides: tuple[str, ...] = field(default=())


def score_trace(
    trace: ReasoningTrace,
    novelty: float = NEUTRAL_NOVELTY,
    profiles: Mapping[str, Profile] = PROFILES,
) -> Score:
    """Score one trace, given its novelty (0..2).

    A domain that has no profile takes `profiles["default"]`. The result is clamped to 0..1 at the very end only,
    so that each override works on the raw result of the one before. Raises ValueError for another novelty.
    """
    if not -NOVELTY_ROUNDING <= novelty <= 2.0 + NOVELTY_ROUNDING:
        raise ValueError(f"novelty must lie in 0..2 (1 - cosine similarity), got {novelty}")
    steps, success = trace.steps, trace.metadata.success
    step_types, tool_names, error_recoveries = _count(steps)

    complexity = min(
        1.0,
        (len(step_types) / 4) * 0.5 + (0.3 if error_recoveries > 0 else 0) + (len(steps) / 20) * 0.2,
    )
    tool_diversity = min(1.0, (len(tool_names) / max(1, len(steps))) * 3)
    outcome_confidence = trace.outcome.confidence * (1.0 if success else 0.3)

    domain = trace.metadata.task_domain
    name = domain if domain in profiles else DEFAULT_PROFILE
    weights = profiles[name].weights
    score = (
        complexity * weights.complexity
        + novelty * weights.novelty
        + tool_diversity * weights.tool_diversity
        + outcome_confidence * weights.outcome_confidence
    )

    score, overrides = _override(score, steps, error_recoveries, success, len(tool_names))
    return Score(
        score=min(1.0, max(0.0, score)),
        components=Components(complexity, novelty, tool_diversity, outcome_confidence),
        profile=name,
        weights=weights,
        overrides=overrides,
    )


def _count(steps: Sequence[Step]) -> tuple[set[str], set[str], int]:
    """Return the types of the steps, the names of their tools, and the number of error recoveries."""
    step_types: set[str] = set()
    tool_names: set[str] = set()
    error_recoveries = 0
    for step in steps:
        step_types.add(step.type)
        if step.type == "error_recovery":
            error_recoveries += 1
        if step.tool is not None:
            tool_names.add(step.tool.name)
    return step_types, tool_names, error_recoveries


def _override(
    score: float, steps: Sequence[Step], error_recoveries: int, success: bool, tools: int
) -> tuple[float, tuple[str, ...]]:
    """Apply the overrides, in their order; return the score and the names of those that applied."""
    overrides: list[str] = []
    if len(steps) == 1 and steps[0].type == "thought":
        score = 0.1
        overrides.append(OVERRIDE_SINGLE_THOUGHT)
    if error_recoveries > 2 and success:
        score = min(1.0, score + 0.1)
        overrides.append(OVERRIDE_ERROR_RECOVERY)
    if tools == 1:  # at most one unique tool, and some step has a tool: exactly one
        score = max(0.0, score - 0.1)
        overrides.append(OVERRIDE_LOW_TOOL_DIVERSITY)
    return score, tuple(overrides)


FORMULAS: Final[Mapping[str, str]] = {
    "complexity": "min(1, unique step types / 4 * 0.5 + (0.3 if any error_recovery) + steps / 20 * 0.2)",
    "novelty": "1 - similarity to the nearest cached trace; 0.5 if there is none",
    "tool_diversity": "min(1, unique tool names / steps * 3)",
    "outcome_confidence": "confidence * (1 if success, else 0.3)",
}
"""The formula of each component, in the order in which the score adds them."""

_OVERRIDES: Final[Mapping[str, tuple[str, Callable[[float], float]]]] = {
    OVERRIDE_SINGLE_THOUGHT: ("a single step of type thought: 0.1, whatever the sum", lambda _: 0.1),
    OVERRIDE_ERROR_RECOVERY: (
        "more than 2 error recoveries, and success: + 0.1, at most 1",
        lambda value: min(1.0, value + 0.1),
    ),
    OVERRIDE_LOW_TOOL_DIVERSITY: ("exactly one tool: - 0.1, at least 0", lambda value: max(0.0, value - 0.1)),
}


class Override(Struct, frozen=True):
    """One override and what it did."""

    name: str
    rule: str
    before: float
    after: float


class Arithmetic(Struct, frozen=True):
    """The steps from the components to the score. `parts`: value times weight of each component."""

    parts: dict[str, float]
    weighted_sum: float
    overrides: list[Override]
    before_clamp: float


def arithmetic(components: Components, weights: Weights, overrides: Sequence[str]) -> Arithmetic:
    """Return the steps of a score, in the order of `score_trace`. `overrides`: the names of those that applied."""
    parts = {name: getattr(components, name) * getattr(weights, name) for name in FORMULAS}
    weighted_sum = (
        parts["complexity"] + parts["novelty"] + parts["tool_diversity"] + parts["outcome_confidence"]
    )  # in the order of score_trace: it decides the last bit
    value, steps = weighted_sum, []
    for name in overrides:
        rule, change = _OVERRIDES[name]
        steps.append(Override(name, rule, value, change(value)))
        value = steps[-1].after
    return Arithmetic(parts, weighted_sum, steps, value)


@dataclass(frozen=True, slots=True)
class ScoredTrace:
    """The decision on one trace and everything that explains it.

    `domain` is the trace's task domain, which decides the profile. `sequence` and `vector` (unit length) entered the
    cache; None if there was no vector. `stream_time_ms` is the partition's stream time after this trace.
    """

    trace_id: str
    domain: str
    score: float
    accepted: bool
    threshold: float
    components: Components
    profile: str
    weights: Weights
    overrides: tuple[str, ...]
    nearest: Neighbour | None
    stream_time_ms: int
    sequence: int | None
    vector: Vector | None
