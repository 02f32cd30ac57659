"""Exported model directories: graph files, the tokenizer, and `kp-model.json`, which describes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from worker.embed.embedder import (
    MULTILINGUAL,
    MULTILINGUAL_NAME,
    MULTILINGUAL_SHA256,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    ModelError,
    file_sha256,
)

MANIFEST: Final = "kp-model.json"
FORMAT: Final = 1  # of the manifest. Other formats are rejected, because their graphs may expect other inputs

EXPORT_HINT: Final = "export the model again: kp-worker export-model"


class CheckedFile(msgspec.Struct, frozen=True):
    """A file of the directory."""

    file: str  # a plain name
    sha256: str  # at the export, hex


class Check(msgspec.Struct, frozen=True):
    """Cosines to sentence-transformers in fp32, measured by the export."""

    min_cosine: float
    mean_cosine: float
    texts: int  # number of texts compared


class ExportedPrecision(msgspec.Struct, frozen=True):
    """The graph of one precision."""

    files: list[CheckedFile]  # the first is the one to open
    check: Check | None  # None: the exporting CPU could not run it


class Manifest(msgspec.Struct, frozen=True):
    """The contents of an exported directory."""

    format: int
    name: str
    weights_sha256: str  # of the original weights, not of a graph
    dimensions: int
    max_tokens: int
    runtime: str
    tokenizer: CheckedFile
    precisions: dict[str, ExportedPrecision]
    made_by: dict[str, str]  # package -> version


def is_exported(directory: Path) -> bool:
    """Return whether `kp-worker export-model` wrote this directory."""
    return (directory / MANIFEST).is_file()


def default_directory(name: str, weights_sha256: str) -> Path:
    """Return the default directory of an exported model: in the user's cache directory, named by the weights' hash."""
    return _models() / f"{name}-{weights_sha256[:12]}"


def _models() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # Relative paths are ignored, as the XDG specification requires: they would depend on the working directory.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "kp-worker" / "models"


def find_exported(model: str | None) -> Path | None:
    """Return the exported directory for KP_MODEL; None if it is not exported.

    A hub name may match several (then None, because only the hub knows which weights are meant).
    """
    if model is None:
        found = [default_directory(OFFICIAL_NAME, OFFICIAL_SHA256)]
    elif model == MULTILINGUAL:
        found = [default_directory(MULTILINGUAL_NAME, MULTILINGUAL_SHA256)]
    elif Path(model).is_dir() or not _models().is_dir():
        found = [Path(model)]
    else:
        name = model.rsplit("/", 1)[-1]
        found = [it for it in _models().iterdir() if it.name.rpartition("-")[0] == name]
    exported = [directory for directory in found if is_exported(directory)]
    return exported[0] if len(exported) == 1 else None


def read_manifest(directory: Path) -> Manifest:
    """Read kp-model.json. Raises ModelError if the directory is not an exported model or has another format."""
    try:
        raw = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise ModelError(
            f"{directory} is not an exported model: {MANIFEST} cannot be read ({error.strerror}); {EXPORT_HINT}, "
            "or set KP_EMBEDDER=sentence-transformers to use a sentence-transformers directory"
        ) from error
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise ModelError(f"{directory / MANIFEST} is damaged ({error}); {EXPORT_HINT}") from error
    if manifest.format != FORMAT:
        raise ModelError(
            f"{directory / MANIFEST} has format {manifest.format}, this version reads {FORMAT}; {EXPORT_HINT}"
        )
    return manifest


def checked_path(directory: Path, expected: CheckedFile) -> Path:
    """Return the path of a file after comparing its sha256 (0.1 s for 90 MB). Raises ModelError if it differs."""
    path = directory / expected.file
    if path.name != expected.file:
        raise ModelError(
            f"{directory / MANIFEST} names {expected.file!r}, which is outside the directory; {EXPORT_HINT}"
        )
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); {EXPORT_HINT}") from error
    if digest != expected.sha256:
        raise ModelError(
            f"{path} has sha256 {digest}, it was exported with {expected.sha256}: "
            f"the file is damaged or was replaced; {EXPORT_HINT}"
        )
    return path
