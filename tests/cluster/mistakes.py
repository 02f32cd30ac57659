"""What a user may mistype."""

from pathlib import Path
from typing import Any

from tests.cluster.client import Client


def without_crds(installer: Client, package: Path, check: Any) -> None:
    r = installer.try_helm(
        "install", "kp-worker", str(package), "--set", "kafka.bootstrapServers=k:9092", "--set", "keda.enabled=true"
    )
    print(r)


def make_mistakes(installer: Client, admin: Client, package: Path, check: Any) -> None:
    pass
