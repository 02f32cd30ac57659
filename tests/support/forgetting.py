"""Control records for tests, and the oracle of forgetting: a list of entries from which a request deletes some."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from tests.support.builders import make_record
from worker import InvalidTrace, embedding_text, parse_trace
from worker.core.control import FORGET, control_headers, control_kind
from worker.core.forgetting import ForgetRequest, encode_request
from worker.core.records import SourceRecord
from worker.core.scorer import event_time_ms
from worker.embed.embedder import Embedder

KEY = b"0123456789abcdef0123456789abcdef"

TOPIC_ID: Final = "first-topic-0123456789"
"""The id of the topic that control records are signed for, unless another one is given."""

ANOTHER_ID: Final = "another-topic-98765432"


def control_record(
    offset: int = 0, *, key: bytes = KEY, topic: str = "traces", partition: int = 0, **fields: Any
) -> SourceRecord:
    """Return a signed control record; `fields` are those of its body."""
    body = {"version": 2, "request_id": "r-1", "issued_at": "2026-04-14T08:00:00Z", "topic": topic}
    body |= {"topic_id": TOPIC_ID, "partition": partition, "end_offsets": [offset] * (partition + 1)} | fields
    value = encode_request(msgspec.convert(body, ForgetRequest))
    return make_record(
        value, offset, key=b"r-1", headers=control_headers(FORGET, value, key), topic=topic, partition=partition
    )


def of_version_1(record: SourceRecord) -> SourceRecord:
    """Return a control record as version 1 had it: it does not name the topic's id."""
    body = json.loads(record.value or b"") | {"version": 1}
    del body["topic_id"]
    value = json.dumps(body, separators=(",", ":")).encode()
    return record._replace(value=value, headers=control_headers(FORGET, value, KEY))


def with_requests(rng: random.Random, records: Sequence[SourceRecord]) -> list[SourceRecord]:
    """Return the records with agents, and with control records between them: for traces, for agents, bad ones, copies.

    Bad ones have another key, another topic's id, or version 1. Offsets are new ones.
    """
    result: list[SourceRecord] = []
    made: list[SourceRecord] = []
    for record in records:
        result.append(record._replace(offset=len(result), value=_by_some_agent(rng, record.value)))
        if rng.random() > 0.2:
            continue
        at = len(result)
        if made and rng.random() < 0.1:
            result.append(rng.choice(made)._replace(offset=at))
            continue
        wanted: dict[str, Any] = {"agent_id": f"agent {rng.randrange(3)}"}
        if rng.random() < 0.7:
            newest = max(0, len(records[:at]) - 1)
            numbers = [newest, *(rng.randint(0, newest + 3) for _ in range(rng.randint(0, 3)))]
            wanted = {"trace_ids": [f"kp:trace:{number}" for number in numbers]}
        key = b"another key, just as long as that" if rng.random() < 0.1 else KEY
        wanted["topic_id"] = ANOTHER_ID if rng.random() < 0.1 else TOPIC_ID
        request = control_record(at, key=key, request_id=f"r-{at}", **wanted)
        made.append(of_version_1(request) if rng.random() < 0.1 else request)
        result.append(made[-1])
    return result


def recreated(
    rng: random.Random, earlier: Sequence[SourceRecord], records: Sequence[SourceRecord]
) -> list[SourceRecord]:
    """Return other records with agents, and among them the control records of an earlier topic, at their offsets."""
    result = {record.offset: record for record in earlier if control_kind(record.headers)}
    free = (offset for offset in range(len(earlier) + len(records)) if offset not in result)
    for offset, record in zip(free, records, strict=False):
        result[offset] = record._replace(offset=offset, value=_by_some_agent(rng, record.value))
    return [result[offset] for offset in sorted(result)]


def _by_some_agent(rng: random.Random, value: bytes | None) -> bytes | None:
    agent = b'"metadata": {"agent_id": "agent %d", ' % rng.randrange(3)
    return None if value is None else value.replace(b'"metadata": {', agent)


@dataclass
class Remembered:
    """A trace that was scored: where and when, and whose."""

    offset: int
    time_ms: int
    trace_id: str
    agent_id: str
    vector: Any
    forgotten_at: int | None = None


@dataclass
class ForgetOracle:
    """One partition's memory as a list. `honoured`: the bodies of control records that count, by offset."""

    capacity: int
    ttl_ms: int | None
    embedder: Embedder
    honoured: dict[int, dict[str, Any]]
    all: list[Remembered] = field(default_factory=list)
    now_ms: int | None = None

    def nearest(self, records: Sequence[SourceRecord]) -> Iterator[tuple[int, tuple[str, float] | None]]:
        """Yield each valid trace's offset, and id and similarity of its nearest neighbour."""
        for record in records:
            request = self.honoured.get(record.offset)
            if request is not None:
                self._forget(record.offset, request)
                continue
            try:
                trace = parse_trace(record.value)
                vector = self.embedder.embed(embedding_text(trace)).vector.astype(np.float64)
            except (InvalidTrace, RuntimeError):
                continue
            time_ms = event_time_ms(trace, record.timestamp_ms)
            self.now_ms = time_ms if self.now_ms is None else max(self.now_ms, time_ms)
            yield record.offset, self._compare(vector)
            self.all.append(Remembered(record.offset, self.now_ms, trace.id, trace.metadata.agent_id, vector))

    def _compare(self, vector: Any) -> tuple[str, float] | None:
        live = [
            it
            for it in self.all[-self.capacity :]
            if it.forgotten_at is None and (self.ttl_ms is None or (self.now_ms or 0) - it.time_ms < self.ttl_ms)
        ]
        if not live:
            return None
        similarities = [float(it.vector @ vector) for it in live]
        best = max(similarities)
        return next((it.trace_id, s) for it, s in zip(live, similarities, strict=True) if s >= best - 1e-12)

    def _forget(self, offset: int, request: dict[str, Any]) -> None:
        for it in self.all:
            if it.forgotten_at is None and asked(request, it.trace_id, it.agent_id):
                it.forgotten_at = offset


def asked(request: dict[str, Any], trace_id: str, agent_id: str) -> bool:
    """Whether a request's body names a trace or its agent."""
    return trace_id in request.get("trace_ids", []) or agent_id == request.get("agent_id", object())


def honoured(records: Sequence[SourceRecord], topic_id: str = TOPIC_ID) -> dict[int, dict[str, Any]]:
    """Return the bodies of the control records that count, by offset: signed by KEY for this id, each request once."""
    result: dict[int, dict[str, Any]] = {}
    done: set[str] = set()
    for record in records:
        if not any(name == "kp-control" for name, _ in record.headers):
            continue
        body = json.loads(record.value or b"")
        signed = list(record.headers) == control_headers(FORGET, record.value or b"", KEY)
        if signed and body.get("topic_id") == topic_id and body["request_id"] not in done:
            done.add(body["request_id"])
            result[record.offset] = body
    return result
