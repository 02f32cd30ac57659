"""The doctor's numbers of cache entries, against the scorer that wrote the changelog. No Kafka, no model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.builders import T0, make_trace
from tests.support.damaged import bad_entries, entry_fields, mutated, packed, some_key
from worker.commands.doctor import traces
from worker.commands.doctor.caches import _memory, _sizes, _standings
from worker.config import Settings, load
from worker.core.changelog import Committed, Entry, decode_all, encode, slot_key
from worker.core.novelty import unit
from worker.core.restore import Log
from worker.core.scorer import PartitionScorer
from worker.core.track_record import Standing
from worker.kafka.assignment import Position

MODEL, DIMENSIONS = "test:0:8", 8
TOPIC_ID = "a" * 22


def settings_of(capacity: int, ttl_s: float | str) -> Settings:
    return load(cache_max_elements=capacity, cache_ttl_seconds=ttl_s)


class Written:
    """A partition's scorer, and the changelog that it leaves behind."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = MODEL
        self.scorer = PartitionScorer(settings.cache_max_elements, settings.cache_ttl_ms, DIMENSIONS)
        self.log = Log()
        self.offset = 0

    def score(self, vector: Any, time_ms: int) -> None:
        scored = self.scorer.score(make_trace(f"kp:trace:{self.offset}"), vector, time_ms)
        assert scored.sequence is not None
        assert scored.vector is not None
        value = encode(
            sequence=scored.sequence, source_offset=self.offset, stream_time_ms=scored.stream_time_ms,
            trace_id="x", model=self.model, vector=scored.vector, epoch=1,
        )  # fmt: skip
        self.log.apply(slot_key(scored.sequence, self.settings.cache_max_elements, 1), value, self.log.end)
        self.offset += 1

    def entries(self, committed: int | None = None) -> int:
        offset = self.offset if committed is None else committed
        metadata = Committed(self.scorer.stream_time_ms, TOPIC_ID, 1, 0)
        position = Position(offset, metadata.stream_time_ms, 0, offset, metadata, TOPIC_ID)
        return _memory(self.settings, self.log, position).entries


def test_the_entries_are_those_of_the_scorer(seed: int) -> None:
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    for _ in range(25):
        part = Written(settings_of(chance.randint(3, 40), chance.choice(["none", 20.0])))
        now = T0
        for vector in rng.normal(size=(chance.randint(1, 90), DIMENSIONS)).astype(np.float32):
            now += chance.choice([0, 100, 3000])
            part.score(vector, now)
        assert part.entries() == len(part.scorer.cache)


def test_only_what_is_committed_and_of_the_last_model_counts() -> None:
    part = Written(settings_of(10, "none"))
    assert part.entries() == 0
    for number in range(6):
        part.score(np.eye(8)[number], T0 + number)
    assert (part.entries(4), part.entries()) == (4, 6)
    part.model = "another:1:8"
    part.score(np.eye(8)[1], T0)
    assert part.entries() == 1


@pytest.mark.slow
def test_damaged_entries_fail_no_check(seed: int) -> None:
    rng, settings = random.Random(seed), settings_of(10, 60.0)
    made = np.random.default_rng(seed).normal(size=(20, DIMENSIONS)).astype(np.float32)
    for number in range(40):
        part = Written(settings)
        for place, vector in enumerate(made):
            part.score(vector, T0 + place)
        fields = entry_fields(19, 19, T0 + 19, MODEL, unit(made[0], DIMENSIONS))
        if number == 0:
            for place, (_, value) in enumerate(bad_entries(fields)):
                part.log.apply(b"1:1034:%d" % (100 + place), value, part.log.end)
            assert part.entries() == 10
        used = [slot_key(place, 10, 1) for place in range(20)]
        for _ in range(rng.randint(1, 8)):
            part.log.apply(some_key(rng, used), mutated(rng, [packed(fields)]), part.log.end)
        part.entries()
        decoded = decode_all([mutated(rng, [packed(fields)]) for _ in range(10)])
        if entries := [entry for entry in decoded if isinstance(entry, Entry)]:
            traces._capacity(settings, {0: traces._latest(entries)})


def test_a_long_list_names_the_ten_greatest() -> None:
    sizes = {number: 100 + number for number in range(12)}
    assert _sizes(sizes).startswith("1266 live: 111 in partition 11, 110 in partition 10, ")
    assert _sizes(sizes).endswith(", 102 in partition 2, at most 101 in each other")
    records = [(f"agent-{number}", " x", Standing(0.25, number, number / 2)) for number in range(12)]
    assert _standings(records).startswith('12: agent-11 in " x": 5.5 of 11 succeeded, used 0.2500; agent-10 in')
    assert _standings(records).endswith("; and 2 more")
