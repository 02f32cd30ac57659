"""Exported models: the directories that `kp-worker fetch-model` writes, and the OpenVINO runtime on CPU for them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from worker.core.novelty import Vector
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import (
    KEY_BYTES,
    MULTILINGUAL,
    MULTILINGUAL_NAME,
    MULTILINGUAL_SHA256,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    Embedder,
    Embedding,
    ModelError,
    Reading,
    available_cores,
    embedding_of,
    file_sha256,
    is_default,
    objective_limit,
    read_beginning,
)
from worker.version import install_extra

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

# -- the directory: graph files, the tokenizer, and `kp-model.json`, which describes them

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


# -- the runtime

RUNTIME: Final = "openvino"

PRECISIONS: Final[Mapping[str, str]] = {"fp32": "f32", "bf16": "bf16"}
"""OpenVINO's INFERENCE_PRECISION_HINT for each precision. Without it, OpenVINO uses bf16 on every CPU that has it."""

BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16"})
"""bf16 is supported if the CPU has one of these flags. OpenVINO's own report is ignored: it claims BF16 even if it only
emulates it, more than ten times slower than fp32."""

Ids = npt.NDArray[np.int64]  # shape (1, tokens)

_WORD: Final = "word "  # at least one token in any vocabulary

INSTALL_HINT: Final = f"{install_extra('fast')}, or set KP_EMBEDDER=sentence-transformers"


class OpenVinoEmbedder(Embedder):
    """An exported model on CPU.

    `threads` 0: one for each core. A text gets all threads if it is the only one, otherwise an equal share; the vectors
    are the same, bit for bit. `at_once` becomes 1 if a text of `max_tokens` would use up `budget_seconds` on a share.
    `embed_text` "objective": the caller embeds objectives separately. Raises ModelError if directory, precision or CPU
    does not fit.
    """

    def __init__(
        self,
        directory: Path,
        max_tokens: int,
        threads: int,
        precision: str = "fp32",
        embed_text: str = "whole",
        at_once: int = 1,
        budget_seconds: float = math.inf,
    ) -> None:
        manifest = read_manifest(directory)
        _check_request(directory, manifest, max_tokens, precision)
        paths = [checked_path(directory, file) for file in manifest.precisions[precision].files]
        tokenizer = checked_path(directory, manifest.tokenizer)
        openvino, tokenizers = import_runtime()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
            # tokenizer.json has its own padding and limit (128 and 128 in all-MiniLM-L6-v2): both are wrong here.
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._special_tokens = self._tokenizer.num_special_tokens_to_add(False)
            threads = threads or available_cores()
            self.at_once = max(1, min(at_once, threads))
            self._alone, self._shares = _requests(openvino, paths[0], threads, precision, self.at_once)
        except Exception as error:
            raise ModelError(f"the exported model {directory} cannot be loaded: {error}") from error
        self._objective_tokens = objective_limit(manifest.max_tokens, max_tokens)
        apart = self._objective_tokens if embed_text == "objective" else 0
        self.identity = EmbedderIdentity(
            manifest.name, manifest.weights_sha256, manifest.dimensions, max_tokens, RUNTIME, precision,
            embed_text, apart,
        )  # fmt: skip
        self._running = 0
        self._lock = threading.Lock()
        self._max_tokens = max_tokens
        # The longest text first: with buffers that grow from text to text the process uses 535 MB (1032 MB at 512
        # tokens), with full-size buffers from the start 330 MB (420 MB).
        most = max(max_tokens, apart)
        longest = self._cut(self._tokens(_WORD * most), most)
        for request in (self._alone, *self._shares):
            _try_out(directory, request, longest)
        if self._shares:
            cpu_seconds = _cpu_seconds(self._shares[0], self._cut(self._tokens(_WORD * max_tokens), max_tokens))
            # A quarter of the budget is for what else runs on these cores: the worker, often a broker.
            if cpu_seconds * self.at_once / threads > 0.75 * budget_seconds:
                self.at_once, self._shares = 1, []
        _unmap_pages(paths)

    def read(self, text: str, objective: bool = False) -> Reading:
        """Tokenise a text up to the limit; 1 ms for 256 tokens."""
        limit = self._objective_tokens if objective else self._max_tokens
        tokens, left_over = read_beginning(text, limit, self._tokens, len)
        truncated = left_over or len(tokens) + self._special_tokens > limit
        ids = self._cut(tokens, limit)
        kind = bytes([truncated, objective])
        return Reading(
            hashlib.blake2b(ids.data, digest_size=KEY_BYTES, person=kind).digest(), ids, truncated, objective
        )

    def infer(self, reading: Reading) -> Embedding:
        """Embed one text, alone and unpadded. Raises ValueError if the model returns no unit vector."""
        with self._lock:
            self._running += 1
            share = self._shares.pop() if self._running > 1 else None
        try:
            vector = _infer(self._alone if share is None else share, reading.content)
        finally:
            with self._lock:
                self._running -= 1
                if share is not None:
                    self._shares.append(share)
        return embedding_of(vector, reading.truncated, reading.objective)

    def _tokens(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut(self, tokens: Any, limit: int) -> Ids:
        """Return the ids of the first tokens, at most `limit`, special ones included."""
        tokens.truncate(limit - self._special_tokens)
        return np.array([self._tokenizer.post_process(tokens).ids], dtype=np.int64)


def _unmap_pages(files: Sequence[Path]) -> None:
    """Release the resident pages of mapped weights (Linux), 86 MiB: the compiled graphs have copies of most."""
    if sys.platform != "linux":
        return
    names = {str(file.resolve()) for file in files}
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, permissions, *_, name = line.split(maxsplit=5)
        if name in names and "w" not in permissions:  # written pages would be lost
            first, end = (int(part, 16) for part in span.split("-"))
            if madvise(first, end - first, mmap.MADV_DONTNEED):
                log.debug("madvise: %s", os.strerror(ctypes.get_errno()))


def _try_out(directory: Path, request: Any, ids: Ids) -> None:
    """Raise ModelError if the graph does not work here: without AVX, OpenVINO fails or returns arbitrary numbers."""
    try:
        if not embedding_of(_infer(request, ids)).vector.any():
            raise ValueError("the model returned only zeros")
    except Exception as error:
        raise ModelError(
            f"the exported model {directory} does not work on this processor: {' '.join(str(error).split())}. "
            "On x86, OpenVINO needs AVX; set KP_EMBEDDER=sentence-transformers"
        ) from error


def _cpu_seconds(request: Any, ids: Ids) -> float:
    """Return the CPU of a text, s. Unlike its time, it does not depend on what else the machine does."""
    seconds = []
    for _ in range(3):
        started = time.process_time()
        _infer(request, ids)
        seconds.append(time.process_time() - started)
    return min(seconds)


def _infer(request: Any, ids: Ids) -> Vector:
    request.infer([ids])
    # Copy: the next text overwrites the runtime's output.
    return np.array(request.get_output_tensor(0).data[0], dtype=np.float32)


def import_runtime() -> tuple[ModuleType, ModuleType]:
    """Import openvino (without its telemetry) and tokenizers. Raises ModelError if they are not installed."""
    # Importing openvino sends usage data over the network and writes to ~/intel unless the user opted out. With None
    # the import of its telemetry fails, and openvino uses a silent stub. A telemetry module already imported stays.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
        import tokenizers
    except ImportError as error:
        raise ModelError(f"OpenVINO is not installed ({error}); {INSTALL_HINT}") from error
    return openvino, tokenizers


def _requests(openvino: ModuleType, file: Path, threads: int, precision: str, at_once: int) -> tuple[Any, list[Any]]:
    """Compile a graph file for this CPU (0.2 s); return the request for all threads, and the requests of the shares.

    The runtime keeps the kernels of each length that it has met (CPU_RUNTIME_CACHE_CAPACITY), once for each
    request: 100 MiB in fp32 for lengths up to 256 tokens. With room for 8 kernels, each text takes 4 ms more CPU.
    """
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,  # pinned threads of two workers on a host would share the same cores
    }
    core = openvino.Core()
    model = core.read_model(str(file))  # once: both compiled graphs share the file's pages

    def compiled(streams: int) -> list[Any]:
        graph = core.compile_model(model, "CPU", {**settings, "NUM_STREAMS": streams})
        return [graph.create_infer_request() for _ in range(streams)]

    alone = compiled(1)
    return alone[0], compiled(at_once) if at_once > 1 else []


def runs_here(precision: str) -> bool:
    """Return whether this CPU supports the precision."""
    return precision == "fp32" or bool(BF16_FLAGS & cpu_flags())


def cpu_flags() -> frozenset[str]:
    """Return the CPU's flags as listed by Linux on x86; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _check_request(directory: Path, manifest: Manifest, max_tokens: int, precision: str) -> None:
    if manifest.runtime != RUNTIME:
        raise ModelError(f"{directory} was exported for {manifest.runtime}, not for {RUNTIME}")
    if precision not in manifest.precisions:
        raise ModelError(f"{directory} has no {precision} graph: set KP_PRECISION=fp32, or {FETCH_HINT}")
    if not runs_here(precision):
        raise ModelError(
            f"KP_PRECISION={precision} needs Linux and a CPU with {' or '.join(sorted(BF16_FLAGS))}; on other CPUs it "
            "is slower than fp32: set KP_PRECISION=fp32"
        )
    if max_tokens > manifest.max_tokens:
        raise ModelError(
            f"KP_MAX_TOKENS={max_tokens} is more than the {manifest.max_tokens} tokens that {manifest.name} can read"
        )
