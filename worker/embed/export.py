"""Exports: a model becomes a directory that OpenVinoEmbedder loads, checked against sentence-transformers' vectors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec
import numpy as np

from worker.embed.embedder import Embedding, ModelError, file_sha256
from worker.embed.minilm import ExportSource
from worker.embed.model_dir import (
    FORMAT,
    MANIFEST,
    Check,
    CheckedFile,
    ExportedPrecision,
    Manifest,
    default_directory,
    is_exported,
)
from worker.embed.openvino_embedder import PRECISIONS, RUNTIME, OpenVinoEmbedder, runs_here
from worker.embed.reference_texts import CHECK_TOKENS, TEXTS
from worker.version import __version__

LEAST_COSINE: Final = {"fp32": 0.9999, "bf16": 0.999}
"""The lowest cosine to sentence-transformers that any text may have; below it the export fails. all-MiniLM-L6-v2 has
.9999999 and .99993; far less means wrong arithmetic, not rounding."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported, and where."""

    directory: Path
    manifest: Manifest

    def __str__(self) -> str:
        """Return the report as lines of text."""
        head = f"{self.manifest.name} for {RUNTIME} in {self.directory}"
        return "\n".join([head, *(f"  {name}: {_describe(it)}" for name, it in self.manifest.precisions.items())])


def export_model(openvino: ModuleType, source: ExportSource, output: Path | None) -> ExportReport:
    """Export a model and check it. `output` None: the user's cache directory.

    An exported directory is replaced; anything else is left unchanged. Raises ModelError, and then writes nothing.
    """
    target = (output or default_directory(source.name, source.weights_sha256)).absolute()
    work = _work_directory(target)
    try:
        manifest = _write(openvino, source, work)
        _replace(work, target)  # from here on, the directory is complete
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return ExportReport(target, manifest)


def _work_directory(target: Path) -> Path:
    """Return a new directory beside the target. Raises ModelError if the target may not be replaced."""
    if target.exists() and not is_exported(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(
            f"{target} exists but is not an exported model, so it is not overwritten; choose another --output"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"{target.parent} cannot be written ({error.strerror}); choose another --output") from error


def _write(openvino: ModuleType, source: ExportSource, work: Path) -> Manifest:
    """Write graph, tokenizer and manifest; check them with the embedder that the worker will use. Raises ModelError."""
    (work / "tokenizer.json").write_text(source.tokenizer, encoding="utf-8")
    graph = work / "fp32.xml"  # of both precisions: the runtime converts it
    openvino.save_model(source.graph, str(graph), compress_to_fp16=False)  # the default would halve the precision
    files = [_checked(graph), _checked(graph.with_suffix(".bin"))]
    manifest = Manifest(
        format=FORMAT,
        name=source.name,
        weights_sha256=source.weights_sha256,
        dimensions=source.dimensions,
        max_tokens=source.max_tokens,
        runtime=RUNTIME,
        tokenizer=_checked(work / "tokenizer.json"),
        precisions={name: ExportedPrecision(files, None) for name in PRECISIONS},
        made_by={"kp-worker": __version__, **{name: version(name) for name in ("openvino", "tokenizers")}},
    )
    _write_manifest(work, manifest)
    checked = {name: ExportedPrecision(files, _check(source.expected, work, name)) for name in PRECISIONS}
    manifest = msgspec.structs.replace(manifest, precisions=checked)
    _write_manifest(work, manifest)
    return manifest


def _describe(exported: ExportedPrecision) -> str:
    if exported.check is None:
        return "not checked: this CPU does not support it"
    check = exported.check
    return (
        f"cosine to sentence-transformers min {check.min_cosine:.7f}, mean {check.mean_cosine:.7f} "
        f"({check.texts} texts)"
    )


def _checked(path: Path) -> CheckedFile:
    return CheckedFile(path.name, file_sha256(path))


def _write_manifest(work: Path, manifest: Manifest) -> None:
    (work / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def _check(expected: Sequence[Embedding], work: Path, precision: str) -> Check | None:
    if not runs_here(precision):
        return None
    embedder = OpenVinoEmbedder(work, CHECK_TOKENS, 0, precision)
    cosines = [_agreement(it, embedder.embed(text)) for it, text in zip(expected, TEXTS, strict=True)]
    worst, least = min(cosines), LEAST_COSINE[precision]
    if worst < least:
        raise ModelError(
            f"{precision}: {sum(cosine < least for cosine in cosines)} of {len(TEXTS)} texts have a cosine below "
            f"{least} to sentence-transformers (worst {worst:.6f}, text {TEXTS[cosines.index(worst)][:60]!r}): "
            "OpenVINO computes this model wrongly here; set KP_EMBEDDER=sentence-transformers"
        )
    return Check(worst, float(np.mean(cosines)), len(TEXTS))


def _agreement(expected: Embedding, found: Embedding) -> float:
    if expected.truncated != found.truncated:
        return -1.0
    return float(expected.vector.astype(np.float64) @ found.vector.astype(np.float64))


def _replace(work: Path, target: Path) -> None:
    work.chmod(0o755)  # mkdtemp's 0700 would lock out a worker that runs as another user
    if not target.exists():
        work.rename(target)
        return
    old = work.with_name(f"{work.name}-old")
    target.rename(old)  # rename() replaces no full directory; a worker that has the old files mapped keeps them
    try:
        work.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
