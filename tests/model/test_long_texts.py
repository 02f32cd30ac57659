"""Texts beyond the token limit in the real model: the same in both runtimes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.stage import LINES
from worker import embedding_text, parse_trace
from worker.config import load
from worker.embed.embedder import Embedder
from worker.embed.load import load_embedder
from worker.embed.torch_embedder import SentenceTransformersEmbedder

LIMIT = 64  # most traces are longer

PROSE = "Net revenue rose 11.4 % year over year; überprüfen Sie die Größe, 请先核对发票金额 before résumé №7. "
ENDLESS = {
    "prose": PROSE * 12_000,
    "chinese": "请先核对发票金额然后再付款" * 80_000,
    "one word": "x" * (1 << 20),
    "encoded file": "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0" * 29_000,
    "blanks": " " * (1 << 20),
    "accents": "e\N{COMBINING ACUTE ACCENT}" * (1 << 19),
    "controls": "\0" * (1 << 20),
}


@pytest.fixture(scope="module")
def embedders() -> dict[str, Embedder]:
    """Return both runtimes. Needs the exported model, as `make` leaves it."""
    found = {}
    for kind in ("openvino", "sentence-transformers"):
        embedder = load_embedder(load(embedder=kind, max_tokens=LIMIT, embed_threads=1))
        found[kind] = embedder
    return found


def texts() -> list[str]:
    """Return texts of all lengths around the limit, and traces."""
    words = PROSE.split()
    rng = random.Random(5)
    made = [" ".join(rng.choices(words, k=k)) for k in (0, 1, 30, 31, 40, 62, 63, 90, 130, 200, 300, 1000, 5000)]
    traces = [embedding_text(parse_trace(line)) for line in LINES[:12]]
    return [*made, *traces]


def test_reading_the_beginning_changes_no_vector_and_both_runtimes_agree(
    embedders: dict[str, Embedder], seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = [
        *(texts() if long else random.Random(seed).sample(texts(), 8)),
        PROSE * 300,
        "请先核对发票金额然后再付款" * 2000,
        " " * 9000 + PROSE * 50,
        "x" * 9000 + " " + PROSE * 50,
    ]
    bounded = {name: [it.embed(text) for text in sample] for name, it in embedders.items()}
    for text, one, other in zip(sample, *bounded.values(), strict=True):
        assert float(one.vector.astype(np.float64) @ other.vector.astype(np.float64)) > 1.0 - 1e-6, text[:60]
        assert one.truncated == other.truncated, text[:60]
    monkeypatch.setattr("worker.embed.embedder.CHARS_A_TOKEN", 1 << 20)  # everything at once
    for name, embedder in embedders.items():
        for text, found in zip(sample, bounded[name], strict=True):
            whole = embedder.embed(text)
            assert whole.vector.tobytes() == found.vector.tobytes(), (name, text[:60])
            assert whole.truncated == found.truncated, (name, text[:60])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_text_without_end_is_embedded_and_said_to_be_cut(embedders: dict[str, Embedder], name: str) -> None:
    embedder = embedders["openvino"]
    found = embedder.embed(ENDLESS[name])
    assert found.truncated
    assert np.isfinite(found.vector).all()
    again = embedder.embed(ENDLESS[name] + " the end")
    assert again.vector.tobytes() == found.vector.tobytes()


def tiny_model(directory: Path, family: str) -> Path:
    """Write a random sentence-transformers model of 48 dimensions with another tokenizer, trained on a few texts."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "<s>"}
    names |= {"sep_token": "</s>", "mask_token": "<mask>"}
    if family == "unigram":  # as XLM-R and the multilingual MiniLM: SentencePiece, any language
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:  # as RoBERTa: byte-level BPE
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator([PROSE] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))],
    )
    torch.manual_seed(3)
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "pad_token_id": 1,
    }  # fmt: skip
    if family == "unigram":  # the multilingual MiniLM is a BERT behind XLM-R's tokenizer
        model: Any = BertModel(BertConfig(**sizes, max_position_embeddings=512))
    else:
        model = RobertaModel(RobertaConfig(**sizes, max_position_embeddings=514, type_vocab_size=1))
    source = directory / "transformer"
    model.save_pretrained(source)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(source)
    transformer = Transformer(str(source))
    whole = SentenceTransformer(modules=[transformer, Pooling(48, "mean"), Normalize()], device="cpu")
    target = directory / f"tiny-{family}"
    whole.save(str(target))
    return target


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", ["unigram", "byte-bpe"])
def test_a_model_of_another_family_runs(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = SentenceTransformersEmbedder(str(tiny_model(tmp_path, family)), LIMIT, 1, "objective")
    assert embedder.identity.name == f"tiny-{family}"
    assert (embedder.identity.dimensions, embedder.identity.objective_tokens) == (48, 512)
    sample = [*texts(), PROSE * 300, "请先核对发票金额然后再付款" * 3000]
    tokens = [len(embedder._model.tokenizer(text, verbose=False)["input_ids"]) for text in sample]
    bounded = [embedder.embed(text) for text in sample]
    assert [it.truncated for it in bounded] == [count > LIMIT for count in tokens]
    monkeypatch.setattr("worker.embed.embedder.CHARS_A_TOKEN", 1 << 20)  # everything at once
    assert [embedder.embed(text).vector.tobytes() for text in sample] == [it.vector.tobytes() for it in bounded]
