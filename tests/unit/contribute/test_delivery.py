"""Delivery to the registry's stand-in: each unit once, whatever the registry does; no 429, no secret."""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from tests.support.clock import until
from tests.support.contribute import accepted_document, unit_of
from tests.support.registry import FAST, FaultKind, LocalRegistry, RegistryOptions, Tier, local_registry
from tests.support.servers import served
from worker.config import Settings, load
from worker.contribute import delivery
from worker.contribute.delivery import Delivered, Delivery, DeniedError, Gateway, Unanswered
from worker.contribute.registry import RegistryClient, registry_key
from worker.contribute.unit import Refusal, Unit
from worker.kafka.member import Stop, StoppedError
from worker.observe.metrics import ContributeMetrics


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(delivery, "UNKNOWN_LIMIT", 6000.0)


def unit(number: int = 1, **fields: Any) -> Unit:
    return unit_of(accepted_document(f"kp:trace:{number}") | fields)


class Sender:
    """What one `contribute` process has to deliver with."""

    def __init__(self, client: RegistryClient, metrics: ContributeMetrics, late_seconds: float) -> None:
        self.metrics = metrics
        self.gateway = Gateway(client, metrics, None)
        self.delivery = Delivery(self.gateway, metrics, late_seconds, "group")
        self.stop = Stop()
        self.noted = 0

    async def deliver(self, posted: Unit) -> Delivered | Refusal:
        async with asyncio.timeout(60):
            result = await self.delivery.deliver(posted, self.stop, self._note, math.inf, {})
        assert not isinstance(result, Unanswered)  # no number of answers is given
        return result

    async def status(self, posted: Unit) -> int:
        """Deliver a unit that is not refused; return 201 if it was posted, 200 if it was there."""
        result = await self.deliver(posted)
        assert isinstance(result, Delivered)
        return result.status

    async def _note(self) -> None:
        self.noted += 1

    def retries(self, cause: str) -> float:
        return sample(self.metrics, "kp_contribute_retries_total", cause=cause)


def sample(metrics: ContributeMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def sender(
    url: str, key: str = "kp_0123456789abcdef", timeout_seconds: float = 1.0, late_seconds: float = 0.5, **settings: Any
) -> AsyncIterator[Sender]:
    metrics = ContributeMetrics(CollectorRegistry())
    given: Settings = load(**{"registry_key": key, **settings})
    async with RegistryClient(url, registry_key(given), timeout_seconds, metrics) as client:
        yield Sender(client, metrics, late_seconds)


async def test_a_unit_is_posted_once_and_found_the_second_time() -> None:
    async with local_registry(tier=FAST) as registry, sender(registry.url, registry.key) as mine:
        first = await mine.deliver(unit())
        assert (first.status, first.time != "") == (201, True)
        assert await mine.deliver(unit()) == Delivered(200, first.time)
        state = registry.store.state()
    assert state["units"] == {"kp:trace:1": 1}
    assert state["answers"] == {"GET 404": 1, "POST 201": 1, "GET 200": 1}


async def test_an_id_with_other_content_is_refused_and_not_replaced() -> None:
    async with local_registry(tier=FAST) as registry, sender(registry.url, registry.key) as mine:
        other = registry.store.register("kp:agent:other", FAST)
        assert (await registry.post(json.loads(unit().body), other)).status == 201
        refused = await mine.deliver(unit(outcome={"result_summary": "Other", "confidence": 1}))
        assert (refused.reason, refused.status) == ("conflict", 200)
        state = registry.store.state()
    assert state["overwritten"] == []
    assert state["units"] == {"kp:trace:1": 1}


async def test_ids_with_any_character_are_looked_up_as_they_are() -> None:
    names = ["a/b", "%2F", "ü 中", "?q=1#f", "..", "a+b&c", "%", "'\""]
    async with local_registry(tier=FAST) as registry, sender(registry.url, registry.key) as mine:
        for status in (201, 200):
            for name in names:
                assert await mine.status(unit(id=f"kp:trace:{name}")) == status, name


async def test_what_the_registry_refuses_comes_with_status_and_issues() -> None:
    async with local_registry(tier=FAST) as registry, sender(registry.url, registry.key) as mine:
        broken = unit()
        document = {**broken.document, "outcome": {}}
        refused = await mine.deliver(Unit(broken.trace_id, json.dumps(document).encode(), document, {}))
        assert (refused.reason, refused.status) == ("invalid_unit", 400)
        assert json.loads(refused.issues)[0]["path"].startswith("outcome")


@pytest.mark.slow
@pytest.mark.parametrize("idempotency", [True, False])
@pytest.mark.parametrize("kind", list(FaultKind))
async def test_faults_lose_nothing_and_post_nothing_twice(
    kind: FaultKind, idempotency: bool, seed: int, long: bool
) -> None:
    count = 15 if long else 8
    options = RegistryOptions(idempotency=idempotency, faults={kind: 0.4}, slow_seconds=0.3, seed=seed)
    timeout = 0.1 if kind is FaultKind.SLOW else 2.0
    async with local_registry(options, tier=FAST) as registry, sender(registry.url, registry.key, timeout) as mine:
        for number in range(count):
            await mine.status(unit(number))
        await asyncio.sleep(0.4 if kind is FaultKind.SLOW else 0)
        state = registry.store.state()
    assert state["units"].keys() == {f"kp:trace:{number}" for number in range(count)}
    if kind is not FaultKind.SLOW:  # a slow request may land after the look-up; all others have failed or finished
        assert set(state["units"].values()) == {1}
    assert state["429s"] == {}
    assert "redirect followed" not in state["answers"]


async def test_a_stored_refusal_is_asked_for_again_with_another_key() -> None:
    """The store keeps a 403; the reputation that it lacked is there now."""
    async with local_registry(tier=FAST) as registry:
        key = registry.store.register("kp:agent:new", FAST, reputation=0.0)
        async with sender(registry.url, key) as mine:
            with pytest.raises(DeniedError, match=r"reputation of at least 0\.1"):
                await mine.deliver(unit())
            registry.store.reputation["kp:agent:new"] = 1.0
            assert await mine.status(unit()) == 201
        assert mine.retries("stored_answer") == 1


async def test_a_stored_success_is_checked_because_the_unit_may_be_gone() -> None:
    async with local_registry(tier=FAST) as registry, sender(registry.url, registry.key) as mine:
        await mine.deliver(unit())
        del registry.store.entries["kp:trace:1"]
        await mine.status(unit())
        assert (await registry.get("kp:trace:1")).status == 200
        assert sample(mine.metrics, "kp_contribute_late_total") == 0


async def test_a_revoked_key_is_denied() -> None:
    async with local_registry(tier=FAST) as registry, sender(registry.url, "kp_ffffffffffffffff") as mine:
        with pytest.raises(DeniedError, match=r"revoked"):
            await mine.deliver(unit())
        assert registry.store.state()["429s"] == {"unknown": 1}


@pytest.mark.slow
async def test_after_a_429_nothing_is_sent_for_half_an_hour() -> None:
    async with local_registry(tier=Tier(3, 100)) as registry, sender(registry.url, registry.key) as mine:
        for number in range(3):  # another program of the same agent uses up the limit
            await registry.post(json.loads(unit(100 + number).body))
        working = asyncio.create_task(mine.deliver(unit()))
        await until(lambda: mine.noted)
        assert 1800 < mine.gateway.blocked_seconds() < 2400
        before = registry.store.state()["answers"]
        await asyncio.sleep(1.0)
        assert registry.store.state()["answers"] == before
        mine.stop.set()
        with pytest.raises(StoppedError):
            await working
        assert registry.store.state()["429s"] == {"kp:agent:test": 1}
        assert mine.retries("rate_limit") == 1


async def test_a_429_from_a_clock_that_was_ahead_counts_as_now() -> None:
    """Its time is committed with the offsets: without that, each restart for a year would wait for half an hour."""
    async with sender("http://127.0.0.1:9") as mine:
        mine.gateway.remember_429(time.time() + 365 * 86_400, 1900)
        assert mine.gateway.blocked_seconds() > 1800
        assert mine.gateway.limited_at <= time.time()


async def test_a_gateway_that_compresses_what_may_be_compressed_is_understood() -> None:
    """Without Accept-Encoding any coding is allowed (RFC 9110, 12.5.3)."""
    async with local_registry(tier=FAST) as registry:

        async def compressing(request: web.Request) -> web.Response:
            answer = await passed_on(registry, request, await request.read())
            if request.headers.get("Accept-Encoding") != "identity":
                answer.enable_compression(web.ContentCoding.gzip)
            return answer

        async with served(compressing) as url, sender(url, registry.key) as mine:
            assert (await mine.status(unit()), mine.retries("unexpected_answer")) == (201, 0)


async def passed_on(registry: LocalRegistry, request: web.Request, body: bytes) -> web.Response:
    names = ("Authorization", "Idempotency-Key", "Content-Type")
    headers = {name: request.headers[name] for name in names if name in request.headers}
    answer = await registry.request(request.method, request.path_qs, body or None, "", **headers)
    kept = {name: value for name, value in answer.headers.items() if name.startswith(("X-", "Idempotency", "KP-"))}
    return web.Response(status=answer.status, body=answer.body, headers=kept, content_type="application/json")


@pytest.mark.slow
@pytest.mark.parametrize("idempotency", [True, False])
async def test_a_request_that_lands_after_the_look_up_is_counted_and_leaves_one_unit(idempotency: bool) -> None:
    """The first POST is held back until the second one is answered."""
    held: list[asyncio.Task[Any]] = []
    second_answered = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST" and not held:

            async def land() -> None:
                await second_answered.wait()
                await asyncio.sleep(0.05)  # another millisecond of the registry's clock
                headers = {"Authorization": request.headers["Authorization"]}
                await registry.request("POST", "/v1/knowledge", body, "", **headers)

            held.append(asyncio.create_task(land()))
            await asyncio.sleep(5)
        answer = await passed_on(registry, request, body)
        if request.method == "POST":
            second_answered.set()
        return answer

    options = RegistryOptions(idempotency=idempotency)
    async with (
        local_registry(options, tier=FAST) as registry,
        served(hold) as url,
        sender(url, registry.key, timeout_seconds=0.3) as mine,
    ):
        await mine.status(unit())
        await until(lambda: sample(mine.metrics, "kp_contribute_late_total"))
        await held[0]
        state = registry.store.state()
    assert state["units"] == {"kp:trace:1": 2}
    assert mine.retries("timeout") == 1


async def test_a_store_turns_a_late_request_into_one_effect_and_it_is_counted() -> None:
    """The first POST lands between the look-up and the second POST, and the store replays its answer."""
    posts: list[bytes] = []
    looked_up = 0

    async def late(request: web.Request) -> web.StreamResponse:
        nonlocal looked_up
        body = await request.read()
        if request.method == "POST":
            posts.append(body)
            if len(posts) == 1:
                await asyncio.sleep(5)
            if len(posts) == 2:
                await passed_on(registry, request, posts[0])  # same key
        return await passed_on(registry, request, body)

    async with (
        local_registry(tier=FAST) as registry,
        served(late) as url,
        sender(url, registry.key, timeout_seconds=0.3) as mine,
    ):
        await mine.status(unit())
        assert registry.store.state()["units"] == {"kp:trace:1": 1}
    assert sample(mine.metrics, "kp_contribute_late_total") == 1
    assert posts[0] == posts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "cause"), [(None, "connection"), (0, "connection"), (60, "timeout")])
async def test_a_server_that_is_away_closes_or_keeps_silent_is_waited_for(seconds: float | None, cause: str) -> None:
    """It neither hangs nor ends a delivery."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(10)
            await asyncio.sleep(seconds or 0)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, sender(url, timeout_seconds=0.3) as mine:
        if seconds is None:
            server.close()
        working = asyncio.create_task(mine.deliver(unit()))
        await until(lambda: mine.retries(cause) >= 3)
        assert not working.done()
        assert mine.gateway.trouble is not None
        mine.stop.set()
        with pytest.raises(StoppedError):
            await working
        server.close()


async def test_the_keys_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "key"
    async with local_registry(tier=FAST) as registry:
        path.write_text(f"{registry.key}\n")
        async with sender(registry.url, None, registry_key_file=path) as mine:  # type: ignore[arg-type]
            assert await mine.status(unit(1)) == 201
            second = registry.store.register("kp:agent:second", FAST)
            registry.store.revoke(registry.store.keys[registry.key])
            path.unlink()
            working = asyncio.create_task(mine.deliver(unit(2)))
            await until(lambda: mine.retries("key_file"))  # the secret is being replaced
            path.write_text(second)
            assert isinstance(await working, Delivered)
        state = registry.store.state()
    assert state["contributions"] == {"kp:agent:test": 1, "kp:agent:second": 1}


async def test_a_registry_that_repeats_key_and_content_puts_neither_into_logs_or_results(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "kp_0123456789abcdef0123456789abcdef"
    answers = iter([500, 301, 200, 400])

    async def echo(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"error": "not found"}, status=404, headers={"KP-Schema-Version": "v1"})
        body = (await request.read()).decode()
        error = f"{request.headers['Authorization']} password=hunter2 {body}"
        headers = {
            "KP-Schema-Version": "v1", "Location": f"/{key}", "X-Said": key, "Retry-After": key,
            "X-RateLimit-Limit": key,
        }  # fmt: skip
        return web.json_response(
            {"error": error, "issues": [{"path": key, "message": error}]}, status=next(answers), headers=headers
        )

    async with served(echo) as url, sender(url, key) as mine:
        refused = await mine.deliver(unit())
    assert isinstance(refused, Refusal)
    shown = repr(refused) + caplog.text + str(mine.gateway.trouble)
    assert key not in shown
    assert key.removeprefix("kp_") not in shown
    assert "hunter2" not in shown
