"""Where a partition continues, and what a restore says about new epochs; tests/kafka has offsets of real groups."""

from __future__ import annotations

import contextlib
import logging

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import GroupLoadInProgressError
from aiokafka.structs import OffsetAndMetadata

from worker.core.changelog import Committed, SourceEpoch
from worker.core.restore import Report
from worker.kafka import assignment
from worker.kafka.assignment import Position, _position, report_epochs, report_skipped
from worker.kafka.writing.protocol import UnstableOffsetError

OURS, OTHER = "AAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBB"
METADATA = SourceEpoch(OURS, 2, 10).metadata(99)
COMMITTED = Committed(99, OURS, 2, 10)


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


@pytest.mark.parametrize(("loading", "patience"), [(0, 0.4), (5, 0.4), (0, 0.0)])
async def test_a_pending_offset_is_waited_for_however_long_its_coordinator_took_to_answer(
    loading: int, patience: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for the offset as it is, a coordinator gives the one before a pending commit: outputs would be repeated."""
    asked: list[bool] = []

    async def ask(*_: object, stable: bool) -> dict[TopicPartition, OffsetAndMetadata]:
        asked.append(stable)
        if len(asked) <= loading:
            raise GroupLoadInProgressError
        if len(asked) <= loading + 3 and stable:
            raise UnstableOffsetError
        return {}

    async def topic_id(*_: object) -> str:
        return OURS

    monkeypatch.setattr(assignment, "_ask_committed", ask)
    monkeypatch.setattr(assignment, "topic_id", topic_id)
    monkeypatch.setattr(assignment, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(assignment, "UNSTABLE_SECONDS", patience)  # less than the load of 0.5 s takes
    monkeypatch.setattr(assignment, "admin_client", lambda client: contextlib.nullcontext())
    await assignment._committed({}, "group", [TopicPartition("traces", 0)])
    assert asked == ([True] * (loading + 4) if patience else [True, False])
    assert [record.levelname for record in caplog.records] == ([] if patience else ["WARNING"])


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
