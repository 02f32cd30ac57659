"""The two programs that can build and run the image here: a Docker engine, else buildah as root.

buildah only builds; its container's root file system is then run in a mount namespace of its own, with the user,
environment and command that the image names: read-only, a tmpfs on /tmp, no privileges, the host's network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from tests.runs.engine.base import PYTHON_CONFIG, PYTHON_NAME, python_base
from tests.runs.engine.docker import DockerEngine, answers, docker_engine
from tests.runs.engine.errors import EngineError, attempt, call
from tests.runs.engine.own import missing
from tests.runs.engine.product import build_image
from tests.support.surroundings import ROOT

STAND_IN: Final = "localhost/kp-worker-base:python-3.12"


class Engine(Protocol):
    """What the test asks of an engine."""

    name: str

    def build(self, tag: str, arguments: Mapping[str, str]) -> str:
        """Build the image; return the base image's name."""

    def config(self, tag: str) -> dict[str, Any]:
        """Return the image's configuration: User, Env, Entrypoint, Cmd, Healthcheck, ..."""

    def size(self, tag: str) -> str:
        """Return the size as the engine prints it."""

    def run(self, tag: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a container in the foreground: signals reach the worker, the exit code is the worker's."""

    def execute(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the container that run() started."""

    def close(self) -> None:
        """Remove the container."""


@contextlib.contextmanager
def image_engine(program: str | None = None) -> Iterator[Engine]:
    """Yield Docker (the engine that answers, or one of our own), else buildah; `program` names one of the two.

    Raises EngineError that says what to install.
    """
    if program != "buildah" and (answers() or not missing()):
        with docker_engine() as engine:
            yield Docker(engine)
    elif program != "docker" and shutil.which("buildah") and os.geteuid() == 0:
        yield Buildah()
    else:
        raise EngineError(
            f"no container engine: this test needs {program or 'Docker'} (as root, an engine is started where none "
            "answers; on Debian: apt-get install docker.io debootstrap), or, as root, buildah (apt-get install buildah "
            "debootstrap)"
        )


class Docker:
    """A Docker engine. The container uses the host's network, where the embedded broker listens on loopback."""

    def __init__(self, engine: DockerEngine) -> None:
        self.name = engine.name
        self._engine = engine
        self._container = f"kp-worker-image-test-{os.getpid()}"

    def build(self, tag: str, arguments: Mapping[str, str]) -> str:
        return build_image(self._engine, tag, arguments)

    def config(self, tag: str) -> dict[str, Any]:
        return json.loads(self._engine.docker("image", "inspect", "--format", "{{json .Config}}", tag).stdout)  # type: ignore[no-any-return]

    def size(self, tag: str) -> str:
        return self._engine.docker("images", "--format", "{{.Size}}", tag).stdout.strip()

    def run(self, tag: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        limits = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command = ["docker", "run", "--rm", "--name", self._container, "--network", "host", *limits]
        return _start([*command, *_options("--env", env), tag], log, self._engine.env)

    def execute(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return self._engine.attempt("exec", *_options("--env", env), self._container, *command)

    def close(self) -> None:
        self._engine.attempt("rm", "--force", self._container)


class Buildah:
    """buildah with chroot isolation, and util-linux to run what it built; needs root and no engine."""

    name = "buildah"

    # The shell becomes the worker by exec: one process, whose signals and exit code are the worker's.
    _START = """
    mount --bind "$ROOT" "$ROOT" && mount -o remount,bind,ro "$ROOT" &&
    mount -t tmpfs tmpfs "$ROOT/tmp" && mount -t proc proc "$ROOT/proc" && mount --rbind /dev "$ROOT/dev" &&
    mount --rbind /sys "$ROOT/sys" &&
    exec env -i "$@"
    """

    def __init__(self) -> None:
        self._container = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._env: dict[str, str] = {}
        self._user = ""

    def build(self, tag: str, arguments: Mapping[str, str]) -> str:
        base = arguments.get("BASE") or self._base()
        options = _options("--build-arg", {**arguments, "BASE": base})
        command = ["buildah", "bud", "--isolation", "chroot", "--layers", "--format", "docker", *options]
        command += ["--file", "deploy/Dockerfile", "--tag", tag, "."]
        if (code := subprocess.run(command, check=False, cwd=ROOT).returncode) != 0:
            raise EngineError(f"`{' '.join(command)}` failed with exit code {code}")
        return base

    def _base(self) -> str:
        """Return an image that is here, one that can be pulled, or the stand-in: the tarball that Docker takes too."""
        for name in (STAND_IN, PYTHON_NAME):
            if attempt(["buildah", "images", "--quiet", name]).returncode == 0:
                return name
        if attempt(["buildah", "pull", PYTHON_NAME]).returncode == 0:
            return PYTHON_NAME
        tarball = python_base()
        container = call(["buildah", "from", "scratch"]).stdout.strip()
        try:
            call(["buildah", "add", container, tarball, "/"])
            (command,) = PYTHON_CONFIG["CMD"]
            call(["buildah", "config", "--cmd", command, *_options("--env", PYTHON_CONFIG["ENV"]), container])
            call(["buildah", "commit", "--quiet", "--format", "docker", container, STAND_IN])
        finally:
            attempt(["buildah", "rm", container])
        return STAND_IN

    def config(self, tag: str) -> dict[str, Any]:
        described = json.loads(call(["buildah", "inspect", "--type", "image", tag]).stdout)
        return described["Docker"]["config"]  # type: ignore[no-any-return]

    def size(self, tag: str) -> str:
        return call(["buildah", "images", "--format", "{{.Size}}", tag]).stdout.strip()

    def run(self, tag: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        config = self.config(tag)
        self._container = call(["buildah", "from", "--pull-never", tag]).stdout.strip()
        root = call(["buildah", "mount", self._container]).stdout.strip()
        self._env = {**dict(item.split("=", 1) for item in config["Env"]), **env}
        self._user = config["User"]
        inside = ["chroot", f"--userspec={self._user}", "--groups=", root, "setpriv", "--no-new-privs"]
        inside += ["env", f"--chdir={config['WorkingDir']}", *config["Entrypoint"], *config["Cmd"]]
        shell = ["unshare", "--mount", "sh", "-c", self._START, "sh", *_options("", self._env), *inside]
        self._process = _start(shell, log, {**os.environ, "ROOT": root})
        return self._process

    def execute(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        if self._process is None:
            raise EngineError("this is a bug: nothing runs yet")
        user, group = self._user.split(":")
        enter = ["nsenter", f"--target={self._process.pid}", "--mount", "--root", "--wd"]
        enter += [f"--setuid={user}", f"--setgid={group}"]
        return attempt([*enter, "env", "-i", *_options("", {**self._env, **env}), *command])

    def close(self) -> None:
        if self._container:
            attempt(["buildah", "rm", self._container])


def _options(name: str, values: Mapping[str, str] | Sequence[str]) -> list[str]:
    pairs = [f"{key}={value}" for key, value in values.items()] if isinstance(values, Mapping) else values
    return [part for pair in pairs for part in (name, pair)] if name else list(pairs)


def _start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
