"""`docker_engine()`: the Docker engine that answers, or else one of our own; and the build of the image in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tests.runs.image import base, buildx
from tests.runs.image.errors import EngineError, attempt, call
from tests.runs.image.own import own_engine
from tests.support.surroundings import ROOT


class DockerEngine:
    """A running engine. `env` is the environment in which docker and its plugins talk to it."""

    def __init__(self, env: Mapping[str, str], own: bool) -> None:
        self.env = dict(env)
        self.own = own
        version = self.docker("version", "--format", "{{.Server.Version}}").stdout.strip()
        self.name = f"Docker {version}" + (" (an engine of its own)" if own else "")

    def docker(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a docker command. Raises EngineError with its standard error."""
        return call(["docker", *arguments], env=self.env)

    def attempt(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a docker command that may fail."""
        return attempt(["docker", *arguments], env=self.env)

    def show(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        """Run a docker command whose output is for the reader. Raises EngineError."""
        if (code := subprocess.run(["docker", *arguments], env=self.env, cwd=cwd, check=False).returncode) != 0:
            raise EngineError(f"`docker {' '.join(map(str, arguments))}` failed with exit code {code}")

    def python_base(self) -> None:
        """See that the base image of deploy/Dockerfile is there: pulled, or else the stand-in under its name.

        Raises EngineError where only a stand-in would do, but others use the engine.
        """
        name = base.PYTHON_NAME
        if self.attempt("image", "inspect", name).returncode == 0:
            return
        if self.own:
            changes = [f"--change={it}" for it in base.PYTHON_CONFIG]
            self.docker("import", *changes, base.python_base(), name)
        elif self.attempt("pull", "--quiet", name).returncode != 0:
            raise EngineError(
                f"{name} cannot be pulled, and no stand-in is put into an engine that others use: load the image into "
                "it, or stop it, and an engine of its own is started here"
            )


def answers() -> bool:
    """Return whether there is a docker command, and an engine that answers it."""
    return shutil.which("docker") is not None and attempt(["docker", "info"]).returncode == 0


@contextlib.contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """Yield the engine that answers, or else one of our own until the block ends, also by Ctrl-C or SIGTERM.

    Raises EngineError that says what to install.
    """
    own = not answers()
    with _terminated(), contextlib.ExitStack() as stack:
        env = dict(os.environ)
        if own:
            env["DOCKER_HOST"] = stack.enter_context(own_engine())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-docker-")))
        yield DockerEngine({**env, **buildx.configure(directory)}, own)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the check like Ctrl-C: blocks are left in order, and clean up."""

    def leave(number: int, _frame: FrameType | None) -> Any:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def build_image(engine: DockerEngine, tag: str, arguments: Mapping[str, str]) -> str:
    """Build deploy/Dockerfile with build arguments; return the base image's name. Raises EngineError."""
    if "BASE" not in arguments:
        engine.python_base()
    options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    engine.show("build", *options, "--file", "deploy/Dockerfile", "--tag", tag, ".", cwd=ROOT)
    return arguments.get("BASE", base.PYTHON_NAME)
