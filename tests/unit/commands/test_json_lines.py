"""The lines of a file, as all commands read them: split as they should be, bounded in memory, never from a device."""

import gzip
import io
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.builders import trace_bytes
from tests.support.converted import OPTIONS
from tests.support.processes import WORKER
from tests.support.reports import outputs
from worker.cli import cli
from worker.commands.shared.json_lines import LINE_FACTOR, Line, LineSplitter, not_traces, read_lines, too_long

CONVERT = ("convert", "--from", "chat", *OPTIONS)
NO_MODEL = {"KP_EMBEDDER": "none"}

HOLE = 256 << 20
"""Bytes of a line that is too long: a hole in its file, which takes no place on the disk."""


# -- where a line ends


def test_lines_do_not_depend_on_how_they_arrive(seed: int) -> None:
    rng = random.Random(seed)
    most = 2 * LINE_FACTOR
    for _ in range(200):
        parts = [rng.choice([b"a", b"\r", b"\n", b"\r\n", b"b" * rng.randint(1, 2 * most)]) for _ in range(30)]
        content = b"".join(parts)
        expected = [
            Line(number, b"" if len(raw.rstrip(b"\n")) > most else raw.rstrip(b"\r\n"), len(raw),
                 too_long(most) if len(raw.rstrip(b"\n")) > most else None)
            for number, raw in enumerate(content.splitlines(keepends=True) if b"\r" not in content else
                                         io.BytesIO(content), 1)
        ]  # fmt: skip
        assert list(read_lines(io.BytesIO(content), most // LINE_FACTOR)) == expected
        splitter = LineSplitter(most // LINE_FACTOR)
        found = []
        while content:
            size = rng.randint(1, 40)
            found += splitter.feed(content[:size])
            content = content[size:]
        assert [*found, *splitter.feed(b"")] == expected


def test_a_line_comes_as_soon_as_it_has_ended() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as file, open(writing, "wb", buffering=0) as pipe:
        lines = read_lines(file, 100)
        pipe.write(b"one\ntw")
        assert next(lines).data == b"one"
        pipe.write(b"o\n")
        assert next(lines).data == b"two"


# -- how long a line may be


def with_a_hole(path: Path, first: bytes, last: bytes) -> str:
    """Write a file of three lines, of which the second one is too long."""
    with path.open("wb") as file:
        file.write(first + b"\n")
        file.seek(HOLE, os.SEEK_CUR)
        file.write(b"\n" + last + b"\n")
    return str(path)


MEASURED = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "worker", *sys.argv[1:]], stderr=subprocess.STDOUT)
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Runs a command from a small process: Linux counts the memory of the one that forks as a child's peak."""


def run_measured(*arguments: str) -> tuple[int, str, int]:
    """Run a command as a process; return exit code, output, and its peak memory (bytes)."""
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, env={**os.environ, **NO_MODEL}, text=True, stdout=subprocess.PIPE, check=True)
    output, _, last = done.stdout.rstrip("\n").rpartition("\n")
    code, peak = last.split()
    return int(code), output, int(peak) * (1 if sys.platform == "darwin" else 1024)


RUN = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}).encode()


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["score", "convert", "report", "explain", "convert one run"])
def test_a_line_that_is_too_long_is_named_and_not_read(command: str, tmp_path: Path) -> None:
    """The other lines are read, and no command keeps more of it than a line may have."""
    traces = [trace_bytes("kp:trace:1"), trace_bytes("kp:trace:2")]
    first, last = outputs(traces, embed=False)
    if command.startswith("convert"):
        first = last = RUN
    name = "one.json" if command == "convert one run" else "three.jsonl"
    path = with_a_hole(tmp_path / name, first, last)
    arguments = {
        "score": ("score", path, "-o", str(tmp_path / "scored"), "--dead-letters", str(tmp_path / "dead")),
        "convert": (*CONVERT, path),
        "convert one run": (*CONVERT, path),
        "report": ("report", path, "--set", "threshold=0"),
        "explain": ("explain", path, "--line", "2"),
    }[command]
    _, output, peak = run_measured(*arguments)
    problem = too_long(LINE_FACTOR * 1_048_576)
    expected = {
        "score": f"{path}:2: too_large: {problem}",
        "convert": f"{path}:2: too_large: {problem}",
        "convert one run": f"{path}: too_large: {problem}",
        "report": f"  line 2: {problem}",
        "explain": f"{path}: line 2: more than 1048576 bytes",
    }[command]
    assert expected in output
    assert "Traceback" not in output
    assert peak < HOLE, f"{peak >> 20} MiB"
    if command == "score":
        assert "2 accepted, 0 rejected, 1 dead letter" in output
        assert json.loads((tmp_path / "dead").read_bytes()) == {
            "line": 2, "reason": "too_large", "path": "", "message": problem,
        }  # fmt: skip
    if command == "convert":
        assert "3 runs read, 2 written, 1 refused" in output


def test_the_limit_follows_the_largest_trace(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_bytes(trace_bytes() + b"\n" + b"x" * (LINE_FACTOR * 1024 + 1) + b"\n" + b"x" * LINE_FACTOR * 1024)
    result = CliRunner().invoke(
        cli, ["score", str(path), "--dead-letters", str(tmp_path / "dead"), "--set", "max_message_bytes=1024"],
        env=NO_MODEL,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "2 dead letters" in result.stderr
    assert f":2: too_large: longer than {LINE_FACTOR * 1024} bytes, 32 times KP_MAX_MESSAGE_BYTES" in result.stderr
    assert ":3: too_large: 32768 bytes, the limit is 1024" in result.stderr
    second, third = map(json.loads, (tmp_path / "dead").read_bytes().splitlines())
    assert ("value" in second, len(third["value"])) == (False, LINE_FACTOR * 1024)


# -- what may be read


@pytest.mark.parametrize("command", [("score",), CONVERT, ("explain",)], ids=lambda command: command[0])
def test_a_device_as_standard_input_is_refused(command: tuple[str, ...]) -> None:
    with open("/dev/zero", "rb") as zero:
        done = subprocess.run(
            [*WORKER, *command, "-"],
            stdin=zero, capture_output=True, text=True, env={**os.environ, **NO_MODEL}, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "it is a device" in done.stderr


def test_a_fifo_a_pipe_and_the_null_device_are_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(RUN + b"\n"))
    writer.start()
    result = CliRunner().invoke(cli, [*CONVERT, str(fifo)])
    writer.join()
    assert result.exit_code == 0, result.output
    assert f"{fifo}: 1 run read, 1 written" in result.stderr
    done = subprocess.run([*WORKER, *CONVERT, "/dev/stdin"], input=RUN, capture_output=True, timeout=60, check=True)
    assert b"1 run read, 1 written" in done.stderr
    assert "0 traces" in CliRunner().invoke(cli, ["score", "/dev/null"], env=NO_MODEL).stderr


# -- what is no JSON Lines of traces


@pytest.mark.parametrize(
    ("content", "what", "change"),
    [
        (b'[{"id": "a, [b"},\n', "holds JSON over several lines", "jq -c '.[]'"),
        (b'[{"id": 1}]\n', "holds JSON over several lines", "jq -c '.[]'"),
        (b'{\n"id": 1}\n{\n"id": 2}', "holds JSON over several lines", "jq -c ."),
        (b"[\n{}\n]\n[\n]", "holds JSON over several lines", "jq -c '.[]'"),
        (gzip.compress(b"{}", mtime=0), "is compressed by gzip", "gunzip -c"),
        (b"\x28\xb5\x2f\xfd\x00", "is compressed by zstd", "zstd -dc"),
        ("{}".encode("utf-16"), "is in UTF-16", "iconv -f UTF-16 -t UTF-8"),
        (b'[{"role": "user", "content": "hi"}]', "looks like chat messages", ""),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "looks like chat messages", ""),
        (b'{\n "messages": [{"role": "user", "content": "hi"}]\n}\n', "looks like chat messages", ""),
        (b'{"resourceSpans": []}', "looks like OpenTelemetry spans", ""),
        (b'{"type": "session_meta", "payload": {}}', "looks like a coding agent's session", ""),
        (b'{"schema_version": "ATIF-v1.6"}', "looks like a trajectory", ""),
        *((other, None, "") for other in (b"[]", b"{}", b'{"id": "kp:tra', b"", b"7", b"null")),
    ],
)
def test_a_file_that_holds_no_traces_is_known_by_its_first_line(content: bytes, what: str | None, change: str) -> None:
    first = next(read_lines(io.BytesIO(content), 1000), Line(1, b"", 0)).data
    if what is None:
        assert not_traces("a b.json", first) is None
        return
    for name, shown, remedy in (
        ("a b.json", "a b.json", f"{change} 'a b.json'"), *((piped, "standard input", f"pipe it through {change}")
                                                           for piped in ("-", "<stdin>"))
    ):  # fmt: skip
        found = not_traces(name, first) or ""
        assert found.startswith(f"{shown} {what}")
        assert found.endswith(f"one trace per line is expected: {remedy}" if change else
                              "not like traces: kp-worker convert makes traces of them")  # fmt: skip


def test_one_document_over_several_lines_is_one_line_and_the_mark_of_utf_8_is_no_part_of_it() -> None:
    document = json.loads(trace_bytes())
    pretty = json.dumps(document, indent=1).encode()
    for content in (pretty, pretty.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + pretty + b"\n\n"):
        for size in (1, 7, len(content)):
            splitter = LineSplitter(10_000, pretty=True)
            chunks = [content[at : at + size] for at in range(0, len(content), size)]
            (line,) = [line for chunk in (*chunks, b"") for line in splitter.feed(chunk)]
            assert (line.number, line.problem) == (1, None)
            assert json.loads(line.data) == document
            assert b"\n" not in line.data
    assert [line.data for line in read_lines(io.BytesIO(b"\xef\xbb\xbf{}\n\xef\xbb\xbf{}"), 100)] == [
        b"{}", b"\xef\xbb\xbf{}",
    ]  # fmt: skip
    (long,) = read_lines(io.BytesIO(b"{\n" + b" \n" * 2000), 10)
    assert (long.data, long.problem) == (b"", too_long(10 * LINE_FACTOR))
