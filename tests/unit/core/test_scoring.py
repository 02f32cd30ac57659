"""The score: equal to the reference to the last bit, its profiles, and its overrides one by one."""

import json
import math
from typing import Any

import msgspec
import pytest

from tests.support.builders import make_trace, read_jsonl
from worker import Profile, Weights, embedding_text, parse_trace, score_trace
from worker.core.scoring import COMPLEXITY, OUTCOME_CONFIDENCE, PROFILES, TOOL_DIVERSITY, Counts, near_miss

SPECIFIED_WEIGHTS = {
    "default": (0.25, 0.35, 0.15, 0.25),
    "finance": (0.20, 0.25, 0.10, 0.45),
    "code": (0.20, 0.30, 0.30, 0.20),
    "medical": (0.15, 0.20, 0.10, 0.55),
    "customer_service": (0.20, 0.30, 0.20, 0.30),
}


def clamped(value: float) -> float:
    return min(1.0, max(0.0, value))


def to_trace(document: Any) -> Any:
    return parse_trace(json.dumps(document))


def overrides_of(document: Any) -> tuple[str, ...]:
    """Return the overrides by the specification's words."""
    kinds = [step["type"] for step in document["steps"]]
    tools = {step["tool"]["name"] for step in document["steps"] if "tool" in step}
    rules = {
        "single_thought": kinds == ["thought"],
        "error_recovery_bonus": kinds.count("error_recovery") > 2 and document["metadata"]["success"],
        "low_tool_diversity_penalty": len(tools) == 1,
    }
    return tuple(name for name, holds in rules.items() if holds)


def test_same_score_and_text_as_the_reference_to_the_last_bit() -> None:
    """The cases have each override alone and with the others, tools on any step and one named "", and many steps."""
    for case in read_jsonl("scoring_cases.jsonl"):
        trace = to_trace(case["trace"])
        scored = score_trace(trace)
        assert scored.score == clamped(case["score"]), case
        assert scored.overrides == overrides_of(case["trace"]), case
        assert embedding_text(trace) == case["text"], case


def test_a_domain_named_like_a_javascript_member_is_an_unknown_domain() -> None:
    for case in read_jsonl("domain_name_cases.jsonl"):
        score = score_trace(to_trace(case["trace"]))
        assert (score.score, score.profile) == (clamped(case["documented_score"]), "default"), case


def test_the_profiles_are_the_specified_ones() -> None:
    weights = {
        name: (p.weights.complexity, p.weights.novelty, p.weights.tool_diversity, p.weights.outcome_confidence)
        for name, p in PROFILES.items()
    }
    assert weights == SPECIFIED_WEIGHTS
    assert all(profile.threshold is None for profile in PROFILES.values())


@pytest.mark.parametrize("domain", ["Finance", "finance ", "default", "__proto__", "customer-service"], ids=repr)
def test_a_domain_without_a_profile_of_exactly_that_name_takes_the_default(domain: str) -> None:
    score = score_trace(make_trace(domain=domain))
    assert score.profile == "default"
    assert score.weights == PROFILES["default"].weights


def test_the_bonus_is_cut_at_1_before_the_penalty_is_taken() -> None:
    steps = ["error_recovery:a"] * 3
    score = score_trace(make_trace(steps=steps, confidence=1.0), novelty=2.0)
    assert score.overrides == ("error_recovery_bonus", "low_tool_diversity_penalty")
    assert score.score == 1.0 - 0.1


def test_the_score_is_clamped_at_the_end_and_novelty_is_not() -> None:
    score = score_trace(make_trace(confidence=1.0), novelty=2.0)
    assert score.score == 1.0
    assert score.components.novelty == 2.0
    assert score_trace(make_trace(steps=("tool_call:a", "observation"), confidence=0), novelty=-1e-7).score >= 0.0


def test_without_a_neighbour_novelty_is_one_half() -> None:
    assert score_trace(make_trace()) == score_trace(make_trace(), novelty=0.5)


def test_profiles_can_be_added_and_changed() -> None:
    extra = Profile(Weights(1.0, 0.0, 0.0, 0.0))
    profiles = {**PROFILES, "gardening": extra, "finance": extra}
    for domain in ("gardening", "finance"):
        score = score_trace(make_trace(domain=domain), 0.5, profiles)
        assert score.profile == domain
        assert score.score == score.components.complexity
    assert score_trace(make_trace(domain="code"), 0.5, profiles) == score_trace(make_trace(domain="code"))


@pytest.mark.parametrize(
    "values",
    [
        (0.25, 0.25, 0.25, 0.26),
        (0.25, 0.25, 0.25, 0.2499),
        (0.0, 0.0, 0.0, 0.0),
        (1.5, -0.5, 0.0, 0.0),
        (math.nan, 0.5, 0.25, 0.25),
        (math.inf, 0.0, 0.0, 0.0),
    ],
)
def test_weights_that_do_not_sum_to_1_are_refused(values: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"weight"):
        Weights(*values)


def test_weights_may_carry_rounding() -> None:
    Weights(0.1 + 0.2, 0.3, 0.2, 0.2)
    Weights(1 / 3, 1 / 3, 1 / 3, 0.0)


@pytest.mark.parametrize("novelty", [7.0, -0.1, 2.1, float("nan"), float("inf")])
def test_a_novelty_that_is_no_distance_is_refused(novelty: float) -> None:
    with pytest.raises(ValueError, match=r"novelty must lie in 0\.\.2"):
        score_trace(make_trace(), novelty=novelty)


def test_a_formula_is_shown_with_the_figures_of_the_trace() -> None:
    """explain and the status page show them; they are what `of` computes with."""
    counts = Counts(3, 2, 9, 4, 0.8712346, True)
    shown = [rule.numbers(counts) for rule in (COMPLEXITY, TOOL_DIVERSITY, OUTCOME_CONFIDENCE)]
    assert shown == ["min(1, 3 / 4 * 0.5 + 0.3 + 9 / 20 * 0.2)", "min(1, 4 / 9 * 3)", "0.871235 * 1"]
    for rule, text in zip((COMPLEXITY, TOOL_DIVERSITY, OUTCOME_CONFIDENCE), shown, strict=True):
        assert eval(text) == pytest.approx(rule.value(counts), abs=1e-6)
    failed = msgspec.structs.replace(counts, error_recoveries=0, success=False)
    assert COMPLEXITY.numbers(failed) == "min(1, 3 / 4 * 0.5 + 0 + 9 / 20 * 0.2)"
    assert OUTCOME_CONFIDENCE.numbers(failed) == "0.871235 * 0.3"


# -- which profile a domain without one may mean

NEAR = {
    "finance": ("Finance", "finance ", "\tfinance\u200b", "\uff26\uff49nance", "finanse"),
    "customer_service": ("customer-service", "Customer Service", "customerservice"),
    "medical": ("medcial",),
    "code": ("codes", "cdoe"),
    None: (
        *PROFILES, "legal", "research", "node", "mode", "decode", "medicine", "customer_support", "", " ", "-", "家",
        "x" * 10**6, "Default",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("profile", "domain"), [(profile, it) for profile, domains in NEAR.items() for it in domains])
def test_another_spelling_and_a_misspelling_are_near(domain: str, profile: str | None) -> None:
    assert near_miss(domain, PROFILES) == profile
    if profile is not None:
        assert score_trace(make_trace(domain=domain), 0.5).profile == "default"


@pytest.mark.parametrize(
    ("domain", "profiles", "profile"),
    [
        ("defaults", ["default"], None),  # what every domain takes anyway
        ("project-101", ["project-102"], None),
        ("Project 102", ["project-102"], "project-102"),
        ("Tax-Law", ["tax_laws", "tax_law"], "tax_law"),  # the exact spelling goes before a misspelling
        ("TAX", ["tax", "tax-"], "tax"),
        ("anything", [], None),
        ("家 計", ["家計", "-"], "家計"),
    ],
)
def test_the_nearest_of_some_profiles(domain: str, profiles: list[str], profile: str | None) -> None:
    assert near_miss(domain, profiles) == profile
