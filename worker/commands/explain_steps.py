"""The score of one trace, step by step, as values.

Lives here: the steps from the counts to the decision. Must not live here: the score itself (score_trace computes it,
and these steps are checked against its result, bit for bit), output (explain_view.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from worker.config import Settings
from worker.core.documents import rfc3339
from worker.core.json_words import in_json_words
from worker.core.scoring import (
    DEFAULT_PROFILE,
    NEUTRAL_NOVELTY,
    OVERRIDE_ERROR_RECOVERY,
    OVERRIDE_LOW_TOOL_DIVERSITY,
    OVERRIDE_SINGLE_THOUGHT,
    Components,
    Profile,
    Weights,
    score_trace,
)
from worker.core.trace import ReasoningTrace, created_at_ms, parse_trace

OVERRIDE_RULES: Final[Mapping[str, str]] = {
    OVERRIDE_SINGLE_THOUGHT: "a single step, and it is a thought: 0.1, whatever the sum",
    OVERRIDE_ERROR_RECOVERY: "more than 2 error recoveries, and success: + 0.1, at most 1",
    OVERRIDE_LOW_TOOL_DIVERSITY: "exactly one tool: - 0.1, at least 0",
}


_decoder: Final = msgspec.json.Decoder(float_hook=float)  # as the parser does: 1e400 in an unknown field is valid


class Nearest(Struct, frozen=True):
    """The nearest earlier trace and its cosine similarity, as the document gives them."""

    id: str
    similarity: float


class RecordedScoring(Struct, frozen=True):
    """What the `scoring` object of a scored document says about its score."""

    score: float
    decision: str
    threshold: float
    nearest: Nearest | None
    profile: str
    weights: Weights
    components: Components
    stream_time: object = ""


class Counts(Struct, frozen=True):
    """What the formulas count in a trace."""

    unique_step_types: int
    error_recoveries: int
    steps: int
    unique_tools: int
    confidence: float
    success: bool


class Formula(Struct, frozen=True):
    """One component: its formula, the formula with the numbers put in, and its share of the score."""

    formula: str
    numbers: str
    value: float
    weight: float
    weighted: float


class Override(Struct, frozen=True):
    """One override and what it did."""

    name: str
    rule: str
    before: float
    after: float


class Explanation(Struct, frozen=True):
    """A score in steps, in the order in which they are taken. Field names are those of the JSON output.

    `recorded_score`: the score in the document; None for a trace that is not scored, or with another novelty.
    """

    id: str
    counts: Counts
    novelty_from: str
    nearest: Nearest | None
    task_domain: str
    profile: str
    profile_because: str
    components: dict[str, Formula]
    weighted_sum: float
    overrides: list[Override]
    before_clamp: float
    score: float
    threshold: float
    threshold_from: str
    decision: str
    recorded_score: float | None
    notes: list[str]

    @property
    def agrees(self) -> bool:
        """Whether the document's own score follows from its figures; True where it has none."""
        return self.recorded_score is None or self.recorded_score == self.score


class _Basis(Struct, frozen=True):
    """What a trace is scored with, and where it comes from. `threshold` None: that of the settings."""

    profiles: Mapping[str, Profile]
    novelty: float
    novelty_from: str
    threshold: float | None = None
    nearest: Nearest | None = None
    recorded_score: float | None = None


def explain_trace(raw: bytes, settings: Settings, novelty: float | None = None) -> Explanation:
    """Explain the score of a trace, or of a document that kp-worker has scored. Raises InvalidTrace.

    A scored document is explained with its own novelty, profile and threshold; a bare trace with the settings' and
    `novelty`, or 0.5.
    """
    trace = parse_trace(raw, settings.limits)
    recorded, notes = _recorded(raw)
    if recorded is None:
        basis, more = _basis_of_settings(settings, novelty)
    else:
        basis, more = _basis_of_document(recorded, settings, novelty)
        more += _about_time(trace, recorded, settings)
    explanation = _explain_score(trace, basis, settings, notes + more)
    if explanation.agrees:
        return explanation
    changed = f"the document says {basis.recorded_score!r}: it was changed after it was scored, or scored otherwise"
    return msgspec.structs.replace(explanation, notes=[*explanation.notes, changed])


def _basis_of_settings(settings: Settings, novelty: float | None) -> tuple[_Basis, list[str]]:
    profiles = settings.scoring_profiles()
    if novelty is not None:
        return _Basis(profiles, novelty, "--novelty"), []
    note = "novelty needs the worker's cache: 0.5 is that of a trace with nothing before it; try --novelty"
    return _Basis(profiles, NEUTRAL_NOVELTY, "nothing to compare with"), [note]


def _basis_of_document(
    recorded: RecordedScoring, settings: Settings, novelty: float | None
) -> tuple[_Basis, list[str]]:
    profiles, notes = settings.scoring_profiles(), []
    own = {DEFAULT_PROFILE: profiles[DEFAULT_PROFILE], recorded.profile: Profile(recorded.weights)}
    if own[recorded.profile].weights != profiles.get(recorded.profile, profiles[DEFAULT_PROFILE]).weights:
        notes.append(f"the document was scored with other weights of {recorded.profile} than KP_PROFILES has now")
    if novelty is not None:
        return _Basis(own, novelty, "--novelty", recorded.threshold), notes
    basis = _Basis(
        own, recorded.components.novelty, "the document", recorded.threshold, recorded.nearest, recorded.score
    )
    return basis, notes


def _explain_score(trace: ReasoningTrace, basis: _Basis, settings: Settings, notes: list[str]) -> Explanation:
    score = score_trace(trace, basis.novelty, basis.profiles)
    counts = _count(trace)
    components = _formulas(counts, score.components, score.weights, basis.nearest, basis.novelty_from)
    parts = [formula.weighted for formula in components.values()]
    weighted_sum = parts[0] + parts[1] + parts[2] + parts[3]  # in the order of score_trace
    overrides, value = _overrides(score.overrides, weighted_sum)
    if min(1.0, max(0.0, value)) != score.score:
        raise RuntimeError(f"this is a bug: the steps lead to {value!r}, the score is {score.score!r}")
    threshold, threshold_from = _threshold(basis, settings, score.profile)
    domain = trace.metadata.task_domain
    return Explanation(
        id=trace.id,
        counts=counts,
        novelty_from=basis.novelty_from,
        nearest=basis.nearest,
        task_domain=domain,
        profile=score.profile,
        profile_because=f"metadata.task_domain is {domain!r}"
        + ("" if domain == score.profile else ", which has no profile of its own"),
        components=components,
        weighted_sum=weighted_sum,
        overrides=overrides,
        before_clamp=value,
        score=score.score,
        threshold=threshold,
        threshold_from=threshold_from,
        decision="accepted" if score.score >= threshold else "rejected",
        recorded_score=basis.recorded_score,
        notes=notes,
    )


def _threshold(basis: _Basis, settings: Settings, profile: str) -> tuple[float, str]:
    """Return the threshold and where it comes from."""
    if basis.threshold is not None:
        return basis.threshold, "of the document"
    own = basis.profiles[profile].threshold
    return (settings.threshold, "KP_THRESHOLD") if own is None else (own, f"KP_PROFILES, {profile}")


def _recorded(raw: bytes) -> tuple[RecordedScoring | None, list[str]]:
    document = _decoder.decode(raw)
    if "scoring" not in document:
        return None, []
    try:
        return msgspec.convert(document["scoring"], RecordedScoring), []
    except msgspec.ValidationError as error:
        return None, [
            f"`scoring` is not kp-worker's ({in_json_words(str(error))}): taken as a trace that is not scored"
        ]


def is_json(raw: bytes) -> bool:
    """Return whether the bytes are one JSON document, as the parser reads it."""
    try:
        _decoder.decode(raw)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return True


def _about_time(trace: ReasoningTrace, recorded: RecordedScoring, settings: Settings) -> list[str]:
    """Return a note where stream time is behind the trace's own time, and a setting can be the cause."""
    step, created = settings.stream_time_max_step_seconds, rfc3339(created_at_ms(trace))
    compared = recorded.stream_time
    if step is None or not isinstance(compared, str) or not "" < compared < created:
        return []
    note = (
        f"it was compared at stream time {compared}, before its created_at ({created}): its record's timestamp was "
        f"earlier, or KP_STREAM_TIME_MAX_STEP_SECONDS ({step:g} now) held it back"
    )
    return [note]


def _count(trace: ReasoningTrace) -> Counts:
    return Counts(
        unique_step_types=len({step.type for step in trace.steps}),
        error_recoveries=sum(step.type == "error_recovery" for step in trace.steps),
        steps=len(trace.steps),
        unique_tools=len({step.tool.name for step in trace.steps if step.tool is not None}),
        confidence=trace.outcome.confidence,
        success=trace.metadata.success,
    )


def _formulas(
    counts: Counts, values: Components, weights: Weights, nearest: Nearest | None, novelty_from: str
) -> dict[str, Formula]:
    recovery = "0.3" if counts.error_recoveries else "0"
    words = {
        "complexity": (
            "min(1, unique step types / 4 * 0.5 + (0.3 if any error_recovery) + steps / 20 * 0.2)",
            f"min(1, {counts.unique_step_types} / 4 * 0.5 + {recovery} + {counts.steps} / 20 * 0.2)",
        ),
        "novelty": (
            "1 - similarity to the nearest cached trace; 0.5 where there is none",
            f"1 - {nearest.similarity:.6g}" if nearest else f"{values.novelty:.6g} ({novelty_from})",
        ),
        "tool_diversity": (
            "min(1, unique tool names / steps * 3)",
            f"min(1, {counts.unique_tools} / {counts.steps} * 3)",
        ),
        "outcome_confidence": (
            "confidence * (1 if success, else 0.3)",
            f"{counts.confidence:.6g} * {'1' if counts.success else '0.3'}",
        ),
    }
    result = {}
    for name, (formula, numbers) in words.items():
        value, weight = getattr(values, name), getattr(weights, name)
        result[name] = Formula(formula, numbers, value, weight, value * weight)
    return result


def _overrides(names: tuple[str, ...], value: float) -> tuple[list[Override], float]:
    """Return the overrides with the value before and after each, and the last value."""
    steps: Mapping[str, Callable[[float], float]] = {
        OVERRIDE_SINGLE_THOUGHT: lambda _: 0.1,
        OVERRIDE_ERROR_RECOVERY: lambda before: min(1.0, before + 0.1),
        OVERRIDE_LOW_TOOL_DIVERSITY: lambda before: max(0.0, before - 0.1),
    }
    result = []
    for name in names:
        after = steps[name](value)
        result.append(Override(name, OVERRIDE_RULES[name], value, after))
        value = after
    return result, value
