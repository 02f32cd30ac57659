"""Traces, records and a model for tests, as short as a test wants them."""

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.surroundings import DATA
from worker.core.novelty import Vector
from worker.core.records import EmbedderIdentity, SourceRecord, memory_size
from worker.core.trace import CONTEXT, ReasoningTrace, parse_trace
from worker.embed.embedder import Embedder, Embedding, Reading

T0 = 1_776_153_600_000
"""2026-04-14T08:00:00Z, the time of everything that a test gives no time."""

TOPIC_ID, ANOTHER_ID = "first-topic-0123456789", "another-topic-98765432"
"""The id of the topic that verdicts are signed for, and of another one."""

NEVER_ACCEPTED = ("thought",)
WELL_ROUNDED = ("thought", "tool_call:search", "error_recovery", "tool_call:sheet", "observation")


def read_lines(name: str) -> list[str]:
    """Return the lines of a JSON Lines file; str.splitlines would also split at U+2028 inside of a string."""
    return (DATA / name).read_text("utf-8").rstrip("\n").split("\n")


def read_jsonl(name: str) -> list[Any]:
    return [json.loads(line) for line in (DATA / name).read_bytes().split(b"\n") if line]


def rfc3339(ms: int) -> str:
    """Write a time of the years 1970 to 2200, by other means than the product's."""
    return str(np.datetime64(ms, "ms")) + "Z"


def trace_document(
    trace_id: str = "kp:trace:1",
    *,
    created_at: str | int = T0,
    domain: str = "finance",
    success: bool = True,
    confidence: float = 0.9,
    objective: str = "Explain",
    steps: Sequence[str | Mapping[str, Any]] = WELL_ROUNDED,
) -> dict[str, Any]:
    """Return a valid document. A step is "type", "type:tool name", or the step's fields."""
    return {
        "@context": CONTEXT,
        "@type": "ReasoningTrace",
        "id": trace_id,
        "metadata": {
            "created_at": created_at if isinstance(created_at, str) else rfc3339(created_at),
            "task_domain": domain,
            "success": success,
            "quality_score": 0,
            "visibility": "org",
            "privacy_level": "federated",
        },
        "task": {"objective": objective},
        "steps": [_step(index, step) for index, step in enumerate(steps)],
        "outcome": {"result_summary": "Done", "confidence": confidence},
    }


def _step(index: int, step: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(step, str):
        return {"step_id": index, **step}
    kind, colon, tool = step.partition(":")
    return {"step_id": index, "type": kind, **({"tool": {"name": tool}} if colon else {})}


def trace_bytes(trace_id: str = "kp:trace:1", **fields: Any) -> bytes:
    """As trace_document, as JSON."""
    return json.dumps(trace_document(trace_id, **fields), ensure_ascii=False).encode()


def make_trace(trace_id: str = "kp:trace:1", **fields: Any) -> ReasoningTrace:
    """As trace_document, parsed."""
    return parse_trace(trace_bytes(trace_id, **fields))


def make_record(
    value: bytes | None,
    offset: int = 0,
    *,
    timestamp_ms: int | None = T0,
    key: bytes | None = b"agent-7",
    headers: Sequence[tuple[str, bytes]] = (),
    topic: str = "traces",
    partition: int = 0,
) -> SourceRecord:
    size = memory_size(key, value, headers)
    return SourceRecord(topic, partition, offset, timestamp_ms, key, value, headers, size)


def random_trace_bytes(rng: random.Random, number: int, created_at: int) -> bytes:
    """Return a trace whose text is often that of another, so that neighbours are near."""
    kinds = ["thought", "tool_call:search", "tool_call:sheet", "tool_call", "observation", "error_recovery"]
    return trace_bytes(
        f"kp:trace:{number}",
        created_at=created_at,
        domain=rng.choice(["finance", "code", "medical", "gardening"]),
        success=rng.random() < 0.8,
        confidence=round(rng.random(), 3),
        objective=f"task {rng.randrange(12)}",
        steps=rng.choices(kinds, k=rng.randint(1, 6)),
    )


class TextEmbedder(Embedder):
    """A stand-in for a model: the same text gives the same vector, other texts other ones; "poison" in it fails."""

    def __init__(self, dimensions: int = 8, *, broken: bool = False) -> None:
        self.identity = EmbedderIdentity("text", "0" * 64, dimensions, 256, "test", "fp32")
        self.broken = broken
        self.texts: list[str] = []

    def infer(self, reading: Reading) -> Embedding:
        text, objective = reading.content, reading.objective
        self.texts.append(text)
        if self.broken or "poison" in text:
            raise RuntimeError("this text breaks the model")
        cut = "long" in text
        return Embedding(text_vector(text, self.identity.dimensions), cut and not objective, cut and objective)


def text_vector(text: str, dimensions: int) -> Vector:
    vector = np.random.default_rng(zlib.crc32(text.encode())).normal(size=dimensions)
    return (vector / np.linalg.norm(vector)).astype(np.float32)
