"""The job that the worker and all peers do with one record: parse, (embed,) compare, score, build the output.

It is the product's own core, called as the worker's stream calls it, so that only the Kafka side differs between peers.
The cache entry goes to the changelog topic as an ordinary record: the same bytes for everybody, and in favour of the
peers, who have no restore that would use it.
"""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from worker.core.changelog import encode, slot_key, text_hash
from worker.core.dead_letters import dead_letter
from worker.core.documents import scored_record
from worker.core.novelty import CACHED_ID_LENGTH, Vector
from worker.core.records import ACCEPTED, DEAD_LETTER, REJECTED, EmbedderIdentity, OutputRecord, SourceRecord
from worker.core.scorer import PartitionScorer, cached_id, event_time_ms
from worker.core.trace import InvalidTrace, embedding_text, parse_trace

DIMENSIONS: Final = 384
TABLE_ROWS: Final = 4096
TABLE: Final = EmbedderIdentity("bench-table", "0" * 64, DIMENSIONS, 256, "bench", "fp32")


class Embedder(NamedTuple):
    """A way to vectors, and what it is called in the outputs."""

    embed: Callable[[str], Vector]
    identity: EmbedderIdentity


@cache
def _table() -> Vector:
    rows = np.random.default_rng(5).normal(size=(TABLE_ROWS, DIMENSIONS))
    table: Vector = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return table


def table_vector(text: str) -> Vector:
    """Return a unit vector that depends on the whole text, at next to no cost (1 us): a row of a fixed table."""
    row: Vector = _table()[zlib.crc32(text.encode()) % TABLE_ROWS]
    return row


table_embed: Final = Embedder(table_vector, TABLE)


def model_embed() -> Embedder:
    """Return what a user would write: SentenceTransformer.encode, one text a call, default threads."""
    from sentence_transformers import SentenceTransformer

    from worker.embed.embedder import find_model

    model = SentenceTransformer(find_model(None))
    model.max_seq_length = 256

    def embed(text: str) -> Vector:
        vector: Vector = model.encode(text, normalize_embeddings=True, show_progress_bar=False)
        return vector

    embed("warm up")
    return Embedder(embed, EmbedderIdentity("bench-model", "0" * 64, DIMENSIONS, 256, "sentence-transformers", "fp32"))


class Result(NamedTuple):
    """What to publish for one record: its output, and its cache entry (key, value) where it has one."""

    output: OutputRecord
    entry: tuple[bytes, bytes] | None


def output_topics(group: str) -> dict[str, str]:
    """Return where a group writes, by kind of output."""
    return {kind: f"{group}.{kind.replace('_', '-')}" for kind in (ACCEPTED, REJECTED, DEAD_LETTER)}


def changelog_topic(group: str) -> str:
    return f"{group}-novelty-changelog"


class Job:
    """The state of all partitions of one process."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._scorers: dict[int, PartitionScorer] = {}

    def handle(self, record: SourceRecord) -> Result:
        try:
            trace = parse_trace(record.value)
        except InvalidTrace as error:
            return Result(dead_letter(record, error), None)
        scorer = self._scorers.get(record.partition)
        if scorer is None:
            scorer = self._scorers[record.partition] = PartitionScorer(dimensions=DIMENSIONS)
        embedder = self._embedder
        text = "" if embedder is None else embedding_text(trace)
        vector = None if embedder is None else embedder.embed(text)
        scored = scorer.score(trace, vector, event_time_ms(trace, record.timestamp_ms))
        output = scored_record(record, scored, None if embedder is None else embedder.identity)
        if embedder is None or scored.sequence is None or scored.vector is None:
            return Result(output, None)
        value = encode(
            sequence=scored.sequence,
            source_offset=record.offset,
            stream_time_ms=scored.stream_time_ms,
            trace_id=cached_id(trace),
            model=embedder.identity.key(),
            vector=scored.vector,
            epoch=1,
            text_hash=text_hash(text),
            agent_id=trace.metadata.agent_id[:CACHED_ID_LENGTH],
        )
        return Result(output, (slot_key(scored.sequence, scorer.cache.max_elements, 1), value))
