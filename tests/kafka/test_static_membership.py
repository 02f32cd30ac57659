"""KP_GROUP_INSTANCE_ID on real Kafka: restarts without a rebalance, and what aiokafka leaves open about it."""

import re
import time
from typing import Any

import pytest
from aiokafka.admin import NewPartitions

from tests.support.kafka_fixtures import WorkerProcess, admin, wait_until
from tests.support.stage import LINES, Stage, Workers, origins
from worker.config import ConfigError, load
from worker.lab.broker.embedded_kafka import EmbeddedKafka


class Pair:
    """Two static members, the first of which leads the group."""

    def __init__(self, kafka: EmbeddedKafka, workers: Workers) -> None:
        self.stage = Stage(kafka, KP_SESSION_TIMEOUT_SECONDS="60")
        self._start = workers
        self._produced = 0
        self.members = [self.start(0), self.start(1)]
        self.wait_assigned(2, 2)

    def start(self, number: int) -> WorkerProcess:
        return self._start({**self.stage.env, "KP_GROUP_INSTANCE_ID": f"member-{number}"}).wait_ready()

    def wait_assigned(self, *wanted: int) -> None:
        def assigned() -> bool:
            return [member.metric("kp_assigned_partitions") for member in self.members] == list(wanted)

        assert wait_until(assigned, 90), "\n".join(member.log() for member in self.members)

    def produce(self, count: int, partitions: int = 4) -> None:
        self.stage.produce([(None, line, (), i % partitions) for i, line in enumerate(LINES[:count])])
        self._produced += count

    def check_outputs(self) -> None:
        self.stage.wait_committed(self._produced)
        taken = origins(self.stage)
        assert len(taken) == len(set(taken)) == self._produced


def generation(member: WorkerProcess) -> str:
    """Generation of the group at the member's last assignment; every rebalance makes a new one."""
    return re.findall(r"\(generation (\d+)\)", member.log())[-1]


def test_a_restart_causes_no_rebalance(kafka: EmbeddedKafka, workers: Workers) -> None:
    pair = Pair(kafka, workers)
    before = generation(pair.members[1])
    for number, end in enumerate((WorkerProcess.kill, WorkerProcess.terminate)):
        other = pair.members[1 - number]
        rebalances = other.metric("kp_rebalances_total")
        pair.produce(200)
        end(pair.members[number])
        pair.members[number].wait()
        pair.produce(200)
        pair.members[number] = pair.start(number)
        pair.wait_assigned(2, 2)
        assert generation(pair.members[number]) == before, other.log()
        assert other.metric("kp_rebalances_total") == rebalances, other.log()
    pair.check_outputs()


def test_partitions_that_came_while_the_leader_was_away_are_found(kafka: EmbeddedKafka, workers: Workers) -> None:
    pair = Pair(kafka, workers)
    pair.members[0].kill()
    admin(pair.stage.bootstrap, lambda client: client.create_partitions({pair.stage.name: NewPartitions(6)}))
    pair.members[0] = pair.start(0)
    pair.produce(600, partitions=6)
    pair.wait_assigned(3, 3)
    pair.check_outputs()


def test_of_two_workers_under_one_name_only_one_publishes(kafka: EmbeddedKafka, workers: Workers) -> None:
    pair = Pair(kafka, workers)
    frozen = pair.members[0]
    frozen.stop()
    heir = pair.members[0] = pair.start(0)
    pair.produce(200)
    pair.stage.wait_committed(200)
    frozen.cont()  # heartbeats under an unknown id, and joins again under the same name
    both: list[Any] = [frozen, heir]
    deadline = time.monotonic() + 60
    while all(worker.returncode is None for worker in both):
        assert time.monotonic() < deadline, frozen.log() + heir.log()
        pair.produce(20)
        time.sleep(0.5)
    fenced = [worker for worker in both if worker.returncode is not None]
    for worker in fenced:
        assert worker.returncode == 1
        assert "another worker has taken over the partition" in worker.log()
    if fenced == both:  # each has fenced the other; whatever restarts workers starts one again
        pair.members[0] = pair.start(0)
    pair.check_outputs()


def test_it_needs_transactions() -> None:
    with pytest.raises(ConfigError, match=r"KP_GROUP_INSTANCE_ID needs KP_DELIVERY=exactly_once"):
        load(group_instance_id="member-0", delivery="at_least_once")
    with pytest.raises(ConfigError, match=r"KP_GROUP_INSTANCE_ID='a b' is wrong"):
        load(group_instance_id="a b")
