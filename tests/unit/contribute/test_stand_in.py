"""The registry's stand-in is true: what it stores, whom it limits, what it replays, and its faults."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.support.builders import trace_document
from tests.support.clock import HandClock
from tests.support.registry import (
    AGENT,
    FaultKind,
    LocalRegistry,
    RegistryOptions,
    Tier,
    TokenBuckets,
    local_registry,
    read_unit,
)
from worker.core.trace import LEGACY_CONTEXT

# -- documents


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"@context": LEGACY_CONTEXT}, "@context"),
        ({"steps": []}, "steps"),
        ({"id": "x"}, "id"),
        ({"@type": "Skill"}, "@type"),
    ],
)
async def test_an_invalid_document_is_answered_with_its_issues(change: dict[str, Any], path: str) -> None:
    async with local_registry() as registry:
        answer = await registry.post(trace_document() | change)
        assert answer.status == 400
        assert [issue["path"] for issue in answer.json()["issues"]] == [path]
        assert (await registry.post(b"no JSON")).status == 500
        assert not registry.store.state()["units"]


def test_what_is_stored_is_the_schema_s_fields_with_the_numbers_of_javascript() -> None:
    document = trace_document(
        steps=[
            {"type": "thought", "input": {"a": {"own": 2**53 + 1, "b": [1.0, -0.0, 1e300, 12345678901234567890, True]}}}
        ]
    )
    known = read_unit(json.dumps(document).encode())
    assert known["steps"][0]["input"] == {"a": {"own": 2**53, "b": [1, 0, 1e300, 12345678901234567000, True]}}
    assert json.dumps(known["steps"][0]["input"]["a"]["b"]) == "[1, 0, 1e+300, 12345678901234567000, true]"
    more = document | {"scoring": {}, "metadata": document["metadata"] | {"owner": "x"}}
    more["steps"] = [step | {"seen": 1, "tool": {"name": "t", "port": 1}} for step in document["steps"]]
    more["knowledge_graph_delta"] = {"entities": [{"name": "n", "type": "t", "extra": 1}], "relationships": []}
    stored = read_unit(json.dumps(more).encode())
    assert stored.keys() == document.keys() | {"knowledge_graph_delta"}
    assert stored["metadata"] == document["metadata"]
    assert stored["steps"][0].keys() == document["steps"][0].keys() | {"tool"}
    assert stored["steps"][0]["tool"] == {"name": "t"}
    assert stored["knowledge_graph_delta"]["entities"] == [{"name": "n", "type": "t"}]
    huge = json.dumps(document).replace(str(2**53 + 1), "1e400").encode()
    assert read_unit(huge)["steps"][0]["input"]["a"]["own"] is None


async def test_a_repeat_replaces_the_unit_and_counts_again() -> None:
    async with local_registry() as registry:
        await registry.post(trace_document(objective="first"))
        await registry.post(trace_document(objective="second"))
        other = registry.store.register("kp:agent:other")
        await registry.post(trace_document(objective="third"), other)
        assert (await registry.get("kp:trace:1")).json()["data"]["unit"]["task"]["objective"] == "third"
        state = registry.store.state()
        assert state["units"] == {"kp:trace:1": 3}
        assert state["overwritten"] == ["kp:trace:1"]
        assert state["contributions"] == {AGENT: 2, "kp:agent:other": 1}


# -- keys and limits


@pytest.mark.parametrize("limit", [30, 200, 2000])
def test_a_bucket_holds_the_limit_and_is_refilled_at_a_sixtieth_of_it(limit: int) -> None:
    """Over any time, no more than the limit and what was refilled; beyond that, Retry-After is exact."""
    buckets, now = TokenBuckets(), 1_000_000.0
    for used in range(limit):
        taken = buckets.take("a", limit, now)
        assert (taken.remaining, taken.reset, taken.retry_after) == (limit - used - 1, int(now) + 60, None)
    refused = buckets.take("a", limit, now)
    assert refused.headers["Retry-After"] == str(refused.retry_after)
    assert buckets.take("a", limit, now + 60 / limit * 0.99).retry_after is not None
    assert buckets.take("a", limit, now + 60 / limit * 1.01).retry_after is None
    assert buckets.take("b", limit, now).retry_after is None


async def test_the_third_429_within_an_hour_revokes_the_key() -> None:
    clock = HandClock(1_800_000_000)
    async with local_registry(RegistryOptions(clock=clock), tier=Tier(writes=1, reads=2)) as registry:
        second = registry.store.register(AGENT, Tier(writes=1, reads=2))
        assert (await registry.post(trace_document())).status == 201
        assert (await registry.post(trace_document())).status == 429
        assert [(await registry.get("kp:trace:1")).status for _ in range(3)] == [200, 200, 429]
        clock.now += 3601  # the first two no longer count
        assert [(await registry.post(trace_document(), second)).status for _ in range(3)] == [201, 429, 429]
        assert registry.store.state()["revoked"] == []
        assert [(await registry.get("kp:trace:1")).status for _ in range(3)] == [200, 200, 429]
        state = registry.store.state()
        assert state["revoked"] == [registry.key[:11]]  # the one that was used
        assert state["429s"] == {AGENT: 5}
        clock.now += 7200
        answer = await registry.post(trace_document())
        assert (answer.status, answer.headers["X-RateLimit-Limit"]) == (429, "0")
        assert (await registry.post(trace_document(), second)).status == 201


# -- idempotency


async def test_a_replay_is_the_first_answer_and_costs_a_token() -> None:
    clock = HandClock(1_800_000_000)
    async with local_registry(RegistryOptions(clock=clock)) as registry:
        key = {"Idempotency-Key": "one"}
        first = await registry.post(trace_document(), **key)
        again = await registry.post(trace_document("kp:trace:other"), **key)
        assert again.body == first.body
        assert "Idempotency-Replayed" not in first.headers
        assert again.headers["Idempotency-Replayed"] == "true"
        assert int(again.headers["X-RateLimit-Remaining"]) == int(first.headers["X-RateLimit-Remaining"]) - 1
        assert registry.store.state()["units"] == {"kp:trace:1": 1}
        clock.now += 24 * 3600 + 1
        assert (await registry.post(trace_document(), **key)).json()["data"]["created_at"] != first.json()["data"][
            "created_at"
        ]


async def test_refusals_are_kept_and_failures_are_not() -> None:
    async with local_registry() as registry:
        unknown = registry.store.register("kp:agent:unknown", reputation=0.0)
        assert (await registry.post(b"no JSON", **{"Idempotency-Key": "a"})).status == 500
        assert (await registry.post(trace_document(), **{"Idempotency-Key": "a"})).status == 201
        assert (await registry.post({}, **{"Idempotency-Key": "b"})).status == 400
        assert (await registry.post(trace_document(), **{"Idempotency-Key": "b"})).status == 400
        assert (await registry.post({}, unknown, **{"Idempotency-Key": "c"})).status == 403
        assert (await registry.post(trace_document(), **{"Idempotency-Key": "c"})).status == 403  # another agent's


async def test_two_requests_at_a_time_both_reach_the_store() -> None:
    async with local_registry(RegistryOptions(latency_seconds=0.05)) as registry:
        posts = [registry.post(trace_document(), **{"Idempotency-Key": "one"}) for _ in range(2)]
        assert [answer.status for answer in await asyncio.gather(*posts)] == [201, 201]
        assert registry.store.state()["units"] == {"kp:trace:1": 2}


# -- faults


async def attempt(registry: LocalRegistry) -> str:
    """Return what a client makes of the answer to a POST."""
    try:
        answer = await asyncio.wait_for(registry.post(trace_document()), 0.3)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__
    try:
        return f"{answer.status} {type(answer.json()).__name__}"
    except ValueError:
        return f"{answer.status} {answer.headers.get('Content-Type', '').partition(';')[0]}"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (FaultKind.ERROR, {"503 text/plain"}),
        (FaultKind.HTML, {"200 text/html"}),
        (FaultKind.TRUNCATED, {"201 application/json"}),
        (FaultKind.REDIRECT, {"307 "}),
        (FaultKind.RESET, {"ClientOSError", "ServerDisconnectedError"}),
    ],
)
async def test_a_fault_comes_before_or_after_the_effect(kind: FaultKind, seen: set[str], after: bool) -> None:
    async with local_registry(RegistryOptions(faults={kind: 1.0}, after=float(after))) as registry:
        assert await attempt(registry) in seen
        state = registry.store.state()
        assert state["units"] == ({"kp:trace:1": 1} if after else {})
        assert state["answers"][f"fault {kind}"] == 1
