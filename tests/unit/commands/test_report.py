"""The numbers of `kp-worker report`, against brute force and against scoring anew."""

import math
import random
import statistics
import sys
import tomllib
from collections import Counter
from dataclasses import asdict, astuple
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import ClickException

from tests.support.builders import T0, trace_bytes
from tests.support.reports import (
    as_settings,
    changed,
    dump,
    outputs,
    random_documents,
    random_profiles,
    random_share,
    random_sources,
    report_of,
    run,
    scored,
    scored_document,
    taken,
)
from worker.commands.report.numbers import DOMAINS, NEAR, THRESHOLDS, Traces
from worker.commands.shared.thresholds import FEW_TRACES, LEAST_TRACES, config_to_paste, share_interval, share_threshold
from worker.config import Settings, load
from worker.core.scoring import PROFILES, Profile, Weights

# -- as they are


def test_the_numbers_are_those_of_brute_force_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    documents = random_documents(rng, rng.randint(1, 80))
    report = report_of(rng.sample(documents, len(documents)))
    assert report == report_of(documents)
    scores = [d["scoring"]["score"] for d in documents]
    total = report.total
    assert (total.traces, total.to_accepted, total.to_rejected) == (len(documents), 0, 0)
    assert total.before == total.after
    assert total.before.accepted == sum(score >= 0.75 for score in scores)
    assert total.before.reaching == pytest.approx([sum(s >= t for s in scores) / len(scores) for t in THRESHOLDS])
    assert sum(total.before.histogram) == len(documents)
    assert total.before.quantiles[2] == pytest.approx(statistics.median(scores))
    assert {row.domain for row in report.domains} == {d["metadata"]["task_domain"] for d in documents}
    for row in report.domains:
        own = [s for d, s in zip(documents, scores, strict=True) if d["metadata"]["task_domain"] == row.domain]
        assert (row.traces, row.before.accepted) == (len(own), sum(s >= 0.75 for s in own))
    for border in report.border:
        own = [d["scoring"]["score"] for d in documents if d["scoring"]["profile"] == border.profile]
        above, below = sorted(s for s in own if s >= 0.75)[:3], sorted((s for s in own if s < 0.75), reverse=True)[:3]
        assert [trace.before.score for trace in border.above] == above[::-1]
        assert [trace.before.score for trace in border.below] == below
    rules = Counter(rule for d in documents for rule in d["scoring"].get("screen", {"rules": []})["rules"])
    assert report.hidden_text == rules

    alike = [d["scoring"] for d in documents
             if d["scoring"]["nearest"] and d["scoring"]["nearest"]["similarity"] >= NEAR]  # fmt: skip
    passed = [s for s in alike if s["score"] >= 0.75]
    near = report.near_duplicates
    assert (near.traces, near.accepted, len(near.examples)) == (len(alike), len(passed), min(10, len(passed)))
    assert all(example in [(s["score"], *s["nearest"].values()) for s in passed]
               for example in ((trace.before.score, *nearest) for trace, *nearest in near.examples))  # fmt: skip


def test_the_threshold_is_that_of_the_last_trace_and_a_change_is_told() -> None:
    documents = [
        scored_document(0, threshold=0.6, score=0.7),
        scored_document(1, threshold=0.8, score=0.7, time_ms=T0 + 1),
    ]
    report = report_of(documents[::-1])
    assert (report.border[0].threshold, report.domains[0].before.threshold, report.total.before.threshold) == (0.8,) * 3
    assert (report.changed_within, report.total.before.accepted) == (["finance"], 1)
    mixed = report_of([scored_document(0), scored_document(1, domain="law", threshold=0.6)])
    assert (mixed.changed_within, mixed.total.before.threshold) == ([], None)


def test_many_domains_become_one_row() -> None:
    report = report_of([scored_document(n, domain=f"domain {n}") for n in range(DOMAINS + 7)])
    assert (len(report.domains), report.domains[-1].domain, report.domains[-1].traces) == (DOMAINS + 1, "7 others", 7)
    assert (report.other_domains, len(report.without_profile)) == (7, DOMAINS + 7)


def test_domains_without_a_profile_and_profiles_without_a_trace_are_named() -> None:
    domains = ["Finance", "legal", "legal", "finance", "medical", "finance "]
    sources = [trace_bytes(f"kp:trace:{n}", domain=domain) for n, domain in enumerate(domains)]
    report = report_of(outputs(sources), profiles={"leagl": {}, "art": {}})
    assert [astuple(domain) for domain in report.without_profile] == [
        ("legal", 2, "leagl"),
        ("Finance", 1, "finance"),
        ("finance ", 1, "finance"),
    ]
    assert [astuple(profile) for profile in report.unused_profiles] == [("leagl", "legal"), ("art", None)]
    own_profile = outputs([trace_bytes(domain="legal")], {**PROFILES, "legal": PROFILES["code"]})
    assert report_of(own_profile).without_profile == [], "the documents know the profile"


def test_the_last_by_record_time() -> None:
    traces = Traces(Settings())
    for number in (3, 1, 2, 0):
        traces.add(dump(scored_document(number, time_ms=T0 + number)), "", 1000 + number)
    assert traces.report("x", last=2).first.endswith(".002Z")
    assert traces.report("x", last=4, since_ms=1003).total.traces == 1
    with pytest.raises(ClickException, match="requested time range"):
        traces.report("x", since_ms=5000)
    with pytest.raises(ClickException, match="no documents"):
        taken([]).report("x")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json: "),
        (b'"\xff"', "not_utf8: "),
        (b"[1]", "document"),
        (b"", "empty_value: "),
        (trace_bytes(), "it is not scored: kp-worker score first"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too_deep: "),
        (trace_bytes().replace(b'"kp:trace:1"', b'"7"'), "invalid_value: id: "),
        (dump(scored_document(score=7)), "scoring.score"),
        (dump(scored_document()).replace(b'"rejected"', b'"perhaps"'), "neither accepted nor rejected"),
        (dump(scored_document()).replace(b'"stream_time": "2026', b'"stream_time": "26'), "stream_time"),
        (dump(scored_document()).replace(b'00.000Z", "embedder"', b'00.000", "embedder"'), "timezone"),
    ],
)
def test_what_cannot_be_read_is_counted_and_named(line: bytes, reason: str) -> None:
    traces = taken([line])
    assert traces.unreadable.count == 1
    with pytest.raises(ClickException, match=r"^none of 1 documents can be counted; line 1: ") as raised:
        traces.report("x")
    assert reason in str(raised.value)
    traces.add(dump(scored_document()), "line 2")
    assert traces.report("x").total.traces == 1


# -- with other settings


def test_scores_and_decisions_are_those_of_scoring_anew(seed: int) -> None:
    """To the last bit, with random traces, weights, profiles and thresholds."""
    rng = random.Random(seed)
    sources = random_sources(rng, rng.randint(1, 60))
    first = scored(sources, random_profiles(rng), rng.random())
    profiles, threshold = random_profiles(rng), rng.random()
    anew = {verdict.trace_id: verdict for verdict, _ in scored(sources, profiles, threshold)}
    before = {verdict.trace_id: verdict for verdict, _ in first}
    documents = [document for _, document in first]
    report = report_of(rng.sample(documents, len(documents)), **as_settings(profiles, threshold))
    changes = [name for name in before if before[name].accepted != anew[name].accepted]
    assert [trace.id for trace in report.changes.decisions] == changes
    for trace in [*report.changes.decisions, *(it for each in report.border for it in (*each.above, *each.below))]:
        for side, verdict in ((trace.before, before[trace.id]), (trace.after, anew[trace.id])):
            expected = (verdict.score, verdict.threshold, verdict.profile, verdict.accepted)
            assert (side.score, side.threshold, side.profile, side.decision == "accepted") == expected
    for row in (report.total, *report.domains):
        own = [name for name in before if row.domain in ("all", before[name].domain)]
        assert row.to_accepted == sum(anew[name].accepted for name in own if name in changes)
        assert row.to_rejected == sum(before[name].accepted for name in own if name in changes)
        for side, verdicts in ((row.before, before), (row.after, anew)):
            assert side.accepted == sum(verdicts[name].accepted for name in own)
            assert side.quantiles[2] == pytest.approx(statistics.median(verdicts[name].score for name in own))
    kept, accepted = report.changes.same_share, report.total.before.accepted
    if accepted:
        scores = sorted(verdict.score for verdict in anew.values())
        assert sum(score >= kept for score in scores) >= accepted >= sum(score > kept for score in scores) - 1


def test_the_settings_that_were_used_change_nothing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    profiles, threshold = random_profiles(rng), rng.random()
    documents = outputs(random_sources(rng, 40), profiles, threshold)
    report = report_of(documents, **as_settings(profiles, threshold))
    assert (report.total.traces, report.total.to_accepted, report.total.to_rejected) == (40, 0, 0)
    assert all(row.before == row.after for row in (report.total, *report.domains))
    (tmp_path / "pasted.toml").write_text(report.config or "", "utf-8")
    settings = load(tmp_path / "pasted.toml")
    assert (settings.threshold, settings.scoring_profiles()) == (threshold, profiles)


CHANGED = [
    ("scoring.score", 0.99, "score is 0.99, but "),
    ("scoring.components.novelty", 0.25, "novelty is 0.25, but 0.5 follows from the trace"),
    ("scoring.components.novelty", 7, "novelty must lie in 0..2"),
    ("scoring.components.complexity", 0.25, "complexity is 0.25, but "),
    ("scoring.decision", "rejected", "decision is 'rejected', but 'accepted' follows"),
    ("scoring.profile", "medical", "profile is 'medical', but 'default' follows"),
    ("scoring.overrides", ["single_thought"], "overrides is 'single_thought', but '' follows"),
    ("scoring.weights", {"complexity": 1, "novelty": 0, "tool_diversity": 0, "outcome_confidence": 0}, "score is "),
    ("outcome.confidence", 0.1, "outcome_confidence is 0.9, but 0.1 follows"),
    ("metadata.success", False, "outcome_confidence is 0.9, but 0.27 follows"),
]


@pytest.mark.parametrize(("path", "value", "reason"), CHANGED)
def test_a_document_that_was_changed_is_named_and_not_scored_again(path: str, value: object, reason: str) -> None:
    good, other = outputs([trace_bytes("kp:trace:1"), trace_bytes("kp:trace:2")], embed=False)
    report = report_of([good, changed(other, path, value)], threshold=0)
    [(where, problem)] = report.inconsistent.first
    assert (where, problem[:12]) == ("line 2", "kp:trace:2: ")
    assert reason in problem
    assert (report.inconsistent.count, report.total.traces) == (1, 1)
    assert report_of([good, changed(other, path, value)]).total.traces == 2, "as they are, both count"


def test_the_least_change_of_a_score_is_seen() -> None:
    [(verdict, document)] = scored([trace_bytes()], embed=False)
    other = changed(document, "scoring.score", verdict.score - sys.float_info.epsilon / 2)
    assert taken([other], rescore=True).inconsistent.count == 1
    assert taken([document], rescore=True).inconsistent.count == 0


# -- thresholds for a share


def test_proposals_are_those_of_brute_force(seed: int, tmp_path: Path) -> None:
    """With random profiles; and the config, once it is loaded, accepts what the proposal says."""
    rng = random.Random(seed)
    sources = random_sources(rng, rng.choice([rng.randint(1, 80), rng.randint(80, 400)]))
    documents = outputs(sources, random_profiles(rng))
    profiles, threshold, share = random_profiles(rng), rng.random(), random_share(rng)
    anew = [verdict for verdict, _ in scored(sources, profiles, threshold)]
    report = report_of(rng.sample(documents, len(documents)), share, **as_settings(profiles, threshold))
    proposal = report.share
    assert {row.domain: row.traces for row in proposal.domains} == Counter(verdict.domain for verdict in anew)
    accepted = 0
    for row in proposal.domains:
        own = [verdict for verdict in anew if verdict.domain == row.domain]
        scores = [verdict.score for verdict in own]
        new = [score for score in scores if score >= row.threshold]
        assert (row.profile, row.threshold_before) == (own[0].profile, own[0].threshold)
        assert (row.accepted_before, row.accepted) == (sum(verdict.accepted for verdict in own), len(new))
        accepted += len(new)
        if len(own) < LEAST_TRACES:
            assert (row.threshold, row.wanted, row.above, row.interval) == (own[0].threshold, None, None, None)
            continue
        assert row.wanted == math.ceil(share * len(own)) <= len(new)
        assert row.above == sum(score > min(new) for score in scores)
        assert row.interval == share_interval(np.array(scores), share)
    assert (proposal.accepted_before, proposal.accepted) == (sum(verdict.accepted for verdict in anew), accepted)

    (tmp_path / "proposed.toml").write_text(report.config or "", "utf-8")
    settings = load(tmp_path / "proposed.toml")
    pasted = report_of(documents, **as_settings(settings.scoring_profiles(), settings.threshold))
    assert {row.domain: row.after.accepted for row in pasted.domains} == {
        row.domain: row.accepted for row in proposal.domains
    }
    assert pasted.total.after.quantiles == report.total.after.quantiles, "the weights are the same"


def pasted_profiles(documents: list[bytes], share: Fraction = Fraction(1, 10), **settings: Any) -> dict[str, Any]:
    profiles: dict[str, Any] = tomllib.loads(report_of(documents, share, **settings).config or "").get("profiles", {})
    return profiles


def test_only_small_domains_beyond_the_largest_keep_their_threshold() -> None:
    big = [trace_bytes(f"kp:trace:b{n}", domain=f"big {n // FEW_TRACES}") for n in range(FEW_TRACES * (DOMAINS + 2))]
    small = [trace_bytes(f"kp:trace:s{n}", domain=f"small {n}") for n in range(9)]
    documents = outputs(small + big)
    report = report_of(documents, Fraction(1, 10))
    assert (len(report.share.domains), report.share.other_domains) == (DOMAINS + 2, 9)
    assert set(pasted_profiles(documents)) == {f"big {n}" for n in range(DOMAINS + 2)}


def legal(count: int = LEAST_TRACES, domain: str = "legal") -> list[bytes]:
    return outputs(trace_bytes(f"kp:trace:{domain}{n}", domain=domain) for n in range(count))


def test_a_domain_with_any_name_gets_a_profile() -> None:
    names = ["y" * 200, "default", '"]\nx = 1 #\\ \u202e\x7f家\U000e0041', " "]
    sources = [trace_bytes(f"kp:trace:{n}", domain=names[n % 4]) for n in range(4 * LEAST_TRACES)]
    config = report_of(outputs(sources), Fraction(1, 2)).config or ""
    assert set(tomllib.loads(config)["profiles"]) == set(names)
    assert config.replace("\n", "").isprintable()


def test_no_threshold_is_proposed_from_fewer_than_30_traces() -> None:
    assert pasted_profiles(legal(29)) == {}
    assert pasted_profiles(legal(30)).keys() == {"legal"}
    profiles = pasted_profiles([*legal(5), *legal(30, "default")])
    assert profiles["legal"]["threshold"] == 0.75 != profiles["default"]["threshold"], "it keeps its threshold"


# -- the threshold for a share, its interval, and settings as a config file


def test_a_threshold_accepts_what_the_order_statistic_accepts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        kinds = [rng.random() * rng.choice([1, 1e-3, 1e-20]) for _ in range(rng.randint(1, 30))]
        scores = [rng.choice([*kinds, 0.0, 1.0, math.nextafter(kinds[0], 1)]) for _ in range(rng.randint(1, 60))]
        share = random_share(rng)
        # Brute force: of all scores, the greatest that accepts at least the share.
        enough = [cut for cut in scores if Fraction(sum(s >= cut for s in scores), len(scores)) >= share]
        cutoff = max(enough)
        chosen = share_threshold(np.array(scores), share)
        assert [s >= chosen.threshold for s in scores] == [s >= cutoff for s in scores]
        assert 0 <= chosen.threshold <= cutoff
        assert chosen.accepted == sum(s >= cutoff for s in scores) >= chosen.wanted
        assert chosen.above == sum(s > cutoff for s in scores) < chosen.wanted
        assert chosen.wanted - 1 < share * len(scores) <= chosen.wanted


def test_a_threshold_is_a_short_decimal(seed: int) -> None:
    """No decimal with fewer digits, from two on, lies between the last accepted score and the one below."""
    rng = random.Random(seed)
    for _ in range(100):
        scores = [rng.random() for _ in range(rng.randint(2, 200))]
        share = random_share(rng)
        chosen = share_threshold(np.array(scores), share)
        below = max((s for s in scores if s < chosen.threshold), default=-1.0)
        cutoff = min(s for s in scores if s >= chosen.threshold)
        digits = len(np.format_float_positional(chosen.threshold, trim="-").partition(".")[2])
        assert digits <= 17
        for fewer in range(2, digits):
            floor = Fraction(math.floor(Fraction(repr(cutoff)) * 10**fewer), 10**fewer)
            assert float(floor) <= below


@pytest.mark.parametrize(
    ("scores", "share", "expected"),
    [
        ([0.3, 0.4567, 0.8], Fraction(34, 100), (0.45, 2, 2, 1)),
        ([0.3, 0.456, 0.457, 0.8], Fraction(1, 2), (0.457, 2, 2, 1)),
        ([0.4567] * 7, Fraction(1, 10), (0.45, 1, 7, 0)),
        ([0.2, 0.6, 0.6, 0.6, 0.9], Fraction(4, 10), (0.6, 2, 4, 1)),
        ([0.0, 0.0], Fraction(1), (0.0, 2, 2, 0)),
        ([i / 1000 for i in range(100)], Fraction(7, 100), (0.093, 7, 7, 6)),  # 0.07 * 100 > 7 in floats
    ],
)
def test_thresholds_by_hand(scores: list[float], share: Fraction, expected: tuple[float, int, int, int]) -> None:
    assert share_threshold(np.array(scores), share) == expected


def test_the_interval_is_that_of_resampled_scores(seed: int) -> None:
    """Against resampling as such: the share of resamples whose threshold lies below an end is what it should be."""
    rng = np.random.default_rng(seed)
    for count, share in ((40, Fraction(1, 10)), (200, Fraction(1, 2)), (300, Fraction(1, 50)), (30, Fraction(1))):
        scores = rng.random(count)
        low, high = share_interval(scores, share, seed)
        resamples = np.sort(rng.choice(scores, (4000, count)), axis=1)
        cutoffs = resamples[:, count - math.ceil(share * count)]
        # Two samples of 4000 and 2000 and the steps between scores: 5 standard deviations are .02.
        assert (cutoffs < low).mean() < 0.025 + 0.02
        assert (cutoffs <= low).mean() > 0.025 - 0.02
        assert (cutoffs > high).mean() < 0.025 + 0.02
        assert (cutoffs >= high).mean() > 0.025 - 0.02
        assert low <= share_threshold(scores, share).threshold + 0.01 <= high + 0.01
        assert share_interval(scores, share, seed) == (low, high)


@pytest.mark.parametrize("text", ["0", "0%", "1.5", "101%", "-0.1", "nan", "1/3", "1e-9", "", "%", "ten"])
def test_a_wrong_share_is_refused(text: str) -> None:
    result = run("-", "--share", text, data=b"")
    assert (result.exit_code, "give a share above 0 and up to 1, such as 0.1 or 10%" in result.stderr) == (2, True)


def test_the_config_to_paste_holds_only_what_differs() -> None:
    assert config_to_paste(PROFILES, 0.75) == ""
    assert config_to_paste({**PROFILES, "code": Profile(PROFILES["code"].weights, 0.6)}, 0.75) == (
        "[profiles.code]\nthreshold = 0.6"
    )
    inherited, other = Profile(PROFILES["default"].weights), Profile(PROFILES["code"].weights)
    assert config_to_paste({**PROFILES, "legal": inherited}, 0.75) == "[profiles.legal]"
    for legal in (inherited, other):  # the file changes what a profile without weights takes
        text = config_to_paste({**PROFILES, "default": other, "legal": legal}, 0.75)
        assert tomllib.loads(text)["profiles"]["legal"]["weights"] == asdict(legal.weights)
    only_complexity = Weights(1, 0, 0, 0)
    text = config_to_paste({**PROFILES, "a b": Profile(only_complexity)}, 0.75)
    assert tomllib.loads(text) == {"profiles": {"a b": {"weights": asdict(only_complexity)}}}
