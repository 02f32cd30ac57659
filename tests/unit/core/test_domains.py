"""Which profile a domain without one may mean."""

from __future__ import annotations

import pytest

from tests.support.builders import make_trace
from worker.core.scoring import PROFILES, near_miss, score_trace


@pytest.mark.parametrize(
    ("domain", "profile"),
    [
        ("Finance", "finance"),
        ("finance ", "finance"),
        ("\tfinance\u200b", "finance"),
        ("\uff26\uff49nance", "finance"),
        ("customer-service", "customer_service"),
        ("Customer Service", "customer_service"),
        ("customerservice", "customer_service"),
        ("finanse", "finance"),
        ("medcial", "medical"),
        ("codes", "code"),
        ("cdoe", "code"),
    ],
)
def test_another_spelling_and_a_misspelling_are_near(domain: str, profile: str) -> None:
    assert near_miss(domain, PROFILES) == profile
    assert score_trace(make_trace(domain=domain), 0.5).profile == "default"


@pytest.mark.parametrize(
    "domain",
    [
        *PROFILES,
        "legal",
        "research",
        "node",
        "mode",
        "decode",
        "medicine",
        "customer_support",
        "",
        " ",
        "-",
        "家",
        "x" * 10**6,
    ],
)
def test_another_word_is_not(domain: str) -> None:
    assert near_miss(domain, PROFILES) is None


def test_default_is_what_every_domain_takes_anyway() -> None:
    assert near_miss("Default", PROFILES) is None
    assert near_miss("defaults", ["default"]) is None


def test_names_that_differ_in_a_number_are_different_names() -> None:
    assert near_miss("project-101", ["project-102"]) is None
    assert near_miss("Project 102", ["project-102"]) == "project-102"


def test_the_exact_spelling_goes_before_a_misspelling() -> None:
    assert near_miss("Tax-Law", ["tax_laws", "tax_law"]) == "tax_law"
    assert near_miss("TAX", ["tax", "tax-"]) == "tax"
    assert near_miss("anything", []) is None
    assert near_miss("家 計", ["家計", "-"]) == "家計"
