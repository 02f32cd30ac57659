"""KP_EMBEDDER=http with real workers on a real Kafka: crashes, outages, rebalances, another model."""

import time
from collections.abc import Iterator

import pytest

from tests.support import chaos, oracle
from tests.support.crash_worker import hash_vector
from tests.support.embedding_service import MODEL, Answer, EmbeddingService
from tests.support.kafka_fixtures import WorkerProcess, create_topics, wait_until
from tests.support.stage import Workers
from worker.config import Settings
from worker.embed.http_embedder import MOST_REFUSED, PROBES
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PARTITIONS = 4


class Group:
    """A group's settings and topics, the service of its model, and the records that were produced."""

    def __init__(
        self, kafka: EmbeddedKafka, service: EmbeddingService, workers: Workers, seed: int, **settings: str
    ) -> None:
        self.bootstrap = kafka.bootstrap_servers
        self.env = chaos.settings(
            self.bootstrap, KP_EMBEDDER="http", KP_EMBEDDER_URL=service.url, KP_MODEL=MODEL, TEST_REAL_MODEL="1",
            **settings,
        )  # fmt: skip
        create_topics(self.bootstrap, chaos.topics(self.env, PARTITIONS))
        self._workers = workers
        self._records = chaos.traces(seed, PARTITIONS)
        self._ends: dict[int, int] = {}

    def start(self, crash: str = "", **settings: str) -> WorkerProcess:
        return self._workers({**self.env, **settings, "TEST_CRASH_AT": crash}, (), "tests.support.crash_worker")

    def produce(self, count: int = 200) -> None:
        chaos.produce_some(self.env, self._records, count, self._ends)

    def wait_settled(self, worker: WorkerProcess) -> None:
        assert chaos.wait_settled(self.bootstrap, self.env, self._ends, 60), worker.log()

    def check(self) -> None:
        report = oracle.check(self.bootstrap, self.env, hash_vector)
        assert report.source == sum(self._ends.values())
        assert not report.problems(), report


@pytest.fixture
def service() -> Iterator[EmbeddingService]:
    with EmbeddingService() as running:
        yield running


@pytest.fixture
def group(kafka: EmbeddedKafka, service: EmbeddingService, workers: Workers, seed: int) -> Group:
    return Group(kafka, service, workers, seed)


def wait_down(worker: WorkerProcess, words: str) -> None:
    """Wait until a worker is alive, and says that it waits for the service."""
    worker.wait_words(words)
    worker.wait_metric("kp_embedder_down", 1)
    assert (worker.get("/readyz")[0], worker.get("/healthz")[0]) == (503, 200)


def end(worker: WorkerProcess) -> None:
    started = time.monotonic()
    worker.finish()
    assert time.monotonic() - started < 15  # KP_SHUTDOWN_TIMEOUT_SECONDS is 20


def test_kills_and_outages_lose_nothing_and_publish_nothing_twice(group: Group, service: EmbeddingService) -> None:
    group.produce()
    killed = group.start("mid_sends:2:kill")
    assert killed.wait() == -9, killed.log()

    worker = group.start().wait_ready()
    group.wait_settled(worker)
    service.stop()
    group.produce()
    wait_down(worker, "the embedding service at")
    end(worker)

    worker = group.start()
    worker.wait_words("waiting for the embedding service at")
    service.start()
    worker.wait_ready()
    group.wait_settled(worker)
    worker.wait_metric("kp_embedder_down", 0)
    assert worker.metric("kp_embedder_texts_total") > 0
    assert worker.metric("kp_embedder_requests_total", result="answered") > 0
    end(worker)
    group.check()


def test_a_rebalance_during_an_outage_does_not_wait_for_its_end(group: Group, service: EmbeddingService) -> None:
    both = [group.start().wait_ready(), group.start().wait_ready()]
    assert wait_until(lambda: all(it.metric("kp_assigned_partitions") == 2 for it in both), 30)
    service.stop()
    group.produce()
    both[1].wait_words("the embedding service at")
    end(both[0])
    assert wait_until(lambda: both[1].metric("kp_assigned_partitions") == PARTITIONS, 20), both[1].log()
    service.start()
    group.wait_settled(both[1])
    end(both[1])
    group.check()


def test_a_gateway_that_refuses_texts_holds_them_and_a_bad_text_becomes_a_dead_letter(
    group: Group, service: EmbeddingService
) -> None:
    worker = group.start().wait_ready()
    service.fault = lambda texts: None if set(texts) <= set(PROBES) else (400, b"no", {})
    group.produce()
    wait_down(worker, "the service answers 400")
    assert worker.metric("kp_dead_letters_total", reason="embedding_failed") == 0
    service.fault = lambda texts: None
    group.wait_settled(worker)
    worker.wait_metric("kp_embedder_down", 0)
    group.check()

    bad: list[str] = []

    def refuse_the_first(texts: list[str]) -> Answer | None:
        bad.extend(texts[:1] if not bad else [])
        return (400, b"no", {}) if bad[0] in texts else None

    service.fault = refuse_the_first
    group.produce()
    group.wait_settled(worker)
    assert worker.metric("kp_dead_letters_total", reason="embedding_failed") == 1

    service.fault = lambda texts: None if texts[:4] == list(PROBES) else (413, b"no", {})
    group.produce()
    wait_down(worker, "one text after another is refused")
    service.fault = lambda texts: None
    group.wait_settled(worker)
    # Each may be of several equal traces. A text of each request that is open when the fault ends may be refused, too.
    refused = worker.log().count("refuses a text") - 1
    assert MOST_REFUSED <= refused <= MOST_REFUSED + Settings().embed_requests
    end(worker)


def test_another_model_under_the_same_name_is_refused(group: Group, service: EmbeddingService) -> None:
    group.produce(50)
    worker = group.start().wait_ready()
    group.wait_settled(worker)
    end(worker)
    service.salt = "another model"
    group.produce(50)
    worker = group.start()
    assert worker.wait() == 1, worker.log()
    assert "is not the one that made the cache" in worker.log()
    assert "KP_CHANGELOG_TOPIC" in worker.log()
    service.salt = ""
    worker = group.start().wait_ready()
    group.wait_settled(worker)
    end(worker)
    group.check()
