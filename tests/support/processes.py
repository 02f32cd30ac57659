"""Processes: commands of the worker, and the ends of what a run started and of the run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from tests.support import warm
from tests.support.surroundings import ROOT, environment

WORKER = (sys.executable, "-m", "worker")


def start_command(
    *args: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, **pipes: Any
) -> subprocess.Popen[Any]:
    """Start `python -m worker`, without the developer's settings if no environment is given; the test stops it."""
    return subprocess.Popen([*WORKER, *args], env=environment() if env is None else env, cwd=cwd, **pipes)


def run_command(
    module: str, args: Sequence[str], env: Mapping[str, str], stdin: bytes = b"", seconds: float = 120
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m module` to its end, in a fork where tests/support/warm.py is enabled."""
    if not warm.enabled:
        return subprocess.run(
            [sys.executable, "-m", module, *args], env=env, cwd=ROOT, input=stdin, capture_output=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = warm.WarmProcess(module, args, env, ROOT, stdin=given, stdout=out, stderr=err)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(args, code, out.read(), err.read())


def end_process(process: subprocess.Popen[bytes], patience_s: float) -> bool:
    """End a process by SIGTERM, by SIGKILL if it takes longer than the patience; return whether it needed none."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def interrupt_on_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, also where a shell's background job ignores SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)


def _interrupted(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
