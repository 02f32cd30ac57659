"""Thresholds for a target share: the one that accepts the best 10 % of some scores.

Must not live here: whose scores they are (whatif_share.py, report_summary.py), the config file (pasted_config.py).
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

FEW_TRACES: Final = 50
"""With fewer traces a threshold says little about the next ones: of 50 traces, the best tenth are five."""

_SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,9})?|\.\d{1,9})(%?)")
_FEWEST_DECIMALS, _MOST_DECIMALS = 2, 17


class ShareThreshold(NamedTuple):
    """A threshold, and how many traces it accepts.

    `wanted`: the share in traces, rounded up. `accepted` is more than that where scores tie: `above` traces lie above
    the tie, all others that are accepted have the same score.
    """

    threshold: float
    wanted: int
    accepted: int
    above: int


def parse_share(text: str) -> Fraction:
    """Read a share, 0.1 or 10%, exactly. Raises ValueError."""
    found = _SHARE.fullmatch(text.strip())
    share = Fraction(found[1]) / (100 if found[2] else 1) if found else Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"{text!r}: give a share above 0 and up to 1, such as 0.1 or 10%")
    return share


def share_cutoff(ordered: npt.NDArray[np.float64], share: Fraction) -> float:
    """Return the greatest threshold that accepts at least a share of scores (at least one, ascending)."""
    return float(ordered[len(ordered) - math.ceil(share * len(ordered))])


def share_threshold(scores: npt.NDArray[Any], share: Fraction) -> ShareThreshold:
    """Return the threshold for the best `share` of scores (at least one), as a short decimal.

    It accepts the same traces as the greatest threshold that accepts at least the share.
    """
    ordered = np.sort(scores)
    cutoff = share_cutoff(ordered, share)
    lower, above = (int(np.searchsorted(ordered, cutoff, side)) for side in ("left", "right"))
    below = float(ordered[lower - 1]) if lower else None
    count = len(ordered)
    return ShareThreshold(_short(cutoff, below), math.ceil(share * count), count - lower, count - above)


def _short(cutoff: float, below: float | None) -> float:
    """Round a score down to as few decimals as keep it above the score `below` it."""
    written = Decimal(repr(cutoff))  # not its binary value: 0.6 stays 0.6
    for decimals in range(_FEWEST_DECIMALS, _MOST_DECIMALS + 1):
        short = float(written.quantize(Decimal(1).scaleb(-decimals), ROUND_FLOOR))
        if below is None or short > below:
            return short
    return cutoff
