"""What can be seen of the running containers: health, hardening, ports, mounts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml

from tests.runs.compose.project import Project
from tests.runs.engine.checks import Checks
from tests.support.surroundings import ROOT

PORTS: Final = (9090, 9094, 3000)
STATUS: Final = """
import json, pathlib
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
mounts = {line.split()[1]: line.split()[3].split(",") for line in open("/proc/mounts")}
def refuses(directory):
    try:
        pathlib.Path(directory, "probe").write_text("")
    except OSError:
        return True
    pathlib.Path(directory, "probe").unlink()
    return False
print(json.dumps({
    "uid": status["Uid"].split(), "gid": status["Gid"].split(), "groups": status["Groups"].split(),
    "capabilities": [status[it].strip() for it in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no new privileges": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(),
    "root": mounts["/"][0], "config": mounts["/etc/kp-worker/kp-worker.toml"][0],
    "refused": [it for it in ("/", "/etc", "/opt/kp-worker", "/etc/kp-worker", "/tmp") if refuses(it)],
}))
"""


def check_state(check: Checks, project: Project) -> None:
    """Everything that Compose names runs, is healthy where it has a health check, and was never restarted."""
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    started = [name for name, service in services.items() if "profiles" not in service]
    found = {}
    for name in started:
        container = project.container(name)
        state = container["State"]
        found[name] = state.get("Health", {}).get("Status") or state["Status"], container["RestartCount"]
    healthy = dict.fromkeys(started, ("healthy", 0))
    healthy |= {"topics": ("exited", 0), "grafana": ("running", 0)}
    check("state and restarts of each service", found, healthy)
    check("exit code of topics", project.container("topics")["State"]["ExitCode"], 0)


def check_hardened(check: Checks, project: Project) -> None:
    """Look from inside of the worker's container: no root, no capability, nothing to write but /tmp."""
    container = project.container("worker")
    found = json.loads(project.execute(container["Id"], "python", "-c", STATUS))
    check("user and group, real to file system", found["uid"] + found["gid"], ["10001"] * 8)
    check("further groups", set(found["groups"]) <= {"10001"}, True)
    check("capabilities of process 1", set(found["capabilities"]), {"0" * 16})
    check("no new privileges, seccomp filter", (found["no new privileges"], found["seccomp"]), ("1", "2"))
    check("root file system and config file are mounted", (found["root"], found["config"]), ("ro", "ro"))
    check("directories that refuse a file", found["refused"], ["/", "/etc", "/opt/kp-worker", "/etc/kp-worker"])


def check_ports(check: Checks, project: Project) -> None:
    """Published ports listen on loopback only, as Docker says and as the kernel says."""
    bindings = {}
    for service in ("kafka", "prometheus", "grafana", "worker"):
        ports = project.container(service)["NetworkSettings"]["Ports"]
        bindings[service] = sorted(f"{it['HostIp']}:{it['HostPort']}" for its in ports.values() for it in its or ())
    expected = {"kafka": 9094, "prometheus": 9090, "grafana": 3000}
    check(
        "published ports", bindings, {name: [f"127.0.0.1:{port}"] for name, port in expected.items()} | {"worker": []}
    )
    if project.engine.own:
        check("addresses that listen", listening(), {"0100007F"})


def listening() -> set[str]:
    """Return the addresses on which this machine listens at the published ports, as /proc/net/tcp writes them."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    local = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    return {address for address, port in local if int(port, 16) in PORTS}


def check_grafana(check: Checks, project: Project) -> None:
    """The provisioning is mounted where Grafana looks for it, readable for its user; the settings arrive.

    Whether Grafana loads it is not shown here: that needs Grafana. tests/docs/test_monitoring.py holds the files
    against each other.
    """
    container = project.container("grafana")
    print(f"      {container['Config']['Image']} is " + ("a stand-in" if project.engine.own else "the real image"))
    files = (
        "/etc/grafana/provisioning/datasources/kp-worker.yaml",
        "/etc/grafana/provisioning/dashboards/kp-worker.yaml",
        "/var/lib/kp-worker/dashboards/kp-worker.json",
    )
    sources = ("provisioning/datasources.yaml", "provisioning/dashboards.yaml", "dashboards/kp-worker.json")
    same = [
        project.execute(container["Id"], "cat", file) == (ROOT / "deploy/grafana" / source).read_text()
        for file, source in zip(files, sources, strict=True)
    ]
    check("Grafana's user reads provisioning and dashboard", same, [True] * 3)
    env = dict(it.split("=", 1) for it in container["Config"]["Env"])
    check("its home page is the mounted dashboard", env.get("GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"), files[2])
    project.execute(container["Id"], "touch", "/var/lib/grafana/probe")
    check("its volume can be written", True, True)
