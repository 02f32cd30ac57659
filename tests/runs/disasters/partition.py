"""One of three brokers is partitioned off: the group's coordinator, then a transaction coordinator; at last only from
the other brokers, while clients still reach it. Needs root and iproute2 (network.py).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient

from tests.runs.disasters.network import SplitCluster, split_cluster
from tests.runs.disasters.scene import Scene, Verdict, scene

CUT_S: Final = 40.0
STALL_S: Final = 60.0
"""What a worker survives: KP_TRANSACTION_TIMEOUT_SECONDS."""


async def _coordinator(bootstrap: str, name: str, kind: int) -> int:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        found: int = await admin.find_coordinator(name, kind)
        return found
    finally:
        await admin.close()


def coordinator(bootstrap: str, name: str, kind: int) -> int:
    """Return the broker that coordinates a group (kind 0) or a transactional id (kind 1)."""
    return asyncio.run(_coordinator(bootstrap, name, kind))


def cut_for_a_while(s: Scene, cluster: SplitCluster, node: int, what: str, *, clients_too: bool) -> None:
    """Cut a broker off for CUT_S and join it again; the workers must go on."""
    s.eye.reset()
    s.say(f"broker {node} ({what}) is cut off" + ("" if clients_too else " from the other brokers only"))
    (cluster.cut if clients_too else cluster.cut_from_brokers)(node)
    time.sleep(CUT_S)
    during = s.eye.longest_stall
    s.say(f"longest time without a commit: {during:.1f} s; the broker is joined again")
    (cluster.join if clients_too else cluster.join_brokers)(node)
    time.sleep(20)
    kind = "from all" if clients_too else "from the other brokers only"
    s.verdict.expect(
        s.eye.longest_stall < STALL_S, f"{what} cut off {kind}: {s.eye.longest_stall:.1f} s without a commit"
    )


def run(work: Path, seed: int) -> Verdict:
    """Run `partition`."""
    with split_cluster(work / "kafka") as cluster:
        bootstrap = cluster.bootstrap_servers
        with scene(bootstrap, work / "logs", "one of three brokers is partitioned off", seed=seed) as s:
            s.begin()
            cut_for_a_while(s, cluster, coordinator(bootstrap, s.group, 0), "the group's coordinator", clients_too=True)
            cut_for_a_while(
                s, cluster, coordinator(bootstrap, f"{s.group}-0", 1), "a transaction coordinator", clients_too=True
            )
            cut_for_a_while(
                s, cluster, coordinator(bootstrap, s.group, 0), "the group's coordinator", clients_too=False
            )
            return s.finish(exits=(1,))
