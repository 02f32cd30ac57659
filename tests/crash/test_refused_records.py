"""Records that a topic refuses for good: a crash at each step of a refusal changes nothing."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.crash_worker import REFUSAL_STEPS
from tests.support.kafka_fixtures import produce
from tests.support.refused_records import STRICT, program, results, run, scoring, stage_of
from tests.support.stage import Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_crash_at_each_step_of_a_refusal_changes_nothing(
    kafka: EmbeddedKafka, workers: Workers, seed: int, long: bool, delivery: str, how: str
) -> None:
    """One worker after the other on the same topics; each finds the same refused records again, and goes on."""
    steps = [step for step in REFUSAL_STEPS if delivery == "exactly_once" or step != "aborted"]
    if not long and how == "raise":  # kills at all steps, exceptions at two of them
        chosen = random.Random(seed).sample(steps, 2)
        steps = [step for step in steps if step in chosen]
    strict, plain = (
        stage_of(kafka, config, KP_DELIVERY=delivery, KP_COMMIT_INTERVAL_SECONDS="0") for config in (STRICT, {})
    )
    now = int(time.time() * 1000)
    records = [record for _, record in program()][: 40 * (len(steps) + 1)]
    for number, step in enumerate([*steps, ""]):
        for stage in (strict, plain):
            rows = list(enumerate(records))[40 * number : 40 * (number + 1)]
            produce(stage.bootstrap, stage.name, [(k, v, h, 0, now + n + later) for n, (k, v, h, later) in rows])
        worker = workers(
            {**strict.env, "TEST_CRASH_AT": f"{step}:1:{how}" if step else ""}, module="tests.support.crash_worker"
        )
        if step:
            assert worker.wait() == (-9 if how == "kill" else 1), worker.log()
            assert f"TEST crash at {step}" in worker.log()
    strict.wait_committed(len(records))
    run(plain, workers, len(records))
    found, expected = results(strict), results(plain)
    assert set(found) == set(expected) == {(0, n) for n in range(len(records))}
    for place, each in found.items():
        assert delivery == "at_least_once" or len(each) == 1
        assert len({kind for kind, _ in each}) == 1, "scored or a dead letter, each time the same"
        for kind, record in each:
            if kind != "dead-letter":
                assert scoring(record) == scoring(expected[place][0][1])
