"""docs/status-page.png: `python -m tests.runs.status_picture` (needs what `make browser-test` needs).

A worker with the real model on real Kafka, 64 partitions of very different lag. Most traces are done when the picture
is taken; on some partitions records wait, the oldest for minutes by their timestamps.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import sync_playwright

from tests.runs.browser_status import chromium
from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, create_topics
from tests.support.stage import LINES, Stage
from tests.support.surroundings import ROOT
from worker.lab.broker.embedded_kafka import EmbeddedKafka

DEMO = (ROOT / "worker/data/demo_traces.jsonl").read_bytes().splitlines()
PARTITIONS, SEED = 64, 1
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
OWN = [
    trace_bytes(f"kp:trace:order-{number}", domain=domain, objective=objective)
    for number, (domain, objective) in enumerate(
        (
            ("logistics", "Find a berth for a container ship that is two days late"),
            ("Finance", "Explain why the quarterly accruals differ from the plan"),
            ("logistics", "Find a berth for a container ship that comes two days early"),
            ("energy", "Plan the maintenance of three wind turbines around the storms of next week"),
        )
    )
]
BROKEN = [b"{}", b"not JSON", LINES[0].replace(b'"success"', b'"succeeded"')]


def done(rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield the records that are scored before the picture: more on some partitions than on others."""
    weights = [1 / (1 + rank) ** 0.7 for rank in range(PARTITIONS)]
    rng.shuffle(weights)
    values = [*LINES, *DEMO, *OWN, *BROKEN]
    rng.shuffle(values)
    for value, partition in zip(values, rng.choices(range(PARTITIONS), weights, k=len(values)), strict=True):
        yield None, value, (), partition, None


def waiting(rng: random.Random, now_ms: int) -> Iterator[tuple[Any, ...]]:
    """Yield a backlog: few records on some partitions, thousands on others; the oldest are minutes old."""
    for partition in rng.sample(range(PARTITIONS), 26):
        age_s = rng.choice([0, 1, 4, 20, 90, 200, 400])
        for number in range(round(10 ** rng.uniform(0.3, 3.3))):
            trace = json.loads(rng.choice(LINES))
            # Equal texts are embedded once: without a difference the backlog would be gone in two seconds.
            trace["steps"].insert(
                0, {"step_id": 0, "type": "thought", "content": f"Case {number} of queue {partition}."}
            )
            yield None, json.dumps(trace).encode(), (), partition, now_ms - 1000 * age_s


def pictures(kafka: EmbeddedKafka, out: Path, shots: Sequence[tuple[int, Scheme]]) -> None:
    """Write one picture for each width and colour scheme, named by them where there are several."""
    rng = random.Random(SEED)
    stage = Stage(
        kafka, KP_STATUS_PAGE="true", KP_STATUS_TEXTS="true", KP_HTTP_HOST="127.0.0.1", KP_EMBEDDER="auto",
        KP_GROUP_ID="kp-worker", KP_EVENT_TIME="record",
    )  # fmt: skip
    create_topics(stage.bootstrap, {stage.name: PARTITIONS})
    with WorkerProcess(stage.env) as worker:
        worker.wait_ready()
        records = list(done(rng))
        stage.produce(records)
        while worker.metric("kp_traces_total") < 0.97 * len(records):
            time.sleep(0.5)
        stage.produce(list(waiting(rng, time.time_ns() // 1_000_000)))
        time.sleep(8)  # some of it is done
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium())
            for width, scheme in shots:
                page = browser.new_page(viewport={"width": width, "height": 1180}, color_scheme=scheme)
                page.goto(f"http://127.0.0.1:{worker.http_port}/")
                page.get_by_text("✓ ready").wait_for()
                page.wait_for_timeout(500)
                worst = page.locator("#partitions tr td").first.inner_text().split()[-1]
                page.locator("#strip .cell").nth(int(worst)).hover()
                page.wait_for_timeout(100)
                path = out / f"{width}-{scheme}.png" if len(shots) > 1 else out
                page.screenshot(path=path, full_page=len(shots) > 1)
                page.close()
            browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/status-page.png", help="file, or a folder with --all")
    parser.add_argument("--all", action="store_true", help="pictures of 400, 900 and 1400 px, light and dark")
    given = parser.parse_args()
    wanted = [(w, s) for w in (400, 900, 1400) for s in SCHEMES] if given.all else [(1280, SCHEMES[0])]
    with EmbeddedKafka() as broker:
        pictures(broker, given.out, wanted)
