"""The demo's output: tables of scored traces and dead letters, one explained score, one incident over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich import box
from rich.console import RenderableType
from rich.text import Text

from worker.commands.shared.shown import shown_score, shown_threshold
from worker.commands.shared.table import PlainTable
from worker.core.terminal import clean

Document = dict[str, Any]

STORY: Final = (
    "kp:trace:7310a055",
    "kp:trace:7c3a6bc1",
    "kp:trace:e949175c",
)
"""Beginnings of the ids of one incident reported three times: first, 39 minutes later, 69 minutes after that."""

COLOURS: Final = {"accepted": "green", "rejected": "red"}
COMPONENTS: Final = ("complexity", "novelty", "tool_diversity", "outcome_confidence")

WIDE: Final = 108
"""From this width on the overrides have a column: 26 after the others, which is the longest name."""


def position(document: Document) -> tuple[int, int]:
    """Return source partition and offset of a scored document."""
    source = document["scoring"]["source"]
    return source["partition"], source["offset"]


def dead_position(headers: Mapping[str, str]) -> tuple[int, int]:
    """Return source partition and offset of a dead letter, from its headers."""
    return int(headers["kp-source-partition"]), int(headers["kp-source-offset"])


def short(trace_id: str) -> str:
    """Return the part of a trace id that fits into a table."""
    return clean(trace_id.removeprefix("kp:trace:")[:8])


def _table(*names: str) -> PlainTable:
    # One blank between columns and no edges: all of it must fit into 100 columns.
    return PlainTable(*names, box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def scores_table(documents: Sequence[Document], width: int = 100) -> PlainTable:
    """Tabulate scored traces, a line between partitions; the overrides from WIDE columns on."""
    table = _table()
    cells = 12 if width >= WIDE else 11
    for name in ("id", "time", "domain"):
        table.add_column(name, no_wrap=True)
    for name in ("C", "N", "D", "O", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("decision", "nearest", "sim.", "overrides")[: cells - 8]:
        table.add_column(name, no_wrap=name != "overrides")
    for document, following in zip(documents, [*documents[1:], None], strict=True):
        last = following is not None and position(following)[0] != position(document)[0]
        table.add_row(*_row(document)[:cells], end_section=last)
    return table


def _row(document: Document) -> list[RenderableType]:
    scoring, metadata = document["scoring"], document["metadata"]
    nearest = scoring["nearest"]
    decision = Text(scoring["decision"], COLOURS[scoring["decision"]])
    # A resent text's novelty may lie 1e-7 below 0; the table should not say -0.00.
    parts = [Text(f"{scoring['components'][name] + 1e-6:.2f}") for name in COMPONENTS]
    if scoring["components"]["novelty"] < 0.3:
        parts[1].stylize("bold yellow")
    return [
        Text(short(document["id"])),
        clean(metadata["created_at"][11:16]),
        Text(clean(metadata["task_domain"][:16])),
        *parts,
        Text(shown_score(scoring["score"], scoring["threshold"]), "bold"),
        decision,
        Text(short(nearest["id"]) if nearest else "-"),
        f"{nearest['similarity']:.2f}" if nearest else "-",
        clean(", ".join(scoring["overrides"])),
    ]


def dead_letters_table(letters: Sequence[Mapping[str, str]]) -> PlainTable:
    """Tabulate dead letters by reason, path and message."""
    table = _table("at", "reason", "path", "message")
    for letter in letters:
        place = ":".join(map(str, dead_position(letter)))
        reason = Text(clean(letter["kp-error-reason"]), "yellow")
        path = letter["kp-error-path"]
        message = letter["kp-error-message"].removeprefix(f"{path}: ")
        table.add_row(place, reason, Text(clean(path) or "-"), Text(clean(message)))
    return table


def verdicts_table(rounds: list[dict[str, Document]]) -> PlainTable:
    """Tabulate the last scored run of each agent in each round."""
    table = _table("round", "agent", "says", "judged", "used", "score", "decision")
    for number, last in enumerate(rounds, 1):
        for agent, document in last.items():
            scoring = document["scoring"]
            said = scoring["confidence"]
            table.add_row(
                str(number) if agent == next(iter(last)) else "", agent, f"{said['stated']:.2f}",
                f"{said['succeeded']:.0f} of {said['judged']}", Text(f"{said['used']:.2f}", "bold"),
                f"{scoring['score']:.2f}", Text(scoring["decision"], COLOURS[scoring["decision"]]),
                end_section=agent != next(iter(last)) and number < len(rounds),
            )  # fmt: skip
    return table


def likeness(similarity: float) -> str:
    """Describe a cosine similarity."""
    words = ((0.9, "practically the same text"), (0.7, "the same topic in other words"), (0.4, "a related topic"))
    return next((text for least, text in words if similarity >= least), "hardly related")


def explanation(document: Document, others: Sequence[Document]) -> Text:
    """Explain one score: the arithmetic, the nearest trace, and the effect of novelty."""
    scoring = document["scoring"]
    weights, parts, score = scoring["weights"], scoring["components"], scoring["score"]
    threshold = scoring["threshold"]
    objective = clean(document["task"]["objective"])
    text = Text(f'{short(document["id"])}, {clean(scoring["profile"])} profile: "{objective}"\n')
    for name in COMPONENTS:
        product = parts[name] * weights[name]
        text.append(f"  {name.replace('_', ' '):<20}{parts[name]:.4f} x {weights[name]:.2f} = {product:.4f}\n")
    raw = sum(parts[name] * weights[name] for name in COMPONENTS)
    text.append(f"  {'sum':<29}     = {shown_score(raw, threshold, 4)}\n")
    for name in scoring["overrides"]:
        text.append(f"  override {clean(name)}\n")
    sign = ">=" if scoring["decision"] == "accepted" else "<"
    text.append(f"  {'score':<29}     = {shown_score(score, threshold, 4)} {sign} {shown_threshold(threshold)}: ")
    text.append(scoring["decision"] + "\n", COLOURS[scoring["decision"]])
    text.append(_about_nearest(document, others))
    return text


def _about_nearest(document: Document, others: Sequence[Document]) -> str:
    scoring = document["scoring"]
    nearest = scoring["nearest"]
    if nearest is None:
        why = "no embedder is configured" if scoring["embedder"] is None else "the cache was empty"
        return f"  Novelty is the neutral 0.5, because {why}."
    similarity = nearest["similarity"]
    text = f"  Nearest is {short(nearest['id'])}, similarity {similarity:.4f}: {likeness(similarity)}"
    known = next((other for other in others if other["id"] == nearest["id"]), None)
    if known is not None:
        text += f',\n  "{clean(known["task"]["objective"])}", {_minutes_between(known, document):.0f} minutes earlier'
    text += f".\n  Novelty = 1 - {similarity:.4f} = {scoring['components']['novelty']:.4f}."
    if not scoring["overrides"]:
        neutral = scoring["score"] + (0.5 - scoring["components"]["novelty"]) * scoring["weights"]["novelty"]
        told = shown_score(neutral, scoring["threshold"], 4)
        text += f"\n  With an empty cache (novelty 0.5) its score would be {told}."
    return text


def _minutes_between(first: Document, second: Document) -> float:
    times = (datetime.fromisoformat(document["metadata"]["created_at"]) for document in (second, first))
    return (next(times) - next(times)).total_seconds() / 60


def story(documents: Sequence[Document]) -> Text | None:
    """Return how the same incident, reported three times, was scored each time; None if it is missing."""
    told = [document for document in documents if document["id"].startswith(STORY)]
    if len(told) != len(STORY):
        return None
    text = Text()
    ids = {document["id"] for document in told}
    for number, document in enumerate(told):
        scoring = document["scoring"]
        text.append(f"  {document['metadata']['created_at'][11:16]}  {short(document['id'])}  ")
        score = shown_score(scoring["score"], scoring["threshold"])
        text.append(f"novelty {scoring['components']['novelty']:.2f}  score {score}  ")
        text.append(f"{scoring['decision']}  ", COLOURS[scoring["decision"]])
        text.append(_chapter(scoring, ids, first=number == 0) + "\n")
    text.right_crop(1)
    return text


def _chapter(scoring: Document, told: set[str], *, first: bool) -> str:
    if scoring["nearest"] is None:
        return "no embedder: novelty is neutral" if scoring["embedder"] is None else "the cache is still empty"
    if scoring["nearest"]["id"] in told:
        return f"seen before: similarity {scoring['nearest']['similarity']:.2f}"
    return "nothing similar in the cache" if first else "the others have expired: new again"
