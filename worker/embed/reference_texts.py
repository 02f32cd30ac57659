"""Fixed texts, and what sentence-transformers gives for them: an exported model and a service must reproduce it."""

import hashlib
from importlib.resources import files
from itertools import accumulate
from typing import Final

import numpy as np

from worker.embed.embedder import Embedding, ModelError

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


def recorded_vectors(name: str = REFERENCE_VECTORS) -> list[Embedding]:
    """Return the recorded embeddings of TEXTS. Raises ModelError if they were recorded for other texts."""
    with files("worker").joinpath(name).open("rb") as file, np.load(file) as recorded:
        if str(recorded["texts"]) != texts_sha256():
            raise ModelError("this is a bug: the recorded vectors belong to other texts than reference_texts.TEXTS")
        pairs = zip(recorded["vectors"], recorded["truncated"], strict=True)
        return [Embedding(vector, bool(truncated)) for vector, truncated in pairs]


def texts_sha256() -> str:
    """Hash the texts (hex), so that recorded vectors are never used for other texts."""
    return hashlib.sha256("\0".join(TEXTS).encode()).hexdigest()
