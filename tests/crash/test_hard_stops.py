"""Stops at awkward moments that no step of crash_worker covers: topics half made, a broker that hangs, two redrives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.support import chaos, oracle
from tests.support.chaos import Fleet, Load, settings, traces, wait_settled, wait_until
from tests.support.commands import Desk, header
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import WorkerProcess, create_topics, produce
from worker.core.trace import Reason
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(600)


def test_killed_while_it_creates_its_topics(
    kafka: EmbeddedKafka, seed: int, long: bool, workers: Callable[..., WorkerProcess]
) -> None:
    rng = random.Random(seed)
    for _ in range(3 if long else 1):
        env = settings(kafka.bootstrap_servers)
        worker = workers(env, module="tests.support.crash_worker")
        assert wait_until(lambda: "created topic" in worker.log(), 60, 0.002), worker.log()  # noqa: B023 called at once
        time.sleep(rng.uniform(0, 0.1))
        worker.kill()
        print(worker.log().count("created topic"), "topics were made")
        ends: dict[int, int] = {}
        second = workers(env, module="tests.support.crash_worker").wait_ready()
        for partition, offset in produce(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], islice(traces(seed, 4), 50)):
            ends[partition] = max(offset + 1, ends.get(partition, 0))
        assert wait_settled(kafka.bootstrap_servers, env, ends, 60), second.log()
        second.terminate()
        assert second.wait() == 0, second.log()
        assert not oracle.check(kafka.bootstrap_servers, env, hash_vector).problems()


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [4, 14])
def test_a_broker_that_hangs_and_goes_on(tmp_path: Path, seed: int, long: bool, seconds: int) -> None:
    """Shorter and longer than the session timeout of 6 s."""
    logs = tmp_path / "logs"
    logs.mkdir()
    chaos.quiet_clients()
    with EmbeddedKafka(data_dir=tmp_path / "kafka") as broker:
        env = settings(broker.bootstrap_servers, TEST_EMBED_MS="5")
        create_topics(broker.bootstrap_servers, chaos.topics(env))
        with Fleet(env, logs) as fleet:
            fleet.add()
            fleet.add()
            load = Load(broker.bootstrap_servers, env["KP_SOURCE_TOPIC"], traces(seed, 4), 1000 if long else 500, 60)
            load.start()
            for _ in range(2 if long else 1):
                wait_until(lambda: all(map(chaos.ready, fleet.running())), 60)
                time.sleep(2)
                broker.pause_node(0)
                time.sleep(seconds)
                broker.resume_node(0)
            ends = load.finish(300)
            assert wait_settled(broker.bootstrap_servers, env, ends, 120), fleet.tails()
            assert set(fleet.stop_all()) == {0}, fleet.tails()
            print("exits that nobody asked for:", fleet.unexpected())
        report = oracle.check(broker.bootstrap_servers, env, hash_vector)
        print(report)
        assert report.source == sum(ends.values())
        assert not report.problems()


def test_two_redrives_at_once_send_each_letter_exactly_once(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    desk.letters([(Reason.NOT_JSON, b"not a trace") for _ in range(60)])
    runs = [WorkerProcess(desk.env, ["redrive", "--execute"]) for _ in range(2)]
    codes = [run.wait() for run in runs]
    assert set(codes) <= {0, 1}
    for run, code in zip(runs, codes, strict=True):
        assert "Traceback" not in run.log(), run.log()
        assert code == 0 or "another redrive of group" in run.log(), run.log()
    assert desk.run("redrive", "--execute").returncode == 0
    assert sorted(int(header(record, "n")) for record in desk.read()) == list(range(60))
