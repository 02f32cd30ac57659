"""A partition against the stand-in with a gateway in front of it: what is refused, what waits, in which order."""

import asyncio
import gzip
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry

from tests.support.clock import until
from tests.support.contribute import GATE, accepted_document, unit_of
from tests.support.registry import FAST, LocalRegistry, local_registry
from tests.support.servers import Asked, Gateway, Reply, Rule
from worker.config import load
from worker.contribute import contributor, delivery
from worker.contribute.contributor import Contributor, Partition
from worker.contribute.delivery import Delivery, DeniedError
from worker.contribute.delivery import Gateway as Turns
from worker.contribute.registry import RegistryClient, registry_key
from worker.core.records import DEAD_LETTER, OutputRecord, SourceRecord
from worker.core.trace import Limits
from worker.kafka.assignment import Position
from worker.kafka.member import Claim, StoppedError
from worker.kafka.publisher import Commit
from worker.observe.metrics import ContributeMetrics

pytestmark = pytest.mark.slow

TP = TopicPartition("accepted", 0)
ATTACK = "1 UNION SELECT password"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE", 0.04)
    monkeypatch.setattr(delivery, "UNKNOWN_LIMIT", 60_000.0)
    monkeypatch.setattr(contributor, "STEP_SECONDS", 0.01)
    monkeypatch.setattr(delivery, "STEP_SECONDS", 0.01)


@dataclass
class Log:
    """A partition of the accepted topic, what is committed of it, and what was written in the same transactions.

    As a publisher it stands for the transactional producer of the process that works on it.
    """

    records: list[SourceRecord] = field(default_factory=list)
    committed: int = 0
    outputs: list[OutputRecord] = field(default_factory=list)
    metadata: str = ""

    def put(self, *documents: Mapping[str, Any] | bytes) -> None:
        for document in documents:
            value = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.records.append(SourceRecord(TP.topic, 0, len(self.records), 1_700_000_000_000, b"a", value))

    async def publish(self, commit: Commit) -> None:
        await asyncio.sleep(0)
        assert commit.next_offset >= self.committed, "an offset went back"
        self.outputs.extend(commit.outputs)
        self.committed, self.metadata = commit.next_offset, commit.metadata

    def written(self) -> list[str]:
        """Return the ids of receipts and the reasons of refusals, in order."""
        return [
            dict(output.headers)["kp-error-reason"].decode()
            if output.kind == DEAD_LETTER
            else json.loads(output.value or b"")["id"]
            for output in self.outputs
        ]


@dataclass
class Reader:
    """The consumer of one process."""

    log: Log
    position: int

    async def getmany(self, tp: TopicPartition, timeout_ms: int, max_records: int) -> dict[Any, Any]:
        records = self.log.records[self.position : self.position + max_records]
        self.position += len(records)
        await asyncio.sleep(0 if records else 0.01)
        return {tp: records}


@dataclass
class Scene:
    """A registry behind a gateway, and one `contribute` with its partitions."""

    registry: LocalRegistry
    gateway: Gateway
    turns: Turns
    metrics: ContributeMetrics
    log: Log = field(default_factory=Log)

    def partition(self, log: Log, limits: Limits | None = None) -> Partition:
        return Partition(
            Claim(TP, cast("Any", Reader(log, log.committed)), cast("Any", None), Position(log.committed)),
            publisher=cast("Any", log), delivery=Delivery(self.turns, self.metrics, 60, "group"),
            gate=GATE, limits=limits or Limits(),
        )  # fmt: skip

    @asynccontextmanager
    async def working(self, *more: Log, limits: Limits | None = None) -> AsyncIterator[Partition]:
        """Work on the log, and on more of them, until the block ends."""
        parts = [self.partition(log, limits) for log in (self.log, *more)]
        tasks = [asyncio.create_task(part.run()) for part in parts]
        try:
            yield parts[0]
        finally:
            for part in parts:
                part.claim.stop.set()
            for task in tasks:
                with suppress(StoppedError):
                    await task

    async def finished(self) -> None:
        await until(lambda: self.log.committed == len(self.log.records))

    async def stored(self, *numbers: int) -> None:
        """Have some traces in the registry already."""
        for number in numbers:
            assert (await self.registry.post(dict(unit_of(trace(number)).document))).status == 201

    def posts(self) -> dict[str, int]:
        """Return how often each unit was stored, in the order of their first time."""
        stored = self.registry.store.state()["units"]
        return {unit["id"]: stored[unit["id"]] for unit in self.registry.store.units()}

    def count(self, name: str, reason: str) -> float:
        return self.metrics.registry.get_sample_value(f"kp_contribute_{name}_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def scene(rule: Rule, timeout_seconds: float = 2.0) -> AsyncIterator[Scene]:
    metrics = ContributeMetrics(CollectorRegistry())
    async with local_registry(tier=FAST) as registry:
        gateway, key = Gateway(registry.url, rule), registry_key(load(registry_key=registry.key))
        async with gateway.serve() as url, RegistryClient(url, key, timeout_seconds, metrics) as client:
            yield Scene(registry, gateway, Turns(client, metrics, None), metrics)


def trace(number: int, content: str = "", **metadata: Any) -> dict[str, Any]:
    document = accepted_document(f"kp:trace:{number}", **metadata)
    document["steps"][0]["content"] = content or "nothing special"
    return document


def to_posts(reply: Reply, content: str = "") -> Rule:
    """Answer POSTs whose body holds the content."""
    return lambda asked: reply if asked.method == "POST" and content.encode() in asked.body else None


def page(status: int, body: bytes = b"<html>Forbidden</html>", kind: str = "text/html") -> Reply:
    return Reply(status, body, {"Content-Type": kind})


JSON = "application/json"


def own(status: int, error: str) -> Reply:
    """Return an error in the registry's own form."""
    return Reply(status, json.dumps({"error": error}).encode(), {"Content-Type": JSON, "KP-Schema-Version": "v1"})


REPLIES = {
    **{f"page {status}": page(status) for status in (200, 201, 204, 400, 401, 403, 404, 405, 407, 411, 413, 414, 415,
                                                     421, 422, 431, 451)},
    "firewall": page(403, b'{"message": "Forbidden"}', JSON),
    "text": page(403, b"Forbidden", "text/plain"),
    "mimic 403": page(403, b'{"error": "Write scope required"}', JSON),
    "mimic 401": page(401, b'{"error": "Authentication required"}', JSON),
    "mimic 400": page(400, b'{"error": "Invalid KnowledgeUnit", "issues": []}', JSON),
    "mimic 413": page(413, b'{"error": "Request Entity Too Large"}', JSON),
    "headed page": Reply(403, b"<html>", {"Content-Type": JSON, "KP-Schema-Version": "v1"}),
    "redirect": Reply(302, b"", {"Location": "https://login.example.org/"}),
    "truncated": page(201, b'{"data": {"id": "kp:tra', JSON),
    "another unit": page(201, b'{"data": {"id": "kp:trace:other"}}', JSON),
    "huge": page(403, b'{"error": "' + b"x" * (9 << 20) + b'"}', JSON),
    "endless": Reply(403, b" " * 65536, {"Content-Type": JSON}, times=10**6),
    "gzip bomb": Reply(200, gzip.compress(b" " * (16 << 20)), {"Content-Type": JSON, "Content-Encoding": "gzip"}),
    "slow drip": Reply(403, b" ", {"Content-Type": JSON}, times=10**6, seconds=0.05),
    "huge header": Reply(403, b"HTTP/1.1 403 No\r\nX-Policy: " + b"x" * 100_000 + b"\r\n\r\n", raw=True),
    "many headers": Reply(403, b"HTTP/1.1 403 No\r\n" + b"X-More: 1\r\n" * 50_000 + b"\r\n", raw=True),
    "no HTTP": Reply(403, b"\x16\x03\x01 not http\r\n\r\n", raw=True),
    "cut": Reply(403, b"HTTP/1.1 403 No\r\nContent-Length: 1000\r\n\r\n{", raw=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
async def test_a_trace_that_a_gateway_refuses_is_refused_and_all_others_are_posted_in_order(name: str) -> None:
    seconds = 0.3 if name == "slow drip" else 2.0
    async with scene(to_posts(REPLIES[name], ATTACK), seconds) as at:
        at.log.put(trace(0), trace(1, ATTACK), trace(2), trace(3))
        async with at.working():
            await at.finished()
        assert at.log.written() == ["kp:trace:0", "unanswerable", "kp:trace:2", "kp:trace:3"]
        assert at.posts() == {"kp:trace:0": 1, "kp:trace:2": 1, "kp:trace:3": 1}
        assert at.count("refused", "unanswerable") == 1
        assert at.gateway.refused["POST"] == 6


async def test_a_refused_trace_says_why_and_can_be_sent_again() -> None:
    async with scene(to_posts(page(403), ATTACK)) as at:
        document = trace(1, ATTACK)
        at.log.put(document, trace(2))
        async with at.working():
            await at.finished()
        (refused,) = [each for each in at.log.outputs if each.kind == DEAD_LETTER]
        headers = dict(refused.headers)
        assert (headers["kp-error-reason"], headers["kp-error-status"]) == (b"unanswerable", b"")
        assert b"status 403" in headers["kp-error-message"]
        at.gateway.rule = lambda asked: None
        at.log.put(refused.value or b"")
        async with at.working():
            await at.finished()
        assert at.posts() == {"kp:trace:2": 1, "kp:trace:1": 1}


EARLY = Reply(413, b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 6\r\n\r\n<html>", early=True)
CASES: dict[str, tuple[Rule, list[dict[str, Any]], list[str]]] = {
    **{
        f"a proxy answers before it has read the {size} bytes of a body": (
            lambda asked: EARLY if asked.length > 50_000 else None,
            [trace(1, "long " * (size // 5)), trace(2)], ["unanswerable", "kp:trace:2"],
        )
        for size in (60_000, 3_000_000)
    },
    "a look-up is refused": (
        lambda asked: page(403) if "UNION" in asked.path else None,
        [trace(1) | {"id": "kp:trace:UNION SELECT"}, trace(2)], ["unanswerable", "kp:trace:2"],
    ),
    **{
        f"{run} such traces in a row": (
            to_posts(page(403), ATTACK),
            [*(trace(number, ATTACK) for number in range(run)), trace(100), trace(101, ATTACK), trace(102)],
            ["unanswerable"] * run + ["kp:trace:100", "unanswerable", "kp:trace:102"],
        )
        for run in (2, 12)
    },
    "a refusal of the registry itself shows that it is reached": (
        lambda asked: own(400, "Invalid") if b"invalid" in asked.body else to_posts(page(403), ATTACK)(asked),
        [trace(1, ATTACK), trace(2, "invalid")], ["unanswerable", "invalid_unit"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_what_is_refused_stops_no_other_trace(case: str) -> None:
    rule, documents, written = CASES[case]
    async with scene(rule) as at:
        at.log.put(*documents)
        async with at.working(limits=Limits(max_bytes=4_000_000)):
            await at.finished()
        assert at.log.written() == written
        if case == "a look-up is refused":
            assert at.gateway.refused == {"GET": 6, "POST": 0}


@pytest.mark.parametrize(
    "refuse",
    [
        to_posts(page(403)),
        lambda asked: page(404, b'{"message": "no Route matched"}', JSON),
        to_posts(page(401, b'{"error": "Invalid API key"}', JSON)),
        lambda asked: page(200, b"<html>Sign in"),
        lambda asked: page(403) if asked.method == "GET" else None,
    ],
)
async def test_a_gateway_that_refuses_everything_for_hours_costs_nothing(refuse: Rule, monkeypatch: Any) -> None:
    """After 250 answers, which take four hours with pauses of a minute, it opens: nothing is refused."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE", 0.004)
    monkeypatch.setattr(contributor, "STEP_SECONDS", 0.002)
    async with scene(refuse) as at:
        at.log.put(trace(0), trace(1), b"no trace", trace(2, visibility="org"), *(trace(each) for each in range(3, 8)))
        async with at.working() as mine:
            await until(lambda: sum(at.gateway.refused.values()) > 250)
            assert (at.log.committed, at.log.outputs, at.posts()) == (0, [], {})
            assert mine.held == 7
            assert not mine.idle
            at.gateway.rule = lambda asked: None
            await at.finished()
        posted = [f"kp:trace:{each}" for each in (0, 1, 3, 4, 5, 6, 7)]
        assert at.log.written() == [*posted[:2], "invalid_trace", *posted[2:]]
        stored = at.posts()
        assert sorted(stored) == posted
        assert set(stored.values()) == {1}
        after_the_first = list(stored)[1:]  # if the gateway opens between two POSTs, the second one is stored first
        assert after_the_first == sorted(after_the_first)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_lone_trace_waits_until_another_one_is_answered(elsewhere: bool) -> None:
    """Also one of another partition: it shows that the registry is reached."""
    async with scene(to_posts(page(403), ATTACK)) as at:
        at.log.put(trace(1, ATTACK))
        other = Log() if elsewhere else at.log
        async with at.working(*[other] * elsewhere) as mine:
            await until(lambda: at.gateway.refused["POST"] > 20)
            assert (mine.held, at.log.committed) == (1, 0)
            other.put(trace(2))
            await at.finished()
            assert (mine.held, at.turns.trouble) == (0, None)
        assert at.log.written() == ["unanswerable", *["kp:trace:2"] * (not elsewhere)]


async def test_look_ups_that_pass_show_nothing() -> None:
    """The following traces are in the registry already: no POST is made for them."""
    async with scene(to_posts(page(403))) as at:
        await at.stored(2, 3)
        at.log.put(trace(1), trace(2), trace(3))
        async with at.working() as mine:
            await until(lambda: at.gateway.refused["POST"] > 20)
            assert (mine.held, at.log.committed, at.log.outputs) == (1, 0, [])
        assert at.log.committed == 0


async def test_the_log_names_the_trace_that_the_registry_fails_on(caplog: pytest.LogCaptureFixture) -> None:
    """Who skips it (docs/contribute.md) needs its offset."""
    async with scene(to_posts(own(500, "Internal Server Error"), ATTACK)) as at:
        at.log.put(trace(0), trace(1, ATTACK))
        async with at.working():
            await until(lambda: at.gateway.refused["POST"] > 3)
    failures = [record for record in caplog.records if "the next attempt follows" in record.message]
    assert {(each.topic, each.partition, each.offset) for each in failures} == {(TP.topic, 0, 1)}  # type: ignore[attr-defined]


async def test_only_the_registrys_own_denial_ends_the_work() -> None:
    async with scene(to_posts(own(403, "Write scope required"))) as at:
        at.log.put(trace(1))
        with pytest.raises(DeniedError, match="scope write"):
            await at.partition(at.log).run()
        assert at.log.committed == 0


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_gateways_429_of_no_request_at_all_is_not_the_registrys(method: str) -> None:
    """The registry allows this key more look-ups than nobody, so it knows it."""
    headers = {"Content-Type": JSON, "X-RateLimit-Limit": "0", "X-RateLimit-Remaining": "0"}
    mimic = Reply(429, b'{"error": "Rate limit exceeded", "retry_after": 60}', headers)
    async with scene(lambda asked: mimic if asked.method == method else None) as at:
        at.log.put(trace(1))
        async with at.working():
            await until(lambda: at.log.metadata)
        assert at.turns.blocked_seconds() > 1000
        assert at.log.committed == 0


async def test_the_time_of_a_429_is_committed_without_an_offset_behind_what_is_held() -> None:
    limited = Reply(429, b"", {"X-RateLimit-Limit": "30", "X-RateLimit-Remaining": "0"})
    async with scene(lambda asked: limited if b"limited" in asked.body else to_posts(page(403), ATTACK)(asked)) as at:
        at.log.put(trace(0), trace(1, ATTACK), trace(2, "limited"))
        async with at.working():
            await until(lambda: at.log.metadata)
        assert (at.log.committed, at.log.written()) == (1, ["kp:trace:0"])


async def test_no_more_than_so_many_traces_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributor, "MAX_WAITING", 5)
    monkeypatch.setattr(contributor, "ANSWERS", 1)
    async with scene(to_posts(page(403))) as at:
        at.log.put(*(trace(number) for number in range(20)))
        async with at.working() as mine:
            await until(lambda: at.gateway.refused["POST"] > 40)
            assert mine.held == 5
            at.gateway.rule = lambda asked: None
            await at.finished()
        assert at.log.written() == [f"kp:trace:{number}" for number in range(20)]


async def test_traces_that_need_no_post_do_not_stop_the_search_for_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a trace that a firewall refuses are many that are skipped, or in the registry already."""
    monkeypatch.setattr(contributor, "MAX_WAITING", 3)
    async with scene(to_posts(page(403), ATTACK)) as at:
        await at.stored(*range(100, 108))
        skipped = [trace(each, visibility="org") for each in range(1, 21)]
        at.log.put(
            trace(0, ATTACK), *skipped, *(trace(each) for each in range(100, 108)), *skipped, trace(200), *skipped
        )
        async with at.working():
            await at.finished()
        there = [f"kp:trace:{each}" for each in range(100, 108)]
        assert at.log.written() == ["unanswerable", *there, "kp:trace:200"]
        assert at.count("skipped", "visibility") == 60


async def test_a_proof_does_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One POST passes, then the gateway refuses all: no more are refused than can be asked again in that time."""
    monkeypatch.setattr(contributor, "PROOF_SECONDS", 0.3)
    monkeypatch.setattr(contributor, "ANSWERS", 2)
    monkeypatch.setattr(delivery, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE", 0.2)
    passes = iter([True])

    def rule(asked: Asked) -> Reply | None:
        return None if b"nothing special" in asked.body and next(passes, False) else to_posts(page(403))(asked)

    async with scene(rule) as at:
        at.log.put(*(trace(number, ATTACK) for number in range(8)))
        async with at.working() as mine:
            await until(lambda: mine.held == 8)
            at.log.put(trace(8))
            await until(lambda: at.log.written().count("unanswerable"))
            await asyncio.sleep(1.0)
            assert 1 <= at.log.written().count("unanswerable") <= 4
            assert mine.held >= 4


async def test_crashes_and_closed_gateways_leave_each_trace_posted_once_or_refused(seed: int, long: bool) -> None:
    """Processes are killed at random moments; gateways refuse all for some time; some traces are always refused."""
    rng = random.Random(seed)
    closed = False

    def rule(asked: Asked) -> Reply | None:
        return to_posts(page(rng.choice([200, 400, 403, 413])), "" if closed else ATTACK)(asked)

    async with scene(rule) as at:
        numbers = [*range(60 if long else 25), 1000]
        attacks = {number for number in numbers[:-1] if rng.random() < 0.3}
        at.log.put(*(trace(each, ATTACK if each in attacks else "") for each in numbers))
        deadline = time.monotonic() + 180
        patience = 1.0  # grows while lives end before they commit anything: others share the cores
        while (committed := at.log.committed) < len(at.log.records):
            assert time.monotonic() < deadline
            task = asyncio.create_task(at.partition(at.log).run())
            await asyncio.sleep(patience * rng.choice([0.01, 0.05, 0.3, 1.0]))
            closed = rng.random() < 0.3
            await asyncio.sleep(patience * rng.choice([0.01, 0.05, 0.3]))
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            closed = False
            patience = 1.0 if at.log.committed > committed else 1.3 * patience
            if at.log.committed == committed:  # the registry may hold all that could prove it answers POSTs
                numbers.append(numbers[-1] + 1)
                at.log.put(trace(numbers[-1]))
        ids = [each if each.startswith("kp:") else "" for each in at.log.written()]
        stored = at.posts()
    assert len(ids) == len(at.log.records)  # each has one receipt or one refusal, in its place
    assert [each for each in ids if each] == [f"kp:trace:{each}" for each, got in zip(numbers, ids, strict=True) if got]
    assert {f"kp:trace:{each}" for each in attacks}.isdisjoint(stored)
    assert set(stored.values()) == {1}
    lost = [each for each in numbers if each not in attacks and f"kp:trace:{each}" not in stored]
    assert not lost, "an innocent trace was refused"


async def test_after_a_rebalance_readiness_forgets_the_trouble_of_before() -> None:
    """Another member may have posted the trace since, and this one may have nothing to post for hours."""
    metrics = ContributeMetrics(CollectorRegistry())
    async with RegistryClient("http://127.0.0.1:9", None, 1.0, metrics) as client:
        contributor = Contributor(load(), {}, {}, client, metrics)
    member = contributor.member()
    await member.on_partitions_assigned([])
    await until(lambda: member.not_ready() is None)
    contributor.gateway.trouble = "the registry did not answer"
    assert member.not_ready() == "the registry did not answer"
    await member.on_partitions_revoked([])
    assert member.not_ready() == "waiting for partitions to be assigned and restored"
    await member.on_partitions_assigned([])
    await until(lambda: member.not_ready() is None)
    await member._consumer.stop()
