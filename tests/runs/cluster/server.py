"""etcd and a Kubernetes API server on loopback, with certificates, keys and users of their own.

Admission is that of a real cluster: the API server's default plugins (ServiceAccount, PodSecurity, Priority,
LimitRanger, ResourceQuota, ...) and NodeRestriction, authorization by Node and RBAC. No controller, scheduler or
kubelet runs: nobody makes pods, and no service account appears by itself.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from tests.runs.cluster.programs import Programs
from tests.support.processes import end_process
from worker.lab.broker.ports import HOST, free_ports

START_S: Final = 120.0
STOP_S: Final = 20.0
ADMIN: Final = "admin"
INSTALLER: Final = "installer"
GROUPS: Final = {ADMIN: "system:masters", INSTALLER: "deployers"}
AUDIT_POLICY: Final = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}


class ServerError(RuntimeError):
    """etcd or the API server does not start; the message has the end of its log."""


class ApiServer:
    """etcd and kube-apiserver, as a context manager. `kubeconfig(user)` is for kubectl and helm."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._temporary = tempfile.TemporaryDirectory(prefix="kp-cluster-")
        self.directory = Path(self._temporary.name)
        self.audit_log = self.directory / "audit.log"
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._etcd_port, self._peer_port, self._port = free_ports(3)

    @property
    def url(self) -> str:
        """Where the API server listens."""
        return f"https://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._write_files()
            etcd = f"http://{HOST}:{self._etcd_port}"
            self._start("etcd", self._etcd(etcd))
            self._wait("etcd", f"{etcd}/health")
            self._start("kube-apiserver", self._kube_apiserver(etcd))
            self._wait("kube-apiserver", f"{self.url}/readyz")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for _name, process in reversed(self._processes):
            end_process(process, STOP_S)
        self._processes.clear()
        self._temporary.cleanup()

    def kubeconfig(self, user: str) -> Path:
        """Return the file with which kubectl and helm are that user."""
        return self.directory / f"{user}.kubeconfig"

    def audited(self) -> list[dict[str, Any]]:
        """Return the answered requests, oldest first."""
        events = [json.loads(line) for line in self.audit_log.read_text("utf-8").splitlines()]
        return [event for event in events if event["stage"] == "ResponseComplete"]

    def token_config(self, name: str, token: str) -> Path:
        """Write the file of a user who has a token, and return it."""
        return self._write_kubeconfig(name, {"token": token})

    def _write_files(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.directory / "ca.crt"))
        serving = authority.issue_cert(HOST, "localhost", "kubernetes.default.svc")
        self._write_pair("server", serving)
        for user, group in GROUPS.items():
            self._write_pair(user, authority.issue_cert(f"{user}.example", common_name=user, organization_name=group))
            files = {"client-certificate": f"{user}.crt", "client-key": f"{user}.key"}
            self._write_kubeconfig(user, {key: str(self.directory / name) for key, name in files.items()})
        private = (self.directory / "server.key").read_bytes()
        public = load_pem_private_key(private, None).public_key()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (self.directory / "service-accounts.pub").write_bytes(pem)
        (self.directory / "audit.yaml").write_text(json.dumps(AUDIT_POLICY))  # JSON is YAML

    def _write_pair(self, name: str, issued: trustme.LeafCert) -> None:
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        (self.directory / f"{name}.crt").write_bytes(chain)
        (self.directory / f"{name}.key").write_bytes(issued.private_key_pem.bytes())

    def _write_kubeconfig(self, user: str, credentials: dict[str, str]) -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self.directory / "ca.crt")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "check", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "check", "context": {"cluster": "check", "user": user}}],
            "current-context": "check",
        }
        path = self.kubeconfig(user)
        path.write_text(json.dumps(document))
        return path

    def _etcd(self, url: str) -> list[str]:
        peer = f"http://{HOST}:{self._peer_port}"
        return [
            str(self.programs.etcd),
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # its data end with the check
        ]

    def _kube_apiserver(self, etcd: str) -> list[str]:
        directory = self.directory
        return [
            str(self.programs.kube_apiserver),
            f"--etcd-servers={etcd}",
            f"--bind-address={HOST}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={directory / 'server.crt'}",
            f"--tls-private-key-file={directory / 'server.key'}",
            f"--client-ca-file={directory / 'ca.crt'}",
            f"--service-account-key-file={directory / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={directory / 'server.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",  # further to the defaults, as kubeadm has it
            "--endpoint-reconciler-type=none",  # nobody else looks for an API server on loopback
            f"--audit-policy-file={directory / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
        ]

    def _start(self, name: str, command: Sequence[str]) -> None:
        # In a session of its own: Ctrl-C ends the check, and the check ends its processes.
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory, start_new_session=True,
                env={key: value for key, value in os.environ.items() if not key.startswith(("ETCD_", "KUBE"))},
            )  # fmt: skip
        self._processes.append((name, process))

    def _wait(self, name: str, url: str) -> None:
        """Wait until the URL answers 200. Raises ServerError."""
        context = ssl.create_default_context(cafile=str(self.directory / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        process = self._processes[-1][1]
        end = time.monotonic() + START_S
        reason: object = "no answer"
        while time.monotonic() < end and process.poll() is None:
            try:
                with opener.open(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                reason = error
            time.sleep(0.2)
        state = "runs" if process.poll() is None else f"ended with code {process.returncode}"
        tail = (self.directory / f"{name}.log").read_text("utf-8", "replace")[-3000:]
        raise ServerError(f"{name} {state} and is not ready ({reason}):\n{tail}")
