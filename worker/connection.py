"""How every Kafka client of the worker connects: consumer, producers, admin client and restore reader alike."""

from __future__ import annotations

from typing import Any

from worker.config import Settings


def client_arguments(settings: Settings) -> dict[str, Any]:
    """Return the aiokafka arguments that all clients share."""
    return {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": settings.group_id,
        "metadata_max_age_ms": 30_000,  # a source topic that gains partitions is noticed that fast
    }
