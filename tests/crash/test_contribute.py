"""`contribute` is killed, and the registry fails and restarts: each trace is there in the end, no id twice, no 429.

`make contribute-crash` is the same with 10,000 traces.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.contribute import Trial, crash_run
from worker.broker.embedded_kafka import EmbeddedKafka


@pytest.mark.parametrize("idempotency", [True, False])
def test_kills_restarts_and_faults_lose_nothing_and_cause_no_429(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, idempotency: bool
) -> None:
    trial = Trial(traces=300, kills=3, restarts=2, processes=2, idempotency=idempotency, seconds=15)
    judgement = crash_run(kafka.bootstrap_servers, tmp_path, seed, trial)
    print(judgement)
    assert not judgement.problems()
