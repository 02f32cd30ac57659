"""The two programs that can build and run the image here: a Docker engine, else buildah as root.

buildah only builds; its container's root file system is then run in a mount namespace of its own, with the user,
environment and command that the image names: read-only, a tmpfs on /tmp, no privileges, the host's network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = "deploy/Dockerfile"
BASE = "python:3.12-slim"
STAND_IN = "localhost/kp-worker-base:python-3.12"


class EngineError(Exception):
    """No engine, or it cannot do what is asked; the message says what to install."""


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


def find_engine() -> Engine:
    """Return Docker where its engine answers, else buildah. Raises EngineError that says what to install."""
    if shutil.which("docker") and _run(["docker", "info"], check=False).returncode == 0:
        return Docker()
    if shutil.which("buildah") and os.geteuid() == 0:
        return Buildah()
    raise EngineError(
        "no container engine: this test needs Docker with its engine running, or, as root, buildah (on Debian: apt-get "
        "install buildah, and debootstrap where no container registry can be reached)"
    )


class Docker:
    """A Docker engine. The container uses the host's network, where the embedded broker listens on loopback."""

    name = "docker"

    def __init__(self) -> None:
        self._container = f"kp-worker-image-test-{os.getpid()}"

    def build(self, tag: str, arguments: Mapping[str, str]) -> str:
        _build(["docker", "build"], tag, arguments)
        return arguments.get("BASE", BASE)

    def config(self, tag: str) -> dict[str, Any]:
        return json.loads(_run(["docker", "image", "inspect", "--format", "{{json .Config}}", tag]).stdout)  # type: ignore[no-any-return]

    def size(self, tag: str) -> str:
        return _run(["docker", "images", "--format", "{{.Size}}", tag]).stdout.strip()

    def run(self, tag: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        limits = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command = ["docker", "run", "--rm", "--name", self._container, "--network", "host", *limits]
        return _start([*command, *_options("--env", env), tag], log)

    def execute(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return _run(["docker", "exec", *_options("--env", env), self._container, *command], check=False)

    def close(self) -> None:
        _run(["docker", "rm", "--force", self._container], check=False)


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
        command = ["buildah", "bud", "--isolation", "chroot", "--layers", "--format", "docker"]
        _build(command, tag, {**arguments, "BASE": base})
        return base

    def _base(self) -> str:
        for name in (STAND_IN, BASE):
            if _run(["buildah", "images", "--quiet", name], check=False).returncode == 0:
                return name
        if _run(["buildah", "pull", BASE], check=False).returncode == 0:
            return BASE
        if shutil.which("debootstrap") is None:
            raise EngineError(
                "python:3.12-slim cannot be pulled, and without debootstrap no stand-in can be made: apt-get install "
                "debootstrap, or name a base image that is here with --build-arg BASE=..."
            )
        print(f"python:3.12-slim cannot be pulled: making {STAND_IN} from this machine's Debian and Python 3.12")
        subprocess.run([Path(__file__).with_name("stand_in_base.sh"), STAND_IN, _python_312()], check=True)
        return STAND_IN

    def config(self, tag: str) -> dict[str, Any]:
        described = json.loads(_run(["buildah", "inspect", "--type", "image", tag]).stdout)
        return described["Docker"]["config"]  # type: ignore[no-any-return]

    def size(self, tag: str) -> str:
        return _run(["buildah", "images", "--format", "{{.Size}}", tag]).stdout.strip()

    def run(self, tag: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        config = self.config(tag)
        self._container = _run(["buildah", "from", "--pull-never", tag]).stdout.strip()
        root = _run(["buildah", "mount", self._container]).stdout.strip()
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
        return _run([*enter, "env", "-i", *_options("", {**self._env, **env}), *command], check=False)

    def close(self) -> None:
        if self._container:
            _run(["buildah", "rm", self._container], check=False)


def _python_312() -> str:
    """Return a Python 3.12 of this machine, also one of pyenv's that is not the chosen one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [*sorted(pyenv.glob("versions/3.12.*/bin/python3.12")), shutil.which("python3.12")]
    for candidate in filter(None, candidates):
        if _run([str(candidate), "--version"], check=False).returncode == 0:
            return str(candidate)
    raise EngineError("the stand-in for python:3.12-slim needs a Python 3.12 on this machine, and there is none")


def _build(command: Sequence[str], tag: str, arguments: Mapping[str, str]) -> None:
    options = [*_options("--build-arg", arguments), "--file", DOCKERFILE, "--tag", tag]
    subprocess.run([*command, *options, "."], check=True, cwd=ROOT)


def _options(name: str, values: Mapping[str, str]) -> list[str]:
    pairs = [f"{key}={value}" for key, value in values.items()]
    return [part for pair in pairs for part in (name, pair)] if name else pairs


def _run(command: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, text=True, capture_output=True)


def _start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
