"""The ends of processes: of those that a run started, and of the run itself."""

from __future__ import annotations

import signal
import subprocess
from typing import NoReturn


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
