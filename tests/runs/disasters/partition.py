"""One of three brokers is partitioned off: the group's coordinator, then a transaction coordinator; at last only from
the other brokers, while clients still reach it.

The brokers are in network namespaces of their own, on a switch that is a namespace, too: needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.runs.disasters.scene import MissingError, Scene, Verdict
from tests.support.kafka_fixtures import admin
from worker.lab.broker.kafka_jars import default_cache, install
from worker.lab.broker.kafka_node import KafkaNode, server_properties


def coordinator(bootstrap: str, name: str, kind: int) -> int:
    """Return the broker that coordinates a group (kind 0) or a transactional id (kind 1)."""
    broker: int = admin(bootstrap, lambda it: it.find_coordinator(name, kind))
    return broker


def cut_for_a_while(s: Scene, cluster: SplitCluster, node: int, what: str, *, clients_too: bool) -> None:
    """Cut a broker off for 40 s and join it again; the workers must go on."""
    s.eye.reset()
    s.say(f"broker {node} ({what}) is cut off" + ("" if clients_too else " from the other brokers only"))
    connect = cluster.plug if clients_too else cluster.route
    connect(node, on=False)
    time.sleep(40)
    during = s.eye.longest_stall
    s.say(f"longest time without a commit: {during:.1f} s; the broker is joined again")
    connect(node, on=True)
    time.sleep(20)
    kind = "from all" if clients_too else "from the other brokers only"
    stall = s.eye.longest_stall
    s.verdict.expect(stall < 60, f"{what} cut off {kind}: {stall:.1f} s without a commit")  # the transaction's timeout


def run(work: Path, seed: int) -> Verdict:
    with split_cluster(work / "kafka") as cluster:
        bootstrap = cluster.bootstrap_servers
        with Scene(bootstrap, work / "logs", "one of three brokers is partitioned off", seed=seed) as s:
            s.begin()
            group, transaction = "the group's coordinator", "a transaction coordinator"
            cut_for_a_while(s, cluster, coordinator(bootstrap, s.group, 0), group, clients_too=True)
            cut_for_a_while(s, cluster, coordinator(bootstrap, f"{s.group}-0", 1), transaction, clients_too=True)
            cut_for_a_while(s, cluster, coordinator(bootstrap, s.group, 0), group, clients_too=False)
            return s.finish(exits=(1,))


PREFIX: Final = "kp-net"
NODES: Final = 3
PORTS: Final = {"PLAINTEXT": 9092, "CONTROLLER": 9093}
START_S: Final = 120.0


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise MissingError(f"ip {' '.join(arguments)}: {done.stderr.strip()} (network namespaces need root)")
    return done.stdout


def sweep() -> None:
    """Remove the namespaces of earlier runs whose process is gone."""
    for name in re.findall(rf"^({PREFIX}-(\d+)-\w+)", _ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{name[1]}").exists():
            _ip("netns", "delete", name[0], check=False)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "delete", name, check=False)


def _free_subnet() -> str:
    """Return the first three numbers of a /24 that no interface of this machine is in."""
    taken = _ip("-4", "route", "show", "table", "all")
    return next(f"10.213.{n}" for n in range(1, 250) if f"10.213.{n}." not in taken)


def inside(namespace: str, action: Callable[[], None]) -> None:
    """Call an action in a thread of that network namespace: the processes that it starts stay there."""
    failure: list[BaseException] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with Path(f"/var/run/netns/{namespace}").open() as file:
                if libc.setns(file.fileno(), 0x40000000):
                    raise OSError(ctypes.get_errno(), "setns")
            action()
        except BaseException as error:  # raised below
            failure.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


class SplitCluster:
    """Three brokers, each behind a link of its own."""

    def __init__(self, directory: Path, names: list[str], switch: str, subnet: str) -> None:
        self._names, self._switch = names, switch
        self._addresses = [f"{subnet}.{11 + i}" for i in range(NODES)]
        runtime = install(default_cache())
        self._nodes = [KafkaNode(i, directory / f"node-{i}", runtime, heap_mb=256) for i in range(NODES)]
        voters = ",".join(f"{i}@{address}:{PORTS['CONTROLLER']}" for i, address in enumerate(self._addresses))
        for i, node in enumerate(self._nodes):
            listeners = ",".join(f"{name}://{self._addresses[i]}:{port}" for name, port in PORTS.items())
            own = {
                "listeners": listeners, "controller.quorum.voters": voters,
                # As Kafka has them, not the embedded broker: how long a lost broker holds its partitions is measured.
                "broker.heartbeat.interval.ms": "2000", "broker.session.timeout.ms": "9000",
            }  # fmt: skip
            protocols = dict.fromkeys(PORTS, "PLAINTEXT")
            node.write_files(server_properties(i, [PORTS] * NODES, protocols, node.data, own))

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{address}:{PORTS['PLAINTEXT']}" for address in self._addresses)

    def start(self) -> None:
        """Format and start all; return when each knows all."""
        for node in self._nodes:
            node.start_format("kp-split-cluster-00000", {})
        for node in self._nodes:
            if node.reap(START_S) != 0:
                raise AssertionError(node.tail())
        for name, node in zip(self._names, self._nodes, strict=True):
            inside(name, node.start)
        deadline = time.monotonic() + START_S
        while not all(node.ready(set(range(NODES))) for node in self._nodes):
            if time.monotonic() > deadline:
                raise AssertionError("\n".join(node.tail() for node in self._nodes))
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill all: the data is temporary."""
        for node in self._nodes:
            with contextlib.suppress(Exception):
                node.end(9)  # type: ignore[arg-type]
            with contextlib.suppress(Exception):
                node.reap(10)

    def plug(self, i: int, *, on: bool) -> None:
        """Put in or pull out a broker's cable: without it neither brokers nor clients reach it."""
        _ip("-n", self._switch, "link", "set", f"port{i}", "up" if on else "down")

    def route(self, i: int, *, on: bool) -> None:
        """Send or drop what a broker sends to the other brokers; clients reach it anyway."""
        for address in self._addresses:
            if address != self._addresses[i]:
                _ip("-n", self._names[i], "route", "del" if on else "add", "blackhole", f"{address}/32")


@contextmanager
def split_cluster(directory: Path) -> Iterator[SplitCluster]:
    """Yield three brokers on a network of their own, which this machine reaches. Raises MissingError."""
    if shutil.which("ip") is None:
        raise MissingError("ip is missing: apt-get install iproute2")
    if os.geteuid():
        raise MissingError("network namespaces need root")
    sweep()
    mine, subnet = f"{PREFIX}-{os.getpid()}", _free_subnet()
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{mine}-switch"))
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        names = [stack.enter_context(_namespace(f"{mine}-{i}")) for i in range(NODES)]
        for i, name in enumerate(names):
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{subnet}.{11 + i}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        host = f"kpnet{os.getpid() % 10**6}"
        _ip("-n", switch, "link", "add", "uplink", "type", "veth", "peer", "name", host, "netns", str(os.getpid()))
        _ip("-n", switch, "link", "set", "uplink", "master", "bridge", "up")
        _ip("address", "add", f"{subnet}.1/24", "dev", host)
        _ip("link", "set", host, "up")
        cluster = SplitCluster(directory, names, switch, subnet)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
