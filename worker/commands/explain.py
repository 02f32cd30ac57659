"""`kp-worker explain`: one trace's score, step by step.

Lives here: the steps as values, as JSON and as text, and finding the line of a problem in a file. Must not live here:
the score itself. score_trace computes it; the steps told here are checked against its result, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worker.config import Settings
from worker.core.pipeline import rfc3339
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
from worker.core.terminal import clean, clean_json
from worker.core.trace import InvalidTrace, Reason, ReasoningTrace, created_at_ms, parse_trace

OVERRIDES: Final[Mapping[str, str]] = {
    OVERRIDE_SINGLE_THOUGHT: "a single step, and it is a thought: 0.1, whatever the sum",
    OVERRIDE_ERROR_RECOVERY: "more than 2 error recoveries, and success: + 0.1, at most 1",
    OVERRIDE_LOW_TOOL_DIVERSITY: "exactly one tool: - 0.1, at least 0",
}


_decoder: Final = msgspec.json.Decoder(float_hook=float)  # as the parser: 1e400 in an unknown field is no error


class Nearest(Struct, frozen=True):
    """The nearest earlier trace and its cosine similarity, as the document tells them."""

    id: str
    similarity: float


class Recorded(Struct, frozen=True):
    """What the `scoring` object of a scored document says of its score."""

    score: float
    decision: str
    threshold: float
    profile: str
    weights: Weights
    components: Components
    nearest: Nearest | None
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


def explain_trace(raw: bytes, settings: Settings, novelty: float | None = None) -> Explanation:
    """Explain the score of a trace, or of a document that kp-worker has scored. Raises InvalidTrace.

    A scored document is explained with its own novelty, profile and threshold; a bare trace with the settings' and
    `novelty`, or 0.5.
    """
    trace = parse_trace(raw, settings.limits)
    recorded, notes = _recorded(raw)
    profiles, novelty_from = settings.scoring_profiles(), "--novelty"
    nearest, recorded_score = None, None
    threshold, threshold_from = settings.threshold, "KP_THRESHOLD"
    if recorded is not None:
        own = {DEFAULT_PROFILE: profiles[DEFAULT_PROFILE], recorded.profile: Profile(recorded.weights)}
        if own[recorded.profile].weights != profiles.get(recorded.profile, profiles[DEFAULT_PROFILE]).weights:
            notes.append(f"the document was scored with other weights of {recorded.profile} than KP_PROFILES has now")
        profiles = own
        threshold, threshold_from = recorded.threshold, "of the document"
    if recorded is not None and novelty is None:
        novelty, nearest, recorded_score = recorded.components.novelty, recorded.nearest, recorded.score
        novelty_from = "the document"
    elif novelty is None:
        novelty, novelty_from = NEUTRAL_NOVELTY, "nothing to compare with"
        notes.append("novelty needs the worker's cache: 0.5 is that of a trace with nothing before it; try --novelty")
    if recorded is not None:
        notes += _about_time(trace, recorded, settings)
    score = score_trace(trace, novelty, profiles)
    own_threshold = profiles[score.profile].threshold
    if recorded is None and own_threshold is not None:
        threshold, threshold_from = own_threshold, f"KP_PROFILES, {score.profile}"

    counts = _count(trace)
    components = _formulas(counts, score.components, score.weights, nearest, novelty_from)
    parts = [formula.weighted for formula in components.values()]
    weighted_sum = parts[0] + parts[1] + parts[2] + parts[3]
    overrides, value = _overrides(score.overrides, weighted_sum)
    if min(1.0, max(0.0, value)) != score.score:
        raise RuntimeError(f"this is a bug: the steps lead to {value!r}, the score is {score.score!r}")
    if recorded_score is not None and recorded_score != score.score:
        notes.append(f"the document says {recorded_score!r}: it was changed after it was scored, or scored otherwise")
    domain = trace.metadata.task_domain
    return Explanation(
        id=trace.id,
        counts=counts,
        novelty_from=novelty_from,
        nearest=nearest,
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
        recorded_score=recorded_score,
        notes=notes,
    )


def _recorded(raw: bytes) -> tuple[Recorded | None, list[str]]:
    document = _decoder.decode(raw)
    if "scoring" not in document:
        return None, []
    try:
        return msgspec.convert(document["scoring"], Recorded), []
    except msgspec.ValidationError as error:
        return None, [f"`scoring` is not kp-worker's ({error}): taken as a trace that is not scored"]


def _about_time(trace: ReasoningTrace, recorded: Recorded, settings: Settings) -> list[str]:
    """Say where stream time stayed behind the trace's own time; told only where a setting can be the cause."""
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
        result.append(Override(name, OVERRIDES[name], value, after))
        value = after
    return result, value


# -- output


def as_json(explanation: Explanation) -> str:
    """Return the explanation as one line of JSON."""
    return clean_json(msgspec.json.encode(explanation).decode())


def as_text(it: Explanation) -> RenderableType:
    """Return the explanation for a terminal."""
    weighing = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    weighing.add_column("component", no_wrap=True)
    for name in ("value", "* weight", "= part"):
        weighing.add_column(name, justify="right", no_wrap=True)
    for name, formula in it.components.items():
        cells = (f"{formula.value:.4f}", f"{formula.weight:.2f}", f"{formula.weighted:.4f}")
        weighing.add_row(name.replace("_", " "), *cells)
    weighing.add_row("sum", "", "", Text(f"{it.weighted_sum:.4f}", "bold"))

    formulas = Table.grid(padding=(0, 2, 0, 0))
    formulas.add_column(no_wrap=True)
    formulas.add_column()
    for name, formula in it.components.items():
        formulas.add_row(name.replace("_", " "), Text(formula.formula, "dim"))
        formulas.add_row("", Text(f"= {formula.numbers} = {formula.value:.6g}"))
    if it.nearest is not None:
        formulas.add_row("nearest trace", Text(clean(it.nearest.id)))

    steps = Table.grid(padding=(0, 2, 0, 0))
    steps.add_column(no_wrap=True)
    steps.add_column()
    steps.add_row("profile", Text(clean(f"{it.profile}, because {it.profile_because}")))
    for override in it.overrides:
        change = f"{override.before:.4f} -> {override.after:.4f}"
        steps.add_row("override", f"{override.name}: {change} ({override.rule})")
    if not it.overrides:
        steps.add_row("overrides", "none applies")
    clamped = it.score != it.before_clamp
    steps.add_row("clamp to 0..1", f"{it.before_clamp:.4f} -> {it.score:.4f}" if clamped else "changes nothing")
    sign, colour = (">=", "green") if it.decision == "accepted" else ("<", "red")
    verdict = Text(f"{it.score!r} {sign} {it.threshold:g} ({it.threshold_from}): ")
    steps.add_row(Text("score", "bold"), verdict.append(it.decision, f"bold {colour}"))
    for note in it.notes:
        steps.add_row(Text("note", "yellow"), Text(clean(note)))
    head = Text(clean(it.id), "bold")
    return Group(head, "", formulas, "", weighing, "", steps)


# -- where a problem is


def describe_problem(raw: bytes, error: InvalidTrace) -> str:
    """Return reason and message of an invalid trace, with the line (from 1) where it can be told."""
    line = _line_of(raw, error.path)
    text = f"{'' if line is None else f'line {line}: '}{error.reason}: {error.message}"
    if error.reason is Reason.NOT_JSON and _is_json(raw.partition(b"\n")[0]):
        text += "; these are JSON Lines: explain one of them, as in sed -n 1p FILE | kp-worker explain -"
    return text


def _is_json(raw: bytes) -> bool:
    try:
        _decoder.decode(raw)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return True


def _line_of(raw: bytes, path: str) -> int | None:
    """Return the line of a path such as steps.1.tool.name, or of what should hold it; None: the text has none."""
    try:
        text = raw.decode()
        json.loads(text)
    except UnicodeDecodeError as error:
        return raw.count(b"\n", 0, error.start) + 1
    except json.JSONDecodeError as error:
        return error.lineno
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return None
    return text.count("\n", 0, _position(text, path.split("."))) + 1 if path else None


def _position(text: str, path: list[str]) -> int:
    """Return the index of the value at `path` in a JSON text, or of the innermost value on the way that exists."""
    index = _skip(text, 0)
    for name in path:
        found = _members(text, index).get(name)
        if found is None:
            break
        index = found
    return index


def _members(text: str, index: int) -> dict[str, int]:
    """Return where the members of the object or array at `index` begin, by name (the last counts) or number."""
    decoder = json.JSONDecoder()
    found: dict[str, int] = {}
    kind = text[index]
    if kind not in "{[":
        return found
    index = _skip(text, index + 1)
    while text[index] not in "}]":
        name = str(len(found))
        if kind == "{":
            name, index = decoder.raw_decode(text, index)
            index = _skip(text, _skip(text, index) + 1)  # past the colon
        found[name] = index
        _, index = decoder.raw_decode(text, index)
        index = _skip(text, index)
        if text[index] == ",":
            index = _skip(text, index + 1)
    return found


def _skip(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\r\n":
        index += 1
    return index
