"""Verdicts among the traces of a partition: whatever crashes in between, each counts for the traces behind it.

The real partition task over a compacted topic in memory (tests/support/simulated_log.py), against an undisturbed run,
byte for byte, and against an oracle that counts the verdicts in front of each trace on the source topic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.builders import TOPIC_ID, make_record
from tests.support.partition import new_partition
from tests.support.simulated_log import (
    DIMENSIONS,
    Plan,
    RandomPool,
    SimulatedPublisher,
    Topics,
    live_on,
    random_records,
)
from worker import InvalidTrace, make_verdict, parse_trace, sign_verdict
from worker.commands.shared.placed_verdicts import Standings, in_order, judged_verdict
from worker.core import changelog
from worker.core.control import VERDICT, control_headers, control_kind
from worker.core.passes import committed_from
from worker.core.records import JUDGED, SourceRecord
from worker.core.scorer import PartitionScorer
from worker.core.track_record import TrackRecord
from worker.stream import partition
from worker.stream.partition import Partition
from worker.stream.state import PartitionState

JUDGES = {"ci": b"c" * 32, "ann": b"a" * 32}
START = datetime(2026, 1, 1, tzinfo=UTC)


def with_verdicts(rng: random.Random, records: Sequence[SourceRecord]) -> list[SourceRecord]:
    """Return the records at new offsets, among verdicts: some are copies, corrections, forged, or dated ahead."""
    result: list[SourceRecord] = []
    traces, verdicts = [], []
    for record in records:
        try:
            parse_trace(record.value)
        except InvalidTrace:
            result.append(record._replace(offset=len(result)))
            continue
        document = json.loads(record.value or b"")
        document["metadata"]["agent_id"] = rng.choice(["ada", "bob", "eve"])
        value = json.dumps(document).encode()
        result.append(record._replace(offset=len(result), value=value))
        traces.append(parse_trace(value))
        while rng.random() < 0.4:
            trace = rng.choice(traces)
            line = {
                "trace_id": trace.id, "agent_id": trace.metadata.agent_id, "task_domain": trace.metadata.task_domain,
                "partition": 0, "success": rng.choice([True, False, 0.5]), "judge": rng.choice(list(JUDGES)),
            }  # fmt: skip
            issued = START + timedelta(seconds=len(result) + rng.choice([0, 0, -10, 30]))
            verdict = make_verdict(line, topic=record.topic, topic_id=TOPIC_ID, issued_at=issued)
            verdicts.append(sign_verdict(verdict, JUDGES[verdict.judge] if rng.random() < 0.9 else b"x" * 32))
            signed = rng.choice(verdicts) if rng.random() < 0.2 else verdicts[-1]
            now = round((START + timedelta(seconds=len(result))).timestamp() * 1000)
            made = make_record(signed.value, len(result), key=signed.key, headers=signed.headers, timestamp_ms=now)
            result.append(made)
    return result


def new_task(
    rng: random.Random, plan: Plan, topics: Topics, pool: RandomPool | None, failing: float
) -> tuple[Partition, list[BaseException]]:
    """Start a task from what is restored, as stream/partition_factory.py does."""
    failures: list[BaseException] = []
    found = topics.restored(plan.capacity)
    scorer = PartitionScorer(plan.capacity, plan.ttl_ms, DIMENSIONS, confidence="record")
    committed = committed_from(topics.metadata or "")
    scorer.restore(found.cache(), None if committed is None else committed.stream_time_ms)
    scorer.record = TrackRecord(TOPIC_ID)
    found.housekeeping.first(scorer.record.restore(found.records, topics.offset))
    state = PartitionState(scorer, topics.offset, found.replay, found.current, found.housekeeping)
    publisher = SimulatedPublisher(topics, plan, rng, failing)
    judges = {name: [key] for name, key in JUDGES.items()}
    return new_partition(0, state, publisher, failures, pool=pool, judges=judges), failures


async def live(rng: random.Random, plan: Plan, topics: Topics, records: Sequence[SourceRecord], failing: float) -> None:
    todo = [record for record in records if record.offset >= topics.offset]
    pool = RandomPool(rng)
    task, failures = new_task(rng, plan, topics, pool, failing)
    await live_on(task, failures, pool, rng, todo, failing)


def counts_at_each_trace(records: Sequence[SourceRecord]) -> dict[int, tuple[int, float]]:
    """Return, by offset, how many verdicts stand before a trace for its agent and domain, and their successes."""
    standing: dict[tuple[str, str], dict[tuple[str, str], tuple[int, float]]] = {}
    found = {}
    for record in records:
        if control_kind(record.headers) is not None:
            it = json.loads(record.value or b"")
            if list(record.headers) != control_headers(VERDICT, record.value or b"", JUDGES[it["judge"]]):
                continue  # forged
            of = standing.setdefault((it["agent_id"], it["task_domain"]), {})
            issued = round(datetime.fromisoformat(it["issued_at"]).timestamp() * 1000)
            if record.timestamp_ms is not None and record.timestamp_ms >= 0:
                issued = min(issued, record.timestamp_ms)
            if issued >= of.get((it["trace_id"], it["judge"]), (-(2**63),))[0]:
                of[it["trace_id"], it["judge"]] = issued, it["success"]
        else:
            try:
                metadata = parse_trace(record.value).metadata
            except InvalidTrace:
                continue
            of = standing.get((metadata.agent_id, metadata.task_domain), {})
            found[record.offset] = len(of), sum(success for _, success in of.values())
    return found


@pytest.mark.slow
async def test_a_crash_changes_no_byte_and_each_trace_has_the_verdicts_before_it(
    seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    judged = lives = verdicts = 0
    rounds = 30 if long else 10
    for _ in range(rounds):
        plan = replace(Plan.random(rng), exactly_once=True)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        monkeypatch.setattr(partition, "SLACK", plan.slack)
        records = with_verdicts(rng, random_records(rng, rng.randint(5, 40)))
        calm = Topics()
        await live(random.Random(0), plan, calm, records, failing=0)
        expected = counts_at_each_trace(records)
        told = Standings(
            in_order(filter(None, (judged_verdict(it[2] or b"") for it in calm.outputs if it[0] == JUDGED)))
        )
        for output in calm.outputs:
            if output[0] in ("accepted", "rejected"):
                document = json.loads(output[2])  # type: ignore[arg-type]
                scoring, of = document["scoring"], document["metadata"]
                said, offset = (
                    (scoring["confidence"]["judged"], scoring["confidence"]["succeeded"]),
                    scoring["source"]["offset"],
                )
                assert said == pytest.approx(expected[offset])
                assert said == told.at(0, offset, of["agent_id"], of["task_domain"])[1:]
                judged += said[0] > 0
        topics = Topics()
        while topics.offset < len(records):
            await live(rng, plan, topics, records, failing=0.08)
            lives += 1
        assert topics.outputs == calm.outputs
        verdicts += sum(output[0] == JUDGED for output in calm.outputs)
    assert min(judged, verdicts) > 0
    assert lives > 2 * rounds
