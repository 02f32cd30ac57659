"""Fixtures of all tests: real Kafka, random seeds that can be repeated, and an environment without KP_ variables.

Builders of traces and records are plain functions, in tests/support/builders.py.
"""

import os
import random
import signal

import pytest

from tests.support.kafka_fixtures import cluster, hashing, kafka, workers

__all__ = ["cluster", "hashing", "kafka", "workers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat the random tests with the seed that a failure printed")


def pytest_configure() -> None:
    # A job in the background of a shell has SIGINT ignored, and so would the commands whose Ctrl-C is tested.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
