"""What of a trace is embedded (KP_EMBED_TEXT), and how the vectors of its parts become one.

Lives here: the texts of each view, their mean, and the text by which a trace's embedding is known again. Must not live
here: models, tokens, the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from worker.core.novelty import Vector, unit
from worker.core.trace import ReasoningTrace, embedding_text

View = Literal["whole", "objective"]
WHOLE: Final = "whole"


def embedded_texts(trace: ReasoningTrace, view: str = WHOLE) -> tuple[str, ...]:
    """Return the texts whose unit mean is the trace's vector.

    `whole`: the objective and the contents of all steps, as one text. `objective`: the objective, and that text. A
    trace whose steps have no content is its objective alone.
    """
    text = embedding_text(trace)
    if view == WHOLE:
        return (text,)
    objective = trace.task.objective
    return (objective, text) if any(step.content for step in trace.steps) else (objective,)


def unit_mean(vectors: Sequence[Vector]) -> Vector:
    """Return the unit vector of the mean, shape (dimensions,); a single vector is returned as it is.

    Raises ValueError where the mean has no direction.
    """
    if len(vectors) == 1:
        return vectors[0]
    mean = np.sum(np.asarray(vectors, np.float64), axis=0)
    if not np.abs(mean).max() > 0.0:
        raise ValueError("the parts of this text cancel each other out")
    return unit(mean, len(mean))


def joined(texts: Sequence[str]) -> str:
    """Return one text that differs where any of the texts does; a single text is returned as it is."""
    return texts[0] if len(texts) == 1 else f"{len(texts[0])}:{''.join(texts)}"
