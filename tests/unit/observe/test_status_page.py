"""The status page without a browser: its numbers, what it keeps to itself, its headers (browser_status.py: with)."""

import base64
import hashlib
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.support.builders import NEVER_ACCEPTED, T0, make_record, trace_bytes
from tests.support.partition import ManualPublisher, new_partition, settle
from worker import PartitionScorer, config
from worker.commands.explain import explain
from worker.commands.shared.explanation import explain_trace
from worker.commands.shared.options import load_settings
from worker.config import Settings
from worker.config.redaction_rules import evaluation_config, output_rules
from worker.core.documents import scored_record
from worker.core.scorer import Decision
from worker.core.trace import parse_trace
from worker.observe.metrics import Metrics
from worker.observe.status import (
    DOMAIN_LENGTH,
    KEPT_DEAD_LETTERS,
    KEPT_DOMAINS,
    KEPT_OF_DOMAIN,
    KEPT_TRACES,
    PAGE,
    TEXT_LENGTH,
    WINDOW_SECONDS,
    LastRows,
    Status,
    explain_command,
)
from worker.stream.evaluator import PartitionState

HTML = PAGE.read_text("utf-8")


class Desk:
    """A status and a partition task that tells it what it commits."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(status_page=True, **settings)
        self.metrics = Metrics(CollectorRegistry(), self.settings.scoring_profiles())
        self.problem: str | None = None
        self.status = Status(self.settings, self.metrics, lambda: self.problem)
        self.publisher = ManualPublisher()
        self.failures: list[BaseException] = []
        self.task = new_partition(
            3,
            PartitionState(PartitionScorer(dimensions=8, threshold=self.settings.threshold), next_offset=0),
            self.publisher,
            self.failures,
            evaluation=evaluation_config(self.settings, output_rules(self.settings)),
            latency_budget_seconds=self.settings.latency_budget_seconds,
            metrics=self.metrics,
            status=self.status,
        )
        self.task.start()

    async def commit(self, *values: bytes) -> None:
        for value in values:
            self.task.take(make_record(value, self.task._taken_to + 1, partition=3))
        await self.task.drain()

    def json(self, **query: str) -> Any:
        """Return the snapshot as the page gets it."""
        body, headers = self.status.pages()["/status.json"](query)
        assert headers["Content-Type"] == "application/json"
        return json.loads(body)


# -- the rows


async def test_what_was_redacted_is_not_shown() -> None:
    secret = {"domain": "ada@example.com", "objective": "password=hunter2"}
    traces = [trace_bytes(**secret), trace_bytes(**secret, steps=NEVER_ACCEPTED)]
    for redact, shown in (("off", 2), ("accepted", 1), ("all", 0)):
        desk = Desk(status_texts=True, redact=redact)
        await desk.commit(*traces)
        page = desk.json()
        for value in secret.values():
            assert json.dumps(page["traces"]).count(value) == shown
        if redact == "accepted":
            _, accepted = page["traces"]
            assert (accepted["domain"], accepted["objective"]) == ("[REDACTED:email]", "password=[REDACTED:password]")
        counts = [desk.metrics.redactions.labels(kind)._value.get() for kind in ("password", "email", "ip")]
        assert counts == [2 - shown, 2 - shown, 0]
        await desk.task.close()


async def test_a_row_has_the_steps_that_explain_shows() -> None:
    desk = Desk()
    steps = ["error_recovery:a", "error_recovery", "error_recovery"]
    await desk.commit(trace_bytes("kp:trace:a", steps=steps), trace_bytes("kp:trace:b", steps=NEVER_ACCEPTED))
    shown = desk.json()
    assert list(shown["formulas"]) == ["complexity", "novelty", "tool_diversity", "outcome_confidence"]
    outputs = [output for batch in desk.publisher.committed for output in batch.outputs]
    for row, output in zip(reversed(shown["traces"]), outputs, strict=True):
        explained = json.loads(msgspec.json.encode(explain_trace(output.value or b"", desk.settings), enc_hook=vars))
        formulas = explained["components"].values()
        assert row["components"] == [formula["value"] for formula in formulas]
        assert row["weights"] == [formula["weight"] for formula in formulas]
        assert row["parts"] == [formula["weighted"] for formula in formulas]
        for name in ("id", "profile", "weighted_sum", "overrides", "before_clamp", "score", "threshold", "decision"):
            assert row[name] == explained[name], name
    second, first = shown["traces"]
    assert (first["partition"], first["offset"], first["nearest"], first["domain"]) == (3, 0, None, "finance")
    assert [it["name"] for it in second["overrides"]] == ["single_thought"]


async def test_a_rare_domain_has_its_last_traces_by_the_filter() -> None:
    desk = Desk()
    await desk.commit(*[trace_bytes(f"kp:trace:rare-{i}", domain="rare") for i in range(KEPT_OF_DOMAIN + 5)])
    await desk.commit(*[trace_bytes(f"kp:trace:{i}", domain="code") for i in range(KEPT_TRACES)])
    assert {row["domain"] for row in desk.json()["traces"]} == {"code"}
    rare = desk.json(domain="rare")["traces"]
    assert [row["id"] for row in rare] == [f"kp:trace:rare-{i}" for i in range(KEPT_OF_DOMAIN + 4, 4, -1)]
    assert desk.json(domain="none of them")["traces"] == []


async def test_domains_without_a_profile_are_named_with_the_profile_they_may_mean() -> None:
    desk = Desk()
    names = ["Finance", "finance", "legal", "legal", "customer-service"]
    await desk.commit(*[trace_bytes(f"kp:trace:{i}", domain=name) for i, name in enumerate(names)])
    assert desk.json()["domains"] == [
        {"name": "Finance", "traces": 1, "profile": "default", "near": "finance"},
        {"name": "customer-service", "traces": 1, "profile": "default", "near": "customer_service"},
        {"name": "finance", "traces": 1, "profile": "finance", "near": None},
        {"name": "legal", "traces": 2, "profile": "default", "near": None},
    ]


async def test_domains_are_bounded_in_number_and_length() -> None:
    desk = Desk()
    await desk.commit(*[trace_bytes(f"kp:trace:{i}", domain=f"{i:03}" + "x" * 500) for i in range(KEPT_DOMAINS + 3)])
    names = [domain["name"] for domain in desk.json()["domains"]]
    assert names == [f"{i:03}".ljust(DOMAIN_LENGTH, "x") for i in range(3, KEPT_DOMAINS + 3)]
    assert [row["id"] for row in desk.json(domain=names[0])["traces"]] == ["kp:trace:3"]


async def test_only_what_is_committed_is_shown() -> None:
    desk = Desk()
    desk.publisher.gate.clear()
    desk.task.take(make_record(trace_bytes("kp:trace:a"), 0))
    desk.task.take(make_record(b"no trace", 1))
    await settle()
    assert desk.publisher.begun
    assert desk.json()["traces"] == desk.json()["dead_letters"] == []
    desk.publisher.error = ConnectionError("the transaction was refused")
    desk.publisher.gate.set()
    await settle()
    assert desk.failures
    assert desk.json()["traces"] == desk.json()["dead_letters"] == []
    assert sum(value for value in desk.json()["verdicts"].values() if not isinstance(value, dict)) == 0


async def test_texts_are_shown_where_the_setting_allows_them_and_nowhere_else() -> None:
    values = (trace_bytes(objective="SECRET " * 100), trace_bytes().replace(b"federated", b"SECRET"))
    for allowed in (False, True):
        desk = Desk(status_texts=allowed)
        await desk.commit(*values)
        shown = desk.json()
        assert shown["texts"] is allowed
        assert ("SECRET" in json.dumps(shown)) is allowed
        [letter] = shown["dead_letters"]
        assert (letter["reason"], letter["path"]) == ("invalid_value", "metadata.privacy_level")
        assert ("SECRET" in (letter["message"] or "")) is allowed
        if allowed:
            assert shown["traces"][0]["objective"] == ("SECRET " * 100)[:TEXT_LENGTH]
        await desk.task.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_the_nearest_trace_has_its_objective_where_texts_are_shown_and_it_is_remembered(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.observe.status.KEPT_OBJECTIVES", 3)
    rows, scorer = LastRows(Settings(status_texts=allowed)), PartitionScorer(dimensions=8)

    def commit(number: int, direction: int) -> tuple[str | None, str | None]:
        """Return the nearest trace and its objective, as they are shown."""
        record = make_record(trace_bytes(f"kp:trace:{number}", objective=f"objective {number}"), number)
        scored = scorer.score(parse_trace(record.value or b""), np.eye(8)[direction], T0 + number)
        rows.committed(Decision(record, scored, scored_record(record, scored, None)))
        newest = rows.traces()[0]
        return newest["nearest"], newest["nearest_objective"]

    assert commit(0, 0) == (None, None)
    assert commit(1, 0) == ("kp:trace:0", "objective 0" if allowed else None)
    for number in (2, 3, 4):
        commit(number, number)
    nearest, forgotten = commit(5, 0)
    assert nearest in ("kp:trace:0", "kp:trace:1")
    assert forgotten is None
    assert commit(6, 4) == ("kp:trace:4", "objective 4" if allowed else None)


async def test_the_last_records_are_kept_and_no_more() -> None:
    desk = Desk(status_texts=True)
    await desk.commit(*[trace_bytes(f"kp:trace:{i}") for i in range(KEPT_TRACES + 20)])
    await desk.commit(*[b"no trace"] * (KEPT_DEAD_LETTERS + 20))
    shown = desk.json()
    assert [row["id"] for row in shown["traces"]] == [f"kp:trace:{i}" for i in range(KEPT_TRACES + 19, 19, -1)]
    assert [row["offset"] for row in shown["dead_letters"]] == list(range(109, 109 - KEPT_DEAD_LETTERS, -1))


async def test_a_hostile_trace_neither_stops_the_lane_nor_grows_the_page() -> None:
    desk = Desk(status_texts=True)
    twice = trace_bytes().replace(b'"task":', b'"task": 5, "task":', 1)  # the last one counts
    huge = (
        trace_bytes()
        .replace(b'"task_domain":', b'"n": 1e400, "task_domain":')
        .replace(b'"objective":', b'"n": 1e400, "objective":')
    )
    await desk.commit(
        huge, twice, trace_bytes("kp:trace:" + "\u202e<img src=x onerror=alert(1)>" * 10_000), b"\xff" * 5000
    )
    assert not desk.failures
    assert desk.json()["traces"][1]["objective"] == "Explain"
    assert desk.json()["traces"][0]["id"].startswith("kp:trace:\\u202e<img src=x")
    assert len(desk.status.pages()["/status.json"]({})[0]) < 10_000


# -- the numbers


async def test_verdicts_and_scores_are_those_of_the_metrics() -> None:
    desk = Desk(threshold=0.8, profiles=json.loads('{"code": {"threshold": 0.9}}'))
    await desk.commit(*[trace_bytes(f"kp:trace:{i}") for i in range(3)], b"", trace_bytes(steps=NEVER_ACCEPTED))
    shown = desk.json()
    count = desk.metrics.registry.get_sample_value
    accepted = count("kp_traces_total", {"decision": "accepted", "profile": "finance"})
    assert shown["verdicts"] == {
        "accepted": accepted, "rejected": 4 - (accepted or 0), "dead_letter": 1, "reasons": {"empty_value": 1},
    }  # fmt: skip
    assert sum(shown["scores"]["counts"]) == count("kp_score_count") == 4
    assert shown["scores"]["counts"][1] == 1  # the single thought: 0.1
    assert (shown["scores"]["threshold"], shown["scores"]["thresholds"]) == (0.8, {"code": 0.9})


async def test_percentiles_are_of_the_last_minutes() -> None:
    desk = Desk()
    now = 10_000.0
    assert desk.json()["evaluation"]["p50"] is None
    for _ in range(1000):
        desk.metrics.evaluation.observe(2.0)
        desk.metrics.over_budget.inc()
    desk.status.tick(now)
    before = desk.json()["evaluation"]
    assert (before["count"], before["over_budget"]) == (1000, 1000)
    assert 1000 < before["p50"] < 2500
    for second in range(1, WINDOW_SECONDS + 1):
        desk.metrics.evaluation.observe(0.03)
        desk.status.tick(now + second)
    after = desk.json()["evaluation"]
    assert (after["count"], after["over_budget"], after["over_seconds"]) == (WINDOW_SECONDS, 0, WINDOW_SECONDS)
    assert 25 < after["p50"] < after["p95"] < after["p99"] <= 50
    assert after["budget"] == 100


async def test_the_rate_is_that_of_the_last_seconds() -> None:
    desk = Desk()
    desk.status._moments.clear()
    for second in range(200):
        desk.metrics.consumed.inc(7 if second < 195 else 27)
        desk.status.tick(second)
    rate = desk.json()["rate"]
    assert rate["now"] == 17.0
    assert (len(rate["chart"]), rate["chart"][0], rate["chart"][-1]) == (120, 7.0, 27.0)


async def test_partitions_come_and_go_with_their_gauges() -> None:
    desk = Desk()
    assert desk.json()["partitions"] == []
    for partition in ("10", "9"):
        desk.metrics.lag.labels(partition).set(5)
        desk.metrics.cache_entries.labels(partition).set(3)
    assert desk.json()["partitions"] == [{"partition": p, "lag": 5, "cache": 3} for p in (9, 10)]
    desk.metrics.forget_partition(9)
    assert [row["partition"] for row in desk.json()["partitions"]] == [10]


# -- the page and its headers


def test_the_page_is_well_formed_and_complete_in_itself() -> None:
    """Read as XML, which is strict: no code and no style but in their own elements, and nothing from elsewhere."""
    markup = re.sub(r"(?s)(<(script|style)>).*?(?=</\2>)", r"\1", HTML)
    markup = re.sub(r"<((?:meta|link)\b[^>]*)>", r"<\1/>", re.sub(r" hidden(?=[ >])", ' hidden=""', markup))
    elements = list(ElementTree.fromstring(markup[markup.index("<html") :]).iter())
    attributes = [attribute for element in elements for attribute in element.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name == "style"]
    links = [value for name, value in attributes if name in ("src", "href")]
    assert not [link for link in links if not link.startswith(("data:", "#"))], "external"
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))
    named = re.findall(r'\b(?:at|text|rows)\("([\w-]+)"', HTML)
    assert len(named) > 20
    named += [link[1:] for link in links if link.startswith("#")]
    named += [word for name, value in attributes if name == "aria-labelledby" for word in value.split()]
    assert set(named) <= set(ids)
    assert {"main", "h1", "h2", "table", "button"} <= {element.tag for element in elements}
    assert 'lang="en"' in HTML
    assert "prefers-reduced-motion" in HTML


def test_a_narrow_page_folds_after_as_many_rows_as_its_button_says() -> None:
    [few] = re.findall(r"const FEW = \{(.*?)\}", HTML)
    limits = {name: int(count) for name, count in re.findall(r'"([\w-]+)": (\d+)', few)}
    folded = re.findall(r"#([\w-]+)\.few > [\w.]+:nth-child\(n \+ (\d+)", HTML)
    assert limits == {name: int(first) - 1 for name, first in folded} == {"trace-rows": 10, "dead-rows": 5}


def test_the_script_makes_no_html_and_no_code_out_of_data() -> None:
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc", HTML)
    assert not re.findall(r"setTimeout\(['\"`]|createContextualFragment|javascript:", HTML)


async def test_the_policy_lets_run_what_the_page_holds_and_nothing_else() -> None:
    body, headers = Status(Settings(), Metrics(CollectorRegistry()), lambda: None).pages()["/"]({})
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    for element in ("script", "style"):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"


# -- a real worker


def test_a_warning_is_in_the_data_and_has_its_place_on_the_page() -> None:
    status = Status(Settings(), Metrics(CollectorRegistry()), lambda: None, "the slow runtime")
    assert status.snapshot()["warning"] == "the slow runtime"
    html = status.pages()["/"]({})[0].decode()
    assert 'id="warning"' in html
    assert 'text("warning", status.warning' in html


@pytest.mark.parametrize(
    ("accepted", "rejected", "warns"), [(0, 99, False), (0, 100, True), (1, 150, True), (2, 98, False)]
)
def test_a_threshold_that_accepts_almost_nothing_is_told(accepted: int, rejected: int, warns: bool) -> None:
    metrics = Metrics(CollectorRegistry())
    for decision, count in (("accepted", accepted), ("rejected", rejected)):
        metrics.traces.labels(decision, "default").inc(count)
    warning = Status(Settings(), metrics, lambda: None).snapshot()["warning"]
    assert (warning is not None) == warns
    if warning is not None:
        shown = f"{accepted or 'none'} of {accepted + rejected} traces is accepted at the threshold 0.75: "
        assert warning == f"{shown}kp-worker report --from-kafka shows what others would accept"


def test_the_command_that_the_page_prints_finds_the_records_wherever_it_is_entered() -> None:
    assert explain_command(config.load()) == "kp-worker explain"
    settings = config.load(bootstrap_servers="demo:9", group_id="a b", changelog_topic="cache")
    words = shlex.split(explain_command(settings))
    assert words == ["kp-worker", "explain", "-b", "demo:9", "-g", "a b", "--set", "changelog_topic=cache"]
    with explain.make_context("explain", [*words[2:], "kp:trace:1"]):
        assert load_settings().settings == settings
