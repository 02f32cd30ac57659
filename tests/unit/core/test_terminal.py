"""Nothing that a record, a broker, a file or a setting says steers a terminal or hides in a log."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from tests.support.builders import T0
from tests.support.converted import OPTIONS
from tests.support.surroundings import ROOT, environment
from tests.support.terminal import (
    COMMAND_S,
    EVIL,
    ON_KAFKA,
    controls,
    evil_files,
    evil_letter,
    evil_outputs,
    in_pipes,
    is_control,
    on_terminal,
)
from worker.cli import cli
from worker.commands.doctor.finding import as_lines, fail
from worker.commands.redrive.steps import examples_table
from worker.commands.shared.scored_rows import TailRecord, rows
from worker.commands.topics import TopicRow, print_report
from worker.core.terminal import clean, clean_json, clean_json_bytes
from worker.kafka.topics import Problem
from worker.observe.logs import BareFormatter, JsonFormatter, TextFormatter

VISIBLE = r"\x1b[2J"


@pytest.mark.slow
def test_every_control_of_unicode_becomes_visible() -> None:
    everything = [chr(code) for code in range(sys.maxunicode + 1)]
    for character in everything:
        if is_control(character):
            assert clean(character).isascii()
            assert clean(character).isprintable()
            assert clean(character, keep=character) == character
    ordinary = "".join(c for c in everything if not is_control(c) and unicodedata.category(c)[0] in "LMNPS") + " "
    assert clean(ordinary) == ordinary
    assert (
        clean("family 👨‍👩‍👧, \u06cc\u200c\u06a9, 中文, é\u0301") == "family 👨‍👩‍👧, \u06cc\u200c\u06a9, 中文, é\u0301"
    )
    assert clean("one\ntwo") == r"one\ntwo"
    assert clean("one\ntwo\x1b", "\n") == "one\ntwo\\x1b"


def test_json_stays_the_same_json() -> None:
    document = {EVIL: [EVIL, {"\U0001d173": "\n\t\r\0"}], "é": "中文\ud800"}
    for indent in (None, "\t"):
        text = json.dumps(document, ensure_ascii=False, indent=indent).replace("\n", "\r\n")
        assert json.loads(clean_json(text)) == document
        assert controls(clean_json(text)) <= {"\n"}
    raw = json.dumps({"a": EVIL}, ensure_ascii=False).encode()
    assert json.loads(clean_json_bytes(raw)) == {"a": EVIL}
    assert b"\x7f" not in clean_json_bytes(raw)


# -- views and logs


def rendered(*shown: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=200, highlight=False).print(*shown)
    return file.getvalue()


def demo() -> str:
    documents = [json.loads(output.value) for output in evil_outputs()]
    for document in documents:
        document["scoring"]["nearest"] = {"id": documents[0]["id"], "similarity": 0.5}
    scored = [TailRecord(None, document, None) for document in documents]  # type: ignore[arg-type]
    return rendered(rows(scored))


def doctor() -> str:
    return "\n".join(as_lines(fail(EVIL, EVIL, EVIL), 80))


def topics() -> str:
    file = io.StringIO()
    row = TopicRow("KP_SOURCE_TOPIC", EVIL, "exists", 1, 1, 1, [], [EVIL])
    problem = Problem(EVIL, EVIL)
    print_report(Console(file=file, width=200, highlight=False), [row], [problem])
    return file.getvalue()


def redrive() -> str:
    from worker.core.dead_letters import read_dead_letter
    from worker.core.records import SourceRecord

    letter = evil_letter()
    headers = [(name, EVIL.encode() if name == "kp-error-reason" else value) for name, value in letter.headers]
    record = SourceRecord("t", 0, 0, T0, letter.key, letter.value, headers)
    read = read_dead_letter(record)
    return rendered(examples_table([read]))


def logged(formatter: logging.Formatter) -> str:
    try:
        raise RuntimeError(EVIL)
    except RuntimeError:
        record = logging.LogRecord("worker", logging.ERROR, __file__, 1, "said %s", (EVIL,), sys.exc_info())
    record.trace = record.reason = record.path = EVIL
    return formatter.format(record)


VIEWS: dict[str, Callable[[], str]] = {
    "demo": demo, "doctor": doctor, "topics": topics, "redrive": redrive,
    "text log": lambda: logged(TextFormatter()), "warning of a command": lambda: logged(BareFormatter()),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_views_and_logs_show_what_would_steer(view: str) -> None:
    text = VIEWS[view]()
    assert VISIBLE in text
    assert controls(text) <= {"\n"}


def test_json_logs_hold_the_same_text_without_a_control() -> None:
    line = logged(JsonFormatter())
    assert not controls(line)
    assert EVIL in json.loads(line)["message"]


# -- commands, as processes


COMMANDS: dict[str, list[str]] = {
    "score": ["score", "{traces}", "--dead-letters", "-"],
    "score: redacted": ["score", "{secret}", "--redact", "all", "--output", os.devnull],
    "score: name": ["score", "{named}"],
    "explain a trace": ["explain", "{trace}"],
    "explain a document": ["explain", "{document}"],
    "explain: refused": ["explain", "{bad}"],
    "explain: name": ["explain", "{named}"],
    "explain: no file": ["explain", f"/nowhere/{EVIL}"],
    "report": ["report", "{scored}", "--set", "threshold=0"],
    "report: name": ["report", "{named}"],
    "report: outcome": ["report", "{scored}", "--outcome", EVIL],
    "fetch-model": ["fetch-model", "--from", EVIL],
    "an option": ["tail", f"--{EVIL}"],
    "a command": [EVIL],
    "a reason": ["redrive", "--reason", EVIL],
    "a time": ["redrive", "--since", EVIL],
    "a setting": ["topics"],
    "doctor: a setting": ["doctor"],
    "run: a setting": ["run"],
    "contribute: a setting": ["contribute"],
    "assemble: a setting": ["assemble"],
    "assemble: no file": ["assemble", "--try", f"/nowhere/{EVIL}"],
    "verdict: a setting": ["verdict", "-"],
    "config": ["config", "show", "--set", f"group_id={EVIL}"],
    "config: no file": ["config", "check", f"/nowhere/{EVIL}"],
    "config: not TOML": ["config", "check", "{named}"],
    "config: an assignment": ["config", "show", "--set", f"{EVIL}=1"],
    "config: a key": ["config", "show", "--set", '"\\u001b[2J\\u202e"=1'],
    "convert": ["convert", "--from", "chat", *OPTIONS, "{runs}"],
    "convert: an option": ["convert", "--from", "chat", *OPTIONS, "--domain", f"@{EVIL}..", "{runs}"],
}
SILENT = {"score: name", "config: an assignment"}
"""What shows no such text: for the assignment, because it could be a secret."""
TABLES = {
    "score", "explain a trace", "explain a document", "report", "a setting", "doctor: a setting", "config", "convert",
}  # fmt: skip
"""What looks otherwise on a terminal; the others write the same there, and each process takes seconds."""

BAD_SETTINGS = {"KP_BOOTSTRAP_SERVERS": EVIL, "KP_THRESHOLD": EVIL}
UNKNOWN_SETTING = {f"KP_{EVIL.upper().replace('=', '')}": "1"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return evil_files(tmp_path_factory.mktemp("evil"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "terminal"),
    [*((command, False) for command in COMMANDS), *((command, True) for command in sorted(TABLES))],
)
def test_no_command_lets_a_control_through(command: str, terminal: bool, files: dict[str, str]) -> None:
    settings = {"KP_EMBEDDER": "none", **UNKNOWN_SETTING, **(BAD_SETTINGS if "setting" in command else {})}
    env = environment(**settings)
    args = [argument.format(**files) if argument.startswith("{") else argument for argument in COMMANDS[command]]
    ran = (on_terminal if terminal else in_pipes)(env, *args)
    assert "Traceback" not in ran.text
    if command in ("score", "convert") and not terminal:  # documents for programs, to the byte
        document, text = json.loads(ran.text.split("\n")[0]), ran.text.partition("\n")[2]
        assert EVIL in (document["id"].removeprefix("kp:trace:"), document["task"]["objective"])
        assert command == "score" or controls(text) <= {"\n"}
        return
    assert controls(ran.text) <= {"\n"}
    assert command in SILENT or re.search(r"\\+(x1b|u001b|x7f|u202e)", ran.text) is not None, ran.text[:2000]


def test_neither_a_bug_nor_a_warning_lets_one_through() -> None:
    script = (
        "import logging, sys; from worker import cli; text = sys.argv.pop()\n"
        "def fail(**_): logging.getLogger('aiokafka').warning('said %s', text); raise RuntimeError(text)\n"
        "cli.cli.main = fail; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, EVIL], cwd=ROOT, capture_output=True, timeout=COMMAND_S, check=False, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count(VISIBLE) == 2
    assert controls(done.stderr) <= {"\n"}


def test_every_command_is_tried() -> None:
    tried = {arguments[0] for arguments in [*COMMANDS.values(), *ON_KAFKA.values()]}
    views_alone = {"demo", "broker"}  # a broker of our own, and traces of our own: VIEWS has the demo's tables
    assert set(cli.commands) <= tried | views_alone


# -- commands that read Kafka
