"""`kp-worker export-model`: turns a sentence-transformers model into a directory that OpenVinoEmbedder loads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np

from worker.embed.embedder import Embedding, ModelError, file_sha256
from worker.embed.export_source import CHECK_TOKENS, TEXTS, ExportSource, open_export_source
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
from worker.embed.multilingual import WEIGHTS_FILE, open_multilingual
from worker.embed.openvino_embedder import PRECISIONS, RUNTIME, OpenVinoEmbedder, import_runtime, runs_here
from worker.version import __version__


def quantise(openvino: ModuleType, model: Any) -> int:
    """Replace the weights of matrix products by uint8, with scale and zero point for each row; return how many.

    OpenVINO also quantises the activations, at run time, so nothing is calibrated. For all-MiniLM-L6-v2 the cosine is
    .9990 on average and .9985 at least; NNCF's static int8 has .9964 and .984 (25 traces, AMD Zen 4).
    """
    ops = openvino.opset13
    count = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_b"]:
            continue
        source = node.input_value(1).get_node()
        if source.get_type_name() != "Constant":
            continue
        values, scale, zero = _to_uint8(np.array(source.data, dtype=np.float32))
        shifted = ops.subtract(ops.convert(ops.constant(values), "f32"), ops.convert(ops.constant(zero), "f32"))
        node.input(1).replace_source_output(ops.multiply(shifted, ops.constant(scale)).output(0))
        count += 1
    return count


def _to_uint8(weights: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    low = np.minimum(weights.min(axis=1, keepdims=True), 0.0)
    high = np.maximum(weights.max(axis=1, keepdims=True), 0.0)
    scale = ((high - low) / 255.0).astype(np.float32)
    scale[scale == 0.0] = 1.0
    zero = np.round(-low / scale)
    values = np.clip(np.round(weights / scale + zero), 0, 255)
    return values.astype(np.uint8), scale, zero.astype(np.uint8)


DEFAULT_PRECISIONS: Final = ("fp32", "bf16")  # bf16 needs no separate file: it runs the fp32 graph

LEAST_COSINE: Final = {"fp32": 0.9999, "bf16": 0.999, "int8": 0.98}
"""The lowest cosine to sentence-transformers that any text may have; below it the export fails. all-MiniLM-L6-v2 has
.9999999, .99993 and .992; far less means a wrong graph (other pooling, extra layers), not rounding."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported, and where."""

    directory: Path
    manifest: Manifest

    def __str__(self) -> str:
        """Return the report as lines of text."""
        head = f"{self.manifest.name} for {RUNTIME} in {self.directory}"
        return "\n".join([head, *(f"  {name}: {_describe(it)}" for name, it in self.manifest.precisions.items())])


def export_model(
    model: str | None = None, output: Path | None = None, precisions: Sequence[str] = DEFAULT_PRECISIONS
) -> ExportReport:
    """Export a model (directory or hub name; None: the default) and check it; fp32 is always among the precisions.

    `output` None: the user's cache directory. An exported directory is replaced; anything else is left unchanged.
    Raises ModelError, and then writes nothing.
    """
    wanted = tuple(dict.fromkeys(("fp32", *precisions)))
    unknown = set(wanted) - set(PRECISIONS)
    if unknown:
        raise ModelError(f"unknown precision {', '.join(sorted(unknown))}: choose from {', '.join(PRECISIONS)}")
    openvino, _ = import_runtime()
    # 1. Open the source: check its weights, find its name and limits.
    if model is not None and (Path(model) / WEIGHTS_FILE).is_file():
        source = open_multilingual(openvino, Path(model))
    else:
        source = open_export_source(openvino, model)
    target = (output or default_directory(source.name, source.weights_sha256)).absolute()
    work = _work_directory(target)
    try:
        # 2. Write graphs and tokenizer into a directory beside the target.
        manifest = _write_unchecked(openvino, source, work, wanted)
        # 3. Check them with the embedder that the worker will use.
        manifest = _write_checked(source, work, manifest)
        # 4. Replace the target: from here on, the directory is complete.
        _replace(work, target)
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


def _write_unchecked(openvino: ModuleType, source: ExportSource, work: Path, wanted: Sequence[str]) -> Manifest:
    files = _write_files(openvino, source, work, wanted)
    manifest = Manifest(
        format=FORMAT,
        name=source.name,
        weights_sha256=source.weights_sha256,
        dimensions=source.dimensions,
        max_tokens=source.max_tokens,
        runtime=RUNTIME,
        tokenizer=_checked(work / "tokenizer.json"),
        precisions={name: ExportedPrecision(files[name], None) for name in wanted},
        made_by={"kp-worker": __version__, **{it: version(it) for it in source.tools}},
    )
    _write_manifest(work, manifest)
    return manifest


def _write_checked(source: ExportSource, work: Path, manifest: Manifest) -> Manifest:
    """Compare the written model with the source's vectors, and add the result to the manifest. Raises ModelError."""
    checked = {
        name: ExportedPrecision(written.files, _check(source.expected, work, name))
        for name, written in manifest.precisions.items()
    }
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


def _write_files(
    openvino: ModuleType, source: ExportSource, work: Path, wanted: Sequence[str]
) -> dict[str, list[CheckedFile]]:
    (work / "tokenizer.json").write_text(source.tokenizer, encoding="utf-8")
    files = {"fp32": _save(openvino, source.graph, work / "fp32.xml")}
    files["bf16"] = files["fp32"]
    if "int8" in wanted:
        if quantise(openvino, source.graph) == 0:
            raise ModelError("int8: found no weights to quantise in this model; export it without --precision int8")
        files["int8"] = _save(openvino, source.graph, work / "int8.xml")
    return files


def _save(openvino: ModuleType, graph: Any, path: Path) -> list[CheckedFile]:
    openvino.save_model(graph, str(path), compress_to_fp16=False)  # the default would halve the precision of weights
    return [_checked(path), _checked(path.with_suffix(".bin"))]


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
            f"{least} to sentence-transformers (worst {worst:.6f}, text {TEXTS[cosines.index(worst)][:60]!r}); only a "
            "transformer with mean pooling can be exported: use this model with KP_EMBEDDER=sentence-transformers"
        )
    return Check(worst, float(np.mean(cosines)), len(TEXTS))


def _agreement(expected: Embedding, found: Embedding) -> float:
    if expected.vector.shape != found.vector.shape or expected.truncated != found.truncated:
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
