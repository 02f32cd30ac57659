"""What users see of a nearest trace's partition and offset: with the novelty scope `group` alone."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tests.support.builders import TextEmbedder, trace_bytes
from tests.support.schemas import VALIDATORS
from worker.commands.doctor.model import _findings
from worker.commands.score.lines import score_lines
from worker.commands.shared.explanation import explain_trace
from worker.commands.shared.explanation_view import explanation_text
from worker.commands.shared.scored_rows import TailRecord, rows
from worker.config import Settings

SCOPES = ("partition", "group")


def scored(scope: str) -> list[dict[str, Any]]:
    """Return the documents of two traces with the same text."""
    output = io.BytesIO()
    lines = b"\n".join(trace_bytes(f"kp:trace:{name}") for name in ("first", "second"))
    score_lines(io.BytesIO(lines), output, None, Settings(novelty_scope=scope), TextEmbedder(8))  # type: ignore[arg-type]
    return [json.loads(line) for line in output.getvalue().splitlines()]


def shown(renderable: Any, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_file_is_one_shared_cache_whose_partition_is_0(scope: str) -> None:
    first, second = scored(scope)
    assert first["scoring"]["nearest"] is None
    places = {"partition": 0, "offset": 0} if scope == "group" else {}
    similarity = pytest.approx(1.0)
    assert second["scoring"]["nearest"] == {"id": "kp:trace:first", "similarity": similarity, **places}
    assert not list(VALIDATORS["scored-trace"].iter_errors(second))


def test_the_schema_wants_both_fields_or_none() -> None:
    document = scored("group")[1]
    del document["scoring"]["nearest"]["offset"]
    assert list(VALIDATORS["scored-trace"].iter_errors(document))


@pytest.mark.parametrize("scope", SCOPES)
def test_explain_names_the_source_record_of_the_nearest_trace(scope: str) -> None:
    explanation = explain_trace(json.dumps(scored(scope)[1]).encode(), Settings())
    text = shown(explanation_text(explanation), 120)
    assert ("source partition 0 offset 0" in text) == (scope == "group")
    assert "kp:trace:first, similarity 1.0000" in text


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("width", [80, 120, None])
def test_tail_names_it_where_there_is_room(scope: str, width: int | None) -> None:
    record = TailRecord(None, scored(scope)[1], None)  # type: ignore[arg-type]  # its place is not shown
    text = shown(rows([record], width, header=True, only_dead_letters=False), width or 200)
    assert ("first    0:0" in text) == (scope == "group" and width != 80)
    assert "first" in text


def test_doctor_says_what_the_foreign_entries_weigh() -> None:
    identity = TextEmbedder(384).identity
    found = {it.check: it for it in _findings(Settings(novelty_scope="group"), identity, 0.1, 0.01)}
    assert found["group view"].message.startswith("at most 64000 entries of other partitions: ")
    assert "group view" not in {it.check for it in _findings(Settings(), identity, 0.1, 0.01)}
