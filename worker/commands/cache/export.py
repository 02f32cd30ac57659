"""The file of `kp-worker cache export`: a cache as numpy arrays, which numpy.load reads without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from worker.commands.cache.read import CachedPartition
from worker.commands.shared.console import CommandError


def export_caches(caches: list[CachedPartition], path: Path) -> int:
    """Write the live entries by partition and sequence, and return their number. Raises CommandError.

    Arrays of n rows: vectors (float32, shape (n, dimensions), unit length), trace_id, agent_id, partition,
    source_offset, sequence, stream_time_ms; and identity, the embedder's, without a dimension. The file appears as a
    whole, or not at all.
    """
    models = {cached.model: cached.partition for cached in caches if cached.live}
    if not models:
        raise CommandError("nothing to export: no partition has a live entry")
    if len(models) > 1:
        told = "; ".join(f"partition {partition}: {model}" for model, partition in models.items())
        raise CommandError(f"the partitions have entries of several models ({told}): export each one (--partition)")
    rows = [(cached.partition, entry) for cached in caches for entry in cached.live]
    arrays: dict[str, Any] = {
        "vectors": np.stack([entry.array() for _, entry in rows]).astype(np.float32, copy=False),
        "trace_id": np.array([entry.trace_id for _, entry in rows], np.str_),
        "agent_id": np.array([entry.agent_id for _, entry in rows], np.str_),
        "partition": np.array([partition for partition, _ in rows], np.int32),
        "source_offset": np.array([entry.source_offset for _, entry in rows], np.int64),
        "sequence": np.array([entry.sequence for _, entry in rows], np.int64),
        "stream_time_ms": np.array([entry.stream_time_ms for _, entry in rows], np.int64),
        "identity": np.array(next(iter(models))),
    }
    _write(path, arrays)
    return len(rows)


def _write(path: Path, arrays: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        try:
            with part.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; choose another file") from None
