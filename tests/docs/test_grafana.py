"""Grafana's provisioning against the dashboard and docker-compose.yml, without Grafana: names, kinds, places."""

from pathlib import Path
from typing import Any

import yaml

from tests.support.monitoring import DASHBOARD, dashboard
from tests.support.surroundings import ROOT

PROVISIONING = ROOT / "deploy/grafana/provisioning"
SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
MOUNTS = {Path(target): ROOT / source for source, target, *_ in (mount.split(":") for mount in SERVICE["volumes"])}


def provisioned(name: str, key: str, known: set[str]) -> dict[str, Any]:
    """Return the only entry of a provisioning file, whose keys must be ones that Grafana documents."""
    document = yaml.safe_load((PROVISIONING / name).read_text("utf-8"))
    assert document.keys() == {"apiVersion", key}
    assert document["apiVersion"] == 1
    (entry,) = document[key]
    assert entry.keys() <= known
    return dict(entry)


def test_the_data_source_is_the_prometheus_of_compose_and_of_the_dashboard_s_kind() -> None:
    known = {"name", "type", "uid", "access", "url", "isDefault", "jsonData", "editable", "orgId", "version"}
    source = provisioned("datasources.yaml", "datasources", known)
    (variable,) = (it for it in dashboard()["templating"]["list"] if it["type"] == "datasource")
    assert (source["type"], variable["query"]) == ("prometheus", "prometheus")
    assert source["url"] == "http://prometheus:9090"
    assert source["access"] == "proxy"
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"] == {"timeInterval": scrape}


def test_the_dashboard_is_where_the_provider_and_the_home_page_look() -> None:
    known = {"name", "type", "orgId", "folder", "allowUiUpdates", "disableDeletion", "updateIntervalSeconds", "options"}
    provider = provisioned("dashboards.yaml", "providers", known)
    path = Path(provider["options"]["path"])
    assert provider["type"] == "file"
    assert MOUNTS[path] / DASHBOARD.name == DASHBOARD
    assert SERVICE["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(path / DASHBOARD.name)


def test_the_files_are_mounted_where_grafana_reads_provisioning() -> None:
    for kind in ("datasources", "dashboards"):
        assert MOUNTS[Path("/etc/grafana/provisioning", kind, "kp-worker.yaml")] == PROVISIONING / f"{kind}.yaml"
