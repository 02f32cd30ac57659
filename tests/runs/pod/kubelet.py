"""One pod as the kubelet runs it: probes at their intervals, restarts, the grace period.

Probes go to the pod's own address. A container is restarted when it ends, or when its startup or liveness probe has
failed `failureThreshold` times in a row: SIGTERM, the grace period, SIGKILL. The pause between restarts is left out.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Docker = Callable[..., str]
TICK_S: Final = 0.1
PORT: Final = 9108


@dataclass
class Probe:
    """One probe: its settings, and its results in a row."""

    path: str
    period: float
    timeout: float
    threshold: int
    due: float = 0.0
    failures: int = 0
    successes: int = 0
    slowest: float = 0.0

    @classmethod
    def of(cls, container: dict[str, Any], kind: str) -> Probe:
        """Return a container's startup, liveness or readiness probe."""
        settings = container[f"{kind}Probe"]
        assert settings["httpGet"]["port"] == "http"
        return cls(
            settings["httpGet"]["path"],
            settings["periodSeconds"],
            settings["timeoutSeconds"],
            settings["failureThreshold"],
        )

    def ask(self, address: str) -> bool:
        """Make one request; 200 to 399 is success."""
        began = time.monotonic()
        self.due = began + self.period
        connection = http.client.HTTPConnection(address, PORT, timeout=self.timeout)
        try:
            connection.request("GET", self.path, headers={"User-Agent": "kube-probe/1.31", "Connection": "close"})
            good = 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            good = False
        finally:
            connection.close()
        self.failures = 0 if good else self.failures + 1
        self.successes += good
        if good:
            self.slowest = max(self.slowest, time.monotonic() - began)
        return good

    @property
    def failed(self) -> bool:
        """Return whether the threshold is reached."""
        return self.failures >= self.threshold


@dataclass(frozen=True)
class End:
    """How a container ended."""

    code: int
    seconds: float
    out_of_memory: bool
    log: str


@dataclass
class Pod:
    """A running pod. `delete` ends it; `events` says what happened, with the seconds since its start."""

    name: str
    identity: str
    container: dict[str, Any]
    grace: int
    options: Sequence[str]
    docker: Docker
    ready: bool = False
    started: bool = False
    ends: list[End] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._deleted = threading.Event()
        self._start()
        self._thread = threading.Thread(target=self._watch, name=f"kubelet of {self.name}", daemon=True)
        self._thread.start()

    @property
    def restarts(self) -> int:
        """Return how many times the container was started again."""
        return len(self.ends)

    def delete(self) -> End:
        """End the pod as `kubectl delete pod` does."""
        self.leave()
        return self._end()

    def leave(self) -> None:
        """Stop to watch the container, which then is never restarted."""
        self._deleted.set()
        self._thread.join()

    def inside(self, *command: str) -> str:
        """Run a command in the container, as its user."""
        return self.docker("exec", self.identity, *command)

    def log(self) -> str:
        """Return what the container has printed."""
        return self.docker("logs", self.identity)

    def _start(self) -> None:
        self.started = self.ready = False
        self.startup, self.liveness, self.readiness = (
            Probe.of(self.container, kind) for kind in ("startup", "liveness", "readiness")
        )
        self.docker("run", *self.options)
        networks = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        self.address = self.docker("inspect", "--format", networks, self.identity).strip()
        self._say("started")

    def _watch(self) -> None:
        while not self._deleted.wait(TICK_S):
            if self.docker("inspect", "--format", "{{.State.Running}}", self.identity).strip() != "true":
                self._restart("the container ended by itself")
            elif not self.started:
                if self._due(self.startup):
                    self._probe_startup()
            else:
                if self._due(self.liveness) and not self.liveness.ask(self.address) and self.liveness.failed:
                    self._restart(f"liveness failed {self.liveness.failures} times")
                if self._due(self.readiness):
                    self._probe_readiness()

    @staticmethod
    def _due(probe: Probe) -> bool:
        return time.monotonic() >= probe.due

    def _probe_startup(self) -> None:
        if self.startup.ask(self.address):
            self.started = True
            self._say("startup probe succeeded")
        elif self.startup.failed:
            self._restart(f"startup failed {self.startup.failures} times")

    def _probe_readiness(self) -> None:
        good = self.readiness.ask(self.address)
        if good != self.ready and (good or self.readiness.failed):
            self.ready = good
            self._say("ready" if good else "not ready")

    def _restart(self, why: str) -> None:
        self._say(f"{why}: restart")
        self.ends.append(self._end())
        if not self._deleted.is_set():
            self._start()

    def _end(self) -> End:
        began = time.monotonic()
        self.docker("stop", "--time", str(self.grace), self.identity)
        seconds = time.monotonic() - began
        state = self.docker("inspect", "--format", "{{.State.ExitCode}} {{.State.OOMKilled}}", self.identity).split()
        end = End(int(state[0]), seconds, state[1] == "true", self.log())
        self.docker("rm", "--force", "--volumes", self.identity)
        self._say(f"exit code {end.code} after {seconds:.1f} s")
        return end

    def _say(self, text: str) -> None:
        self.events.append(f"{time.monotonic() - self._began:6.1f} s  {self.name}: {text}")
        print(f"      {self.events[-1].strip()}", flush=True)
