"""The strict rules: made-up secrets go, harmless texts stay, the reference is contained, and time is linear."""

import json
import random
import time
from typing import Any

import pytest

from tests.support.builders import read_jsonl
from tests.support.made_secrets import HARMLESS, made
from tests.support.redaction_oracle import random_text
from tests.support.surroundings import DATA as DATA_FOLDER
from worker.core.records import LEVELS, STRICT_TYPES
from worker.redact.documents import Rules, redact_document, redact_text
from worker.redact.forms import _keys
from worker.redact.markers import MOST_ON_A_LINE, most_secrets, own_pattern
from worker.redact.names import DATA
from worker.redact.strict import _RULES, _hints, fold


def strict(text: str, level: str = "aggregated") -> str:
    return redact_text(text, level, "strict")[0]


def test_made_up_secrets_in_their_surroundings_go(seed: int) -> None:
    """Of 5,000 drawn ones none stayed; where 0.1 % do, chance leaves 1.5 % of 2,000 in less than 1 of 10^9 runs."""
    rng = random.Random(seed)
    drawn = [secret for secret in (made(rng) for _ in range(2000)) if secret.secret in secret.text]
    assert len(drawn) > 1900
    left = [secret for secret in drawn if secret.secret in strict(secret.text)]
    assert len(left) < 0.015 * len(drawn), f"seed {seed}: {left}"
    reference = [secret for secret in drawn if secret.secret in redact_text(secret.text, "aggregated")[0]]
    assert len(reference) > 0.7 * len(drawn), (
        "the reference finds little of them; these texts are not what they should be"
    )


def test_harmless_texts_stay_as_the_reference_leaves_them() -> None:
    assert not [text for text in HARMLESS if strict(text) != redact_text(text, "aggregated")[0]]


def test_no_rule_finds_what_its_hint_does_not(seed: int) -> None:
    """A rule is asked only where its hint is, so a hint that is too narrow loses secrets without a word."""
    rng = random.Random(seed)
    texts = [made(rng).text if number % 2 else random_text(rng) for number in range(1200)]
    for original in (*texts, *HARMLESS):
        text = fold(redact_text(original, "aggregated")[0]).text
        hinted = _hints().Match(text.encode("utf-8", "surrogatepass")) or ()
        for number, (hint, find) in enumerate(_RULES):
            if number not in hinted:
                assert not list(find(text, text.lower())), f"seed {seed}: {hint!r} is not in {text!r}"


def test_private_keeps_what_only_identifies() -> None:
    text = "2001:db8::1 | +44 20 7946 0958 | ada@example.com"
    assert strict(text, "private") == text
    assert (
        strict("DB_PASSWORD=hunter2x 4111111111111111", "private") == "DB_PASSWORD=[REDACTED:password] [REDACTED:card]"
    )


@pytest.mark.slow
def test_the_reference_is_contained_and_twice_is_once(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(1500):
        text = random_text(rng) if number % 3 == 0 else " ".join(made(rng).text for _ in range(rng.randint(1, 3)))
        level = rng.choice(LEVELS)
        cleaned, least = redact_text(text, level)
        both, counts = redact_text(text, level, "strict")
        assert all(counts.get(kind, 0) >= count for kind, count in least.items()), f"seed {seed}: {text!r}"
        assert counts.keys() <= set(STRICT_TYPES)
        if number % 3:  # not for what no transcript has: a key that begins where another marker ends
            assert strict(both, level) == both, f"seed {seed}: {text!r}"
            assert strict(cleaned, level) == both, f"seed {seed}: {text!r}"


def test_unknown_rules_name_the_rules() -> None:
    with pytest.raises(ValueError, match="unknown rules 'all'; use one of reference, strict"):
        redact_text("", "aggregated", "all")


@pytest.mark.parametrize(
    ("document", "cleaned"),
    [
        ({"pwd": "hunter2", "passphrase": "a b"}, {"pwd": "*", "passphrase": "*"}),
        ({"credentials": {"user": "a", "key": "b"}, "tokens": ["a"]}, {"credentials": "*", "tokens": "*"}),
        (
            {"tokens": 512, "usage": {"tokens": {"in": 1}}, "pwd": "/tmp"},
            {"tokens": 512, "usage": {"tokens": {"in": 1}}, "pwd": "/tmp"},
        ),
        ({"env": [{"name": "DB_PASSWORD", "value": "x1y2"}]}, {"env": [{"name": "DB_PASSWORD", "value": "*"}]}),
        ({"env": [{"name": "PORT", "value": "x1y2"}]}, {"env": [{"name": "PORT", "value": "x1y2"}]}),
        ({"env": [{"name": "TOKEN_RO", "value": "a1B2c3D4"}]}, {"env": [{"name": "TOKEN_RO", "value": "*"}]}),
        ({"TOKEN_CACHE_EU": "on", "JIRA_PAT": "a1B2c3D4"}, {"TOKEN_CACHE_EU": "on", "JIRA_PAT": "*"}),
        ({"argv": ["t", "--password", "hunter2", "-v"]}, {"argv": ["t", "--password", "*", "-v"]}),
        ({"columns": ["username", "password", "email"]}, {"columns": ["username", "password", "email"]}),
        ({"Authorization": "Basic dXNlcjpwYXNz", "Cookie": "a=b"}, {"Authorization": "*", "Cookie": "*"}),
        ({"clientSecret": "${SECRET}", "max_tokens": 5}, {"clientSecret": "*", "max_tokens": 5}),
    ],
)
def test_members_of_documents(document: dict[str, Any], cleaned: dict[str, Any]) -> None:
    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: marked(item) for name, item in value.items()}
        if isinstance(value, list):
            return [marked(item) for item in value]
        return "[REDACTED:password]" if value == "*" else value

    redacted = redact_document({"input": document}, "aggregated", "strict")[0]
    assert redacted == {"input": marked(cleaned)}


PARTS = json.loads((DATA_FOLDER / "redaction_parts.json").read_text("utf-8"))


@pytest.mark.parametrize("part", PARTS["quick"])
def test_time_is_linear(part: str) -> None:
    """Eight times the text takes eight times the time, and 64 times if a rule is quadratic; the least of three."""

    def seconds(size: int) -> float:
        text = (part * size)[:size]
        least = float("inf")
        for _ in range(3):
            begun = time.process_time()
            strict(text)
            least = min(least, time.process_time() - begun)
        return least

    assert seconds(1 << 16) < 24 * seconds(1 << 13) + 0.02


def test_behind_the_most_secrets_of_a_rule_the_rest_is_one() -> None:
    most = most_secrets(60_000)
    cleaned, counts = redact_text("X_PASSWORD=a1b2 " * 3750, "aggregated", "strict")
    assert counts["password"] == most + 1
    assert "a1b2" not in cleaned


def test_places_are_those_of_the_original_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        text = "".join(
            rng.choices(
                ["a", "é", "\u200b", "\uff41", "\ufb01", "\\n", "\\u0041", "&amp;", "\\", "&", "日"],
                k=rng.randint(0, 12),
            )
        )
        folded = fold(text)
        start = rng.randint(0, len(folded.text))
        end = rng.randint(start, len(folded.text))
        if start < end:
            begin, until = folded.original(start, end)
            assert fold(text[begin:until]).text.find(folded.text[start:end]) >= 0, f"seed {seed}: {text!r}"


def test_patterns_of_a_team() -> None:
    rules = Rules(
        "reference", (own_pattern("customer", "KD-[0-9]{4}"), own_pattern("host", r"\b\w+\.corp\b", "(host)"))
    )
    text = "é KD-1234 on db1.corp\ud800, password=hunter2 KD-12"
    cleaned, counts = redact_text(text, "private", rules)
    assert cleaned == "é [REDACTED:customer] on (host)\ud800, password=[REDACTED:password] KD-12"
    assert counts == {"password": 1, "customer": 1, "host": 1}
    assert redact_text(cleaned, "private", rules) == (cleaned, {})


@pytest.mark.parametrize(
    ("name", "pattern", "words"),
    [
        ("Customer", "x", "is not a name"),
        ("a", "(x", "missing \\)"),
        ("a", "x*", "matches the empty text"),
        ("a", r"\b", "matches the empty text"),
        ("a", "(?=x)y", "RE2's"),
        ("a", r"(x)\1", "RE2's"),
        ("a", "REDACTED", "finds its own replacement"),
        ("a", r"\C", "bytes"),
    ],
)
def test_patterns_that_are_refused(name: str, pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        own_pattern(name, pattern)


def test_a_pattern_that_reads_on_takes_linear_time() -> None:
    """RE2 reads to the end of the line for each x: behind a bounded number the rest of the line becomes one marker."""
    rules = Rules("reference", (own_pattern("x", "x+y|x", "-"),))
    begun = time.process_time()
    cleaned, counts = redact_text("x" * (1 << 20) + "\nxa", "private", rules)
    assert time.process_time() - begun < 5
    assert (cleaned, counts) == ("-" * (MOST_ON_A_LINE + 1) + "\n-a", {"x": MOST_ON_A_LINE + 2})


def test_a_pattern_that_reads_a_long_line_again_for_each_match_stops_early() -> None:
    """Without the bound these 64 kB take 3.7 s of CPU, more than twice as long, and 1 MiB takes a minute."""
    rules = Rules("reference", (own_pattern("x", "(?:a|b)*a(?:a|b){20}X|a", "-"),))
    rng = random.Random(1)
    line = "".join(rng.choice("ab") for _ in range(1 << 16))
    cleaned, counts = redact_text(f"{line}\nxa", "private", rules)
    markers = counts["x"]
    assert 20 < markers < MOST_ON_A_LINE
    assert cleaned.replace("b", "") == "-" * (markers - 1) + "\nx-"
    assert len(cleaned) < 200


@pytest.mark.parametrize("case", read_jsonl("redaction_prose.jsonl") + read_jsonl("redaction_lines.jsonl"))
def test_listed_secrets_go_and_harmless_texts_stay_as_the_reference_leaves_them(case: dict[str, Any]) -> None:
    """Two lists that were written before the rules for what is in them."""
    cleaned = strict(case["text"])
    assert not [secret for secret in case["secrets"] if secret in cleaned]
    assert case["secrets"] or cleaned == redact_text(case["text"], "aggregated")[0]


RULE_LINES = read_jsonl("redaction_rules.jsonl")
"""A line for each alternative of the patterns of assigned.py, then for each rule and key of strict.toml."""


@pytest.mark.parametrize("case", RULE_LINES, ids=lambda case: case["text"])
def test_a_rule_finds_its_secret_and_nothing_else(case: dict[str, str]) -> None:
    assert strict(case["text"]) == case["cleaned"]


def test_each_rule_and_each_key_has_a_line() -> None:
    texts = [text for case in RULE_LINES for text in (case["text"], redact_text(case["text"], "aggregated")[0])]
    keys = [_keys([key], before) for name, before in (("anywhere", ""), ("at_words", "(?&begins)"))
            for key in DATA["services"][name]]  # fmt: skip
    for rule in (*_RULES, *keys):
        assert any(next(rule.find(text, text.lower()), None) for text in texts), rule.hint
