"""No record and no batch exhausts the worker's memory: peak RSS with the real model, at the attack's partition count.

Each run draws two of the attacks, and looks for 12 s. `make test-long` runs all of them for 30 s, and
`python -m tests.runs.memory_attacks` with more records each.
"""

from __future__ import annotations

import pytest

from tests.runs.memory_attacks import ATTACKS, measure
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PEAK_MIB = 700


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ATTACKS)
def test_peak(kafka: EmbeddedKafka, long: bool, name: str) -> None:
    partitions, make = ATTACKS[name]
    before, peak, done, sent, seconds = measure(kafka, partitions, make(), {}, seconds=30 if long else 12)
    print(f"{name}: peak {peak:.0f} MiB (ready: {before:.0f}), {done} of {sent} records in {seconds:.0f} s")
    assert peak < PEAK_MIB
    assert done
