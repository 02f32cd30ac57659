"""The arithmetic of a score as steps: formulas, weighted parts, their sum, what each override did to it.

Lives here: what `explain` and the status page show of a score. Must not live here: the score itself (scoring.py; these
steps lead to its result, bit for bit), what a document says about its score, output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from worker.core.scoring import (
    OVERRIDE_ERROR_RECOVERY,
    OVERRIDE_LOW_TOOL_DIVERSITY,
    OVERRIDE_SINGLE_THOUGHT,
    Components,
    Weights,
)

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
