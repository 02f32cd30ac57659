"""Processes: commands of the worker, and the ends of what a run started and of the run."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

from tests.support import warm
from tests.support.surroundings import ROOT, environment

WORKER = (sys.executable, "-m", "worker")


def start_command(
    *args: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, **pipes: Any
) -> subprocess.Popen[Any]:
    """Start `python -m worker`, without the developer's settings if no environment is given; the test stops it."""
    return subprocess.Popen([*WORKER, *args], env=environment() if env is None else env, cwd=cwd, **pipes)


def start_fork(
    module: str, args: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT, *,
    stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes], cold: bool = False,
) -> subprocess.Popen[bytes] | warm.WarmProcess:  # fmt: skip
    """Start `python -m module` on files, terminals or pipes, in a fork where tests/support/warm.py is enabled."""
    if warm.enabled and not cold:
        return warm.WarmProcess(module, args, env, cwd, stdin=stdin, stdout=stdout, stderr=stderr)
    command = [sys.executable, "-m", module, *args]
    return subprocess.Popen(command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)


def run_command(
    module: str, args: Sequence[str], env: Mapping[str, str], stdin: bytes = b"", seconds: float = 120
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m module` to its end, as start_fork does."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = start_fork(module, args, env, stdin=given, stdout=out, stderr=err)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(args, code, out.read(), err.read())


def interrupt_on_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, also where a shell's background job ignores SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)


def _interrupted(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
