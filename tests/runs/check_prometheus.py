"""Every query of the rules and the dashboard on a real Prometheus that scrapes worker, contribute and assemble at work.

Not part of `make test`, which needs nothing but Python: `make deploy-check` runs it. Needs the programs prometheus and
promtool, and fails where they are missing.

An alert's expression finds nothing on a healthy worker, and a misspelt one finds nothing either. So each comparison is
turned into its 0/1 form (`>` becomes `> bool`), which keeps whatever its operands find: an empty result then means
that an operand is empty. Looks into the past (`offset`) are taken out, because there is none yet, and so is what a
query asks of the job's name: here it is right.
"""

import contextlib
import itertools
import json
import math
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import spans
from tests.support.builders import NEVER_ACCEPTED, WELL_ROUNDED, trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, create_topics, produce, topic_id, unique, wait_until
from tests.support.monitoring import GRAFANA, RULES, Query, alerts, dashboard, dashboard_queries, rule_queries
from tests.support.registry import RegistryThread
from tests.support.surroundings import topic_settings
from worker import make_verdict, sign_verdict
from worker.core.verdicts import SignedVerdict
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports

JUDGE_KEY = b"c" * 32


class Prometheus:
    """A Prometheus that scrapes ports, by job, twice a second, with the product's rules; alerts fire after 1 s."""

    processes: Mapping[str, WorkerProcess]
    """What it scrapes, by command."""

    def __init__(self, directory: Path, targets: Mapping[str, int]) -> None:
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        (directory / "rules.yaml").write_text(re.sub(r"\bfor: \w+", "for: 1s", RULES.read_text("utf-8")))
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for job, port in targets.items()
            ],
        }
        (directory / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        self.log = directory / "prometheus.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data",
                 f"--web.listen-address={self.url.removeprefix('http://')}"],
                cwd=directory, stdout=output, stderr=output,
            )  # fmt: skip

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an API answer. Raises AssertionError with Prometheus's words for a refused query."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
            return True
        return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def load(bootstrap: str, topic: str, stop: threading.Event) -> None:
    """Send some 30 records a second: traces of both decisions, long texts, and a tenth that cannot be read.

    Beside them a verdict on one accepted and on one rejected trace; half of either succeeded. And the spans of a run.
    """
    identity = topic_id(bootstrap, topic)
    for number in itertools.count():
        if stop.is_set():
            return
        records: list[Sequence[Any]] = []
        for i in range(10):
            name = f"{number}-{i}"
            steps = WELL_ROUNDED if i % 2 else NEVER_ACCEPTED
            objective = f"task {name} " + "word " * (400 if i == 7 else 5)
            value = b"no trace" if i == 3 else trace_bytes(f"kp:trace:{name}", steps=steps, objective=objective)
            records.append((name.encode(), value, (), i % 2))
            if i < 2:
                made = verdict(topic, identity, name, i % 2, success=number % 2 == 0)
                records.append((made.key, made.value, made.headers, made.partition))
        produce(bootstrap, topic, records)
        begin = time.time_ns() - (number + 10) * 1_000_000_000  # run_spans adds a second a number
        run = spans.as_json(spans.run_spans(number, start_ns=begin))
        produce(bootstrap, f"{topic}.spans", [(None, run, (), 0)])
        stop.wait(0.3)


def verdict(topic: str, identity: str, name: str, partition: int, *, success: bool) -> SignedVerdict:
    scoring = {
        "score": 0.5, "decision": "accepted" if partition else "rejected", "confidence": {"used": 0.5},
        "source": {"topic": topic, "partition": partition, "offset": 0},
    }  # fmt: skip
    metadata = {"agent_id": "ada", "task_domain": "finance"}
    judged = {
        "id": f"kp:trace:{name}", "metadata": metadata, "scoring": scoring, "success": success, "judge": "ci",
    }  # fmt: skip
    return sign_verdict(make_verdict(judged, topic=topic, topic_id=identity, issued_at=datetime.now(UTC)), JUDGE_KEY)


@pytest.fixture(scope="module")
def prometheus(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    topic, ports = unique("traces"), free_ports(3)
    create_topics(kafka.bootstrap_servers, {topic: 2, f"{topic}.spans": 1})
    (directory / "judges.key").write_bytes(b"ci " + JUDGE_KEY)
    env = topic_settings(kafka.bootstrap_servers, topic) | {
        "KP_VERDICT_KEY_FILE": str(directory / "judges.key"),
        "KP_CACHE_MAX_ELEMENTS": "50",  # full at once, so that its reach is there to be asked for
        "KP_THRESHOLD": "0.6",  # whatever the novelty of these texts, half of them are accepted
    }
    prometheus = Prometheus(directory, dict(zip(("kp-worker", "kp-contribute", "kp-assemble"), ports, strict=True)))
    stop = threading.Event()
    sender = threading.Thread(target=load, args=(kafka.bootstrap_servers, topic, stop))
    with ExitStack() as stack:
        stack.callback(prometheus.close)
        # Before the worker, so that it sees the counters' first steps.
        assert wait_until(prometheus.ready, 30), prometheus.log.read_text()
        registry = stack.enter_context(RegistryThread())
        posting = {
            "KP_REGISTRY_URL": registry.url,
            "KP_REGISTRY_KEY": registry.key,
            "KP_CONTRIBUTE_VISIBILITY": "network,org,private",
            "KP_CONTRIBUTE_PRIVACY": "aggregated,federated,private",
        }
        commands: dict[str, dict[str, str]] = {
            "run": {},
            "contribute": posting,
            "assemble": {"KP_SPANS_TOPIC": f"{topic}.spans", **spans.SETTINGS},
        }
        prometheus.processes = {
            name: stack.enter_context(
                WorkerProcess({**env, **own, "KP_HTTP_PORT": str(port)}, (name,), log_path=directory / f"{name}.log")
            ).wait_ready(120)
            for (name, own), port in zip(commands.items(), ports, strict=True)
        }
        sender.start()
        stack.callback(sender.join)
        stack.callback(stop.set)
        time.sleep(20)  # scrapes for every rate; the first seconds belong to the start of the worker
        yield prometheus


def without_filters(expr: str) -> str:
    """Return the query with its comparisons in their 0/1 form, and without the past and the job's name."""
    expr = re.sub(r'\bjob(!~|=~)"[^"]*"', 'job!=""', expr)
    parts = re.split(r'(\{[^}]*\}|"[^"]*")', expr)
    parts[::2] = [re.sub(r"(==|!=|<=|>=|<|>)(?!\s*bool)", r"\1 bool", part) for part in parts[::2]]
    return re.sub(r"\boffset \w+", "", "".join(parts))


def test_filters_are_taken_out_of_queries() -> None:
    expr = 'x{a!="b>c"} > 0 and (y == y offset 10m) unless z{le="0.1"} or i{job!~"(k|w).*"}'
    assert without_filters(expr) == 'x{a!="b>c"} > bool 0 and (y == bool y ) unless z{le="0.1"} or i{job!=""}'


@pytest.mark.parametrize("query", rule_queries() + dashboard_queries(), ids=lambda query: query.where)
def test_the_query_finds_data(prometheus: Prometheus, query: Query) -> None:
    expr = without_filters(query.expr)
    for variable, value in GRAFANA.items():
        expr = expr.replace(variable, value)
    series = prometheus.get("query", query=expr)["result"]
    values = [float(it["value"][1]) for it in series]
    assert any(not math.isnan(value) for value in values), f"{expr}\nfound {series}"


def test_the_dashboard_s_variables_find_the_group_and_its_worker(prometheus: Prometheus) -> None:
    queries = [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    assert queries == [
        "label_values(kp_build_info, group)",
        'label_values(kp_build_info{group=~"$group"}, instance)',
        'label_values(kp_contribute_build_info{group=~"($group)-contribute"}, instance)',
        'label_values(kp_assemble_build_info{group=~"($group)-assemble"}, instance)',
    ]
    for service in ("contribute", "assemble"):
        (built,) = prometheus.get("query", query=f"kp_{service}_build_info")["result"]
        assert built["metric"]["group"].endswith(f"-{service}")
    built = prometheus.get("query", query="kp_build_info")["result"]
    assert [(s["metric"]["group"].startswith("traces-"), s["metric"]["instance"]) for s in built] == [
        (True, f"127.0.0.1:{prometheus.processes['run'].http_port}")
    ]


def test_prometheus_evaluates_every_rule_without_an_error(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    health = {rule["name"]: (rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]}
    assert alerts().keys() <= health.keys()
    assert set(health.values()) == {("ok", None)}


def test_dead_letters_fire_their_alert_and_a_healthy_worker_no_other(prometheus: Prometheus) -> None:
    fired = {a["labels"]["alertname"]: a for a in prometheus.get("alerts")["alerts"] if a["state"] == "firing"}
    slow_machine = {"KpLatencyBudgetBurnFast", "KpLatencyBudgetBurnSlow"}  # it shares its cores with Kafka
    assert fired.keys() - slow_machine == {"KpDeadLetters"}
    texts = fired["KpDeadLetters"]["annotations"]
    assert re.fullmatch(r"kp-worker: [5-9](\.\d+)?% of the records are dead letters", texts["summary"])


def test_promtool_finds_nothing_to_say_about_the_metrics(prometheus: Prometheus) -> None:
    for process in prometheus.processes.values():
        status, body = process.get("/metrics")
        assert status == 200
        result = subprocess.run(
            ["promtool", "check", "metrics"], input=body, capture_output=True, text=True, timeout=30, check=False
        )
        assert (result.returncode, result.stdout + result.stderr) == (0, "")
