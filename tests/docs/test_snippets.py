"""Every code block of README.md and docs/ is run by a test, or says why not. Here: those that need no Kafka."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.builders import trace_bytes
from tests.support.processes import WORKER
from tests.support.snippets import Snippet, snippets
from tests.support.surroundings import DOCS, ROOT, environment
from worker.config import Settings, load

BLOCKS = snippets()
MINE = snippets("tests/docs/test_snippets.py")
SETTINGS = {f"KP_{name.upper()}" for name in Settings.model_fields}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_names_its_test_and_only_settings_and_make_targets_that_exist(block: Snippet) -> None:
    """The test that is named has to read the page: through tests/support, or by the name of its file."""
    what, _, rest = block.mark.partition(": ")
    wanted = ("run", "not run", "") if block.language == "text" else ("run", "not run")
    assert what in wanted, f"{block}: put <!-- run: tests/... --> or <!-- not run: why --> above the block"
    for path in re.findall(r"tests/[\w/]+\.py", rest):
        assert (ROOT / path).is_file(), f"{block}: {path} does not exist"
    if what == "run":
        text = (ROOT / rest).read_text("utf-8")
        assert any(name in text for name in ("snippets(", "score_page import", Path(block.page).name)), block
    assert set(re.findall(r"\b(KP_[A-Z_]+)=", block.text)) <= SETTINGS
    if block.language == "console":
        assert set(re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)) <= TARGETS


def test_a_test_runs_every_example() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert not [each.name for each in (DOCS / "examples").iterdir() if f'{each.name}"' not in text]


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
    env = environment(KP_EMBEDDER="none", PYTHONPATH=str(ROOT))
    (tmp_path / "demo_traces.jsonl").write_bytes((ROOT / "worker/data/demo_traces.jsonl").read_bytes())
    (tmp_path / "trace.jsonl").write_bytes(trace_bytes() + b"\n")
    (tmp_path / "schemas").symlink_to(ROOT / "schemas")
    subprocess.run([*WORKER, "score", "trace.jsonl", "-o", "one.json"], env=env, cwd=tmp_path, check=True)
    for command in block.commands():
        done = subprocess.run(
            [*WORKER, *shlex.split(command, comments=True)[1:]],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed = done.stdout + done.stderr
        shown = block.text.split(command + "\n")[1].splitlines()[0]
        assert shown.split()[:2] == printed.split()[:2] or printed.startswith("{"), printed
