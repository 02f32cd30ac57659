"""Publishing: the order of steps, what follows a failure, and records that fit. The producer is the test's."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError
from aiokafka.structs import OffsetAndMetadata

from worker.core.passes import Pass
from worker.core.records import OutputRecord, SourceRecord
from worker.core.trace import Reason
from worker.kafka import producer as producer_module
from worker.kafka import publisher as publisher_module
from worker.kafka.producer import PublishError, send_all
from worker.kafka.publication import Batch, OutputTopic, Publication
from worker.kafka.publisher import (
    AtLeastOncePublisher,
    ExactlyOncePublisher,
    offset_metadata,
    stream_time_from,
)

SOURCE = TopicPartition("traces", 5)
TOPICS = {
    "accepted": OutputTopic("traces.accepted", 4, 1000),
    "rejected": OutputTopic("traces.rejected", 8, 1000),
    "dead_letter": OutputTopic("traces.dead-letter", 1, 2000),
}
CACHE = OutputTopic("cache", 8, 100_000)


def output(kind: str, value: bytes = b"v") -> OutputRecord:
    return OutputRecord(kind, b"k", value, [("h", b"1")], 77)


BATCH = Batch(
    [output("accepted"), output("dead_letter"), output("rejected")],
    [(b"0", b"e0"), (b"1", b"e1")],
    42,
    1234,
    source_pass=Pass("topic-id-of-22-letters", 3, 17),
)
METADATA = "kp2:1234:topic-id-of-22-letters:3:17"


class FakeBatch(list[Any]):
    """A producer's batch that takes two records."""

    def append(self, *, timestamp: Any, key: Any, value: Any, headers: Any) -> Any:  # type: ignore[override]
        if len(self) == 2:
            return None
        super().append((value, key, timestamp, list(headers)))
        return object()

    def close(self) -> None:
        pass

    def size(self) -> int:
        return 61


class FakeProducer:
    """Writes down the calls; an acknowledgement comes when `acknowledge` is called, at once by default."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[Any] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.at_once = True
        self.errors: dict[str, Exception] = {}
        # What the publisher looks at: the task that sends, which ends when the producer is fenced; the error that
        # aiokafka keeps for the end of the transaction; the client's look-up of the coordinator.
        self._sender = SimpleNamespace(sender_task=asyncio.get_running_loop().create_future())
        self.transaction_end = asyncio.get_running_loop().create_future()
        self._txn_manager = SimpleNamespace(wait_for_transaction_end=lambda: self.transaction_end)
        self.client = SimpleNamespace(coordinator_lookup=self._look_up)

    async def _look_up(self, kind: int, key: str) -> int:
        self._fail("look-up")
        return 3

    def _fail(self, step: str) -> None:
        if step in self.errors:
            raise self.errors[step]

    def create_batch(self) -> FakeBatch:
        return FakeBatch()

    async def send_batch(self, batch: FakeBatch, topic: str, *, partition: int) -> asyncio.Future[None]:
        self.calls.append(("send", topic, partition, *batch))
        self._fail("send")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if topic in self.errors:
            future.set_exception(self.errors[topic])
        elif self.at_once:
            future.set_result(None)
        self.waiting.append(future)
        return future

    async def start(self) -> None:
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")

    async def begin_transaction(self) -> None:
        self.calls.append("begin")

    async def commit_transaction(self) -> None:
        self._fail("commit")
        self.calls.append("commit")

    async def abort_transaction(self) -> None:
        self._fail("abort")
        self.calls.append("abort")

    async def send_offsets_to_transaction(self, offsets: Any, group: str) -> None:
        self._fail("offsets")
        self.calls.append(("offsets", offsets, group))

    def steps(self) -> list[str]:
        return [call if isinstance(call, str) else call[0] for call in self.calls]


SENDS = [
    ("send", "cache", 5, (b"e0", b"0", None, []), (b"e1", b"1", None, [])),
    ("send", "traces.accepted", 1, (b"v", b"k", 77, [("h", b"1")])),  # 5 % 4
    ("send", "traces.dead-letter", 0, (b"v", b"k", 77, [("h", b"1")])),
    ("send", "traces.rejected", 5, (b"v", b"k", 77, [("h", b"1")])),
]
OFFSET = {SOURCE: OffsetAndMetadata(42, METADATA)}


@pytest.fixture
async def exactly_once(monkeypatch: pytest.MonkeyPatch) -> tuple[ExactlyOncePublisher, Any]:
    monkeypatch.setattr(producer_module, "AIOKafkaProducer", FakeProducer)
    publisher = ExactlyOncePublisher({"bootstrap_servers": "b:1"}, "group", SOURCE, TOPICS, CACHE, 0.2)
    return publisher, publisher._producer


Pair = tuple[ExactlyOncePublisher, Any]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# -- exactly once


async def test_the_producer_is_idempotent_and_transactional_by_group_and_partition(exactly_once: Pair) -> None:
    arguments = exactly_once[1].arguments
    assert arguments["bootstrap_servers"] == "b:1"
    assert arguments["transactional_id"] == "group-5"
    assert (arguments["acks"], arguments["enable_idempotence"]) == ("all", True)
    assert arguments["transaction_timeout_ms"] == 200


async def test_a_start_that_waits_for_an_earlier_transaction_says_so(
    exactly_once: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, producer = exactly_once
    monkeypatch.setattr(publisher_module, "START_PATIENCE_SECONDS", 0.01)
    free = asyncio.Event()
    monkeypatch.setattr(producer, "start", free.wait)
    starting = asyncio.create_task(publisher.start())
    await asyncio.sleep(0.05)  # the loop calls what is due earlier first
    assert not starting.done()
    free.set()
    await starting
    assert "partition 5: waiting for the transactional id group-5" in caplog.text
    assert len(caplog.records) == 1


async def test_one_transaction_holds_outputs_entries_and_offset(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    await publisher.start()
    await publisher.publish(BATCH)
    await publisher.stop()
    assert producer.calls == ["start", "begin", *SENDS, ("offsets", OFFSET, "group"), "commit", "stop"]


async def test_the_offset_waits_for_every_acknowledgement(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    producer.at_once = False
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    for future in producer.waiting[:-1]:
        future.set_result(None)
    await settle()
    assert producer.steps() == ["begin", *["send"] * 4]
    producer.waiting[-1].set_result(None)
    await publishing
    assert producer.steps()[-2:] == ["offsets", "commit"]


@pytest.mark.parametrize("step", ["send", "offsets", "commit", "cache", "traces.dead-letter"])
async def test_a_failure_at_any_step_aborts_and_is_raised(exactly_once: Pair, step: str) -> None:
    publisher, producer = exactly_once
    producer.errors[step] = OSError("broker says no")
    with pytest.raises((OSError, PublishError), match="broker says no") as caught:
        await publisher.publish(BATCH)
    assert producer.steps()[-1] == "abort"
    assert "commit" not in producer.steps()
    if "." in step or step == "cache":
        assert str(caught.value).startswith(f"topic {step}, partition {'5' if step == 'cache' else '0'}: ")
        assert caught.value.__cause__ is producer.errors[step]


async def test_an_abort_that_fails_hides_nothing(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    producer.errors = {"commit": OSError("first"), "abort": OSError("second")}
    with pytest.raises(OSError, match="first"):
        await publisher.publish(BATCH)


async def test_the_error_of_the_transaction_is_told_and_not_what_followed_from_it(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    producer.errors["traces.accepted"] = OSError("the transaction failed")
    producer.transaction_end.set_exception(PermissionError("no ACL"))
    with pytest.raises(PublishError, match="no ACL") as caught:
        await publisher.publish(BATCH)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert producer.steps()[-1] == "abort"


async def test_a_connection_that_closes_under_the_look_up_of_the_coordinator_is_tried_again(exactly_once: Pair) -> None:
    """aiokafka tries again after NodeNotReadyError alone."""
    look_up = exactly_once[1].client.coordinator_lookup
    assert await look_up(1, "group-5") == 3
    exactly_once[1].errors["look-up"] = KafkaConnectionError("closed")
    with pytest.raises(NodeNotReadyError, match="closed"):
        await look_up(1, "group-5")


async def test_a_fenced_producer_ends_the_publish_at_once(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    producer.at_once = False
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    producer._sender.sender_task.set_exception(OSError("fenced"))
    with pytest.raises(PublishError, match="fenced"):
        await asyncio.wait_for(publishing, 1)


async def test_a_broker_that_does_not_answer_is_given_up_after_the_timeout(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    producer.at_once = False
    with pytest.raises(TimeoutError):
        await publisher.publish(BATCH)
    await settle()
    assert producer.steps() == ["begin", *["send"] * 4, "abort"]


async def test_a_publish_that_is_cancelled_commits_nothing(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    producer.at_once = False
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    publishing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await publishing
    for future in producer.waiting:
        if not future.done():
            future.set_result(None)
    await settle()
    assert "commit" not in producer.steps()


# -- at least once


async def test_at_least_once_commits_the_offset_after_every_acknowledgement() -> None:
    producer: Any = FakeProducer()
    producer.at_once = False
    commits: list[Any] = []

    async def commit(*arguments: Any) -> None:
        commits.append(arguments)

    publisher = AtLeastOncePublisher(producer, SOURCE, TOPICS, CACHE, commit, 30.0)
    await publisher.start()
    publishing = asyncio.create_task(publisher.publish(BATCH))
    await settle()
    assert producer.calls == SENDS
    for future in producer.waiting[1:]:
        future.set_result(None)
    await settle()
    assert commits == []
    producer.waiting[0].set_result(None)
    await publishing
    assert commits == [(SOURCE, 42, METADATA)]
    await publisher.stop()
    assert producer.calls == SENDS  # the producer is shared: neither started nor stopped here


async def test_at_least_once_commits_nothing_after_a_failure() -> None:
    producer: Any = FakeProducer()
    producer.errors["traces.accepted"] = OSError("too large")

    async def commit(*arguments: Any) -> None:
        raise AssertionError("committed")

    with pytest.raises(PublishError, match=r"topic traces.accepted, partition 1: .*too large"):
        await AtLeastOncePublisher(producer, SOURCE, TOPICS, CACHE, commit, 30.0).publish(BATCH)


async def test_records_of_a_topic_keep_their_order_over_several_batches_and_topics_with_one_partition() -> None:
    producer: Any = FakeProducer()
    outputs = [output(kind, b"%d" % i) for i, kind in enumerate(["accepted", "dead_letter", "accepted"] * 3)]
    assert not await send_all(producer, Publication(Batch(outputs, [], 1, None), 5, TOPICS, CACHE).shipments())
    sent = {
        name: [[row[0] for row in call[3:]] for call in producer.calls if call[1] == name]
        for name in ("traces.accepted", "traces.dead-letter")
    }
    assert sent == {
        "traces.accepted": [[b"0", b"2"], [b"3", b"5"], [b"6", b"8"]],
        "traces.dead-letter": [[b"1", b"4"], [b"7"]],
    }


# -- the stream time beside the offset


@pytest.mark.parametrize("stream_time_ms", [None, 0, -1, 1_776_153_600_000, -62_135_596_800_000])
def test_the_stream_time_comes_back_from_the_metadata(stream_time_ms: int | None) -> None:
    metadata = offset_metadata(Batch([], [], 1, stream_time_ms))
    assert stream_time_from(metadata) == stream_time_ms
    assert len(metadata) < 100


@pytest.mark.parametrize(
    "metadata", ["", "kp1", "kp1:", "kp1:-", "kp1:x", "kp1:1.5", "kp2:5", "5", "kp1:5:6", " kp1:5"]
)
def test_the_metadata_of_others_is_no_stream_time(metadata: str) -> None:
    assert stream_time_from(metadata) is None


@pytest.mark.parametrize("metadata", ["kp1:--5", "kp1:²", "kp1:" + "9" * 5000])
def test_odd_metadata_is_no_stream_time_either(metadata: str) -> None:
    assert stream_time_from(metadata) is None


# -- what does not fit its topic


async def test_a_scored_output_that_its_topic_cannot_take_is_a_dead_letter_in_its_place(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    large = b"x" * 5000
    outputs = [output("accepted"), output("accepted", large), output("dead_letter", large), output("accepted")]
    records = [SourceRecord("traces", 5, n, 77, b"k", each.value, [("h", b"1")]) for n, each in enumerate(outputs)]
    replaced = await publisher.publish(Batch(outputs, [(b"0", b"e0")], 1, None, records))
    assert {position: error.reason for position, error in replaced.items()} == {1: Reason.TOO_LARGE}
    assert "topic traces.accepted accepts 1000" in replaced[1].message
    sent: dict[str, list[Any]] = {}
    for _, topic, _, *rows in (call for call in producer.calls if call[0] == "send"):
        sent.setdefault(topic, []).extend(rows)
    assert [row[0] for row in sent["traces.accepted"]] == [b"v", b"v"]
    assert sent["cache"] == [(b"e0", b"0", None, [])], "it was scored"
    letters = sent["traces.dead-letter"]
    assert [dict(row[3]).get("kp-error-reason") for row in letters] == [b"too_large", None]
    assert all(large.startswith(row[0]) and 1000 < len(row[0]) < 2000 for row in letters)
