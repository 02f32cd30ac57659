"""Where a partition continues, and what a restore says about new epochs; tests/kafka has offsets of real groups."""

import contextlib
import logging
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import GroupLoadInProgressError
from aiokafka.structs import OffsetAndMetadata

from tests.support.broker_model import BrokerModel
from worker.config import load
from worker.core.changelog import Committed, SourceEpoch
from worker.core.restore import Report
from worker.kafka import assignment
from worker.kafka.assignment import (
    Assignment,
    OffsetsError,
    Position,
    _position,
    read_positions,
    report_epochs,
    report_skipped,
)
from worker.kafka.protocol import CommitOffsetsV2, EndV2, InitProducerId, ProducerEpoch

OURS, OTHER = "AAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBB"
METADATA = SourceEpoch(OURS, 2, 10).metadata(99)
COMMITTED = Committed(OURS, 2, 10, 99)
TP = TopicPartition("traces", 0)
EPOCH = ProducerEpoch(1001, 0)  # the model's first


@pytest.mark.parametrize(
    ("found", "now", "expected"),
    [
        (None, OURS, Position(30, False, topic_id=OURS)),
        (OffsetAndMetadata(40, METADATA), OURS, Position(40, True, COMMITTED, OURS, metadata=METADATA)),
        (OffsetAndMetadata(30, METADATA), OURS, Position(30, True, COMMITTED, OURS, metadata=METADATA)),
        (OffsetAndMetadata(25, METADATA), OURS, Position(30, True, COMMITTED, OURS, lost=5, metadata=METADATA)),
        (OffsetAndMetadata(25, "a tool"), OURS, Position(30, True, None, OURS, lost=5, metadata="a tool")),
        (OffsetAndMetadata(40, METADATA), OTHER, Position(30, True, None, OTHER, recreated=True)),
    ],
)  # fmt: skip
def test_a_partition_whose_oldest_record_is_30(found: OffsetAndMetadata | None, now: str, expected: Position) -> None:
    position = _position(found, 30, now)
    assert position == expected
    assert position.stream_time_ms == (99 if expected.committed == COMMITTED else None)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> BrokerModel:
    """A group that has sent offset 5 in a transaction, which is not committed, of a topic with 9 records."""
    broker = BrokerModel(transactions=2)

    async def send(_: object, request: Any, *__: object) -> Any:
        return broker.answer(request.prepare(broker.versions()))

    async def topic_offsets(*_: object) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        return {TP: 0}, {TP: 9}

    admin = AsyncMock(find_coordinator=AsyncMock(return_value=1))
    monkeypatch.setattr(assignment, "admin_client", lambda client: contextlib.nullcontext(admin))
    monkeypatch.setattr(assignment, "topic_id", AsyncMock(return_value=OURS))
    monkeypatch.setattr(assignment, "topic_offsets", topic_offsets)
    monkeypatch.setattr(assignment, "send_request", send)
    monkeypatch.setattr(assignment, "RETRY_SECONDS", 0.0)
    for request in (InitProducerId("id", 1), CommitOffsetsV2("id", EPOCH, "group", {TP: OffsetAndMetadata(5, "")})):
        broker.answer(request.prepare(broker.versions()))
    return broker


async def test_an_offset_in_a_transaction_counts_when_its_end_is_written_however_late(
    broker: BrokerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator answers a commit before it writes the markers: a broker may be away in between.

    The offset before it is that of records whose outputs will be published.
    """
    broker.answer(EndV2("id", EPOCH, True).prepare(broker.versions()))
    send, asked = assignment.send_request, 0

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise GroupLoadInProgressError
        if asked == 600:
            broker.complete()
        return await send(*arguments)

    monkeypatch.setattr(assignment, "send_request", counted)
    assert (await read_positions({}, "group", "traces", [0], 60.0, stable=True))[0].offset == 5
    assert asked == 600


async def test_an_owner_gives_up_where_a_transaction_stays_open_and_a_reader_takes_the_offset_before_it(
    broker: BrokerModel,
) -> None:
    with pytest.raises(TimeoutError, match=r"not answered in 0.2 s: .* has sent an offset of traces/0; if it does not"):
        await read_positions({}, "group", "traces", [0], 0.2, stable=True)
    assert not (await read_positions({}, "group", "traces", [0], 60.0))[0].has_offset


async def test_an_offset_behind_the_changelog_fails_nothing_where_another_member_has_the_partition_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a long restore the group may rebalance: the next owner's commits are then on the changelog."""
    sender, error = AsyncMock(), OffsetsError("behind the changelog")
    factory = AsyncMock(senders=AsyncMock(return_value={TP: sender}), restore=AsyncMock(side_effect=error))
    mine: Assignment[Any, Any] = Assignment(load(), {}, "group", factory)
    monkeypatch.setattr(mine, "_read_offsets", AsyncMock())
    with pytest.raises(OffsetsError):
        await mine.change([TP], lambda: True)
    assert not await mine.change([TP], lambda: False)
    assert (mine.owned, sender.stop.await_count) == ({}, 2)


def messages(caplog: pytest.LogCaptureFixture, restored: dict[int, Report]) -> list[str]:
    with caplog.at_level(logging.INFO):
        report_epochs(restored)
    return [record.getMessage() for record in caplog.records]


def begun(number: int, start: int, why: str | None, overridden: int = 0) -> Report:
    return Report(current=SourceEpoch(number=number, start=start), begins=why, overridden=overridden)


def test_a_first_start_is_one_line_for_all_partitions(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = messages(caplog, {number: begun(1, 0, "first") for number in range(64)})
    assert line.startswith("64 partitions [0, 1, 2, ")
    assert ": epoch 1 of the source begins at offset 0 (first), with 0 earlier cache entries; 0 entries of" in line


def test_other_epochs_and_reasons_have_lines_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    lines = messages(
        caplog, {0: begun(2, 20, "moved", 3), 1: begun(1, 0, None), 2: begun(2, 30, "moved", 4), 3: begun(2, 0, "new")}
    )
    assert [line.partition(" earlier")[0] for line in lines] == [
        "2 partitions [0, 2]: epoch 2 of the source begins at offsets from 20 to 30 (moved), with 0",
        "partition 3: epoch 2 of the source begins at offset 0 (new), with 0",
    ]
    assert "; 7 entries of other epochs" in lines[0]


def test_entries_of_another_model_are_one_warning_for_all_partitions(caplog: pytest.LogCaptureFixture) -> None:
    restored = {number: begun(1, 0, None) for number in range(64)}
    for number in range(60):
        restored[number].skipped.update({"other_model": 2, "model old:00:384": 2})
    report_skipped("cache", restored, "new:00:384")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("60 partitions [0, 1, 2, ")
    assert ": skipped 120 changelog entries of another model (old:00:384), because this worker runs new:00:384" in line
    caplog.clear()
    report_skipped("cache", {63: restored[63]}, "new:00:384")
    assert not caplog.records
    report_skipped("cache", {5: restored[5]}, "new:00:384")
    assert caplog.records[0].getMessage().startswith("partition 5: skipped 2 changelog entries")
