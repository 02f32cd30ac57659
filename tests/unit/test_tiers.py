"""The folder of a test says what it may use, and what marks it has."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tier
from tests.support.surroundings import ROOT

TEST = """
import random

def test_it(kafka):
    pass

def test_chance(seed):
    assert random.Random(seed).random() < 0
"""


@pytest.mark.slow
def test_a_unit_test_that_asks_for_kafka_fails_with_words_and_a_seed_is_repeated(tmp_path: Path) -> None:
    sample = tmp_path / "tests" / "unit" / "test_sample.py"
    sample.parent.mkdir(parents=True)
    sample.write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", str(ROOT / "pyproject.toml"), "--seed", "4711", str(sample)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "tests/unit runs without Kafka, and this test asks for kafka: move it to tests/kafka" in done.stdout
    assert "repeat with --seed 4711" in done.stdout
    assert "1 failed, 1 error" in done.stdout, done.stderr


def test_the_folder_gives_the_marks(request: pytest.FixtureRequest) -> None:
    wanted = {"unit": set(), "docs": set(), "kafka": {"kafka"}, "crash": {"kafka", "crash"}, "model": {"model"}}
    for item in request.session.items:
        marks = {mark.name for mark in item.iter_markers()} & {"kafka", "crash", "model"}
        folder = tier(item.path)
        assert marks == wanted[folder] or (folder == "model" and marks == {"kafka", "model"}), item.nodeid
