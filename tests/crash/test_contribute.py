"""`contribute` is killed, and the registry fails and restarts: each trace is there in the end, no id twice, no 429."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.contribute import Trial, crash_run
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.mark.timeout(600)
def test_kills_restarts_and_faults_lose_nothing_and_cause_no_429(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    """With an idempotency store or without one, by the seed."""
    some = Trial(traces=150, kills=2, restarts=1, idempotency=seed % 2 == 0, seconds=6)
    trial = replace(some, traces=1000, kills=8, restarts=4, seconds=45) if long else some
    problems = crash_run(kafka, tmp_path, seed, trial)
    assert not problems
