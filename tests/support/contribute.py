"""Accepted records, `kp-worker contribute` as processes, and a judgement on what the registry holds in the end."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.builders import trace_document
from tests.support.chaos import Chaos, Fleet, shuffled
from tests.support.kafka_fixtures import (
    committed,
    consume_all,
    create_topics,
    produce,
    unique,
    wait_committed,
    wait_until,
)
from tests.support.registry import FaultKind, RegistryOptions, RegistryThread
from worker.contribute.unit import Gate, Unit, unit_from
from worker.core.trace import Limits
from worker.lab.broker.embedded_kafka import EmbeddedKafka


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


@dataclass
class Trial:
    """What a crash run does: how many traces, SIGKILLs of `contribute`, restarts of the registry."""

    traces: int
    kills: int
    restarts: int
    idempotency: bool
    seconds: float
    """How long kills and restarts go on."""


def crash_run(kafka: EmbeddedKafka, folder: Path, seed: int, trial: Trial) -> dict[str, object]:
    """Kill processes and restart the registry while traces are posted, let the rest be posted, and judge.

    Prints figures, and returns what no run may show. A trace posted twice is no such thing: a request may land after
    the look-up.
    """
    shares: dict[FaultKind, float] = {kind: 0.01 for kind in FaultKind if kind is not FaultKind.REDIRECT}
    options = RegistryOptions(trial.idempotency, faults=shares, slow_seconds=1.5, seed=seed)
    with RegistryThread(options) as registry:
        booth = Booth(kafka.bootstrap_servers, registry, 4, KP_CONTRIBUTE_TIMEOUT_SECONDS="1")
        documents = [accepted_document(f"kp:trace:{number}") for number in range(trial.traces)]
        booth.put(documents)
        with Fleet(booth.env, folder, "worker", ("contribute",)) as fleet:
            for _ in range(2):
                fleet.add()

            def restart_registry() -> None:
                registry.stop()
                time.sleep(violence.rng.uniform(0, 2))
                registry.start()

            started = time.monotonic()
            violence = Chaos(kafka, fleet, seed, more={"restart_registry": restart_registry})
            plan = shuffled(seed, sigkill=trial.kills, restart_registry=trial.restarts)
            violence.run(plan, (0.5 * trial.seconds / len(plan), 1.5 * trial.seconds / len(plan)))
            assert wait_until(lambda: booth.committed() >= trial.traces, 300.0, 0.5), fleet.tails()
            seconds = time.monotonic() - started
            assert wait_until(fleet.all_ready), fleet.tails()
            assert set(fleet.stop_all()) == {0}, fleet.tails()
            assert not fleet.unexpected(), fleet.tails()
        state, units, receipts = registry.store.state(), registry.store.units(), booth.receipts()
    twice = sum(number > 1 for number in state["units"].values())
    print(f"{twice} posted twice, {seconds:.0f} s, answers: {state['answers']}", flush=True)
    expected = {document["id"]: {k: v for k, v in document.items() if k != "scoring"} for document in documents}
    problems = {
        "missing": sorted(expected.keys() - state["units"].keys()),
        "wrong": sorted(unit["id"] for unit in units if unit != expected.get(unit["id"])),
        "without receipt": sorted(expected.keys() - receipts.keys()), "refused": len(booth.refusals()),
        "429s": state["429s"], "revoked": state["revoked"],
    }  # fmt: skip
    return {name: value for name, value in problems.items() if value}
