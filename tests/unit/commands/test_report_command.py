"""`kp-worker report` as a user gets it: its text, JSON and page, and what it says is wrong."""

import json
import random
import re
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.imports import MODEL_RUNTIMES, loaded_after
from tests.support.reports import (
    changed,
    dump,
    outputs,
    parsed,
    random_documents,
    random_sources,
    rendered,
    report_of,
    run,
    scored_document,
    words,
)
from worker.commands.report.numbers import LEFT_OUT
from worker.commands.report.outcomes import Asked, Judging
from worker.commands.shared.options import Moment

HOSTILE = "<script>alert('x')</script>\"]]>&amp;{{ 7*7 }}$\\frac$ \u202egnp\u0000\u0007"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rng = random.Random(5)
    path = tmp_path / "scored.jsonl"
    rows = [changed(row, "x_won", rng.random() < 0.5) for row in outputs(random_sources(rng, 160))]
    path.write_bytes(b"\n".join(rows))
    return path


# -- text


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ("", [
            r"\A160 traces of scored\.jsonl, 2026-04-14 08:00 UTC\naccepted: \d+ \(",
            r"^Share that reaches a threshold\ndomain",
            r"^Domains without a profile \(they take default\)\n  gardening: ",
        ]),
        ("--config {candidate}", [
            r"^Accepted with these settings: \d+ \(.*\) -> \d+ \(.*\)$", "^Decisions that change: ", "paste this",
            r"^  gardenin; did you mean gardening\?$",
        ]),
        ("--set threshold=0.75", [r"With these settings no decision changes\.", "there is nothing to set"]),
        ("--share 10%", [
            "^Thresholds for the best 10% of each domain; accepted of all: ", "paste this",
            r"without a profile: gardening\. Such domains share the threshold of default",
            "traces are few; the threshold may accept another share of the next ones",
        ]),
        ("--set threshold=0.123456789 --share 0.1", [r"0\.123456789 -> 0\."]),
        ("--outcome x_won", ["^160 runs, ", r"^stated +0\.\d"]),
        ("--outcome x_won --verdicts 50% --late 5", [
            "^160 runs, ", "AUC of the score", "best fifth", "Brier", "constant", "ECE", "Intervals are 95 %",
            r"^record +0\.\d",
            "record: verdicts on 50% of the runs, drawn at random, 5 runs late",
        ]),
        ("--config {candidate} --share 10% --outcome x_won --verdicts 30%", ["^Accepted", "^Thresholds", "^160 runs"]),
    ],
)  # fmt: skip
def test_the_text_says_what_was_asked_and_is_whole_at_80_columns(
    documents: Path, arguments: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = run_text(documents, *arguments.split())
    for text in texts:
        assert re.search(text, wide, re.M), text
    assert ("paste this" in wide) == ("paste this" in texts or "--share" in arguments)
    monkeypatch.setattr("worker.commands.shared.console.PIPE_WIDTH", 80)
    shown = run_text(documents, *arguments.split())
    assert not [line for line in shown.splitlines() if "…" in line and line not in wide]
    assert max(map(len, shown.splitlines())) <= 80
    assert " ".join(shown.split()) == " ".join(wide.split()), "only sentences are wrapped"


def run_text(documents: Path, *arguments: str) -> str:
    candidate = documents.with_name("candidate.toml")
    candidate.write_text("threshold = 0.5\n[profiles.gardenin]\n[profiles.code]\nthreshold = 0.9\n")
    result = run(str(documents), *(it.format(candidate=candidate) for it in arguments), "--text")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_text_has_the_settings_and_the_proposed_thresholds_ready_to_paste(documents: Path) -> None:
    def pasted(*arguments: str) -> dict[str, Any]:
        return tomllib.loads(run_text(documents, *arguments).partition("(--config FILE, KP_CONFIG):\n")[2])

    assert pasted("--config", "{candidate}") == tomllib.loads(documents.with_name("candidate.toml").read_text())
    report = json.loads(run(str(documents), "--share", "0.1").stdout)
    assert pasted("--share", "10%") == tomllib.loads(report["config"])
    assert {name: it["threshold"] for name, it in pasted("--share", "10%")["profiles"].items()} == {
        row["domain"]: row["threshold"] for row in report["share"]["domains"]
    }


def test_ties_near_misses_and_default_are_told() -> None:
    sources = [trace_bytes(f"kp:trace:{n}", domain=("Finance", "default")[n % 2]) for n in range(60)]
    data = b"\n".join(outputs(sources, embed=False))
    text = " ".join(run("-", "--share", "10%", "--text", data=data).stdout.split())
    assert "Finance: 30 traces tie, so 30 are accepted, not 3; a threshold above the tie accepts 0" in text
    assert "Finance: 30 traces; did you mean finance?" in text
    assert "default: its threshold also applies to every domain without a profile" in text
    few = run("-", "--share", "10%", "--text", data=b"\n".join(data.splitlines()[:3])).stdout
    assert "Finance: 2 traces are too few to propose a threshold (30 at least); it keeps its threshold" in few


def test_what_a_reader_must_know_is_told() -> None:
    documents = [scored_document(n, threshold=0.75 - n / 10, time_ms=T0 + n) for n in range(2)]
    documents[1]["scoring"] |= {"worker_version": "9.9", "screen": {"rules": ["tag-characters"]}}
    text = run("-", "--text", data=b"\n".join(map(dump, documents))).stdout
    assert "scored in 2 ways: no embedder, kp-worker 0.1.0: 1; no embedder, kp-worker 9.9: 1." in text
    assert "threshold or weights changed within: finance. The threshold shown is the last one." in text
    assert "traces with hidden text, by the screen's rule: tag-characters 1." in text


def test_what_is_left_out_is_said_on_standard_error(documents: Path) -> None:
    lines = documents.read_bytes().split(b"\n")
    bad = changed(lines[0], "scoring.score", 0.123)
    data = b"\n".join([*lines[1:], bad, lines[1], *[b"{"] * (LEFT_OUT + 2)])
    result = run("-", "--set", "threshold=0.7", data=data)
    assert result.exit_code == 0, result.output
    assert "skipped, since their score does not follow from their own figures: 1" in result.stderr
    assert "  line 160: kp:trace:0: score is 0.123, but " in result.stderr
    assert "repeated documents (identical bytes), counted once: 1" in result.stderr
    assert f"skipped, since they cannot be read: {LEFT_OUT + 2}" in result.stderr
    assert "  and 2 more" in result.stderr
    report = json.loads(result.stdout)
    assert (report["total"]["traces"], report["inconsistent"]["count"], report["repeated"]) == (159, 1, 1)


def test_files_are_read_together_and_named(documents: Path, tmp_path: Path) -> None:
    lines = documents.read_bytes().split(b"\n")
    (tmp_path / "more").mkdir()
    parts = [tmp_path / "a.jsonl", tmp_path / "more" / "a.jsonl"]
    for part, content in zip(parts, (lines[:80], [*lines[80:], b"{"]), strict=True):
        part.write_bytes(b"\n".join(content))
    both = run(*map(str, parts), "--json")
    one, two = (json.loads(it) for it in (run(str(documents)).stdout, both.stdout))
    assert one["total"] == two["total"]
    assert two["source"] == f"{parts[0]} and {parts[1]}", "the same name twice: with folders"
    assert f"  {parts[1]}: line 81: " in both.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-"], 1, "standard input: no documents"),
        (["."], 2, "Is a directory"),
        ([], 2, "pass files of scored traces"),
        (["-", "--from-kafka"], 2, "pass files of scored traces"),
        (["-", "--last", "5"], 2, "--since and --last require --from-kafka"),
        (["--from-kafka", "--since", "yesterday"], 2, "yesterday"),
        (["-", "--set", "threshold=7"], 2, "threshold"),
        (["-", "--config", "/no/such.toml"], 2, "/no/such.toml"),
        (["-", "--share", "2"], 2, "give a share above 0 and up to 1, such as 0.1 or 10%"),
        (["-", "--claimed", "x"], 2, "--claimed and --verdicts require --outcome"),
        (["-", "--verdicts", "10%"], 2, "--claimed and --verdicts require --outcome"),
        (["-", "--outcome", "x", "--claimed", "x"], 2, "what is recorded is no claim"),
        (["-", "--outcome", "x", "--late", "5"], 2, "--late requires --verdicts"),
        (["-", "--outcome", "x", "--verdicts", "0"], 2, "--verdicts"),
        (["-", "--outcome", "x", "--set", "confidence=record"], 2, "requires --verdicts or --from-kafka"),
    ],
)
def test_wrong_input_is_a_clear_error(arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments, data=b"")
    assert (result.exit_code, message in result.stderr) == (code, True), result.output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90m", 5400), ("2h", 7200), ("3d", 259_200), ("2026-04-14", 28_800), ("2026-04-14 08:00", 0),
     ("2026-04-14T08:00Z", 0), ("2026-04-14T10:00:00+02:00", 0)],
)  # fmt: skip
def test_since_takes_a_time_or_an_age(text: str, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: T0 / 1000)
    assert Moment()(text) == datetime.fromtimestamp(T0 / 1000 - seconds, UTC)


def test_hostile_texts_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b[31m\u202e[bold]"
    rows = outputs([trace_bytes(f"kp:trace:{hostile}", domain=hostile)])
    data = b"\n".join([changed(row, hostile, True) for row in rows] + [trace_bytes(f"kp:trace:{hostile}")])
    for arguments in ((), ("--set", "threshold=0"), ("--share", "1"), ("--outcome", hostile), ("--outcome", "nothing")):
        for form in ("--text", "--json"):
            result = run("-", form, *arguments, data=data)
            assert not {"\x1b", "\u202e"} & set(result.output)
    assert "[bold]" in result.output


def test_neither_a_model_nor_plots_are_loaded_for_text(documents: Path) -> None:
    loaded = loaded_after(
        "from worker.cli import cli\n"
        f"cli(['report', {str(documents)!r}, '--text', '--set', 'threshold=0', '--share', '1'], standalone_mode=False)"
    )
    assert "numpy" in loaded
    assert not loaded & {*MODEL_RUNTIMES, "aiokafka", "jinja2"}


# -- the page


@pytest.mark.slow
def test_the_page_is_well_formed_loads_nothing_and_is_the_same_for_the_same_input(seed: int) -> None:
    documents = random_documents(random.Random(seed), 50)
    page = rendered(report_of(documents))
    root = parsed(page)
    assert rendered(report_of(documents[::-1])) == page
    assert not list(root.iter("script"))
    loading = [
        value for element in root.iter() for name, value in element.attrib.items()
        if name.split("}")[-1] in ("src", "href", "data", "action") and not value.startswith("#")
    ]  # fmt: skip
    assert not loading
    assert "url(http" not in page
    assert "@import" not in page


@pytest.mark.slow
def test_all_texts_are_escaped() -> None:
    hostile = [
        scored_document(
            n, trace_id=f"kp:trace:{n}{HOSTILE}", domain=f"{HOSTILE}{n % 2}", objective=HOSTILE, overrides=(HOSTILE,),
            nearest=(f"kp:trace:0{HOSTILE}", 0.95),
        )
        for n in range(4)
    ]  # fmt: skip
    for document in hostile:
        document["scoring"] |= {"profile": HOSTILE, "worker_version": HOSTILE, "screen": {"rules": [HOSTILE]}}
    sources = [trace_bytes(f"kp:trace:{n}{HOSTILE}", domain=HOSTILE) for n in range(40)]
    rows = [changed(document, HOSTILE, n % 2) for n, document in enumerate(outputs(sources))]
    asked = Asked(HOSTILE, None, Judging(0.5, 1))
    for report in (report_of([*map(dump, hostile), b"{"]), report_of([*rows, b"{"], asked=asked, threshold=0)):
        page = rendered(report)
        assert not list(parsed(page).iter("script"))
        assert not set("\u202e\0\a") & set(page)
        assert HOSTILE[: HOSTILE.index("\u202e")].strip() in words(page)


@pytest.mark.slow
def test_the_page_has_the_figures_and_plots_of_what_was_asked(documents: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ("--set", "threshold=0.5", "--share", "10%", "--outcome", "x_won", "--verdicts", "30%")
    result = run(str(documents), *arguments, "--page", str(page), "--json")
    assert result.exit_code == 0, result.output
    assert f" kB to {page}" in result.stderr
    root, text, report = parsed(page.read_text("utf-8")), words(page.read_text("utf-8")), json.loads(result.stdout)
    assert report["total"]["to_accepted"] > 0
    assert f"{report['total']['to_accepted']} become accepted, 0 rejected" in text
    for row in report["share"]["domains"]:
        low, high = row["interval"]
        assert f"{low:.3f}-{high:.3f}" in text
    brier = report["outcome"]["record"]["brier"]
    assert f"{brier['value']:.3f} {brier['low']:.3f}-{brier['high']:.3f}" in text
    assert [pasted.text for pasted in root.iter("pre")] == [report["config"]]
    assert len(list(root.iter("figure"))) == 3, "before and after, shares"
    assert "At the border" in text
    assert "Near-duplicates" in text
    alone = parsed(rendered(report_of(documents.read_bytes().splitlines())))
    assert len(list(alone.iter("figure"))) == 2
    assert not list(alone.iter("pre"))


@pytest.mark.slow
def test_the_page_names_as_many_domains_as_anyone_reads_and_counts_the_others() -> None:
    sources = [trace_bytes(f"kp:trace:{n}", domain=f"domain-{n:02d}") for n in range(25)]
    documents = [changed(document, "x_won", bool(n % 2)) for n, document in enumerate(outputs(sources))]
    tables = parsed(rendered(report_of(documents, asked=Asked("x_won")))).iter("table")
    [rows] = [it.findall("tbody/tr") for it in tables if [h.text for h in it.iter("th")][:2] == ["domain", "runs"]]
    assert ["".join(row[0].itertext()) for row in rows] == [*(f"domain-{n:02d}" for n in range(20)), "and 5 more"]


@pytest.mark.slow
def test_a_threshold_below_the_curves_axis_is_not_drawn_over_its_labels() -> None:
    below, within = (
        [mark.attrib["d"] for mark in parsed(rendered(report_of([scored_document(threshold=threshold)]))).iter("path")]
        for threshold in (0.15, 0.25)
    )
    assert not [d for d in below if d.startswith("M-")]
    assert "M25.00 0V180" in within


@pytest.mark.slow
def test_one_trace_makes_a_page(tmp_path: Path) -> None:
    [document] = outputs([trace_bytes()], embed=False)
    page = tmp_path / "page.html"
    for arguments in ((), ("--set", "threshold=0.75"), ("--share", "10%")):
        assert run("-", "--page", str(page), *arguments, data=document).exit_code == 0
        assert words(page.read_text("utf-8")).startswith("kp-worker report: 1 trace ")
    assert "1 trace is too few to propose a threshold" in words(page.read_text("utf-8"))
    failed = run("-", "--page", "/no/such/dir/page.html", "--text", data=document)
    assert failed.exit_code == 1
    assert "/no/such/dir/page.html cannot be written: No such file or directory; choose another file" in failed.stderr
