"""Accepted records, their units, and the topics of `kp-worker contribute`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.builders import trace_document
from tests.support.kafka_fixtures import committed, consume_all, create_topics, produce, unique, wait_committed
from tests.support.registry import RegistryThread
from worker.contribute.unit import Gate, Unit, unit_from
from worker.core.trace import Limits


def accepted_document(trace_id: str, **metadata: Any) -> dict[str, Any]:
    """Return a document as the worker writes it to the accepted topic, for the network by default."""
    document = trace_document(trace_id, objective=f"Do {trace_id}")
    document["metadata"] |= {"visibility": "network", "privacy_level": "aggregated", "quality_score": 0.8, **metadata}
    document["scoring"] = {"score": 0.8, "decision": "accepted"}
    return document


GATE = Gate(frozenset({"network"}), frozenset({"aggregated"}))


def unit_of(document: Mapping[str, Any], gate: Gate = GATE) -> Unit:
    """Return the unit that is posted for a document."""
    work = unit_from(json.dumps(document).encode(), gate, Limits())
    assert isinstance(work, Unit), work
    return work


class Booth:
    """The accepted topic of one test, and the settings of its `contribute`. `url`: in place of the registry's."""

    def __init__(
        self, bootstrap: str, registry: RegistryThread, partitions: int = 2, url: str = "", **settings: str
    ) -> None:
        self.bootstrap = bootstrap
        self.name = unique("booth")
        self.accepted = f"{self.name}.accepted"
        self.contributed = f"{self.accepted}.contributed"
        self.refused = f"{self.accepted}.refused"
        self.partitions = partitions
        self.env = {
            "KP_BOOTSTRAP_SERVERS": bootstrap, "KP_GROUP_ID": self.name, "KP_ACCEPTED_TOPIC": self.accepted,
            "KP_CREATE_TOPICS": "true", "KP_REGISTRY_URL": url or registry.url, "KP_REGISTRY_KEY": registry.key,
            "KP_SESSION_TIMEOUT_SECONDS": "6", **settings,
        }  # fmt: skip
        create_topics(bootstrap, {self.accepted: (partitions, {"retention.ms": "-1"})})

    def put(self, documents: Sequence[Mapping[str, Any] | bytes | None], **record: Any) -> list[tuple[int, int]]:
        """Write documents to the accepted topic, in turn to each partition; return (partition, offset) of each."""
        key, headers = record.get("key", b"agent"), record.get("headers", ())
        values = [json.dumps(each).encode() if isinstance(each, dict) else each for each in documents]
        rows = [(key, value, headers, number % self.partitions) for number, value in enumerate(values)]
        return produce(self.bootstrap, self.accepted, rows)

    def committed(self) -> int:
        """Return the sum of the committed offsets."""
        return sum(committed(self.bootstrap, f"{self.name}-contribute", self.accepted).values())

    def wait_committed(self, count: int) -> None:
        wait_committed(self.bootstrap, f"{self.name}-contribute", self.accepted, count)

    def receipts(self) -> dict[str, dict[str, Any]]:
        """Return the receipts by id, the last one of each."""
        return {each.key.decode(): json.loads(each.value) for each in consume_all(self.bootstrap, self.contributed)}

    def refusals(self) -> list[Any]:
        return consume_all(self.bootstrap, self.refused)
