"""The programs of the check: kube-apiserver, kubectl and etcd built from kubernetes/go.mod, helm and the CRDs.

Everything is built or fetched once and kept in the user's cache directory. kubernetes/go.mod names the three programs
as tools and kubernetes/go.sum holds the sum of every module, so no database of sums is asked. `python -m
tests.runs.cluster.programs VERSION` writes both anew for another Kubernetes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.surroundings import ROOT
from worker.lab.broker.kafka_jars import default_cache

MODULE: Final = Path(__file__).parent / "kubernetes"
CHART_TOOLS: Final = ROOT / "deploy" / "checks" / "chart_tools.sh"
VERSION_PACKAGE: Final = "k8s.io/component-base/version"
TOOLS: Final = {
    # program -> its package; etcd's is named server
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "etcd": "go.etcd.io/etcd/server/v3",
}


class ProgramError(RuntimeError):
    """A program cannot be built or fetched; the message says what to install."""


@dataclass(frozen=True)
class Programs:
    """Paths of what the check runs, and the version of Kubernetes."""

    version: str
    kube_apiserver: Path
    kubectl: Path
    etcd: Path
    helm: Path
    crds: Path


def programs() -> Programs:
    """Return the programs; the first call on a machine builds them, in minutes. Raises ProgramError."""
    version = _version()
    built = _kubernetes(version)
    helm, crds = chart_tools()
    kube_apiserver, kubectl, etcd = (built / name for name in TOOLS)
    return Programs(version, kube_apiserver, kubectl, etcd, helm, crds)


def _version() -> str:
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text("utf-8"), re.MULTILINE)
    assert found, "kubernetes/go.mod requires k8s.io/kubernetes"
    return found[1]


def _kubernetes(version: str) -> Path:
    """Return the directory of the three programs."""
    sums = hashlib.sha256(b"".join((MODULE / name).read_bytes() for name in ("go.mod", "go.sum"))).hexdigest()[:12]
    cache = default_cache()
    directory = cache / f"kubernetes-{version}-{sums}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kubernetes.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not directory.is_dir():
            print(f"building Kubernetes {version} and etcd into {directory} (once, some minutes)", flush=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="kubernetes-") as temporary:
                _build(version, Path(temporary) / "programs")
                (Path(temporary) / "programs").rename(directory)
    return directory


def _build(version: str, directory: Path) -> None:
    major, minor, _ = version.removeprefix("v").split(".")
    stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in stamps.items())])
    for name, package in TOOLS.items():
        _go("build", "-trimpath", "-ldflags", flags, "-o", str(directory / name), package)


def _go(*arguments: str, mode: str = "readonly", directory: Path = MODULE) -> str:
    """Run Go and return its output. Raises ProgramError."""
    if shutil.which("go") is None:
        raise ProgramError(
            "this check builds Kubernetes' API server and needs Go 1.24 or later (https://go.dev/doc/install)"
        )
    # Some hosts of sums do not know every module; go.sum does.
    environment = {**os.environ, "GOFLAGS": f"-mod={mode} -buildvcs=false", "GONOSUMDB": "k8s.io/*"}
    done = subprocess.run(
        ["go", *arguments], cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise ProgramError(f"go {arguments[0]} failed; its messages are above")
    return done.stdout


def chart_tools() -> tuple[Path, Path]:
    """Return helm, and the directory of the CRDs."""
    done = subprocess.run(
        [CHART_TOOLS], env={**os.environ, "PYTHON": sys.executable}, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise ProgramError("helm or the CRDs are missing; the reason is above")
    helm, crds = done.stdout.splitlines()[-2:]
    return Path(helm), Path(crds)


def write_module(version: str) -> None:
    """Write go.mod and go.sum for a version of Kubernetes, `v1.31.14`.

    Kubernetes requires its staging modules in version v0.0.0, which exists in its own repository alone. Each is
    replaced by the one that was published with that version. etcd is that of its client.
    """
    for name in ("go.mod", "go.sum"):
        (MODULE / name).unlink(missing_ok=True)
    (MODULE / "go.mod").write_text("module kp-worker/cluster\n\ngo 1.24\n")
    source = json.loads(_go("mod", "download", "-json", f"k8s.io/kubernetes@{version}", mode="mod"))
    required = Path(source["GoMod"]).read_text("utf-8")
    for module in re.findall(r"^\t(k8s\.io/[a-z-]+) v0\.0\.0(?: //.*)?$", required, re.MULTILINE):
        _go("mod", "edit", f"-replace={module}={module}@v0.{version.removeprefix('v1.')}", mode="mod")
    etcd = re.search(r"^\tgo\.etcd\.io/etcd/client/v3 (v\S+)", required, re.MULTILINE)
    assert etcd, "Kubernetes requires etcd's client"
    versions = {"etcd": etcd[1]}
    _go("get", "-tool", *(f"{package}@{versions.get(name, version)}" for name, package in TOOLS.items()), mode="mod")


if __name__ == "__main__":
    write_module(sys.argv[1])
