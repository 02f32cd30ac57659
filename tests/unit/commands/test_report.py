"""The numbers of a report, against a brute-force oracle on random documents."""

import itertools
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import T0, trace_document
from tests.support.reports import dump, random_documents, scored_document, summary_of
from worker.commands.analysis.documents import DOMAINS_SHOWN, NoDocuments
from worker.commands.analysis.report_numbers import (
    COMPONENTS,
    CURVE,
    SHARES,
    THRESHOLDS,
    Traces,
    summarize,
)
from worker.commands.shared.shown import TEXT_LENGTH, shown_text
from worker.config import load
from worker.core.scoring import PROFILES


def brute_clusters(documents: list[dict[str, Any]], limit: float) -> list[set[int]]:
    """Join ids that are linked, again and again, until nothing changes."""
    sets = [{document["id"]} for document in documents]
    for document in documents:
        nearest = document["scoring"]["nearest"]
        if nearest is not None and nearest["similarity"] >= limit:
            sets.append({document["id"], nearest["id"]})
    linked = {name for found in sets if len(found) > 1 for name in found} | {
        d["id"] for d in documents
        if d["scoring"]["nearest"] and d["scoring"]["nearest"]["similarity"] >= limit
    }  # fmt: skip
    changed = True
    while changed:
        changed = False
        for one, other in itertools.combinations(sets, 2):
            if one & other:
                one.update(other)
                sets.remove(other)
                changed = True
                break
    rows = [{n for n, d in enumerate(documents) if d["id"] in found and found & linked} for found in sets]
    return [found for found in rows if len(found) >= 2]


def test_the_numbers_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    documents = random_documents(rng, rng.randint(1, 80))
    limit = rng.choice([0.3, 0.6, 0.9])
    shuffled = [*documents]
    rng.shuffle(shuffled)
    summary = summary_of(shuffled, similarity=limit)
    scores = [d["scoring"]["score"] for d in documents]

    assert summary.total.count == len(documents)
    assert summary.total.accepted == sum(score >= 0.75 for score in scores)
    assert summary.total.passing == pytest.approx([sum(s >= t for s in scores) / len(scores) for t in THRESHOLDS])
    assert summary.total.curve == pytest.approx([sum(s >= t for s in scores) / len(scores) for t in CURVE])
    assert sum(summary.total.histogram) == len(documents)
    assert summary.total.quartiles[1] == pytest.approx(statistics.median(scores))
    for share, (cutoff, more) in zip(SHARES, summary.total.cutoffs, strict=True):
        reaching = sum(s >= cutoff for s in scores)
        assert reaching >= share * len(scores)
        assert sum(s > cutoff for s in scores) < share * len(scores)
        exceeded = reaching - 1 >= share * len(scores)
        assert more == (pytest.approx(reaching / len(scores)) if exceeded else None)

    for profile in summary.profiles:
        of = [d for d in documents if d["scoring"]["profile"] == profile.group.name]
        parts = [[w * d["scoring"]["components"][c] for w, c in zip(profile.weights, COMPONENTS, strict=True)]
                 for d in of]  # fmt: skip
        sums = [sum(part) for part in parts]
        columns = list(zip(*parts, strict=True))
        assert profile.group.count == len(of)
        assert profile.means == pytest.approx([statistics.mean(d["scoring"]["components"][c] for d in of)
                                               for c in COMPONENTS])  # fmt: skip
        assert profile.shares == pytest.approx([sum(column) / sum(sums) for column in columns])
        if len(of) < 2:
            assert profile.spread is None
        else:
            variance = statistics.variance(sums)
            assert profile.spread == pytest.approx([statistics.covariance(c, sums) / variance for c in columns])
        above = sorted(s for d in of if (s := d["scoring"]["score"]) >= 0.75)[:3]
        below = sorted((s for d in of if (s := d["scoring"]["score"]) < 0.75), reverse=True)[:3]
        assert [example.score for example in profile.above] == above[::-1]
        assert [example.score for example in profile.below] == below

    domains = {d["metadata"]["task_domain"] for d in documents}
    assert {group.name for group in summary.domains} == domains
    for group in summary.domains:
        of_domain = [s for d, s in zip(documents, scores, strict=True) if d["metadata"]["task_domain"] == group.name]
        assert (group.count, group.accepted) == (len(of_domain), sum(s >= 0.75 for s in of_domain))
    for override, count, accepted in summary.overrides:
        hit = [s for d, s in zip(documents, scores, strict=True) if override in d["scoring"]["overrides"]]
        assert (count, accepted) == (len(hit), sum(s >= 0.75 for s in hit))

    screened = [(d["scoring"]["screen"]["rules"], s) for d, s in zip(documents, scores, strict=True)
                if "screen" in d["scoring"]]  # fmt: skip
    assert (summary.screened, summary.marked) == (len(screened), sum(rules != [] for rules, _ in screened))
    assert {rule for rule, _, _ in summary.rules} == {rule for rules, _ in screened for rule in rules}
    for rule, count, accepted in summary.rules:
        hit = [s for rules, s in screened if rule in rules]
        assert (count, accepted) == (len(hit), sum(s >= 0.75 for s in hit))

    expected = brute_clusters(documents, limit)
    assert summary.cluster_count == len(expected)
    assert summary.clustered == sum(map(len, expected))
    assert [cluster.size for cluster in summary.clusters] == sorted(map(len, expected), reverse=True)[:10]
    near = [d["scoring"] for d in documents
            if d["scoring"]["nearest"] and d["scoring"]["nearest"]["similarity"] >= limit]  # fmt: skip
    assert summary.near_duplicates == len(near)
    assert summary.near_duplicates_accepted == sum(s["score"] >= 0.75 for s in near)
    assert [e.steps for e in summary.longest] == sorted((len(d["steps"]) for d in documents), reverse=True)[:10]
    latencies = sorted((sum(s["latency_ms"] for s in d["steps"]) for d in documents), reverse=True)
    assert [e.latency_ms for e in summary.slowest] == [value for value in latencies if value > 0][:10]
    assert sum(moment.count for moment in summary.moments) == len(documents)


def test_the_config_accepts_the_best_tenth_of_each_domain(seed: int, tmp_path: Path) -> None:
    documents = random_documents(random.Random(seed), 120)
    path = tmp_path / "kp-worker.toml"
    path.write_text(summary_of(documents).config, "utf-8")
    profiles = load(path).scoring_profiles()
    for domain in {d["metadata"]["task_domain"] for d in documents}:
        scores = [d["scoring"]["score"] for d in documents if d["metadata"]["task_domain"] == domain]
        threshold = profiles[domain].threshold
        assert threshold is not None
        cutoff = max(s for s in scores if 10 * sum(other >= s for other in scores) >= len(scores))
        assert [s >= threshold for s in scores] == [s >= cutoff for s in scores]
        weights = (PROFILES.get(domain) or PROFILES["default"]).weights
        assert profiles[domain].weights == weights


def test_the_config_says_what_its_thresholds_rest_on() -> None:
    documents = [scored_document(n, score=n / 60) for n in range(60)]
    documents += [scored_document(n, domain=domain, score=0.4567) for n, domain in ((60, "legal"), (61, "x" * 161))]
    assert summary_of(documents).config == (
        "[profiles.finance]\nthreshold = 0.9  # accepts 6 of 60\n\n"
        "[profiles.legal]\nthreshold = 0.45  # accepts 1 of 1; fewer than 50 traces say little"
    )


def test_the_order_of_documents_does_not_count(seed: int) -> None:
    rng = random.Random(seed)
    documents = random_documents(rng, 60)
    first = summary_of(documents)
    rng.shuffle(documents)
    assert summary_of(documents) == first


def test_a_cluster_is_a_chain_and_names_its_first_traces() -> None:
    documents = [
        scored_document(n, nearest=None if n == 0 else (f"kp:trace:{n - 1}", 0.95), time_ms=T0 + n) for n in range(5)
    ]
    documents.append(scored_document(9, nearest=("kp:trace:0", 0.89)))
    [cluster] = summary_of(documents).clusters
    assert (cluster.size, cluster.similarity, cluster.last_ms - cluster.first_ms) == (5, 0.95, 4)
    assert [example.id for example in cluster.examples] == ["kp:trace:0", "kp:trace:1", "kp:trace:2"]


def test_a_long_id_is_found_by_the_part_that_the_worker_keeps() -> None:
    long = "kp:trace:" + "x" * 400
    documents = [scored_document(0, trace_id=long), scored_document(1, nearest=(long[:256], 0.99), time_ms=T0 + 1)]
    summary = summary_of(documents)
    assert [cluster.size for cluster in summary.clusters] == [2]
    assert len(summary.clusters[0].examples[0].id) == TEXT_LENGTH


def test_a_document_that_came_twice_counts_once() -> None:
    documents = [scored_document(n) for n in (0, 1, 1, 1)]
    summary = summary_of(documents)
    assert (summary.total.count, summary.repeated) == (2, 2)


def test_the_threshold_in_force_is_that_of_the_last_trace() -> None:
    documents = [
        scored_document(0, threshold=0.6, score=0.7),
        scored_document(1, threshold=0.8, score=0.7, time_ms=T0 + 1),
    ]
    [profile] = summary_of(documents[::-1]).profiles
    assert (profile.threshold, profile.setups, profile.group.accepted) == (0.8, 2, 1)
    assert profile.above == []


def test_many_domains_become_one_row() -> None:
    documents = [scored_document(n, domain=f"domain {n}") for n in range(DOMAINS_SHOWN + 7)]
    summary = summary_of(documents)
    assert len(summary.domains) == DOMAINS_SHOWN + 1
    assert (summary.domains[-1].name, summary.domains[-1].count, summary.other_domains) == ("7 others", 7, 7)


def test_the_last_by_record_time() -> None:
    traces = Traces()
    for number in (3, 1, 2, 0):
        traces.add(dump(scored_document(number, time_ms=T0 + number)), "", 1000 + number)
    assert summarize(traces, last=2).first_ms == T0 + 2
    assert summarize(traces, last=4, since_ms=1003).total.count == 1
    with pytest.raises(NoDocuments, match="requested time range"):
        summarize(traces, since_ms=5000)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "truncated"),
        (b"\xff", "malformed"),
        (b"[1]", "an array is not allowed; give an object"),
        (dump(trace_document()), r"score it first \(kp-worker score\)"),
        (dump(scored_document(score=7)), "scoring.score"),
        (dump(scored_document()).replace(b'"rejected"', b'"perhaps"'), "neither accepted nor rejected"),
        (dump(scored_document()).replace(b'"stream_time": "2026', b'"stream_time": "26'), "stream_time"),
        (dump(scored_document()).replace(b'00.000Z", "embedder"', b'00.000", "embedder"'), "timezone"),
        (None, "no value"),
    ],
)
def test_what_cannot_be_read_is_counted_and_named(line: bytes | None, reason: str) -> None:
    traces = Traces()
    traces.add(line, "line 7")
    assert traces.unreadable.count == 1
    with pytest.raises(NoDocuments, match=rf"none of 1 documents can be read; line 7: .*{reason}"):
        summarize(traces)
    traces.add(dump(scored_document()), "line 8")
    assert summarize(traces).total.count == 1


def test_nothing_is_an_error() -> None:
    with pytest.raises(NoDocuments, match="no documents"):
        summarize(Traces())


def test_shown_texts_have_no_control_characters() -> None:
    assert shown_text("a\x00b\tc\u202ed\ufffe") == r"a\x00b c\u202ed\ufffe"
    assert shown_text("家👩\u200d🚒") == "家👩\u200d🚒"
    assert shown_text("x" * 200) == "x" * (TEXT_LENGTH - 1) + "…"
