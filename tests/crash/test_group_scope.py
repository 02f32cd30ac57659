"""Workers of the novelty scope `group` die at random moments; each nearest trace must be one that they could see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import chaos
from tests.support.chaos import shuffled
from tests.support.group_chaos import run_group_chaos
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(900)


@pytest.mark.sample(1, "scope")
def test_no_forgotten_neighbour_is_seen(kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool) -> None:
    chaos.quiet_clients()
    plan = shuffled(seed, sigkill=3 if long else 2, join=1)
    run_group_chaos(kafka, tmp_path, seed, plan, records=1000 if long else 600, rate=50, workers=2, forget=True)


@pytest.mark.sample(1, "scope")
def test_no_neighbour_is_seen_too_early_or_overlooked(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    chaos.quiet_clients()
    plan = shuffled(seed, sigkill=3 if long else 2, join=1, leave=1)
    run_group_chaos(kafka, tmp_path, seed, plan, records=1000 if long else 600, rate=50, workers=3)
