"""An engine of our own: Debian's dockerd with socket, data, processes and network apart from the machine's engine.

Images and build cache stay in the user's cache directory, so that a second run is quick. One engine at a time has them;
another one at the same time begins with nothing, in a temporary directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.runs.image.errors import EngineError, attempt, call
from tests.support.processes import end_process
from worker.lab.broker.kafka_jars import default_cache

NEEDED: Final = {"dockerd": "docker.io", "docker": "docker.io", "iptables": "iptables", "ip": "iproute2"}
START_S: Final = 90.0
STOP_S: Final = 60.0
STATE: Final = "engine.json"
FORWARD: Final = Path("/proc/sys/net/ipv4/ip_forward")


def missing() -> str:
    """Return what keeps this machine from an engine of its own, with what to do; empty: nothing."""
    if os.geteuid() != 0:
        return "only root can start an engine here: run as root, or start Docker"
    packages = sorted({package for program, package in NEEDED.items() if shutil.which(program) is None})
    return f"missing programs; on Debian: apt-get install {' '.join(packages)}" if packages else ""


@contextlib.contextmanager
def own_engine() -> Iterator[str]:
    """Run dockerd and yield its DOCKER_HOST; end it, its containers, mounts and networks afterwards."""
    if why := missing():
        raise EngineError(f"no container engine: {why}")
    with _home() as home, tempfile.TemporaryDirectory(prefix="kp-engine-") as directory:
        run = Path(directory)
        network = choose(f"kpe{os.getpid()}")
        state = {"run": directory, "network": asdict(network)}
        (home / STATE).write_text(json.dumps(state))
        try:
            with connected(network):
                process = _start(home, run, network)
                try:
                    _wait(process, run)
                    yield _host(run)
                finally:
                    _stop(process, run)
        finally:
            _clean(home, run)


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """Yield the directory of images and build cache: the cached one, or a temporary one while another engine has it."""
    cached = default_cache() / "engine"
    cached.mkdir(parents=True, exist_ok=True)
    with (cached / "lock").open("w") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with tempfile.TemporaryDirectory(prefix="kp-engine-data-", ignore_cleanup_errors=True) as temporary:
                yield Path(temporary)
            return
        _recover(cached)
        yield cached


def _recover(home: Path) -> None:
    """Remove what an engine left here that was killed."""
    state_file = home / STATE
    if state_file.exists():
        state: dict[str, Any] = json.loads(state_file.read_text())
        run = Path(state["run"])
        _empty(_host(run))
        _end(run / "dockerd.pid", run, signal.SIGTERM)
        for name in ("dockerd.pid", "containerd/containerd.pid"):
            _end(run / name, run, signal.SIGKILL)
        remove(Network(**state["network"]))
        _clean(home, run)
        shutil.rmtree(run, ignore_errors=True)


def _start(home: Path, run: Path, network: Network) -> subprocess.Popen[bytes]:
    (run / "daemon.json").write_text("{}")  # the machine's own settings are for the machine's own engine
    command: list[str | Path] = [
        *("dockerd", "--config-file", run / "daemon.json", "--pidfile", run / "dockerd.pid", "--host", _host(run)),
        *("--data-root", home / "data", "--exec-root", run, "--shutdown-timeout", "10"),
        *("--bridge", network.bridge, "--iptables=false", "--ip-masq=false", "--ip-forward=false"),
        *("--default-address-pool", f"base={network.addresses},size=24"),
    ]
    with (run / "dockerd.log").open("wb") as log:
        # A session of its own: Ctrl-C is for the check, which then ends its engine in order.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _host(run: Path) -> str:
    return f"unix://{run / 'docker.sock'}"


def _wait(process: subprocess.Popen[bytes], run: Path) -> None:
    deadline = time.monotonic() + START_S
    while attempt(["docker", "--host", _host(run), "version"]).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            log = (run / "dockerd.log").read_text(errors="replace").splitlines()[-15:]
            raise EngineError("dockerd did not start here; its log ends with\n" + "\n".join(log))
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes], run: Path) -> None:
    """End all containers, then dockerd, which ends its containerd."""
    _empty(_host(run))
    if not end_process(process, STOP_S):
        _end(run / "containerd/containerd.pid", run, signal.SIGKILL)


def _empty(host: str) -> None:
    """Remove all containers, networks and volumes of an engine that answers."""
    containers = attempt(["docker", "--host", host, "ps", "--all", "--quiet"]).stdout.split()
    if containers:
        attempt(["docker", "--host", host, "rm", "--force", "--volumes", *containers])
    attempt(["docker", "--host", host, "network", "prune", "--force"])
    attempt(["docker", "--host", host, "volume", "prune", "--force"])


def _end(pid_file: Path, run: Path, number: signal.Signals) -> None:
    """Signal the process of a file if it still is the one that works in this directory, and wait for its end."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        deadline = time.monotonic() + STOP_S
        if str(run).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, number)
            while str(run).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.1)


def _clean(home: Path, run: Path) -> None:
    """Unmount whatever is left below the two directories, the innermost first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted(points, key=len, reverse=True):
        if any(Path(point).is_relative_to(directory) for directory in (home, run)):
            attempt(["umount", "--lazy", point])
    groups = Path("/sys/fs/cgroup")
    for group in (*groups.glob("*/docker/buildkit"), *groups.glob("*/docker")):
        with contextlib.suppress(OSError):  # of another engine, with containers in it
            group.rmdir()
    (home / STATE).unlink(missing_ok=True)


# --- network


@dataclass(frozen=True)
class Network:
    """A bridge, its own address with prefix, and the range that all networks of the engine are taken from.

    The engine adds no rule (`--iptables=false`): Docker's chains belong to the machine's own engine, if it has one.
    """

    bridge: str
    address: str
    addresses: str

    @property
    def rules(self) -> list[list[str]]:
        """Return the rules, each as table, chain and match: out with the machine's address, and back."""
        mark = ["-m", "comment", "--comment", self.bridge]
        return [
            ["nat", "POSTROUTING", "-s", self.addresses, "!", "-d", self.addresses, *mark, "-j", "MASQUERADE"],
            ["filter", "FORWARD", "-s", self.addresses, *mark, "-j", "ACCEPT"],
            ["filter", "FORWARD", "-d", self.addresses, *mark, "-j", "ACCEPT"],
        ]


def choose(bridge: str) -> Network:
    """Return a network whose addresses no route of this machine uses. Raises EngineError when there is none."""
    routes = json.loads(call(["ip", "-json", "route"]).stdout)
    taken = [ipaddress.ip_network(it["dst"], strict=False) for it in routes if it["dst"] != "default"]
    for number in random.sample(range(64, 255), 191):
        addresses = ipaddress.ip_network(f"10.{number}.0.0/16")
        if not any(addresses.overlaps(it) for it in taken if it.version == 4):
            return Network(bridge, f"10.{number}.0.1/24", str(addresses))
    raise EngineError("no free range of addresses for the engine: each 10.N.0.0/16 has a route already")


@contextlib.contextmanager
def connected(network: Network) -> Iterator[None]:
    """Make the bridge and the rules; remove them, and the bridges of the engine's other networks, at the end."""
    before = FORWARD.read_text()
    try:
        call(["ip", "link", "add", network.bridge, "type", "bridge"])
        call(["ip", "address", "add", network.address, "dev", network.bridge])
        call(["ip", "link", "set", network.bridge, "up"])
        for table, chain, *match in network.rules:
            call(["iptables", "-w", "-t", table, "-I", chain, *match])
        FORWARD.write_text("1\n")
        yield
    finally:
        remove(network)
        if not any(Path("/sys/class/net").glob("*/bridge")):  # another engine may need it by now
            FORWARD.write_text(before)


def remove(network: Network) -> None:
    """Remove what connected() made, as far as it is there."""
    for table, chain, *match in network.rules:
        attempt(["iptables", "-w", "-t", table, "-D", chain, *match])
    own = ipaddress.ip_network(network.addresses)
    for link in json.loads(attempt(["ip", "-json", "-4", "address"]).stdout or "[]"):
        addresses = [ipaddress.ip_address(it["local"]) for it in link.get("addr_info", ())]
        if any(it in own for it in addresses):
            attempt(["ip", "link", "delete", link["ifname"]])
    attempt(["ip", "link", "delete", network.bridge])
