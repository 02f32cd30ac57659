"""Kafka is gone while nothing is to be done: each process says so within the session timeout, and goes on later."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.assemble import Workshop
from tests.support.contribute import Booth
from tests.support.kafka_fixtures import WorkerProcess, wait_until
from tests.support.registry import RegistryThread
from tests.support.sessions import VALUES
from tests.support.stage import LINES, Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka

GONE, BACK = "no broker has answered for ", "a broker answers again, after "


def _cut_off(metrics: Mapping[str, float]) -> bool:
    """Whether the process is not ready, and gives no lag: nobody knows it."""
    return not any("_lag" in name for name in metrics) and not any(
        metrics[name] for name in metrics if "_ready" in name
    )


def check_outage(
    processes: Sequence[WorkerProcess], follower: WorkerProcess, times: int, end: Callable[[], None]
) -> None:
    """Wait until each process says that no broker answers, end the outage, and wait until each goes on."""
    since = time.monotonic()
    for process in processes:
        process.wait_words(GONE)
        assert process.get("/readyz")[0] == 503
        assert process.get("/healthz")[0] == 200
    assert time.monotonic() - since < 30
    for process in processes:  # the gauges follow within a second
        assert wait_until(lambda process=process: _cut_off(process.metrics())), process.metrics()  # type: ignore[misc]
    assert wait_until(lambda: follower.log().count(GONE) == times), follower.log()
    end()
    for process in (*processes, follower):
        assert wait_until(lambda process=process: process.log().count(BACK) == times), process.log()  # type: ignore[misc]
        assert process.log().count(GONE) == times, process.log()
    for process in processes:
        process.wait_ready()


def test_processes_without_work_say_that_no_broker_answers(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    with EmbeddedKafka() as own_broker, RegistryThread() as registry:
        stage = Stage(own_broker)
        workshop, booth = Workshop(own_broker.bootstrap_servers), Booth(own_broker.bootstrap_servers, registry)
        worker = workers(stage.env)
        processes = [worker, workers(booth.env, ("contribute",)), workers(workshop.env, ("assemble",))]
        for process in processes:
            process.wait_ready()
        assert wait_until(lambda: 'kp_consumer_lag{partition="0"}' in worker.metrics())
        follow = ("publish", "--from", "claude-code", "--follow", str(tmp_path / "sessions"), *VALUES)
        follower = workers(stage.env, follow)
        follower.wait_log("following ")
        own_broker.pause_node(0)
        check_outage(processes, follower, 1, lambda: own_broker.resume_node(0))
        own_broker.kill_node(0)
        check_outage(processes, follower, 2, lambda: own_broker.start_node(0))
        stage.produce([(None, line, (), 0) for line in LINES[:20]])
        stage.wait_committed(20)
        assert all(process.returncode is None for process in (*processes, follower))


def test_one_broker_of_three_that_is_gone_is_no_outage(cluster: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(cluster, KP_TOPIC_REPLICATION="3")
    worker = workers(stage.env).wait_ready()
    for node in range(3):
        cluster.pause_node(node)
        time.sleep(10)  # longer than the session timeout: two of three brokers answer in turn
        cluster.resume_node(node)
        worker.wait_ready()
    assert GONE not in worker.log()
