"""Scope group: what one partition has been told to forget is compared nowhere, whatever the others have read so far.

Partitions with their real scorers and changelogs, workers whose views lag and which restart; the judge is brute force
over what a worker can see.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.builders import make_trace, text_vector
from tests.support.forgetting import KEY, TOPIC_ID, asked, control_record
from worker.core import forgetting
from worker.core import forgetting as control
from worker.core.changelog import Log, encode, slot_key
from worker.core.forgetting import Forgetting, read_request
from worker.core.group_view import GroupView
from worker.core.novelty import Label, Vector
from worker.core.passes import BEFORE_PASSES, MARKER_KEY, MARKER_VERSION, Found, Marker, committed_from, encode_marker
from worker.core.scorer import PartitionScorer

DIMENSIONS, CAPACITY, PARTITIONS, BEHIND = 6, 8, 3, 6
MODEL = "model"


@dataclass
class Partition:
    """One partition: what was committed, and its worker's state of it. `log`: key and value by changelog offset."""

    log: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=lambda: {0: 1})  # records of the transaction at a changelog offset
    scorer: Any = None
    forgetting: Any = None
    offset: int = 0
    done: dict[str, tuple[int, int]] = field(default_factory=dict)  # request: source offset, changelog offset
    pending: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Worker:
    """A worker: its partitions, its view, and how far that has read each changelog."""

    mine: list[int]
    view: Any = None
    read: list[int] = field(default_factory=list)


class World:
    """All partitions, and two workers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        for partition in self.partitions:
            partition.log.append((MARKER_KEY, encode_marker(Marker(MARKER_VERSION, "", BEFORE_PASSES))))
        self.workers = [Worker([0, 1]), Worker([2])]
        self.requests: dict[str, dict[str, Any]] = {}
        self.entries: dict[tuple[int, int], tuple[str, str, Vector]] = {}
        self.named = self.hidden = 0
        for worker in self.workers:
            self.restart(worker)

    def _restored(self, number: int) -> Any:
        partition, log = self.partitions[number], Log()
        for position, (key, value) in enumerate(partition.log):
            log.apply(key, value, position)
        found = Found(partition.offset, True, committed_from("kp2:0::0:0"))
        return log.restore(found, MODEL, DIMENSIONS, CAPACITY), len(partition.log)

    def restart(self, worker: Worker) -> None:
        worker.view = GroupView(MODEL, DIMENSIONS, CAPACITY, None, 100)
        worker.read = [0] * PARTITIONS
        for number in range(PARTITIONS):
            restored, worker.read[number] = self._restored(number)
            worker.view.load(number, restored)
        for number in worker.mine:
            restored, _ = self._restored(number)
            partition = self.partitions[number]
            partition.scorer = PartitionScorer(CAPACITY, None, DIMENSIONS)
            partition.scorer.join_group(number, worker.view)
            partition.scorer.restore(restored.cache(), 0, restored.next_sequence)
            partition.forgetting = Forgetting(restored.kept(), restored.requests, 0, MODEL, None)

    def catch_up(self, worker: Worker) -> None:
        number = self.rng.randrange(PARTITIONS)
        log = self.partitions[number].log
        transactions = self.rng.randint(1, 6)
        while transactions and worker.read[number] < len(log):
            for _ in range(self.partitions[number].sizes[worker.read[number]]):
                key, value = log[worker.read[number]]
                assert worker.view.apply(number, key, value, worker.read[number])
                worker.read[number] += 1
            transactions -= 1

    def ask(self) -> None:
        """Issue a request; some partitions never get its control record."""
        body: dict[str, Any] = {"request_id": f"r-{len(self.requests)}", "agent_id": f"agent {self.rng.randrange(3)}"}
        if self.rng.random() < 0.5 and self.entries:
            del body["agent_id"]
            body["trace_ids"] = [self.rng.choice(list(self.entries.values()))[0]]
        body["end_offsets"] = [partition.offset for partition in self.partitions]
        self.requests[body["request_id"]] = body
        for partition in self.partitions:
            if self.rng.random() < 0.9:
                partition.pending.append(body)

    def step(self, worker: Worker, number: int) -> None:
        """Process the next record of a partition and commit it."""
        partition, rng = self.partitions[number], self.rng
        offset, partition.offset = partition.offset, partition.offset + 1
        if partition.pending and rng.random() < 0.4:
            body = partition.pending.pop(0)
            if offset <= body["end_offsets"][number] + BEHIND:
                record = control_record(offset, partition=number, **body)
                forgotten = partition.forgetting.forget(
                    read_request(record, [KEY], TOPIC_ID), partition.scorer.cache, offset, 0
                )
                partition.scorer.forget_in_group(forgotten.processed)
                partition.sizes[len(partition.log)] = len(forgotten.rows)
                partition.log += forgotten.rows
                at = next(n for n, (key, _) in enumerate(partition.log) if key == forgotten.processed.key())
                partition.done[body["request_id"]] = offset, at
            return
        agent = f"agent {rng.randrange(3)}"
        trace = make_trace(f"kp:trace:{number}-{offset}")
        vector = text_vector(f"text {rng.randrange(60)}", DIMENSIONS)
        self.check(worker, number, partition.scorer.compare(vector, 0).nearest, vector)
        sequence = partition.scorer.cache.add_unit(vector, 0, Label(trace.id, agent, offset))
        key = slot_key(sequence, CAPACITY)
        value = encode(
            sequence=sequence, source_offset=offset, stream_time_ms=0, trace_id=trace.id, model=MODEL, vector=vector,
            pass_number=0, agent_id=agent,
        )  # fmt: skip
        partition.forgetting.note(key, sequence, Label(trace.id, agent, offset))
        partition.sizes[len(partition.log)] = 1
        partition.log.append((key, value))
        self.entries[number, offset] = trace.id, agent, vector

    def visible(self, worker: Worker, number: int) -> list[tuple[int, int]]:
        """Return the entries that a trace of a partition may be compared with."""
        known = {r for mine in worker.mine for r in self.partitions[mine].done}
        for each, partition in enumerate(self.partitions):
            known |= {r for r, (_, at) in partition.done.items() if at < worker.read[each]}
        found = []
        for each, partition in enumerate(self.partitions):
            written = sorted(offset for p, offset in self.entries if p == each)
            if each != number:
                written = [it for it in written if self._log_offset(each, it) < worker.read[each]]
            for offset in written[-CAPACITY:]:
                trace_id, agent, _ = self.entries[each, offset]
                gone = False
                for request_id, body in self.requests.items():
                    done = partition.done.get(request_id)
                    seen = done is not None and (each == number or done[1] < worker.read[each])
                    if each == number or seen:
                        end = done[0] if done is not None else 0
                    else:
                        end = body["end_offsets"][each] + BEHIND + 1 if request_id in known else 0
                    gone = gone or (offset < end and asked(body, trace_id, agent))
                self.hidden += gone
                if not gone:
                    found.append((each, offset))
        return found

    def _log_offset(self, number: int, offset: int) -> int:
        wanted = self.entries[number, offset][0].encode()
        return next(
            n for n, (_, value) in enumerate(self.partitions[number].log) if value and wanted + b"\xa5" in value
        )

    def check(self, worker: Worker, number: int, nearest: Any, vector: Vector) -> None:
        visible = self.visible(worker, number)
        if nearest is None:
            assert not visible
            return
        assert (nearest.partition, nearest.offset) in visible
        best = max(float(np.dot(self.entries[it][2], vector)) for it in visible)
        assert nearest.similarity == pytest.approx(best, abs=1e-6)
        self.named += 1


@pytest.mark.slow
def test_no_view_names_what_its_worker_knows_to_be_forgotten(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(control, "MAX_BEHIND", BEHIND)
    monkeypatch.setattr(forgetting, "MAX_BEHIND", BEHIND)
    named = hidden = 0
    for _ in range(25):
        world = World(rng)
        for _ in range(150):
            worker = rng.choice(world.workers)
            fate = rng.random()
            if fate < 0.04:
                world.ask()
            elif fate < 0.06:
                world.restart(worker)
            elif fate < 0.3:
                world.catch_up(worker)
            else:
                world.step(worker, rng.choice(worker.mine))
        named += world.named
        hidden += world.hidden
    assert named > 1000
    assert hidden > 1000
