"""`contribute` is killed, and the registry fails and restarts: each trace is there in the end, no id twice, no 429."""

import time
from pathlib import Path

import pytest

from tests.support.chaos import Chaos, Fleet, shuffled
from tests.support.contribute import Booth, accepted_document
from tests.support.kafka_fixtures import wait_until
from tests.support.registry import FaultKind, RegistryOptions, RegistryThread
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.mark.timeout(600)
def test_kills_restarts_and_faults_lose_nothing_and_cause_no_429(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    """With an idempotency store or without one, by the seed.

    A trace posted twice is no fault of ours: a request may land after the look-up.
    """
    traces, kills, restarts, seconds = (1000, 8, 4, 45.0) if long else (150, 2, 1, 6.0)
    shares: dict[FaultKind, float] = {kind: 0.01 for kind in FaultKind if kind is not FaultKind.REDIRECT}
    options = RegistryOptions(idempotency=seed % 2 == 0, faults=shares, slow_seconds=1.5, seed=seed)
    with RegistryThread(options) as registry:
        booth = Booth(kafka.bootstrap_servers, registry, 4, KP_CONTRIBUTE_TIMEOUT_SECONDS="1")
        documents = [accepted_document(f"kp:trace:{number}") for number in range(traces)]
        booth.put(documents)
        with Fleet(booth.env, tmp_path, "worker", ("contribute",)) as fleet:
            for _ in range(2):
                fleet.add()

            def restart_registry() -> None:
                registry.stop()
                time.sleep(violence.rng.uniform(0, 2))
                registry.start()

            violence = Chaos(kafka, fleet, seed, more={"restart_registry": restart_registry})
            plan = shuffled(seed, sigkill=kills, restart_registry=restarts)
            violence.run(plan, (0.5 * seconds / len(plan), 1.5 * seconds / len(plan)))
            assert wait_until(lambda: booth.committed() >= traces, 300.0, 0.5), fleet.tails()
            assert wait_until(fleet.all_ready), fleet.tails()
            assert set(fleet.stop_all()) == {0}, fleet.tails()
            assert not fleet.unexpected(), fleet.tails()
        state, units, receipts = registry.store.state(), registry.store.units(), booth.receipts()
    print(f"{sum(n > 1 for n in state['units'].values())} posted twice, answers: {state['answers']}")
    expected = {document["id"]: {k: v for k, v in document.items() if k != "scoring"} for document in documents}
    assert {unit["id"]: unit for unit in units} == expected
    assert len(units) == len(expected)
    assert not expected.keys() - receipts.keys()
    assert (len(booth.refusals()), state["429s"], state["revoked"]) == (0, {}, [])
