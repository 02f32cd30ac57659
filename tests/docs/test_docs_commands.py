"""docs/commands.md and docs/settings.md: commands, exit codes, completion, config files and outputs are the code's."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from tests.support.builders import trace_bytes
from tests.support.snippets import shell
from tests.support.surroundings import DOCS, ROOT, environment
from worker.cli import cli
from worker.commands.redrive.steps import OF_CLOSED_RUNS
from worker.config import Settings, load
from worker.core.scoring import PROFILES, Weights
from worker.core.trace import Reason

TEXT = (DOCS / "commands.md").read_text("utf-8")
SETTINGS_PAGE = (DOCS / "settings.md").read_text("utf-8")


def test_every_command_is_in_the_table_and_the_sections_are_of_commands() -> None:
    assert sorted(re.findall(r"^\| \[?`([a-z-]+)`", TEXT, re.MULTILINE)) == sorted(cli.commands)
    assert set(re.findall(r"^## `kp-worker ([a-z-]+)`$", TEXT, re.MULTILINE)) <= set(cli.commands)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["fe"], ["fetch-model"]),
        (["redrive", "--reason", "not_"], ["not_utf8", "not_json", "not_otlp"]),
        (["redrive", "--reason", ""], [reason for reason in Reason if reason not in OF_CLOSED_RUNS]),
        (["publish", "sam"], ["samples"]),
        (["publish", "trace"], []),  # files, by the shell
        (["score", "--embedder", ""], list(get_args(Settings.model_fields["embedder"].annotation))),
    ],
)
def test_bash_completes_commands_and_closed_lists(tmp_path: Path, typed: list[str], expected: list[str]) -> None:
    (tmp_path / "trace.jsonl").touch()
    words = shlex.join(["kp-worker", *typed])
    script = f'eval "$(_KP_WORKER_COMPLETE=bash_source kp-worker)"; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; '
    script += 'compopt() { :; }; _kp_worker_completion kp-worker; printf "%s\\n" "${COMPREPLY[@]}"'
    done = shell(script, environment(PYTHONPATH=str(ROOT)), tmp_path)
    assert (done.stdout.split(), done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("explain good.json", 0),
        ("explain bad.json", 1),
        ("explain none", 2),
        ("explain good.json --set threshold=7", 2),
        ("score both.jsonl --embedder none", 0),
        ("score bad.json --embedder none", 1),
        ("score bad.json --embedder openvino --model .", 1),
    ],
)
def test_the_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int) -> None:
    """Those that need no broker; test_topics and test_doctor hold the others."""
    monkeypatch.chdir(tmp_path)
    for name, content in (("good.json", trace_bytes()), ("bad.json", b"{}"), ("both.jsonl", trace_bytes() + b"\n{}\n")):
        Path(name).write_bytes(content)
    assert CliRunner().invoke(cli, command.split()).exit_code == code


PRINTING = [
    *(ROOT / "worker").rglob("*.py"), *(ROOT / "worker/data").glob("*.html*"), *(ROOT / "deploy").rglob("*.yaml"),
    ROOT / "deploy/helm/kp-worker/templates/NOTES.txt", ROOT / "README.md", *DOCS.rglob("*.md"),
]  # fmt: skip


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a file; of a module its strings, with X for each value of an f-string."""
    if path.suffix != ".py":
        yield path.read_text("utf-8")
        return
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)


def with_options(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words and the options of each `kp-worker WORDS ... --option` in a text."""
    rest = r"[^\n`|;,()&]*"
    for command in re.finditer(rf"kp-worker((?: [a-z][a-z-]*)+)((?: {rest}?)? --?[a-z][a-z-]*{rest})", text):
        yield command[1].split(), re.findall(r"(?<![\w-])--?[a-z][a-z-]*", command[2])


def test_every_command_with_options_that_is_printed_or_shown_is_one() -> None:
    seen = 0
    for path in PRINTING:
        for text in texts_of(path):
            for words, options in with_options(text):
                if words[0] not in cli.commands and len(words) > 1:  # prose: "kp-worker would set"
                    continue
                _, command, _ = cli.resolve_command(click.Context(cli), [words[0]])
                if isinstance(command, click.Group):
                    command = command.commands[words[1]]
                known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
                assert set(options) <= known | {"--help", "-h"}, f"{path.name}: {text[:200]}"
                seen += 1
    assert seen > 60


# -- config files


def test_the_config_file_of_the_page_does_what_it_says_and_its_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` is asked for its settings alone: its options are those of every command."""
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"```toml\n(.*?)```", SETTINGS_PAGE, re.DOTALL)
    Path("kp-worker.toml").write_text(text)
    settings = load(Path("kp-worker.toml"))
    assert (settings.threshold, settings.cache_ttl_seconds) == (0.7, 7200)
    profiles = settings.scoring_profiles()
    assert (profiles["legal"].weights, profiles["legal"].threshold) == (PROFILES["default"].weights, 0.6)
    assert profiles["code"].weights == Weights(0.2, 0.4, 0.2, 0.2)
    lines = re.findall(r"^\$ kp-worker (config .*?|run .*?)(?: +#.*)?$", SETTINGS_PAGE, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        result = CliRunner().invoke(cli, line.replace("run ", "config show ").split())
        assert result.exit_code == 0, result.stderr
    assert '"name": "profiles.legal.threshold", "value": 0.5' in result.stdout


def test_the_outputs_of_config_in_the_commands_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = TEXT.split("## `kp-worker config`")[1].split("\n## ")[0]
    wrong, shown = re.findall(r"```console\n\$ kp-worker (.*?)\n(.*?)```", section, re.DOTALL)
    Path("kp-worker.toml").write_text("treshold = 1\n[profiles.code]\nthreshold = 2\n")
    assert CliRunner().invoke(cli, wrong[0].split()).stderr == wrong[1]
    Path("kp-worker.toml").write_text("threshold = 0.7\n[profiles.legal]\nthreshold = 0.6\n")
    output = CliRunner().invoke(cli, [*shown[0].split(), "--text"]).stdout
    assert output == shown[1]
