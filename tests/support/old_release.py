"""An old release of the worker beside this checkout: its source by `git archive`, and an environment of its own.

Both are kept in the user's cache directory, so that a second run is quick.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.distribution import UV
from tests.support.kafka_fixtures import Tree
from tests.support.surroundings import ROOT
from worker.lab.broker.kafka_jars import default_cache

FIRST_RELEASE = "7a7a6d92f356f06e3b2091b0e183ece10d4b917e"
"""The last commit of 0.1.0, the first release."""


class OldReleaseError(RuntimeError):
    """The old release cannot be set up."""


def old_release(revision: str) -> Tree:
    """Return the release of that commit. Raises OldReleaseError that says what is missing."""
    commit = _commit(revision)
    place = default_cache() / "old-releases" / commit[:12]
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(Path(temporary) / "tree", filter="data")
            (Path(temporary) / "tree").rename(place)
    python = place / ".venv" / "bin" / "python"
    ready = place / ".ready"
    if not ready.exists():
        _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(place / ".venv"))
        _uv(
            "pip", "install", "--quiet", "--python", str(python), "-r", str(place / "pyproject.toml"),
            "--constraint", str(place / "requirements.lock"),
        )  # fmt: skip
        ready.touch()
    return Tree(place, python)


def _commit(revision: str) -> str:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise OldReleaseError("this needs git, for the source of the old release; install it") from None
    if found.returncode:
        raise OldReleaseError(
            f"commit {revision} of the old release is not in this clone: take a clone with its whole history "
            "(git fetch --unshallow), not a shallow one or an unpacked archive"
        )
    return found.stdout.strip()


def _uv(*arguments: str) -> None:
    done = subprocess.run([*UV, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OldReleaseError(f"the old release's environment cannot be made: uv {arguments[0]}: {done.stderr.strip()}")
