"""`assemble` is killed, processes join and leave: each run gives its trace once, with an undisturbed run's bytes."""

import random
from pathlib import Path

import pytest

from tests.support.assemble import Trial, crash_run, made_records
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.mark.timeout(600)
def test_kills_joins_and_leaves_lose_no_run_and_repeat_none(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    """In a long run the broker is restarted, too."""
    rng = random.Random(seed)
    trial = Trial(8, 4, restarts=1, seconds=60, grace=30, gap=80) if long else Trial(3, 2)
    assert not crash_run(kafka, tmp_path, seed, made_records(rng, 600 if long else 120), trial)
