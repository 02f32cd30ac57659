"""kp-worker: scores KnowledgePulse reasoning traces on a Kafka stream.

The names below are the Python interface. They load on first use, so that the command line starts at once and can set
up numpy's threads before numpy is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from worker.version import __version__

if TYPE_CHECKING:
    from worker.novelty import VectorCache
    from worker.pipeline import PartitionScorer, ScoredTrace
    from worker.scoring import Profile, Score, Weights, score_trace
    from worker.trace import InvalidTrace, Reason, ReasoningTrace, embedding_text, parse_trace

_HOME = {
    "InvalidTrace": "worker.trace",
    "PartitionScorer": "worker.pipeline",
    "Profile": "worker.scoring",
    "Reason": "worker.trace",
    "ReasoningTrace": "worker.trace",
    "Score": "worker.scoring",
    "ScoredTrace": "worker.pipeline",
    "VectorCache": "worker.novelty",
    "Weights": "worker.scoring",
    "embedding_text": "worker.trace",
    "parse_trace": "worker.trace",
    "score_trace": "worker.scoring",
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
    "embedding_text",
    "parse_trace",
    "score_trace",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'worker' has no attribute {name!r}")
