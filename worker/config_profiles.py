"""KP_PROFILES: weights and thresholds by domain, over those that are built in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from worker.core.scoring import DEFAULT_PROFILE, PROFILES, Profile, Weights


class ProfileSetting(BaseModel):
    """One profile of KP_PROFILES: `weights` (four numbers that sum to 1), `threshold` (0..1), or one of them."""

    model_config = ConfigDict(extra="forbid")
    weights: dict[Literal["complexity", "novelty", "tool_diversity", "outcome_confidence"], float] | None = None
    threshold: float | None = Field(None, ge=0, le=1)


def merged_profiles(given: Mapping[str, ProfileSetting]) -> dict[str, Profile]:
    """Return the built-in profiles with the given ones over them. Raises ValueError for bad weights."""
    result = dict(PROFILES)
    for domain, setting in given.items():
        weights = result.get(domain, result[DEFAULT_PROFILE]).weights
        if setting.weights is not None:
            missing = set(Weights.__dataclass_fields__) - set(setting.weights)
            if missing:
                raise ValueError(f"profile {domain!r} lacks the weights {', '.join(sorted(missing))}")
            try:
                weights = Weights(**setting.weights)
            except ValueError as error:
                raise ValueError(f"profile {domain!r}: {error}") from error
        result[domain] = Profile(weights, setting.threshold)
    return result
