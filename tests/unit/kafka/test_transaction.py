"""The transaction that the worker, `redrive` and `contribute` share: contents that change, and what it raises."""

from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from tests.support.broker_model import ABORTABLE, REFUSED, FailingCluster
from worker.kafka.producer import Producer, PublishError
from worker.kafka.rows import OutputTopic, PartitionRows, TopicRefusedError
from worker.kafka.transaction import MAX_ROUNDS, run_transaction, unknown_limit

SOURCE = TopicPartition("source", 0)
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


@pytest.fixture(params=[0, 2], ids=["V1", "V2"])
async def model(request: pytest.FixtureRequest) -> FailingCluster:
    return FailingCluster(request.param)


async def started(model: FailingCluster) -> Producer:
    producer = Producer({}, "group-0", 1.0, cluster=model)
    await producer.start()
    model.asked.clear()
    return producer


async def test_records_that_are_refused_are_left_out_of_the_next_round(model: FailingCluster) -> None:
    contents = Values(b"a", REFUSED, b"b", REFUSED)
    await run_transaction(await started(model), contents, unknown_limit, offsets=OFFSETS)
    assert contents.refused == [REFUSED, REFUSED]
    assert [value for _, value, _ in model.visible()["out-0"]] == [b"a", b"b"]
    assert model.broker.offsets == {("group", SOURCE): 42}
    assert [name for name in model.asked if "EndTxn" in name][-1] == "EndTxn(commit)"


async def test_nothing_is_asked_of_the_brokers_once_nothing_is_left(model: FailingCluster) -> None:
    producer = await started(model)
    await run_transaction(producer, Values(REFUSED), unknown_limit)
    assert "EndTxn(commit)" not in model.asked
    assert model.visible() == {}
    model.asked.clear()
    await run_transaction(producer, Values(), unknown_limit)
    assert model.asked == []


async def test_offsets_are_committed_without_records(model: FailingCluster) -> None:
    await run_transaction(await started(model), Values(), unknown_limit, offsets=OFFSETS)
    assert model.visible() == {}
    assert model.broker.offsets == {("group", SOURCE): 42}


@pytest.mark.parametrize("code", [45, 59], ids=["out of order", "unknown producer"])
async def test_it_is_run_again_in_a_new_epoch_where_a_leader_is_out_of_step(model: FailingCluster, code: int) -> None:
    producer = await started(model)
    send, model.errors["Produce"] = model.send, code

    async def once(node: int, request: Any) -> Any:
        answer = await send(node, request)
        if model.asked[-1] == "Produce":
            model.errors.pop("Produce", None)
        return answer

    model.send = once  # type: ignore[method-assign]
    await run_transaction(producer, Values(b"a"), unknown_limit, offsets=OFFSETS)
    assert [value for _, value, _ in model.visible()["out-0"]] == [b"a"]
    assert [name for name in model.asked if "EndTxn" in name] == ["EndTxn(abort)", "EndTxn(commit)"]
    await run_transaction(producer, Values(b"b"), unknown_limit, offsets=OFFSETS)
    assert [value for _, value, _ in model.visible()["out-0"]] == [b"a", b"b"]


async def test_it_runs_again_where_brokers_want_it_aborted(
    model: FailingCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as that may help; every try is aborted, and what is committed is there once."""
    producer = await started(model)
    model.errors["TxnOffsetCommit"] = ABORTABLE
    with pytest.raises(PublishError, match=rf"^partition 0: still refused after {MAX_ROUNDS} attempts$"):
        await run_transaction(producer, Values(b"a"), unknown_limit, offsets=OFFSETS, where="partition 0: ")
    assert model.asked.count("EndTxn(abort)") == MAX_ROUNDS
    assert model.visible() == {}
    with caplog.at_level("INFO"):
        model.errors.clear()
        await run_transaction(producer, Values(REFUSED, b"a"), unknown_limit, offsets=OFFSETS, where="partition 0: ")
    assert "partition 0: the transaction is run again: records are refused" in caplog.text
    assert [value for _, value, _ in model.visible()["out-0"]] == [b"a"]


async def test_contents_that_keep_what_is_refused_are_given_up(model: FailingCluster) -> None:
    contents = Values(b"a", REFUSED, leaves_out=False)
    with pytest.raises(PublishError, match=rf"^still refused after {MAX_ROUNDS} attempts$"):
        await run_transaction(await started(model), contents, unknown_limit, offsets=OFFSETS)
    assert len(contents.refused) == MAX_ROUNDS
    assert model.visible() == {}
    assert model.broker.offsets == {}


async def test_an_error_of_the_contents_aborts_and_is_raised(model: FailingCluster) -> None:
    class Strict(Values):
        def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
            raise PublishError(f"topic {part.topic.name} refuses a record: {refused[1].name}")

    with pytest.raises(PublishError, match=r"^topic out refuses a record: INVALID_TIMESTAMP$"):
        await run_transaction(await started(model), Strict(b"a", REFUSED), unknown_limit, offsets=OFFSETS)
    assert model.asked[-1] == "EndTxn(abort)"
    assert model.visible() == {}
    assert model.broker.offsets == {}
