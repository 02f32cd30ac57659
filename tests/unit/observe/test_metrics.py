"""What the worker says of itself: series from the start, lag in records and in seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from tests.support.partition import TaskHarness, record, settle
from worker.core.trace import Reason
from worker.kafka.budget import Share
from worker.observe.metrics import ContributeMetrics, Histogram, Metrics, lag_seconds
from worker.stream.fetch_buffer import FetchBuffer


def test_every_counter_has_all_its_series_at_zero_from_the_start() -> None:
    registry = CollectorRegistry()
    Metrics(registry, ["default", "law"])
    families = {family.name: family for family in registry.collect()}
    for family in families.values():
        if family.type == "counter":
            counts = [sample.value for sample in family.samples if sample.name.endswith("_total")]
            assert counts, family.name
            assert set(counts) == {0}
    labels = [sample.labels for sample in families["kp_traces"].samples if sample.name == "kp_traces_total"]
    assert {(label["decision"], label["profile"]) for label in labels} == {
        ("accepted", "default"), ("accepted", "law"), ("rejected", "default"), ("rejected", "law"),
    }  # fmt: skip
    reasons = {sample.labels["reason"] for sample in families["kp_dead_letters"].samples}
    assert reasons == {str(reason) for reason in Reason}


def test_a_partition_s_gauges_end_with_its_assignment() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    def gauges() -> set[str]:
        return {s.name for f in registry.collect() if f.type == "gauge" for s in f.samples if s.labels}

    for gauge in vars(metrics).values():
        if getattr(gauge, "_labelnames", ()) == ("partition",):
            gauge.labels("3").set(1)
    assert len(gauges()) == 9
    metrics.forget_partition(3)
    metrics.forget_partition(3)  # nothing is left
    assert gauges() == set()


@pytest.mark.parametrize(
    ("lag", "timestamp_ms", "seconds"),
    [
        (0, None, 0.0),
        (0, 1_000, 0.0),
        (1, 40_000, 60.0),
        (1, 100_500, 0.0),  # the producer's clock is ahead
        (1, None, None),
        (1, -1, None),  # a record without a timestamp
    ],
)
def test_lag_in_seconds_is_the_age_of_what_waits(lag: int, timestamp_ms: int | None, seconds: float | None) -> None:
    assert lag_seconds(lag, timestamp_ms, now=100.0) == seconds


async def test_the_oldest_record_of_a_lane_is_the_first_past_the_committed_offset() -> None:
    stage = TaskHarness()

    def oldest() -> int | None:
        oldest_record = stage.task.oldest()
        return None if oldest_record is None else oldest_record.offset

    assert oldest() is None
    stage.take(0, 1, 2)
    assert oldest() == 0  # waits for its embedding
    stage.publisher.gate.clear()
    stage.pool.finish(0)
    stage.pool.finish(1)
    await settle()
    assert stage.task.committed == 0
    assert oldest() == 0  # is being committed
    stage.publisher.gate.set()
    await settle()
    assert oldest() == stage.task.committed == 2
    stage.pool.finish(2)
    await stage.task.drain()
    assert oldest() is None


def test_the_oldest_record_of_the_buffer() -> None:
    buffer = FetchBuffer(Share(1 << 20))
    buffer.assign([0, 1])
    assert buffer.oldest(0) is None
    assert buffer.oldest(7) is None
    buffer.add(0, [record(5), record(6)])
    assert buffer.oldest(0).offset == 5
    assert buffer.oldest(1) is None


BOUNDS = st.lists(st.integers(1, 99), min_size=1, max_size=10, unique=True).map(sorted)


@given(BOUNDS, st.lists(st.lists(st.integers(1, 99) | st.floats(0, 120), max_size=200), min_size=1, max_size=5))
def test_values_counted_together_give_the_bits_of_values_counted_one_by_one(
    bounds: list[float], batches: list[list[float]]
) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    one_by_one, together = (Histogram("kp_x", "X.", bounds, registry) for registry in registries)
    for values in batches:
        for value in values:
            one_by_one.observe(value)
        together.observe_all(values)
    first, second = ([sample for family in r.collect() for sample in family.samples] for r in registries)
    assert first == second
    assert len(first) == len(bounds) + 3  # the bucket beyond all, the count and the sum


def test_an_evaluation_with_a_trace_is_the_exemplar_of_its_bucket_in_openmetrics_alone() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.evaluation.observe(0.02, "0af7651916cd43dd8448eb211c80319c")
    metrics.evaluation.observe(0.02, "1" * 32)
    metrics.evaluation.observe(0.3)
    text = openmetrics.generate_latest(metrics.registry).decode()
    lines = [line for line in text.splitlines() if " # " in line]
    assert len(lines) == 1
    bucket, _, exemplar = lines[0].partition(" # ")
    assert bucket == 'kp_evaluation_duration_seconds_bucket{le="0.025"} 2.0'
    assert exemplar.startswith(f'{{trace_id="{"1" * 32}"}} 0.02 ')
    assert " # {" not in generate_latest(metrics.registry).decode()


def test_no_counter_has_a_second_series_with_the_time_of_its_creation() -> None:
    for metrics in (Metrics(CollectorRegistry()), ContributeMetrics(CollectorRegistry())):
        assert "_created" not in generate_latest(metrics.registry).decode()
        assert "_created" not in openmetrics.generate_latest(metrics.registry).decode()
