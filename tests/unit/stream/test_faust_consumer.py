"""What worker/stream uses of Faust beyond its public API: a version that changes it fails here.

That of aiokafka: tests/unit/kafka/test_aiokafka_private.py.
"""

import asyncio
import inspect
from typing import Any

import faust
import pytest
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.transport import consumer as base
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode import Service

from tests.support.builders import make_record
from worker.config import Settings
from worker.kafka.budget import Budget
from worker.stream.faust_consumer import KpConsumer, Membership, _App, _ConsumerThread, _Tables, create_app
from worker.stream.fetch_buffer import FetchBuffer


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (KpConsumer._drain_messages, base.Consumer._drain_messages),
        (KpConsumer._new_consumer_thread, driver.Consumer._new_consumer_thread),
        (KpConsumer.wait_empty, base.Consumer.wait_empty),
        (KpConsumer.perform_seek, base.Consumer.perform_seek),
        (KpConsumer.verify_event_path, driver.Consumer.verify_event_path),
        (_ConsumerThread._create_worker_consumer, driver.AIOKafkaConsumerThread._create_worker_consumer),
        (_App._create_directories, faust.App._create_directories),
        (_Tables.on_start, TableManager.on_start),
    ],
)
def test_an_overridden_method_is_still_there_with_its_parameters(ours: Any, theirs: Any) -> None:
    assert parameters(ours) == parameters(theirs)
    assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)


def test_fausts_search_for_stuck_partitions_finds_none(caplog: pytest.LogCaptureFixture) -> None:
    """It knows neither our fetches nor our commits: after five minutes it reported live partitions as stuck."""
    assert "self.verify_event_path(now, tp)" in inspect.getsource(base.Consumer.verify_all_partitions_active)
    consumer = KpConsumer.__new__(KpConsumer)  # without a thread: Faust's own method needs it
    consumer.verify_event_path(1e9, TP("traces", 0))
    assert not caplog.records


def test_commit_can_still_be_replaced() -> None:
    assert set(parameters(base.Consumer.commit)) == set(parameters(KpConsumer.commit))


def test_faust_still_calls_what_is_replaced() -> None:
    assert "consumer._drain_messages(self)" in inspect.getsource(base.Fetcher)
    assert "wait_empty" in inspect.getsource(faust.App._consumer_wait_empty)
    source = inspect.getsource(Recovery._resume_streams)
    order = [source.index(text) for text in ("on_rebalance_complete.send", "perform_seek", "resume_flow")]
    assert order == sorted(order), "restore first, then seek, then let records flow"
    revoke = inspect.getsource(faust.App._on_partitions_revoked)
    order = [revoke.index(text) for text in ("stop_flow", "flow_control.clear", "_consumer_wait_empty")]
    assert order == sorted(order), "no record may come while the lanes drain"


def test_the_start_of_tables_is_still_a_sleep_and_these_two_calls() -> None:
    source = inspect.getsource(TableManager.on_start)
    order = [source.index(text) for text in ("self.sleep(", "self._update_channels()", "self.recovery.start()")]
    assert order == sorted(order)
    assert source.count("await") == len(order)


def test_names_that_are_used_still_exist() -> None:
    assert {"flow_active", "can_resume_flow", "suspend_flow"} <= set(base.Consumer.__annotations__)
    assert "_ensure_consumer" in vars(driver.AIOKafkaConsumerThread)
    assert "call_thread" in dir(driver.AIOKafkaConsumerThread)
    assert "_stopped" in inspect.getsource(Service)
    assert isinstance(faust.App.transport, property)
    assert faust.App.transport.fset is not None
    assert hasattr(faust.app.base.BootStrategy, "enable_kafka_producer")


async def test_the_agent_takes_waiting_records_though_faust_empties_its_queues() -> None:
    """At the end of a rebalance Faust may resume the flow once more after records have come, and empties the queues."""
    budget = Budget(1 << 20)
    buffer = FetchBuffer(budget.records)
    taken = asyncio.Event()

    class Served:
        async def take_all(self) -> None:
            assert buffer.next() is not None
            taken.set()

    app = create_app(Membership(Settings(), {}, buffer, budget, None), Served())
    await app.agents.start()
    app.flow_control.suspend()
    buffer.assign([0])
    buffer.add(0, [make_record(b"", 7)])
    app.flow_control.clear()
    app.flow_control.resume()
    await asyncio.wait_for(taken.wait(), 10)
    await app.agents.stop()
    app.consumer._thread.thread_loop.close()  # its thread was not started
