"""`kp-worker whatif`: the numbers against scoring anew, what is left out, and the command."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.builders import trace_bytes
from tests.support.imports import MODEL_RUNTIMES, loaded_after
from tests.support.reports import parsed, words
from tests.support.whatif import changed, random_profiles, random_sources, rescored, scored, whatif
from worker.commands.analysis.documents import LEFT_OUT_SHOWN, NoDocuments
from worker.commands.analysis.export import csv_line
from worker.commands.analysis.whatif_numbers import DOMAINS_SHOWN, BeforeAndAfter
from worker.commands.shared.thresholds import config_to_paste
from worker.config import load
from worker.core.scoring import PROFILES, Profile, Weights

NONE = {"KP_EMBEDDER": "none"}


# -- the numbers


def test_verdicts_and_scores_are_those_of_scoring_anew(seed: int) -> None:
    """To the last bit, with random traces, weights, profiles and thresholds."""
    rng = random.Random(seed)
    sources = random_sources(rng, rng.randint(1, 60))
    first = scored(sources, random_profiles(rng), rng.random())
    profiles, threshold = random_profiles(rng), rng.random()
    anew = {verdict.trace_id: verdict for verdict, _ in scored(sources, profiles, threshold)}
    before = {verdict.trace_id: verdict for verdict, _ in first}
    documents = [document for _, document in first]
    rng.shuffle(documents)
    result = BeforeAndAfter(rescored(documents, profiles, threshold))
    traces = list(result)
    assert len(traces) == len(sources)
    for trace in traces:
        for side, verdict in ((trace.before, before[trace.id]), (trace.after, anew[trace.id])):
            expected = (verdict.score, verdict.threshold, verdict.profile, verdict.accepted)
            assert (side.score, side.threshold, side.profile, side.decision == "accepted") == expected
    flips = [name for name in before if before[name].accepted != anew[name].accepted]
    summary = result.summary("x", 5)
    assert summary.total.to_accepted + summary.total.to_rejected == len(flips)
    assert summary.total.to_accepted == sum(anew[name].accepted for name in flips)
    assert [flip.id for flip in summary.flips] == [trace.id for trace in traces if trace.id in flips][:5]
    assert sum(row.to_accepted for row in summary.domains) == summary.total.to_accepted
    assert summary.total.after.accepted == sum(verdict.accepted for verdict in anew.values())
    assert sum(summary.total.after.histogram) == len(sources)


def test_the_settings_that_were_used_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    profiles, threshold = random_profiles(rng), rng.random()
    documents = [document for _, document in scored(random_sources(rng, 40), profiles, threshold)]
    summary = BeforeAndAfter(rescored(documents, profiles, threshold)).summary("x", 5)
    assert (summary.total.traces, summary.total.to_accepted, summary.total.to_rejected) == (40, 0, 0)
    assert summary.total.before == summary.total.after
    assert all(row.before == row.after for row in summary.domains)


def test_documents_without_an_embedder_have_the_neutral_novelty() -> None:
    [(verdict, document)] = scored([trace_bytes()], embed=False)
    [trace] = BeforeAndAfter(rescored([document], threshold=verdict.score))
    assert (trace.after.score, trace.after.decision) == (verdict.score, "accepted")


def test_many_domains_become_one_row() -> None:
    sources = [trace_bytes(f"kp:trace:{n}", domain=f"domain {n}") for n in range(DOMAINS_SHOWN + 7)]
    documents = [document for _, document in scored(sources)]
    summary = BeforeAndAfter(rescored(documents)).summary("x", 0)
    assert [summary.domains[-1].domain, summary.domains[-1].traces, summary.other_domains] == ["7 others", 7, 7]
    assert len(summary.without_profile) == DOMAINS_SHOWN + 7


def test_domains_without_a_profile_and_profiles_without_a_trace_are_named() -> None:
    domains = ["Finance", "legal", "legal", "finance", "medical", "finance "]
    sources = [trace_bytes(f"kp:trace:{n}", domain=domain) for n, domain in enumerate(domains)]
    documents = [document for _, document in scored(sources)]
    candidate = {**PROFILES, "leagl": PROFILES["default"], "art": PROFILES["default"]}
    summary = BeforeAndAfter(rescored(documents, candidate)).summary("x", 0)
    named = [(domain.name, domain.traces, domain.near) for domain in summary.without_profile]
    assert named == [("legal", 2, "leagl"), ("Finance", 1, "finance"), ("finance ", 1, "finance")]
    assert [(p.name, p.near) for p in summary.unused_profiles] == [("leagl", "legal"), ("art", None)]
    assert summary.total.to_accepted == summary.total.to_rejected == 0


# -- what is left out


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("scoring.score", 0.99, "score is 0.99, but "),
        ("scoring.components.novelty", 0.25, "novelty is 0.25, but 0.5 follows from the trace"),
        ("scoring.components.novelty", 7, "novelty must lie in 0..2"),
        ("scoring.components.complexity", 0.25, "complexity is 0.25, but "),
        ("scoring.decision", "rejected", "decision is 'rejected', but 'accepted' follows"),
        ("scoring.decision", "perhaps", "decision is 'perhaps', but 'accepted' follows"),
        ("scoring.profile", "medical", "profile is 'medical', but 'default' follows"),
        ("scoring.overrides", ["single_thought"], "overrides is 'single_thought', but '' follows"),
        ("scoring.weights", {"complexity": 1, "novelty": 0, "tool_diversity": 0, "outcome_confidence": 0}, "score is "),
        ("outcome.confidence", 0.1, "outcome_confidence is 0.9, but 0.1 follows"),
        ("metadata.success", False, "outcome_confidence is 0.9, but 0.27 follows"),
    ],
)
def test_a_document_that_was_changed_is_named_and_not_counted(path: str, value: object, reason: str) -> None:
    good, other = (
        document for _, document in scored([trace_bytes("kp:trace:1"), trace_bytes("kp:trace:2")], embed=False)
    )
    traces = rescored([good, changed(other, path, value)], threshold=0)
    assert traces.inconsistent.count == 1
    [(where, told)] = traces.inconsistent.shown
    assert where == "line 2"
    assert told.startswith("kp:trace:2: ")
    assert reason in told
    assert [trace.id for trace in BeforeAndAfter(traces)] == ["kp:trace:1"]


def test_the_least_change_of_a_score_is_seen() -> None:
    [(verdict, document)] = scored([trace_bytes()], embed=False)
    other = changed(document, "scoring.score", verdict.score - sys.float_info.epsilon / 2)
    assert rescored([other]).inconsistent.count == 1
    assert rescored([document]).inconsistent.count == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json: "),
        (b'"\xff"', "not_utf8: "),
        (b"[1]", "document"),
        (None, "empty_value: "),
        (trace_bytes(), "no scoring object: score it first (kp-worker score)"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too_deep: "),
        (trace_bytes().replace(b'"kp:trace:1"', b'"7"'), "invalid_value: id: "),
    ],
)
def test_what_cannot_be_read_is_counted_and_named(line: bytes | None, reason: str) -> None:
    traces = rescored([])
    traces.add(line, "line 7")
    assert traces.unreadable.count == 1
    with pytest.raises(NoDocuments, match=r"^none of 1 documents can be counted; line 7: ") as raised:
        BeforeAndAfter(traces)
    assert reason in str(raised.value)
    with pytest.raises(NoDocuments, match="no documents"):
        BeforeAndAfter(rescored([]))


# -- the config to paste


def test_the_config_to_paste_gives_the_same_settings(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    threshold = rng.choice([0.75, rng.random()])
    hostile = '"]\nx = 1 #\\ \u202e\x7f家\U000e0041'
    profiles = {
        (hostile if name == "legal" else name): profile for name, profile in random_profiles(rng).items()
    }  # fmt: skip
    text = config_to_paste(profiles, threshold)
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    path = tmp_path / "candidate.toml"
    path.write_text(text, "utf-8")
    settings = load(path)
    assert (settings.threshold, settings.scoring_profiles()) == (threshold, profiles)


def test_the_config_to_paste_holds_only_what_differs() -> None:
    assert config_to_paste(PROFILES, 0.75) == ""
    assert config_to_paste({**PROFILES, "code": Profile(PROFILES["code"].weights, 0.6)}, 0.75) == (
        "[profiles.code]\nthreshold = 0.6"
    )
    inherited = Profile(PROFILES["default"].weights)
    assert config_to_paste({**PROFILES, "legal": inherited}, 0.75) == "[profiles.legal]"
    weights = tomllib.loads(config_to_paste({**PROFILES, "a b": Profile(Weights(1, 0, 0, 0))}, 0.75))["profiles"]["a b"]
    assert weights == {
        "weights": {"complexity": 1, "novelty": 0, "tool_diversity": 0, "outcome_confidence": 0}
    }  # fmt: skip


# -- the command


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rng = random.Random(5)
    path = tmp_path / "scored.jsonl"
    path.write_bytes(b"\n".join(document for _, document in scored(random_sources(rng, 50))))
    return path


def test_json_when_piped(documents: Path) -> None:
    result = whatif(str(documents), "--set", "threshold=0.5", "--flips", "3")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["source"] == "scored.jsonl"
    assert found["total"]["traces"] == 50
    assert found["total"]["to_accepted"] > 3 == len(found["flips"])
    assert found["total"]["to_rejected"] == 0
    assert tomllib.loads(found["config"]) == {"threshold": 0.5}
    assert {row["domain"] for row in found["domains"]} == {"finance", "code", "medical", "gardening"}


@pytest.mark.parametrize("columns", ["80", "120"])
def test_text_fits_a_terminal(documents: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.commands.shared.console.PIPE_WIDTH", int(columns))
    candidate = documents.with_name("candidate.toml")
    candidate.write_text("threshold = 0.5\n[profiles.gardenin]\n[profiles.code]\nthreshold = 0.9\n")
    result = whatif(str(documents), "--config", str(candidate), "--text")
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("\n")
    assert max(map(len, lines)) <= int(columns)
    assert "Domains without a profile (they take default)" in lines
    assert "  gardenin; did you mean gardening?" in lines
    pasted = result.stdout[result.stdout.index("(--config FILE, KP_CONFIG):") :].partition("\n")[2]
    assert tomllib.loads(pasted) == tomllib.loads(candidate.read_text())


def test_nothing_is_wrapped_in_a_pipe() -> None:
    domain = "a_domain_with_a_name_that_is_longer_than_the_column_of_profiles"
    sources = [trace_bytes(f"kp:trace:{n}", domain=domain) for n in range(40)]
    data = b"\n".join(document for _, document in scored(sources, embed=False))
    for arguments in ([], ["--share", "10%"]):
        told = whatif(
            "-", "--text", "--set", f"profiles.{domain}.threshold=0.1", *arguments, data=data, COLUMNS="40"
        ).stdout
        assert [line for line in told.split("\n") if line.startswith("a_domain") and domain in line]


def test_the_settings_that_were_used_are_said_to_change_nothing(documents: Path) -> None:
    result = whatif(str(documents), "--text")
    assert "No decision changes." in result.stdout
    assert "there is nothing to set" in result.stdout


def test_the_export_has_one_row_for_each_trace(documents: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    summary = json.loads(whatif(str(documents), "--set", "threshold=0.5", "--export", str(output)).stdout)
    rows = list(csv.DictReader(io.StringIO(output.read_text("utf-8"))))
    assert len(rows) == 50
    assert sum(row["flips"] == "1" for row in rows) == summary["total"]["to_accepted"]
    for row in rows:
        assert (row["decision"] == "accepted") == (float(row["score"]) >= float(row["threshold"]) == 0.5)
        assert (row["decision"] != row["decision_before"]) == (row["flips"] == "1")
    piped = whatif(str(documents), "--set", "threshold=0.5", "--export", "csv")
    assert piped.stdout == output.read_text("utf-8")
    assert "50 traces of scored.jsonl" in piped.stderr
    refused = whatif(str(documents), "--export", "/no/such/dir/rows.csv")
    assert refused.exit_code == 1
    assert "/no/such/dir/rows.csv cannot be written" in refused.stderr


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\uff1d"])
def test_a_spreadsheet_runs_no_formula_of_an_agent(start: str) -> None:
    domain = f'{start}HYPERLINK("x"),\n"y"'
    data = b"".join(document + b"\n" for _, document in scored([trace_bytes(domain=domain)]))
    [row] = csv.DictReader(io.StringIO(whatif("-", "--export", "csv", data=data).stdout, newline=""))
    assert row["domain"] == f"'{domain}"


HIDDEN = (
    " \t\r\n\v\f\0\x1c\x85\xa0\xad\u034f\u115f\u1680"
    "\u180e\u2003\u200b\u200d\u200e\u2028\u202e\u2060\u2800\u3000\u3164\ufe0f\ufeff\uffa0"
)
"""Characters that a reader may drop at the beginning of a cell, or that nobody sees there."""

FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20\ufe66")


def test_no_reader_of_the_export_finds_a_formula_or_another_row(seed: int) -> None:
    """Whatever reads the file: a text stays in its cell, and no cell of an agent begins as a formula does."""
    rng = random.Random(seed)
    parts = [
        *HIDDEN,
        *"=+-@\uff1d\uff0b\uff0d\uff20\ufe66\"',;|a5",
        "\r\n",
        "=1+1",
        "-5",
        "1e5",
        '=HYPERLINK("x")',
        "家",
    ]
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 6))) for _ in range(300)]
    texts += [f"{before}{sign}1" for before in ("", *HIDDEN, "a;", "a\r", "a\r\n", "a\t ") for sign in "=+-@\uff1d"]
    sources = [trace_bytes(f"kp:trace:{number}{text}", domain=text) for number, text in enumerate(texts)]
    documents = b"".join(document + b"\n" for _, document in scored(sources))
    result = whatif("-", "--export", "csv", data=documents)
    assert result.exit_code == 0, result.output
    text = result.stdout_bytes.decode()
    for rows in (
        csv.reader(io.StringIO(text, newline="")),
        csv.reader(io.StringIO(text, newline=None)),  # universal newlines: \r ends a line, too
        csv.reader(text.splitlines()),  # and what else ends a line for some readers
    ):
        header, *found = rows
        assert len(found) == len(sources)
        for row in found:
            assert len(row) == len(header)
            cells = dict(zip(header, row, strict=True))
            for name, cell in cells.items():
                if name in ("partition", "offset", "score_before", "score", "threshold_before", "threshold", "flips"):
                    float(cell)
                else:
                    assert not cell.lstrip(HIDDEN).startswith(FORMULA), ascii(cell)
    # A reader that knows no quotes, and a spreadsheet that splits at the semicolon.
    for cell in re.split("[\t\n\v\f\r\x1c\x85\u2028;]", text):
        assert not cell.lstrip(HIDDEN).startswith(FORMULA), ascii(cell)


def test_numbers_of_the_export_stay_numbers_and_plain_texts_keep_their_bytes() -> None:
    assert csv_line(["kp:trace:1", "家 x", -1, -0.25, 1e-07, 3]) == "kp:trace:1,家 x,-1,-0.25,1e-07,3\n"
    assert csv_line(["-1", ' "a"', "a,b", "a\rb"]) == '\'-1," ""a""","a,b","a\rb"\n'


def test_hostile_texts_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b[31m\u202e[bold]"
    data = b"".join(document + b"\n" for _, document in scored([trace_bytes(f"kp:trace:{hostile}", domain=hostile)]))
    for form in ("--text", "--json"):
        result = whatif("-", form, "--set", "threshold=0", data=data + trace_bytes(f"kp:trace:{hostile}"))
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\u202e"} & set(result.output)
    assert "[bold]" in result.output


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_summary_and_escapes_names(documents: Path, tmp_path: Path) -> None:
    hostile = "<b>&{{ 7 }}\u202e\x1b"
    [(_, other)] = scored([trace_bytes(f"kp:trace:{hostile}", domain=hostile)], threshold=0)
    documents.write_bytes(documents.read_bytes() + b"\n" + other + b'\n{"<i>": 1}\n')
    page = tmp_path / "page.html"
    result = whatif(str(documents), "--set", "threshold=0.5", "--page", str(page), "--json")
    assert result.exit_code == 0, result.output
    assert f" kB to {page}" in result.stderr
    root, told = parsed(page.read_text("utf-8")), words(page.read_text("utf-8"))
    assert not list(root.iter("b>")) + list(root.iter("script"))
    assert not {"\x1b", "\u202e"} & set(page.read_text("utf-8"))
    assert "<b>&{{ 7 }}" in told
    found = json.loads(result.stdout)
    assert f"accepted: {found['total']['before']['accepted']} → {found['total']['after']['accepted']}" in told
    assert len(list(root.iter("figure"))) == 2
    table = next(iter(root.iter("table")))
    assert len(list(table.iter("tr"))) == 2 + len(found["domains"])
    [pasted] = root.iter("pre")
    assert pasted.text == found["config"]


@pytest.mark.slow
def test_a_page_of_one_trace_and_of_none_that_changes(tmp_path: Path) -> None:
    [(_, document)] = scored([trace_bytes()], embed=False)
    page = tmp_path / "page.html"
    assert whatif("-", "--page", str(page), data=document).exit_code == 0
    told = words(page.read_text("utf-8"))
    assert "there is nothing to set" in told
    assert "Decisions that change None." in told


def test_a_page_that_cannot_be_written_is_named(documents: Path) -> None:
    result = whatif(str(documents), "--page", "/no/such/dir/page.html", "--text")
    assert result.exit_code == 1
    assert "No decision changes." in result.stdout
    assert "/no/such/dir/page.html cannot be written: No such file or directory; choose another" in result.stderr


def test_what_is_left_out_is_said_on_standard_error(documents: Path) -> None:
    lines = documents.read_bytes().split(b"\n")
    bad = changed(lines[0], "scoring.score", 0.123)
    data = b"\n".join([*lines[1:], bad, lines[1], *[b"{"] * (LEFT_OUT_SHOWN + 2)])
    result = whatif("-", data=data)
    assert result.exit_code == 0, result.output
    assert "skipped, since they have a score that does not follow from their own figures: 1" in result.stderr
    assert "  line 50: kp:trace:0: score is 0.123, but " in result.stderr
    assert "repeated documents (identical bytes), counted once: 1" in result.stderr
    assert f"skipped, since they cannot be read: {LEFT_OUT_SHOWN + 2}" in result.stderr
    assert "  and 2 more" in result.stderr
    found = json.loads(result.stdout)
    assert (found["total"]["traces"], found["inconsistent"]["count"], found["repeated"]) == (49, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "data", "code", "message"),
    [
        (["-"], b"", 1, "no documents"),
        (["-"], b"{}\n", 1, "none of 1 documents can be counted"),
        (["."], b"", 2, "Is a directory"),
        ([], b"", 2, "pass a file of scored traces"),
        (["-", "--from-kafka"], b"", 2, "pass a file of scored traces"),
        (["-", "--last", "5"], b"", 2, "require --from-kafka"),
        (["-", "--set", "threshold=7"], b"", 2, "threshold"),
        (["-", "--config", "/no/such.toml"], b"", 2, "/no/such.toml"),
    ],
)
def test_wrong_input_is_a_clear_error(arguments: list[str], data: bytes, code: int, message: str) -> None:
    result = whatif(*arguments, data=data)
    assert result.exit_code == code, result.output
    assert message in result.stderr


def test_no_model_is_loaded(tmp_path: Path) -> None:
    file, arguments = tmp_path / "scored.jsonl", ("--export", str(tmp_path / "rows.csv"))
    file.write_bytes(b"\n".join(document for _, document in scored(random_sources(random.Random(1), 3))))
    loaded = loaded_after(
        f"from worker.cli import cli\ncli(['whatif', {str(file)!r}, *{arguments}], standalone_mode=False)"
    )
    assert "numpy" in loaded
    assert not loaded & {*MODEL_RUNTIMES, "aiokafka"}
