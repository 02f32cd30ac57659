"""`kp-worker demo` and `broker` from start to end."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import WORKER
from tests.support.surroundings import ROOT, environment
from worker.commands.shared.options import SAMPLES

LINES = SAMPLES.read_bytes().splitlines()


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", *WORKER[1:], *arguments],
        cwd=ROOT,
        env=environment(KP_EMBEDDER="none", TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_to(process: subprocess.Popen[str], words: str) -> str:
    """Return what it printed up to the line with these words."""
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"no line with {words!r} in:\n{text}")


def demo(tmp_path: Path, *options: str) -> str:
    """Return what a demo printed that ended well, and left nothing."""
    process = start(tmp_path, "demo", *options)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []
    return text


@pytest.mark.sample(2, "demo")
def test_demo_end_to_end(tmp_path: Path) -> None:
    text = demo(tmp_path)
    found = re.search(r"published (\d+) +accepted (\d+) +rejected (\d+) +dead letters (\d+)", text)
    assert found, text
    published, accepted, rejected, dead = map(int, found.groups())
    assert published == len(LINES) + 7 == accepted + rejected + dead
    assert dead == 7
    assert all(json.loads(line)["id"][9:17] in text for line in LINES)
    assert "\x1b" not in text
    assert "WARNING" not in text


@pytest.mark.sample(2, "demo")
def test_demo_with_spans_shows_their_scores(tmp_path: Path) -> None:
    text = demo(tmp_path, "--otlp")
    assert "From OpenTelemetry: 3 runs in 8 records of spans" in text


@pytest.mark.sample(2, "demo")
def test_demo_with_verdicts_shows_an_agent_that_loses_its_confidence(tmp_path: Path) -> None:
    text = demo(tmp_path, "--verdicts")
    rows = re.findall(
        r"(boaster|steady) +(0\.\d\d) +(\d+) of (\d+) +(0\.\d\d) +(0\.\d\d) +(accepted|rejected) +(0\.\d\d)", text
    )
    assert len(rows) == 10
    boaster, steady = ([row for row in rows if row[0] == name] for name in ("boaster", "steady"))
    assert [row[1] for row in boaster] == ["0.99"] * 5
    assert [(row[2], row[3]) for row in boaster] == [("0", "0"), ("1", "6"), ("2", "12"), ("3", "18"), ("4", "24")]
    used = [float(row[4]) for row in boaster]
    assert used == sorted(used, reverse=True)
    assert used[-1] < 0.3 < 0.7 < float(steady[-1][4])
    assert boaster[-1][6] == "rejected"
    score, weighted = ([float(row[column]) for row in (boaster[-1], steady[-1])] for column in (5, 7))
    assert weighted[1] - weighted[0] > 2 * (score[1] - score[0])
    assert steady[-1][6] == "accepted"


@pytest.mark.sample(2, "demo")
def test_demo_keeps_running_until_asked(tmp_path: Path) -> None:
    with start(tmp_path, "demo", "--keep-running") as process:
        text = read_to(process, "stop     Ctrl-C")
        for command in re.findall(r"((?:\S+/)?kp-worker (?:tail|publish) .*)", text):
            done = subprocess.run(
                [*shlex.split(command), *["--no-follow"] * ("tail" in command)],
                check=False, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert len(done.stdout.splitlines()) == (0 if "publish" in command else 7 if "dead" in command else 10)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert "worker ended with exit code 0" in rest
    assert list(tmp_path.iterdir()) == []


def test_demo_cleans_up_when_interrupted_or_when_the_worker_fails(tmp_path: Path) -> None:
    with start(tmp_path, "demo") as process:
        read_to(process, "ok  kafka")
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert list(tmp_path.iterdir()) == []

    process = start(tmp_path, "demo", "--set", "embedder=openvino", "--set", "model=/no/such/model")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Error: the worker ended with exit code" in text
    assert "/no/such/model" in text
    assert list(tmp_path.iterdir()) == []


def test_broker_runs_until_asked_and_keeps_its_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with start(tmp_path, "broker", "--data-dir", str(data)) as process:
        text = read_to(process, "stop     Ctrl-C")
        assert re.search(r"KP_BOOTSTRAP_SERVERS=127\.0\.0\.1:\d+ KP_CREATE_TOPICS=true (\S+/)?kp-worker run", text)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert "broker stopped" in rest
    assert list(tmp_path.iterdir()) == [data]
