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
    is_default,
)

MANIFEST: Final = "kp-model.json"
FORMAT: Final = 1  # of the manifest. Other formats are rejected, because their graphs may expect other inputs

FETCH_HINT: Final = "fetch the model again: kp-worker fetch-model"


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
    """Return whether `kp-worker fetch-model` wrote this directory."""
    return (directory / MANIFEST).is_file()


def default_directory(name: str, weights_sha256: str) -> Path:
    """Return the default directory of an exported model: in the user's cache directory, named by the weights' hash."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # Relative paths are ignored, as the XDG specification requires: they would depend on the working directory.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "kp-worker" / "models" / f"{name}-{weights_sha256[:12]}"


def find_exported(model: str | None) -> Path | None:
    """Return the exported directory for KP_MODEL (a directory, or the name of a model); None if it is not exported."""
    if model == MULTILINGUAL:
        directory = default_directory(MULTILINGUAL_NAME, MULTILINGUAL_SHA256)
    elif model is None or is_default(model):
        directory = default_directory(OFFICIAL_NAME, OFFICIAL_SHA256)
    else:
        directory = Path(model)
    return directory if is_exported(directory) else None


def read_manifest(directory: Path) -> Manifest:
    """Read kp-model.json. Raises ModelError if the directory is not an exported model or has another format."""
    try:
        raw = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise ModelError(
            f"{directory} is not an exported model: {MANIFEST} cannot be read ({error.strerror}); {FETCH_HINT}, "
            "or set KP_EMBEDDER=sentence-transformers to use a sentence-transformers directory"
        ) from error
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise ModelError(f"{directory / MANIFEST} is damaged ({error}); {FETCH_HINT}") from error
    if manifest.format != FORMAT:
        raise ModelError(
            f"{directory / MANIFEST} has format {manifest.format}, this version reads {FORMAT}; {FETCH_HINT}"
        )
    return manifest


def checked_path(directory: Path, expected: CheckedFile) -> Path:
    """Return the path of a file after comparing its sha256 (0.1 s for 90 MB). Raises ModelError if it differs."""
    path = directory / expected.file
    if path.name != expected.file:
        raise ModelError(
            f"{directory / MANIFEST} names {expected.file!r}, which is outside the directory; {FETCH_HINT}"
        )
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); {FETCH_HINT}") from error
    if digest != expected.sha256:
        raise ModelError(
            f"{path} has sha256 {digest}, it was exported with {expected.sha256}: "
            f"the file is damaged or was replaced; {FETCH_HINT}"
        )
    return path
