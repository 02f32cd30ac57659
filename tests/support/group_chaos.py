"""The novelty scope `group` under chaos, judged by group_oracle.py: what the short and the full crash test run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support import chaos
from tests.support.chaos import Chaos, Fleet, Load, settings, traces, wait_settled
from tests.support.crash_worker import hash_vector
from tests.support.forgetting import KEY
from tests.support.group_oracle import Watcher, check_group
from tests.support.kafka_fixtures import create_topics, topic_id, wait_until
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PATIENCE_S: Final = 300.0
LAG_SECONDS: Final = 3


def run_group_chaos(
    kafka: EmbeddedKafka,
    logs: Path,
    seed: int,
    plan: Sequence[str],
    *,
    records: int,
    rate: float,
    workers: int,
    pause: tuple[float, float] = (0.3, 3.0),
    forget: bool = False,
) -> None:
    """Produce, disturb, and judge; `forget`: with control records among the traces. Raises AssertionError."""
    env = settings(
        kafka.bootstrap_servers,
        KP_NOVELTY_SCOPE="group",
        KP_GROUP_MAX_LAG_SECONDS=str(LAG_SECONDS),
        TEST_EMBED_MS="5",
        TEST_DECISIONS=str(logs),
    )
    source = traces(seed, 4)
    if forget:
        env |= chaos.forgetting(env)
    outputs: dict[str, tuple[int, dict[str, str]]] = {
        env[name]: (4, {}) for name in ("KP_ACCEPTED_TOPIC", "KP_REJECTED_TOPIC", "KP_DEAD_LETTER_TOPIC")
    }
    create_topics(kafka.bootstrap_servers, chaos.topics(env) | outputs)
    if forget:
        identity = topic_id(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"])
        source = chaos.with_requests(seed, source, env["KP_SOURCE_TOPIC"], identity, KEY, everywhere=4)
    with Watcher(kafka.bootstrap_servers, env) as watcher, Fleet(env, logs) as fleet:
        for _ in range(workers):
            fleet.add()
        load = Load(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], source, records, rate)
        load.start()
        violence = Chaos(kafka, fleet, seed, most=workers)
        violence.run(plan, pause)
        ends = load.finish(PATIENCE_S)
        assert wait_settled(kafka.bootstrap_servers, env, ends, PATIENCE_S), f"not settled\n{fleet.tails()}"
        assert set(fleet.stop_all()) <= {0}, fleet.tails()
        total = sum(ends.values())
        assert wait_until(lambda: len(watcher.seen) >= total, 60), f"{len(watcher.seen)} of {total} outputs seen"
        time.sleep(0.5)
    print(chaos.log_report(logs))
    print(f"exits that nobody asked for: {fleet.unexpected()}")
    report, judged = check_group(kafka.bootstrap_servers, env, hash_vector, watcher, logs, LAG_SECONDS)
    print(report, f"outputs={judged.outputs}, foreign={judged.foreign}, wrong={len(judged.wrong)}")
    assert report.source == total
    assert violence.done >= Counter(plan)
    assert not report.problems()
    assert not judged.wrong, judged.wrong[:12]
    assert judged.foreign > judged.outputs / 10
    assert not forget or (report.receipts > records / 100 and judged.hidden > records / 100)
