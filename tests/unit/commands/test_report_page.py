"""The page of a report and the command around it, as a reader gets them."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.builders import T0
from tests.support.reports import dump, parsed, random_documents, render, run, scored_document, summary_of, words
from tests.support.surroundings import ROOT
from worker.commands.analysis.documents import DOMAINS_SHOWN
from worker.commands.analysis.report_numbers import Traces, summarize
from worker.version import install_extra

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert('x')</script>\"]]>&amp;{{ 7*7 }}$\\frac$ \u202egnp\u0000\u0007"


def test_random_pages_are_well_formed_and_equal_for_equal_input(seed: int) -> None:
    documents = random_documents(random.Random(seed), 50)
    page = render(summary_of(documents), "x.jsonl")
    parsed(page)
    assert render(summary_of(documents[::-1]), "x.jsonl") == page
    ids = re.findall(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|C)([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing() -> None:
    page = render(summary_of(random_documents(random.Random(1), 30)), "x.jsonl")
    root = parsed(page)
    assert not list(root.iter("script"))
    loading = [
        value for element in root.iter() for name, value in element.attrib.items()
        if name.split("}")[-1] in ("src", "href", "data", "action") and not value.startswith("#")
    ]  # fmt: skip
    assert not loading
    assert "url(http" not in page
    assert "@import" not in page


@pytest.mark.parametrize("hide_texts", [False, True])
def test_all_texts_are_escaped(hide_texts: bool) -> None:
    documents = [
        scored_document(
            n,
            trace_id=f"kp:trace:{n}{HOSTILE}",
            domain=f"{HOSTILE}{n % 2}",
            objective=HOSTILE,
            overrides=(HOSTILE,),
            nearest=(f"kp:trace:0{HOSTILE}", 0.95),
            latencies=(5.0,),
        )
        for n in range(4)
    ]
    for document in documents:
        document["scoring"] |= {"profile": HOSTILE, "worker_version": HOSTILE, "screen": {"rules": [HOSTILE]}}
    traces = Traces(hide_texts=hide_texts)
    for document in documents:
        traces.add(dump(document), HOSTILE)
    traces.add(b"{", HOSTILE)
    page = render(summarize(traces), HOSTILE)
    assert not list(parsed(page).iter("script"))
    assert not set("\u202e\0\a") & set(page)
    assert HOSTILE[: HOSTILE.index("\u202e")].strip() in words(page)


def test_the_page_says_what_the_screen_has_marked() -> None:
    documents = [scored_document(n, score=0.8) for n in range(4)]
    assert "Marked by the screen" not in words(render(summary_of(documents), "traces.jsonl"))
    for document, rules in zip(
        documents[1:], ([], ["invisible-in-word"], ["invisible-in-word", "tag-characters"]), strict=True
    ):
        document["scoring"]["screen"] = {"rules": rules}
    page = " ".join(words(render(summary_of(documents), "traces.jsonl")).split())
    assert "2 of 3 screened traces (66.7%)" in page
    assert "Not screened (KP_SCREEN=off): 1." in page
    assert page.index("invisible-in-word") < page.index("tag-characters")


def test_the_config_stands_on_the_page_as_it_is_pasted() -> None:
    documents = [scored_document(n, domain=domain) for n, domain in enumerate(("code", 'a<b>&"c"\u202e', " "))]
    summary = summary_of(documents)
    [block] = parsed(render(summary, "x")).iter("pre")
    assert block.text == summary.config
    assert tomllib.loads(block.text)["profiles"].keys() == {"code", 'a<b>&"c"\u202e', " "}


@pytest.mark.parametrize("threshold", [0.75, 0.7231])
def test_the_row_of_all_traces_is_outlined_at_the_threshold(threshold: float) -> None:
    documents = [
        scored_document(n, score=n / 20, threshold=threshold, domain=("x", "finance")[n % 2]) for n in range(20)
    ]
    for mixed in (False, True):
        if mixed:
            documents[19]["scoring"]["threshold"] = 0.6
        page = parsed(render(summary_of(documents), "x"))
        table = next(it for it in page.iter("table") if "profile, and its domains" in "".join(it.itertext()))
        heads = ["".join(head.itertext()) for head in table.iter("th")]
        [row] = [row for row in table.iter("tr") if row.get("class") == "all"]
        outlined = [heads[place] for place, cell in enumerate(row) if "current" in cell.get("class", "")]
        assert outlined == ([] if mixed else [str(threshold)])
        assert (str(threshold) in heads) is (threshold == 0.75 or not mixed)


def test_no_config_is_proposed_for_names_that_are_cut() -> None:
    page = parsed(render(summary_of([scored_document(domain="x" * 161)]), "x"))
    assert not list(page.iter("pre"))


def test_hidden_texts_are_not_in_the_page() -> None:
    line = dump(scored_document(objective="sell the harbour", nearest=("kp:trace:0", 0.99)))
    other = dump(scored_document(1, objective="sell the harbour", nearest=("kp:trace:0", 0.99)))
    shown, hidden = (
        run("-", "-o", "-", *option, data=line + b"\n" + other).stdout for option in ([], ["--hide-texts"])
    )
    assert "sell the harbour" in shown
    assert "harbour" not in hidden
    assert "objective hidden" in hidden


def test_one_trace_without_neighbour_or_latency_makes_a_page() -> None:
    text = words(render(summary_of([scored_document(nearest=None)]), "x"))
    assert "says nothing" in text
    assert "Slowest agents" not in text
    assert text.startswith("kp-worker report: 1 trace ")


def test_domains_without_a_profile_and_near_misses_are_listed() -> None:
    domains = ["Finance", "finance ", "legal", "legal", "finance"]
    documents = [scored_document(n, domain=domain, time_ms=T0 + n) for n, domain in enumerate(domains)]
    summary = summary_of(documents, profiles=["default", "finance", "leagl"])
    text = re.sub(" ([:;?])", r"\1", words(render(summary, "x")))
    assert "3 domains take the profile default, but their names are close to a profile's" in text
    assert 'legal: 2 traces; did you mean leagl? Finance: 1 trace; did you mean finance? "finance ": 1 trace' in text
    assert "1 profile of the settings that no trace takes: leagl; did you mean legal?" in text
    alone = words(render(summary_of([scored_document(0)]), "x"))
    assert "Every domain has its own profile." in alone
    assert "did you mean" not in alone


def test_a_threshold_can_be_chosen_for_each_domain() -> None:
    documents = [
        scored_document(n, domain=f"domain {n // 2 % 30:02}", score=n / 100, time_ms=T0 + n) for n in range(100)
    ]  # fmt: skip
    page = render(summary_of(documents), "x")
    tables = [" ".join(" ".join(table.itertext()).split()) for table in parsed(page).iter("table")]
    [cutoffs] = [table for table in tables if "best 10%" in table]
    assert cutoffs.count("domain ") == DOMAINS_SHOWN
    assert "10 others" in cutoffs
    assert words(page).count("10 smaller domains are in one row.") == 3


def test_in_print_headings_and_notes_stay_with_what_follows() -> None:
    """Each kind of element that stands between a heading and its table has a rule against a page break after it."""
    page = render(summary_of(random_documents(random.Random(2), 60)), "x")
    [rules] = re.findall(r"@media print \{(.*?)\n@media", page, re.DOTALL)
    [together] = re.findall(r"([^}]*)\{ break-after:avoid; \}", rules)
    kept = {part.strip() for part in together.split(",")}
    assert {"h2", "h3"} <= kept
    body = parsed(page).find("body")
    assert body is not None
    followers = {
        "ul" if after.tag == "ul" else f"{'p' if after.tag == 'p' else ''}.{after.get('class', '').split()[0]}"
        for parent in body.iter()
        for one, after in itertools.pairwise(parent)
        if one.tag == "p" and (after.tag in ("ul", "section") or after.get("class", "").split()[:1] in KEPT)
    }
    assert {f"p:has(+ {follower})" for follower in followers} <= kept
    assert ".keep" in re.findall(r"([^}]*)\{ break-inside:avoid; \}", rules)[0]


KEPT = [["scroll"], ["grid"], ["legend"]]


def test_numbers_are_written_so_that_they_do_not_lie() -> None:
    from worker.commands.shared.shown import duration, percent

    assert [percent(value) for value in (0, 0.0004, 0.0123, 0.9996, 1)] == ["0%", "<0.1%", "1.2%", ">99.9%", "100%"]
    assert [duration(value) for value in (5, 1500, 90_000, 7_200_000, 864e6)] == [
        "5 ms", "1.5 s", "1.5 min", "2.0 h", "10 d",
    ]  # fmt: skip


# -- the command


def test_lines_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    source, output = tmp_path / "scored.jsonl", tmp_path / "page.html"
    source.write_bytes(dump(scored_document()) + b"\n\n{broken\n")
    result = run(str(source), "-o", str(output))
    assert result.exit_code == 0, result.output
    assert "1 cannot be read" in result.stderr
    assert "line 3: JSON is malformed" in result.stderr
    text = words(output.read_text("utf-8"))
    assert "line 3: JSON is malformed" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        (["-"], b"", "no documents"),
        (["-"], b"{}\n", "none of 1 documents can be read"),
        ([], b"", "pass a file of scored traces"),
        (["-", "--from-kafka"], b"", "pass a file of scored traces"),
        (["-", "--last", "5"], b"", "require --from-kafka"),
        (["--from-kafka", "--since", "yesterday"], b"", "yesterday"),
    ],
)
def test_wrong_input_is_a_clear_error(arguments: list[str], data: bytes, message: str, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    result = run(*arguments, "-o", str(output), data=data)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(dump(scored_document(0)))
    result = run(str(tmp_path / "in.jsonl"), "-o", "/no/such/dir/page.html")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "Error: /no/such/dir/page.html cannot be written: No such file or directory; choose another file (-o)"
    )


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_the_error_names_it(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['report', '-']\n"
        "from worker.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, input="", capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr == f"Error: {package} is not installed; {install_extra('report')}\n"


# -- the topics


def test_equal_scores_that_pass_together_are_told() -> None:
    documents = [scored_document(number, score=0.5 if number < 82 else 0.8) for number in range(100)]
    page = words(render(summary_of(documents), "x"))
    assert "0.800 18.0%" in page
    assert "# accepts 18 of 100 (equal scores: 10 were wanted)" in page
    assert "equal scores make it more than requested" in page
    apart = [scored_document(number, score=number / 100) for number in range(100)]
    assert "equal scores" not in words(render(summary_of(apart), "x"))


def test_a_dash_means_the_threshold_alone() -> None:
    domains = [scored_document(number, domain=f"d{number % 5}", score=number / 50) for number in range(50)]
    page = render(summary_of(domains), "x")
    dashed = re.findall(r'style="[^"]*stroke-dasharray[^"]*"', page)
    assert dashed
    assert all("var(--mark)" in style for style in dashed)
