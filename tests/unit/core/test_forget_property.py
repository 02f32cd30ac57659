"""Forgetting equals deleting from a list, whatever crashes in between; nothing forgotten comes back.

The real partition task over a compacted topic in memory (tests/support/simulated_log.py), against an oracle that is a
list (tests/support/forgetting.py) and against an undisturbed run, byte for byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.builders import TextEmbedder
from tests.support.forgetting import ANOTHER_ID, KEY, ForgetOracle, asked, honoured, recreated, with_requests
from tests.support.partition import idle_context
from tests.support.simulated_log import (
    DIMENSIONS,
    IDENTITY,
    Plan,
    RandomPool,
    SimulatedPublisher,
    Topics,
    live_on,
    random_records,
)
from worker.core import changelog, forgetting
from worker.core.changelog import Restored
from worker.core.control import NO_CONTROL, ControlConfig, control_kind
from worker.core.forgetting import Forgetting
from worker.core.records import FORGOTTEN, SourceRecord
from worker.stream import partition
from worker.stream.partition import Partition
from worker.stream.state import PartitionState


def new_task(
    rng: random.Random, plan: Plan, topics: Topics, found: Restored, pool: RandomPool, failing: float, forget: bool
) -> tuple[Partition, list[BaseException]]:
    """Start a task from what is restored. `forget` False: KP_FORGET is off."""
    failures: list[BaseException] = []
    number = found.current.number or 0
    forgetting = Forgetting(found.kept(), found.requests, number, IDENTITY.key(), plan.ttl_ms) if forget else None
    state = PartitionState(
        topics.scorer(plan, found), topics.offset, found.replay, found.current, found.housekeeping, forgetting
    )
    control = ControlConfig([KEY], "group") if forget else NO_CONTROL

    async def confirm(topic_id: str | None) -> None:
        assert topic_id == topics.topic_id

    context = idle_context(failures, pool=pool, control=control, confirm_topic=confirm)
    return Partition(0, state, SimulatedPublisher(topics, plan, rng, failing), context), failures


async def live(rng: random.Random, plan: Plan, topics: Topics, records: Sequence[SourceRecord], failing: float) -> None:
    """Live one life; sometimes with KP_FORGET off, up to the next control record."""
    todo = [record for record in records if record.offset >= topics.offset]
    forget = not failing or rng.random() < 0.7
    if not forget:
        todo = todo[: next((n for n, record in enumerate(todo) if control_kind(record.headers)), len(todo))]
    pool = RandomPool(rng)
    task, failures = new_task(rng, plan, topics, topics.restored(plan.capacity), pool, failing, forget)
    await live_on(task, failures, pool, rng, todo, failing)


def check_gone(topics: Topics, requests: dict[int, dict[str, object]], published: set[int]) -> None:
    """No live record of the changelog is an entry that a published request has removed."""
    for value in topics.entries().values():
        entry = changelog.decode(value)
        for offset, request in requests.items():
            if offset in published and entry.source_offset < offset:
                assert not asked(request, entry.trace_id, entry.agent_id)


def outputs_by_offset(topics: Topics) -> list[tuple[int, tuple[str, float] | None]]:
    """Return offset and neighbour of each scored output, in order."""
    found: list[tuple[int, tuple[str, float] | None]] = []
    for kind, _, value, *_ in topics.outputs:
        if kind in ("accepted", "rejected"):
            scoring = json.loads(value)["scoring"]  # type: ignore[arg-type]
            near = scoring["nearest"]
            found.append((scoring["source"]["offset"], None if near is None else (near["id"], near["similarity"])))
    return found


def receipts(topics: Topics) -> list[int]:
    """Return the offsets of the control records with a receipt."""
    return [json.loads(output[2])["source"]["offset"] for output in topics.outputs if output[0] == FORGOTTEN]  # type: ignore[arg-type]


async def undisturbed(plan: Plan, records: Sequence[SourceRecord]) -> Topics:
    topics = Topics()
    calm = replace(plan, exactly_once=True)
    await live(random.Random(0), calm, topics, records, failing=0)
    return topics


def compare_with_oracle(plan: Plan, records: Sequence[SourceRecord], topics: Topics) -> int:
    """Check every neighbour; return how many entries were forgotten."""
    oracle = ForgetOracle(
        plan.capacity, plan.ttl_ms, TextEmbedder(DIMENSIONS), honoured(records, topics.topic_id or "")
    )
    expected = list(oracle.nearest(records))
    got = outputs_by_offset(topics)
    assert [(offset, near and near[0]) for offset, near in got] == [(o, near and near[0]) for o, near in expected]
    for (_, ours), (_, theirs) in zip(got, expected, strict=True):
        assert ours is None or (theirs is not None and ours[1] == pytest.approx(theirs[1], abs=1e-6))
    return sum(it.forgotten_at is not None for it in oracle.all)


@pytest.mark.slow
async def test_a_crash_forgets_nothing_else(seed: int, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    forgotten = lives = 0
    rounds = 30 if long else 12
    for _ in range(rounds):
        plan = replace(Plan.random(rng), exactly_once=True)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        monkeypatch.setattr(partition, "SLACK", plan.slack)
        monkeypatch.setattr(forgetting, "MAX_REQUESTS", rng.choice([plan.slack + 1, 2048]))
        records = with_requests(rng, random_records(rng, rng.randint(5, 50)))
        calm = await undisturbed(plan, records)
        forgotten += compare_with_oracle(plan, records, calm)
        topics, requests = Topics(), honoured(records)
        while topics.offset < len(records):
            await live(rng, plan, topics, records, failing=0.08)
            check_gone(topics, requests, set(receipts(topics)))
            lives += 1
        assert topics.outputs == calm.outputs
        assert receipts(topics) == sorted(requests)
    assert forgotten > (50 if long else rounds / 2)
    assert lives > 2 * rounds


@pytest.mark.slow
async def test_requests_of_an_earlier_topic_remove_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is recreated, and its control records are written again at the same offsets."""
    rng = random.Random(seed)
    again = 0
    for _ in range(20):
        plan = replace(Plan.random(rng), ttl_ms=None, exactly_once=True)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        monkeypatch.setattr(partition, "SLACK", plan.slack)
        earlier = with_requests(rng, random_records(rng, rng.randint(20, 50)))
        topics = await undisturbed(plan, earlier)
        records = recreated(rng, earlier, random_records(rng, len(earlier)))
        topics.topic_id, topics.offset = ANOTHER_ID, 0
        topics.outputs.clear()
        assert topics.restored(plan.capacity).begins == "the source topic was recreated"
        while topics.offset < len(records):
            await live(rng, plan, topics, records, failing=0.08)
        honoured_again = honoured(records, ANOTHER_ID)
        assert receipts(topics) == sorted(honoured_again)
        compare_with_oracle(plan, records, topics)
        again += len(honoured(records)) - len(honoured_again)
    assert again > 20


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly_once", "at_least_once"])
async def test_nothing_forgotten_comes_back_whatever_is_changed(
    exactly_once: bool, seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacities change, offsets are moved back, and at least once a batch is written in part."""
    rng = random.Random(seed)
    named, rounds = 0, 20 if long else 8
    for _ in range(rounds):
        slack = rng.choice([1, 2, 5])
        monkeypatch.setattr(changelog, "SLACK", slack)
        monkeypatch.setattr(partition, "SLACK", slack)
        records = with_requests(rng, random_records(rng, 50))
        requests, topics = honoured(records), Topics()
        traces = {offset: json.loads(records[offset].value or b"") for offset, _ in _scored(records)}
        resets = 3
        while topics.offset < len(records):
            plan = Plan(rng.choice([2, 5, 9]), None, slack, exactly_once)
            start = len(topics.outputs)
            await live(rng, plan, topics, records, failing=0.1)
            for offset, near in outputs_by_offset(topics)[_scored_count(topics, start) :]:
                named += near is not None
                for at, request in requests.items():
                    by = [o for o, trace in traces.items() if near is not None and trace["id"] == near[0] and o < at]
                    agents = {traces[o]["metadata"]["agent_id"] for o in by}
                    assert not (at < offset and any(asked(request, near[0] if near else "", it) for it in agents))
            committed = {at for at in receipts(topics) if at < topics.offset}
            check_gone(topics, requests, committed if exactly_once else set())
            if resets and rng.random() < 0.1:
                resets -= 1
                topics.offset = max(0, topics.offset - rng.randint(1, 10))
                topics.metadata = ""
        await live(rng, Plan(9, None, slack, exactly_once), topics, records, failing=0)
        check_gone(topics, requests, set(receipts(topics)))
    assert named > (12.5 if long else 8) * rounds


def _scored(records: Sequence[SourceRecord]) -> list[tuple[int, tuple[str, float] | None]]:
    return list(ForgetOracle(1, None, TextEmbedder(DIMENSIONS), honoured(records)).nearest(records))


def _scored_count(topics: Topics, outputs: int) -> int:
    return sum(output[0] in ("accepted", "rejected") for output in topics.outputs[:outputs])


async def test_a_receipt_says_what_was_removed(seed: int) -> None:
    rng = random.Random(seed)
    records = with_requests(rng, random_records(rng, 60))
    topics = await undisturbed(Plan(5, None, 1024, exactly_once=True), records)
    oracle = ForgetOracle(5, None, TextEmbedder(DIMENSIONS), honoured(records))
    list(oracle.nearest(records))
    for output in topics.outputs:
        if output[0] != FORGOTTEN:
            continue
        receipt = json.loads(output[2])  # type: ignore[arg-type]
        at = receipt["source"]["offset"]
        expected = [(it.offset, it.trace_id) for it in oracle.all if it.forgotten_at == at]
        assert [(it["offset"], it["id"]) for it in receipt["removed"]["entries"]] == expected
        assert receipt["removed"]["count"] == receipt["removed"]["listed"] == len(expected)
        assert output[1] == receipt["request_id"].encode()
