"""The full crash run of the novelty scope `group`: `make group-test`. tests/crash has its short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import chaos
from tests.support.chaos import shuffled
from tests.support.group_chaos import run_group_chaos
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = [pytest.mark.timeout(3600), pytest.mark.kafka]


@pytest.mark.parametrize("forget", [False, True], ids=["remember", "forget"])
def test_twenty_kills_and_two_broker_restarts(kafka: EmbeddedKafka, tmp_path: Path, seed: int, forget: bool) -> None:
    chaos.quiet_clients()
    plan = shuffled(seed, sigkill=20, join=4, leave=4, restart_broker=2)
    run_group_chaos(kafka, tmp_path, seed, plan, records=8000, rate=25, workers=4, forget=forget, pause=(2, 10))
