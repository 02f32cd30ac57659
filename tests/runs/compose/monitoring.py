"""Prometheus of docker-compose.yml: its targets, rules, the dashboard's queries, and an alert that comes and goes."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from tests.runs.compose.project import Project
from tests.runs.engine.checks import Checks
from tests.support.kafka_fixtures import wait_until
from tests.support.monitoring import GRAFANA, dashboard_queries, rules

URL: Final = "http://127.0.0.1:9090/api/v1/"
SCRAPED_S: Final = 60.0
ALERT: Final = "KpNoWorker"
ALERT_S: Final = 360.0
"""The rule waits for 3 minutes; a scrape, an evaluation and a slow machine come on top."""


def ask(path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus's API. Raises OSError while it does not answer."""
    with urllib.request.urlopen(f"{URL}{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
        return json.load(answer)["data"]


def up() -> dict[str, list[str]]:
    """Return the health of the targets of each job; empty while Prometheus does not answer."""
    with contextlib.suppress(OSError):
        found: dict[str, list[str]] = {}
        for target in ask("targets", state="active")["activeTargets"]:
            found.setdefault(target["labels"]["job"], []).append(target["health"])
        return found
    return {}


def check_targets(check: Checks, **expected: int) -> None:
    """As many targets of each job are up, once they are scraped."""
    wanted = {job.replace("_", "-"): ["up"] * count for job, count in expected.items()}
    wait_until(lambda: up() == wanted, SCRAPED_S, 0.5)
    check("targets of Prometheus", up(), wanted)


def check_rules(check: Checks) -> None:
    """All rules are loaded and evaluated without an error."""
    wait_until(lambda: all(health == "ok" for _, health in loaded()), SCRAPED_S, 0.5)
    found, expected = {name for name, _ in loaded()}, {it.get("alert") or it["record"] for it in rules()}
    check("rules loaded, and those missing or unknown", (len(loaded()), found ^ expected), (len(rules()), set()))
    check("rules that are not evaluated", [it for it in loaded() if it[1] != "ok"], [])


def loaded() -> list[tuple[str, str]]:
    """Return name and health of each rule."""
    return [(rule["name"], rule["health"]) for group in ask("rules")["groups"] for rule in group["rules"]]


def check_dashboard(check: Checks) -> None:
    """Every query of the dashboard is one that this Prometheus takes; most of them find data."""
    refused, empty = [], []
    for query in dashboard_queries():
        expr = query.expr
        for variable, value in GRAFANA.items():
            expr = expr.replace(variable, value)
        try:
            empty += [] if ask("query", query=expr)["result"] else [query.where]
        except urllib.error.HTTPError as error:
            refused.append(f"{query.where}: {error.read().decode()}")
    check("queries of the dashboard that Prometheus refuses", refused, [])
    print(f"      {len(dashboard_queries())} queries, {len(empty)} without data now: {', '.join(empty)}")


def state(alert: str) -> str:
    """Return inactive, pending or firing; unknown while Prometheus does not answer."""
    with contextlib.suppress(OSError):
        states = {it["state"] for it in ask("alerts")["alerts"] if it["labels"]["alertname"] == alert}
        return min(states, default="inactive")  # firing before pending
    return "unknown"


def check_alert(check: Checks, project: Project) -> None:
    """Without a worker its alert fires by the rules as they are, and it resolves when the worker is back."""
    check(f"{ALERT} at first", state(ALERT), "inactive")
    project.compose("stop", "worker")
    check("exit code of a stopped worker", project.container("worker")["State"]["ExitCode"], 0)
    check(f"{ALERT} without a worker", wait_until(lambda: state(ALERT) == "firing", ALERT_S, 1), True)
    project.compose("start", "worker")
    project.wait_healthy()
    check(f"{ALERT} with a worker again", wait_until(lambda: state(ALERT) == "inactive", SCRAPED_S, 1), True)
