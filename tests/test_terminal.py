"""Nothing that a record, a broker, a file or a setting says steers a terminal or hides in a log."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console, RenderableType

from tests.builders import T0, make_record, trace_bytes
from tests.commands import ROOT, Desk
from tests.kafka_fixtures import PATIENCE_S, produce
from worker import demo_view
from worker.cli import cli
from worker.embedded_kafka import EmbeddedKafka
from worker.finding import as_lines, fail
from worker.logs import BareFormatter, JsonFormatter, TextFormatter
from worker.pipeline import PartitionScorer, dead_letter, scored_record
from worker.redrive_view import examples_table
from worker.terminal import clean, clean_json, clean_json_bytes
from worker.topics_view import Report, TopicRow, show
from worker.trace import InvalidTrace, Reason, parse_trace

EVIL = "a\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b2J\x85\x7f\r\u202egpj\u2066\u200b\u2028[red]\U000e0041\x08"
VISIBLE = r"\x1b[2J"
MARKS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Format characters that are signs to be seen, of Arabic, Syriac and Kaithi numbers."""


def is_control(character: str) -> bool:
    """Whether Unicode calls it a control, hidden, a surrogate or a line's end; the joiners of words are none."""
    category = unicodedata.category(character)
    hieroglyphs = "\U00013430" <= character <= "\U0001343f"  # joiners of signs
    return category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d" + MARKS and not hieroglyphs


def controls(text: str) -> set[str]:
    return {character for character in text if is_control(character)}


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


def evil_record(offset: int = 0) -> Any:
    raw = trace_bytes(f"kp:trace:{EVIL}", domain=EVIL, objective=EVIL)
    return make_record(raw, offset, timestamp_ms=T0)


def evil_outputs() -> list[Any]:
    """Return two outputs of the same hostile trace; the second one names the first as its nearest."""
    scorer = PartitionScorer(dimensions=2)
    outputs = []
    for offset in range(2):
        record = evil_record(offset)
        outputs.append(scored_record(record, scorer.score(parse_trace(record.value), [1.0, 0.0], T0), None))
    return outputs


def evil_letter() -> Any:
    headers = [(EVIL, EVIL.encode()), ("kp-redrive-count", EVIL.encode())]
    record = make_record(b"{" + EVIL.encode(), 0, timestamp_ms=T0)._replace(headers=headers, key=EVIL.encode())
    return dead_letter(record, InvalidTrace(Reason.NOT_JSON, EVIL, EVIL))


def demo() -> str:
    documents = [json.loads(output.value) for output in evil_outputs()]
    for document in documents:
        document["scoring"]["nearest"] = {"id": documents[0]["id"], "similarity": 0.5}
    letter = {name: value.decode() for name, value in evil_letter().headers}
    return rendered(
        demo_view.scores_table(documents),
        demo_view.dead_letters_table([letter | {"kp-error-reason": EVIL}]),
        demo_view.explanation(documents[1], documents),
    )


def doctor() -> str:
    return "\n".join(as_lines(fail(EVIL, EVIL, EVIL), 80))


def topics() -> str:
    file = io.StringIO()
    row = TopicRow("KP_SOURCE_TOPIC", EVIL, "exists", 1, 1, 1, [], [EVIL])
    problem = {"level": "warn", "message": EVIL, "remedy": EVIL}
    show(Console(file=file, width=200, highlight=False), Report([row], [problem]))
    return file.getvalue()


def redrive() -> str:
    from aiokafka.structs import ConsumerRecord

    from worker.letters import read_letter

    letter = evil_letter()
    headers = [(name, EVIL.encode() if name == "kp-error-reason" else value) for name, value in letter.headers]
    record = ConsumerRecord("t", 0, 0, T0, 0, letter.key, letter.value, 0, 0, 0, headers)
    read = read_letter(record)
    assert read is not None
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

COMMAND_S = 3 * PATIENCE_S
"""Longest time for one command: most of it is Python's start, on a machine that may do much else."""


class Ran(NamedTuple):
    """Everything that a command wrote, standard error included."""

    code: int
    text: str


RICH = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|1A)|\r(?=\n|\x1b|$)")
"""What rich and click write of their own on a terminal: colours, the cursor of a status line. EVIL has none of them."""


def on_terminal(env: dict[str, str], *args: str) -> Ran:
    """Run a command on a terminal; return what it wrote, without rich's own sequences."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "worker", *args], env | {"COLUMNS": "200", "TERM": "xterm"})
    output = b""
    deadline = time.monotonic() + COMMAND_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                output += os.read(terminal, 65536)
            except OSError:  # it has ended
                break
    else:
        os.kill(child, signal.SIGKILL)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return Ran(os.waitstatus_to_exitcode(status), RICH.sub("", output.decode()))


def in_pipes(env: dict[str, str], *args: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "worker", *args], env=env, cwd=ROOT, capture_output=True, timeout=COMMAND_S, check=False
    )
    return Ran(done.returncode, (done.stdout + done.stderr).decode())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files with hostile content, and one with a hostile name."""
    folder = tmp_path_factory.mktemp("evil")
    outputs = evil_outputs()
    bad = json.dumps(json.loads(evil_record().value) | {"@type": EVIL}, ensure_ascii=False).encode()
    content = {
        "traces": evil_record().value + b"\n" + bad + b"\n",
        "scored": b"".join(output.value + b"\n" for output in outputs) + b'{"scoring":"\x1b"}\n',
        "trace": evil_record().value,
        "document": outputs[1].value,
        "bad": bad,
    }
    paths = {}
    for name, raw in content.items():
        paths[name] = str(folder / name)
        Path(paths[name]).write_bytes(raw)
    paths["named"] = str(folder / EVIL.replace("/", ""))
    Path(paths["named"]).write_bytes(content["bad"])
    return paths


COMMANDS: dict[str, list[str]] = {
    "score": ["score", "{traces}", "--dead-letters", "-"],
    "score: name": ["score", "{named}"],
    "explain a trace": ["explain", "{trace}"],
    "explain a document": ["explain", "{document}"],
    "explain: refused": ["explain", "{bad}"],
    "explain: name": ["explain", "{named}"],
    "explain: no file": ["explain", f"/nowhere/{EVIL}"],
    "report": ["report", "{scored}", "--output", "-"],
    "report: name": ["report", "{named}"],
    "export-model": ["export-model", "--model", f"/nowhere/{EVIL}"],
    "an option": ["tail", f"--{EVIL}"],
    "a command": [EVIL],
    "a reason": ["redrive", "--reason", EVIL],
    "a time": ["redrive", "--since", EVIL],
    "a setting": ["topics"],
    "doctor: a setting": ["doctor"],
    "run: a setting": ["run"],
    "completion": ["completion", "bash"],
}
SILENT = {"completion", "score: name"}
TABLES = {"score", "explain a trace", "explain a document", "a setting", "doctor: a setting"}
"""What looks otherwise on a terminal; the others write the same there, and each process takes seconds."""

BAD_SETTINGS = {"KP_BOOTSTRAP_SERVERS": EVIL, "KP_THRESHOLD": EVIL}
UNKNOWN_SETTING = {f"KP_{EVIL.upper().replace('=', '')}": "1"}


@pytest.mark.parametrize(
    ("command", "terminal"),
    [*((command, False) for command in COMMANDS), *((command, True) for command in sorted(TABLES))],
)
def test_no_command_lets_a_control_through(command: str, terminal: bool, files: dict[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    env |= {"KP_EMBEDDER": "none", **UNKNOWN_SETTING, **(BAD_SETTINGS if "setting" in command else {})}
    args = [argument.format(**files) if argument.startswith("{") else argument for argument in COMMANDS[command]]
    ran = (on_terminal if terminal else in_pipes)(env, *args)
    assert "Traceback" not in ran.text
    if command == "score" and not terminal:  # documents for programs, to the byte
        assert json.loads(ran.text.split("\n")[0])["id"] == f"kp:trace:{EVIL}"
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

ON_KAFKA: dict[str, list[str]] = {
    "tail": ["tail", "--no-follow"],
    "tail dead letters": ["tail", "--no-follow", "--dead-letters"],
    "tail all": ["tail", "--no-follow", "--dead-letters", "--accepted", "--rejected", "--from-beginning"],
    "redrive": ["redrive"],
    "redrive --to-source": ["redrive", "--execute"],
    "report": ["report", "--from-kafka", "--output", "-"],
    "publish": ["publish", "{traces}"],
    "publish: name": ["publish", "{named}"],
    "topics": ["topics"],
    "doctor": ["doctor"],
}


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    desk = Desk(kafka)
    for number, output in enumerate(evil_outputs()):
        row = (EVIL.encode(), output.value, [*output.headers, (EVIL, EVIL.encode())], number % 2, T0)
        produce(desk.bootstrap, desk.topics[output.kind], [row])
    letter = evil_letter()
    source = desk.name.encode()
    headers = [(name, source if name == "kp-source-topic" else value) for name, value in letter.headers]
    another = [(name, EVIL.encode() if name == "kp-error-reason" else value) for name, value in headers]
    rows = [(letter.key, letter.value, chosen, 0, T0) for chosen in (headers, another, headers * 2)]
    produce(desk.bootstrap, desk.topics["dead-letter"], rows)
    return desk


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("command", "terminal"),
    [*((command, False) for command in ON_KAFKA), *((command, True) for command in ON_KAFKA if command != "report")],
)
def test_nor_does_one_that_reads_kafka(command: str, terminal: bool, files: dict[str, str], desk: Desk) -> None:
    args = [argument.format(**files) if argument.startswith("{") else argument for argument in ON_KAFKA[command]]
    settings = {"KP_MODEL": f"/nowhere/{EVIL}", "KP_EMBEDDER": "auto"} if command == "doctor" else {}
    ran = (on_terminal if terminal else in_pipes)(desk.env | settings, *args)
    assert "Traceback" not in ran.text
    assert controls(ran.text) <= {"\n"}
    silent = command in ("topics", "redrive --to-source")
    assert silent or re.search(r"\\+(x1b|u001b|x7f|u202e)", ran.text) is not None, ran.text[:2000]
    if command.startswith("tail") and not terminal:
        texts = [text for line in ran.text.splitlines() for text in _values(json.loads(line))]
        assert any(EVIL in text for text in texts), "the same JSON"


def _values(document: Any) -> list[str]:
    """Return every text in a document."""
    if isinstance(document, str):
        return [document]
    items = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return [text for item in items for text in _values(item)]
