"""Records out of the core: exact headers and bytes, event time, and the state of one partition."""

import datetime
import json
import random
from typing import Any

import numpy as np
import pytest

from tests.support.builders import (
    NEVER_ACCEPTED,
    T0,
    TextEmbedder,
    make_record,
    make_trace,
    random_trace_bytes,
    text_vector,
    trace_bytes,
    trace_document,
)
from tests.support.schemas import VALIDATORS
from worker import InvalidTrace, PartitionScorer, Profile, Reason, ScoredTrace, __version__, parse_trace
from worker.core.dead_letters import dead_letter, embedding_failed
from worker.core.documents import rfc3339, scored_record
from worker.core.novelty import CACHED_ID_LENGTH, Neighbour
from worker.core.records import EmbedderIdentity, Fault
from worker.core.scorer import cached_id, event_time_ms
from worker.core.scoring import PROFILES
from worker.core.trace import EARLIEST_MS, LATEST_MS, MAX_MESSAGE, embedding_text

SCORED, DEAD = VALIDATORS["scored-trace"], VALIDATORS["dead-letter-headers"]

IDENTITY = EmbedderIdentity("all-MiniLM-L6-v2", "ab" * 32, 2, 256, "sentence-transformers", "fp32")
YEAR_2099 = 4_070_908_800_000


def scored(raw: bytes, vector: Any = None, event_time: int = T0, scorer: PartitionScorer | None = None) -> ScoredTrace:
    return (scorer or PartitionScorer(10, 1000, 2)).score(parse_trace(raw), vector, event_time)


# -- the scored record


def test_the_exact_output_of_a_scored_trace() -> None:
    document = trace_document("kp:trace:é", steps=NEVER_ACCEPTED) | {"extra": {"b": 1.50, "a": [None]}}
    raw = json.dumps(document, ensure_ascii=False).replace('"b": 1.5', '"b": 1.50').encode()
    headers = [("trace", b"1"), ("kp-score", b"old"), ("kp-decision", b"old"), ("trace", b"2")]
    record = make_record(raw, 1847, headers=headers, partition=2)
    output = scored_record(record, scored(raw), None)
    assert output.kind == "rejected"
    assert output.key == b"agent-7"
    assert output.timestamp_ms == T0
    assert output.headers == [
        ("trace", b"1"),
        ("trace", b"2"),
        ("kp-score", b"0.1"),
        ("kp-decision", b"rejected"),
    ]
    assert b'"b":1.50' in output.value.replace(b" ", b"")  # unknown fields keep their spelling
    document["metadata"]["quality_score"] = 0.1
    assert json.loads(output.value) == document | {
        "scoring": {
            "score": 0.1,
            "decision": "rejected",
            "threshold": 0.75,
            "profile": "finance",
            "weights": {"complexity": 0.2, "novelty": 0.25, "tool_diversity": 0.1, "outcome_confidence": 0.45},
            "components": {
                "complexity": 1 / 4 * 0.5 + 1 / 20 * 0.2,
                "novelty": 0.5,
                "tool_diversity": 0.0,
                "outcome_confidence": 0.9,
            },
            "overrides": ["single_thought"],
            "nearest": None,
            "stream_time": "2026-04-14T08:00:00.000Z",
            "embedder": None,
            "source": {"topic": "traces", "partition": 2, "offset": 1847},
            "worker_version": __version__,
        }
    }


def test_an_accepted_trace_names_its_neighbour_and_model() -> None:
    scorer = PartitionScorer(10, None, 2)
    scored(trace_bytes("kp:trace:earlier"), [1, 0], scorer=scorer)
    raw = trace_bytes("kp:trace:later")
    output = scored_record(make_record(raw), scored(raw, [0, 5], scorer=scorer), IDENTITY)
    assert output.kind == "accepted"
    assert output.headers[-1] == ("kp-decision", b"accepted")
    scoring = json.loads(output.value)["scoring"]
    assert scoring["nearest"] == {"id": "kp:trace:earlier", "similarity": 0.0}
    assert scoring["components"]["novelty"] == 1.0
    assert scoring["embedder"] == {
        "name": "all-MiniLM-L6-v2",
        "weights_sha256": "ab" * 32,
        "dimensions": 2,
        "max_tokens": 256,
        "runtime": "sentence-transformers",
        "precision": "fp32",
    }
    SCORED.validate(json.loads(output.value))


@pytest.mark.parametrize("key", [None, b"", b"\xff\0"])
def test_any_key_is_passed_on(key: bytes | None) -> None:
    record = make_record(trace_bytes(), key=key, timestamp_ms=None)
    for output in (
        scored_record(record, scored(trace_bytes()), None),
        dead_letter(record, embedding_failed(OSError())),
    ):
        assert output.key == key
        assert output.timestamp_ms is None


def run(lines: list[bytes], embedder: TextEmbedder) -> list[tuple[Any, ...]]:
    scorer = PartitionScorer(5, 60_000, embedder.identity.dimensions)
    outputs = []
    for offset, line in enumerate(lines):
        record = make_record(line, offset, timestamp_ms=T0 + 20_000 * offset)
        trace = parse_trace(line)
        time_ms = event_time_ms(trace, record.timestamp_ms)
        verdict = scorer.score(trace, embedder.embed(embedding_text(trace)).vector, time_ms)
        output = scored_record(record, verdict, embedder.identity)
        outputs.append((output.kind, output.key, output.value, output.headers, output.timestamp_ms))
    return outputs


def test_the_same_input_gives_the_same_bytes_that_fit_the_schema_and_the_parser(seed: int) -> None:
    rng = random.Random(seed)
    lines = [random_trace_bytes(rng, number, T0 + rng.randrange(3_000_000)) for number in range(150)]
    outputs = run(lines, TextEmbedder(8))
    assert run(lines, TextEmbedder(8)) == outputs
    assert {output[0] for output in outputs} == {"accepted", "rejected"}
    for line, (kind, _, value, headers, _) in zip(lines, outputs, strict=True):
        document = json.loads(value)
        SCORED.validate(document)
        trace = parse_trace(value)
        assert embedding_text(trace) == embedding_text(parse_trace(line))
        assert trace.metadata.quality_score == document["scoring"]["score"]
        assert json.loads(dict(headers)["kp-score"]) == document["scoring"]["score"]
        assert dict(headers)["kp-decision"].decode() == document["scoring"]["decision"] == kind


# -- the dead letter


def test_the_exact_headers_of_a_dead_letter() -> None:
    record = make_record(b"{", 7, headers=[("a", b"1"), ("kp-error-reason", b"from before")], partition=3)
    output = dead_letter(record, InvalidTrace(Reason.INVALID_TYPE, "steps.1.tool", "steps.1.tool: give an object"))
    assert (output.kind, output.key, output.value, output.timestamp_ms) == ("dead_letter", b"agent-7", b"{", T0)
    assert output.headers == [
        ("a", b"1"),
        ("kp-error-reason", b"from before"),
        ("kp-error-reason", b"invalid_type"),
        ("kp-error-path", b"steps.1.tool"),
        ("kp-error-message", b"steps.1.tool: give an object"),
        ("kp-source-topic", b"traces"),
        ("kp-source-partition", b"3"),
        ("kp-source-offset", b"7"),
        ("kp-source-timestamp", str(T0).encode()),
        ("kp-worker-version", __version__.encode()),
    ]


@pytest.mark.parametrize("value", [None, b"", b"\xff", b"nope", b"[]", b"{}", trace_bytes(confidence=2), b"[" * 9999])
@pytest.mark.parametrize("timestamp_ms", [None, -1, 0, T0])
def test_a_dead_letter_keeps_the_value_and_fits_the_schema(value: bytes | None, timestamp_ms: int | None) -> None:
    with pytest.raises(InvalidTrace) as caught:
        parse_trace(value)
    output = dead_letter(make_record(value, timestamp_ms=timestamp_ms), caught.value)
    assert output.value == value
    DEAD.validate({name: content.decode() for name, content in output.headers})
    assert dict(output.headers)["kp-source-timestamp"] == (b"" if timestamp_ms is None else b"%d" % timestamp_ms)


def test_an_embedding_that_failed_names_the_exception_and_no_content() -> None:
    error = embedding_failed(ValueError("secret content of the trace"))
    assert (error.reason, error.path) == (Reason.EMBEDDING_FAILED, "")
    assert "ValueError" in error.message
    assert "secret" not in error.message
    assert len(error.message) <= MAX_MESSAGE
    DEAD.validate({name: content.decode() for name, content in dead_letter(make_record(b"x"), error).headers})


# -- event time


EVENT_TIMES = [
    # created_at, record timestamp, by created_at, by record
    (T0, T0, T0, T0),
    (T0 - 5000, T0, T0 - 5000, T0),
    (T0 + 1, T0, T0, T0),
    (YEAR_2099, T0, T0, T0),
    (YEAR_2099, None, YEAR_2099, YEAR_2099),
    (T0, -1, T0, T0),  # -1 is Kafka's word for no timestamp
    (T0, 0, 0, 0),
    (T0, None, T0, T0),
    ("0001-01-01T00:00Z", T0, EARLIEST_MS, T0),
    ("9999-12-31T23:59:59.999Z", 2**63 - 1, LATEST_MS, LATEST_MS),  # what the changelog takes
]


@pytest.mark.parametrize(("created_at", "timestamp_ms", "by_created_at", "by_record"), EVENT_TIMES)
def test_event_time(created_at: int | str, timestamp_ms: int | None, by_created_at: int, by_record: int) -> None:
    trace = make_trace(created_at=created_at)
    assert event_time_ms(trace, timestamp_ms) == by_created_at
    assert event_time_ms(trace, timestamp_ms, "created_at") == by_created_at
    assert event_time_ms(trace, timestamp_ms, "record") == by_record


@pytest.mark.parametrize("ms", [-62_135_596_800_001, -(10**15), -(10**30), 253_402_300_800_000, 10**15, 10**30])
def test_rfc3339_stays_within_the_calendar(ms: int) -> None:
    assert rfc3339(ms)[:19] == ("0001-01-01T00:00:00" if ms < 0 else "9999-12-31T23:59:59")
    assert len(rfc3339(ms)) == 24


def test_rfc3339_agrees_with_the_calendar(seed: int) -> None:
    rng = random.Random(seed)
    ends = (-62_135_596_800_000, 253_402_300_799_999, 0, -1, 1, 951_782_400_000)
    for ms in (*ends, *(rng.randrange(*ends[:2]) for _ in range(2000))):
        moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=ms)
        assert rfc3339(ms) == moment.isoformat(timespec="milliseconds") + "Z"


# -- the partition's state


def test_a_restart_is_no_first_trace() -> None:
    scorer = PartitionScorer(ttl_ms=3_600_000, dimensions=2, max_step_ms=60_000)
    scorer.restore([], T0)
    assert scored(trace_bytes(), None, YEAR_2099, scorer).stream_time_ms == T0 + 60_000
    for step in (0, -1):
        with pytest.raises(ValueError, match="max_step_ms must be at least 1"):
            PartitionScorer(max_step_ms=step)


@pytest.mark.parametrize("step", [None, 1, 1_000, 10_000, 10**15])
def test_bounded_steps_agree_with_brute_force(step: int | None, seed: int) -> None:
    """The oracle keeps every entry for ever and counts those that live; a restart in the middle changes nothing."""
    rng = random.Random(seed)
    ttl = 5_000
    trace = parse_trace(trace_bytes())
    scorer = PartitionScorer(max_elements=10_000, ttl_ms=ttl, dimensions=1, max_step_ms=step)
    stream: int | None = None
    inserted: list[tuple[int, int, str, Any]] = []
    for number in range(400):
        event = T0 + number * 20 + rng.choice((0, 0, 0, -3_000, 900, 4_000, 10**9)) * rng.randrange(3)
        moved = event if stream is None or step is None else min(event, stream + step)
        stream = moved if stream is None else max(stream, moved)
        result = scorer.score(trace, [1.0], event)
        assert result.stream_time_ms == stream
        inserted.append((number, stream, "", result.vector))
        assert len(scorer.cache) == sum(stream - time < ttl for _, time, _, _ in inserted)
        if rng.random() < 0.02:
            scorer = PartitionScorer(max_elements=10_000, ttl_ms=ttl, dimensions=1, max_step_ms=step)
            scorer.restore(inserted, stream)


@pytest.mark.parametrize(("threshold", "accepted"), [(0.0, True), (0.1, True), (0.1000001, False), (1.0, False)])
def test_accepted_is_a_score_of_at_least_the_threshold(threshold: float, accepted: bool) -> None:
    """That is the one of the domain's profile, whatever it is; without one, the general threshold."""
    profiles = {**PROFILES, "own": Profile(PROFILES["code"].weights, threshold)}
    scorers = {"own": PartitionScorer(threshold=0.5, profiles=profiles), "other": PartitionScorer(threshold=threshold)}
    for domain, scorer in scorers.items():
        result = scorer.score(make_trace(domain=domain, steps=NEVER_ACCEPTED), None, T0)
        assert (result.score, result.accepted, result.threshold) == (0.1, accepted, threshold)
    assert scorers["own"].score(make_trace(domain="other"), None, T0).threshold == 0.5


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_out_of_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        PartitionScorer(threshold=threshold)


def test_weighing_a_trace_changes_nothing() -> None:
    """Each trace is weighed at a later time first, at which earlier entries have expired."""
    one, two = PartitionScorer(3, 1000, 4), PartitionScorer(3, 1000, 4)
    for number in range(10):
        trace, vector = make_trace(f"kp:trace:{number}"), text_vector(str(number % 4), 4)
        time_ms = T0 + 300 * number
        before = two.stream_time_ms, len(two.cache), two.cache.expired, two.cache.next_sequence
        two.weigh(trace, vector, time_ms + 700)
        assert (two.stream_time_ms, len(two.cache), two.cache.expired, two.cache.next_sequence) == before
        scored, moments = two.weigh(trace, vector, time_ms, iter(range(3)).__next__)
        two.keep(scored)
        assert moments == (0, 1, 2)
        expected = one.score(trace, vector, time_ms)
        assert (scored.score, scored.nearest, scored.sequence) == (expected.score, expected.nearest, number)
        assert np.array_equal(scored.vector, expected.vector)  # type: ignore[arg-type]


def test_the_cache_keeps_the_beginning_of_a_long_id() -> None:
    trace = make_trace("kp:trace:" + "x" * 1000)
    assert cached_id(trace) == trace.id[:CACHED_ID_LENGTH]
    scorer = PartitionScorer(10, None, 1)
    scorer.score(trace, [1], T0)
    result = scorer.score(trace, [1], T0)
    assert result.nearest == Neighbour(trace.id[:CACHED_ID_LENGTH], 1.0)
    assert result.trace_id == trace.id


def test_a_dead_letter_for_several_records_says_which() -> None:
    record = make_record(None, 9)._replace(fault=Fault(Reason.BATCH_TOO_LARGE, "too large", 4))
    headers = dict(dead_letter(record, InvalidTrace(Reason.BATCH_TOO_LARGE, "", "too large")).headers)
    assert (headers["kp-source-offset"], headers["kp-source-first-offset"], headers["kp-source-last-offset"]) == (
        b"9", b"4", b"9",
    )  # fmt: skip
    alone = make_record(None, 9)._replace(fault=Fault(Reason.BAD_HEADER, "bad"))
    headers = dict(dead_letter(alone, InvalidTrace(Reason.BAD_HEADER, "", "bad")).headers)
    assert "kp-source-first-offset" not in headers
