"""Records, letters and files with controls in every text, and commands on a terminal and in pipes."""

import contextlib
import json
import pty
import re
import select
import time
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.builders import T0, make_record, trace_bytes
from tests.support.kafka_fixtures import PATIENCE_S
from tests.support.processes import run_command, start_fork
from worker.core.changelog import encode
from worker.core.dead_letters import dead_letter
from worker.core.documents import scored_record
from worker.core.scorer import PartitionScorer
from worker.core.scoring import PROFILES
from worker.core.trace import InvalidTrace, Reason, parse_trace

EVIL = "a\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b2J\x85\x7f\r\u202egpj\u2066\u200b\u2028[red]\U000e0041\x08"
MARKS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Format characters that are signs to be seen, of Arabic, Syriac and Kaithi numbers."""


def is_control(character: str) -> bool:
    """Whether Unicode calls it a control, hidden, a surrogate or a line's end; the joiners of words are none."""
    category = unicodedata.category(character)
    hieroglyphs = "\U00013430" <= character <= "\U0001343f"  # joiners of signs
    return category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d" + MARKS and not hieroglyphs


def controls(text: str) -> set[str]:
    return {character for character in text if is_control(character)}


def evil_record(offset: int = 0) -> Any:
    raw = trace_bytes(f"kp:trace:{EVIL}", domain=EVIL, objective=EVIL)
    return make_record(raw, offset, timestamp_ms=T0)


def evil_outputs() -> list[Any]:
    """Return two outputs of the same hostile trace, by a hostile profile; the second names the first as its nearest."""
    scorer = PartitionScorer(dimensions=2, profiles={**PROFILES, EVIL: PROFILES["code"]})
    outputs = []
    for offset in range(2):
        record = evil_record(offset)
        outputs.append(scored_record(record, scorer.score(parse_trace(record.value), [1.0, 0.0], T0), None))
    return outputs


def evil_letter() -> Any:
    headers = [(EVIL, EVIL.encode()), ("kp-redrive-count", EVIL.encode())]
    record = make_record(b"{" + EVIL.encode(), 0, timestamp_ms=T0)._replace(headers=headers, key=EVIL.encode())
    return dead_letter(record, InvalidTrace(Reason.NOT_JSON, EVIL, EVIL))


def evil_entry() -> bytes:
    """Return a changelog entry of epoch 1 with hostile ids, of a hostile model."""
    vector = np.array([0.6, 0.8], dtype=np.float32)
    return encode(
        sequence=0, source_offset=0, stream_time_ms=T0, trace_id=EVIL, model=EVIL, vector=vector, epoch=1,
        agent_id=EVIL,
    )  # fmt: skip


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
    code, output = command_on_terminal(env, 200, *args)
    return Ran(code, RICH.sub("", output.decode()))


def command_on_terminal(env: dict[str, str], columns: int, *args: str) -> tuple[int, bytes]:
    """Run a command on a terminal of that width; return its exit code and all that it wrote."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as screen:
        with open(theirs, "r+b", buffering=0) as terminal:
            env = env | {"COLUMNS": str(columns), "TERM": "xterm"}
            process = start_fork("worker", args, env, stdin=terminal, stdout=terminal, stderr=terminal)
        output = b""
        deadline = time.monotonic() + COMMAND_S
        with contextlib.suppress(OSError):  # it has ended
            while time.monotonic() < deadline:
                if select.select([screen], [], [], 0.1)[0]:
                    output += screen.read(65536)
    process.kill()
    return process.wait(), output


def in_pipes(env: dict[str, str], *args: str) -> Ran:
    done = run_command("worker", args, env, seconds=COMMAND_S)
    return Ran(done.returncode, (done.stdout + done.stderr).decode())


def evil_files(folder: Path) -> dict[str, str]:
    """Write files with hostile content, and one with a hostile name."""
    outputs = evil_outputs()
    messages = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]
    runs = [{"messages": messages, EVIL: 1}, {"messages": [{"role": EVIL}]}]  # one gives a trace, one is refused
    bad = json.dumps(json.loads(evil_record().value) | {"@type": EVIL}, ensure_ascii=False).encode()
    content = {
        "traces": evil_record().value + b"\n" + bad + b"\n",
        "scored": b"".join(output.value + b"\n" for output in outputs) + b'{"scoring":"\x1b"}\n',
        "trace": evil_record().value,
        "secret": trace_bytes(objective=f"{EVIL} password={EVIL}"),
        "document": outputs[1].value,
        "bad": bad,
        "runs": b"".join(json.dumps(run, ensure_ascii=False).encode() + b"\n" for run in runs),
    }
    paths = {}
    for name, raw in content.items():
        paths[name] = str(folder / name)
        Path(paths[name]).write_bytes(raw)
    paths["named"] = str(folder / EVIL.replace("/", ""))
    Path(paths["named"]).write_bytes(content["bad"])
    return paths


ON_KAFKA: dict[str, list[str]] = {
    "tail": ["tail", "--no-follow"],
    "tail dead letters": ["tail", "--no-follow", "--dead-letters"],
    "tail all": ["tail", "--no-follow", "--dead-letters", "--accepted", "--rejected", "--from-beginning"],
    "text of tail": ["tail", "--no-follow", "--text", "--objective", "--accepted", "--rejected", "--dead-letters"],
    "redrive": ["redrive"],
    "redrive --to-source": ["redrive", "--execute"],
    "explain a place": ["explain", "0:0"],
    "explain an id": ["explain", "kp:trace:a"],
    "report": ["report", "--from-kafka"],
    "publish": ["publish", "{traces}"],
    "publish: name": ["publish", "{named}"],
    "topics": ["topics"],
    "doctor": ["doctor"],
}
