"""Both steps without Kafka: what a record leads to, and that order, repetitions and restarts change no trace."""

import json
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from prometheus_client import CollectorRegistry

from tests.support import spans
from worker.assemble import steps as steps_module
from worker.assemble.assembler import Shared
from worker.assemble.open_runs import (
    STREAM,
    Effects,
    Held,
    HeldBytes,
    Mark,
    OpenRuns,
    Part,
    RowError,
    decode,
    encode,
    open_key,
    packed,
    unpacked,
)
from worker.assemble.steps import (
    AHEAD_MS,
    Assembling,
    Poll,
    SpanPartition,
    Spreading,
    StepResult,
    TraceWriter,
    UnreadContent,
    has_root,
    partition_of,
)
from worker.core.records import ASSEMBLED, DEAD_LETTER, SPANS, Fault, OutputRecord, SourceRecord
from worker.core.trace import Reason, parse_trace
from worker.kafka.rows import key_partition
from worker.observe.metrics import AssembleMetrics
from worker.runs.otlp.mapping import MAX_UNREAD
from worker.runs.otlp.spans import InvalidSpans, decoded, is_complete

NOW = 1_795_000_000_000
BETWEEN = "w-assemble-spans"
IDLE = Poll([], NOW, NOW + 10**6, 10**6)
"""What closes every run."""


def record(value: bytes | None, offset: int = 0, time_ms: int | None = NOW, **more: Any) -> SourceRecord:
    return SourceRecord("otlp_spans", 0, offset, time_ms, None, value, **more)


def assembling(
    source: SpanPartition | None = None, state: Iterable[tuple[bytes, bytes]] = (), others: Sequence[int] = (),
    send_ms: float = 0, **writer: Any,
) -> Assembling:  # fmt: skip
    runs = OpenRuns([("otlp_spans", 0)], has_root, 60_000, 900_000, 86_400_000, HeldBytes())
    assert runs.restore(state) == []
    options: dict[str, Any] = {"rules": spans.RULES, "by_agent": True, "partitions": 4, "kept_ms": 7 * 86_400_000.0}
    return Assembling(
        runs, TraceWriter(source=(BETWEEN, 0), **options | writer), 1 << 30, 1 << 20, source, others, send_ms
    )


def partition() -> SpanPartition:
    return SpanPartition("otlp_spans", 0, None)


def spread(records: Sequence[SourceRecord]) -> StepResult:
    return Spreading(partition(), 1).process(Poll(records, NOW))


def between(result: StepResult) -> list[SourceRecord]:
    """Return what the first step wrote as the second one reads it, of all partitions as if they were one."""
    rows = [each for each in result.outputs if each.kind == SPANS]
    return [SourceRecord(BETWEEN, 0, at, NOW, each.key, each.value) for at, each in enumerate(rows)]


def error(output: OutputRecord) -> str:
    return dict(output.headers)["kp-error-reason"].decode()


def dead_letters(outputs: Iterable[OutputRecord]) -> list[OutputRecord]:
    return [output for output in outputs if output.kind == DEAD_LETTER]


def traces(outputs: Iterable[OutputRecord]) -> list[bytes]:
    """Return the traces, sorted."""
    return sorted(output.value or b"" for output in outputs if output.kind == ASSEMBLED)


def expected(*runs: list[spans.Span]) -> list[bytes]:
    return sorted(document for run in runs for document in spans.documents(run))


def process(step: Assembling, records: Sequence[SourceRecord], state: dict[bytes, bytes]) -> list[OutputRecord]:
    """Process records until all is done; keep the state as its topic would, and return what is published."""
    outputs: list[OutputRecord] = []
    while True:
        result = step.process(Poll(records, NOW))
        outputs += result.outputs
        assert len(result.outputs) == len(result.sources)
        for key, value in result.rows.items():
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        records = records[result.done :]
        if not result.more:
            assert not records
            return outputs


def test_a_record_is_spread_by_trace_id_and_its_time_is_marked_everywhere() -> None:
    several = [*spans.run_spans(1), *spans.run_spans(2)]
    result = Spreading(partition(), 4).process(Poll([record(spans.as_json(several), 7)], NOW))
    assert result.done == 1
    assert result.time_ms == NOW
    parts = result.outputs[:2]
    assert {each.key.decode() for each in parts if each.key} == {spans.trace_id(1), spans.trace_id(2)}
    for each in parts:
        assert each.key
        assert each.partition == partition_of(each.key.decode(), 4)
        row = decode(each.value)
        assert isinstance(row, Part)
        assert (row.topic, row.partition, row.offset, row.time_ms) == ("otlp_spans", 0, 7, NOW)
        assert len(unpacked(row.content)) == row.size
    assert [(each.partition, decode(each.value)) for each in result.outputs[2:]] == [(0, Mark("otlp_spans", 0, NOW))]


def test_the_first_partition_tells_the_others_the_time_behind_what_it_counts_as_read() -> None:
    first = Spreading(partition(), 4)
    step = assembling(others=[1, 2, 3], send_ms=5000)
    other = OpenRuns([STREAM], has_root, 60_000, 900_000, 86_400_000, HeldBytes())
    sent = []
    for later in (0, 4999, 5000, 60_000):
        rows = [record(spans.as_protobuf(spans.run_spans(1)), later, NOW + later)]
        result = step.process(Poll(between(first.process(Poll(rows, NOW + later))), NOW))
        marks = [(each.partition, decode(each.value)) for each in result.outputs if each.kind == SPANS]
        assert marks in ([], [(number, Mark(*STREAM, NOW + later)) for number in (1, 2, 3)])
        sent += [later] if marks else []
        for _, mark in marks[:1]:
            assert isinstance(mark, Mark)
            assert other.mark(mark, Effects())
            assert other.time_ms == NOW + later
    assert sent == [0, 5000, 60_000]


@pytest.mark.parametrize(
    ("time_ms", "of_record", "of_partition"),
    [
        (NOW - 5000, NOW - 5000, NOW - 5000),
        (NOW - 20_000, NOW - 20_000, NOW - 10_000),  # earlier than the one before
        (NOW + 5000, NOW, NOW),  # a fast clock
        (NOW + AHEAD_MS + 1, NOW - 10_000, NOW - 10_000),  # the year 2099 closes nothing
        (0, NOW - 10_000, NOW - 10_000),
        (None, NOW - 10_000, NOW - 10_000),
    ],
)
def test_what_a_records_time_does(time_ms: int | None, of_record: int, of_partition: int) -> None:
    source = SpanPartition("otlp_spans", 0, NOW - 10_000)
    (part,) = source.parts(record(spans.as_protobuf(spans.run_spans(1)), time_ms=time_ms), NOW, StepResult()).values()
    assert (part.time_ms, source.time_ms) == (of_record, of_partition)


def test_a_clock_that_is_too_slow_for_the_records_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    source = SpanPartition("otlp_spans", 3, None)
    for offset in range(3):
        source.parts(record(spans.as_protobuf(spans.run_spans(1)), offset, NOW), NOW - AHEAD_MS - 1, StepResult())
    assert source.time_ms is None
    (warning,) = caplog.messages
    assert warning.startswith("otlp_spans/3: a record is dated more than an hour ahead of this machine's clock")


def test_a_clock_that_is_set_after_the_start_counts_and_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was two hours slow, as on a machine that slept, or before NTP answers."""
    shared, source = Shared(AssembleMetrics(CollectorRegistry()), 1.0), None
    for clock_ms, now_ms in ((NOW - 7_200_000, NOW - 7_200_000), (NOW, NOW), (NOW - 60_000, NOW)):
        monkeypatch.setattr(time, "time_ns", lambda clock_ms=clock_ms: clock_ms * 1_000_000)
        assert shared.now_ms() == now_ms
        source = source or partition()
        source.parts(record(spans.as_protobuf(spans.run_spans(1)), 1, NOW), shared.now_ms(), StepResult())
    assert source is not None
    assert source.time_ms == NOW


def test_without_any_time_a_part_counts_as_of_now_and_the_partition_has_none() -> None:
    source = partition()
    (part,) = source.parts(record(spans.as_protobuf(spans.run_spans(1)), time_ms=0), NOW, StepResult()).values()
    assert (part.time_ms, source.time_ms) == (NOW, None)


def test_what_cannot_be_read_becomes_a_dead_letter_and_stops_nothing() -> None:
    bad = [
        record(b"{", 1),
        record(b"\x01\x02", 2),
        record(None, 3, fault=Fault(Reason.UNREADABLE, "broken")),
        record(b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "00", "spanId": "1"}]}]}]}', 4),
    ]
    good = record(spans.as_protobuf(spans.run_spans(1)), 5)
    result = spread([*bad, record(b"", 6), good])
    letters = dead_letters(result.outputs)
    assert [error(each) for each in letters] == ["not_json", "not_otlp", "unreadable", "invalid_value"]
    assert [dict(each.headers)["kp-source-offset"] for each in letters] == [b"1", b"2", b"3", b"4"]
    assert letters[0].value == b"{"
    assert len(between(result)) == 2  # the good record's part, and the mark


def test_the_traces_are_those_of_the_spans_whatever_order_repetition_and_restart(seed: int) -> None:
    rng = random.Random(seed)
    runs = {number: spans.run_spans(number, rng.randint(1, 4)) for number in range(12)}
    values = [value for each in runs.values() for value in spans.records(each, rng)]
    values += rng.sample(values, len(values) // 10)
    rng.shuffle(values)
    state: dict[bytes, bytes] = {}
    step, first, at, outputs = assembling(), Spreading(partition(), 1), 0, []
    while at < len(values):
        count = rng.randint(1, 10)
        rows = [record(value, at + number) for number, value in enumerate(values[at : at + count])]
        at += count
        outputs += process(step, between(first.process(Poll(rows, NOW))), state)
        if rng.random() < 0.3:
            step = assembling(state=state.items())
    outputs += process(step, between(first.process(IDLE)), state)
    assert {each.kind for each in outputs} == {ASSEMBLED}
    assert traces(outputs) == expected(*runs.values())
    for each in outputs:
        trace = parse_trace(each.value)
        assert each.key == trace.metadata.agent_id.encode()
        assert each.partition == key_partition(each.key, 4)
    assert all(key == b"times" or key.startswith(b"closed:") for key in state)


def test_late_spans_become_dead_letters_with_the_place_of_their_record() -> None:
    *early, last = spans.run_spans(3)
    state: dict[bytes, bytes] = {}
    step, first = assembling(), Spreading(partition(), 1)
    process(step, between(first.process(Poll([record(spans.as_protobuf([*early, last]))], NOW))), state)
    assert process(step, between(first.process(IDLE)), state)
    more = {**last, "spanId": "00000000000000aa"}
    (letter,) = process(step, between(first.process(Poll([record(spans.as_protobuf([more]), 9)], NOW))), state)
    assert error(letter) == "late_span"
    headers = dict(letter.headers)
    assert (headers["kp-source-topic"], headers["kp-source-offset"]) == (b"otlp_spans", b"9")
    assert letter.key == spans.trace_id(3).encode()
    assert decoded(letter.value or b"") == decoded(spans.as_protobuf([more]))


def test_logs_that_were_written_before_their_run_was_closed_are_left_out_and_spans_are_not() -> None:
    run, day = spans.run_spans(3), 86_400_000
    state: dict[bytes, bytes] = {}
    step, first = assembling(), Spreading(partition(), 1)
    process(step, between(first.process(Poll([record(spans.as_protobuf(run))], NOW))), state)
    assert process(step, between(first.process(IDLE)), state)

    def added(value: bytes, time_ms: int) -> StepResult:
        result = Spreading(SpanPartition("otlp_logs", 0, None), 1).process(Poll([record(value, 0, time_ms)], NOW + day))
        return step.process(Poll([each for each in between(result) if each.key is not None], NOW))

    queued = added(spans.as_logs(run), NOW + 5)
    assert (queued.outputs, len(step.runs)) == ([], 0)
    assert [hint.partition(":")[0] for hint in queued.hints] == ["otlp_logs"]
    (letter,) = added(spans.as_protobuf(run), NOW + 5).outputs
    assert error(letter) == "late_span"
    (letter,) = added(spans.as_logs(run), NOW + 2 * 10**6).outputs
    assert error(letter) == "late_span"
    # of a run that is not remembered, and would not be any more
    assert added(spans.as_logs(spans.run_spans(4)), NOW - day - 1).outputs == []
    assert len(step.runs) == 0
    added(spans.as_logs(spans.run_spans(4)), NOW)
    added(spans.as_protobuf(spans.run_spans(5)), NOW - day - 1)
    assert len(step.runs) == 2


def test_a_topic_that_is_keyed_is_assembled_in_one_step() -> None:
    state: dict[bytes, bytes] = {}
    step = assembling(partition())
    runs = [spans.run_spans(number) for number in range(3)]
    rows = [record(spans.as_json(each), number) for number, each in enumerate(runs)]
    assert process(step, rows, state) == []
    result = step.process(IDLE)
    assert {output.kind for output in result.outputs} == {ASSEMBLED}
    assert traces(result.outputs) == expected(*runs)


def test_what_nobody_of_ours_wrote_between_the_steps_is_a_dead_letter() -> None:
    foreign = [
        SourceRecord(BETWEEN, 0, 0, NOW, b"k", b"hello"),
        SourceRecord(BETWEEN, 0, 1, NOW, None, None),
        SourceRecord(BETWEEN, 0, 2, NOW, None, None, (), 0, Fault(Reason.UNREADABLE, "broken")),
    ]
    outputs = process(assembling(), foreign, {})
    assert [error(each) for each in outputs] == ["not_otlp", "not_otlp", "unreadable"]


def test_a_run_from_which_no_trace_can_be_made_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of the mapping, made by hand."""

    def broken(*_: object) -> list[Any]:
        raise KeyError("boom")

    state: dict[bytes, bytes] = {}
    step = assembling(partition())
    process(step, [record(spans.as_protobuf(spans.run_spans(1)))], state)
    monkeypatch.setattr(steps_module, "assembled", broken)
    (letter,) = step.process(IDLE).outputs
    assert error(letter) == "assembly_failed"
    assert decoded(letter.value or b"") == decoded(spans.as_protobuf(spans.run_spans(1)))


def test_a_part_that_the_state_cannot_hold_is_a_dead_letter() -> None:
    rng = random.Random(1)
    huge = spans.run_spans(1)[:1]
    huge[0]["attributes"] = {"x": "".join(rng.choices("0123456789abcdef", k=3_000_000))}
    (letter,) = process(assembling(partition()), [record(spans.as_protobuf(huge))], {})
    assert error(letter) == "too_large"


def test_runs_without_content_are_counted_and_no_trace_is_invented() -> None:
    bare = spans.run_spans(1)
    for each in bare:
        for name in list(each["attributes"]):
            if "messages" in name or "result" in name:
                del each["attributes"][name]
    other = [{**each, "traceId": spans.trace_id(2), "attributes": {"http.method": "GET"}} for each in bare]
    step = assembling(partition())
    process(step, [record(spans.as_protobuf([*bare, *other]))], {})
    result = step.process(IDLE)
    assert result.outputs == []
    assert result.counts["without_trace", "no_content"] == 1
    assert result.counts["without_trace", "not_a_run"] == 1


def test_content_where_nothing_reads_it_is_counted_by_scope_and_bounded() -> None:
    strange = spans.run_spans(1)
    for each in strange:
        each["attributes"] = {"desk.prompt": "Do it.", "gen_ai.request.model": "m"}
    step = assembling(partition())
    process(step, [record(spans.as_protobuf(strange))], {})
    result = step.process(IDLE)
    assert result.counts["unread_runs", ""] == len(result.unread) == 1
    unread = UnreadContent()
    assert unread.add([("desk", "prompt"), ("desk", "reply")]) == ["desk"]
    assert unread.add([("desk", "prompt"), ("other", "a")]) == ["other"]
    assert list(unread.lines()) == [
        "not read, and looks like content: desk: prompt (2 runs), reply (1 runs)",
        "not read, and looks like content: other: a (1 runs)",
    ]
    for number in range(1000):
        unread.add([(f"scope {number}", "a"), ("desk", f"name {number}")])
    assert len(unread.scopes) == UnreadContent.MAX_SCOPES
    assert max(map(len, unread.scopes.values())) == MAX_UNREAD


@pytest.mark.parametrize(
    ("end_ms", "last_ms", "wanted"),
    [
        (NOW - 1000, NOW, NOW - 1000),
        (NOW + 10**9, NOW - 500, NOW - 500),  # not of the future
        (0, NOW, NOW),  # not so old that the topic refuses or deletes it
    ],
)
def test_the_timestamp_is_one_that_the_topic_takes(end_ms: int, last_ms: int, wanted: int) -> None:
    run = spans.run_spans(1)
    for each in run:
        each["startTimeUnixNano"] = each["endTimeUnixNano"] = end_ms * 1_000_000
    step = assembling(partition(), by_agent=False)
    process(step, [record(spans.as_protobuf(run), time_ms=last_ms)], {})
    (trace,) = step.process(IDLE).outputs
    assert trace.timestamp_ms == wanted
    assert trace.key == spans.trace_id(1).encode()
    assert json.loads(trace.value or b"")["id"].startswith("kp:trace:")


def test_what_is_no_row_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        noise = rng.randbytes(rng.randrange(40))
        with pytest.raises(RowError):
            decode(noise)
        assert len(assembling().runs.restore([(b"closed:aa", noise)])) == 1
        with pytest.raises(RowError):
            unpacked(noise)


def test_the_partition_of_a_key_is_that_of_all_clients() -> None:
    """Expected values by org.apache.kafka.common.utils.Utils.murmur2, modulo 1000 (its own unit test's, and ours)."""
    assert [key_partition(key, 2**31) for key in (b"21", b"foobar")] == [
        (-973932308) & 0x7FFFFFFF,
        (-790332482) & 0x7FFFFFFF,
    ]


def test_a_root_is_found_by_the_ids_as_by_the_spans(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(200):
        some = rng.sample(spans.run_spans(number, 3), rng.randint(1, 6))
        for each in some:
            each["parentSpanId"] = rng.choice((each["parentSpanId"], "0" * 16, ""))
        contents = [spans.content([each]) for each in some]
        read = [span for each in some for span in decoded(spans.as_protobuf([each])).spans]
        assert has_root(contents) == is_complete((each.span_id, each.parent_id) for each in read)
    for length in range(1, 17):  # some of these ids can be read as attributes of a span
        logs = LogsData()
        logs.resource_logs.add().scope_logs.add().log_records.add(
            trace_id=bytes([0x0A, length]) + rng.randbytes(14), span_id=b"b" * 8, time_unix_nano=NOW
        )
        assert not has_root([packed(logs.SerializeToString())])


# -- one bad span, and whatever a reader raises


def bad_records() -> dict[str, tuple[bytes, str]]:
    """Return records with ten good runs and one bad span, and the reason."""
    good = [span for number in range(10) for span in spans.run_spans(number)]
    one = {**spans.run_spans(11, 1)[0], "name": "the bad one"}
    deep: dict[str, Any] = {"stringValue": "x"}
    for _ in range(31):
        deep = {"arrayValue": {"values": [deep]}}
    bad = {}
    for name, change in (("zero", {"traceId": "0" * 32}), ("no id", {"spanId": ""})):
        rows = [*good[:5], {**one, **change}, *good[5:]]
        bad[f"{name} protobuf"] = (spans.as_protobuf(rows), "invalid_value")
        bad[f"{name} json"] = (spans.as_json(rows), "invalid_value")
    marked = [*good[:5], {**one, "attributes": {"k": "ZZZZ"}}, *good[5:]]
    bad["utf-8 protobuf"] = (spans.as_protobuf(marked).replace(b"ZZZZ", b"\xff\xfe\xfd\xfc"), "not_otlp")
    bad["utf-8 json"] = (spans.as_json(marked).replace(b"ZZZZ", b"\xff\xfe\xfd\xfc"), "invalid_value")
    text = b'{"stringValue": "ZZZZ"}'
    bad["deep json"] = (spans.as_json(marked).replace(text, json.dumps(deep).encode()), "too_deep")
    bad["type json"] = (spans.as_json(marked).replace(text, b"[]"), "invalid_type")
    return bad


@pytest.mark.parametrize("name", bad_records())
def test_one_bad_span_costs_its_record_that_span_alone(name: str) -> None:
    value, reason = bad_records()[name]
    first = spread([record(value, 7)])
    (letter,) = dead_letters(first.outputs)
    assert error(letter) == reason
    assert dict(letter.headers)["kp-source-offset"] == b"7"
    assert b"the bad one" in (letter.value or b"")
    assert b"chat 0" not in (letter.value or b"").replace(b"the bad one", b"")
    with pytest.raises(InvalidSpans) as caught:
        decoded(letter.value or b"")
    assert caught.value.reason == reason
    outputs = process(assembling(), [*between(first), idle_mark()], {})
    assert {output.kind for output in outputs} == {ASSEMBLED}
    assert traces(outputs) == expected(*map(spans.run_spans, range(10)))


def test_a_span_that_is_too_deep_for_protobuf_is_refused_when_its_run_closes() -> None:
    message = TracesData()
    message.ParseFromString(spans.as_protobuf(spans.run_spans(1)))
    bad = message.resource_spans[0].scope_spans[0].spans.add()
    bad.CopyFrom(message.resource_spans[0].scope_spans[0].spans[0])
    bad.span_id, bad.name = b"12345678", "the bad one"
    value = bad.attributes.add(key="deep").value
    for _ in range(31):
        value = value.array_value.values.add()
    first = spread([record(message.SerializeToString())])
    made, letter = sorted(process(assembling(), [*between(first), idle_mark()], {}), key=lambda each: each.kind)
    assert [made.value] == spans.documents(spans.run_spans(1))
    assert error(letter) == "too_deep"
    assert b"the bad one" in (letter.value or b"")


def idle_mark() -> SourceRecord:
    return SourceRecord(BETWEEN, 0, 999, NOW, None, encode(Mark("otlp_spans", 0, NOW, NOW, 10**7)))


@pytest.mark.parametrize("name", ["split", "packed"])
def test_whatever_a_reader_raises_costs_its_record_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = getattr(steps_module, name), iter(range(100))

    def fails(*given: Any) -> Any:
        if next(calls) == 0:
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(steps_module, name, fails)
    rows = [record(spans.as_protobuf(spans.run_spans(number)), number) for number in (1, 2)]
    first = spread(rows)
    letters = dead_letters(first.outputs)
    assert [(error(each), each.value) for each in letters] == [("assembly_failed", rows[0].value)]
    outputs = process(assembling(), [*between(first), idle_mark()], {})
    assert [output.value for output in outputs] == expected(spans.run_spans(2))


@pytest.mark.parametrize(
    "name", ["assembled", "decoded", "unpacked", "links", "is_complete", "key_partition", "fields_in"]
)
def test_whatever_the_mapping_raises_costs_its_run_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [spans.as_protobuf(spans.run_spans(number)) for number in (1, 2)]
    first = spread([record(value) for value in values])
    real, calls = getattr(steps_module, name), iter(range(100))

    def fails(*given: Any) -> Any:
        if next(calls) == 0:
            raise RecursionError
        return real(*given)

    monkeypatch.setattr(steps_module, name, fails)
    monkeypatch.setattr(steps_module, "COUNTED_BYTES", 0)
    step = assembling()
    outputs = process(step, [*between(first), idle_mark()], {})
    later = SourceRecord(BETWEEN, 0, 1000, NOW, None, encode(Mark("otlp_spans", 0, NOW, NOW, 10**9)))
    outputs += process(step, [later], {})
    good, letters = traces(outputs), dead_letters(outputs)
    assert len(good) + len(letters) == 2
    assert set(good) <= set(expected(spans.run_spans(1), spans.run_spans(2)))
    assert [error(each) for each in letters] == ["assembly_failed"] * len(letters)
    assert len(letters) == (name not in ("unpacked", "links", "is_complete"))


def test_damaged_rows_between_and_in_the_state_are_told_and_stop_nothing() -> None:
    good = spans.content(spans.run_spans(1))
    size = len(unpacked(good))
    bomb = zlib.compress(bytes(80 << 20), 9)
    ids = {name: spans.trace_id(number) for number, name in enumerate(("good", "cut", "bomb", "no zlib"), 10)}
    contents = {"good": (good, size), "cut": (good[:-5], size), "bomb": (bomb, 100), "no zlib": (b"nothing", 7)}
    for from_state in (False, True):
        step = assembling(
            state=[
                (open_key(ids[name], 0), encode(Held(NOW, length, content)))
                for name, (content, length) in contents.items()
                if from_state
            ]
        )
        rows = [
            SourceRecord(BETWEEN, 0, 1, NOW, ids[name].encode(), encode(Part(NOW, "otlp_spans", 0, 1, length, content)))
            for name, (content, length) in contents.items()
            if not from_state
        ]
        outputs = process(step, [*rows, idle_mark()], {})
        letters = dead_letters(outputs)
        assert traces(outputs) == expected(spans.run_spans(1))
        assert {(error(each), each.value) for each in letters} == {
            ("not_otlp", contents[name][0]) for name in ("cut", "bomb", "no zlib")
        }
        late = Part(NOW, "otlp_spans", 0, 9, 5, b"junk")
        (letter,) = process(step, [SourceRecord(BETWEEN, 0, 2, NOW, ids["good"].encode(), encode(late))], {})
        assert (error(letter), letter.value) == ("late_span", b"junk")
    wrong_key = SourceRecord(BETWEEN, 0, 3, NOW, b"no id", encode(Part(NOW, "otlp_spans", 0, 1, 2, good)))
    assert error(*process(assembling(), [wrong_key], {})) == "not_otlp"


# -- records that are made to cost much

_ATTACK = """
import re, time
from tests.unit.assemble.test_steps import *
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
def memory():
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) / 1024
def run(value):
    before = memory()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    began = time.process_time()
    first = Spreading(partition(), 4).process(Poll([record(value)], NOW))
    outputs = dead_letters(first.outputs)
    step = assembling()
    outputs += process(step, [*between(first), idle_mark()], {})
    print(time.process_time() - began, memory() - before)
    print([error(each) for each in outputs if each.kind == DEAD_LETTER][:3], len(outputs))
message = TracesData()
first = message.resource_spans.add()
scope = first.scope_spans.add()
"""


_MANY_TRACES = """
first.resource.attributes.add(key="k").value.string_value = "x" * 500_000
for n in range(10_000):
    scope.spans.add(trace_id=(n + 1).to_bytes(16, "big"), span_id=b"12345678")
run(message.SerializeToString())
"""
_ONE_SPAN_OFTEN = """
first.resource.attributes.add(key="k").value.string_value = "x" * 900_000
for n in range(68_000):
    scope.spans.add(trace_id=b"1" * 16, span_id=b"12345678", start_time_unix_nano=n)
run(message.SerializeToString())
"""
_EMPTY_EVENTS = """
scope.spans.add(trace_id=b"1" * 16, span_id=b"12345678")
span = scope.spans[0].SerializeToString() + b"\\x5a\\x00" * (16 << 20)
def field(number, content):
    size, rest = [number << 3 | 2], len(content)
    while rest > 0x7F:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*size, rest]) + content
run(field(1, field(2, field(2, span))))
"""


@pytest.mark.parametrize(
    ("made", "reasons"), [(_MANY_TRACES, ["too_large"]), (_ONE_SPAN_OFTEN, []), (_EMPTY_EVENTS, ["too_large"])]
)
def test_a_record_cannot_take_much_more_than_its_size(made: str, reasons: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ATTACK + made], capture_output=True, text=True, check=True, timeout=120
    )
    figures, letters = done.stdout.splitlines()
    seconds, mib = map(float, figures.split())
    assert letters.startswith(str(reasons)), letters
    print(figures)
    assert seconds < 15, figures  # 150 s before
    assert mib < 300, figures  # 2.3 to 4 GB before


def test_a_clock_that_is_wrong_neither_stamps_a_trace_nor_keeps_a_run_open() -> None:
    """A year ahead, and set back by an hour while runs are open."""
    for shift in (365 * 86_400_000, -3_600_000, -86_400_000):
        source, step, state = SpanPartition("otlp_spans", 0, NOW), assembling(), dict[bytes, bytes]()
        clock = NOW + shift
        rows = [record(spans.as_protobuf(spans.run_spans(1, start_ns=NOW * 10**6 - 10**10)), time_ms=NOW)]
        first = Spreading(source, 1)
        outputs = process(step, between(first.process(Poll(rows, clock))), state)
        for waited in (20_000, 61_000):
            outputs += process(step, between(first.process(Poll([], clock + waited, clock + waited, waited))), state)
        (made,) = outputs
        assert made.kind == ASSEMBLED
        assert made.timestamp_ms is not None
        assert abs(made.timestamp_ms - NOW) <= 60_000
