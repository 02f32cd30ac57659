"""A member of the group through a rebalance, without a broker: what readiness says."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tests.support.clock import until
from worker.config import load
from worker.contribute.contributor import Contributor
from worker.contribute.registry import RegistryClient
from worker.observe.metrics import ContributeMetrics


async def test_after_a_rebalance_the_trouble_of_before_is_no_longer_told() -> None:
    """Another member may have posted the trace since, and this one may have nothing to post for hours."""
    settings, metrics = load(), ContributeMetrics(CollectorRegistry())
    registry = RegistryClient("http://127.0.0.1:9", None, 1.0, metrics)
    contributor = Contributor(settings, {}, {}, registry, metrics)
    member = contributor.member()
    await member.on_partitions_assigned([])
    await until(lambda: member.not_ready() is None)
    contributor.gateway.trouble = "the registry did not answer"
    assert member.not_ready() == "the registry did not answer"
    await member.on_partitions_revoked([])
    assert member.not_ready() == "waiting for partitions to be assigned and restored"
    await member.on_partitions_assigned([])
    await until(lambda: member.not_ready() is None)
    await member._consumer.stop()
