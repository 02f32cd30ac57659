"""The worker with a zero-cost embedder at its seam: `python -m tests.runs.benchmarks.bench_worker`, settings by KP_...

BENCH_VECTORS says how the vectors are given: `none` (KP_EMBEDDER=none), `pool` (the stand-in behind the product's
embedding pool, whose thread hop is made for embeddings of milliseconds), `inline` (the pool replaced by one that
answers at once).
"""

import os
from typing import Any, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as worker.cli

import worker.stream.worker
from tests.runs.benchmarks.job import TABLE, table_vector
from worker import config
from worker.commands.run import run_service
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import Embedder, Embedding, Reading
from worker.embed.pool import EmbeddingPool
from worker.stream.worker import WorkerProcess


class TableEmbedder(Embedder):
    """Vectors as tests/runs/benchmarks/job.py gives them to all peers."""

    identity: EmbedderIdentity = TABLE

    def infer(self, reading: Reading) -> Embedding:
        return Embedding(table_vector(reading.content), False)


class InlinePool(EmbeddingPool):
    """The pool without its thread."""

    def embed(self, *texts: str) -> Embedding:
        (text,) = texts
        return self._embedder.embed(text)


def load(settings: config.Settings) -> Embedder | None:
    return None if settings.embedder == "none" else TableEmbedder()


def main() -> NoReturn:
    """Run as `kp-worker run` does."""
    if os.environ.get("BENCH_VECTORS") == "inline":
        stream: Any = worker.stream.worker
        stream.EmbeddingPool = InlinePool
    settings = config.load()
    run_service(settings, WorkerProcess(settings, load))


if __name__ == "__main__":
    main()
