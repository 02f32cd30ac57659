"""The judge of the novelty scope `group`: whether each output's nearest trace is one that a worker could see.

Times are those of this machine. A record's decision is noted by the worker (crash_worker.py, TEST_DECISIONS), and its
commit is seen by a reader of committed outputs: never earlier than it was.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from tests.support.kafka_fixtures import consume_all, topic_id
from tests.support.oracle import EPOCH, TOLERANCE, Embed, Place, Report, compare, judge, origin, score
from worker.core.trace import InvalidTrace, parse_trace

OUTPUTS: Final = {
    "accepted": "KP_ACCEPTED_TOPIC",
    "rejected": "KP_REJECTED_TOPIC",
    "dead-letter": "KP_DEAD_LETTER_TOPIC",
}


def outputs_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the output topics, by kind."""
    return OUTPUTS | ({"forgotten": "KP_FORGOTTEN_TOPIC"} if env.get("KP_FORGET") == "true" else {})


class Watcher(threading.Thread):
    """Notes when a reader of committed records sees each output, by its source record."""

    def __init__(self, bootstrap: str, env: Mapping[str, str]) -> None:
        super().__init__(name="watcher", daemon=True)
        self.seen: dict[Place, float] = {}
        self._servers = bootstrap
        self._kinds = {env[name]: kind for kind, name in outputs_of(env).items()}
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(60)

    def run(self) -> None:
        """Read until the end of the `with` block."""
        asyncio.run(self._read())

    async def _read(self) -> None:
        async with AIOKafkaConsumer(
            *self._kinds,
            bootstrap_servers=self._servers,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            metadata_max_age_ms=2000,
        ) as consumer:
            while not self._ended.is_set():
                try:
                    fetched = await consumer.getmany(timeout_ms=100)
                except KafkaError:  # a broker is away
                    await asyncio.sleep(0.1)
                    continue
                now = time.time()
                for tp, records in fetched.items():
                    for record in records:
                        self.seen.setdefault(origin(self._kinds[tp.topic], record), now)


@dataclass(slots=True)
class _Trace:
    """A valid trace of the source; `now`: its partition's stream time; `sequence`: its number in the partition."""

    place: Place
    document: Any
    now: int
    sequence: int
    vector: Any
    decided: float = 0.0
    committed: float = 0.0


@dataclass(slots=True)
class Judged:
    """What was checked. `foreign`: outputs whose nearest trace is of another partition; `hidden`: those that would have
    had a nearer one, had it not been forgotten; `wrong`: what must not be.
    """

    outputs: int = 0
    foreign: int = 0
    hidden: int = 0
    wrong: list[str] = field(default_factory=list)


def check_group(
    bootstrap: str, env: Mapping[str, str], embed: Embed, watcher: Watcher, decisions: Path, lag_seconds: float
) -> tuple[Report, Judged]:
    """Judge what came out: each output once, in order, undamaged; and its nearest trace and score."""
    source = consume_all(bootstrap, env["KP_SOURCE_TOPIC"])
    outputs = {kind: consume_all(bootstrap, env[name]) for kind, name in outputs_of(env).items()}
    traces = _traces(source, embed)
    _times(traces, watcher, decisions)
    found = {
        origin(kind, record): json.loads(record.value)["scoring"]
        for kind in ("accepted", "rejected")
        for record in outputs[kind]
    }
    capacity, ttl_ms = int(env["KP_CACHE_MAX_ELEMENTS"]), round(float(env["KP_CACHE_TTL_SECONDS"]) * 1000)
    key = env["KP_FORGET_KEY"].encode() if env.get("KP_FORGET") == "true" else None
    identity = topic_id(bootstrap, env["KP_SOURCE_TOPIC"])
    verdicts = judge(source, embed, capacity, ttl_ms, forget_key=key, topic_id=identity)
    controls = [verdict.record for verdict in verdicts.values() if verdict.kind == "forgotten"]
    requests = _requests(controls, list(traces.values()), watcher)
    judged = _Judge(list(traces.values()), capacity, ttl_ms, lag_seconds, requests).all(found)
    for place, scoring in found.items():  # the novelty is judged above; what follows from it is judged here
        verdict = verdicts[place]
        novelty = scoring["components"]["novelty"]
        value = score(traces[place].document, novelty)
        verdict.novelty, verdict.score = novelty, value
        verdict.kind = "accepted" if value >= scoring["threshold"] else "rejected"
    return compare(verdicts, outputs), judged


def _traces(source: list[Any], embed: Embed) -> dict[Place, _Trace]:
    traces: dict[Place, _Trace] = {}
    clocks: dict[int, int] = {}
    counts: dict[int, int] = defaultdict(int)
    for record in source:  # by partition and offset
        try:
            parse_trace(record.value)
        except InvalidTrace:
            continue
        document = json.loads(record.value)
        created = (datetime.fromisoformat(document["metadata"]["created_at"]) - EPOCH) // timedelta(milliseconds=1)
        partition = record.partition
        clocks[partition] = max(min(created, record.timestamp), clocks.get(partition, -(1 << 62)))
        contents = [step.get("content", "") for step in document["steps"]]
        vector = np.asarray(embed(" ".join([document["task"]["objective"], *contents])), dtype=np.float64)
        vector = vector / np.sqrt(vector @ vector)
        place = partition, record.offset
        traces[place] = _Trace(place, document, clocks[partition], counts[partition], vector)
        counts[partition] += 1
    return traces


def _times(traces: Mapping[Place, _Trace], watcher: Watcher, decisions: Path) -> None:
    """Put into each trace when its commit was seen, and when the decision that was committed was made."""
    decided: dict[Place, list[float]] = defaultdict(list)
    for file in decisions.glob("*.decisions"):
        for line in file.read_text().splitlines():
            partition, offset, at = line.split()
            decided[int(partition), int(offset)].append(float(at))
    for place, trace in traces.items():
        trace.committed = watcher.seen[place]
        times = sorted(decided[place])
        trace.decided = times[bisect_right(times, trace.committed) - 1]


@dataclass(slots=True)
class _Request:
    """A request to forget: `matching`: which traces, `offsets`: of its control records by partition.

    `decided`: not before this, by partition; `committed`: seen then.
    """

    matching: Any
    offsets: dict[int, int] = field(default_factory=dict)
    decided: dict[int, float] = field(default_factory=dict)
    committed: dict[int, float] = field(default_factory=dict)

    def precede(self, places: Any) -> Any:
        """Return which traces match, and precede the control record of their partition."""
        ends = np.array([self.offsets.get(partition, -1) for partition in places[:, 0].tolist()])
        return self.matching & (places[:, 1] < ends)


def _requests(controls: list[Any], traces: list[_Trace], watcher: Watcher) -> list[_Request]:
    requests: dict[str, _Request] = {}
    for record in controls:
        body = json.loads(record.value)
        matching = [
            trace.document["id"] in body.get("trace_ids", ())
            or trace.document["metadata"].get("agent_id") == body.get("agent_id", object())
            for trace in traces
        ]
        request = requests.setdefault(body["request_id"], _Request(np.array(matching)))
        before = [it.decided for it in traces if it.place[0] == record.partition and it.place[1] < record.offset]
        request.offsets[record.partition] = record.offset
        request.decided[record.partition] = max(before, default=0.0)
        request.committed[record.partition] = watcher.seen[record.partition, record.offset]
    return list(requests.values())


class _Judge:
    """Compares each output with all traces: O(n^2)."""

    def __init__(
        self, traces: list[_Trace], capacity: int, ttl_ms: int, lag_seconds: float, requests: list[_Request]
    ) -> None:
        self._places = np.array([trace.place for trace in traces])
        self._requests = requests
        self._precede = [request.precede(self._places) for request in requests]
        self._list = traces
        self._at = {trace.place: at for at, trace in enumerate(traces)}
        self._capacity = capacity
        self._ttl_ms = ttl_ms
        self._lag_seconds = lag_seconds
        self._vectors = np.array([trace.vector for trace in traces])
        self._partitions = np.array([trace.place[0] for trace in traces])
        self._sequences = np.array([trace.sequence for trace in traces])
        self._nows = np.array([trace.now for trace in traces])
        self._decided = np.array([trace.decided for trace in traces])
        self._committed = np.array([trace.committed for trace in traces])

    def all(self, found: Mapping[Place, Any]) -> Judged:
        """Judge all outputs."""
        result = Judged(len(found))
        for place, scoring in found.items():
            problem = self._one(self._list[self._at[place]], scoring, result)
            if problem:
                result.wrong.append(f"source {place}: {problem}: nearest {scoring['nearest']}")
        return result

    def _one(self, trace: _Trace, scoring: Any, result: Judged) -> str:
        similarities = self._vectors @ trace.vector
        own = self._partitions == trace.place[0]
        fresh = trace.now - self._nows < self._ttl_ms
        behind = trace.sequence - self._sequences
        mine = own & fresh & (behind > 0) & (behind <= self._capacity)
        known = self._committed < trace.decided - self._lag_seconds  # the view must have these
        possible = self._decided < trace.decided  # and cannot have others
        must = mine | (~own & fresh & known & self._among_newest(possible))
        may = mine | (~own & fresh & possible & self._among_newest(known))
        certain, maybe = self._forgotten(trace)
        must, may, without = must & ~maybe, may & ~certain, may
        nearest = scoring["nearest"]
        greatest = -2.0 if nearest is None else nearest["similarity"]
        result.hidden += bool((without & certain & (similarities > greatest + TOLERANCE)).any())
        if nearest is None:
            return f"overlooked {self._list[int(np.flatnonzero(must)[0])].place}" if must.any() else ""
        at = self._at.get((nearest["partition"], nearest["offset"]))
        if at is None or self._list[at].document["id"] != nearest["id"]:
            return "there is no such trace"
        result.foreign += nearest["partition"] != trace.place[0]
        if abs(similarities[at] - nearest["similarity"]) > TOLERANCE:
            return f"its similarity is {similarities[at]}"
        if abs(1.0 - nearest["similarity"] - scoring["components"]["novelty"]) > TOLERANCE:
            return "the novelty does not follow from it"
        if not may[at]:
            return "it was not committed yet, not live any more, or forgotten"
        nearer = np.flatnonzero(must & (similarities > nearest["similarity"] + TOLERANCE))
        return f"overlooked {self._list[int(nearer[0])].place}" if len(nearer) else ""

    def _forgotten(self, trace: _Trace) -> tuple[Any, Any]:
        """Return which traces must not be compared with this one, and which need not be."""
        certain, maybe = np.zeros(len(self._list), dtype=bool), np.zeros(len(self._list), dtype=bool)
        partition, offset = trace.place
        for request, precede in zip(self._requests, self._precede, strict=True):
            processed = request.offsets.get(partition, offset) < offset
            elsewhere = precede & (self._partitions != partition)
            if processed:
                certain |= precede
            if min(request.committed.values()) < trace.decided - self._lag_seconds:
                certain |= elsewhere
            if min(request.decided.values()) < trace.decided:
                maybe |= elsewhere
        return certain, maybe | certain

    def _among_newest(self, visible: Any) -> Any:
        """Return which traces are among the newest `capacity` of their partition if these are visible."""
        newest = {
            partition: self._sequences[visible & (self._partitions == partition)].max(initial=-1)
            for partition in set(self._partitions.tolist())
        }
        ends = np.array([newest[partition] for partition in self._partitions.tolist()])
        return self._sequences > ends - self._capacity
