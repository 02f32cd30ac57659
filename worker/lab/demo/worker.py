"""The demo's worker: its settings, and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from worker.config import PREFIX, Settings
from worker.lab.broker.ports import free_ports
from worker.lab.demo.process import DemoProcess
from worker.observe.metrics import quantile

PARTITIONS: Final = 2
PASSED_ON: Final = (
    "embedder", "model", "precision", "max_tokens", "embed_threads", "threshold", "profiles", "cache_max_elements",
    "cache_ttl_seconds", "delivery",
)  # fmt: skip
"""Settings of the caller that are passed to the worker; others could point it to real topics."""


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
