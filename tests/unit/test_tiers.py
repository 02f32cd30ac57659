"""The folder of a test says what it may use, and what marks it has."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.imports import ROOT

TEST = """
import random

def test_it(kafka):
    pass

def test_chance(seed):
    assert random.Random(seed).random() < 0
"""


def run(tests: Path, *options: str) -> str:
    for folder in ("unit", "kafka", "crash", "model"):
        (tests / folder).mkdir(parents=True)
        (tests / folder / f"test_{folder}.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={tests}", "-c", str(ROOT / "pyproject.toml"), *options],
        cwd=tests, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_unit_test_that_asks_for_kafka_fails_with_words_and_a_seed_is_repeated_side_by_side(tmp_path: Path) -> None:
    text = run(tmp_path / "tests", "-n1", "--seed", "4711", "unit")
    assert "tests/unit runs without Kafka, and this test asks for kafka: move it to tests/kafka" in text
    assert "repeat with --seed 4711" in text
    assert "1 failed, 1 error" in text


def test_the_folder_gives_the_marks(tmp_path: Path) -> None:
    text = run(tmp_path / "tests", "--collect-only", "-m", "kafka and not crash and not model", ".")
    assert re.findall(r"^\w+/test_(\w+)\.py::(\w+)$", text, re.MULTILINE) == [
        ("kafka", "test_it"),
        ("kafka", "test_chance"),
        ("unit", "test_it"),
    ]
