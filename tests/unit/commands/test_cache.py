"""`cache`: what it finds in a changelog, against the scorer that wrote it and brute force. No Kafka, no model."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.builders import T0, make_trace
from tests.support.damaged import bad_entries, entry_fields, mutated, packed, some_key
from worker.commands.cache.caches import (
    CachedPartition,
    PartitionLog,
    Query,
    nearest_report,
    newest_rows,
    restore_cache,
    restore_latest,
    stats,
)
from worker.commands.cache.view import print_entries, print_nearest, print_stats
from worker.commands.doctor import traces
from worker.config import Settings, load
from worker.core.changelog import Entry, Log, decode_all, encode, slot_key
from worker.core.novelty import unit
from worker.core.passes import Committed
from worker.core.records import EmbedderIdentity
from worker.core.scorer import PartitionScorer
from worker.embed.embedder import Embedding
from worker.kafka.state.restore import Position

IDENTITY = EmbedderIdentity("test", "0" * 64, 8, 256, "test", "fp32")
TOPIC_ID = "a" * 22


def settings_of(capacity: int, ttl_s: float | str) -> Settings:
    return load(cache_max_elements=capacity, cache_ttl_seconds=ttl_s)


class Written:
    """A partition's scorer, and the changelog that it leaves behind."""

    def __init__(self, partition: int, settings: Settings, model: str = IDENTITY.key()) -> None:
        self.partition = partition
        self.settings = settings
        self.model = model
        self.scorer = PartitionScorer(settings.cache_max_elements, settings.cache_ttl_ms, IDENTITY.dimensions)
        self.log = Log()
        self.offset = 0

    def score(self, vector: Any, time_ms: int, trace_id: str, agent: str = "agent") -> Any:
        scored = self.scorer.score(make_trace(trace_id), vector, time_ms)
        assert scored.sequence is not None
        assert scored.vector is not None
        value = encode(
            sequence=scored.sequence, source_offset=self.offset, stream_time_ms=scored.stream_time_ms,
            trace_id=trace_id, model=self.model, vector=scored.vector, pass_number=1, agent_id=agent,
        )  # fmt: skip
        self.log.apply(slot_key(scored.sequence, self.settings.cache_max_elements, 1), value, self.log.end)
        self.offset += 1
        return scored

    def read(self, committed: int | None = None) -> PartitionLog:
        offset = self.offset if committed is None else committed
        metadata = Committed(self.scorer.stream_time_ms, TOPIC_ID, 1, 0)
        position = Position(offset, metadata.stream_time_ms, 0, offset, metadata, TOPIC_ID)
        return PartitionLog(self.partition, position, self.log)

    def cached(self) -> CachedPartition:
        return restore_latest(self.settings, self.read())


def vectors(rng: np.random.Generator, count: int) -> Any:
    """Return vectors of which some are equal, so that ties happen."""
    made = rng.normal(size=(count, IDENTITY.dimensions)).astype(np.float32)
    made[rng.integers(count, size=count // 2)] = made[rng.integers(count, size=count // 2)]
    return made


def embedding(vector: Any) -> Embedding:
    return Embedding(vector, False)


def test_the_nearest_are_those_of_the_scorer_and_of_brute_force(seed: int) -> None:
    rng, chance = np.random.default_rng(seed), random.Random(seed)
    for _ in range(25):
        capacity, count = chance.randint(3, 40), chance.randint(1, 90)
        settings = settings_of(capacity, chance.choice(["none", 20.0]))
        parts = [Written(0, settings), Written(1, settings)]
        made, now = vectors(rng, count), T0
        for number, vector in enumerate(made):
            now += chance.choice([0, 100, 3000])
            chance.choice(parts).score(vector, now, f"kp:trace:{number % 7}")
        reads = [part.read() for part in parts]
        query = made[chance.randrange(count)] if chance.random() < 0.5 else vectors(rng, 2)[0]
        when = chance.choice([now, now + 10_000])
        caches = [restore_cache(settings, read, IDENTITY.key(), IDENTITY.dimensions) for read in reads]
        alive = [
            (entry.array(), cached.partition, entry.source_offset)
            for cached in caches
            for entry in cached.live
            if settings.cache_ttl_ms is None or max(when, cached.scorer.stream_time_ms or 0) - entry.stream_time_ms
            < settings.cache_ttl_ms
        ]  # fmt: skip
        report = nearest_report(caches, Query(("",), when), embedding(query), IDENTITY, 5)
        assert report.compared == len(alive)
        length = np.linalg.norm(query.astype(np.float64))
        best = sorted((float(row.astype(np.float64) @ query / length) for row, _, _ in alive), reverse=True)[:5]
        np.testing.assert_allclose([row.similarity for row in report.nearest], best, atol=1e-6)
        assert len({(row.partition, row.offset) for row in report.nearest}) == len(report.nearest)
        for part, cached in zip(parts, caches, strict=True):
            again = [restore_cache(settings, part.read(), IDENTITY.key(), IDENTITY.dimensions)]
            mine = nearest_report(again, Query(("",), when), embedding(query), IDENTITY, 3)
            told = part.scorer.compare(query, when).nearest
            assert (told is None) == (not mine.nearest)
            if told is not None:
                assert (told.trace_id, told.similarity) == (mine.nearest[0].trace_id, mine.nearest[0].similarity)
                assert mine.novelty == 1.0 - told.similarity
            else:
                assert mine.novelty == 0.5
            assert cached.partition == part.partition


def test_entries_are_listed_newest_first_and_by_agent_and_trace() -> None:
    settings = settings_of(4, "none")
    parts = [Written(0, settings), Written(1, settings)]
    for number in range(10):
        parts[number % 2].score(np.eye(8)[number % 8], T0 + number, f"kp:trace:{number}abc", f"agent-{number % 3}")
    caches = [part.cached() for part in parts]
    rows = newest_rows(caches, None, None)
    assert [row.trace_id for row in rows] == [f"kp:trace:{number}abc" for number in range(9, 1, -1)]
    assert [(row.partition, row.sequence, row.offset) for row in rows[:3]] == [(1, 4, 4), (0, 4, 4), (1, 3, 3)]
    assert rows[0].age_seconds == 0.0
    assert rows[2].age_seconds == 0.002
    assert [row.trace_id[9] for row in newest_rows(caches, "agent-0", None)] == ["9", "6", "3"]
    assert [row.trace_id[9] for row in newest_rows(caches, None, "5a")] == ["5"]
    assert [row.trace_id[9] for row in newest_rows(caches, None, "kp:trace:5")] == ["5"]
    assert newest_rows(caches, None, "abc") == []


@pytest.mark.slow
def test_damaged_entries_are_counted_and_no_command_fails_whatever_there_is(seed: int) -> None:
    rng, settings = random.Random(seed), settings_of(10, 60.0)
    made = vectors(np.random.default_rng(seed), 20)
    skipped = 0
    for number in range(40):
        part = Written(0, settings)
        for place, vector in enumerate(made):
            part.score(vector, T0 + place, f"kp:trace:{place}")
        expected = [entry.source_offset for entry in part.cached().live]
        model = IDENTITY.key()
        fields = entry_fields(19, 19, T0 + 19, model, unit(made[0], IDENTITY.dimensions))
        damaged = [value for _, value in bad_entries(fields)]
        if number == 0:
            for place, value in enumerate(damaged):
                part.log.apply(b"1:1034:%d" % (100 + place), value, part.log.end)
            assert [entry.source_offset for entry in part.cached().live] == expected
            assert stats(part.read(), part.cached()).corrupt == len(damaged)
        used = [slot_key(place, 10, 1) for place in range(20)]
        for _ in range(rng.randint(1, 8)):
            part.log.apply(some_key(rng, used), mutated(rng, [packed(fields)]), part.log.end)
        read, cached = part.read(), part.cached()
        for print_rows, rows in (
            (print_stats, [stats(read, cached)]),
            (lambda rows: print_entries(rows, len(rows)), newest_rows([cached], None, None)),
            (print_nearest, nearest_report([cached], Query(("",)), embedding(made[0]), IDENTITY, 5)),
        ):
            print_rows(rows)  # type: ignore[operator]
        skipped += cached.restored.skipped["corrupt"]
        decoded = decode_all([mutated(rng, [packed(fields)]) for _ in range(10)])
        entries = [*cached.live, *(entry for entry in decoded if isinstance(entry, Entry))]
        if entries:
            traces._capacity(settings, {0: traces._latest(entries)})
    assert skipped > 20


def test_only_what_is_committed_is_there() -> None:
    part = Written(0, settings_of(10, "none"))
    for number in range(6):
        part.score(np.eye(8)[number], T0 + number, f"kp:trace:{number}")
    read = part.read(4)
    assert [row.offset for row in newest_rows([restore_latest(part.settings, read)], None, None)] == [3, 2, 1, 0]
    empty = PartitionLog(0, Position(0, None, committed_offset=None, topic_id=TOPIC_ID), Log())
    cached = restore_latest(part.settings, empty)
    assert (cached.live, cached.model) == ([], "")
    assert stats(empty, cached).entries == 0


def test_the_statistics_say_what_evicts() -> None:
    busy, calm, few = (Written(number, settings_of(200, 3600)) for number in range(3))
    for number in range(300):
        busy.score(np.eye(8)[number % 8], T0 + 50 * number, f"kp:trace:{number}")
        calm.score(np.eye(8)[number % 8], T0 + 60_000 * number, f"kp:trace:{number}")
    few.score(np.eye(8)[0], T0, "kp:trace:0")
    told = stats(busy.read(), busy.cached())
    assert (told.entries, told.capacity, told.added, told.evicted) == (200, 200, 300, 100)
    assert told.rate_per_second == pytest.approx(20.0)
    assert (told.leave_after_seconds, told.leave_by) == (9.95, "capacity")
    assert told.capacity_for_ttl == 72_000
    assert "KP_CACHE_MAX_ELEMENTS to about 72000" in told.advice
    assert told.changelog_records == 300
    assert told.changelog_bytes > 300 * 4 * 8
    told = stats(calm.read(), calm.cached())
    assert (told.entries, told.leave_after_seconds, told.leave_by, told.advice) == (60, 3600.0, "ttl", "")
    assert told.oldest_age_seconds == 59 * 60
    told = stats(few.read(), few.cached())
    assert (told.rate_per_second, told.leave_by, told.advice) == (None, None, "")


def test_another_model_s_entries_are_counted_and_never_mixed_in() -> None:
    part = Written(0, settings_of(10, "none"))
    part.score(np.eye(8)[0], T0, "kp:trace:0")
    part.model = "another:1:8"
    part.score(np.eye(8)[1], T0, "kp:trace:1")
    cached = part.cached()
    assert [entry.trace_id for entry in cached.live] == ["kp:trace:1"]
    assert cached.model == "another:1:8"
    assert stats(part.read(), cached).other_model == 1
    ours = restore_cache(part.settings, part.read(), IDENTITY.key(), IDENTITY.dimensions)
    assert [entry.trace_id for entry in ours.live] == ["kp:trace:0"]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    monkeypatch.setattr("worker.commands.cache.view.text_console", lambda: Console(width=width, highlight=False))
    part = Written(11, settings_of(100_000, 3600))
    for number in range(300):
        part.offset = 7_000_000 + number
        part.score(np.eye(8)[number % 8], T0 + number, f"kp:trace:{'x' * 36}", "agent" * 9)
    read, cached = part.read(), part.cached()
    rows = newest_rows([cached], None, None)
    print_entries(rows[:5], len(rows))
    report = nearest_report([cached], Query(("",)), embedding(np.eye(8)[1]), IDENTITY, 3)
    print_nearest(report)
    listed = capsys.readouterr().out.splitlines()
    assert max(map(len, listed)) <= width
    assert listed[-4].startswith("similarity")
    assert sum("…" in line for line in listed) >= 5
    print_stats([stats(read, restore_latest(part.settings, part.read()))])
    told = capsys.readouterr().out.splitlines()
    assert len(told[0]) <= width
    assert len(told[1]) <= width
    assert told[1].split()[:2] == ["11", "300/100000"]
    assert len(msgspec.json.encode(report)) > 100
