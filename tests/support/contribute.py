"""Accepted records, `kp-worker contribute` as processes, and a judgement on what the registry holds in the end."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.builders import trace_document
from tests.support.kafka_fixtures import (
    WorkerProcess,
    committed,
    consume_all,
    create_topics,
    produce,
    unique,
    wait_committed,
)
from tests.support.registry import RegistryProcess
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
    """The accepted topic of one test, and the settings of its `contribute`."""

    def __init__(self, bootstrap: str, url: str, key: str, partitions: int = 2, **settings: str) -> None:
        self.bootstrap = bootstrap
        self.name = unique("booth")
        self.accepted = f"{self.name}.accepted"
        self.contributed = f"{self.accepted}.contributed"
        self.refused = f"{self.accepted}.refused"
        self.partitions = partitions
        self.env = {
            "KP_BOOTSTRAP_SERVERS": bootstrap, "KP_GROUP_ID": self.name, "KP_ACCEPTED_TOPIC": self.accepted,
            "KP_CREATE_TOPICS": "true", "KP_REGISTRY_URL": url, "KP_REGISTRY_KEY": key,
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
    """What a crash run does: how many traces, SIGKILLs of `contribute`, restarts of the registry, processes."""

    traces: int
    kills: int
    restarts: int
    processes: int
    idempotency: bool
    seconds: float
    """How long kills and restarts go on."""


def crash_run(bootstrap: str, folder: Path, seed: int, trial: Trial) -> dict[str, object]:
    """Kill processes and restart the registry while traces are posted, let the rest be posted, and judge.

    Prints figures, and returns what no run may show. A trace posted twice is no such thing: a request may land after
    the look-up.
    """
    rng = random.Random(seed)
    faults = [f"--fault={kind}=0.01" for kind in ("error", "slow", "reset", "truncated", "html")]
    idempotency = [] if trial.idempotency else ["--no-idempotency"]
    with RegistryProcess(
        "--data", str(folder / "registry.db"), "--limit", "60000", *idempotency, *faults,
        "--slow-seconds", "1.5", "--seed", str(seed),
    ) as registry:  # fmt: skip
        booth = Booth(bootstrap, registry.url, registry.key, 4, KP_CONTRIBUTE_TIMEOUT_SECONDS="1")
        documents = [accepted_document(f"kp:trace:{number}") for number in range(trial.traces)]
        booth.put(documents)
        fleet = [_start(booth, folder, number) for number in range(trial.processes)]
        started = time.monotonic()
        try:
            _violence(rng, trial, registry, booth, folder, fleet)
            deadline = time.monotonic() + 300
            while booth.committed() < trial.traces:
                assert time.monotonic() < deadline, f"{booth.committed()} committed\n{fleet[0].log()[-3000:]}"
                assert all(each.returncode is None for each in fleet), [each.log()[-2000:] for each in fleet]
                time.sleep(0.5)
            seconds = time.monotonic() - started
            for each in fleet:  # the last kill may be the last event
                each.wait_ready()
            late = sum(int(each.metric("kp_contribute_late_total")) for each in fleet)
            for each in fleet:
                each.terminate()
            assert [each.wait() for each in fleet] == [0] * len(fleet), [each.log()[-2000:] for each in fleet]
        finally:
            for each in fleet:
                each.close()
        return _judge(registry, booth, documents, late, seconds)


def _start(booth: Booth, folder: Path, number: int) -> WorkerProcess:
    return WorkerProcess(booth.env, ("contribute",), log_path=folder / f"contribute-{number}.log")


def _violence(
    rng: random.Random, trial: Trial, registry: RegistryProcess, booth: Booth, folder: Path, fleet: list[WorkerProcess]
) -> None:
    events = ["kill"] * trial.kills + ["restart"] * trial.restarts
    rng.shuffle(events)
    for number, event in enumerate(events):
        time.sleep(rng.uniform(0.5, 1.5) * trial.seconds / len(events))
        if event == "restart":
            registry.kill()
            time.sleep(rng.uniform(0, 2))
            registry.start()
        else:
            victim = rng.randrange(len(fleet))
            fleet[victim].kill()
            fleet[victim] = _start(booth, folder, 100 + number)


def _judge(
    registry: RegistryProcess, booth: Booth, documents: Sequence[Mapping[str, Any]], late: int, seconds: float
) -> dict[str, object]:
    state, units, receipts = registry.state(), registry.units(), booth.receipts()
    ids = Counter(unit["id"] for unit in units)
    expected = {document["id"]: {k: v for k, v in document.items() if k != "scoring"} for document in documents}
    twice = sum(number > 1 for number in state["units"].values())
    print(f"{twice} posted twice, {late} late, {seconds:.0f} s, answers: {state['answers']}", flush=True)
    problems = {
        "missing": sorted(expected.keys() - ids.keys()),
        "foreign": sorted(each for each, number in ids.items() if each not in expected or number > 1),
        "wrong": sorted(unit["id"] for unit in units if unit != expected.get(unit["id"])),
        "without receipt": sorted(expected.keys() - receipts.keys()), "refused": len(booth.refusals()),
        "429s": state["429s"], "revoked": state["revoked"],
    }  # fmt: skip
    return {name: value for name, value in problems.items() if value}
