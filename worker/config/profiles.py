"""Profiles in the settings: weights and thresholds by domain, over those that are built in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from worker.core.scoring import DEFAULT_PROFILE, PROFILES, Profile, Weights


class ProfileSetting(BaseModel):
    """One profile of the settings: `weights` (four numbers that sum to 1), `threshold` (0..1), or one of them."""

    model_config = ConfigDict(extra="forbid")
    weights: dict[Literal["complexity", "novelty", "tool_diversity", "outcome_confidence"], float] | None = Field(
        None, description="share of each component in the score; all four, and they sum to 1"
    )
    threshold: float | None = Field(None, ge=0, le=1, description="lowest score at which a trace is accepted")

    @field_validator("weights")
    @classmethod
    def _are_weights(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights is not None:
            missing = [name for name in Weights.__dataclass_fields__ if name not in weights]
            if missing:
                raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give all four")
            Weights(**weights)
        return weights


def merged_profiles(given: Mapping[str, ProfileSetting]) -> dict[str, Profile]:
    """Return the built-in profiles with the given ones over them; one without weights has the default's."""
    result = dict(PROFILES)
    # The default first: whatever the order, a profile without weights has the default's as they are configured.
    for domain, setting in sorted(given.items(), key=lambda item: item[0] != DEFAULT_PROFILE):
        weights = result.get(domain, result[DEFAULT_PROFILE]).weights
        if setting.weights is not None:
            weights = Weights(**setting.weights)
        result[domain] = Profile(weights, setting.threshold)
    return result
