"""No record and no batch exhausts the worker's memory: peak RSS with the real model, at the attack's partition count.

`python -m tests.runs.memory_attacks` runs all attacks with more records each.
"""

from __future__ import annotations

import pytest

from tests.runs.memory_attacks import ATTACKS, measure
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PEAK_MIB = 700


@pytest.mark.parametrize("name", ATTACKS)
def test_peak(kafka: EmbeddedKafka, name: str) -> None:
    partitions, make = ATTACKS[name]
    before, peak, done, sent, seconds = measure(kafka, partitions, make(), {}, seconds=30)
    print(f"{name}: peak {peak:.0f} MiB (ready: {before:.0f}), {done} of {sent} records in {seconds:.0f} s")
    assert peak < PEAK_MIB
    assert done
