"""`assemble` is killed, processes join and leave: each run gives its trace once, with an undisturbed run's bytes."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiokafka.errors import KafkaConnectionError

from tests.support.assemble import Workshop, expected_documents, judged, made_records
from tests.support.chaos import Chaos, Fleet, shuffled
from tests.support.kafka_fixtures import consume_all, produce_async, wait_until
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.mark.timeout(600)
def test_kills_joins_and_leaves_lose_no_run_and_repeat_none(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool
) -> None:
    """In a long run the broker is restarted, too."""
    kills, joins, restarts, seconds = (8, 4, 1, 60.0) if long else (3, 2, 0, 12.0)
    grace, gap = (30, 80) if long else (10, 40)
    runs = made_records(random.Random(seed), 600 if long else 120)
    expected = expected_documents(value for run in runs for value in run)
    workshop = Workshop(kafka.bootstrap_servers, grace=grace, gap=gap)
    plan = shuffled(seed, sigkill=kills, join=joins - joins // 2, leave=joins // 2, restart_broker=restarts)
    writing = threading.Thread(target=lambda: asyncio.run(write(workshop, random.Random(seed), runs, seconds)))
    with Fleet(workshop.env, tmp_path, "worker", ("assemble",)) as fleet:
        for slot in [fleet.add() for _ in range(2)]:
            slot.process.wait_ready()
        writing.start()
        try:
            pause = seconds / len(plan)
            Chaos(kafka, fleet, seed, most=2 + joins).run(plan, (0.5 * pause, 1.5 * pause))
        finally:
            writing.join()
        wait_until(
            lambda: not open_runs(workshop) and len(workshop.documents()) >= len(expected), 120 + grace + gap, 0.5
        )
        left_open = open_runs(workshop)
        assert set(fleet.stop_all()) == {0}, fleet.tails()
        assert restarts or not fleet.unexpected(), fleet.tails()
    assert not judged(workshop, expected)
    assert left_open == 0


async def write(workshop: Workshop, rng: random.Random, runs: Sequence[Sequence[bytes]], seconds: float) -> None:
    """Write each run's records about in their order, among those of the others, on random partitions; some twice."""
    rest: list[tuple[float, bytes]] = []
    for run in runs:
        begin = rng.uniform(0, seconds)
        for value in run:
            rest += [(begin + rng.uniform(0, 3), value) for _ in range(1 + (rng.random() < 0.1))]
    rest.sort()
    began = time.monotonic()
    while rest:
        now = time.monotonic() - began
        due = [value for at, value in rest if at <= now]
        rest = rest[len(due) :]
        rows = [(None, value, (), rng.randrange(workshop.partitions)) for value in due]
        while True:
            try:
                await produce_async(workshop.bootstrap, workshop.spans, rows)
                break
            except KafkaConnectionError:  # the broker is being restarted
                await asyncio.sleep(0.25)
        await asyncio.sleep(0.25)


def open_runs(workshop: Workshop) -> int:
    """Return how many parts of open runs the state holds."""
    rows = {each.key: each.value for each in consume_all(workshop.bootstrap, f"{workshop.name}-assemble-state")}
    return sum(value is not None and key.startswith(b"open:") for key, value in rows.items())
