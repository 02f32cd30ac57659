"""Rules, runbooks, dashboard and Grafana's provisioning agree with each other and with the exported metrics.

What needs Prometheus itself (syntax, unit tests of the alerts, every query on live data) is `make deploy-check`.
"""

import re

import pytest
import yaml

from tests.support.monitoring import (
    BY_PROMETHEUS,
    DASHBOARD,
    RULES_TEST,
    RUNBOOKS,
    alerts,
    dashboard,
    dashboard_queries,
    exported_names,
    metric_names,
    panels,
    recorded,
    rule_queries,
)
from tests.support.surroundings import DOCS, ROOT
from worker.config import Settings

QUERIES = rule_queries() + dashboard_queries()


def test_a_query_asks_only_for_what_exists() -> None:
    there = exported_names() | recorded() | BY_PROMETHEUS
    for query in QUERIES:
        names = metric_names(query.expr)
        assert names, f"{query.where} asks for nothing"
        assert names <= there, query.where


def test_every_recording_is_used() -> None:
    used = {name for query in QUERIES for name in metric_names(query.expr)}
    assert recorded() <= used


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_how_bad_what_and_where_to_read_on(name: str) -> None:
    alert = alerts()[name]
    assert alert["labels"] in ({"severity": "page"}, {"severity": "ticket"})
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_each_alert_has_its_section_in_the_runbooks_and_no_section_is_left_over() -> None:
    text = RUNBOOKS.read_text("utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(alerts())
    for section in re.findall(r"^### (.*?)(?=^### |^## |\Z)", text, re.MULTILINE | re.DOTALL):
        name = section.split()[0]
        assert re.match(rf"\w+\n\n{alerts()[name]['labels']['severity']}\. ", section), name
        assert re.findall(r"^\*\*([^*]+)\*\*", section, re.MULTILINE) == ["Look.", "Act."], name
        assert section.count("Never ") <= 1, f"{name}: one warning"


def test_runbooks_name_only_what_exists() -> None:
    text = RUNBOOKS.read_text("utf-8")
    assert set(re.findall(r"\bkp_[a-z_]+", text)) <= exported_names()
    settings = {f"KP_{name.upper()}" for name in Settings.model_fields}
    assert {name.rstrip("_") for name in re.findall(r"\bKP_[A-Z_]+", text)} <= settings


def test_runbooks_name_only_rows_and_panels_that_the_dashboard_has() -> None:
    text = " ".join(RUNBOOKS.read_text("utf-8").split())
    titles = {panel["title"]: panel["type"] for panel in panels(dashboard())}
    rows = re.findall(r'[Rr]ow "([^"]+)"', text)
    assert rows
    assert {title for title in rows if titles.get(title) != "row"} == set()
    looked_at = " ".join(re.findall(r"\*\*Look\.\*\*(.*?)\*\*Act", text))
    named = set(re.findall(r'(?<!`)"([A-Z][a-z][^"{}=]*)"', re.sub(r"`[^`]*`", "", looked_at)))
    assert len(named) > 10
    annotations = {each["name"] for each in dashboard()["annotations"]["list"]}
    assert named <= titles.keys() | annotations


def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for test in yaml.safe_load(RULES_TEST.read_text("utf-8"))["tests"]:
        checks = [
            {match for sample in check["exp_samples"] for match in re.findall(r'alertname="(\w+)"', sample["labels"])}
            for check in test.get("promql_expr_test", ())
        ]
        fired = set().union(*checks)
        fires |= fired
        silent |= {name for name in fired if any(name not in check for check in checks)}
    assert fires == silent == set(alerts())


def test_panels_have_an_id_a_description_a_unit_and_the_chosen_data_source() -> None:
    document = dashboard()
    all_panels = list(panels(document))
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in all_panels:
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "heatmap", panel["title"]
        assert panel["datasource"] == source
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert re.search(r"\$(instance|contribute|assemble)\b", target["expr"]), target["expr"]


def test_panels_do_not_overlap() -> None:
    document = dashboard()
    for level in (document["panels"], *(panel["panels"] for panel in document["panels"] if panel.get("panels"))):
        cells = [
            (x, y)
            for at in (panel["gridPos"] for panel in level)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert all(x < 24 for x, _ in cells)


def test_the_page_of_metrics_names_only_what_exists() -> None:
    named = set(re.findall(r"`((?:kp|process|python)_\w+)", (DOCS / "metrics.md").read_text("utf-8")))
    histograms = {name.removesuffix("_bucket") for name in exported_names() if name.endswith("_bucket")}
    assert named <= exported_names() | histograms


def test_grafana_has_the_prometheus_of_compose_and_opens_the_dashboard() -> None:
    """What Grafana itself would say is not asked."""
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    mounts = {target: ROOT / source for source, target, *_ in (mount.split(":") for mount in service["volumes"])}
    provisioned = {}
    for kind in ("datasources", "dashboards"):
        path = mounts[f"/etc/grafana/provisioning/{kind}/kp-worker.yaml"]
        assert path == ROOT / f"deploy/grafana/provisioning/{kind}.yaml"
        provisioned |= yaml.safe_load(path.read_text("utf-8"))
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())["global"]["scrape_interval"]
    source = {
        "name": "Prometheus", "type": "prometheus", "uid": "prometheus", "access": "proxy",
        "url": "http://prometheus:9090", "isDefault": True, "jsonData": {"timeInterval": scrape},
    }  # fmt: skip
    folder = "/var/lib/kp-worker/dashboards"
    provider = {"name": "kp-worker", "type": "file", "allowUiUpdates": False, "options": {"path": folder}}
    assert provisioned == {"apiVersion": 1, "datasources": [source], "providers": [provider]}
    (variable,) = (it for it in dashboard()["templating"]["list"] if it["type"] == "datasource")
    assert variable["query"] == source["type"]
    assert mounts[folder] / DASHBOARD.name == DASHBOARD
    assert service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/{DASHBOARD.name}"
