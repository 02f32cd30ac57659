"""A topic that is deleted while the worker is busy: it is named within seconds, whatever the topic and the delivery."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.contribute import Booth
from tests.support.kafka_fixtures import WorkerProcess, admin, committed, create_again, produce
from tests.support.registry import RegistryThread
from tests.support.stage import LINES, Stage, Workers
from worker.kafka.topics import CHANGELOG_CONFIG
from worker.lab.broker.embedded_kafka import EmbeddedKafka

SECONDS = 10.0
"""Within this time a worker must be not ready, and say why."""

DELIVERIES = ("exactly_once", "at_least_once")


@contextlib.contextmanager
def load(stage: Stage) -> Iterator[None]:
    """Publish traces and a few records that are none, all the time."""
    stop = threading.Event()

    def publish() -> None:
        for number in range(10**6):
            if stop.is_set():
                return
            lines = [*(LINES[(40 * number + i) % 1000] for i in range(40)), b"{"]
            produce(stage.bootstrap, stage.name, [(None, line, (), i % 2) for i, line in enumerate(lines)])
            stop.wait(0.1)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def busy(kafka: EmbeddedKafka, start: Workers, **settings: str) -> tuple[Stage, WorkerProcess]:
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="2", **settings)
    return stage, start(stage.env).wait_ready()


def delete(stage: Stage, name: str) -> float:
    """Delete a topic, and return when (s of the monotonic clock)."""
    admin(stage.bootstrap, lambda client: client.delete_topics([name]))
    return time.monotonic()


def create(stage: Stage, name: str, **configs: str) -> None:
    """Create a topic as soon as its deletion is done."""
    create_again(stage.bootstrap, name, (2, configs))


def not_ready(worker: WorkerProcess, since: float, words: str) -> str:
    """Return the body of /readyz when it says the words, or "" where the worker has ended before anybody asked."""
    while True:
        status, body = worker.readyz()
        if status == 503 and words in body:
            return body
        if worker.returncode is not None:
            return ""
        assert time.monotonic() - since < SECONDS, worker.log()
        time.sleep(0.05)


@pytest.mark.sample(2)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("again", [False, True])
def test_a_changelog_that_is_deleted_under_load_ends_the_worker(
    delivery: str, again: bool, kafka: EmbeddedKafka, hashing: Workers
) -> None:
    """Its entries are lost, also if another topic of the same name takes what the worker writes from then on."""
    stage, worker = busy(kafka, hashing, KP_DELIVERY=delivery)
    name = f"{stage.name}-novelty-changelog"
    with load(stage):
        stage.wait_committed(100)
        since = delete(stage, name)
        if again:
            create(stage, name, **CHANGELOG_CONFIG)
        not_ready(worker, since, name)  # or it has ended before anybody could ask
        assert time.monotonic() - since < SECONDS
        assert worker.wait(30) == 1
    last = worker.log().split("ERROR worker.commands.run: stopping: ")[1]
    assert f"topic {name} (KP_CHANGELOG_TOPIC)" in last
    assert ("created again" in last) == again
    hashing(stage.env).wait_ready()
    before = progress(stage)
    stage.produce([(None, line, (), 0) for line in LINES[:50]])
    stage.wait_committed(before + 50)


def progress(stage: Stage) -> int:
    return sum(committed(stage.bootstrap, stage.name, stage.name).values())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("delivery", "kind"), [*((each, "accepted") for each in DELIVERIES), ("exactly_once", "dead-letter")]
)
def test_an_output_that_is_deleted_under_load_is_named_until_it_is_there_again(
    delivery: str, kind: str, kafka: EmbeddedKafka, hashing: Workers
) -> None:
    stage, worker = busy(kafka, hashing, KP_DELIVERY=delivery)
    name = f"{stage.name}.{kind}"
    with load(stage):
        stage.wait_committed(100)
        since = delete(stage, name)
        assert f"deleted: topic {name} (KP_" in not_ready(worker, since, name)
        assert worker.get("/healthz")[0] == 200
        assert f"ERROR worker.kafka.topic_watch: deleted: topic {name} (KP_" in worker.log()
        create(stage, name)
        worker.wait_ready()
        stage.wait_committed(progress(stage) + 100)
    assert worker.returncode is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_worker_that_ends_for_a_missing_output_says_so(delivery: str, kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage, worker = busy(kafka, hashing, KP_DELIVERY=delivery, KP_TRANSACTION_TIMEOUT_SECONDS="8")
    name = stage.env["KP_REJECTED_TOPIC"]
    with load(stage):
        stage.wait_committed(100)
        since = delete(stage, name)
        not_ready(worker, since, name)
        assert worker.wait(60) == 1
    last = worker.log().split("ERROR worker.commands.run: stopping: ")[1]
    assert last.startswith(f"TopicLostError: deleted: topic {name} (KP_REJECTED_TOPIC); create it again")


def test_a_source_that_is_deleted_is_named_and_another_one_is_read_from_its_oldest_record(
    kafka: EmbeddedKafka, hashing: Workers
) -> None:
    """A worker without partitions is no ready worker, and offsets of the old topic mean nothing on the new one."""
    stage, worker = busy(kafka, hashing)
    stage.produce([(None, line, (), 0) for line in LINES[:20]])
    stage.wait_committed(20)
    since = delete(stage, stage.name)
    assert f"deleted: topic {stage.name} (KP_SOURCE_TOPIC)" in not_ready(worker, since, "deleted")
    create(stage, stage.name)
    assert worker.wait(30) == 1
    assert f"topic {stage.name} (KP_SOURCE_TOPIC) was deleted and created again" in worker.log()
    stage.produce([(None, line, (), 0) for line in LINES[:7]])
    hashing(stage.env).wait_ready()
    stage.wait_committed(7)


def test_contribute_names_a_deleted_topic(kafka: EmbeddedKafka, workers: Workers) -> None:
    with RegistryThread() as registry:
        booth = Booth(kafka.bootstrap_servers, registry)
        contributor = workers(booth.env, ("contribute",)).wait_ready()
        stage = Stage(kafka)
        since = delete(stage, booth.refused)
        words = f"deleted: topic {booth.refused} (KP_REFUSED_TOPIC)"
        assert words in not_ready(contributor, since, words)
        assert words in contributor.log()
        create(stage, booth.refused)
        contributor.wait_ready()
        delete(stage, booth.accepted)
        create(stage, booth.accepted)
        assert contributor.wait(60) == 1
        assert f"topic {booth.accepted} (KP_ACCEPTED_TOPIC) was deleted and created again" in contributor.log()
