"""The threshold for a share of some scores; thresholds and profiles as a config file (TOML) to paste."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worker.core.scoring import DEFAULT_PROFILE, DEFAULT_THRESHOLD, PROFILES, Profile
from worker.core.terminal import number_of

FEW_TRACES = 50
"""With fewer traces, a threshold says little about the next ones: of 50 traces, the best tenth are five."""

LEAST_TRACES = 30
"""With fewer traces, no threshold is proposed: the best tenth would be two or three of them."""


class ShareThreshold(NamedTuple):
    """A threshold, and how many traces it accepts."""

    threshold: float
    wanted: int  # the share in traces, rounded up
    accepted: int  # more than wanted if scores tie
    above: int  # traces above the tie; all other accepted ones have one score


def share_threshold(scores: npt.NDArray[Any], share: Fraction) -> ShareThreshold:
    """Return the threshold for the best `share` of scores (at least one), as a short decimal.

    It accepts the same traces as the highest threshold that accepts at least the share.
    """
    ordered = np.sort(scores)
    count, wanted = len(ordered), math.ceil(share * len(ordered))
    cutoff = float(ordered[count - wanted])
    lower, above = (int(np.searchsorted(ordered, cutoff, side)) for side in ("left", "right"))
    return ShareThreshold(
        _short(cutoff, float(ordered[lower - 1]) if lower else None), wanted, count - lower, count - above
    )


def same_share(scores: Sequence[float], accepted: int) -> float | None:
    """Return the threshold that accepts as many of these scores; None if none is accepted."""
    return share_threshold(np.asarray(scores), Fraction(accepted, len(scores))).threshold if accepted else None


def share_interval(scores: npt.NDArray[Any], share: Fraction, seed: int = 1) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the threshold for a share of scores (at least one): two of the scores.

    It assumes independent traces. The position of a resample's k-th smallest score among the n scores is floor(n B)
    with B from the distribution Beta(k, n + 1 - k): the order statistic of uniform draws.
    """
    ordered, count = np.sort(scores), len(scores)
    rank = count - math.ceil(share * count) + 1
    draws = np.random.default_rng(seed).beta(rank, count + 1 - rank, 2000)
    cutoffs = ordered[np.minimum((count * draws).astype(np.int64), count - 1)]
    low, high = np.quantile(cutoffs, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def _short(cutoff: float, below: float | None) -> float:
    """Round a score down to the fewest decimals that keep it above the score `below` it."""
    written = Decimal(repr(cutoff))  # not its binary value: 0.6 stays 0.6
    for decimals in range(2, 18):
        short = float(written.quantize(Decimal(1).scaleb(-decimals), ROUND_FLOOR))
        if below is None or short > below:
            return short
    return cutoff


def config_to_paste(
    profiles: Mapping[str, Profile], threshold: float, comments: Mapping[str, str] | None = None
) -> str:
    """Return the lines of a config file with these settings; "" if they are the built-in ones.

    `comments`: by profile, shown after its threshold.
    """
    default = PROFILES[DEFAULT_PROFILE].weights
    lines = [f"threshold = {threshold!r}"] if threshold != DEFAULT_THRESHOLD else []
    for name in dict.fromkeys((DEFAULT_PROFILE, *profiles)):
        profile, key, comment = profiles[name], f"profiles.{_key(name)}", (comments or {}).get(name)
        if profile == PROFILES.get(name):
            continue
        if name in PROFILES:
            weights_differ = profile.weights != PROFILES[name].weights
        else:  # without weights it takes default's, which are others if the file changes them
            weights_differ = profiles[DEFAULT_PROFILE].weights != default or profile.weights != default
        lines.append("")
        if profile.threshold is not None or not weights_differ:
            lines.append(f"[{key}]")
        if profile.threshold is not None:
            lines.append(f"threshold = {profile.threshold!r}" + (f"  # {comment}" if comment else ""))
        if weights_differ:
            lines.append(f"[{key}.weights]")
            lines += (f"{component} = {weight!r}" for component, weight in asdict(profile.weights).items())
    return "\n".join(lines).strip("\n")


def accepts(accepted: int, traces: int, wanted: int | None, interval: tuple[float, float]) -> str:
    """Return the comment on the basis of a threshold; with equal scores it accepts more than wanted."""
    ties = f" (equal scores: {wanted} were wanted)" if wanted is not None and accepted > wanted else ""
    return f"accepts {accepted} of {traces}{ties}; 95% interval {interval_text(interval)}"


def interval_text(interval: tuple[float, float]) -> str:
    """Return an interval of thresholds as a text: 0.712-0.790."""
    return "-".join(f"{end:.3f}" for end in interval)


def too_few(traces: int) -> str:
    """Return why no threshold is proposed."""
    return f"{number_of(traces, 'trace is', 'traces are')} too few to propose a threshold ({LEAST_TRACES} at least)"


def _key(name: str) -> str:
    """Return a name as a TOML key, quoted and with unprintable characters escaped if necessary."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    plain = (char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in name)
    return f'"{"".join(plain)}"'
