"""Publishing and the transaction below it: the order of steps, failures, records that fit. The brokers are a model."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import ProducerFenced, TopicAuthorizationFailedError
from aiokafka.structs import OffsetAndMetadata

from tests.support.broker_model import ABORTABLE, REFUSED, FailingCluster
from tests.support.partition import settle
from worker.core.records import OutputRecord, SourceRecord
from worker.core.trace import Reason
from worker.kafka import producer as producer_module
from worker.kafka import publisher as publisher_module
from worker.kafka import transaction as transaction_module
from worker.kafka.aiokafka_private import UnansweredError
from worker.kafka.producer import INVALID_TXN_STATE, Producer, PublishError
from worker.kafka.publisher import Commit, Publisher
from worker.kafka.rows import OutputTopic, PartitionRows, TopicRefusedError
from worker.kafka.transaction import MAX_ROUNDS, run_transaction, unknown_limit

SOURCE = TopicPartition("traces", 5)
TOPICS = {
    "accepted": OutputTopic("traces.accepted", 4, 1000),
    "rejected": OutputTopic("traces.rejected", 8, 1000),
    "dead_letter": OutputTopic("traces.dead-letter", 1, 2000),
    "judged": OutputTopic("traces.judged", 4, 1000),
}
CACHE = OutputTopic("cache", 8, 100_000)


def output(kind: str, value: bytes = b"v") -> OutputRecord:
    return OutputRecord(kind, b"k", value, [("h", b"1")], 77)


BATCH = Commit(
    [output("accepted"), output("dead_letter"), output("rejected")],
    [(b"0", b"e0"), (b"1", b"e1")],
    42,
    "kp2:1234:topic-id-of-22-letters:3:17",
)

SENT = {
    "cache-5": [(b"0", b"e0", []), (b"1", b"e1", [])],
    "traces.accepted-1": [(b"k", b"v", [("h", b"1")])],  # 5 % 4
    "traces.dead-letter-0": [(b"k", b"v", [("h", b"1")])],
    "traces.rejected-5": [(b"k", b"v", [("h", b"1")])],
}

TOPIC_AUTHORIZATION_FAILED = 29


Pair = tuple[Publisher, FailingCluster]


@pytest.fixture(params=[0, 2], ids=["V1", "V2"])
async def exactly_once(request: pytest.FixtureRequest) -> Pair:
    cluster = FailingCluster(request.param)
    publisher = Publisher(Producer({}, "group-5", 30.0, cluster=cluster), "group", SOURCE, TOPICS, CACHE)
    await publisher.start()
    cluster.asked.clear()
    return publisher, cluster


async def produced(cluster: FailingCluster, times: int) -> None:
    """Return when Produce was sent so often: on a busy machine no fixed time is enough."""
    async with asyncio.timeout(30):
        while cluster.asked.count("Produce") < times:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# -- exactly once


async def test_a_start_that_waits_for_an_earlier_transaction_says_so(
    exactly_once: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, cluster = exactly_once
    monkeypatch.setattr(publisher_module, "START_PATIENCE_SECONDS", 0.01)
    free = asyncio.Event()
    monkeypatch.setattr(cluster, "start", free.wait)
    starting = asyncio.create_task(publisher.start())
    await asyncio.sleep(0.05)  # the loop calls what is due earlier first
    assert not starting.done()
    free.set()
    await starting
    assert "partition 5: waiting for the transactional id group-5" in caplog.text
    assert len(caplog.records) == 1


async def test_one_transaction_holds_outputs_entries_and_offset(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    await publisher.publish(BATCH)
    v1 = ["AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn(commit)"]
    v2 = ["Produce", "TxnOffsetCommit", "EndTxn(commit)"]
    assert cluster.asked == (v2 if cluster.broker.transactions else [*v1, "InitProducerId"]), "an epoch for each"
    assert cluster.visible() == SENT
    assert cluster.broker.offsets == {("group", SOURCE): 42}
    assert cluster.broker.metadata == {("group", SOURCE): BATCH.metadata}
    await publisher.stop()
    assert cluster.stopped


async def test_the_offset_waits_for_every_acknowledgement(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    cluster.gate.clear()
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    assert len(cluster.asked) == 1
    assert cluster.visible() == {}
    cluster.gate.set()
    await publishing
    assert cluster.visible() == SENT


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("Produce", "topic cache, partition 5: "),
        ("TxnOffsetCommit", "TxnOffsetCommit: "),
    ],
)
async def test_a_failure_before_the_end_aborts_and_is_raised(exactly_once: Pair, step: str, words: str) -> None:
    publisher, cluster = exactly_once
    cluster.errors[step] = TOPIC_AUTHORIZATION_FAILED
    with pytest.raises(PublishError, match="TopicAuthorizationFailedError") as caught:
        await publisher.publish(BATCH)
    assert str(caught.value).startswith(words)
    assert isinstance(caught.value.__cause__, TopicAuthorizationFailedError)
    assert cluster.asked[-1] == "EndTxn(abort)"
    assert cluster.visible() == {}
    assert cluster.broker.offsets == {}


async def test_an_end_that_may_be_committed_is_not_aborted(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    cluster.errors["EndTxn(commit)"] = 35  # UNSUPPORTED_VERSION, or anything else that nobody expects
    with pytest.raises(PublishError, match=r"EndTxn\(commit\): "):
        await publisher.publish(BATCH)
    assert "EndTxn(abort)" not in cluster.asked


async def test_a_transaction_that_a_successor_has_ended_means_fenced() -> None:
    cluster = FailingCluster(2)
    publisher = Publisher(Producer({}, "group-5", 30.0, cluster=cluster), "group", SOURCE, TOPICS, CACHE)
    await publisher.start()
    cluster.errors["EndTxn(commit)"] = INVALID_TXN_STATE
    with pytest.raises(ProducerFenced, match=r"group-5: EndTxn\(commit\)"):
        await publisher.publish(BATCH)
    assert "EndTxn(abort)" not in cluster.asked


async def test_an_abort_that_fails_hides_nothing(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    cluster.errors = {"Produce": TOPIC_AUTHORIZATION_FAILED, "EndTxn(abort)": 35}
    with pytest.raises(PublishError, match="topic cache, partition 5: TopicAuthorizationFailedError"):
        await publisher.publish(BATCH)


async def test_a_silent_broker_is_given_up(exactly_once: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "ABORT_SECONDS", 0.05)
    publisher, cluster = exactly_once
    publisher.producer._timeout_ms = 200
    cluster.gate.clear()
    with pytest.raises(PublishError, match=r"not finished after 0\.2 s, waiting for ") as caught:
        await publisher.publish(BATCH)
    assert isinstance(caught.value.__cause__, TimeoutError), "errors.remedy looks for it"
    assert not [name for name in cluster.asked if "commit" in name]


async def test_a_batch_waits_for_a_topic_that_is_missing(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    cluster.broker.deleted.add("traces.rejected")
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await asyncio.sleep(0.05)
    assert not publishing.done()
    assert not cluster.broker.logs
    cluster.broker.deleted.clear()
    await publishing
    assert cluster.visible() == SENT


async def test_a_publish_that_is_cancelled_commits_nothing(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    cluster.gate.clear()
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    publishing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await publishing
    cluster.gate.set()
    await settle()
    assert "EndTxn(commit)" not in cluster.asked


# -- at least once


def at_least_once(cluster: FailingCluster, commit: Any) -> Publisher:
    return Publisher(Producer({}, None, 30.0, cluster=cluster), "group", SOURCE, TOPICS, CACHE, commit_offset=commit)


async def test_at_least_once_commits_the_offset_after_every_acknowledgement() -> None:
    cluster = FailingCluster()
    cluster.gate.clear()
    commits: list[Any] = []

    async def commit(*arguments: Any) -> None:
        assert cluster.visible() == SENT
        commits.append(arguments)

    publisher = at_least_once(cluster, commit)
    await publisher.start()
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    assert cluster.asked == ["InitProducerId", "Produce"]
    assert commits == []
    cluster.gate.set()
    await publishing
    assert commits == [(SOURCE, 42, BATCH.metadata)]
    await publisher.stop()
    assert cluster.stopped


async def test_at_least_once_commits_nothing_after_a_failure() -> None:
    cluster = FailingCluster()
    cluster.errors["Produce"] = TOPIC_AUTHORIZATION_FAILED

    async def commit(*arguments: Any) -> None:
        raise AssertionError("committed")

    publisher = at_least_once(cluster, commit)
    await publisher.start()
    with pytest.raises(PublishError, match=r"topic cache, partition 5: .*TopicAuthorizationFailed"):
        await publisher.publish(BATCH)


# -- records


async def test_records_keep_their_order_over_batches(exactly_once: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two records or so; accepted and dead letters come in turns."""
    monkeypatch.setattr(producer_module, "MAX_BATCH_BYTES", 100)
    publisher, cluster = exactly_once
    outputs = [output(kind, b"%d" % i) for i, kind in enumerate(["accepted", "dead_letter", "accepted"] * 30)]
    await publisher.publish(Commit(outputs, [], 1, ""))
    assert cluster.asked.count("Produce") > 15
    values = {name: [int(value) for _, value, _ in records] for name, records in cluster.visible().items()}
    assert values == {
        "traces.accepted-1": [i for i in range(90) if i % 3 != 1],
        "traces.dead-letter-0": list(range(1, 90, 3)),
    }


def records_of(outputs: list[OutputRecord]) -> list[SourceRecord]:
    return [SourceRecord("traces", 5, n, 77, b"k", each.value, [("h", b"1")]) for n, each in enumerate(outputs)]


@pytest.mark.parametrize(("kind", "what"), [("rejected", "scored trace"), ("judged", "record of a verdict")])
async def test_a_dead_letter_says_what_its_topic_could_not_take(exactly_once: Pair, kind: str, what: str) -> None:
    outputs = [output(kind, b"x" * 5000)]
    replaced = await exactly_once[0].publish(Commit(outputs, [], 1, "", records_of(outputs)))
    assert replaced[0].message.startswith(f"the {what} has ")


async def test_a_scored_output_that_its_topic_cannot_take_is_a_dead_letter_in_its_place(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    large = b"x" * 5000
    outputs = [output("accepted"), output("accepted", large), output("dead_letter", large), output("accepted")]
    replaced = await publisher.publish(Commit(outputs, [(b"0", b"e0")], 1, "", records_of(outputs)))
    assert {position: error.reason for position, error in replaced.items()} == {1: Reason.TOO_LARGE}
    assert "topic traces.accepted accepts 1000" in replaced[1].message
    sent = cluster.visible()
    assert [value for _, value, _ in sent["traces.accepted-1"]] == [b"v", b"v"]
    assert sent["cache-5"] == [(b"0", b"e0", [])], "it was scored"
    letters = sent["traces.dead-letter-0"]
    assert reasons(letters) == ["too_large", None]
    assert all(large.startswith(value) and 1000 < len(value) < 2000 for _, value, _ in letters)


@pytest.mark.parametrize("way", ["exactly_once", "at_least_once"])
async def test_a_raised_limit_is_found_before_an_output_is_replaced(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic is looked up once in a while, also by several partitions at once; a letter waits for the answer."""
    limits = {"traces.accepted": 1000, "traces.dead-letter": 2000}
    asked: list[str] = []

    async def limit_of(topic: str) -> int:
        asked.append(topic)
        await asyncio.sleep(0.01)
        return limits[topic]

    async def commit(source: TopicPartition, offset: int, metadata: str) -> None:
        pass

    topics = {
        "accepted": OutputTopic("traces.accepted", 4, 1000),
        "dead_letter": OutputTopic("traces.dead-letter", 1, 2000),
    }

    async def publish(*headers: tuple[str, bytes]) -> tuple[list[str], list[int]]:
        """Return why outputs were replaced, and the lengths of all dead letters. `headers`: of the records."""
        cluster = FailingCluster(2)
        once = way == "exactly_once"
        producer = Producer({}, "group-5" if once else None, 30.0, cluster=cluster)
        publisher = Publisher(producer, "group", SOURCE, topics, CACHE, limit_of, None if once else commit)
        await publisher.start()
        outputs = [output("accepted", b"x" * 5000), output("dead_letter", b"x" * 5000), output("accepted")]
        records = [record._replace(headers=headers) for record in records_of(outputs)]
        replaced = await publisher.publish(Commit(outputs, [], 1, "", records))
        letters = cluster.visible().get("traces.dead-letter-0", [])
        return [str(error.reason) for error in replaced.values()], [len(value) for _, value, _ in letters]

    for reasons_found, lengths in await asyncio.gather(*(publish() for _ in range(3))):
        assert reasons_found == ["too_large"]
        assert len(lengths) == 2
        assert max(lengths) < 2000
    assert sorted(asked) == ["traces.accepted", "traces.dead-letter"]
    limits |= {"traces.accepted": 100_000, "traces.dead-letter": 100_000}
    assert (await publish())[0] == ["too_large"], "a minute has not passed"
    assert len(asked) == 2
    assert await publish(("kp-redrive-count", b"1")) == ([], [5000]), "a redriven record does not wait for it"
    assert sorted(asked[2:]) == sorted(limits)
    topics["accepted"].learn(1000)
    topics["dead_letter"].learn(2000)
    for topic in topics.values():
        topic.lowered = False
    del asked[2:]
    monkeypatch.setattr(transaction_module, "LOOK_AGAIN_SECONDS", 0.0)
    assert await publish() == ([], [5000])
    assert len(asked) == 4
    assert await publish() == ([], [5000])
    assert len(asked) == 4, "everything fits"
    topics["accepted"].learn(300)
    assert (await publish())[0] == [], "lower, and raised again meanwhile"


def reasons(letters: list[Any]) -> list[str | None]:
    found: list[Mapping[str, bytes]] = [dict(headers) for _, _, headers in letters]
    return [headers["kp-error-reason"].decode() if "kp-error-reason" in headers else None for headers in found]


async def test_what_a_topic_refuses_is_a_dead_letter_in_the_next_transaction(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    outputs = [output("accepted"), output("accepted", REFUSED), output("rejected")]
    replaced = await publisher.publish(Commit(outputs, [(b"0", b"e0")], 3, "", records_of(outputs)))
    assert {position: error.reason for position, error in replaced.items()} == {1: Reason.REFUSED_BY_TOPIC}
    assert [name for name in cluster.asked if "EndTxn" in name] == ["EndTxn(abort)", "EndTxn(commit)"]
    sent = cluster.visible()
    assert sent["cache-5"] == [(b"0", b"e0", [])]
    assert [value for _, value, _ in sent["traces.accepted-1"]] == [b"v"]
    assert reasons(sent["traces.dead-letter-0"]) == ["refused_by_topic"]


async def test_a_refusal_after_a_lost_answer_is_found_again_in_a_new_epoch(exactly_once: Pair) -> None:
    """The first try may be in the log: only a new epoch gets round its sequence numbers."""
    publisher, cluster = exactly_once
    outputs = [output("accepted"), output("accepted", REFUSED)]
    cluster.errors["Produce"] = UnansweredError("the connection was closed")
    publishing = asyncio.create_task(publisher.publish(Commit(outputs, [], 2, "", records_of(outputs))))
    await produced(cluster, 1)
    cluster.errors.clear()
    await publishing
    assert [name for name in cluster.asked if "EndTxn" in name] == ["EndTxn(abort)"] * 2 + ["EndTxn(commit)"]
    sent = cluster.visible()
    assert [value for _, value, _ in sent["traces.accepted-1"]] == [b"v"]
    assert reasons(sent["traces.dead-letter-0"]) == ["refused_by_topic"]


# -- the transaction that the worker, redrive and contribute share: contents that change, and what it raises


OFFSETS = ("group", {SOURCE: OffsetAndMetadata(42, "")})


class Values:
    """Values for one partition; `leaves_out`: what is refused is left out, otherwise it stays."""

    def __init__(self, *values: bytes, leaves_out: bool = True) -> None:
        self.values = list(values)
        self.leaves_out = leaves_out
        self.refused: list[bytes] = []
        self.topic = OutputTopic("out", 1, 1 << 20)

    def partition_rows(self) -> list[PartitionRows]:
        rows = [(b"k", value, None, []) for value in self.values]
        return [PartitionRows(self.topic, 0, rows)] if rows else []

    def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
        self.refused += [self.values[number] for number in refused]
        if self.leaves_out:
            self.values = [value for number, value in enumerate(self.values) if number not in refused]


async def test_records_that_are_refused_are_left_out_of_the_next_round(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    contents = Values(b"a", REFUSED, b"b", REFUSED)
    await run_transaction(publisher.producer, contents, unknown_limit, offsets=OFFSETS)
    assert contents.refused == [REFUSED, REFUSED]
    assert [value for _, value, _ in cluster.visible()["out-0"]] == [b"a", b"b"]
    assert cluster.broker.offsets == {("group", SOURCE): 42}
    assert [name for name in cluster.asked if "EndTxn" in name][-1] == "EndTxn(commit)"


async def test_nothing_is_asked_of_the_brokers_once_nothing_is_left(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    await run_transaction(publisher.producer, Values(REFUSED), unknown_limit)
    assert "EndTxn(commit)" not in cluster.asked
    assert cluster.visible() == {}
    cluster.asked.clear()
    await run_transaction(publisher.producer, Values(), unknown_limit)
    assert cluster.asked == []


async def test_offsets_are_committed_without_records(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    await run_transaction(publisher.producer, Values(), unknown_limit, offsets=OFFSETS)
    assert cluster.visible() == {}
    assert cluster.broker.offsets == {("group", SOURCE): 42}


@pytest.mark.parametrize("code", [45, 59], ids=["out of order", "unknown producer"])
async def test_it_is_run_again_in_a_new_epoch_where_a_leader_is_out_of_step(exactly_once: Pair, code: int) -> None:
    publisher, cluster = exactly_once
    send, cluster.errors["Produce"] = cluster.send, code

    async def once(node: int, request: Any) -> Any:
        answer = await send(node, request)
        if cluster.asked[-1] == "Produce":
            cluster.errors.pop("Produce", None)
        return answer

    cluster.send = once  # type: ignore[method-assign]
    await run_transaction(publisher.producer, Values(b"a"), unknown_limit, offsets=OFFSETS)
    assert [value for _, value, _ in cluster.visible()["out-0"]] == [b"a"]
    assert [name for name in cluster.asked if "EndTxn" in name] == ["EndTxn(abort)", "EndTxn(commit)"]
    await run_transaction(publisher.producer, Values(b"b"), unknown_limit, offsets=OFFSETS)
    assert [value for _, value, _ in cluster.visible()["out-0"]] == [b"a", b"b"]


async def test_it_runs_again_where_brokers_want_it_aborted(
    exactly_once: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as that may help; every try is aborted, and what is committed is there once."""
    publisher, cluster = exactly_once
    cluster.errors["TxnOffsetCommit"] = ABORTABLE
    with pytest.raises(PublishError, match=rf"^partition 0: still refused after {MAX_ROUNDS} attempts$"):
        await run_transaction(publisher.producer, Values(b"a"), unknown_limit, offsets=OFFSETS, where="partition 0: ")
    assert cluster.asked.count("EndTxn(abort)") == MAX_ROUNDS
    assert cluster.visible() == {}
    with caplog.at_level("INFO"):
        cluster.errors.clear()
        await run_transaction(
            publisher.producer, Values(REFUSED, b"a"), unknown_limit, offsets=OFFSETS, where="partition 0: "
        )
    assert "partition 0: the transaction is run again: records are refused" in caplog.text
    assert [value for _, value, _ in cluster.visible()["out-0"]] == [b"a"]


async def test_contents_that_keep_what_is_refused_are_given_up(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once
    contents = Values(b"a", REFUSED, leaves_out=False)
    with pytest.raises(PublishError, match=rf"^still refused after {MAX_ROUNDS} attempts$"):
        await run_transaction(publisher.producer, contents, unknown_limit, offsets=OFFSETS)
    assert len(contents.refused) == MAX_ROUNDS
    assert cluster.visible() == {}
    assert cluster.broker.offsets == {}


async def test_an_error_of_the_contents_aborts_and_is_raised(exactly_once: Pair) -> None:
    publisher, cluster = exactly_once

    class Strict(Values):
        def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
            raise PublishError(f"topic {part.topic.name} refuses a record: {refused[1].name}")

    with pytest.raises(PublishError, match=r"^topic out refuses a record: INVALID_TIMESTAMP$"):
        await run_transaction(publisher.producer, Strict(b"a", REFUSED), unknown_limit, offsets=OFFSETS)
    assert cluster.asked[-1] == "EndTxn(abort)"
    assert cluster.visible() == {}
    assert cluster.broker.offsets == {}
