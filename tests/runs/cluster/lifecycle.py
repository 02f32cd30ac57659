"""A release from install to uninstall: what the cluster has is what the chart says, after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.runs.cluster.client import NAMESPACE, Check, Client, Object, Result, documents, template_pods, versions

RELEASE: Final = "kp-worker"
CHANGE: Final = ("--set", "config.KP_THRESHOLD=0.81")


class Lifecycle:
    """Installs, upgrades (also to a later version of the chart), rolls back and uninstalls."""

    def __init__(self, installer: Client, admin: Client, package: Path, later: Path, check: Check) -> None:
        self._installer = installer
        self._admin = admin
        self._package = str(package)
        self._later = str(later)
        self._check = check

    def install(self, title: str, values: Sequence[str]) -> dict[str, Object]:
        """Install one configuration and return the pods of its templates, by the name of their owner."""
        notes = self._helm("install", *values).output
        self._check(f"{title}: notes name the namespace", f"--namespace {NAMESPACE}" in notes, True)
        self._matches(f"{title}: install")
        return template_pods(self._live())

    def change(self, title: str, values: Sequence[str]) -> None:
        """Upgrade the installed release without a change, then with a setting and the next chart; roll it back."""
        first, pods = versions(self._live()), template_pods(self._live())
        self._helm("upgrade", *values)
        self._check(f"{title}: the same upgrade changes no object", versions(self._live()) == first, True)
        later = self._installer.helm("upgrade", RELEASE, self._later, *values, *CHANGE)
        self._check_silent("helm upgrade", later)
        self._matches(f"{title}: upgrade")
        changed = template_pods(self._live())
        rolled = [owner for owner in pods if changed[owner]["spec"] != pods[owner]["spec"]]
        self._check(f"{title}: a changed setting changes each pod template", rolled, list(pods))
        self._rollback(1)
        self._matches(f"{title}: rollback")
        self._check(f"{title}: rollback restores each pod template", template_pods(self._live()) == pods, True)

    def moves(self, configurations: Mapping[str, Sequence[str]]) -> None:
        """Upgrade one release from each configuration to the next, back by a rollback, and forward again."""
        names = [*configurations, next(iter(configurations))]
        self._helm("install", *configurations[names[0]])
        revision = 1
        for old, new in pairwise(names):
            before = documents(self._admin.manifest(RELEASE))
            self._helm("upgrade", "--reset-values", *configurations[new])
            self._matches(f"{old} -> {new}")
            self._rollback(revision)
            self._matches(f"{old} <- {new}")
            same = documents(self._admin.manifest(RELEASE)) == before
            self._check(f"{old} <- {new}: the manifest of before", same, True)
            self._helm("upgrade", "--reset-values", *configurations[new])
            revision += 3
        self.uninstall("after all upgrades")

    def replicas_with_keda(self, without: Sequence[str], with_keda: Sequence[str]) -> None:
        """Switch KEDA on for a release of 5 pods, scale as KEDA does, upgrade again: no upgrade takes a pod away."""
        self._helm("install", *without, "--set", "replicas=5")
        self._helm("upgrade", "--reset-values", *with_keda)
        self._check("replicas after KEDA was switched on", self._replicas(), 5)
        self._admin.kubectl("scale", "deployment", RELEASE, "--replicas=7")
        self._helm("upgrade", "--reset-values", *with_keda, *CHANGE)
        self._check("replicas after an upgrade while KEDA has 7", self._replicas(), 7)
        self._rollback(2)
        self._check("replicas after a rollback to the revision of 5", self._replicas(), 5)
        self._helm("upgrade", "--reset-values", *without, "--set", "replicas=3")
        self._check("replicas after KEDA was switched off", self._replicas(), 3)
        self.uninstall("KEDA on and off")

    def _replicas(self) -> int:
        replicas: int = self._live()[f"Deployment/{RELEASE}"]["spec"]["replicas"]
        return replicas

    def _live(self) -> dict[str, Object]:
        return self._admin.objects(RELEASE)

    def _helm(self, verb: str, *values: str) -> Result:
        result = self._installer.helm(verb, RELEASE, self._package, *values)
        self._check_silent(f"helm {verb}", result)
        return result

    def _rollback(self, revision: int) -> None:
        self._check_silent("helm rollback", self._installer.helm("rollback", RELEASE, str(revision)))

    def _check_silent(self, what: str, result: Result) -> None:
        """The server warns of deprecated versions, unknown fields and pods that PodSecurity would refuse."""
        if result.errors:
            self._check(f"{what} warns of nothing", result.errors, "")

    def _matches(self, title: str) -> None:
        """The cluster has the manifest's objects and no other, and a three-way diff finds nothing."""
        live = self._live()
        wanted = documents(self._admin.manifest(RELEASE))
        self._check(f"{title}: objects", sorted(live), sorted(wanted))
        self._check(f"{title}: kubectl diff", self._admin.differences(RELEASE), "")

    def uninstall(self, title: str) -> None:
        """Uninstall the release: none of its objects is left."""
        self._check_silent("helm uninstall", self._installer.helm("uninstall", RELEASE))
        left = self._live()
        self._check(f"{title}: uninstall leaves nothing", sorted(left), [])
