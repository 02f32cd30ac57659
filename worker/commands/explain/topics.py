"""`kp-worker explain ID`: the trace that is found on the topics, explained from what is stored."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import msgspec
from rich.console import Console, RenderableType

from worker.commands.explain.found import ambiguous_text, letter_json, letter_text, not_found_text
from worker.commands.explain.parts import load_same_embedder, similarity_parts
from worker.commands.explain.search import Hit, Searched, about_source, search_outputs
from worker.commands.explain.steps import Explanation, SimilarityPart, explain_trace
from worker.commands.explain.target import ID_PREFIX, Wanted, WantedId, WantedSource, parse_target
from worker.commands.shared.console import CommandError, errors_for_the_user
from worker.commands.shared.session import Session, run_session
from worker.config import Settings
from worker.core.documents import rfc3339
from worker.core.trace import InvalidTrace, Limits, parse_trace


class LetterAnswer(NamedTuple):
    """What is said of a dead letter, in both forms."""

    json: str
    text: RenderableType


def explain_target(
    target: str, novelty: float | None, settings: Settings, *, parts: bool = False
) -> Explanation | LetterAnswer:
    """Find a trace on the topics and explain it; with `parts`, also what made it similar to its nearest one.

    Raises CommandError, ArgumentError for what can be no id or place.
    """
    found = _find(target, parse_target(target, settings), settings)
    if found[0].letter is not None:
        return LetterAnswer(letter_json(found[0].letter), letter_text(found[0], found[1:]))
    explanation = _explain_document(found, novelty, settings)
    if not parts or explanation.nearest is None:
        return explanation
    return msgspec.structs.replace(explanation, parts=_parts(found[0], explanation.nearest.id, settings))


def _parts(document: Hit, nearest: str, settings: Settings) -> list[SimilarityPart]:
    """Find the nearest trace, and take the similarity to it apart."""
    raw = document.record.value or b""
    embedder = load_same_embedder(settings, raw)
    scored = [hit for hit in _find(nearest, WantedId(nearest), settings) if hit.letter is None]
    if not scored:
        raise CommandError(f"--parts: the nearest trace {nearest} is a dead letter: its output was refused")
    limits = Limits(max_bytes=sys.maxsize, max_steps=sys.maxsize, max_depth=settings.max_depth)
    return similarity_parts(embedder, parse_trace(raw, limits), parse_trace(scored[0].record.value or b"", limits))


def _explain_document(found: list[Hit], novelty: float | None, settings: Settings) -> Explanation:
    """Explain the first of the records that are meant, and name the others."""
    document = found[0]
    raw = document.record.value or b""
    # It was scored: whatever limits hold now, they held when it was.
    limits = replace(settings.limits, max_bytes=len(raw), max_steps=sys.maxsize, strict_context=False)
    try:
        explanation = explain_trace(raw, settings, novelty, limits)
    except InvalidTrace as error:
        raise CommandError(f"{document.place}: {error.reason}: {error.message}") from None
    return msgspec.structs.replace(
        explanation,
        record=document.place,
        record_time=rfc3339(document.record.timestamp),
        also=[str(other.place) for other in found[1:]],
    )


def _find(target: str, wanted: Wanted, settings: Settings) -> list[Hit]:
    """Return the records of one trace, newest first. Raises CommandError where there is none, or several are meant."""
    searched = Searched()
    try:
        with errors_for_the_user():
            hits, note = run_session(_search(Session(settings), wanted, searched))
    except CommandError as error:
        if isinstance(wanted, WantedId) and not target.startswith(ID_PREFIX):
            raise error.adding(f"; there is no file {target}, so it was taken for a trace id") from None
        raise
    if not hits:
        raise CommandError(not_found_text(target, wanted, searched, note))
    if isinstance(wanted, WantedId):
        hits = [hit for hit in hits if hit.id == wanted.beginning] or hits
        if len({hit.id for hit in hits if hit.id is not None}) > 1:
            raise CommandError(ambiguous_text(target, hits))
    return hits


async def _search(session: Session, wanted: Wanted, searched: Searched) -> tuple[list[Hit], str]:
    """Return the records that are meant; where there is none, why the source topic has no such record, or ""."""
    with Console(stderr=True).status("searching") as status:

        def on_progress() -> None:
            status.update(f"searching, {searched.total:,} records so far; press Ctrl-C to stop")

        hits = await search_outputs(session, wanted, searched, on_progress)
    note = "" if hits or not isinstance(wanted, WantedSource) else await about_source(session, wanted)
    return hits, note
