"""`kp-worker whatif --share`: thresholds against a brute-force oracle, firsts and repeats, and the config to paste."""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.support.builders import trace_bytes
from tests.support.reports import parsed, words
from tests.support.whatif import changed, random_profiles, random_sources, rescored, scored, whatif
from worker.commands.analysis.whatif_numbers import DOMAINS_SHOWN, BeforeAndAfter, RescoredTraces, propose
from worker.commands.shared.shown import TEXT_LENGTH
from worker.commands.shared.thresholds import FEW_TRACES, LEAST_TRACES, parse_share, share_interval, share_threshold
from worker.config import load
from worker.core.scoring import PROFILES

TASK = "x.task"
"""A label that is nested; `with_task` adds it."""


def with_task(document: bytes, task: object) -> bytes:
    decoded = json.loads(document)
    return json.dumps(decoded | {"x": {"task": task}} if task is not None else decoded).encode()


def random_share(rng: random.Random) -> Fraction:
    return rng.choice([Fraction(1, 10), Fraction(1), Fraction(1, 1000), Fraction(rng.randint(1, 999), 1000)])


def decimals(number: float) -> int:
    return len(np.format_float_positional(number, trim="-").partition(".")[2])


# -- one threshold


def test_a_threshold_accepts_what_the_order_statistic_accepts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        kinds = [rng.random() * rng.choice([1, 1e-3, 1e-20]) for _ in range(rng.randint(1, 30))]
        scores = [rng.choice([*kinds, 0.0, 1.0, math.nextafter(kinds[0], 1)]) for _ in range(rng.randint(1, 60))]
        share = random_share(rng)
        # Brute force: of all scores, the greatest that accepts at least the share.
        enough = [cut for cut in scores if Fraction(sum(s >= cut for s in scores), len(scores)) >= share]
        cutoff = max(enough)
        found = share_threshold(np.array(scores), share)
        assert [s >= found.threshold for s in scores] == [s >= cutoff for s in scores]
        assert 0 <= found.threshold <= cutoff
        assert found.accepted == sum(s >= cutoff for s in scores) >= found.wanted
        assert found.above == sum(s > cutoff for s in scores) < found.wanted
        assert found.wanted - 1 < share * len(scores) <= found.wanted


def test_a_threshold_is_a_short_decimal(seed: int) -> None:
    """No decimal with fewer digits, from two on, lies between the last accepted score and the one below."""
    rng = random.Random(seed)
    for _ in range(100):
        scores = [rng.random() for _ in range(rng.randint(2, 200))]
        share = random_share(rng)
        found = share_threshold(np.array(scores), share)
        below = max((s for s in scores if s < found.threshold), default=-1.0)
        cutoff = min(s for s in scores if s >= found.threshold)
        digits = decimals(found.threshold)
        assert digits <= 17
        for fewer in range(2, digits):
            floor = Fraction(math.floor(Fraction(repr(cutoff)) * 10**fewer), 10**fewer)
            assert float(floor) <= below


@pytest.mark.parametrize(
    ("scores", "share", "expected"),
    [
        ([0.3, 0.4567, 0.8], "34%", (0.45, 2, 2, 1)),
        ([0.3, 0.456, 0.457, 0.8], "0.5", (0.457, 2, 2, 1)),
        ([0.4567] * 7, ".1", (0.45, 1, 7, 0)),
        ([0.2, 0.6, 0.6, 0.6, 0.9], "40%", (0.6, 2, 4, 1)),
        ([0.0, 0.0], "1", (0.0, 2, 2, 0)),
        ([i / 1000 for i in range(100)], "7%", (0.093, 7, 7, 6)),  # 0.07 * 100 > 7 in floats
    ],
)
def test_thresholds_by_hand(scores: list[float], share: str, expected: tuple[float, int, int, int]) -> None:
    assert share_threshold(np.array(scores), parse_share(share)) == expected


def test_the_interval_is_that_of_resampled_scores(seed: int) -> None:
    """Against resampling as such: the share of resamples whose threshold lies below an end is what it should be."""
    rng = np.random.default_rng(seed)
    for count, share in ((40, Fraction(1, 10)), (200, Fraction(1, 2)), (300, Fraction(1, 50))):
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


def test_the_interval_of_more_traces_is_narrower_and_of_equal_scores_a_point() -> None:
    def width(count: int) -> float:
        low, high = share_interval(np.arange(count) / count, Fraction(1, 10))
        return high - low

    assert width(30) > 2 * width(300) > 4 * width(10_000) > 0
    assert share_interval(np.full(30, 0.4), Fraction(1, 3)) == (0.4, 0.4)
    assert share_interval(np.arange(30) / 30, Fraction(1)) == (0.0, share_interval(np.arange(30) / 30, Fraction(1))[1])


@pytest.mark.parametrize("text", ["0", "0%", "1.5", "101%", "-0.1", "nan", "1/3", "1e-9", "", "%", "ten"])
def test_a_wrong_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a share above 0 and up to 1, such as 0"):
        parse_share(text)
    result = whatif("-", "--share", text, data=b"")
    assert (result.exit_code, "--share" in result.stderr) == (2, True)


# -- by domain, and with labels


def test_proposals_are_those_of_brute_force(seed: int, tmp_path: Path) -> None:
    """With random profiles; and the config, once it is loaded, accepts what the proposal says."""
    rng = random.Random(seed)
    sources = random_sources(rng, rng.choice([rng.randint(1, 80), rng.randint(80, 400)]))
    tasks = [rng.choice([None, 1, "1", "a", "b", "c", 2.5, True, {}, []]) for _ in sources]
    documents = [with_task(d, task) for (_, d), task in zip(scored(sources, random_profiles(rng)), tasks, strict=True)]
    profiles, threshold, share = random_profiles(rng), rng.random(), random_share(rng)
    traces = RescoredTraces(profiles, threshold, TASK)
    for document in rng.sample(documents, len(documents)):
        traces.add(document, "")
    labels = [None if task is None or isinstance(task, dict | list) else str(task) for task in tasks]
    if not any(labels):
        return
    anew = [verdict for verdict, _ in scored(sources, profiles, threshold)]
    domains = [json.loads(source)["metadata"]["task_domain"] for source in sources]
    seen = [set(zip(domains[:at], labels[:at], strict=True)) for at in range(len(labels))]
    first = [label is not None and (domains[at], label) not in seen[at] for at, label in enumerate(labels)]
    repeat = [label is not None and (domains[at], label) in seen[at] for at, label in enumerate(labels)]

    proposal = propose(traces, share, "x")
    assert {row.domain: row.traces for row in proposal.domains} == Counter(domains)
    for row in [*proposal.domains, proposal.total]:
        at = [n for n, domain in enumerate(domains) if row.domain in (domain, "all")]
        limits = {it.domain: it.proposed.threshold for it in proposal.domains}
        new = [n for n in at if anew[n].score >= limits[domains[n]]]
        old = [n for n in at if anew[n].accepted]
        for counted, of in ((row.labels, at), (row.current.labels, old), (row.proposed.labels, new)):
            assert counted is not None
            assert (counted.firsts, counted.repeats) == (sum(first[n] for n in of), sum(repeat[n] for n in of))
        assert (row.traces, row.current.accepted, row.proposed.accepted) == (len(at), len(old), len(new))
        if row is not proposal.total:
            assert row.profile == anew[at[0]].profile
            assert row.current.threshold == anew[at[0]].threshold
            if len(at) < LEAST_TRACES:
                assert (row.proposed, row.wanted, row.above, row.interval) == (row.current, None, None, None)
                continue
            assert row.wanted == math.ceil(share * len(at)) <= len(new)
            assert row.above == sum(anew[n].score > min(anew[m].score for m in new) for n in at)
            assert row.interval == share_interval(np.array([anew[n].score for n in at]), share)
    assert proposal.unlabelled == labels.count(None)

    path = tmp_path / "proposed.toml"
    path.write_text(proposal.config, "utf-8")
    settings = load(path)
    with_config = BeforeAndAfter(rescored(documents, settings.scoring_profiles(), settings.threshold)).summary("x", 0)
    assert {row.domain: row.after.accepted for row in with_config.domains} == {
        row.domain: row.proposed.accepted for row in proposal.domains
    }
    assert [trace.score for trace in anew] == [
        trace.after.score
        for trace in BeforeAndAfter(rescored(documents, settings.scoring_profiles(), settings.threshold))
    ]


def test_only_small_domains_beyond_the_largest_keep_their_threshold() -> None:
    big = [
        trace_bytes(f"kp:trace:b{n}", domain=f"big {n // FEW_TRACES}") for n in range(FEW_TRACES * (DOMAINS_SHOWN + 2))
    ]
    small = [trace_bytes(f"kp:trace:s{n}", domain=f"small {n}") for n in range(9)]
    proposal = propose(rescored([d for _, d in scored(small + big)]), Fraction(1, 10), "x")
    assert len(proposal.domains) == DOMAINS_SHOWN + 2
    assert proposal.other_domains == 9
    assert set(tomllib.loads(proposal.config)["profiles"]) == {f"big {n}" for n in range(DOMAINS_SHOWN + 2)}
    moved = sum(row.proposed.accepted - row.current.accepted for row in proposal.domains)
    assert proposal.total.proposed.accepted == proposal.total.current.accepted + moved


def test_a_domain_with_a_name_that_is_cut_gets_no_profile() -> None:
    names = ["x" * TEXT_LENGTH, "y" * (TEXT_LENGTH + 1), "default", '"\n[a]', " "]
    documents = [
        d for _, d in scored([trace_bytes(f"kp:trace:{n}", domain=names[n % 5]) for n in range(5 * LEAST_TRACES)])
    ]
    proposal = propose(rescored(documents), Fraction(1, 2), "x")
    assert proposal.cut == ["y" * (TEXT_LENGTH - 1) + "…"]
    assert set(tomllib.loads(proposal.config)["profiles"]) == {names[0], *names[2:]}


def legal_documents(count: int = LEAST_TRACES, domain: str = "legal") -> list[bytes]:
    return [d for _, d in scored([trace_bytes(f"kp:trace:{domain}{n}", domain=domain) for n in range(count)])]


def test_no_threshold_is_proposed_from_fewer_than_30_traces() -> None:
    few, enough = (propose(rescored(legal_documents(count)), Fraction(1, 10), "x") for count in (29, 30))
    assert few.config == ""
    assert few.domains[0].proposed == few.domains[0].current
    assert few.total.proposed == few.total.current
    assert enough.domains[0].interval is not None
    assert "95% interval" in enough.config
    told = whatif("-", "--share", "10%", "--text", data=b"\n".join(legal_documents(29))).stdout
    wanted = "legal: 29 traces are too few to propose a threshold (30 at least); it keeps its threshold"
    assert wanted in " ".join(told.split())


def test_a_domain_without_a_proposal_keeps_its_threshold_where_that_of_default_moves() -> None:
    documents = [*legal_documents(5), *legal_documents(30, "default")]
    proposal = propose(rescored(documents), Fraction(1, 10), "x")
    profiles = tomllib.loads(proposal.config)["profiles"]
    assert profiles["legal"]["threshold"] == 0.75 != profiles["default"]["threshold"]


def test_a_new_profile_has_the_weights_of_the_default() -> None:
    documents = legal_documents()
    weights = PROFILES["code"]
    plain = tomllib.loads(propose(rescored(documents), Fraction(1), "x").config)
    assert plain["profiles"]["legal"].keys() == {"threshold"}
    proposal = propose(rescored(documents, {**PROFILES, "default": weights}), Fraction(1), "x")
    assert tomllib.loads(proposal.config)["profiles"]["legal"]["weights"]["novelty"] == weights.weights.novelty


# -- the command


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rng = random.Random(5)
    path = tmp_path / "scored.jsonl"
    rows = [document for _, document in scored(random_sources(rng, 160))]
    path.write_bytes(b"\n".join(with_task(row, None if n % 10 == 0 else n % 7) for n, row in enumerate(rows)))
    return path


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_text_of_proposals_fits_a_terminal(documents: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.commands.shared.console.PIPE_WIDTH", int(columns))
    result = whatif(str(documents), "--share", "10%", "--label", TASK, "--text")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.split("\n"))) <= int(columns)
    told = " ".join(result.stdout.split())
    assert "160 traces of scored.jsonl thresholds for the best 10% of each domain; accepted of all: " in told
    assert "without a profile: gardening. Such domains share the threshold of default" in told
    assert "traces are few; the threshold may accept another share of the next ones" in told
    assert f"no label at {TASK}: 16" in result.stderr
    pasted = tomllib.loads(result.stdout[result.stdout.index("KP_CONFIG):") :].partition("\n")[2])
    found = json.loads(whatif(str(documents), "--share", "0.1", "--label", TASK).stdout)
    assert pasted == tomllib.loads(found["config"])
    assert {name: p["threshold"] for name, p in pasted["profiles"].items()} == {
        row["domain"]: row["proposed"]["threshold"] for row in found["domains"]
    }


@pytest.mark.slow
def test_the_page_has_the_proposals_with_their_intervals(documents: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = whatif(str(documents), "--share", "10%", "--label", TASK, "--page", str(page), "--json")
    assert result.exit_code == 0, result.output
    root, told, found = parsed(page.read_text("utf-8")), words(page.read_text("utf-8")), json.loads(result.stdout)
    for row in found["domains"]:
        low, high = row["interval"]
        assert f"{low:.3f}\u2013{high:.3f}" in told
    thresholds, labels = root.iter("table")
    assert len(list(thresholds.iter("tr"))) == len(list(labels.iter("tr"))) == 2 + len(found["domains"])
    assert len(list(root.iter("figure"))) == 1
    assert "traces are few; the threshold may accept another share of the next ones" in told
    assert "since they have none: 16." in told
    few = [document for _, document in scored([trace_bytes(f"kp:trace:{n}") for n in range(3)], embed=False)]
    assert whatif("-", "--share", "1", "--page", str(page), data=b"\n".join(few)).exit_code == 0
    root = parsed(page.read_text("utf-8"))
    assert not list(root.iter("figure"))
    assert "3 traces are too few to propose a threshold" in words(page.read_text("utf-8"))


def test_ties_near_misses_and_default_are_said() -> None:
    sources = [trace_bytes(f"kp:trace:{n}", domain=("Finance", "default")[n % 2]) for n in range(60)]
    data = b"\n".join(document for _, document in scored(sources, embed=False))
    told = " ".join(whatif("-", "--share", "10%", "--text", data=data).stdout.split())
    assert "Finance: 30 traces tie, so 30 are accepted, not 3; a threshold above the tie accepts 0" in told
    assert "Finance has no profile; did you mean finance?" in told
    assert "default: its threshold also applies to every domain without a profile" in told


def test_long_names_do_not_break_the_config() -> None:
    name = "long name " * 15
    data = b"\n".join(legal_documents(domain=name))
    shown = whatif("-", "--share", "1", "--text", data=data, COLUMNS="80").stdout
    assert name in tomllib.loads(shown[shown.index("KP_CONFIG):") :].partition("\n")[2])["profiles"]


@pytest.mark.parametrize("bad", [b'"\\ud800"', b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b"NaN"])
def test_a_label_that_cannot_be_read_stops_nothing(bad: bytes) -> None:
    good, other = (d for _, d in scored([trace_bytes("kp:trace:1"), trace_bytes("kp:trace:2")], embed=False))
    lines = [changed(good, "x_task", "a"), other[:-1] + b',"x_task":' + bad + b"}"]
    result = whatif("-", "--share", "1", "--label", "x_task", data=b"\n".join(lines))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["total"]["traces"] + found["unreadable"]["count"] == 2


def test_no_label_anywhere_is_an_error(documents: Path) -> None:
    result = whatif(str(documents), "--share", "1", "--label", "x.ticket")
    assert result.exit_code == 1
    assert "none of 160 traces has a label at x.ticket: --label names a field with text or a number" in result.stderr
    assert "metadata, outcome, scoring, steps, task" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--label", "x"], "--label requires --share"),
        (["--share", "0.1", "--export", "csv"], "--share cannot be used with --flips or --export"),
        (["--share", "0.1", "--flips", "0"], "--share cannot be used with --flips or --export"),
    ],
)
def test_options_that_do_not_go_together(documents: Path, arguments: list[str], message: str) -> None:
    result = whatif(str(documents), *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True)


def test_hostile_names_and_labels_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b[31m\u202e[bold]"
    [(_, document)] = scored([trace_bytes(domain=hostile)])
    data = changed(document, "x", {hostile: "\x1b"})
    for arguments in (["--text"], ["--json"], ["--text", "--label", f"x.{hostile}"], ["--label", hostile]):
        result = whatif("-", "--share", "1", *arguments, data=data)
        assert not {"\x1b", "\u202e"} & set(result.output)
