"""`assemble` is killed, processes join and leave: each run gives its trace once, with the bytes of an undisturbed run.

`make assemble-crash` is the same with more of everything, and with restarts of the broker.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tests.support.assemble import Trial, crash_run, made_records
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_kills_joins_and_leaves_lose_no_run_and_repeat_none(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    rng = random.Random(seed)
    some = Trial(kills=3, joins=2)
    trial = replace(some, kills=8, joins=4, seconds=40) if long else some
    problems = crash_run(kafka.bootstrap_servers, tmp_path, rng, made_records(rng, 400 if long else 120), trial)
    assert not problems
