"""kubectl and helm as one user, and what a release has in the cluster: its objects, and the pods of its templates."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.runs.cluster.server import ApiServer

NAMESPACE: Final = "scoring"
COMMAND_S: Final = 120.0
KINDS: Final = (
    "deployments", "statefulsets", "pods", "services", "serviceaccounts", "configmaps", "poddisruptionbudgets",
    "networkpolicies", "podmonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com",
    "scaledobjects.keda.sh", "triggerauthentications.keda.sh",
)  # fmt: skip

Object = dict[str, Any]
Check = Callable[[str, object, object], None]
"""Takes what is checked, what was found and what is expected."""


class CommandError(RuntimeError):
    """kubectl or helm refused; the message is what it said."""


@dataclass(frozen=True)
class Result:
    """What a command printed."""

    code: int
    output: str
    errors: str


class Client:
    """One user's kubectl and helm, in the namespace of the releases."""

    def __init__(self, server: ApiServer, kubeconfig: Path) -> None:
        self._server = server
        home = server.directory / "home"
        self._env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HELM_", "KUBE"))},
            "KUBECONFIG": str(kubeconfig),
            "KUBECACHEDIR": str(home / "kube"),
            "HELM_CACHE_HOME": str(home / "cache"),
            "HELM_CONFIG_HOME": str(home / "config"),
            "HELM_DATA_HOME": str(home / "data"),
        }

    def run(self, program: Path, *arguments: str, stdin: str = "") -> Result:
        """Run a program; any exit code is a result."""
        command = [str(program), "--namespace", NAMESPACE, *arguments]
        done = subprocess.run(
            command, env=self._env, input=stdin, text=True, capture_output=True, timeout=COMMAND_S, check=False
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Return kubectl's output. Raises CommandError."""
        return self._good("kubectl", self.run(self._server.programs.kubectl, *arguments, stdin=stdin))

    def try_kubectl(self, *arguments: str, stdin: str = "") -> Result:
        """Run kubectl where a refusal is expected."""
        return self.run(self._server.programs.kubectl, *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> Result:
        """Run helm and return what it printed. Raises CommandError."""
        result = self.try_helm(*arguments)
        self._good(f"helm {arguments[0]}", result)
        return result

    def try_helm(self, *arguments: str) -> Result:
        """Run helm where a refusal is expected."""
        return self.run(self._server.programs.helm, *arguments)

    def create(self, document: Mapping[str, Any], *options: str) -> Object:
        """Create an object and return it as the server keeps it. Raises CommandError."""
        text = self.kubectl("create", "--filename=-", "--output=json", *options, stdin=json.dumps(document))
        created: Object = json.loads(text)
        return created

    def manifest(self, release: str) -> str:
        """Return what helm sent last."""
        return self.helm("get", "manifest", release).output

    def objects(self, release: str) -> dict[str, Object]:
        """Return `Kind/name` -> object for each object that helm installed and the cluster has."""
        found = json.loads(self.kubectl("get", ",".join(KINDS), "--output=json"))["items"]
        return {
            name(item): item
            for item in found
            if item["metadata"].get("annotations", {}).get("meta.helm.sh/release-name") == release
        }

    def differences(self, release: str) -> str:
        """Return what `kubectl diff` finds between helm's manifest and the cluster, "" for nothing."""
        result = self.try_kubectl("diff", "--filename=-", stdin=self.manifest(release))
        if result.code > 1:
            raise CommandError(f"kubectl diff: {result.errors}")
        return result.output + result.errors

    @staticmethod
    def _good(what: str, result: Result) -> str:
        if result.code:
            raise CommandError(f"{what}: {result.errors.strip() or result.output.strip()}")
        return result.output


def name(item: Mapping[str, Any]) -> str:
    """Return `Kind/name` of an object."""
    return f"{item['kind']}/{item['metadata']['name']}"


def documents(manifest: str) -> dict[str, Object]:
    """Return `Kind/name` -> object of a manifest."""
    return {name(item): item for item in yaml.safe_load_all(manifest) if item}


def versions(objects: Mapping[str, Object]) -> dict[str, tuple[str, str, int]]:
    """Return what changes with any write: uid, resourceVersion and generation."""
    return {
        key: (item["metadata"]["uid"], item["metadata"]["resourceVersion"], item["metadata"].get("generation", 0))
        for key, item in objects.items()
    }


SELF_REVIEWS: Final = ("selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews")
"""Every user may ask the server about himself."""


def template_pods(objects: Mapping[str, Object]) -> dict[str, Object]:
    """Return owner -> the first pod that its controller would make from the template."""
    pods = {}
    for owner, item in objects.items():
        if item["kind"] in ("Deployment", "StatefulSet"):
            template = copy.deepcopy(item["spec"]["template"])
            metadata = {**template["metadata"], "name": f"{item['metadata']['name']}-0", "namespace": NAMESPACE}
            pods[owner] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    return pods


def admit(admin: Client, title: str, pods: Mapping[str, Object], check: Check) -> None:
    """Create each pod, as a dry run and really: PodSecurity, ServiceAccount and Priority judge pods alone."""
    for owner, pod in pods.items():
        try:
            dry = admin.create(pod, "--dry-run=server")
            made = admin.create(pod)
        except CommandError as error:
            check(f"{title}: the pod of {owner} is admitted", str(error), "")
            continue
        spec = made["spec"]
        check(f"{title}: the pod of {owner} is admitted", dry["spec"] == spec, True)
        tokens = [volume["name"] for volume in spec["volumes"] if volume["name"].startswith("kube-api-access")]
        check(f"{title}: no token of the API server in it", tokens, [])
        admin.kubectl("delete", "pod", made["metadata"]["name"], "--grace-period=0", "--force")


def rights(client: Client) -> list[str]:
    """Return what a user may do with the API's objects, as `kubectl auth can-i --list` says it."""
    lines = client.kubectl("auth", "can-i", "--list", "--no-headers").splitlines()
    resources = [line for line in lines if not line.startswith(" ")]  # the others are paths such as /healthz
    return [line for line in resources if not line.startswith(SELF_REVIEWS)]


def token(admin: Client, service_account: str) -> str:
    """Return a token of a service account."""
    return admin.kubectl("create", "token", service_account).strip()
