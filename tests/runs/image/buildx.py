"""Docker's plugin buildx, without which nothing is built: the machine's, or one built from the Go module proxy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.runs.image.errors import EngineError, attempt
from worker.lab.broker.kafka_jars import default_cache

VERSION: Final = "v0.29.1"
PACKAGE: Final = "github.com/docker/buildx"


def configure(directory: Path) -> dict[str, str]:
    """Return the environment in which `docker buildx` works; build it once where the machine lacks it.

    Raises EngineError where it is missing and there is no Go to build it.
    """
    if attempt(["docker", "buildx", "version"]).returncode == 0:
        return {}
    plugin = default_cache() / "docker-plugins" / VERSION / "docker-buildx"
    if not plugin.exists():
        _build(plugin)
    user = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    config = json.loads(user.read_text()) if user.exists() else {}
    config["cliPluginsExtraDirs"] = [*config.get("cliPluginsExtraDirs", []), str(plugin.parent)]
    (directory / "config.json").write_text(json.dumps(config))
    return {"DOCKER_CONFIG": str(directory)}


def _build(target: Path) -> None:
    if shutil.which("go") is None:
        raise EngineError("docker buildx is missing, and so is Go to build it: install either (on Debian: golang)")
    print("building docker buildx from the Go module proxy, once: some minutes", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kp-go-") as directory:
        Path(directory, "go.mod").write_text("module built\n")
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        flags = f"-ldflags=-s -w -X {PACKAGE}/version.Version={VERSION}"
        for command in (
            ["go", "get", "-tool", f"{PACKAGE}/cmd/buildx@{VERSION}"],
            ["go", "build", flags, "-o", str(fresh), f"{PACKAGE}/cmd/buildx"],
        ):
            done = subprocess.run(["nice", *command], cwd=directory, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                raise EngineError(f"`{' '.join(command)}` failed: {done.stderr[-2000:]}")
        fresh.replace(target)
