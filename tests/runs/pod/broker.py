"""A broker that containers reach: TLS with a user and password on the bridge, and without either on loopback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.secure_kafka import PASSWORD, USER, Files
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.ports import HOST, free_ports

LISTENER: Final = "PODS"
LOGIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"


@dataclass(frozen=True)
class PodBroker:
    """Where the check and where the pods connect, and the contents of their Secrets."""

    loopback: str
    inside: str
    secrets: Mapping[tuple[str, str], Mapping[str, bytes]]


@contextmanager
def pod_broker(address: str, directory: Path) -> Iterator[PodBroker]:
    """Run it; `address` is the machine's own on the bridge of the containers."""
    files = Files(directory)
    loopback, inside, controller = free_ports(3)
    prefix = f"listener.name.{LISTENER.lower()}"
    config = {
        "listeners": f"PLAINTEXT://{HOST}:{loopback},{LISTENER}://{address}:{inside},CONTROLLER://{HOST}:{controller}",
        "controller.quorum.voters": f"0@{HOST}:{controller}",
        **files.keystore(LISTENER, address),
        f"{prefix}.sasl.enabled.mechanisms": "PLAIN",
        f"{prefix}.plain.sasl.jaas.config": f'{LOGIN} user_{USER}="{PASSWORD}";',
    }
    secrets = {
        ("Secret", "kafka-user"): {"username": USER.encode(), "password": PASSWORD.encode()},
        ("Secret", "kafka-ca"): {"ca.crt": files.ca.read_bytes()},
        ("Secret", "knowledgepulse"): {"key": b"kp_not_taken_by_anyone"},
    }
    with EmbeddedKafka(listeners={LISTENER: "SASL_SSL"}, config=config):
        yield PodBroker(f"{HOST}:{loopback}", f"{address}:{inside}", secrets)
