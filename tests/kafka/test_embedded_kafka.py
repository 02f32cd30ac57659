"""The embedded broker: its jars, and its life through starts, crashes and stops."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.kafka_fixtures import consume_all, create_topics, produce, unique, wait_until
from worker.lab.broker import embedded_kafka, kafka_jars
from worker.lab.broker.embedded_kafka import KAFKA_VERSION, BrokerError, EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports


def processes_naming(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if text in line]


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
    assert wait_until(lambda: not processes_naming(str(directory)))
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
    assert wait_until(lambda: not processes_naming(str(tmp_path)))


def test_failed_start_shows_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    broker = EmbeddedKafka(data_dir=tmp_path, config={"num.io.threads": "none"})
    with pytest.raises(BrokerError, match=r"(?s)last lines of .*num\.io\.threads"):
        broker.start()
    assert wait_until(lambda: not processes_naming(str(tmp_path)))


def test_late_start_is_an_error(tmp_path: Path) -> None:
    broker = EmbeddedKafka(data_dir=tmp_path, start_timeout_s=0.01)
    with pytest.raises(BrokerError, match=r"0\.01 s"):
        broker.start()
    assert wait_until(lambda: not processes_naming(str(tmp_path)))


def test_fixed_port_and_port_in_use(kafka: EmbeddedKafka) -> None:
    port = free_ports(1)[0]
    with EmbeddedKafka(port=port) as broker:
        assert broker.bootstrap_servers == f"127.0.0.1:{port}"
        with pytest.raises(BrokerError, match=f"port {port} is in use"):
            EmbeddedKafka(port=port).start()
