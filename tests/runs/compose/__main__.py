"""`python -m tests.runs.compose`: start docker-compose.yml as it is, use it, disturb it, watch it, remove it.

Uses the Docker engine that answers, or one of its own; where nothing can be pulled, stand-ins for the images. Exit code
1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.runs.compose.load import (
    SETTINGS,
    check_contribute,
    check_disturbed,
    check_everything,
    check_memory,
    source_records,
)
from tests.runs.compose.monitoring import check_alert, check_dashboard, check_rules, check_targets
from tests.runs.compose.project import BOOTSTRAP, PATIENCE_S, Project, step
from tests.runs.compose.stand_ins import make
from tests.runs.compose.surroundings import PORTS, check_grafana, check_hardened, check_ports, check_state
from tests.runs.engine.checks import Checks, check_outputs, publish_reference
from tests.runs.engine.docker import DockerEngine, docker_engine
from tests.runs.engine.errors import EngineError
from tests.support.kafka_fixtures import committed, wait_until
from tests.support.surroundings import ROOT
from worker.lab.broker.kafka_jars import BrokerError
from worker.lab.broker.ports import is_free


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.compose", description=__doc__)
    parser.add_argument("--keep-running", action="store_true", help="wait at the end, until Ctrl-C, and look around")
    options = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # Kafka goes away here, as it should
    check = Checks()
    try:
        if taken := [port for port in PORTS if not is_free(port)]:
            raise EngineError(f"docker-compose.yml publishes ports that are in use here: {taken}; free them first")
        with docker_engine(("buildx", "compose")) as engine:
            images(engine)
            with project(engine) as it, tempfile.TemporaryDirectory(prefix="kp-compose-") as directory:
                run(check, it, Path(directory))
                if options.keep_running:
                    look_around(engine)
            step("After `down --volumes`")
            check("containers, networks and volumes left", it.rest(), [])
    except KeyboardInterrupt:
        print("interrupted; everything started is removed", file=sys.stderr)
        return 130
    except (EngineError, BrokerError, AssertionError, OSError) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 1
    print(f"{check.failed} checks failed" if check.failed else "all checks passed")
    return 1 if check.failed else 0


def images(engine: DockerEngine) -> None:
    """See that every image of docker-compose.yml is there: pulled, made, or for the worker: its base."""
    print(engine.name, flush=True)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    engine.python_base()
    for image in sorted({service["image"] for service in services if "build" not in service}):
        if not engine.pull(image):
            make(engine, image)


@contextlib.contextmanager
def project(engine: DockerEngine) -> Iterator[Project]:
    """Yield the project; remove all of it at the end, and what an interrupted run has left at the start."""
    it = Project(engine)
    it.remove()
    try:
        yield it
    finally:
        it.remove()


def run(check: Checks, it: Project, directory: Path) -> None:
    """Go through it all in the order in which a user would."""
    step("Start")
    began = time.monotonic()
    it.compose("up", "--detach")
    for service in ("kafka", "worker", "prometheus"):
        it.wait_healthy(service)
    print(f"      all healthy after {time.monotonic() - began:.0f} s")
    check_state(check, it)

    step("Traces from outside, and from inside by the profile samples")
    count = publish_reference(BOOTSTRAP, "traces")
    check("all records are taken", wait_until(lambda: taken() == count, PATIENCE_S, 0.5), True)
    check_outputs(check, BOOTSTRAP)
    it.compose("--profile", "samples", "run", "--rm", "samples")
    samples = (ROOT / "worker/data/demo_traces.jsonl").read_bytes().count(b"\n")
    check("records in the source topic", source_records(), count + samples)
    check("all samples are taken", wait_until(lambda: taken() == count + samples, PATIENCE_S, 0.5), True)

    step("Containers")
    check_hardened(check, it)
    check_ports(check, it)
    check_grafana(check, it)

    step("Prometheus")
    check_targets(check, kp_worker=1)
    check_rules(check)
    check_dashboard(check)

    step("Under load: restart, kill, SIGKILL, restart of Kafka, down and up, three workers")
    check_disturbed(check, it)

    step("Under load with 1 GiB of memory")
    check_memory(check, it, directory / "memory.yaml")

    step("The profile contribute")
    check_contribute(check, it)
    check_targets(check, kp_worker=1, kp_contribute=1)

    step("An alert, by the rules as they are")
    check_alert(check, it)

    step("All that was published, judged")
    check_everything(check)


def taken() -> int:
    """Return how many source records the group has committed."""
    return sum(committed(BOOTSTRAP, SETTINGS["KP_GROUP_ID"], SETTINGS["KP_SOURCE_TOPIC"]).values())


def look_around(engine: DockerEngine) -> None:
    """Say how to reach the engine, and wait for Ctrl-C."""
    print(f"running until Ctrl-C; DOCKER_HOST={engine.env.get('DOCKER_HOST', '')}", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
