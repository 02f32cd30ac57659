"""docs/settings.md and `config` in docs/commands.md: config file and outputs are the code's."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.surroundings import DOCS
from worker.cli import cli
from worker.config import load
from worker.core.scoring import PROFILES, Weights

DOCUMENT = DOCS / "settings.md"
COMMANDS = DOCUMENT.with_name("commands.md").read_text("utf-8")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's own config file, as kp-worker.toml in the working directory."""
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kp-worker.toml"
    path.write_text(text)
    return path


def test_the_config_file_of_the_page_does_what_it_says(file: Path) -> None:
    settings = load(file)
    assert (settings.threshold, settings.cache_ttl_seconds) == (0.7, 7200)
    profiles = settings.scoring_profiles()
    assert (profiles["legal"].weights, profiles["legal"].threshold) == (PROFILES["default"].weights, 0.6)
    assert profiles["code"].weights == Weights(0.2, 0.4, 0.2, 0.2)


@pytest.mark.usefixtures("file")
def test_the_commands_of_the_page_run() -> None:
    """`run` is asked for its settings alone: its options are those of every command."""
    lines = re.findall(r"^\$ kp-worker (config .*?|run .*?)(?: +#.*)?$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        arguments = line.replace("run ", "config show ").split()
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.stderr
    assert '"name": "profiles.legal.threshold", "value": 0.5' in result.stdout


def test_the_outputs_of_config_in_the_commands_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = COMMANDS.split("## `kp-worker config`")[1].split("\n## ")[0]
    wrong, shown = re.findall(r"```console\n\$ kp-worker (.*?)\n(.*?)```", section, re.DOTALL)
    Path("kp-worker.toml").write_text("treshold = 1\n[profiles.code]\nthreshold = 2\n")
    assert CliRunner().invoke(cli, wrong[0].split()).stderr == wrong[1]
    Path("kp-worker.toml").write_text("threshold = 0.7\n[profiles.legal]\nthreshold = 0.6\n")
    output = CliRunner().invoke(cli, [*shown[0].split(), "--text"]).stdout
    assert output == shown[1]
