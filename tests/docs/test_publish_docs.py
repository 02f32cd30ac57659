"""The table of docs/publishing.md names every reason for a dead letter."""

from __future__ import annotations

import re

from tests.support.surroundings import DOCS
from worker.core.trace import Reason

DOCUMENT = (DOCS / "publishing.md").read_text("utf-8")


def test_every_reason_for_a_dead_letter_is_explained() -> None:
    table = DOCUMENT.split("## What becomes a dead letter")[1]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(Reason)
