"""kp-worker: scores KnowledgePulse reasoning traces on a Kafka stream.

The names below are the Python interface. They load on first use, so that the command line starts at once and can set
up numpy's threads before numpy is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from worker.version import __version__

if TYPE_CHECKING:
    from worker.core.novelty import VectorCache, unit_mean
    from worker.core.scorer import PartitionScorer
    from worker.core.scoring import Profile, Score, ScoredTrace, Weights, score_trace
    from worker.core.trace import InvalidTrace, Reason, ReasoningTrace, embedded_texts, embedding_text, parse_trace
    from worker.core.verdicts import make_verdict, sign_verdict
    from worker.redact.documents import redact_document, redact_text

_HOME = {
    name: f"worker.{module}"
    for module, names in {
        "core.novelty": "VectorCache unit_mean",
        "core.scorer": "PartitionScorer",
        "core.scoring": "Profile Score ScoredTrace Weights score_trace",
        "core.trace": "InvalidTrace Reason ReasoningTrace embedded_texts embedding_text parse_trace",
        "core.verdicts": "make_verdict sign_verdict",
        "redact.documents": "redact_document redact_text",
    }.items()
    for name in names.split()
}

__all__ = [
    "InvalidTrace",
    "PartitionScorer",
    "Profile",
    "Reason",
    "ReasoningTrace",
    "Score",
    "ScoredTrace",
    "VectorCache",
    "Weights",
    "__version__",
    "embedded_texts",
    "embedding_text",
    "make_verdict",
    "parse_trace",
    "redact_document",
    "redact_text",
    "score_trace",
    "sign_verdict",
    "unit_mean",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'worker' has no attribute {name!r}")
