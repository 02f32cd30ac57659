"""Publishing: the order of steps, what follows a failure, and records that fit. The producer is the test's."""

import asyncio
import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError
from aiokafka.structs import OffsetAndMetadata

from worker import publisher as publisher_module
from worker.pipeline import OutputRecord
from worker.publisher import (
    TRUNCATED_HEADER,
    AtLeastOncePublisher,
    Batch,
    ExactlyOncePublisher,
    OutputTopic,
    PublishError,
    fit_dead_letter,
    offset_metadata,
    send_all,
    stream_time_from,
)

SOURCE = TopicPartition("traces", 5)
TOPICS = {
    "accepted": OutputTopic("traces.accepted", 4, 1000),
    "rejected": OutputTopic("traces.rejected", 8, 1000),
    "dead_letter": OutputTopic("traces.dead-letter", 1, 2000),
}


def output(kind: str, value: bytes = b"v") -> OutputRecord:
    return OutputRecord(kind, b"k", value, [("h", b"1")], 77)


BATCH = Batch([output("accepted"), output("dead_letter"), output("rejected")], [(b"0", b"e0"), (b"1", b"e1")], 42, 1234)


class FakeBatch(list[Any]):
    """A producer's batch that takes two records."""

    def append(self, *, timestamp: Any, key: Any, value: Any, headers: Any) -> Any:  # type: ignore[override]
        if len(self) == 2:
            return None
        super().append((value, key, timestamp, list(headers)))
        return object()

    def close(self) -> None:
        pass


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
OFFSET = {SOURCE: OffsetAndMetadata(42, "kp1:1234")}


@pytest.fixture
async def exactly_once(monkeypatch: pytest.MonkeyPatch) -> tuple[ExactlyOncePublisher, Any]:
    monkeypatch.setattr(publisher_module, "AIOKafkaProducer", FakeProducer)
    publisher = ExactlyOncePublisher({"bootstrap_servers": "b:1"}, "group", SOURCE, TOPICS, "cache", 0.2)
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
        assert str(caught.value).startswith(f"topic {step}, partition 5: ")
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

    publisher = AtLeastOncePublisher(producer, SOURCE, TOPICS, "cache", commit, 30.0)
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
    assert commits == [(SOURCE, 42, "kp1:1234")]
    await publisher.stop()
    assert producer.calls == SENDS  # the producer is shared: neither started nor stopped here


async def test_at_least_once_commits_nothing_after_a_failure() -> None:
    producer: Any = FakeProducer()
    producer.errors["traces.accepted"] = OSError("too large")

    async def commit(*arguments: Any) -> None:
        raise AssertionError("committed")

    with pytest.raises(PublishError, match=r"topic traces.accepted, partition 5: .*too large"):
        await AtLeastOncePublisher(producer, SOURCE, TOPICS, "cache", commit, 30.0).publish(BATCH)


async def test_records_of_a_topic_keep_their_order_over_several_batches_and_topics_with_one_partition() -> None:
    producer: Any = FakeProducer()
    outputs = [output(kind, b"%d" % i) for i, kind in enumerate(["accepted", "dead_letter", "accepted"] * 3)]
    await send_all(producer, 5, Batch(outputs, [], 1, None), TOPICS, "cache")
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


# -- dead letters that fit their topic


def test_a_dead_letter_that_fits_is_unchanged() -> None:
    record = output("dead_letter", b"x" * 1000)
    assert fit_dead_letter(record, 2000) is record


def test_a_dead_letter_is_cut_to_the_topic_s_limit_and_says_so() -> None:
    record = output("dead_letter", bytes(range(256)) * 40)
    cut = fit_dead_letter(record, 2000)
    assert cut.value is not None
    assert record.value is not None
    assert record.value.startswith(cut.value)
    assert len(cut.value) > 1000
    assert cut.headers == [*record.headers, (TRUNCATED_HEADER, b"%d of 10240 bytes kept" % len(cut.value))]
    assert (cut.key, cut.kind, cut.timestamp_ms) == (record.key, record.kind, record.timestamp_ms)


def wire_size(record: OutputRecord) -> int:
    """Return an upper bound of the record's bytes in a batch of its own (61 of the batch, varints of at most 5)."""
    headers = sum(len(name.encode()) + len(value) + 10 for name, value in record.headers)
    return 61 + 30 + len(record.key or b"") + len(record.value or b"") + headers


def test_whatever_is_cut_fits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        record = OutputRecord(
            "dead_letter",
            rng.choice([None, rng.randbytes(rng.randrange(200))]),
            rng.choice([None, b"", rng.randbytes(rng.randrange(20_000))]),
            [("h" * rng.randrange(9), rng.randbytes(rng.randrange(80))) for _ in range(rng.randrange(9))],
            None,
        )
        limit = rng.randrange(2500, 20_000)
        assert wire_size(fit_dead_letter(record, limit)) <= limit


def test_a_header_may_have_no_value() -> None:
    record = OutputRecord("dead_letter", None, b"x" * 5000, [("h", None)], None)  # type: ignore[list-item]
    assert fit_dead_letter(record, 2000).headers[0] == ("h", None)


async def test_only_dead_letters_are_cut(exactly_once: Pair) -> None:
    publisher, producer = exactly_once
    large = b"x" * 5000
    await publisher.publish(Batch([output("accepted", large), output("dead_letter", large)], [], 1, None))
    sent = {call[1]: call[3][0] for call in producer.calls if call[0] == "send"}
    assert sent["traces.accepted"] == large
    assert large.startswith(sent["traces.dead-letter"])
    assert len(sent["traces.dead-letter"]) < 2000
