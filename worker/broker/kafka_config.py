"""A node's configuration files: server.properties, and log4j2.properties.

Lives here: the files that Kafka reads at start. Must not live here: processes (kafka_node.py), free
ports (ports.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.broker.ports import HOST

# No output in normal operation: the two loggers below would warn at each first start and while another node is down.
LOG4J2 = """\
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c{1} - %m%n
logger.controller.name = org.apache.kafka.controller.QuorumController
logger.controller.level = error
logger.network.name = org.apache.kafka.clients.NetworkClient
logger.network.level = error
"""

_TUNING = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",  # lets a test notice a dead member quickly
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "share.coordinator.state.topic.num.partitions": "1",
    "log.cleaner.dedupe.buffer.size": "4194304",  # the default of 128 MB would be half the heap
    "log.cleaner.backoff.ms": "1000",  # compacts within a second, where the topic's own settings allow it
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",  # until then a killed node's partitions do not move, and it cannot return
    "num.network.threads": "2",
    "num.io.threads": "4",
}


def server_properties(
    node_id: int,
    ports: Sequence[Mapping[str, int]],
    protocols: Mapping[str, str],
    log_dir: Path,
    overrides: Mapping[str, str],
) -> dict[str, str]:
    """Return the server.properties of one node.

    ports: listener name -> port, for each node; protocols: listener name -> security protocol. Both contain
    PLAINTEXT (clients and brokers) and CONTROLLER. Overrides win; advertised.listeners follows the
    resulting listeners unless it is overridden itself.
    """
    replicas = min(3, len(ports))
    in_sync = 2 if replicas == 3 else 1
    properties = {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": ",".join(f"{i}@{HOST}:{p['CONTROLLER']}" for i, p in enumerate(ports)),
        "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in ports[node_id].items()),
        "listener.security.protocol.map": ",".join(f"{name}:{p}" for name, p in protocols.items()),
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(log_dir),
        "default.replication.factor": str(replicas),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.replication.factor": str(replicas),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        **_TUNING,
        **overrides,
    }
    if "advertised.listeners" not in overrides:
        controllers = properties["controller.listener.names"].split(",")
        listeners = properties["listeners"].split(",")
        clients = [item for item in listeners if item.split("://")[0] not in controllers]
        properties["advertised.listeners"] = ",".join(clients)
    return properties


def java_properties(properties: Mapping[str, str]) -> bytes:
    """Write Java's .properties format: Latin-1, escapes for the rest, backslashes and line ends (PEM!) escaped."""
    lines = (f"{k}={v}".replace("\\", "\\\\").replace("\n", "\\n") + "\n" for k, v in properties.items())
    return "".join(lines).encode("latin-1", "backslashreplace")
