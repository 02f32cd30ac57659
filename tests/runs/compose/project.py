"""docker-compose.yml as a project of its own name, and what its containers say of themselves."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.runs.engine.docker import DockerEngine
from tests.runs.engine.errors import EngineError
from tests.support.kafka_fixtures import wait_until
from tests.support.surroundings import ROOT

NAME: Final = "kp-worker-test"
PATIENCE_S: Final = 300.0
BOOTSTRAP: Final = "127.0.0.1:9094"


class Project:
    """The Compose file, unchanged; `override` is a further file with settings of one step."""

    def __init__(self, engine: DockerEngine) -> None:
        self.engine = engine

    def compose(self, *arguments: str, override: Path | None = None) -> str:
        """Run a docker compose command; return its standard output. Raises EngineError with its standard error."""
        files = ["--file", "docker-compose.yml", *(["--file", str(override)] if override else [])]
        print(f"      docker compose {' '.join(arguments)}", flush=True)
        command = ["docker", "compose", "--progress", "quiet", "--project-name", NAME, *files, *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.engine.env,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise EngineError(f"`docker compose {' '.join(arguments)}` failed: {done.stderr}\n{self.logs()}")
        return done.stdout

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Return what `docker inspect` says of each container of a service, ended ones too."""
        labels = [f"label=com.docker.compose.{key}={it}" for key, it in (("project", NAME), ("service", service))]
        filters = [part for label in labels for part in ("--filter", label)]
        ids = self.engine.docker("ps", "--all", "--quiet", *filters).stdout.split()
        return json.loads(self.engine.docker("inspect", *ids).stdout) if ids else []

    def container(self, service: str) -> dict[str, Any]:
        """Return the only container of a service."""
        (found,) = self.containers(service)
        return found

    def wait_healthy(self, service: str = "worker", count: int = 1) -> None:
        """Return when that many containers of a service are healthy. Raises EngineError with the logs."""

        def healthy() -> bool:
            found = [it["State"].get("Health", {}).get("Status") for it in self.containers(service)]
            return found == ["healthy"] * count

        if not wait_until(healthy, PATIENCE_S, 0.5):
            raise EngineError(f"{count} {service} did not become healthy in {PATIENCE_S:.0f} s:\n{self.logs(service)}")

    def execute(self, container: str, *command: str) -> str:
        """Run a command in a container; return its standard output."""
        return self.engine.docker("exec", container, *command).stdout

    def fetch(self, container: str, url: str) -> str:
        """Return what a URL answers inside a container that has Python."""
        return self.execute(
            container, "python", "-c", f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"
        )

    def logs(self, *services: str, lines: int = 25) -> str:
        """Return the last lines that the services wrote."""
        command = ["compose", "--project-name", NAME, "logs", "--no-color", "--tail", str(lines), *services]
        return self.engine.attempt(*command).stdout

    def remove(self) -> None:
        """Remove containers, networks and volumes."""
        self.engine.attempt(
            *("compose", "--project-name", NAME, "--profile", "*", "down", "--volumes", "--remove-orphans", "-t", "5")
        )

    def rest(self) -> list[str]:
        """Return what is left of the project: containers, networks, volumes."""
        label = f"label=com.docker.compose.project={NAME}"
        kinds: Sequence[Sequence[str]] = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [it for kind in kinds for it in self.engine.docker(*kind, "--quiet", "--filter", label).stdout.split()]


def step(title: str) -> None:
    """Print the title of the checks that follow."""
    print(f"\n{title} ({time.strftime('%H:%M:%S')})", flush=True)
