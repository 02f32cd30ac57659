"""`kp-worker score --redact`: what was replaced, by type, with an example of each, masked."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.builders import trace_bytes
from worker.cli import cli

SECRETS = ("hunter2x", "abcDEF123", "bob@example.com", "2001:db8::7")
TRACE = json.loads(trace_bytes())
STEP = {
    **TRACE["steps"][0],
    "content": f"export DB_PASSWORD={SECRETS[0]} && mail {SECRETS[2]}; [REDACTED:ip] and {SECRETS[3]}\nhere",
    "input": {"client_secret": SECRETS[1]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    TRACE["metadata"]["privacy_level"] = "aggregated"
    path.write_text(f"{json.dumps({**TRACE, 'steps': [STEP]})}\n\n{trace_bytes().decode()}\n", "utf-8")
    return path


def score(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["score", str(file), "--redact", "all", "--embedder", "none", *options])


def test_what_was_replaced_is_listed_by_type_with_an_example_of_each_masked(file: Path) -> None:
    done = score(file, "--set", "redact_rules=strict")
    assert done.exit_code == 0, done.output
    around = "ORD=[REDACTED:password] && mail"
    assert done.stderr.splitlines()[1:] == [
        "  1 email redacted",
        f"    line 1: steps[0].content: {around} «aaa@aaaaaaa.aaa»; [REDACTED:ip] and [REDACTED:ip",
        "  2 password redacted",
        "    line 1: steps[0].content: export DB_PASSWORD=«aaaaaa9a» && mail [REDACTED:email]; [REDA",
        "  1 ip redacted",
        "    line 1: steps[0].content: ACTED:email]; [REDACTED:ip] and «9999:aa9::9» here",
    ]
    assert not any(secret in done.output for secret in SECRETS)


def test_a_member_and_the_reference_rules(file: Path) -> None:
    file.write_text(json.dumps({**TRACE, "steps": [{**STEP, "content": "x"}]}), "utf-8")
    assert score(file).stderr.splitlines()[1:3] == [
        "  1 password redacted",
        "    line 1: steps[0].input.client_secret: «aaaAAA999»",
    ]


def test_patterns_of_a_team_and_a_wrong_one(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = tmp_path / "patterns.toml"
    patterns.write_text(
        "[[pattern]]\nname = 'word'\npattern = 'mail'\n"
        "[[pattern]]\nname = 'other'\npattern = 'here'\nreplacement = '(gone)'\n",
        "utf-8",
    )
    monkeypatch.setenv("KP_REDACT_PATTERNS_FILE", str(patterns))
    stderr = score(file).stderr
    assert re.search(r"\n  1 word redacted\n    line 1: steps\[0\].content: .*&& «aaaa» ", stderr)
    assert "\n  1 other redacted\n" in stderr  # its replacement is no marker, so it has no example
    patterns.write_text("[[pattern]]\nname = 'word'\npattern = '('\n", "utf-8")
    done = score(file)
    assert done.exit_code == 2
    assert "pattern 1 ('word')" in done.output
