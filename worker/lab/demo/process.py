"""The demo's processes: commands of kp-worker as children, run as in production."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from worker.config import PREFIX, Settings
from worker.lab.broker.kafka_node import HOST, free_ports
from worker.lab.demo.console import step
from worker.observe.metrics import quantile

READY_SECONDS: Final = 600.0  # a first start may download a model
STOP_SECONDS: Final = 30.0
LOG_TAIL_LINES: Final = 15
PARTITIONS: Final = 2

PASSED_ON: Final = (
    "embedder", "embedder_url", "model", "precision", "max_tokens", "embed_threads", "threshold", "profiles",
    "cache_max_elements", "cache_ttl_seconds", "delivery",
)  # fmt: skip
"""Settings of the caller that the worker inherits; others could point it to real topics."""


class DemoError(Exception):
    """The demo cannot continue; the message is for the user."""


class DemoProcess:
    """`kp-worker ARGUMENTS` as a child process that serves HTTP on `port`, with its log in `directory`.

    `name`: for messages, such as "the worker". `settings`: environment variables; the caller's KP_ ones are dropped.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], settings: Mapping[str, str], port: int, directory: Path
    ) -> None:
        self.name = name
        self.url = f"http://{HOST}:{port}"
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
        """Return status and body of an HTTP GET; status 0 while nothing listens."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
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
        """Raise DemoError with the end of the log if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"{self.name} ended with exit code {code}.\n{self.tail()}")

    def wait_ready(self, say: Callable[[str], None]) -> None:
        """Return when /readyz is answered with 200."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            status, body = self.get("/readyz")
            if status == 200:
                return
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name} was not ready in {READY_SECONDS:.0f} s: {body}.\n{self.tail()}")
            say(body.strip())
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the process and wait. Raises DemoError unless it exits with 0, having committed everything."""
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
    # With -P: a user's directory named worker must not be run instead of this package.
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.getenv("PYTHONPATH"))))
    return {**others, **settings, "PYTHONPATH": path}


@dataclass(frozen=True)
class Stage:
    """What all parts of a demo use: the terminal, the broker's address, and the directory for logs."""

    console: Console
    bootstrap: str
    directory: Path

    @contextlib.contextmanager
    def running(
        self,
        label: str,
        name: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        port: int | None = None,
        says: str = "ready, metrics at {url}/metrics",
    ) -> Iterator[DemoProcess]:
        """Start a process on the demo's broker, print `says` once it is ready, and kill it at the end."""
        port = port or free_ports(1)[0]
        own = {"BOOTSTRAP_SERVERS": self.bootstrap, "CREATE_TOPICS": "true", "HTTP_HOST": HOST, "HTTP_PORT": str(port)}
        settings = {PREFIX + key: value for key, value in {**variables, **own}.items()}
        with DemoProcess(name, arguments, settings, port, self.directory) as process:
            with step(self.console, label) as say:
                process.wait_ready(say)
                say(says.format(url=process.url))
            yield process


def worker_variables(settings: Settings) -> dict[str, str]:
    """Return the settings of the demo's worker, without their prefix."""
    given = settings.model_dump(mode="json", include=set(PASSED_ON) & settings.model_fields_set, exclude_none=True)
    passed = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in given.items()}
    if "cache_ttl_seconds" in settings.model_fields_set and settings.cache_ttl_seconds is None:
        passed["cache_ttl_seconds"] = "none"
    own = {"topic_partitions": str(PARTITIONS), "status_page": "true", "status_texts": "true"}
    return {name.upper(): value for name, value in (passed | own).items()}


def figures(worker: DemoProcess) -> str:
    """Return evaluation times from /metrics, as text."""
    buckets = {
        float(labels["le"]): value
        for name, labels, value in worker.metrics()
        if name == "kp_evaluation_duration_seconds_bucket"
    }
    p50, p99 = quantile(buckets, 0.5) * 1000, quantile(buckets, 0.99) * 1000
    return f"evaluation p50 {p50:.3g} ms, p99 {p99:.3g} ms"
