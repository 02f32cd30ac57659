"""The rules and the dashboard as plain values: every query in them, and every metric name in a query."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import yaml
from prometheus_client import CollectorRegistry

from tests.support.surroundings import ROOT
from worker.observe.metrics import AssembleMetrics, ContributeMetrics, Metrics, process_registry

RULES = ROOT / "deploy/prometheus/rules.yaml"
RULES_TEST = ROOT / "deploy/prometheus/rules.test.yaml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/kp-worker.json"
RUNBOOKS = ROOT / "docs/runbooks.md"

SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "info": ("_info",), "gauge": ("",)}

BY_PROMETHEUS = {"up", "ALERTS"}

GRAFANA = {
    "$__rate_interval": "10s",
    "$__range": "1m",
    "$instance": ".*",
    "$contribute": ".*",
    "$assemble": ".*",
    "$group": ".*",
}
"""What stands for the variables of the dashboard in a query that is asked without Grafana."""


class Query(NamedTuple):
    """A query and where it stands."""

    where: str
    expr: str


@cache
def rules() -> list[dict[str, Any]]:
    """Return all rules, recording ones and alerts, in the order of the file."""
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    found = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in found}) == len(found)
    return {rule["alert"]: rule for rule in found}


def recorded() -> set[str]:
    """Return the names of the recording rules."""
    return {rule["record"] for rule in rules() if "record" in rule}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all panels, rows and those in collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return document


def dashboard_queries() -> list[Query]:
    document = dashboard()
    found = [
        Query(f"panel {panel['title']} {target['refId']}", target["expr"])
        for panel in panels(document)
        for target in panel.get("targets", ())
    ]
    found += [
        Query(f"annotation {annotation['name']}", annotation["expr"])
        for annotation in document["annotations"]["list"]
        if "expr" in annotation
    ]
    return found


def rule_queries() -> list[Query]:
    return [Query(f"rule {rule.get('alert') or rule['record']}", rule["expr"]) for rule in rules()]


@cache
def exported_names() -> set[str]:
    """Return the names of all series that a worker, `contribute` and `assemble` export."""
    names = set()
    own = (Metrics(CollectorRegistry()), ContributeMetrics(CollectorRegistry()), AssembleMetrics(CollectorRegistry()))
    for registry in (*(metrics.registry for metrics in own), process_registry()):
        for family in registry.collect():
            names |= {family.name + suffix for suffix in SUFFIXES[family.type]}
    return names


def metric_names(expr: str) -> set[str]:
    """Return the names of the series that a query asks for: whatever is no function, keyword, label or string."""
    bare = re.sub(r'"[^"]*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    words = re.findall(r"(?<![\w$:.])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])", bare)
    return {word for word in words if word not in KEYWORDS and not re.fullmatch(r"[smhdwy]", word)}


KEYWORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring"} | {
    # aggregations may stand before their `by`
    "sum", "min", "max", "avg", "group", "count",
}  # fmt: skip
