"""`kp-worker redact --try`: what would go, with the secrets masked."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from worker.cli import cli

SECRETS = ("hunter2x", "abcDEF123", "bob@example.com", "2001:db8::7")
TRACE = {
    "metadata": {"privacy_level": "aggregated"},
    "steps": [
        {
            "content": f"export DB_PASSWORD={SECRETS[0]} && mail {SECRETS[2]}; [REDACTED:ip] and {SECRETS[3]} here",
            "input": {"client_secret": SECRETS[1]},
        }
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(TRACE) + "\n\n" + json.dumps({"metadata": {}, "steps": []}) + "\n", "utf-8")
    return path


def test_what_would_go_is_shown_by_type_and_masked(file: Path) -> None:
    done = CliRunner().invoke(cli, ["redact", "--try", str(file), "--text"])
    assert done.exit_code == 0, done.output
    assert "the strict rules would change 1 of 2 traces." in done.output
    assert "password: 2" in done.output
    assert "1: steps[0].content: export DB_PASSWORD=«aaaaaa9a» && mail [REDACTED:email]" in done.output
    assert "1: steps[0].input.client_secret: «aaaAAA999»" in done.output
    assert "«aaa@aaaaaaa.aaa»" in done.output
    assert "ip: 1" in done.output
    assert "and «9999:aa9::9» here" in done.output
    assert not any(secret in done.output for secret in SECRETS)


def test_json_and_the_reference_rules(file: Path) -> None:
    done = CliRunner().invoke(cli, ["redact", "--try", str(file), "--json", "--rules", "reference", "--examples", "0"])
    shown = json.loads(done.stdout)
    assert shown["rules"] == "reference"
    assert shown["types"] == {"email": {"count": 1, "examples": []}, "password": {"count": 1, "examples": []}}


def test_patterns_of_a_team_and_a_wrong_one(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = tmp_path / "patterns.toml"
    patterns.write_text("[[pattern]]\nname = 'word'\npattern = 'mail'\n", "utf-8")
    monkeypatch.setenv("KP_REDACT_PATTERNS_FILE", str(patterns))
    done = CliRunner().invoke(cli, ["redact", "--try", str(file), "--json"])
    assert json.loads(done.stdout)["types"]["word"]["count"] == 1
    patterns.write_text("[[pattern]]\nname = 'word'\npattern = '('\n", "utf-8")
    done = CliRunner().invoke(cli, ["redact", "--try", str(file)])
    assert done.exit_code == 2
    assert "pattern 1 ('word')" in done.output


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('[]\n{"password": "hunter2"}\n', "utf-8")
    done = CliRunner().invoke(cli, ["redact", "--try", str(path), "--text"])
    assert done.exit_code == 1
    assert "bad.jsonl:1: not a JSON object" in done.output
    assert "«aaaaaa9»" in done.output
