"""docs/how-a-score-comes-about.md: its two traces, their similarity, and the core's scores of them."""

import numpy as np

from tests.support.surroundings import DOCS
from worker.core.scorer import PartitionScorer
from worker.core.scoring import ScoredTrace
from worker.core.trace import created_at_ms, parse_trace

TEXT = (DOCS / "how-a-score-comes-about.md").read_text("utf-8")
DOCUMENTS = (DOCS / "examples/two-traces.jsonl").read_bytes().splitlines()
EARLIER, TRACE = map(parse_trace, DOCUMENTS)
HALF = 5e-5
"""The document gives four places: half of the last one, and a little for sums of rounded numbers."""


SIMILARITY = 0.4941
"""Of the texts of the two traces; the real model finds it, and the tables calculate with it."""


def scored() -> list[ScoredTrace]:
    """Both traces by the core, with vectors that are as similar as the document says."""
    scorer = PartitionScorer(dimensions=2)
    vectors = [[1.0, 0.0], [SIMILARITY, float(np.sqrt(1 - SIMILARITY**2))]]
    traces = (EARLIER, TRACE)
    return [scorer.score(trace, vector, created_at_ms(trace)) for trace, vector in zip(traces, vectors, strict=True)]
