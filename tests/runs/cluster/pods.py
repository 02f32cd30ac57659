"""The pods that controllers would make of a release, and what admission says of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Final

from tests.runs.cluster.client import NAMESPACE, Client, CommandError, Object

Check = Callable[[str, object, object], None]

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
