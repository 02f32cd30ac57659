"""The embedded broker through start, crash, pause and stop, and the helpers of the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

import tests.support.kafka_fixtures
from tests.support.kafka_fixtures import (
    Record,
    WorkerProcess,
    committed,
    consume_all,
    create_topics,
    produce,
    produce_async,
    unique,
)
from worker.lab.broker import embedded_kafka, kafka_jars
from worker.lab.broker.embedded_kafka import KAFKA_VERSION, BrokerError, EmbeddedKafka
from worker.lab.broker.ports import free_ports


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.05)


def processes_naming(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if text in line]


# --- server.properties --------------------------------------------------------------------------------------


# --- jars ---------------------------------------------------------------------------------------------------


def test_wrong_sha256_names_the_jar(tmp_path: Path) -> None:
    kafka_jars.install(kafka_jars.default_cache())
    source = kafka_jars.default_cache() / f"kafka-{KAFKA_VERSION}"
    copy = tmp_path / source.name
    copy.mkdir()
    for jar in source.glob("*.jar"):
        (copy / jar.name).symlink_to(jar)
    changed = copy / "slf4j-api-1.7.36.jar"
    content = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(content + b"\0")
    with pytest.raises(
        BrokerError, match=r"sha256 of slf4j-api-1\.7\.36\.jar is \w+, but the committed list of kafka-4"
    ):
        kafka_jars.install(tmp_path)


# --- one broker ---------------------------------------------------------------------------------------------


def test_compacted_topic_keeps_its_settings(kafka: EmbeddedKafka) -> None:
    topic = unique("compacted")
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "100"}
    create_topics(kafka.bootstrap_servers, {topic: (2, settings)})

    async def described() -> dict[str, str]:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
        await admin.start()
        try:
            answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        finally:
            await admin.close()
        return {entry[0]: entry[1] for answer in answers for entry in answer.resources[0][4]}

    assert settings.items() <= asyncio.run(described()).items()
    produce(kafka.bootstrap_servers, topic, [(b"k", str(i).encode(), (), 0) for i in range(50)])

    def compacted() -> bool:
        # A new record rolls the segment; what lies before the roll can be cleaned.
        produce(kafka.bootstrap_servers, topic, [(b"roll", b"", (), 0)])
        time.sleep(0.2)
        kept = [r.value for r in consume_all(kafka.bootstrap_servers, topic) if r.key == b"k"]
        return kept == [b"49"]

    eventually(compacted)


def test_produce_and_consume_keep_every_field(kafka: EmbeddedKafka) -> None:
    topic = unique("fields")
    create_topics(kafka.bootstrap_servers, {topic: 3})
    records = [
        Record(b"k", b"v", [("h", b"1"), ("h", b"2")], 2, 1_700_000_000_000),
        Record(b"gone", None, (), 0, 1_700_000_000_001),
        (b"k", b"w", (), 2),
    ]
    assert produce(kafka.bootstrap_servers, topic, records) == [(2, 0), (0, 0), (2, 1)]
    got = consume_all(kafka.bootstrap_servers, topic)
    assert [(r.partition, r.offset, r.key, r.value) for r in got] == [
        (0, 0, b"gone", None),
        (2, 0, b"k", b"v"),
        (2, 1, b"k", b"w"),
    ]
    assert got[1].headers == (("h", b"1"), ("h", b"2"))
    assert [r.timestamp for r in got[:2]] == [1_700_000_000_001, 1_700_000_000_000]


def test_existing_topic_is_an_error(kafka: EmbeddedKafka) -> None:
    topic = unique("twice")
    create_topics(kafka.bootstrap_servers, {topic: 1})
    with pytest.raises(Exception, match=topic):
        create_topics(kafka.bootstrap_servers, {topic: 1})


async def _transactions(bootstrap: str, topic: str, group: str) -> None:
    """Commit `a` with the group's offset 7, abort `b`, commit `c`, and read while `d` is open."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=unique("tx"))
    await producer.start()
    try:
        async with producer.transaction():
            await producer.send_and_wait(topic, b"a", partition=0)
            await producer.send_offsets_to_transaction({TopicPartition(topic, 0): 7}, group)
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"b", partition=0)
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"c", partition=0)
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"d", partition=0)
        values = [r.value for r in await asyncio.to_thread(consume_all, bootstrap, topic)]
        assert values == [b"a", b"c"]
        await producer.abort_transaction()
    finally:
        await producer.stop()


def test_transactions_hide_what_is_aborted_or_open(kafka: EmbeddedKafka) -> None:
    topic, group = unique("tx"), unique("group")
    create_topics(kafka.bootstrap_servers, {topic: 2})
    asyncio.run(_transactions(kafka.bootstrap_servers, topic, group))
    assert [r.value for r in consume_all(kafka.bootstrap_servers, topic)] == [b"a", b"c"]
    everything = [r.value for r in consume_all(kafka.bootstrap_servers, topic, "read_uncommitted")]
    assert everything == [b"a", b"b", b"c", b"d"]
    assert committed(kafka.bootstrap_servers, group, topic) == {0: 7}
    assert committed(kafka.bootstrap_servers, unique("group"), topic) == {}


def test_two_members_share_the_partitions(kafka: EmbeddedKafka) -> None:
    topic, group = unique("shared"), unique("group")
    create_topics(kafka.bootstrap_servers, {topic: 4})

    async def shares() -> list[int]:
        consumers = [
            AIOKafkaConsumer(
                topic, bootstrap_servers=kafka.bootstrap_servers, group_id=group, heartbeat_interval_ms=200
            )
            for _ in range(2)
        ]
        await asyncio.gather(*(consumer.start() for consumer in consumers))
        try:
            async with asyncio.timeout(60):
                while [len(consumer.assignment()) for consumer in consumers] != [2, 2]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            return [len(consumer.assignment()) for consumer in consumers]
        finally:
            await asyncio.gather(*(consumer.stop() for consumer in consumers))

    assert asyncio.run(shares()) == [2, 2]


# --- life of a node -----------------------------------------------------------------------------------------


def test_stop_and_kill_keep_data_and_address(tmp_path: Path) -> None:
    topic = unique("kept")
    with EmbeddedKafka(data_dir=tmp_path) as broker:
        address = broker.bootstrap_servers
        create_topics(address, {topic: 1})
        produce(address, topic, [(None, b"1")])
        started = time.monotonic()
        broker.stop_node(0)
        assert time.monotonic() - started < 20  # 0.2 s when idle; a shutdown that hangs takes 30
        assert not broker.alive(0)
        broker.start_node(0)
        produce(address, topic, [(None, b"2")])
        broker.kill_node(0)
        broker.start_node(0)
        assert broker.bootstrap_servers == address
        assert [r.value for r in consume_all(address, topic)] == [b"1", b"2"]
    with EmbeddedKafka(data_dir=tmp_path) as again:
        assert [r.value for r in consume_all(again.bootstrap_servers, topic)] == [b"1", b"2"]


def test_stop_leaves_no_process_and_no_data() -> None:
    broker = EmbeddedKafka().start()
    directory = broker.node_log(0).parent.parent
    pid = broker.pid(0)
    assert len(processes_naming(str(directory))) == 2  # JVM and watchdog
    broker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    eventually(lambda: not processes_naming(str(directory)))
    assert not directory.exists()
    broker.stop()  # again: nothing to do


PARENT = """
import time
from pathlib import Path
from worker.lab.broker.embedded_kafka import EmbeddedKafka
broker = EmbeddedKafka(data_dir=Path(__import__("sys").argv[1])).start()
print(broker.pid(0), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("paused", [False, True])
def test_broker_dies_with_a_killed_parent(tmp_path: Path, paused: bool) -> None:
    root = Path(embedded_kafka.__file__).parents[2]
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.getpgid(pid) != os.getpgid(parent.pid)  # Ctrl-C does not reach it
        if paused:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    eventually(lambda: not processes_naming(str(tmp_path)))


def test_paused_node_answers_after_resume() -> None:
    topic = unique("paused")
    with EmbeddedKafka() as broker:
        create_topics(broker.bootstrap_servers, {topic: 1})
        broker.pause_node(0)

        async def late() -> Any:
            sending = asyncio.create_task(produce_async(broker.bootstrap_servers, topic, [(None, b"1")]))
            await asyncio.sleep(1)
            assert not sending.done()
            broker.resume_node(0)
            return await sending

        assert asyncio.run(late()) == [(0, 0)]


def test_failed_start_shows_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    broker = EmbeddedKafka(data_dir=tmp_path, config={"num.io.threads": "none"})
    with pytest.raises(BrokerError, match=r"(?s)last lines of .*num\.io\.threads"):
        broker.start()
    eventually(lambda: not processes_naming(str(tmp_path)))


def test_late_start_is_an_error(tmp_path: Path) -> None:
    broker = EmbeddedKafka(data_dir=tmp_path, start_timeout_s=0.01)
    with pytest.raises(BrokerError, match=r"0\.01 s"):
        broker.start()
    eventually(lambda: not processes_naming(str(tmp_path)))


def test_fixed_port_and_port_in_use(kafka: EmbeddedKafka) -> None:
    port = free_ports(1)[0]
    with EmbeddedKafka(port=port) as broker:
        assert broker.bootstrap_servers == f"127.0.0.1:{port}"
        with pytest.raises(BrokerError, match=f"port {port} is in use"):
            EmbeddedKafka(port=port).start()


def test_sasl_listener_beside_the_plain_one() -> None:
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_kp="secret";'
    config = {
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.users.plain.sasl.jaas.config": login,
    }
    with EmbeddedKafka(listeners={"USERS": "SASL_PLAINTEXT"}, config=config) as broker:
        assert broker.bootstrap("USERS") != broker.bootstrap_servers
        create_topics(broker.bootstrap_servers, {"t": 1})

        async def send() -> int:
            async with AIOKafkaProducer(
                bootstrap_servers=broker.bootstrap("USERS"),
                security_protocol="SASL_PLAINTEXT",
                sasl_mechanism="PLAIN",
                sasl_plain_username="kp",
                sasl_plain_password="secret",
            ) as producer:
                return int((await producer.send_and_wait("t", b"v")).offset)

        assert asyncio.run(send()) == 0


# --- the worker as a process --------------------------------------------------------------------------------

STUB = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'up 1\\nseen_total{topic="b"} 2\\nseen_total{topic="a"} 3\\n')
print(os.environ["KP_NAME"], os.environ.get("KP_OUTSIDE"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(os.environ["KP_HTTP_PORT"])), Handler).serve_forever()
"""


def test_worker_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Callable[..., WorkerProcess]) -> None:
    (tmp_path / "kp_stub").mkdir()
    (tmp_path / "kp_stub" / "__main__.py").write_text(STUB)
    monkeypatch.setattr(tests.support.kafka_fixtures, "ROOT", tmp_path)
    monkeypatch.setenv("KP_OUTSIDE", "1")
    worker = workers({"KP_NAME": "stub"}, module="kp_stub", cold=True).wait_ready()
    assert worker.metrics() == {"up": 1, 'seen_total{topic="a"}': 3, 'seen_total{topic="b"}': 2}
    assert worker.metric("seen_total") == 5
    assert worker.metric("seen_total", topic="a") == 3
    assert worker.log().startswith("stub None\n")
    worker.stop()
    worker.cont()
    worker.terminate()
    assert worker.wait() == worker.returncode == -signal.SIGTERM
    (tmp_path / "kp_stub" / "__main__.py").write_text("raise SystemExit('no luck')")
    with pytest.raises(AssertionError, match=r"ended with 1 before it was ready:\nno luck"):
        workers({}, module="kp_stub", cold=True).wait_ready()


# --- three nodes --------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("node", range(3))
def test_three_nodes_survive_the_loss_of_any_one(cluster: EmbeddedKafka, node: int) -> None:
    topic = unique("replicated")
    create_topics(cluster.bootstrap_servers, {topic: 3})
    cluster.kill_node(node)
    produce(cluster.bootstrap_servers, topic, [(None, b"without it", (), p) for p in range(3)])
    cluster.start_node(node)
    produce(cluster.bootstrap_servers, topic, [(None, b"with it", (), p) for p in range(3)])
    values = sorted(r.value for r in consume_all(cluster.bootstrap_servers, topic))
    assert values == [b"with it"] * 3 + [b"without it"] * 3
