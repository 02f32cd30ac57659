"""One Kafka node: its ports, its server.properties, its directory, and the JVM process that runs on it.

A node ends with its parent: the child forks a small watchdog, which blocks on a pipe whose write end only the parent
has, and then becomes the JVM by exec. However the parent dies, the pipe closes and the watchdog kills the JVM.
PR_SET_PDEATHSIG would be Linux only, and would fire even if only the starting *thread* ends. A node has its own
session, so Ctrl-C in the terminal reaches only the worker, which can drain first.
"""

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.lab.broker.kafka_jars import JAVA_25, BrokerError, Runtime

HOST = "127.0.0.1"
# Below the ephemeral ranges of Linux (32768-) and macOS (49152-): in those an outgoing connection could take the port
# before the process listens, or while a node is down.
PORT_RANGE = range(20_000, 32_000)

_given: deque[int] = deque(maxlen=500)
"""The ports returned last: their users may not listen yet."""


def free_ports(count: int) -> list[int]:
    """Return this many free random ports, none of them among the last 500 returned. Raises BrokerError."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORT_RANGE, len(PORT_RANGE)):
        if len(ports) == count:
            _given.extend(ports)
            return ports
        if port not in _given and is_free(port):
            ports.append(port)
    raise BrokerError(f"no {count} free ports in {PORT_RANGE}")


def is_free(port: int) -> bool:
    """Return whether a process can listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the broker: TIME_WAIT counts as free
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# No output in normal operation: these two loggers would warn at each first start and while another node is down.
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
    "log.cleaner.backoff.ms": "1000",  # compacts within a second, if the topic's own settings allow it
    "broker.heartbeat.interval.ms": "500",
    "metadata.max.idle.interval.ms": "0",  # no record twice a second that says nothing: a quarter of what idling takes
    "broker.session.timeout.ms": "3000",  # until then a killed node's partitions do not move, and it cannot rejoin
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

    `ports`: listener name -> port, for each node; `protocols`: listener name -> security protocol. Both contain
    PLAINTEXT (clients and brokers) and CONTROLLER. `overrides` win; advertised.listeners follows the resulting
    listeners unless it is overridden itself.
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
    controllers, listeners = properties["controller.listener.names"].split(","), properties["listeners"].split(",")
    clients = [item for item in listeners if item.split("://")[0] not in controllers]
    return {"advertised.listeners": ",".join(clients), **properties}


def java_properties(properties: Mapping[str, str]) -> bytes:
    """Return Java's .properties format: Latin-1 with escapes; backslashes and line ends (PEM!) are escaped."""
    lines = (f"{k}={v}".replace("\\", "\\\\").replace("\n", "\\n") + "\n" for k, v in properties.items())
    return "".join(lines).encode("latin-1", "backslashreplace")


STOP_TIMEOUT_S = 30.0  # 0.2 s on an idle machine; then SIGKILL, which costs a log recovery at the next start

# The child: start a watchdog, then become the JVM. The watchdog is the JVM's child, so getppid() shows whether the JVM
# still runs: it can never kill another process that got the same pid.
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
    "-Xms48m",  # 155 MB resident; by default the JVM starts with 1/64 of the machine's memory and takes 325 MB
    "-XX:-UsePerfData",
    "-XX:+IgnoreUnrecognizedVMOptions",  # the next ones are diagnostic: other JREs may not have them
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-AOTAdapterCaching",  # with stubs in the class cache, Java 25 warns of wrong links
    "-XX:-AOTStubCaching",
]

# An older JVM refuses to start with these.
_JAVA_25_FLAGS = [
    "--sun-misc-unsafe-memory-access=allow",  # no warning about Kafka's use of Unsafe
    "-Xlog:aot*=off",
]


def java_command(runtime: Runtime) -> list[str]:
    """Return the JVM with the flags that make Kafka's programs start quickly, and with the class cache."""
    flags = [*_JVM_FLAGS, *(_JAVA_25_FLAGS if runtime.jre.version >= JAVA_25 else ())]
    if runtime.aot_cache.exists() and runtime.aot_cache.stat().st_size:
        flags.append(f"-XX:{runtime.class_cache_options[1]}={runtime.aot_cache}")
    return [str(runtime.jre.java), *flags]


class KafkaNode:
    """A combined broker and controller node. It keeps its ports and data between starts."""

    def __init__(
        self, number: int, directory: Path, runtime: Runtime, *, heap_mb: int, jvm_flags: Sequence[str] = ()
    ) -> None:
        self.log = directory / "node.log"
        self.listeners: Mapping[str, str] = {}
        """The advertised listeners: name -> host:port."""
        self._number = number
        self._directory = directory
        self._runtime = runtime
        self._heap_mb = heap_mb
        self._jvm_flags = tuple(jvm_flags)
        self._probe = ""  # host:port of a listener without TLS or SASL
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """Return the directory of the node's log segments."""
        return self._directory / "data"

    @property
    def alive(self) -> bool:
        """Return whether the process runs (even if paused)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the process id. Raises BrokerError if the node does not run."""
        if self._process is None or not self.alive:
            raise BrokerError(f"node {self._number} is not running")
        return self._process.pid

    def write_files(self, properties: Mapping[str, str]) -> None:
        """Write the configuration files, given server.properties."""
        (self._directory / "tmp").mkdir(parents=True, exist_ok=True)
        (self._directory / "server.properties").write_bytes(java_properties(properties))
        (self._directory / "log4j2.properties").write_text(LOG4J2)
        protocol = dict(p.split(":") for p in properties["listener.security.protocol.map"].split(","))
        self.listeners = dict(item.split("://", 1) for item in properties["advertised.listeners"].split(","))
        self._probe = next(address for name, address in self.listeners.items() if protocol.get(name) == "PLAINTEXT")

    def start_format(self, cluster_id: str, features: Mapping[str, int]) -> None:
        """Start Kafka's StorageTool on the node; `reap` returns its exit status."""
        levels = (argument for name, level in features.items() for argument in ("--feature", f"{name}={level}"))
        self._process = self._java("kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", *levels, "-c")

    def start(self) -> None:
        """Start the node; it becomes `ready` some time later."""
        self._process = self._java("kafka.Kafka", jvm_flags=self._jvm_flags)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Raises BrokerError if the node does not run."""
        os.kill(self.pid, number)

    def end(self, number: signal.Signals) -> None:
        """Send a signal that ends the process, even a paused one; do nothing without a process."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)

    def reap(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Wait for the process to end, then release its watchdog; return the exit status. Raises BrokerError."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise BrokerError(f"Kafka did not stop in {timeout_s} s and was killed; {self.tail()}") from None
        finally:
            if process.stdin is not None:
                process.stdin.close()

    def ready(self, wanted: set[int]) -> bool:
        """Return whether the node answers and reports all wanted nodes as live."""
        with contextlib.suppress(OSError):
            return wanted <= _live_brokers(self._probe)
        return False

    def tail(self) -> str:
        """Return the end of the log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"last lines of {self.log}:\n" + "\n".join(lines[-20:])

    def _java(self, main: str, *arguments: str, jvm_flags: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start one of Kafka's programs on the node's server.properties, with its output in the node's log."""
        java = [*java_command(self._runtime), f"-Xmx{self._heap_mb}m", *jvm_flags]
        java.append(f"-Dlog4j2.configurationFile={self._directory / 'log4j2.properties'}")
        java.append(f"-Djava.io.tmpdir={self._directory / 'tmp'}")
        java += ["-cp", self._runtime.class_path, main, *arguments]
        # A reduced environment: no JAVA_TOOL_OPTIONS that change the JVM, and no secrets.
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, *java, str(self._directory / "server.properties")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | {"LC_ALL": "C.UTF-8"},
                cwd=self._directory,
                start_new_session=True,
            )


def _live_brokers(address: str) -> set[int]:
    """Ask one broker for the ids of all live brokers that it knows: Metadata v1 for no topics, without TLS or SASL.

    Raises OSError while nothing answers.
    """
    request = struct.pack(">hhih5si", 3, 1, 0, 5, b"probe", 0)
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=2) as connection:
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
        (rack,) = struct.unpack_from(">h", answer, at + 10 + length)
        ids.add(node_id)
        at += 12 + length + max(rack, 0)
    return ids
