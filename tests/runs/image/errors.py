"""The error of everything here, and commands that raise it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class EngineError(Exception):
    """No engine, or it cannot do what is asked; the message says what to install."""


def call(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed. Raises EngineError with its standard error."""
    done = attempt(command, env=env, cwd=cwd)
    if done.returncode != 0:
        shown = " ".join(str(part) for part in command)
        raise EngineError(f"`{shown}` failed with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done


def attempt(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail, and return its exit code and what it printed."""
    return subprocess.run(
        command, env=env, cwd=cwd, check=False, text=True, capture_output=True, stdin=subprocess.DEVNULL
    )
