"""`python -m tests.runs.pod`: the chart's pods in a Docker engine, with their own spec, on a real broker.

spec.py and kubelet.py do what the kubelet does: user, limits, read-only root, volumes, variables, probes at their
intervals, restarts and the grace period. Under load a pod is replaced, deleted and hung; each record must be taken
exactly once. Exit code 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import yaml

from tests.runs.cluster.client import template_pods
from tests.runs.cluster.programs import ProgramError, chart_tools
from tests.runs.engine.checks import Checks
from tests.runs.engine.docker import IMAGE, DockerEngine, build_image, docker_engine
from tests.runs.engine.errors import EngineError
from tests.runs.pod.kubelet import End, Pod
from tests.runs.pod.spec import Object, container_name, run_options
from tests.support.chaos import Load, quiet_clients, traces
from tests.support.kafka_fixtures import committed, consume_all, create_topics, wait_until
from tests.support.oracle import origin
from tests.support.secure_kafka import PASSWORD, USER, Files
from tests.support.surroundings import ROOT
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_jars import BrokerError
from worker.lab.broker.ports import HOST, free_ports

CHART: Final = ROOT / "deploy" / "helm" / "kp-worker"
VALUES: Final = Path(__file__).with_name("values.yaml")
GROUP: Final = "pod-check"
PARTITIONS: Final = 4
RATE: Final = 10.0
PATIENCE_S: Final = 240.0
OUTPUTS: Final = ("accepted", "rejected", "dead-letter")
LOOK: Final = """
import json, os, pathlib
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/1/status").read_text().splitlines())
def writable(path):
    try:
        pathlib.Path(path, "probe").write_text("x")
        pathlib.Path(path, "probe").unlink()
        return True
    except OSError:
        return False
places = ["/", "/opt/kp-worker", "/etc/kp-worker/sasl", "/etc/kp-worker/ca", "/etc/kp-worker/config", "/tmp"]
limit = [pathlib.Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
print(json.dumps({
    "user": [int(number) for number in status["Uid"].split() + status["Gid"].split()],
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no new privileges": status["NoNewPrivs"].strip(),
    "system calls filtered": status["Seccomp"].strip(),
    "writable": [place for place in places if writable(place)],
    "secret": oct(os.stat("/etc/kp-worker/sasl/password").st_mode & 0o777),
    "API server's token": os.path.exists("/var/run/secrets/kubernetes.io"),
    "password in a variable": any("marker-password" in value for value in os.environ.values()),
    "memory": next(int(path.read_text()) for path in limit if path.exists()),
}))
"""


class PodCheck:
    """Starts the chart's pods in an engine, and looks at them."""

    def __init__(
        self, engine: DockerEngine, network: str, broker: PodBroker, helm: Path, directory: Path, check: Checks
    ) -> None:
        self._engine = engine
        self._network = network
        self._broker = broker
        self._helm = helm
        self._directory = directory
        self._check = check
        self._started: list[Pod] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._started:
            pod.leave()

    def pods(self, *values: str) -> dict[str, Object]:
        """Render the chart; return owner -> pod, and remember its ConfigMaps."""
        # --kube-version: a helm that Go has built claims an old one.
        command: list[str | Path] = [
            self._helm,
            "template",
            "kp-worker",
            CHART,
            "--namespace",
            "scoring",
            "--kube-version",
            "1.31",
        ]
        command += ["--values", VALUES, "--set", f"kafka.bootstrapServers={self._broker.inside}", *values]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        if done.returncode:
            raise ProgramError(f"helm template: {done.stderr}")
        documents = [item for item in yaml.safe_load_all(done.stdout) if item]
        self._sources = {
            **self._broker.secrets,
            **{
                ("ConfigMap", item["metadata"]["name"]): {k: v.encode() for k, v in item["data"].items()}
                for item in documents
                if item["kind"] == "ConfigMap"
            },
        }
        return template_pods({f"{item['kind']}/{item['metadata']['name']}": item for item in documents})

    def start(self, pod: Object, name: str) -> Pod:
        """Run a pod under a name."""
        pod = copy.deepcopy(pod)
        pod["metadata"]["name"] = name
        options = run_options(pod, IMAGE, self._network, self._directory / name, self._sources)
        (container,) = pod["spec"]["containers"]
        self._check(f"{name}: the image of the chart is the one that was built", container["image"], IMAGE)
        identity = container_name(self._network, pod)
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        self._started.append(Pod(name, identity, container, grace, options, self.docker))
        return self._started[-1]

    def wait(self, pod: Pod, *, ready: bool = True) -> None:
        """Wait until a pod is ready."""
        good = wait_until(lambda: pod.ready == ready, PATIENCE_S)
        self._check(f"{pod.name}: ready is {ready}", good, True)
        if not good:
            print(pod.log()[-3000:])

    def ended(self, pod: Pod, end: End) -> None:
        """Look at how a pod ended that was deleted."""
        self._check(f"{pod.name}: exit code after SIGTERM", end.code, 0)
        self._check(f"{pod.name}: ended within its grace period of {pod.grace} s", end.seconds < pod.grace, True)
        self._check(f"{pod.name}: out of memory", end.out_of_memory, False)

    def inside(self, pod: Pod) -> None:
        """Look at a running pod from inside."""
        found: dict[str, Any] = json.loads(pod.inside("python", "-c", LOOK))
        expected = {
            "user": [10001] * 8,
            "capabilities": 0,
            "no new privileges": "1",
            "system calls filtered": "2",
            "writable": ["/tmp"],
            "secret": "0o440",
            "API server's token": False,
            "password in a variable": False,
            "memory": 2**30,
        }
        for what, value in expected.items():
            self._check(f"{pod.name}: {what}", found[what], value)

    def docker(self, *arguments: str) -> str:
        """Return the output of a docker command; of `docker logs`, what the container wrote as errors as well."""
        done = self._engine.docker(*arguments)
        return done.stdout + (done.stderr if arguments[0] == "logs" else "")


LISTENER: Final = "PODS"
LOGIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"


@dataclass(frozen=True)
class PodBroker:
    """Where the check and where the pods connect, and the contents of their Secrets."""

    loopback: str
    inside: str
    secrets: Mapping[tuple[str, str], Mapping[str, bytes]]


@contextmanager
def pod_broker(address: str, directory: Path) -> Iterator[PodBroker]:
    """Run it; `address` is the machine's own on the bridge of the containers."""
    files = Files(directory)
    loopback, inside, controller = free_ports(3)
    prefix = f"listener.name.{LISTENER.lower()}"
    config = {
        "listeners": f"PLAINTEXT://{HOST}:{loopback},{LISTENER}://{address}:{inside},CONTROLLER://{HOST}:{controller}",
        "controller.quorum.voters": f"0@{HOST}:{controller}",
        **files.keystore(LISTENER, address),
        f"{prefix}.sasl.enabled.mechanisms": "PLAIN",
        f"{prefix}.plain.sasl.jaas.config": f'{LOGIN} user_{USER}="{PASSWORD}";',
    }
    secrets = {
        ("Secret", "kafka-user"): {"username": USER.encode(), "password": PASSWORD.encode()},
        ("Secret", "kafka-ca"): {"ca.crt": files.ca.read_bytes()},
        ("Secret", "knowledgepulse"): {"key": b"kp_not_taken_by_anyone"},
    }
    with EmbeddedKafka(listeners={LISTENER: "SASL_SSL"}, config=config):
        yield PodBroker(f"{HOST}:{loopback}", f"{address}:{inside}", secrets)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.pod", description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="the image is in the engine already")
    options = parser.parse_args()
    quiet_clients()
    check = Checks()
    try:
        helm, _ = chart_tools()
        with docker_engine() as engine, tempfile.TemporaryDirectory(prefix="kp-pod-") as directory:
            print(engine.name)
            if not options.no_build or not engine.has(IMAGE):
                build_image(engine)
            network = f"kp-pod-{int(time.time())}"
            engine.docker("network", "create", network)
            try:
                gateway = engine.docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", network)
                with (
                    pod_broker(gateway.stdout.strip(), Path(directory)) as broker,
                    PodCheck(engine, network, broker, helm, Path(directory), check) as pods,
                ):
                    run(pods, broker, check)
            finally:
                left = engine.attempt("ps", "--all", "--quiet", "--filter", f"network={network}").stdout.split()
                if left:
                    engine.attempt("rm", "--force", "--volumes", *left)
                engine.attempt("network", "rm", network)
    except (EngineError, ProgramError, BrokerError, AssertionError) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{check.failed} checks failed" if check.failed else "all checks passed")
    return 1 if check.failed else 0


def run(pods: PodCheck, broker: PodBroker, check: Checks) -> None:
    """Make all checks."""
    rendered = pods.pods()
    worker, contribute = rendered["Deployment/kp-worker"], rendered["Deployment/kp-worker-contribute"]
    create_topics(broker.loopback, {"traces": PARTITIONS})
    load = Load(broker.loopback, "traces", traces(seed=1, partitions=PARTITIONS), 100, RATE, open_end=True)
    load.start()
    first = pods.start(worker, "worker-a")
    pods.wait(first)
    pods.inside(first)
    replaced_under_load(pods, worker, first)
    wait_for_registry(pods, contribute, check)
    hung_under_load(pods, worker, check)
    ends = load.finish(PATIENCE_S)
    last = pods.start(worker, "worker-d")
    check("every record is committed", wait_committed(broker, dict(ends)), True)
    pods.ended(last, last.delete())
    exactly_once(broker, load.sent, check)
    wrong_value(pods, check)


def wait_committed(broker: PodBroker, ends: dict[int, int]) -> bool:
    """Return whether the group's offsets reach the ends; however slow the machine is, they must move."""
    reached, moved = committed(broker.loopback, GROUP, "traces"), time.monotonic()
    while reached != ends and time.monotonic() < moved + PATIENCE_S:
        time.sleep(1)
        if (now := committed(broker.loopback, GROUP, "traces")) != reached:
            reached, moved = now, time.monotonic()
    return reached == ends


def replaced_under_load(pods: PodCheck, worker: Object, first: Pod) -> None:
    """An update of a Deployment: one pod more, then one less; then all are deleted."""
    second = pods.start(worker, "worker-b")
    pods.wait(second)
    pods.ended(first, first.delete())
    time.sleep(5)  # of load, which the second one takes over
    pods.ended(second, second.delete())


def wait_for_registry(pods: PodCheck, contribute: Object, check: Checks) -> None:
    """No registry answers: `contribute` is alive and not ready, and ends in order."""
    pod = pods.start(contribute, "contribute-a")
    started = wait_until(lambda: pod.liveness.successes >= 2, PATIENCE_S)
    check("contribute-a: started and alive without a registry", started, True)
    check("contribute-a: ready without a registry", pod.ready, False)
    check("contribute-a: restarts", pod.restarts, 0)
    pods.ended(pod, pod.delete())


def hung_under_load(pods: PodCheck, worker: Object, check: Checks) -> None:
    """A worker that hangs is killed by its liveness probe, and comes back."""
    pod = pods.start(worker, "worker-c")
    pods.wait(pod)
    pods.docker("kill", "--signal", "STOP", pod.identity)
    check("worker-c: restarted after it hung", wait_until(lambda: pod.restarts == 1, PATIENCE_S), True)
    check("worker-c: exit code of the hung one", pod.ends[0].code, 137)
    pods.wait(pod)
    pods.ended(pod, pod.delete())


def exactly_once(broker: PodBroker, sent: int, check: Checks) -> None:
    """Each record of the source has one output, in one of the three topics."""
    places: Counter[Sequence[int]] = Counter()
    for kind in OUTPUTS:
        places.update(origin(kind, record) for record in consume_all(broker.loopback, f"traces.{kind}"))
    source = {(record.partition, record.offset) for record in consume_all(broker.loopback, "traces")}
    check("records of the source", len(source), sent)
    check("lost", len(source - places.keys()), 0)
    check("published twice", sum(count > 1 for count in places.values()), 0)
    check("outputs", sum(places.values()), sent)


def wrong_value(pods: PodCheck, check: Checks) -> None:
    """A value that the chart does not know to be wrong: the worker names it, and is started again."""
    rendered = pods.pods("--set", "config.KP_THRESHOLD=high")
    pod = pods.start(rendered["Deployment/kp-worker"], "worker-e")
    check("worker-e: ended", wait_until(lambda: pod.restarts >= 1, PATIENCE_S), True)
    pod.delete()
    check("worker-e: exit code of a wrong value", pod.ends[0].code, 2)
    check("worker-e: its log names the setting", "KP_THRESHOLD" in pod.ends[0].log, True)


if __name__ == "__main__":
    sys.exit(main())
