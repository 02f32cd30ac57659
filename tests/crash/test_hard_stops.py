"""Stops at awkward moments that no step of crash_worker covers: topics half made, two redrives at once."""

from __future__ import annotations

import random
import time
from itertools import islice

import pytest

from tests.support import oracle
from tests.support.chaos import settings, traces, wait_settled
from tests.support.commands import Desk, header
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import WorkerProcess, produce, wait_until
from tests.support.stage import Workers
from worker.core.trace import Reason
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(600)


def test_killed_while_it_creates_its_topics(kafka: EmbeddedKafka, seed: int, long: bool, workers: Workers) -> None:
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
        second.finish()
        assert not oracle.check(kafka.bootstrap_servers, env, hash_vector).problems()


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
