"""Fixtures of all tests: real Kafka, random seeds that can be repeated, and an environment without KP_ variables.

Builders of traces and records are plain functions, in tests/builders.py.
"""

import os
import random

import pytest

from tests.kafka_fixtures import cluster, kafka, workers

__all__ = ["cluster", "kafka", "workers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat the random tests with the seed that a failure printed")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A new seed for each test; pytest shows the line printed here when the test fails."""
    given: int | None = request.config.getoption("--seed")
    chosen = random.SystemRandom().randrange(2**32) if given is None else given
    print(f"repeat with --seed {chosen}")
    return chosen


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KP_"):
            monkeypatch.delenv(name)
