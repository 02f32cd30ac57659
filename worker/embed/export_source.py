"""The source of an export: a graph, its tokenizer, and the vectors that the result must reproduce."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from worker.embed.embedder import (
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    Embedding,
    ModelError,
    check_weights,
    fetch_first,
    find_model,
    weights_sha256,
)
from worker.embed.minilm import build_graph

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


_SENTENCES: Final = (
    "Check the invoice total against the order.",
    "The patient reports chest pain after exercise; rule out angina before anything else.",
    "A retry with exponential backoff hid the real error for two days.",
    "Summarise the quarterly filing and list the risks that the board did not mention.",
    "The query planner ignores the index because the column is cast to text.",
    "Net revenue rose 11.4 % year over year, while operating costs fell by $2,350,000.",
    "Customer is angry about a late parcel; offer a refund, then ask for the tracking number.",
    "First verify the hypothesis on a small sample, then widen the search.",
    "Dosage must be halved for renal impairment (eGFR < 30 mL/min/1.73 m2).",
    "The stack trace points at a null pointer, but the cause is a missing lock.",
    "Three sources agree, yet all of them cite the same press release.",
    "Roll the deployment back, keep the logs, and write down what was tried.",
)
_LANGUAGES: Final = (
    "Revise el contrato y confirme la fecha de pago con el proveedor.",
    "Vérifier la facture avant d'envoyer le rappel au client.",
    "Überprüfen Sie die Größe der Bestellung, bevor Sie sie freigeben.",
    "Verifique o estoque antes de confirmar o prazo de entrega.",
    "Controlla il totale della fattura e avvisa il cliente.",
    "Проверьте сумму счёта перед оплатой.",
    "请先核对发票金额,然后再付款。",
    "請求書の合計を注文と照合してください。",
    "결제 전에 송장 금액을 확인하세요.",
    "تحقق من مبلغ الفاتورة قبل الدفع.",
    "भुगतान से पहले चालान की राशि जाँचें।",
    "Ελέγξτε το ποσό του τιμολογίου πριν από την πληρωμή.",
    "Ödeme yapmadan önce faturayı kontrol edin.",  # noqa: RUF001 a Turkish letter
    "Kiểm tra số tiền trên hóa đơn trước khi thanh toán.",
)
_ODD: Final = (
    "",
    " \n\t ",
    "a",
    "?!",
    "0 0 0 0 0 0 0 0",
    "x" * 120,
    "NaN inf -0.0 1e308 0x7fffffff",
    "emoji \N{ROCKET} \N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-5} and zero\N{ZERO WIDTH JOINER}width",
    "cafe\N{COMBINING ACUTE ACCENT} na\N{COMBINING DIAERESIS}ive",
    "control \x00\x01\x7f characters",
    "[CLS] [SEP] [MASK] [PAD] written out",
    'SELECT id, total FROM invoices WHERE status = "open" ORDER BY created_at DESC LIMIT 10;',
    '{"tool": "search", "input": {"query": "annual report 2025", "top_k": 5}}',
    "def mean(values):\n    return sum(values) / len(values)\n",
)

TEXTS: Final = (
    *accumulate(_SENTENCES, lambda text, sentence: f"{text} {sentence}"),  # 11 to about 200 tokens
    *_LANGUAGES,
    *_ODD,
    " ".join(_LANGUAGES),
    *(" ".join(_SENTENCES[start:] + _LANGUAGES) for start in range(0, 12, 2)),
    " ".join(_SENTENCES * 4),  # over 256 and over 512 tokens
)
"""48 texts."""


CHECK_TOKENS: Final = 256  # token limit for the comparison of vectors

REFERENCE_VECTORS: Final = "data/reference_vectors.npz"
"""sentence-transformers' vectors for TEXTS with all-MiniLM-L6-v2 (`python -m tests.support.reference_vectors`)."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A model to export."""

    name: str
    weights_sha256: str
    dimensions: int
    max_tokens: int
    tokenizer: str  # tokenizer.json
    graph: Any
    expected: Sequence[Embedding]  # of TEXTS, at CHECK_TOKENS
    tools: Sequence[str]  # packages that made the graph


def open_export_source(openvino: ModuleType, model: str | None) -> ExportSource:
    """Return the source for a directory or hub name (None: the default model). Raises ModelError."""
    directory = Path(find_model(model))
    if directory.is_dir() and check_weights(model, weights_sha256(directory)) == OFFICIAL_NAME:
        return _minilm(openvino, directory)
    if model is None and find_spec("sentence_transformers") is None:
        raise ModelError(f"{fetch_first(model)}, which also exports it")
    return _through_torch(openvino, model)


def _minilm(openvino: ModuleType, directory: Path) -> ExportSource:
    expected = recorded_vectors()
    return ExportSource(
        name=OFFICIAL_NAME,
        weights_sha256=OFFICIAL_SHA256,
        dimensions=len(expected[0].vector),
        max_tokens=512,  # rows of its position table
        tokenizer=(directory / "tokenizer.json").read_text("utf-8"),
        graph=build_graph(openvino, directory),
        expected=expected,
        tools=("openvino", "tokenizers"),
    )


def recorded_vectors() -> list[Embedding]:
    """Return the recorded embeddings of TEXTS. Raises ModelError if they were recorded for other texts."""
    with files("worker").joinpath(REFERENCE_VECTORS).open("rb") as file, np.load(file) as recorded:
        if str(recorded["texts"]) != texts_sha256():
            raise ModelError("this is a bug: the recorded vectors belong to other texts than export_source.TEXTS")
        pairs = zip(recorded["vectors"], recorded["truncated"], strict=True)
        return [Embedding(vector, bool(truncated)) for vector, truncated in pairs]


def texts_sha256() -> str:
    """Hash the texts (hex), so that recorded vectors are never used for other texts."""
    return hashlib.sha256("\0".join(TEXTS).encode()).hexdigest()


def _through_torch(openvino: ModuleType, model: str | None) -> ExportSource:
    from worker.embed.torch_embedder import SentenceTransformersEmbedder, token_limit

    # One thread: on a busy host torch's threads spin and need 1 s per text; one thread needs 0.05 s.
    reference = SentenceTransformersEmbedder(model, CHECK_TOKENS, 1)
    identity = reference.identity
    try:
        return ExportSource(
            name=identity.name,
            weights_sha256=identity.weights_sha256,
            dimensions=identity.dimensions,
            max_tokens=token_limit(reference.model),
            tokenizer=reference.model.tokenizer.backend_tokenizer.to_str(),
            graph=convert(openvino, reference.model),
            expected=[reference.embed(text) for text in TEXTS],
            tools=("openvino", "tokenizers", "torch", "transformers", "sentence-transformers"),
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        raise ModelError(
            f"{identity.name} cannot be exported: {error}; use it with KP_EMBEDDER=sentence-transformers"
        ) from error


def convert(openvino: ModuleType, model: SentenceTransformer) -> Any:
    """Convert a model to one graph: token ids (1, n) int64 -> unit vector (1, dimensions) float32, with mean pooling.

    Each text is embedded alone and unpadded, without attention mask. The export's check detects other poolings and
    layers.
    """
    import torch

    class Graph(torch.nn.Module):
        def __init__(self, transformer: torch.nn.Module, segments: bool) -> None:
            super().__init__()
            self.transformer = transformer
            self.segments = segments

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            extra = {"token_type_ids": torch.zeros_like(input_ids)} if self.segments else {}
            hidden = self.transformer(input_ids=input_ids, **extra).last_hidden_state
            return torch.nn.functional.normalize(hidden.mean(dim=1), p=2.0, dim=1)

    segments = "token_type_ids" in model.tokenizer.model_input_names
    transformer: Any = model[0].auto_model
    graph = Graph(transformer, segments).eval()
    example = torch.arange(5, 42, dtype=torch.int64).unsqueeze(0)
    with warnings.catch_warnings(), torch.no_grad():
        # The tracer warns that branches on shapes become constants; the check with texts of all lengths covers this.
        warnings.simplefilter("ignore")
        return openvino.convert_model(
            graph, example_input={"input_ids": example}, input=[("input_ids", [1, -1], openvino.Type.i64)]
        )
