"""What keying does to novelty: the AUC of firsts against repeats in one partition, and with traces spread over several.

All traces come in one random order, as if agents worked side by side, without history. A *first* is a trace whose label
no earlier one has in any partition. With several partitions it is compared only with the earlier ones of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from worker.commands.evaluate.numbers import DRAWS, Floats, Interval, Ints, Run, auc, compared, interval

ORDERS: Final = 10
"""Random orders; the figures are means over them. One order's AUC differs from another's by .02 to .04."""


class Spread(Struct, frozen=True):
    """The AUC of the same traces in the same orders: all in one partition, and spread over partitions by their key."""

    key: str
    keys: int
    partitions: int
    auc_one: Interval | None
    auc_spread: Interval | None


def spread_figures(vectors: Floats, labels: Ints, key: str, keys: Ints, partitions: int | None, seed: int) -> Spread:
    """Return the figures; `keys`: a number 0..k-1 for each trace. `partitions` None: one for each key.

    Otherwise each key gets a partition at random, another one in each order, as hashes of other names would.
    """
    rng = np.random.default_rng(seed)
    count, different = int(labels.max()) + 1, int(keys.max()) + 1
    weights = np.vstack([np.ones(count), rng.multinomial(count, np.full(count, 1 / count), DRAWS)])
    alone, spread = [], []
    for _ in range(ORDERS):
        order = rng.permutation(len(labels))
        homes = np.arange(different) if partitions is None else rng.integers(partitions, size=different)
        one = compared(vectors, labels, np.arange(0), order)
        novelty = _novelty(vectors, labels, order, homes[keys[order]])
        # The very first trace is left out: its novelty of 0.5 says nothing.
        alone.append(auc(_behind_the_first(one, one.novelty), weights))
        spread.append(auc(_behind_the_first(one, novelty), weights))
    return Spread(key, different, partitions or different, interval(alone), interval(spread))


def _novelty(vectors: Floats, labels: Ints, order: Ints, homes: Ints) -> Floats:
    """Return the novelty of each trace of the order, compared with the earlier ones of its partition."""
    novelty = np.empty(len(order))
    for home in np.unique(homes):
        places = np.flatnonzero(homes == home)
        novelty[places] = compared(vectors, labels, np.arange(0), order[places]).novelty
    return novelty


def _behind_the_first(one: Run, novelty: Floats) -> Run:
    return Run(novelty[1:], one.labels[1:], one.first[1:], one.same[1:])
