"""What a user may mistype and the chart cannot see: who refuses it, and with which words.

deploy/checks/helm.sh has the values that the chart itself refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.runs.cluster.client import Check, Client, CommandError, Result, template_pods, versions

RELEASE: Final = "mistaken"
LEAST: Final = ("--set", "kafka.bootstrapServers=kafka:9092")


class Mistake(NamedTuple):
    """Values, and words of the message that refuses them."""

    values: Sequence[str]
    words: str


SERVER: Final = (
    # helm install ends with the server's words
    Mistake(["resources.requests.memory=2Gi"], "requests: Invalid value: \"2Gi\": must be less than or equal to"),
    Mistake(["podLabels.team=a b"], "template.labels: Invalid value: \"a b\": a valid label"),
    Mistake(["podAnnotations.a b=c"], "template.annotations: Invalid value: \"a b\""),
    Mistake(["extraVolumes[0].name=tmp", "extraVolumes[0].emptyDir.medium=Memory"], "Duplicate value: \"tmp\""),
    Mistake(["extraVolumeMounts[0].name=m", "extraVolumeMounts[0].mountPath=/m"], "Not found: \"m\""),
    Mistake(["extraVolumeMounts[0].name=tmp", "extraVolumeMounts[0].mountPath=/tmp"], "\"/tmp\": must be unique"),
    Mistake(["tolerations[0].key=a", "tolerations[0].operator=Equals"], "supported values: \"Equal\", \"Exists\""),
    Mistake(["priorityClassName=A b"], "priorityClassName: Invalid value: \"A b\""),
    Mistake(["securityContext.privileged=true"], "privileged: Forbidden"),
    Mistake(
        ["networkPolicy.enabled=true", "networkPolicy.extraEgress[0].ports[0].protocol=HTTP"],
        "supported values: \"TCP\", \"UDP\", \"SCTP\"",
    ),
    Mistake(["podMonitor.enabled=true", "podMonitor.labels.release=a b"], "labels: Invalid value: \"a b\""),
)  # fmt: skip

WARNED: Final = (
    # taken, and helm prints the server's warning
    Mistake(
        ["affinity.nodeAffinity.preferred=x"], 'unknown field "spec.template.spec.affinity.nodeAffinity.preferred"'
    ),
    Mistake(["podSecurityContext.runAsNonRoot=false"], "would violate PodSecurity"),
    Mistake(["securityContext.runAsUser=0"], "would violate PodSecurity"),
)

PODS: Final = (
    # taken, and the pod is refused: kubectl describe replicaset has the words
    Mistake(
        ["podSecurityContext.runAsNonRoot=false"], 'violates PodSecurity "restricted:latest": runAsNonRoot != true'
    ),
    Mistake(["securityContext.runAsUser=0"], "must not set runAsUser=0"),
    Mistake(["serviceAccount.create=false", "serviceAccount.name=nobody"], 'serviceaccount "nobody" not found'),
    Mistake(["priorityClassName=urgent"], "no PriorityClass with name urgent was found"),
)


def without_crds(installer: Client, package: Path, check: Check) -> None:
    """Before the operators' CRDs are installed, helm says which kind is missing."""
    for values, kind in (("keda.enabled=true", "ScaledObject"), ("podMonitor.enabled=true", "PodMonitor")):
        result = _install(installer, package, [values])
        said = f'no matches for kind "{kind}"' in result.errors and "ensure CRDs are installed first" in result.errors
        check(f"refused without its CRD: {kind}", (result.code, said), (1, True))


def make_mistakes(installer: Client, admin: Client, package: Path, check: Check) -> None:
    """Try each mistake, and mend it."""
    for mistake in SERVER:
        result = _install(installer, package, mistake.values)
        _judge(check, "refused by the server", mistake, result.code, 1, result.errors)
        installer.try_helm("uninstall", RELEASE)
    for mistake in WARNED:
        result = _install(installer, package, mistake.values)
        said = result.errors.replace("\\", "")  # helm logs a warning with its quotation marks escaped
        _judge(check, "warned of by the server", mistake, result.code, 0, said)
        installer.helm("uninstall", RELEASE)
    for mistake in PODS:
        _install(installer, package, mistake.values)
        refusals = _refusals(admin)
        _judge(check, "pod refused by the server", mistake, bool(refusals), True, refusals)
        installer.helm("uninstall", RELEASE)
    _immutable_selector(installer, admin, package, check)
    _mended(installer, admin, package, check)


def _judge(check: Check, what: str, mistake: Mistake, found: object, expected: object, text: str) -> None:
    """Check result and words; print the whole text where a word is missing."""
    said = mistake.words if mistake.words in text else text
    check(f"{what}: {', '.join(mistake.values)}", (found, said), (expected, mistake.words))


def _install(client: Client, package: Path, values: Sequence[str]) -> Result:
    options = [part for value in values for part in ("--set", value)]
    return client.try_helm("install", RELEASE, str(package), *LEAST, *options)


def _refusals(admin: Client) -> str:
    """Return what the server says of the pods of the release's templates."""
    said = []
    for pod in template_pods(admin.objects(RELEASE)).values():
        try:
            admin.create(pod, "--dry-run=server")
        except CommandError as error:
            said.append(str(error))
    return "\n".join(said)


def _immutable_selector(installer: Client, admin: Client, package: Path, check: Check) -> None:
    """nameOverride alone changes the selector of the Deployment, which no upgrade can."""
    name = ("--set", "fullnameOverride=quality")
    installer.helm("install", RELEASE, str(package), *LEAST, *name)
    before = versions(admin.objects(RELEASE))["Deployment/quality"]
    result = installer.try_helm("upgrade", RELEASE, str(package), *LEAST, *name, "--set", "nameOverride=other")
    said = "spec.selector: Invalid value" in result.errors and "field is immutable" in result.errors
    check("another nameOverride is refused", (result.code, said), (1, True))
    check("a refused upgrade leaves the Deployment", versions(admin.objects(RELEASE))["Deployment/quality"], before)
    installer.helm("upgrade", RELEASE, str(package), *LEAST, *name)
    check("the upgrade after it: kubectl diff", admin.differences(RELEASE), "")
    installer.helm("uninstall", RELEASE)


def _mended(installer: Client, admin: Client, package: Path, check: Check) -> None:
    """`helm upgrade --install` without the mistake works after one that was refused."""
    command = ("upgrade", "--install", RELEASE, str(package), *LEAST)
    refused = installer.try_helm(*command, "--set", "podLabels.team=a b")
    check("the first install was refused", refused.code, 1)
    installer.helm(*command)
    check("the corrected one: kubectl diff", admin.differences(RELEASE), "")
    installer.helm("uninstall", RELEASE)
