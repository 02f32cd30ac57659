"""Record what sentence-transformers gives for the reference texts: `python -m tests.support.reference_vectors`.

The export of all-MiniLM-L6-v2 compares itself with these vectors, because it runs where sentence-transformers is not
installed. tests/model/test_fast_embedder.py compares the file with sentence-transformers. `--multilingual FILE`, its
weights file, records the vectors of the multilingual model and their mean (worker/embed/export.py).
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.support.surroundings import ROOT
from worker.embed.embedder import OFFICIAL_SHA256
from worker.embed.export import BLOCK, CENTRED, RECORDED, read_weights, tokenizer_json
from worker.embed.reference_texts import CHECK_TOKENS, REFERENCE_VECTORS, TEXTS, texts_sha256
from worker.embed.torch_embedder import SentenceTransformersEmbedder


def write_sentence_transformer(weights_file: Path, directory: Path) -> None:
    """Write the multilingual model, not centred, as a sentence-transformers directory in float32 (470 MB)."""
    import torch
    import transformers as untyped
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as untyped_models  # type: ignore[attr-defined]
    from tokenizers import Tokenizer

    transformers, models = cast("Any", untyped), cast("Any", untyped_models)

    weights = read_weights(weights_file)
    bert = transformers.BertModel(transformers.BertConfig(**weights.config), add_pooling_layer=False)
    tensors = dict(weights.tensors)
    scale = tensors.pop("embeddings.word_embeddings.scale").astype(np.float32)
    words = tensors["embeddings.word_embeddings.weight"]
    tensors["embeddings.word_embeddings.weight"] = words * np.repeat(scale, BLOCK, axis=1)
    missing = bert.load_state_dict({name: torch.from_numpy(it.copy()) for name, it in tensors.items()}, strict=False)
    assert not [*missing.unexpected_keys, *missing.missing_keys], missing
    bert.save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json(weights)), unk_token="<unk>", pad_token="<pad>",
        cls_token="<s>", sep_token="</s>", model_max_length=512,
    ).save_pretrained(directory)  # fmt: skip
    transformer = models.Transformer(str(directory))
    pooling = models.Pooling(weights.config["hidden_size"], "mean")
    SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu").save(str(directory))


def record(embedder: SentenceTransformersEmbedder, path: str, *, centred: bool) -> None:
    embeddings = [embedder.embed(text) for text in TEXTS]
    vectors = np.array([it.vector for it in embeddings], np.float64)
    extra = {}
    if centred:
        centre = (CENTRED * vectors.mean(axis=0)).astype("<f4")
        extra["centre"] = centre
        vectors -= centre
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.savez(
        ROOT / "worker" / path,
        vectors=vectors.astype("<f4"),
        truncated=np.array([it.truncated for it in embeddings]),
        texts=np.array(texts_sha256()),
        **extra,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--multilingual", type=Path, metavar="FILE", help="the weights file of the multilingual model")
    given = parser.parse_args()
    if given.multilingual is None:
        embedder = SentenceTransformersEmbedder(None, CHECK_TOKENS, 1)
        assert embedder.identity.weights_sha256 == OFFICIAL_SHA256
        record(embedder, REFERENCE_VECTORS, centred=False)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_sentence_transformer(given.multilingual, Path(directory))
        record(SentenceTransformersEmbedder(directory, CHECK_TOKENS, 1), RECORDED, centred=True)


if __name__ == "__main__":
    main()
