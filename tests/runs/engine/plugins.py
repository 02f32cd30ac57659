"""Docker's plugins buildx and compose: those of the machine, or built once from the Go module proxy and cached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.runs.engine.errors import EngineError, attempt
from worker.lab.broker.kafka_jars import default_cache

VERSIONS: Final = {
    # plugin: package@version, and the variable in which it says its own version: compose asks buildx for it
    "buildx": ("github.com/docker/buildx/cmd/buildx@v0.29.1", "github.com/docker/buildx/version.Version"),
    "compose": ("github.com/docker/compose/v2/cmd@v2.40.3", "github.com/docker/compose/v2/internal.Version"),
}


def configure(names: Sequence[str], directory: Path) -> dict[str, str]:
    """Return the environment in which `docker NAME` works for each plugin; builds those that the machine lacks.

    Raises EngineError where one is missing and there is no Go to build it.
    """
    lacking = [name for name in names if attempt(["docker", name, "version"]).returncode != 0]
    if not lacking:
        return {}
    plugins = [_built(name).parent for name in lacking]
    user = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    config = json.loads(user.read_text()) if user.exists() else {}
    config["cliPluginsExtraDirs"] = [*config.get("cliPluginsExtraDirs", []), *dict.fromkeys(map(str, plugins))]
    (directory / "config.json").write_text(json.dumps(config))
    return {"DOCKER_CONFIG": str(directory)}


def go_build(package: str, target: Path, *options: str) -> None:
    """Build PACKAGE@VERSION from the Go module proxy into a file. Raises EngineError without Go or the modules."""
    if shutil.which("go") is None:
        raise EngineError(f"{target.name} is missing, and so is Go to build it: install either (on Debian: golang)")
    print(f"building {package} from the Go module proxy, once: some minutes", flush=True)
    path = package.partition("@")[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kp-go-") as directory:
        Path(directory, "go.mod").write_text("module built\n")
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        for command in (
            ["go", "get", "-tool", package],
            ["go", "build", *options, "-o", str(fresh), path],
        ):
            done = subprocess.run(["nice", *command], cwd=directory, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                raise EngineError(f"`{' '.join(command)}` failed: {done.stderr[-2000:]}")
        fresh.replace(target)


def _built(name: str) -> Path:
    package, variable = VERSIONS[name]
    version = package.rpartition("@")[2]
    target = default_cache() / "docker-plugins" / version / f"docker-{name}"
    if not target.exists():
        go_build(package, target, f"-ldflags=-s -w -X {variable}={version}")
    return target
