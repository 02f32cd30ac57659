"""The track record against a slow reading of its rules: which verdicts count, and what a restart finds."""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core import track_record
from worker.core.changelog import RECORD_PREFIX
from worker.core.records import Row
from worker.core.restore import Log
from worker.core.track_record import Standing, TrackRecord, encode_row, read_record, record_key
from worker.core.verdicts import Verdict, issued_ms

TOPIC_ID = "abcdefghijklmnopqrstuv"
START = datetime(2026, 11, 23, tzinfo=UTC)
Read = list[tuple[int, Verdict]]
"""Offsets and verdicts, as a partition reads them."""


def verdict(agent: str = "ada", trace: str = "t", success: float = 1.0, at: int = 0, **changes: Any) -> Verdict:
    fields = {"task_domain": "code", "judge": "ci"} | changes
    return Verdict(
        version=1, trace_id=trace, agent_id=agent, success=success, issued_at=START + timedelta(seconds=at),
        topic="traces", topic_id=TOPIC_ID, partition=0, **fields,
    )  # fmt: skip


def latest(verdicts: Iterable[Verdict]) -> list[tuple[int, bytes, Fraction]]:
    """Return issue time, hashes and success of each judge's last-issued verdict on each trace, the latest last."""
    by_trace: dict[tuple[int | str, str], tuple[int, bytes, Fraction]] = {}
    for it in verdicts:
        about = it.trace_id if it.offset is None else it.offset  # an earlier build named an id, not a record
        mine = (issued_ms(it, None), hashes(it), Fraction(it.millionths, 1_000_000))
        if mine[0] >= by_trace.get((about, it.judge), (0,))[0]:
            by_trace[about, it.judge] = mine
    return sorted(by_trace.values())


def hashes(it: Verdict) -> bytes:
    judge = hashlib.blake2b(it.judge.encode(), digest_size=8).digest()
    place = f"trace:{it.trace_id}" if it.offset is None else f"0:{it.offset}"
    return hashlib.blake2b(place.encode(), digest_size=16).digest() + judge


def expected(read: Read, agent: str, domain: str, kept: int) -> Standing:
    """Return an agent's standing: slowly, from all that was read, with a half-life of 50 and a prior's weight of 4."""
    records: dict[tuple[str, str], list[Verdict]] = {}
    for _, it in read:
        records.setdefault((it.agent_id, it.task_domain), []).append(it)
    firsts = sum((first_success(verdicts, kept) for verdicts in records.values()), Fraction(0))
    prior = (firsts + 2) / (len(records) + 4)
    newest = [success for _, _, success in latest(records.get((agent, domain), []))][::-1][:kept]
    weights = [Fraction(round(2**32 * 0.5 ** (age / 50)), 2**32) for age in range(len(newest))]
    weighted = sum((weight * success for weight, success in zip(weights, newest, strict=True)), Fraction(0))
    used = (weighted + 4 * prior) / (sum(weights) + 4)
    return Standing(float(used), len(newest), float(sum(newest)))


def first_success(verdicts: list[Verdict], kept: int) -> Fraction:
    """Return the success of the first verdict: the oldest one kept, or the first that had to go."""
    known = [latest(verdicts[:end]) for end in range(1, len(verdicts) + 1)]
    return next((it for it in known if len(it) > kept), known[-1])[0][2]


VERDICTS = st.builds(
    verdict,
    agent=st.sampled_from(["ada", "ada", "bob"]),
    trace=st.integers(0, 9).map(str),
    offset=st.sampled_from([None, *range(40)]),
    success=st.sampled_from([1.0, 0.0, 0.25, 1 / 3]),
    at=st.integers(0, 30),
    judge=st.sampled_from(["ci", "ann"]),
    task_domain=st.sampled_from(["code", "code", "law"]),
)
READ = st.integers(1, 60).flatmap(lambda n: st.lists(VERDICTS, min_size=n, max_size=n)).map(lambda it: [*enumerate(it)])
"""With corrections, copies, late ones and ties."""


def add_all(record: TrackRecord, read: Iterable[tuple[int, Verdict]]) -> list[Row]:
    rows: list[Row] = []
    for offset, it in read:
        rows += map(encode_row, record.add(it, issued_ms(it, None), offset).changes)
    return rows


def restored(log: Log, below: int, topic_id: str = TOPIC_ID) -> tuple[TrackRecord, list[Row]]:
    record = TrackRecord(topic_id)
    stored = [read_record(key, value) for key, value in log.live() if key.startswith(RECORD_PREFIX)]
    return record, record.restore(stored, below)


def apply(log: Log, rows: Iterable[Row]) -> None:
    for key, value in rows:
        log.apply(key, value, log.end)


@given(READ, st.sampled_from([1, 3, 200]))
def test_it_equals_a_slow_reading(read: Read, kept: int) -> None:
    record = TrackRecord(TOPIC_ID)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(track_record, "KEPT", kept)
        for offset, it in read:
            before, weighed = list(record.listed()), record.weigh(it, issued_ms(it, None), offset)
            assert list(record.listed()) == before, "weighing changes nothing"
            record.keep(weighed)
            assert weighed.standing == record.standing(it.agent_id, it.task_domain)
    for agent in ("ada", "bob", "eve"):
        standing, wanted = record.standing(agent, "code"), expected(read, agent, "code", kept)
        assert standing[1:] == pytest.approx(wanted[1:], abs=1e-9)
        assert standing.used == pytest.approx(wanted.used, abs=1e-12)


FATES = st.lists(st.tuples(st.integers(1, 8), st.none() | st.integers(0, 20)), max_size=20)
"""The sizes of batches; and, of those whose offset is not committed, how many rows are written."""


@pytest.mark.parametrize(
    ("once", "kept"), [(True, 1), (True, 3), (True, 200), (False, 20)],
    ids=["once-1", "once-3", "once-200", "at_least_once"],
)  # fmt: skip
@given(read=READ, fates=FATES)
def test_a_crash_changes_nothing(read: Read, fates: list[tuple[int, int | None]], once: bool, kept: int) -> None:
    """Each commit writes the rows of its verdicts; what is past it is read again, from the committed offset.

    At least once, some rows may be written although the offset is not committed.
    """
    log, record, undisturbed = Log(), TrackRecord(TOPIC_ID), TrackRecord(TOPIC_ID)
    at, first = 0, list[Row]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(track_record, "KEPT", kept)
        add_all(undisturbed, read)
        for size, crash in [*fates, (len(read), None)]:
            batch = read[at : at + size]
            rows = first + add_all(record, batch)
            if crash is None:
                apply(log, rows)
                first, at = [], at + len(batch)
            else:
                apply(log, rows[: 0 if once else crash % (len(rows) + 1)])
                record, first = restored(log, at)
        record, rows = restored(log, at)
    assert not rows
    assert list(record.listed()) == list(undisturbed.listed())


@given(READ)
def test_after_a_reset_of_the_offset_no_verdict_counts_that_is_refused_when_it_is_read_again(read: Read) -> None:
    log, record = Log(), TrackRecord(TOPIC_ID)
    apply(log, add_all(record, read))
    record, rows = restored(log, 0)  # the offset is moved back, and ci's key is removed
    apply(log, rows)
    again = [(offset, it) for offset, it in read if it.judge != "ci"]
    half = len(again) // 2
    apply(log, add_all(record, again[:half]))
    record, _ = restored(log, again[half][0] if again else 0)
    add_all(record, again[half:])
    assert record.standing("ada", "law")[1:] == pytest.approx(expected(again, "ada", "law", 200)[1:], abs=1e-9)


def test_after_a_reset_no_leaked_key_has_shut_out_the_verdicts_that_are_read_again() -> None:
    """Its verdicts had pushed out all others: those that are read again count, and no others are lost with them."""
    read = [(n, verdict(trace=f"t{n}", judge="bad" if n % 2 else "ci", success=n % 2, at=n)) for n in range(1000)]
    log, record = Log(), TrackRecord(TOPIC_ID)
    apply(log, add_all(record, read))
    record, rows = restored(log, 700)
    apply(log, rows)
    again = [(offset, it) for offset, it in read[700:] if it.judge == "ci"]
    apply(log, add_all(record, again))
    assert restored(log, 1000)[0].standing("ada", "code").judged == len(again)
    log = Log()  # late verdicts of a leaked key, which were issued last, push out those between the offset and them
    late = [(1000 + n, verdict(trace=f"l{n}", judge="bad", at=5000 + n)) for n in range(400)]
    record = TrackRecord(TOPIC_ID)
    apply(log, add_all(record, [*read[:900:2], *late]))
    record, _ = restored(log, 500)
    add_all(record, read[500:900:2])
    assert record.standing("ada", "code")[1:] == (200, 0.0)


def test_a_recreated_topic_starts_without_records() -> None:
    log, record = Log(), TrackRecord(TOPIC_ID)
    apply(log, add_all(record, [(5, verdict())]))
    record, rows = restored(log, 9, "another-id-of-the-topi")
    assert rows == [(record_key("ada", "code"), None)]
    assert record.standing("ada", "code") == Standing(0.5, 0, 0.0)


def test_a_copy_of_a_verdict_that_was_pushed_out_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(track_record, "KEPT", 2)
    record = TrackRecord(TOPIC_ID)
    old = verdict(trace="1", success=1.0, at=1)
    add_all(record, [(1, old), (2, verdict(trace="2", success=0, at=2)), (3, verdict(trace="3", success=0, at=3))])
    before = record.standing("ada", "code")
    assert before[1:] == (2, 0.0)
    assert record.add(old, issued_ms(old, None), 9).changes == []
    assert record.standing("ada", "code") == before


def copies_count(record: TrackRecord, offset: int, *verdicts: Verdict) -> list[bool]:
    """Return which verdicts count, one after the other, from an offset on."""
    return [record.add(it, issued_ms(it, None), offset + n).record is not None for n, it in enumerate(verdicts)]


def test_copies_do_not_make_a_record_anew_that_had_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the agent has new verdicts, nor after; and over a restart."""
    monkeypatch.setattr(track_record, "MAX_RECORDS", 3)
    log, record = Log(), TrackRecord(TOPIC_ID, 0)
    good = [verdict("eve", at=n, offset=n) for n in range(4)]
    apply(log, add_all(record, [(10 + n, it) for n, it in enumerate(good)]))
    apply(log, add_all(record, [(20 + n, verdict(agent, at=n, offset=14 + n)) for n, agent in enumerate("abc")]))
    assert copies_count(record, 30, *good) == [False] * 4
    apply(log, add_all(record, [(40, verdict("eve", success=0, at=40, offset=35))]))
    assert copies_count(record, 41, *good) == [False] * 4
    stored = [read_record(key, value) for key, value in log.live()]
    record = TrackRecord(TOPIC_ID, 0)
    record.restore(stored, 41)
    assert copies_count(record, 41, *good) == [False] * 4
    assert record.standing("eve", "code")[1:] == (1, 0.0)
    assert copies_count(record, 50, verdict("new", at=50, offset=36), verdict("b", at=51, offset=20)) == [True, False]


def test_verdicts_on_traces_from_before_the_changelog_do_not_count() -> None:
    record = TrackRecord(TOPIC_ID, 100)
    early, late = verdict(at=1, offset=99), verdict(at=1, offset=100)
    assert copies_count(record, 200, early, late, verdict(at=2)) == [False, True, True]
    assert copies_count(TrackRecord(TOPIC_ID), 200, early) == [True], "verdicts that counted, in a report"


def test_beyond_the_bound_the_record_with_the_oldest_latest_verdict_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track_record, "MAX_RECORDS", 3)
    record = TrackRecord(TOPIC_ID)
    rows = add_all(record, [(n, verdict(agent)) for n, agent in enumerate("abcab")] + [(9, verdict("a", "new", at=9))])
    assert len(record) == 3
    assert all(value is not None for _, value in rows)
    weighed = record.add(verdict("d", success=0.0), 0, 10)
    assert [key for key, value in weighed.changes if value is None] == [record_key("b", "code")]
    assert weighed.standing == record.standing("d", "code")
    assert [agent for agent, _, _ in record.listed()] == ["c", "a", "d"]


def test_a_record_with_the_key_of_another_one_is_damaged() -> None:
    ((_, value),) = add_all(TrackRecord(TOPIC_ID), [(7, verdict())])
    with pytest.raises(ValueError, match="key of another"):
        read_record(record_key("bob", "code"), value)
