"""Records that a topic refuses for good: a crash at each step of a refusal changes nothing."""

import random
import time

import pytest

from tests.support.crash_worker import REFUSAL_STEPS
from tests.support.hostile import REFUSING, refused_program, results, scores, scoring, send, send_scored, stage_of
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
        stage_of(kafka, config, KP_DELIVERY=delivery, KP_COMMIT_INTERVAL_SECONDS="0") for config in (REFUSING, {})
    )
    now, program = int(time.time() * 1000), refused_program()
    sent = {}
    for number, step in enumerate([*steps, ""]):
        sent |= send(strict, program[40 * number : 40 * (number + 1)], now, 40 * number)
        worker = workers(
            {**strict.env, "TEST_CRASH_AT": f"{step}:1:{how}" if step else ""}, module="tests.support.crash_worker"
        )
        if step:
            assert worker.wait() == (-9 if how == "kill" else 1), worker.log()
            assert f"TEST crash at {step}" in worker.log()
    strict.wait_committed(len(sent))
    send_scored(plain, sent.values())
    workers(plain.env, module="tests.support.crash_worker").wait_ready()
    scored = [offset for offset, it in sent.items() if it.reason is None]
    plain.wait_committed(sum(it.reason != "not_json" for it in sent.values()))
    found, expected = results(strict), scores(results(plain), sent.values())
    assert set(found) == {(0, offset) for offset in sent}
    for (_, offset), each in found.items():
        assert delivery == "at_least_once" or len(each) == 1
        assert {kind == "dead-letter" for kind, _ in each} == {sent[offset].reason is not None}
    for offset, score in zip(scored, expected, strict=True):
        assert all(scoring(record) == score for _, record in found[0, offset])
