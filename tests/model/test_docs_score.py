"""The similarity in docs/how-a-score-comes-about.md, by the real model."""

import json

import pytest

from tests.support.processes import run_command
from tests.support.score_page import EARLIER, HALF, SIMILARITY, scored
from tests.support.surroundings import DOCS, environment


def test_the_model_finds_that_similarity() -> None:
    done = run_command("worker", ["score", str(DOCS / "examples/two-traces.jsonl")], environment())
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line)["scoring"] for line in done.stdout.splitlines())
    assert first["nearest"] is None
    assert second["nearest"]["id"] == EARLIER.id
    assert second["nearest"]["similarity"] == pytest.approx(SIMILARITY, abs=HALF)
    results = scored()
    assert [first["score"], second["score"]] == pytest.approx([it.score for it in results], abs=HALF)
