"""The pictures of docs/ have light and dark colours; a run of the benchmarks writes its figures into their page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.runs.benchmarks.page import update
from tests.support.surroundings import DOCS

BENCHMARKS = (DOCS / "benchmarks.md").read_text("utf-8")


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_and_dark_colours(path: Path) -> None:
    text = path.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert "prefers-color-scheme: dark" in text
    used, defined = set(re.findall(r"var\((--[\w-]+)\)", text)), re.findall(r"(--[\w-]+):", text)
    assert used == set(defined)
    assert all(defined.count(name) == 2 for name in used), "each colour is there in light and in dark"


def test_a_run_replaces_its_parts_of_the_page_and_nothing_else() -> None:
    rows = {"aiokafka loop with encode(), at least once": {"messages_s": [1.0, 3.0, 2.0]}}
    goal = {"part": "c", "goal": "faster", "values": [1.5], "limit": 1.2, "best": "min", "reached": True}
    page = update(BENCHMARKS, {"results": {"c": rows}, "goals": [goal]})
    gone, new = (
        set(BENCHMARKS.splitlines()) - set(page.splitlines()),
        set(page.splitlines()) - set(BENCHMARKS.splitlines()),
    )
    assert new == {
        "| c | faster | at least 1.2 | 1.5 | reached |",
        "| | messages s |",
        "|---|---|",
        "| aiokafka loop with encode(), at least once | 2 (1..3) |",
    }
    assert all(
        line.startswith(("| c |", "| worker, ", "| quix", "| aiokafka", "| | messages s | CPU us")) for line in gone
    )
    assert update(BENCHMARKS, {"results": {"z": rows}, "goals": []}) == BENCHMARKS
