"""The processes of the demo: children, run exactly as in production, and its worker among them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from worker.config import PREFIX, Settings
from worker.lab.broker.ports import free_ports
from worker.observe.metrics import quantile

READY_SECONDS: Final = 600.0  # a first start may download a model

STOP_SECONDS: Final = 30.0

LOG_TAIL_LINES: Final = 15

PARTITIONS: Final = 2

PASSED_ON: Final = (
    "embedder", "model", "precision", "max_tokens", "embed_threads", "threshold", "profiles", "cache_max_elements",
    "cache_ttl_seconds", "delivery",
)  # fmt: skip
"""Settings of the caller that are passed to the worker; others could point it to real topics."""


class DemoError(Exception):
    """The demo cannot continue; the message is for the user."""


class DemoProcess:
    """`kp-worker ARGUMENTS` as a child process that serves HTTP on `port`, with its log in `directory`.

    `name` is its name in messages, such as "the worker"; `settings` its environment variables besides those of the
    caller, none of which with KP_ is passed on.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], settings: Mapping[str, str], port: int, directory: Path
    ) -> None:
        self.name = name
        self.port = port
        self.log = directory / f"{name.rsplit(maxsplit=1)[-1]}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603 the caller's own command
                [sys.executable, "-P", "-m", "worker", *arguments],
                env=_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops the process in order
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After stop() the process has ended; after an error the broker stops too, so there is nothing to drain.
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of an HTTP GET; 0 while nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException):
                return 0, "starting"

    def metrics(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield name, labels and value of each series of /metrics."""
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def check(self) -> None:
        """Raise DemoError with the end of the log if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"{self.name} ended with exit code {code}.\n{self.tail()}")

    def wait_ready(self, say: Callable[[str], None], path: str = "/readyz") -> None:
        """Return when `path` is answered by 200."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            status, body = self.get(path)
            if status == 200:
                return
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name} was not ready in {READY_SECONDS:.0f} s: {body}.\n{self.tail()}")
            say(body.strip())
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the process and wait; raise DemoError unless it exits with 0: everything is committed."""
        self.process.terminate()
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} did not stop in {STOP_SECONDS:.0f} s.\n{self.tail()}") from None
        if code != 0:
            raise DemoError(f"{self.name} stopped with exit code {code} instead of 0.\n{self.tail()}")

    def tail(self) -> str:
        """Return the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(["The end of its log:", *lines])


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    # With -P: a directory of the user named worker must not be run instead of this package.
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.getenv("PYTHONPATH"))))
    return {**others, **settings, "PYTHONPATH": path}


class DemoWorker(DemoProcess):
    """The worker as a child process, with its log in `directory`."""

    def __init__(self, bootstrap: str, http_port: int | None, directory: Path, settings: Settings) -> None:
        port = http_port or free_ports(1)[0]
        super().__init__("the worker", ["run"], _variables(bootstrap, port, settings), port, directory)

    def figures(self) -> str:
        """Return evaluation time and consumer lag from /metrics, as text."""
        buckets: dict[float, float] = {}
        lag = 0.0
        for name, labels, value in self.metrics():
            if name == "kp_evaluation_duration_seconds_bucket":
                buckets[float(labels["le"])] = value
            elif name == "kp_consumer_lag":
                lag += value
        p50, p99 = quantile(buckets, 0.5) * 1000, quantile(buckets, 0.99) * 1000
        return f"evaluation p50 {p50:.3g} ms, p99 {p99:.3g} ms, consumer lag {lag:.0f}"


def _variables(bootstrap: str, port: int, settings: Settings) -> dict[str, str]:
    own = {
        "KP_BOOTSTRAP_SERVERS": bootstrap,
        "KP_CREATE_TOPICS": "true",
        "KP_TOPIC_PARTITIONS": str(PARTITIONS),
        "KP_HTTP_HOST": "127.0.0.1",
        "KP_HTTP_PORT": str(port),
        "KP_STATUS_PAGE": "true",
        "KP_STATUS_TEXTS": "true",
    }
    given = settings.model_dump(mode="json", include=set(PASSED_ON) & settings.model_fields_set, exclude_none=True)
    passed = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in given.items()}
    if "cache_ttl_seconds" in settings.model_fields_set and settings.cache_ttl_seconds is None:
        passed["cache_ttl_seconds"] = "none"
    return {PREFIX + name.upper(): value for name, value in passed.items()} | own
