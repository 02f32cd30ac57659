"""A crash at each step between "taken" and "committed", one worker after the other on the same topics."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import chaos, oracle
from tests.support.chaos import Fleet, settings, traces, wait_settled
from tests.support.crash_worker import STEPS, hash_vector
from tests.support.kafka_fixtures import WorkerProcess, create_topics, topic_id
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(900)

PARTITIONS = 2
LEG = 160
"""Records produced before each worker starts: enough for several transactions on each partition."""

TRANSACTIONAL = ("before_begin", "after_begin", "after_offsets", "committing")
MOST = {"starting": 1, "started": 1, "restored": 1, "embed": LEG // 2}
"""How often a worker certainly passes a step in one leg; 6 for the steps of a publication. Dead letters and texts that
are remembered do not pass the embedder."""


def step_settings(kafka: EmbeddedKafka, delivery: str, view: str = "whole") -> dict[str, str]:
    """Return settings with which a leg makes many transactions: traces do not gather, and take some time each."""
    return settings(
        kafka.bootstrap_servers,
        KP_DELIVERY=delivery,
        KP_EMBED_TEXT=view,
        KP_SESSION_TIMEOUT_SECONDS="2",
        KP_COMMIT_INTERVAL_SECONDS="0",
        KP_OUTPUT_EMBEDDING="true",
        TEST_EMBED_MS="1",
    )


def drawn(steps: Sequence[str], count: int, seed: int, long: bool) -> list[str]:
    """Return so many of the steps, in their order, by the seed; all of them in a long run.

    "after_sends" is always among them: only there a crash lies between the outputs and their offset for certain.
    """
    others = [step for step in steps if step != "after_sends"]
    chosen = steps if long else ["after_sends", *random.Random(seed).sample(others, count - 1)]
    return [step for step in steps if step in chosen]


def relay(
    kafka: EmbeddedKafka, logs: Path, seed: int, steps: Sequence[str], how: str, delivery: str, view: str,
    *, verdicts: bool = False,
) -> oracle.Report:  # fmt: skip
    """Let each worker crash at its step and the next one go on; judge what all of them left, and return the report."""
    rng = random.Random(seed)
    env = step_settings(kafka, delivery, view)
    env |= chaos.judging(env, logs) if verdicts else {}
    create_topics(kafka.bootstrap_servers, chaos.topics(env, PARTITIONS))
    records = traces(seed, PARTITIONS)
    if verdicts:
        identity = topic_id(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"])
        records = chaos.with_verdicts(seed, records, env["KP_SOURCE_TOPIC"], identity)
    ends: dict[int, int] = {}
    for step in [*steps, ""]:
        chaos.produce_some(env, records, LEG, ends)
        plan = f"{step}:{rng.randint(1, MOST.get(step, 6))}:{how}" if step else ""
        log = logs / f"{step or 'last'}.log"
        with WorkerProcess({**env, "TEST_CRASH_AT": plan}, log_path=log, module="tests.support.crash_worker") as worker:
            if step:
                code = worker.wait(90)
                assert f"TEST crash at {step} by {how}" in worker.log(), f"{plan}: ended by itself:\n{worker.log()}"
                assert code == (-9 if how == "kill" else 1), f"{plan}: {worker.log()}"
            else:
                assert wait_settled(kafka.bootstrap_servers, env, ends, 120), worker.log()
                worker.finish()
        print(f"{plan or 'the last one'}: {ends}")
    report = oracle.check(kafka.bootstrap_servers, env, hash_vector)
    print(report)
    assert not report.problems(at_least_once=delivery == "at_least_once")
    return report


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "view", "verdicts"),
    [("kill", "objective", False), ("raise", "whole", False), ("kill", "whole", True)],
    ids=["kill-objective", "raise-whole", "kill-with-verdicts"],
)
def test_exactly_once_survives_a_crash_at_each_step(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool, how: str, view: str, verdicts: bool
) -> None:
    """Kills at all steps; exceptions at four of them."""
    steps = list(STEPS) if how == "kill" else drawn([step for step in STEPS if step != "embed"], 4, seed, long)
    report = relay(kafka, tmp_path, seed, steps, how, "exactly_once", view, verdicts=verdicts)
    assert bool(report.judged) == verdicts
    assert report.source == LEG * (len(steps) + 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("how", "view"), [("kill", "whole"), ("raise", "objective")])
def test_at_least_once_survives_a_crash_at_each_step(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool, how: str, view: str
) -> None:
    steps = [step for step in STEPS if step not in TRANSACTIONAL and (how == "kill" or step != "embed")]
    steps = drawn(steps, 3, seed, long)
    report = relay(kafka, tmp_path, seed, steps, how, "at_least_once", view)
    assert report.source == LEG * (len(steps) + 1)
    assert report.duplicates > 0, "no crash hit between the outputs and the offset"


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_worker_that_was_frozen_at_each_step_does_no_harm_when_it_wakes(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool, delivery: str
) -> None:
    once = delivery == "exactly_once"
    steps = drawn([step for step in STEPS if once or step not in TRANSACTIONAL], 3 if once else 2, seed, long)
    env = step_settings(kafka, delivery)
    create_topics(kafka.bootstrap_servers, chaos.topics(env, PARTITIONS))
    rng = random.Random(seed)
    records = traces(seed, PARTITIONS)
    ends: dict[int, int] = {}

    for step in steps:
        plan = f"{step}:{rng.randint(1, MOST.get(step, 6))}:freeze"
        logs = tmp_path / step
        logs.mkdir()
        chaos.produce_some(env, records, LEG, ends)
        with Fleet(env, logs) as fleet:
            zombie = fleet.add(TEST_CRASH_AT=plan)
            process = zombie.process
            process.wait_log(f"crash at {step}", 90)
            chaos.produce_some(env, records, LEG, ends)
            fleet.add()
            assert wait_settled(kafka.bootstrap_servers, env, ends, 120), f"{plan}\n{fleet.tails()}"
            process.cont()
            chaos.produce_some(env, records, LEG, ends)
            assert wait_settled(kafka.bootstrap_servers, env, ends, 120), f"{plan}\n{fleet.tails()}"
            assert set(fleet.stop_all()) == {0}, f"{plan}\n{fleet.tails()}"
            print(f"{plan}: {ends}, the others' ends: {[event for event in fleet.exits if event.code]}")
    report = oracle.check(kafka.bootstrap_servers, env, hash_vector)
    print(report)
    assert not report.problems(at_least_once=not once)
