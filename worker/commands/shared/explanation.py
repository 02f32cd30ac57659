"""The score of one trace, step by step: as values, and as tables for a terminal. For `explain` and the demo."""

import shlex
from types import SimpleNamespace

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from worker.commands.shared.shown import Pasted, PlainTable, columns, fixed, shown_score, shown_threshold
from worker.config import Settings
from worker.core.documents import ReadScoring, rfc3339
from worker.core.scoring import (
    COMPLEXITY,
    DEFAULT_PROFILE,
    FORMULAS,
    NEUTRAL_NOVELTY,
    OUTCOME_CONFIDENCE,
    TOOL_DIVERSITY,
    Profile,
    arithmetic,
    counted,
    near_miss,
    score_trace,
)
from worker.core.terminal import clean
from worker.core.trace import Limits, ReasoningTrace, created_at_ms, document_decoder, in_json_words, parse_trace
from worker.core.track_record import HALF, PRIOR_WEIGHT


def explain_trace(
    raw: bytes, settings: Settings, novelty: float | None = None, limits: Limits | None = None
) -> SimpleNamespace:
    """Explain the score of a trace, or of a scored document, as --json writes it. Raises InvalidTrace.

    A scored document is explained with its own novelty, confidence, profile and threshold; a bare trace with those of
    the settings, and `novelty` or 0.5. `limits`: by default the settings'.
    """
    trace = parse_trace(raw, limits or settings.limits)
    recorded, notes = _recorded(raw)
    profiles, novelty_from, nearest, recorded_score = settings.scoring_profiles(), "--novelty", None, None
    confidence = used = None
    if recorded is not None:
        default = profiles[DEFAULT_PROFILE]
        if recorded.weights != profiles.get(recorded.profile, default).weights:
            notes.append(
                f"the document was scored with other weights for {recorded.profile} than the current settings have"
            )
        profiles = {DEFAULT_PROFILE: default, recorded.profile: Profile(recorded.weights)}
        step, created = settings.stream_time_max_step_seconds, rfc3339(created_at_ms(trace))
        if step is not None and (compared := rfc3339(recorded.stream_time_ms)) < created:
            notes.append(
                f"it was compared at stream time {compared}, before its created_at ({created}): its record's timestamp "
                f"was earlier, or KP_STREAM_TIME_MAX_STEP_SECONDS ({step:g} now) limited it"
            )
        confidence = recorded.confidence
        used = None if confidence is None else confidence.used
    if novelty is None and recorded is not None:
        novelty, novelty_from, nearest = recorded.components.novelty, "the document", recorded.nearest
        recorded_score = recorded.score
    elif novelty is None:
        novelty, novelty_from = NEUTRAL_NOVELTY, "nothing to compare with"
        notes.append("novelty needs the worker's cache: 0.5 is the value for an empty cache; try --novelty")
    score = score_trace(trace, novelty, profiles, used)
    if recorded_score not in (None, score.score):
        notes.append(f"the document says {recorded_score!r}: it was changed after scoring, or scored differently")
    steps, counts = arithmetic(score.components, score.weights, score.overrides), counted(trace, used)
    threshold, threshold_from = settings.threshold, "KP_THRESHOLD"
    if recorded is not None:
        threshold, threshold_from = recorded.threshold, "the threshold stored with the trace"
    elif (own := profiles[score.profile].threshold) is not None:
        threshold, threshold_from = own, f"KP_PROFILES, {score.profile}"
    because = f"metadata.task_domain is {trace.metadata.task_domain!r}"
    if score.profile != trace.metadata.task_domain:
        near = near_miss(trace.metadata.task_domain, settings.scoring_profiles())
        because += ", which has no profile" + ("" if near is None else f" (did you mean {near!r}?)")
    numbers = {
        "complexity": COMPLEXITY.numbers(counts),
        "novelty": f"1 - {nearest.similarity:.6g}" if nearest else f"{novelty:.6g} ({novelty_from})",
        "tool_diversity": TOOL_DIVERSITY.numbers(counts),
        "outcome_confidence": OUTCOME_CONFIDENCE.numbers(counts),
    }
    return SimpleNamespace(
        id=trace.id,
        objective=trace.task.objective,
        counts=counts,
        novelty_from=novelty_from,
        nearest=nearest,
        task_domain=trace.metadata.task_domain,
        profile=score.profile,
        profile_because=because,
        components={
            name: SimpleNamespace(
                formula=words,
                numbers=numbers[name],  # the formula with the trace's numbers
                value=getattr(score.components, name),
                weight=getattr(score.weights, name),
                weighted=steps.parts[name],
            )
            for name, words in FORMULAS.items()
        },
        weighted_sum=steps.weighted_sum,
        overrides=steps.overrides,
        before_clamp=steps.before_clamp,
        score=score.score,
        threshold=threshold,
        threshold_from=threshold_from,
        decision="accepted" if score.score >= threshold else "rejected",
        recorded_score=recorded_score,  # in the document; None for a trace that is not scored, or with another novelty
        created_at=trace.metadata.created_at,
        stream_time=rfc3339(recorded.stream_time_ms) if recorded else None,
        source=recorded.source if recorded else None,
        notes=notes,
        record=None,  # the document's own place, if it comes from a topic
        record_time=None,  # its timestamp
        also=[],  # places of the same trace's other records, newest first
        confidence=confidence,  # of the document, with KP_CONFIDENCE=record
        used_from=None if confidence is None else _used_from(trace),  # in words
    )


def agrees(explained: SimpleNamespace) -> bool:
    """Return whether the document's own score follows from its figures; True if it has none."""
    return explained.recorded_score in (None, explained.score)


def _used_from(trace: ReasoningTrace) -> str:
    """Return how the outcome confidence follows with KP_CONFIDENCE=record, in words."""
    if not trace.metadata.success:
        return "the trace admits failure, so the stated confidence counts"
    if trace.outcome.evaluated is True:
        return "an evaluation says how the run ended, so the stated confidence counts"
    return (
        f"(successes + {PRIOR_WEIGHT} * prior) / (verdicts + {PRIOR_WEIGHT}), where a verdict's weight halves with "
        f"every {HALF} later ones; prior: the success rate of all agents' first verdicts"
    )


def _recorded(raw: bytes) -> tuple[ReadScoring | None, list[str]]:
    document = document_decoder.decode(raw)
    if "scoring" not in document:
        return None, []
    try:
        return msgspec.convert(document["scoring"], ReadScoring), []
    except msgspec.ValidationError as error:
        return None, [f"`scoring` is not kp-worker's ({in_json_words(str(error))}): treated as an unscored trace"]


# -- as tables


def explanation_text(explained: SimpleNamespace, options: str = "") -> RenderableType:
    """Return the explanation for a terminal; `options`: those that give a printed command the same settings."""
    objective = Text(clean(explained.objective), "dim", no_wrap=True, overflow="ellipsis")
    numbers = ("value", "* weight", "= part")
    weighting = columns("component", *numbers, right=numbers)
    for name, formula in explained.components.items():
        cells = (fixed(formula.value, 4), f"{formula.weight:.2f}", fixed(formula.weighted, 4))
        weighting.add_row(name.replace("_", " "), *cells)
    weighting.add_row("sum", "", "", Text(_score(explained, explained.weighted_sum), "bold"))
    parts: list[RenderableType] = [_formulas(explained), "", weighting, "", _steps(explained)]
    if explained.source or explained.record or explained.nearest:
        parts += ["", _places(explained, options)]
    return Group(Text(clean(explained.id), "bold"), objective, "", *parts)


def named_rows() -> PlainTable:
    """Return an empty table of names and their values."""
    table = PlainTable(
        box=None, padding=(0, 2, 0, 0), collapse_padding=True, show_header=False, show_edge=False, pad_edge=False
    )
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def _formulas(explained: SimpleNamespace) -> PlainTable:
    table = named_rows()
    for name, formula in explained.components.items():
        table.add_row(name.replace("_", " "), Text(formula.formula, "dim"))
        table.add_row("", Text(f"= {formula.numbers} = {fixed(formula.value, 3)}"))
    if (of := explained.confidence) is not None:
        table.add_row("confidence", Text(clean(f"{explained.used_from}"), "dim"))
        verdicts = f"verdicts on the agent in this domain: {of.judged}, successes: {of.succeeded:g}"
        table.add_row("", f"= {of.used:.6g} (stated: {of.stated:.6g}); {verdicts}")
    return table


def _steps(explained: SimpleNamespace) -> PlainTable:
    table = named_rows()
    table.add_row("profile", Text(clean(f"{explained.profile}, because {explained.profile_because}")))
    for override in explained.overrides:
        change = f"{_score(explained, override.before)} -> {_score(explained, override.after)}"
        table.add_row("override", f"{override.name}: {change} ({override.rule})")
    if not explained.overrides:
        table.add_row("overrides", "none applies")
    clamped = f"{_score(explained, explained.before_clamp)} -> {_score(explained, explained.score)}"
    table.add_row("clamp to 0..1", clamped if explained.score != explained.before_clamp else "changes nothing")
    sign, colour = (">=", "green") if explained.decision == "accepted" else ("<", "red")
    verdict = Text(f"{explained.score!r} {sign} {shown_threshold(explained.threshold)} ({explained.threshold_from}): ")
    table.add_row(Text("score", "bold"), verdict.append(explained.decision, f"bold {colour}"))
    for note in explained.notes:
        table.add_row(Text("note", "yellow"), Text(clean(note)))
    return table


def _score(explained: SimpleNamespace, value: float) -> str:
    return shown_score(value, explained.threshold, 4)


def _places(explained: SimpleNamespace, options: str) -> PlainTable:
    """Tabulate places and times of the verdict and its trace, and how to explain the nearest trace."""
    table = named_rows()
    if explained.record is not None:
        table.add_row("decision", Text(clean(str(explained.record))))
    for place in explained.also:
        table.add_row("also", Pasted(clean(f"kp-worker explain{options} {place}")))
    rows = {
        "source": explained.source, "created at": explained.created_at, "stream time": explained.stream_time,
        "record time": explained.record_time, "nearest": explained.nearest,
    }  # fmt: skip
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(clean(str(value))))
    if explained.nearest is not None and explained.record is not None:
        table.add_row("", Pasted(f"kp-worker explain{options} {shlex.quote(clean(explained.nearest.id))}"))
    return table
