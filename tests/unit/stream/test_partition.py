"""A partition task with a model and a publisher that the test controls: order, overlap, bounds, failures, counters."""

import asyncio
import json
import logging
import time
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.builders import (
    NEVER_ACCEPTED,
    T0,
    TOPIC_ID,
    make_record,
    text_vector,
    trace_bytes,
)
from tests.support.partition import DIMENSIONS, TaskHarness, record, settle
from worker import make_verdict, sign_verdict
from worker.core.changelog import NO_EPOCH, Entry, Housekeeping, SourceEpoch, decode, slot_key, text_hash
from worker.core.novelty import Vector
from worker.core.records import HEADER_OVERHEAD, SCREEN_RULES, Fault, SourceRecord
from worker.core.trace import InvalidTrace, Limits, Reason, embedding_text, parse_trace
from worker.embed.embedder import ModelError
from worker.redact import documents, screen
from worker.stream import partition
from worker.stream.partition import (
    BUSY_LINGER_SECONDS,
    MAX_COMMIT_RECORDS,
    DeadLetterLimit,
    DeadLetterLimitError,
    Upstream,
    linger_seconds,
    seconds_left,
)

# -- order and overlap


COMMITS = {
    "without a backlog, each at once": "none | take 0; = 1; take 1; = 1 1; take 2; = 1 1 1",
    "not for one in the embedder, either": "model | take 0 1; finish 0; = 1",
    "behind a backlog, with the last one": "none | take 0; fetch 1 6; take 1; take 2; take 3 4; = 1; take 5; = 1 5",
    "with that backlog, not with later ones": "none | fetch 0 3; take 0; fetch 3 7; take 1; wait 300; =; take 2; = 3",
    "when the time is over": "none | fetch 0 100; take 0 1; =; wait 200; = 2; take 2 3; = 2; wait 200; = 2 2",
    "with the turn and the last text in the embedder": (
        "model | fetch 0 99; take 0 1 2; finish 0; others wait; others end; turn; wait 99; =; finish 1; =; finish 2; "
        "= 3"
    ),
    "with the embedder's last text, while others wait": (
        "model | fetch 0 4; take 0 1 2; finish 0; take 3; others wait; wait 150; turn; =; finish 1 2 3; = 4"
    ),
    "behind others' backlog, after a little": "none | others wait; take 0; =; take 1; =; wait 250; = 2",
    "when others' backlog ends": "none | others wait; take 0; =; others end; turn; = 1",
    "scored during a commit, together after it": (
        "none | hold; take 0; begun 1; take 1 2 3 4 5 6 7; begun 1; evaluated 8; go on; = 1 7"
    ),
    "at once in a drain, and lingering again after it": (
        "model | fetch 0 99; take 0 1 2; finish 0 1; =; drain; = 2; draining; finish 2; drained; = 2 1; take 3; "
        "finish 3; = 2 1"
    ),
    "before a drain ends, from the embedder on": (
        "model | drain; drained; hold; take 0; drain; draining; finish 0; begun 1; draining; go on; drained; = 1"
    ),
}
"""When decided records are committed. After `|` are the steps: `fetch` has a range, `=` the sizes of the commits; the
publisher commits nothing between `hold` and `go on`."""


@pytest.mark.parametrize("steps", COMMITS.values(), ids=COMMITS)
async def test_when_decided_records_are_committed(steps: str) -> None:
    model, _, rest = steps.partition(" | ")
    stage = TaskHarness(embed=model == "model", commit_interval=0.05 if "wait 200" in steps else 1000.0)
    drain = asyncio.create_task(asyncio.sleep(0))
    for step in rest.split("; "):
        what, *words = step.split()
        numbers = [int(word) for word in words if word.isdigit()]
        match what:
            case "fetch":
                stage.fetch(range(*numbers))
            case "take":
                stage.take(*numbers)
            case "finish":
                for number in numbers:
                    stage.pool.finish(number)
            case "others":
                stage.fetch_other() if words == ["wait"] else stage.take_other()
            case "turn":
                stage.task.turn_ended()
            case "wait":
                await asyncio.sleep(numbers[0] / 1000)
            case "hold":
                stage.publisher.gate.clear()
            case "go":
                stage.publisher.gate.set()
            case "drain":
                drain = asyncio.create_task(stage.task.drain())
            case "draining":
                assert not drain.done()
            case "drained":
                await asyncio.wait_for(drain, 5)
            case "begun":
                assert [len(stage.publisher.begun)] == numbers
            case "evaluated":
                assert [stage.count("kp_evaluation_duration_seconds_count")] == [len(stage.task)] == numbers
            case "=":
                assert stage.publisher.sizes() == numbers, step
        await settle()


@pytest.mark.parametrize("bound", [(partition, "MAX_COMMIT_RECORDS"), (partition, "SLACK")], ids=["batch", "slack"])
async def test_a_full_batch_or_partition_ends_a_linger(monkeypatch: pytest.MonkeyPatch, bound: tuple[Any, str]) -> None:
    monkeypatch.setattr(*bound, 4)
    stage = TaskHarness(embed=False)
    stage.take(0)
    await settle()
    stage.fetch(range(1, 100))
    stage.take(1, 2, 3)
    await settle()
    assert stage.publisher.sizes() == [1]
    stage.take(4)
    await settle()
    assert stage.publisher.sizes() == [1, 4]


async def test_a_batch_is_bounded_in_records_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_COMMIT_RECORDS", 3)
    stage = TaskHarness(embed=False)
    stage.take(*range(7))
    await stage.task.drain()
    assert stage.publisher.sizes() == [3, 3, 1]

    first = stage.publisher.committed[0]
    size = first.records[0].size + len(first.outputs[0].value or b"")
    monkeypatch.setattr(partition, "MAX_COMMIT_BYTES", 2 * size)
    stage.take(*range(7, 12))
    await stage.task.drain()
    assert stage.publisher.sizes()[3:] == [2, 2, 1], "the one that reaches the bound is the last"
    monkeypatch.setattr(partition, "MAX_COMMIT_BYTES", 1)
    stage.take(12, 13)
    await stage.task.drain()
    assert stage.publisher.sizes()[6:] == [1, 1]
    assert [offset for _, offset in stage.publisher.outputs()] == list(range(14))


async def test_what_a_batch_carries() -> None:
    stage = TaskHarness(stream_time_ms=T0 - 1)
    stage.task.take(make_record(b"", 4))
    stage.take(5, created_at=T0 - 50_000)
    stage.take(6, created_at=T0)
    stage.task.take(make_record(b"{}", 9))  # compaction and transactions leave gaps between offsets
    for number in (0, 1):
        stage.pool.finish(number)
    await stage.task.drain()
    batches = stage.publisher.committed
    assert (batches[-1].next_offset, stage.task.committed) == (10, 10)
    assert batches[0].metadata == NO_EPOCH.metadata(T0 - 1)  # a dead letter moves no time
    assert batches[-1].metadata == NO_EPOCH.metadata(T0)
    entries = [(key, decode(value)) for batch in batches for key, value in batch.entries]
    assert [key for key, _ in entries] == [slot_key(0, 5), slot_key(1, 5)]
    assert [(e.source_offset, e.sequence, e.stream_time_ms) for _, e in entries] == [(5, 0, T0 - 1), (6, 1, T0)]
    assert {e.model for _, e in entries} == {stage.pool.identity.key()}
    expected = [text_vector(text, DIMENSIONS).tolist() for text, _ in stage.pool.submitted]
    assert [e.array().tolist() for _, e in entries] == expected
    assert [e.trace_id for _, e in entries] == ["kp:trace:5", "kp:trace:6"]


async def test_a_drain_drops_what_waits_too_long_for_its_embedding_and_takes_it_again() -> None:
    stage = TaskHarness(drain_seconds=0.05)
    stage.take(0, 1, 2)
    stage.pool.finish(0)
    stage.pool.finish(2)
    await stage.task.drain()
    assert stage.publisher.outputs() == [("accepted", 0)]
    assert (len(stage.task), stage.task.committed) == (0, 1)
    stage.pool.finish(1)  # nobody waits for it any more
    await settle()
    stage.take(1, 2)  # as they are read again
    stage.pool.finish(3)
    stage.pool.finish(4)
    await stage.task.drain()
    assert stage.publisher.outputs() == [("accepted", 0), ("accepted", 1), ("accepted", 2)]
    await stage.task.close()
    assert stage.task._bytes == 0


async def test_without_an_embedder_there_are_no_entries_and_novelty_is_one_half() -> None:
    stage = TaskHarness(embed=False)
    stage.take(0, 1)
    await stage.task.drain()
    for batch in stage.publisher.committed:
        assert batch.entries == []
        for output in batch.outputs:
            scoring = json.loads(output.value or b"")["scoring"]
            assert (scoring["components"]["novelty"], scoring["embedder"]) == (0.5, None)


# -- bounds


async def test_no_more_than_the_slack_is_taken_past_the_committed_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "SLACK", 4)
    stage = TaskHarness()
    stage.publisher.gate.clear()
    for offset in range(4):
        assert stage.task.has_room()
        stage.take(offset)
    assert not stage.task.has_room()
    stage.pool.finish(0)
    stage.pool.finish(1)
    await settle()  # in the publisher's hands, or scored, but not committed: still counted
    assert len(stage.task) == 4
    assert not stage.task.has_room()
    stage.fetch([4])
    assert stage.buffer.next() is None
    stage.publisher.gate.set()
    await settle()
    assert stage.buffer.next() is not None
    assert len(stage.task) == 2
    assert stage.task.has_room()


def test_a_transaction_cannot_exceed_the_slack() -> None:
    assert partition.MAX_COMMIT_RECORDS <= partition.SLACK


async def test_a_record_that_was_taken_already_is_dropped() -> None:
    stage = TaskHarness(embed=False, next_offset=10)
    for offset in (9, 10, 10, 11, 10, 0, 11, 12):
        stage.take(offset)
    await stage.task.drain()
    assert [offset for _, offset in stage.publisher.outputs()] == [10, 11, 12]
    assert stage.count("kp_records_consumed_total") == 3
    assert stage.count("kp_stage_duration_seconds_count", stage="parse") == 3


async def test_a_record_is_too_large_with_its_key_and_headers() -> None:
    value = trace_bytes()
    limit = len(value) + len(b"12345" + b"abc" + b"de") + HEADER_OVERHEAD
    stage = TaskHarness(embed=False, limits=Limits(max_bytes=limit))
    stage.task.take(make_record(value, 0, key=b"12345", headers=[("abc", b"de")]))
    stage.task.take(make_record(value, 1, key=b"12345", headers=[("abc", b"def")]))
    stage.task.take(make_record(value, 2, key=None, headers=[("abc", None)]))  # type: ignore[list-item]
    await stage.task.drain()
    assert stage.publisher.outputs() == [("accepted", 0), ("dead_letter", 1), ("accepted", 2)]
    assert stage.count("kp_dead_letters_total", reason="too_large") == 1


async def test_a_scored_trace_that_its_topic_does_not_take_counts_as_a_dead_letter() -> None:
    stage = TaskHarness()
    stage.publisher.gate.clear()
    stage.publisher.replaced = {1: InvalidTrace(Reason.REFUSED_BY_TOPIC, "", "refused for a test")}
    stage.fetch(range(100))
    stage.take(0, 1, 2)
    for number in (2, 1, 0):  # all at once, so that they are one batch
        stage.pool.finish(number)
    await settle()
    stage.publisher.gate.set()
    await stage.task.drain()
    assert stage.publisher.sizes() == [3]
    assert len(stage.publisher.committed[0].entries) == 3, "it was scored: its cache entry is committed"
    assert [record.offset for record in stage.publisher.committed[0].records] == [0, 1, 2]
    assert stage.count("kp_dead_letters_total", reason="refused_by_topic") == 1
    assert stage.count("kp_traces_total", decision="accepted", profile="finance") == 2
    assert stage.count("kp_score_count") == 2
    decisions = stage.status.decisions
    assert [(it.record.offset, isinstance(it.result, InvalidTrace)) for it in decisions] == [
        (0, False),
        (1, True),
        (2, False),
    ]
    assert ("kp-error-message", b"refused for a test") in decisions[1].output.headers


# -- the replay


def ready_entry(offset: int, trace_id: str, vector: Vector, hashed: bytes | None = None) -> Entry:
    """An entry of the trace at an offset; `hashed` is its text's hash, by default that of what stands there."""
    if hashed is None:
        hashed = text_hash(embedding_text(parse_trace(record(offset).value)))
    return Entry(1, offset, offset, T0, trace_id, "model", vector.tobytes(), 1, hashed)


@pytest.mark.parametrize("offset", [0, 1])
async def test_a_replayed_trace_takes_its_ready_embedding_and_not_the_model(offset: int) -> None:
    """One at the head is scored at once."""
    ready = text_vector("from the changelog", DIMENSIONS)
    stage = TaskHarness(replay={offset: ready_entry(offset, f"kp:trace:{offset}", ready)})
    stage.take(0, 1)
    assert [text.strip() for text, _ in stage.pool.submitted] == [f"task {1 - offset}"]
    await settle()
    assert stage.publisher.sizes() == [1] * (offset == 0)
    stage.pool.finish(0)
    await stage.task.drain()
    entries = [decode(value) for batch in stage.publisher.committed for _, value in batch.entries]
    assert entries[offset].array().tobytes() == ready.tobytes()
    assert [offset for _, offset in stage.publisher.outputs()] == [0, 1]


@pytest.mark.parametrize("hashed", [text_hash("another text"), b""], ids=["another text", "none"])
async def test_an_entry_of_another_text_is_no_ready_embedding(hashed: bytes) -> None:
    """The source topic was deleted and recreated: the same ids stand at the same offsets, with other texts."""
    stage = TaskHarness(replay={0: ready_entry(0, "kp:trace:0", text_vector("x", DIMENSIONS), hashed)})
    stage.task.take(record(0))
    assert len(stage.pool.submitted) == 1


async def test_entries_and_commits_name_their_epoch_and_the_first_commit_keeps_house() -> None:
    """Also where the first commit holds nothing but a dead letter: the metadata beside the offset names the epoch."""
    epoch = SourceEpoch("topic-id-of-22-letters", 4, 2)
    stage = TaskHarness(
        next_offset=2,
        epoch=epoch,
        housekeeping=Housekeeping([(b"dead", None), (b"passes", b"marker")], [(0, b"leaves"), (1, b"stays")]),
    )
    stage.task.take(make_record(b"", 2))
    await stage.task.drain()
    stage.task.take(make_record(trace_bytes("kp:trace:3", objective="ü"), 3))
    stage.pool.finish(0)
    await stage.task.drain()
    first, second = stage.publisher.committed
    assert {batch.metadata.split(":", 2)[2] for batch in (first, second)} == {"topic-id-of-22-letters:4:2"}
    assert first.entries == [(b"dead", None), (b"passes", b"marker")]
    gone, (key, value) = second.entries
    assert key == slot_key(0, 5, 4)
    assert gone == (b"leaves", None)
    entry = decode(value)
    assert (entry.epoch, entry.text_hash) == (4, text_hash(stage.pool.submitted[0][0]))


# -- failures


async def test_only_the_text_that_breaks_the_model_is_a_dead_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = TaskHarness()
    stage.take(0, 1, 2)
    stage.pool.finish(0)
    with caplog.at_level(logging.WARNING):
        stage.pool.finish(1, ValueError("not finite"))
        await settle()
    stage.pool.finish(2)
    await stage.task.drain()
    assert stage.publisher.outputs() == [("accepted", 0), ("dead_letter", 1), ("accepted", 2)]
    letter = next(o for batch in stage.publisher.committed for o in batch.outputs if o.kind == "dead_letter")
    assert dict(letter.headers)["kp-error-reason"] == b"embedding_failed"
    assert letter.value == record(1).value
    assert stage.count("kp_dead_letters_total", reason="embedding_failed") == 1
    (event,) = [event for event in caplog.records if event.levelno == logging.WARNING]
    assert (event.__dict__["offset"], event.__dict__["trace"]) == (1, "kp:trace:1")
    assert event.getMessage() == "the model failed on this text alone: ValueError"
    sequences = [decode(value).sequence for batch in stage.publisher.committed for _, value in batch.entries]
    assert sequences == [0, 1]  # a dead letter takes no place in the cache
    assert stage.failures == []


@pytest.mark.parametrize("error", [ModelError("the model fails on every text"), MemoryError()], ids=repr)
async def test_a_model_that_is_broken_fails_the_task_once_and_loses_nothing(error: Exception) -> None:
    stage = TaskHarness()
    stage.take(0, 1, 2)
    stage.pool.finish(0)
    await settle()
    stage.pool.finish(1, error)
    stage.pool.finish(2, error)
    await settle()
    assert stage.failures == [error]
    assert stage.task.failed
    assert not stage.task.has_room()
    assert stage.publisher.outputs() == [("accepted", 0)]
    assert stage.task.committed == 1
    await asyncio.wait_for(stage.task.drain(), 1)  # nobody waits for a task that failed
    await stage.task.close()
    assert stage.failures == [error]


async def test_a_commit_that_fails_ends_the_task_and_counts_nothing() -> None:
    stage = TaskHarness(embed=False)
    stage.publisher.error = OSError("broker away")
    stage.take(0, 1)
    await asyncio.wait_for(stage.task.drain(), 1)
    assert stage.failures == [stage.publisher.error]
    assert stage.task.committed == 0
    assert stage.count("kp_records_consumed_total") == 0
    assert stage.count("kp_traces_total", decision="accepted", profile="finance") == 0
    stage.publisher.error = None
    await settle()
    assert stage.publisher.committed == []  # never again by this task
    await stage.task.close()
    assert len(stage.failures) == 1


async def test_close_during_a_commit_is_no_failure_and_stops_the_publisher() -> None:
    stage = TaskHarness()
    stage.publisher.gate.clear()
    stage.take(0, 1)
    stage.pool.finish(0)
    await settle()
    assert len(stage.publisher.begun) == 1
    waiting = asyncio.create_task(stage.task.drain())
    await stage.task.close()
    await asyncio.wait_for(waiting, 1)
    assert stage.publisher.stopped
    stage.pool.finish(1)  # an embedding that ends after the partition was given up
    stage.publisher.gate.set()
    await settle()
    assert (stage.publisher.committed, stage.failures) == ([], [])
    assert stage.count("kp_records_consumed_total") == 0


async def test_close_survives_a_publisher_that_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    stage = TaskHarness()

    async def stop() -> None:
        raise OSError("no broker")

    stage.publisher.stop = stop  # type: ignore[method-assign]
    await stage.task.close()
    assert "no broker" in caplog.text


async def test_the_dead_letter_limit_fails_the_task_before_the_last_dead_letter_is_published() -> None:
    stage = TaskHarness(embed=False, dead_letter_limit=DeadLetterLimit(0.5, 4))
    stage.take(0, 1)
    for offset in (2, 3, 4):
        stage.task.take(make_record(b"", offset))
        await settle()
    assert isinstance(stage.failures[0], DeadLetterLimitError)
    assert len(stage.failures) == 1
    assert [offset for _, offset in stage.publisher.outputs()] == [0, 1, 2, 3]


# -- what is counted


async def test_counters_agree_with_what_is_committed_and_with_nothing_else() -> None:
    stage = TaskHarness()
    stage.take(0)
    stage.take(1, steps=NEVER_ACCEPTED, domain="gardening")
    stage.take(2, objective="the longest text")
    for offset, value in ((3, None), (4, b"nope"), (5, b"also nope")):
        stage.task.take(make_record(value, offset))
    for number in range(3):
        stage.pool.finish(number)
    await stage.task.drain()
    stage.publisher.gate.clear()
    stage.take(6)
    stage.pool.finish(3)
    await settle()

    outputs = stage.publisher.outputs()
    assert len(outputs) == 6
    assert stage.count("kp_records_consumed_total") == 6
    assert stage.count("kp_traces_total", decision="accepted", profile="finance") == 2
    assert stage.count("kp_traces_total", decision="rejected", profile="default") == 1
    assert stage.count("kp_dead_letters_total", reason="empty_value") == 1
    assert stage.count("kp_dead_letters_total", reason="not_json") == 2
    assert stage.count("kp_score_count") == 3
    assert stage.count("kp_commit_traces_sum") == 6
    assert stage.count("kp_commit_traces_count") == len(stage.publisher.committed)
    assert stage.count("kp_stage_duration_seconds_count", stage="publish") == len(stage.publisher.committed)
    assert stage.count("kp_end_to_end_latency_seconds_count") == 6
    # These count what was evaluated, committed or not.
    assert stage.count("kp_evaluation_duration_seconds_count") == 7
    assert stage.count("kp_stage_duration_seconds_count", stage="parse") == 7
    assert stage.count("kp_stage_duration_seconds_count", stage="embed") == 4
    assert stage.count("kp_stage_duration_seconds_count", stage="score") == 4
    assert stage.count("kp_truncated_texts_total") == 1
    assert stage.count("kp_truncated_objectives_total") == 1


async def test_an_evaluation_is_timed_from_taken_to_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stage = TaskHarness()
    stage.publisher.gate.clear()
    stage.take(0, 1)
    now += 0.0625
    stage.pool.finish(0)
    await settle()
    now += 0.0625
    stage.pool.finish(1)
    await settle()
    now += 10.0  # a slow commit is no slow evaluation
    stage.publisher.gate.set()
    await stage.task.drain()
    assert stage.count("kp_evaluation_duration_seconds_sum") == 0.0625 + 0.125
    assert stage.count("kp_evaluations_over_budget_total") == 1


async def test_records_without_a_timestamp_have_no_latency() -> None:
    stage = TaskHarness(embed=False)
    for offset, timestamp in enumerate((None, -1, T0)):
        stage.task.take(make_record(trace_bytes(), offset, timestamp_ms=timestamp))
    await stage.task.drain()
    assert stage.count("kp_end_to_end_latency_seconds_count") == 1


async def test_a_fault_becomes_a_dead_letter_in_its_place_and_its_bytes_are_given_back() -> None:
    stage = TaskHarness(embed=False)
    fault = Fault(Reason.BATCH_TOO_LARGE, "the batch is too large", 3)
    stage.take(0, 1)
    stage.pass_on(make_record(None, 7)._replace(fault=fault))
    stage.take(8)
    await stage.task.drain()
    outputs = [output for batch in stage.publisher.committed for output in batch.outputs]
    assert [dict(output.headers).get("kp-error-reason") for output in outputs] == [None, None, b"batch_too_large", None]
    assert stage.publisher.committed[-1].next_offset == 9
    assert stage.share.held == 0
    stage.take(8)  # fetched twice
    assert stage.share.held == 0
    stage.publisher.gate.clear()
    stage.take(9)
    await settle()
    assert stage.share.held == record(9).size
    await stage.task.close()
    assert stage.share.held == 0


async def test_a_trace_that_was_never_embedded_is_a_bug_and_no_dead_letter() -> None:
    stage = TaskHarness()
    stage.take(0)
    stage.task._taken[0] = stage.task._taken[0]._replace(embedding=None)
    stage.task.advance()
    assert [str(failure) for failure in stage.failures] == ["this is a bug: record traces/0/0 was not embedded"]
    assert stage.publisher.begun == []


async def test_what_the_screen_marks_is_counted_when_it_is_committed() -> None:
    stage = TaskHarness(embed=False, screen=screen.screen_json)
    stage.publisher.replaced = {1: InvalidTrace(Reason.TOO_LARGE, "", "too large for its topic")}
    stage.take(0, 1, objective="a\U000e0041")
    stage.take(2, objective="a\u200bb")
    await settle()
    assert stage.publisher.sizes() == [3]
    await stage.task.drain()
    counts = {rule: stage.count("kp_screened_total", rule=rule) for rule in SCREEN_RULES}
    assert {rule: count for rule, count in counts.items() if count} == {"tag-characters": 1, "invisible-in-word": 1}


# -- functions of the worker that fail on one record

FAILING = {
    "parse": "worker.core.scorer.parse_trace",
    "texts": "worker.stream.evaluator.embedded_texts",
    "event time": "worker.core.scorer.event_time_ms",
    "score": "worker.core.scorer.score_trace",
    "redaction": "worker.redact.documents.redact_json",
    "screen": "worker.redact.screen.screen_json",
    "document": "worker.core.scorer.scored_record",
    "entry": "worker.core.scorer.encode",
}
"""What is given one record, and nothing else."""


async def after(stage: TaskHarness, records: list[SourceRecord], fails: tuple[str, Exception] | None) -> TaskHarness:
    """Return the stage after these records; a function fails while the one at offset 2 is taken and decided."""
    for fetched in records:
        with pytest.MonkeyPatch.context() as patch:
            if fails is not None and fetched.offset == 2:
                where, error = fails
                patch.setattr(where, Mock(side_effect=error))
            submitted = len(stage.pool.submitted)
            stage.task.take(fetched)
            if len(stage.pool.submitted) > submitted:
                stage.pool.finish(submitted)
            await settle()
    if not stage.failures:
        await asyncio.wait_for(stage.task.drain(), 10)
    return stage


async def evaluated(offsets: list[int], fails: tuple[str, Exception] | None = None) -> TaskHarness:
    """Return the stage after traces; when the one at offset 2 comes, all others have expired."""
    times = {offset: T0 + (10_000 if offset == 2 else 40 * offset) for offset in offsets}
    traces = [
        make_record(
            trace_bytes(f"kp:trace:{offset}", objective=f"task {offset}", created_at=time_ms), offset,
            timestamp_ms=time_ms,
        )
        for offset, time_ms in times.items()
    ]  # fmt: skip
    stage = TaskHarness(
        ttl_ms=1000,
        clean=lambda value: documents.redact_json(value),  # noqa: PLW0108 looked up when called, for patches
        screen=lambda value: screen.screen_json(value),  # noqa: PLW0108
    )
    return await after(stage, traces, fails)


def letter_alone(stage: TaskHarness, whole: TaskHarness) -> bytes:
    """Return the message of the dead letter at offset 2, by which alone two stages may differ."""
    assert stage.failures == []
    (outputs, rows), (expected, expected_rows) = (
        (
            [output for batch in it.publisher.committed for output in batch.outputs],
            [row for batch in it.publisher.committed for row in batch.entries],
        )
        for it in (stage, whole)
    )
    (letter,) = [output for output in outputs if output.kind == "dead_letter"]
    headers = dict(letter.headers)
    assert (headers["kp-error-reason"], headers["kp-source-offset"]) == (b"evaluation_failed", b"2")
    assert b"the secret" not in headers["kp-error-message"]
    assert [output for output in outputs if output is not letter] == expected
    assert rows == expected_rows
    assert rows
    return headers["kp-error-message"]


@pytest.mark.parametrize("where", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("error", [IndexError("the secret"), RecursionError(), AssertionError("x")], ids=repr)
async def test_a_record_on_which_a_function_fails_is_a_dead_letter_and_leaves_no_trace_in_the_state(
    where: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stage = await evaluated([0, 1, 2, 3], (where, error))
    message = letter_alone(stage, await evaluated([0, 1, 3]))
    assert type(error).__name__.encode() in message
    assert "the secret" not in caplog.text
    assert stage.count("kp_dead_letters_total", reason="evaluation_failed") == 1
    await stage.task.close()


@pytest.mark.parametrize("where", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("error", [MemoryError(), ImportError("re2"), OSError(28, "full")], ids=repr)
async def test_a_failure_of_the_machine_is_no_records_fault(where: str, error: Exception) -> None:
    if where in (FAILING["parse"], FAILING["texts"]):
        with pytest.raises(type(error)):
            await evaluated([0, 1, 2, 3], (where, error))
        return
    stage = await evaluated([0, 1, 2, 3], (where, error))
    assert stage.failures == [error]


JUDGE_KEY = b"c" * 32


def judgement(offset: int, about: int, *, success: bool) -> SourceRecord:
    line = {
        "trace_id": "kp:trace", "agent_id": "ada", "task_domain": "finance", "partition": 0,
        "offset": about, "success": success, "judge": "ci",
    }  # fmt: skip
    made = make_verdict(line, topic="traces", topic_id=TOPIC_ID, issued_at=datetime.fromtimestamp(offset, UTC))
    signed = sign_verdict(made, JUDGE_KEY)
    return make_record(signed.value, offset, key=signed.key, headers=signed.headers)


async def judged(offsets: list[int], fails: tuple[str, Exception] | None = None) -> TaskHarness:
    """Return the stage after a trace, and verdicts on it; the one at offset 2 is about another trace."""
    records = [judgement(it, int(it == 2), success=it == 2) if it else record(0) for it in offsets]
    stage = TaskHarness(embed=False, judges={"ci": [JUDGE_KEY]}, epoch=SourceEpoch(TOPIC_ID))
    return await after(stage, records, fails)


JUDGING = {
    "read": "worker.core.scorer.read_verdict",
    "issue time": "worker.core.scorer.issued_ms",
    "order": "worker.core.track_record._order",
    "standing": "worker.core.track_record.standing",
    "judged record": "worker.core.scorer.judged_record",
}
"""What is given one verdict, and nothing else."""


@pytest.mark.parametrize("where", JUDGING.values(), ids=JUDGING)
async def test_a_verdict_on_which_a_function_fails_is_a_dead_letter_and_does_not_count(where: str) -> None:
    stage, whole = await judged([0, 1, 2, 3], (where, IndexError("the secret"))), await judged([0, 1, 3])
    letter_alone(stage, whole)
    assert list(stage.scorer.record.listed()) == list(whole.scorer.record.listed())
    await stage.task.close()


# -- when a batch is committed: every case of the policy, without a clock


INTERVAL = 1.0


def so(true: str) -> Upstream:
    return Upstream(**{field: field in true.split() for field in Upstream._fields})


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [
        ("", 0.0),
        ("has_turn undecided ahead", 0.0),  # nothing waits anywhere
        ("busy waiting ahead has_turn", INTERVAL),  # its own backlog becomes one batch
        ("busy waiting ahead has_turn undecided", INTERVAL),
        ("busy waiting has_turn", BUSY_LINGER_SECONDS),  # what waits came later
        ("busy waiting has_turn undecided", BUSY_LINGER_SECONDS),
        ("busy waiting ahead undecided", INTERVAL),  # they leave the embedder soon
        ("busy undecided", INTERVAL),
        ("busy waiting ahead", 0.0),  # the turn is over
        ("busy waiting", 0.0),
        ("busy", BUSY_LINGER_SECONDS),  # others wait
    ],
)
def test_how_long_a_batch_lingers(upstream: str, expected: float) -> None:
    for interval in (INTERVAL, 0.05, 0.0):
        assert linger_seconds(so(upstream), interval) == pytest.approx(min(expected, interval))


def test_the_time_counts_from_the_first_record_and_from_the_last_commit() -> None:
    alone = so("busy")
    assert seconds_left(10.0, 9.95, 0.0, 1, alone, INTERVAL) == pytest.approx(BUSY_LINGER_SECONDS - 0.05)
    assert seconds_left(10.0, 5.0, 9.98, 1, alone, INTERVAL) == pytest.approx(BUSY_LINGER_SECONDS - 0.02)
    assert seconds_left(10.0, 5.0, 5.0, 1, alone, INTERVAL) < 0
    behind = so("busy waiting ahead has_turn undecided")
    assert seconds_left(10.0, 10.0, 10.0, MAX_COMMIT_RECORDS - 1, behind, INTERVAL) == INTERVAL
    assert seconds_left(10.0, 10.0, 10.0, MAX_COMMIT_RECORDS, behind, INTERVAL) <= 0
