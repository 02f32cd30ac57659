"""What the numbers were measured on: CPU, memory, load, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from tests.support.surroundings import ROOT
from worker.lab.broker.embedded_kafka import KAFKA_VERSION

PACKAGES: Final = (
    "faust-streaming", "aiokafka", "numpy", "msgspec", "openvino", "sentence-transformers", "torch",
    "confluent-kafka", "quixstreams",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Describe the machine and what is installed."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "cpu flags": sorted(
            set(_field("/proc/cpuinfo", "flags").split())
            & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"}
        ),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "kafka": KAFKA_VERSION,
        "commit": _commit(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load average before": os.getloadavg(),
    }


def installed(*packages: str) -> bool:
    """Tell whether all of these packages are installed."""
    return all(_version(name) is not None for name in packages)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
