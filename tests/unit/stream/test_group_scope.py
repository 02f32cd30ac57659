"""Traces that wait while the view of other partitions lags, and records that a drain gives up then."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry

from tests.support.builders import TextEmbedder
from tests.support.partition import DIMENSIONS, TaskHarness, settle
from worker.config import ConfigError, load
from worker.observe.metrics import Metrics
from worker.stream.group_scope import GroupScope


def scope(action: str = "wait") -> GroupScope:
    """Return a scope whose view has never been loaded; `lag` says how far it is behind."""
    settings = load(novelty_scope="group", group_max_lag_seconds="5", group_lag_action=action)
    return GroupScope(settings, {}, 1, TextEmbedder(DIMENSIONS).identity, Metrics(CollectorRegistry()))


def lag(group: GroupScope, seconds: float) -> None:
    group._follower._complete[0] = time.monotonic() - seconds


async def test_nothing_is_decided_while_the_view_lags(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = scope()
    stage = TaskHarness(embed=False, group=group)
    group._advance = stage.task.advance
    lag(group, 6)
    stage.take(0, 1)
    await settle()
    assert stage.publisher.begun == []
    assert "KP_GROUP_MAX_LAG_SECONDS=5" in (group.not_ready() or "")
    assert [it.message for it in caplog.records if "traces wait" in it.message] == [caplog.messages[0]], "once"
    lag(group, 4)
    group._progress()
    await settle()
    assert stage.publisher.outputs() == [("accepted", 0), ("accepted", 1)]
    assert group.not_ready() is None


async def test_with_continue_traces_are_decided_however_old_the_view() -> None:
    group = scope("continue")
    lag(group, 1e6)
    stage = TaskHarness(embed=False, group=group)
    stage.take(0)
    await settle()
    assert stage.publisher.outputs() == [("accepted", 0)]
    assert group.not_ready() is None
    group.update_metrics()
    assert group._metrics.registry.get_sample_value("kp_group_view_lag_seconds") == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("embedded", [True, False])
async def test_a_drain_gives_waiting_records_up_and_they_are_taken_again(embedded: bool) -> None:
    group = scope()
    lag(group, 0)
    stage = TaskHarness(group=group)
    stage.take(0)
    stage.pool.finish(0)
    await settle()
    lag(group, 6)
    stage.take(1, 2)
    if embedded:
        stage.pool.finish(1)
    await stage.task.drain()
    assert stage.publisher.outputs() == [("accepted", 0)]
    assert (len(stage.task), stage.task.committed) == (0, 1)
    lag(group, 0)
    stage.take(1, 2)  # as they are read again
    for number in range(3, 5):
        stage.pool.finish(number)
    await settle()
    assert stage.publisher.outputs() == [("accepted", 0), ("accepted", 1), ("accepted", 2)]
    assert stage.share.held == 0
    await stage.task.close()
    assert stage.task._bytes == 0


@pytest.mark.parametrize("value", ["1.9", "nan", "-1"])
def test_a_lag_below_what_an_idle_reader_has_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="KP_GROUP_MAX_LAG_SECONDS"):
        load(group_max_lag_seconds=value)


def test_at_least_once_cannot_have_the_scope_group() -> None:
    with pytest.raises(ConfigError, match="KP_NOVELTY_SCOPE=group needs KP_DELIVERY=exactly_once"):
        load(novelty_scope="group", delivery="at_least_once")
