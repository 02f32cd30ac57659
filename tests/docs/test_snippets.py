"""Every code block of README.md and docs/ is run by a test, or says why not. Here: those that need no Kafka."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from tests.support.builders import trace_bytes
from tests.support.processes import WORKER
from tests.support.snippets import PAGES, Snippet, snippets
from tests.support.surroundings import ROOT, environment
from worker.cli import cli
from worker.config import Settings, load

BLOCKS = snippets()
MINE = snippets("tests/docs/test_snippets.py")


@pytest.mark.parametrize("block", [it for it in BLOCKS if it.language != "text"], ids=str)
def test_every_block_names_its_test_or_says_why_it_is_not_run(block: Snippet) -> None:
    """The test that is named has to read the page: through tests/support, or by the name of its file."""
    what, _, rest = block.mark.partition(": ")
    assert what in ("run", "not run"), f"{block}: put <!-- run: tests/... --> or <!-- not run: why --> above the block"
    for path in re.findall(r"tests/[\w/]+\.py", rest):
        assert (ROOT / path).is_file(), f"{block}: {path} does not exist"
    if what == "run":
        text = (ROOT / rest).read_text("utf-8")
        assert any(name in text for name in ("snippets(", "score_page import", Path(block.page).name)), block


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_setting_and_make_target_in_a_block_exists(block: Snippet) -> None:
    settings = {f"KP_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(r"\b(KP_[A-Z_]+)=", block.text)) <= settings
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    if block.language == "console":
        assert set(re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)) <= targets


def test_a_test_runs_every_example() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert not [each.name for each in (ROOT / "docs/examples").iterdir() if f'{each.name}"' not in text]


@pytest.mark.parametrize("path", [*PAGES, ROOT / "deploy/prometheus/rules.yaml"], ids=lambda path: path.name)
def test_the_commands_and_options_that_a_text_names_exist(path: Path) -> None:
    """Those in code within a sentence, and in an alert's annotation, too."""
    for words in re.findall(r"\bkp-worker ((?:[a-z]+(?:-[a-z]+)?)(?: --?[a-z][a-z-]*)+)", path.read_text("utf-8")):
        name, *options = words.split()
        _, command, _ = cli.resolve_command(click.Context(cli), [name])
        assert command is not None
        inner = command.commands.values() if isinstance(command, click.Group) else ()
        given = [parameter for each in (command, *inner) for parameter in each.params]
        known = {"-h", "--help", *(it for each in given for it in (*each.opts, *each.secondary_opts))}
        assert set(options) <= known, f"{path.name}: kp-worker {words}"


@pytest.mark.parametrize("block", [it for it in MINE if "export KP_" in it.text], ids=str)
def test_the_settings_of_a_block_are_accepted(block: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in set(re.findall(r"=(/\S+)", block.text)):
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text("a secret")
    for word in shlex.split(block.text.replace("=/", f"={tmp_path}/"), comments=True):
        if word != "export":
            monkeypatch.setenv(*word.split("=", 1))
    load()


@pytest.mark.slow
@pytest.mark.parametrize("block", [it for it in MINE if re.search(r"^\$ \S*kp-worker ", it.text, re.M)], ids=str)
def test_the_commands_of_a_block_run(block: Snippet, tmp_path: Path) -> None:
    (tmp_path / "demo_traces.jsonl").write_bytes((ROOT / "worker/data/demo_traces.jsonl").read_bytes())
    (tmp_path / "trace.jsonl").write_bytes(trace_bytes() + b"\n")
    (tmp_path / "schemas").symlink_to(ROOT / "schemas")
    subprocess.run([*WORKER, "score", "trace.jsonl", "-o", "one.json"], env=NO_MODEL, cwd=tmp_path, check=True)
    for command in block.commands():
        done = subprocess.run(
            [*WORKER, *shlex.split(command, comments=True)[1:]],
            env=NO_MODEL, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        shown = block.text.split(command + "\n")[1].splitlines()[0]
        assert shown.split()[:2] == said.split()[:2] or said.startswith("{"), said


NO_MODEL = environment(KP_EMBEDDER="none", PYTHONPATH=str(ROOT))
