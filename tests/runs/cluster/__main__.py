"""`python -m tests.runs.cluster`: the Helm chart on a real Kubernetes API server with etcd.

Installs, upgrades, rolls back and uninstalls every configuration of deploy/helm/kp-worker/ci as a user who has
deploy/helm/installer-role.yaml and nothing else. The namespace enforces Pod Security `restricted`, and each pod
template is created as a pod there. No pod runs: see tests/runs/pod. Exit code 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.runs.cluster.client import NAMESPACE, Check, Client, CommandError, Object, admit, rights, token
from tests.runs.cluster.lifecycle import Lifecycle
from tests.runs.cluster.mistakes import make_mistakes, without_crds
from tests.runs.cluster.programs import ProgramError, programs
from tests.runs.cluster.server import ADMIN, INSTALLER, ApiServer, ServerError
from tests.runs.engine.checks import Checks
from tests.support.surroundings import ROOT
from worker.lab.broker.kafka_jars import BrokerError

CHART: Final = ROOT / "deploy" / "helm" / "kp-worker"
ROLE: Final = ROOT / "deploy" / "helm" / "installer-role.yaml"
LATER: Final = "99.0.0"
LEAST: Final = ("--set", "kafka.bootstrapServers=kafka:9092")

NAMESPACES: Final[list[Object]] = [
    {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": NAMESPACE,
            "labels": {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")},
        },
    },
]
SURROUNDINGS: Final[list[Object]] = [
    # what a cluster's controllers and administrators have made before a release comes
    *({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}} for name in ("default", "scorer")),
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "business"},
        "value": 1000,
    },
]


Right = tuple[str, str, str]
REFUSED: Final = (401, 403)


def granted(role: Path) -> set[Right]:
    """Return (API group, resource, verb) of each right of a Role."""
    rules = yaml.safe_load(role.read_text("utf-8"))["rules"]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(events: Iterable[Mapping[str, Any]]) -> tuple[set[Right], set[Right]]:
    """Return the rights that the installer's requests needed, and those that were refused for want of a right."""
    needed: set[Right] = set()
    refused: set[Right] = set()
    for event in events:
        target = event.get("objectRef", {})
        if event["user"]["username"] == INSTALLER and target.get("namespace") == NAMESPACE:
            right = (target.get("apiGroup", ""), target["resource"], event["verb"])
            (refused if event["responseStatus"]["code"] in REFUSED else needed).add(right)
    return needed, refused


def compare_with_requests(role: Path, events: Iterable[Mapping[str, Any]], check: Check) -> None:
    """The role has each right that helm used, and none that it did not."""
    needed, refused = used(events)
    check("requests of helm that were refused for want of a right", sorted(refused), [])
    check("rights of installer-role.yaml that helm never used", sorted(granted(role) - needed), [])
    check("rights that helm used", len(needed), len(granted(role)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs.cluster", description=__doc__)
    parser.add_argument("--keep-running", action="store_true", help="wait for Ctrl-C at the end, to look around")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    check = Checks()
    try:
        with ApiServer(programs()) as server:
            began = time.monotonic()
            run(server, check)
            print(f"{check.failed} checks failed" if check.failed else "all checks passed")
            print(f"{time.monotonic() - began:.0f} s")
            if options.keep_running:
                print(f"KUBECONFIG={server.kubeconfig(ADMIN)} (or {INSTALLER}.kubeconfig); Ctrl-C ends it", flush=True)
                signal.pause()
    except (ProgramError, ServerError, CommandError, BrokerError, subprocess.TimeoutExpired) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if check.failed else 0


def run(server: ApiServer, check: Checks) -> None:
    """Make all checks."""
    admin = Client(server, server.kubeconfig(ADMIN))
    installer = Client(server, server.kubeconfig(INSTALLER))
    found = json.loads(admin.kubectl("version", "--output=json"))
    check("version of the API server", found["serverVersion"]["gitVersion"], server.programs.version)
    package, later = prepare(server, admin)
    without_crds(installer, package, check)
    install_crds(admin, server.programs.crds)
    configurations = {"default values": LEAST, **ci_files()}
    lifecycle = Lifecycle(installer, admin, package, later, check)
    for title, values in configurations.items():
        pods = lifecycle.install(title, values)
        admit(admin, title, pods, check)
        for account in sorted({pod["spec"]["serviceAccountName"] for pod in pods.values()}):
            user = Client(server, server.token_config("account", token(admin, account)))
            check(f"{title}: rights of the service account {account}", rights(user), [])
        lifecycle.change(title, values)
        lifecycle.uninstall(title)
    lifecycle.moves(configurations)
    lifecycle.replicas_with_keda(LEAST, configurations["sasl-keda"])
    make_mistakes(installer, admin, package, check)
    compare_with_requests(ROLE, server.audited(), check)


def ci_files() -> dict[str, Sequence[str]]:
    """Return the configurations of the chart's ci directory: title -> options of helm."""
    return {path.stem: ("--values", str(path)) for path in sorted((CHART / "ci").glob("*.yaml"))}


def prepare(server: ApiServer, admin: Client) -> tuple[Path, Path]:
    """Make namespace, accounts and rights, and package the chart; return it and a later version of it."""
    for document in NAMESPACES + SURROUNDINGS:
        admin.create(document)
    admin.kubectl("apply", f"--filename={ROLE}")
    admin.kubectl("create", "rolebinding", "installer", "--role=kp-worker-installer", f"--user={INSTALLER}")
    for directory, version in (("packages", ()), ("later", ("--version", LATER))):
        admin.helm("package", str(CHART), "--destination", str(server.directory / directory), *version)
    package, later = (next((server.directory / name).glob("*.tgz")) for name in ("packages", "later"))
    return package, later


def install_crds(admin: Client, directory: Path) -> None:
    """Install the CRDs and wait until the server serves them."""
    admin.kubectl("create", f"--filename={directory}")
    admin.kubectl("wait", "--for=condition=Established", "--timeout=60s", f"--filename={directory}")


if __name__ == "__main__":
    sys.exit(main())
