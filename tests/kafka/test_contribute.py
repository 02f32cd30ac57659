"""`kp-worker contribute` as a process, on real Kafka and with the registry's stand-in."""

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.contribute import Booth, accepted_document
from tests.support.figures import peak_memory_mib
from tests.support.kafka_fixtures import WorkerProcess, create_topics, wait_until
from tests.support.registry import AGENT, RegistryOptions, RegistryThread
from tests.support.servers import Asked, GatewayThread, Reply
from tests.support.snippets import shell
from tests.support.stage import Diagnosis, Workers, header
from tests.support.surroundings import DOCS
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@pytest.fixture
def registry() -> Iterator[RegistryThread]:
    with RegistryThread() as running:
        yield running


def start(workers: Workers, booth: Booth, **env: str) -> WorkerProcess:
    return workers(booth.env | env, ("contribute",)).wait_ready()


def test_each_record_is_posted_skipped_or_refused_and_a_stop_is_clean(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread
) -> None:
    booth = Booth(kafka.bootstrap_servers, registry)
    contributor = start(workers, booth)
    conflicting = accepted_document("kp:trace:0") | {"outcome": {"result_summary": "other", "confidence": 0}}
    documents = [
        *[accepted_document(f"kp:trace:{number}") for number in range(6)],
        accepted_document("kp:trace:org", visibility="org"),
        accepted_document("kp:trace:private", privacy_level="private"),
        accepted_document("kp:trace:1"),  # again, with the same content; 1 is on another partition than 8
        b"no JSON, password=hunter2",
        conflicting,
        None,
    ]
    booth.put(documents, headers=[("traceparent", b"00-1"), ("note", b"token=hunter2")])
    booth.wait_committed(len(documents))
    assert registry.store.state()["units"].keys() == {f"kp:trace:{number}" for number in range(6)}
    receipts = booth.receipts()
    assert receipts.keys() == {f"kp:trace:{number}" for number in range(6)}
    assert {receipt["status"] for receipt in receipts.values()} <= {200, 201}
    assert all(receipt["registry_time"] and len(receipt["sha256"]) == 64 for receipt in receipts.values())
    refusals = {header(each, "kp-error-reason"): each for each in booth.refusals()}
    assert refusals.keys() == {"conflict", "invalid_trace"}
    assert header(refusals["conflict"], "kp-error-status") == "200"
    assert header(refusals["conflict"], "kp-source-topic") == booth.accepted
    assert "hunter2" not in "".join(f"{each.value} {each.headers}" for each in booth.refusals())
    contributor.wait_metric("kp_contribute_lag", 0)
    contributor.wait_metric("kp_contribute_ready", 1)
    assert contributor.metric("kp_contribute_posted_total") == 6
    assert contributor.metric("kp_contribute_skipped_total", reason="visibility") == 1
    assert contributor.metric("kp_contribute_skipped_total", reason="privacy") == 1
    assert contributor.metric("kp_contribute_refused_total", reason="conflict") == 1
    assert contributor.metric("kp_contribute_refused_total", reason="invalid_trace") == 2
    assert contributor.metric("kp_contribute_rate_left") > 1000
    contributor.finish()
    assert registry.key not in contributor.log()


@pytest.mark.skipif(shutil.which("jq") is None, reason="the page's commands need jq")
def test_a_conflict_is_solved_by_the_commands_of_its_page(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread, tmp_path: Path
) -> None:
    booth = Booth(kafka.bootstrap_servers, registry)
    contributor = start(workers, booth)
    document = accepted_document("kp:trace:1", agent_id="kp:agent:surveyor")
    document["steps"][0]["content"] = "password=hunter2"
    booth.put([document | {"outcome": {"result_summary": "other", "confidence": 1}}, document])
    booth.wait_committed(2)
    assert len(booth.refusals()) == 1
    (posted,) = registry.store.units()
    conflict = f"{DOCS}/examples/conflict.sh"
    script = f"{conflict} && ! {conflict} 1 && {conflict} 1 replace"  # diff ends with 1 where two things differ
    done = shell(script, booth.env | {"AGENT_KEY": registry.store.register("kp:agent:surveyor")}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'^[<>] +"result_summary": "other"', done.stdout, re.MULTILINE), done.stdout + done.stderr
    before = ([], [posted["outcome"]])
    assert wait_until(lambda: [unit["outcome"] for unit in registry.store.units()] not in before), contributor.log()
    assert len(booth.refusals()) == 1
    assert b"hunter2" not in booth.refusals()[0].value


@pytest.mark.skipif(shutil.which("jq") is None, reason="the page's commands need jq")
def test_a_trial_as_on_the_page(kafka: EmbeddedKafka, registry: RegistryThread, tmp_path: Path) -> None:
    create_topics(kafka.bootstrap_servers, {"trial": 1})
    (tmp_path / "trial.jsonl").write_text(json.dumps(accepted_document("kp:trace:trial", agent_id="kp:agent:trial")))
    env = {"KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "KP_REGISTRY_URL": registry.url, "KP_HTTP_PORT": "0"}
    done = shell(f"{DOCS}/examples/try_registry.sh", env, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"agent_id": "kp:agent:trial"' in done.stdout
    assert '"deleted": true' in done.stdout
    assert registry.store.units() == []


def test_a_screened_trace_is_redriven_after_the_setting_is_changed(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread
) -> None:
    booth = Booth(kafka.bootstrap_servers, registry, partitions=1)
    contributor = start(workers, booth)
    documents = [accepted_document(f"kp:trace:{number}") for number in range(3)]
    documents[1]["steps"][0]["content"] = "pay \u202e001 password=hunter2"
    documents[2]["steps"][0]["content"] = "سلام می\u200cگویم 👩\u200d💻"
    booth.put(documents)
    booth.wait_committed(3)
    assert {each["id"] for each in registry.store.units()} == {"kp:trace:0", "kp:trace:2"}
    (refused,) = booth.refusals()
    assert (header(refused, "kp-error-reason"), header(refused, "kp-error-path")) == ("screened", "steps.0.content")
    assert "direction-override" in header(refused, "kp-error-message")
    contributor.wait_metric("kp_contribute_refused_total", 1, reason="screened")
    contributor.finish()
    assert "\u202e" not in contributor.log()
    start(workers, booth, KP_CONTRIBUTE_SCREEN="off")
    command = workers(booth.env, ("redrive", "--refused", "--reason", "screened", "--execute"))
    assert command.wait() == 0, command.log()
    booth.wait_committed(4)
    posted = {each["id"]: each["steps"][0].get("content") for each in registry.store.units()}
    assert posted["kp:trace:1"] == "pay \u202e001 password=[REDACTED:password]"


def test_wrong_settings_and_a_wrong_key_end_with_code_2(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread
) -> None:
    booth = Booth(kafka.bootstrap_servers, registry)
    wrong = {
        "no address": ({"KP_REGISTRY_URL": ""}, "KP_REGISTRY_URL"),
        "no key": ({"KP_REGISTRY_KEY": ""}, "KP_REGISTRY_KEY"),
        "not encrypted": ({"KP_REGISTRY_URL": "http://registry.example.org"}, "use https"),
        "no topics": ({"KP_CREATE_TOPICS": "false"}, booth.contributed),
    }
    started = {name: (workers(booth.env | env, ("contribute",)), words) for name, (env, words) in wrong.items()}
    for process, words in started.values():
        assert process.wait() == 2, process.log()
        assert words in process.log()
    booth.put([accepted_document("kp:trace:1")])
    unknown = workers(booth.env | {"KP_REGISTRY_KEY": "kp_" + "f" * 64}, ("contribute",))
    assert unknown.wait() == 2, unknown.log()
    assert "wrong or revoked" in unknown.log()
    assert "f" * 64 not in unknown.log()
    assert booth.committed() == 0  # nothing is lost
    doctor = Diagnosis(booth.env | {"KP_REGISTRY_KEY": "kp_" + "f" * 64})
    assert "does not know the key" in str(doctor.of("registry key"))
    doctor = Diagnosis(booth.env)
    assert [level for level, _ in doctor.of("registry")] == ["ok", "ok"]


JSON = {"Content-Type": "application/json"}


def test_what_stands_in_front_of_the_registry_stops_no_other_trace(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread
) -> None:
    """Ids and bodies beyond the bounds, a firewall, an answer of 57 MB, and one that grows in memory.

    Then the firewall's rule is mended.
    """
    large = Reply(200, b'{"data": [' + b'{"a": [1, {}]}, ' * 3_560_000 + b"1]}", JSON)
    assert len(large.body) > 56_900_000
    dense = Reply(200, b'{"data": {"id": "kp:trace:dense", "unit": {"steps": [' + b"[]," * 1_750_000 + b"[]]}}}", JSON)
    fallen = False

    def rule(asked: Asked) -> Reply | None:
        if fallen:
            return None
        if "dense" in asked.path:
            return dense
        if "large" in asked.path:
            return large
        return Reply(403, b'{"message": "Forbidden"}', JSON) if b"UNION SELECT" in asked.body else None

    documents = [accepted_document(f"kp:trace:{number}") for number in range(8)]
    documents[1]["id"] = "kp:trace:" + 9000 * "x"
    documents[2]["steps"][0]["content"] = "1 UNION SELECT password"
    documents[4]["id"] = "kp:trace:large"
    documents[6]["id"] = "kp:trace:dense"
    documents[5]["steps"][0]["content"] = 70_000 * "a@b.cc,"
    with GatewayThread(registry.url, rule) as gateway:
        booth = Booth(kafka.bootstrap_servers, registry, 1, gateway.url)
        booth.put(documents)
        contributor = workers(booth.env, ("contribute",), cold=True)
        booth.wait_committed(len(documents))
        assert [unit["id"] for unit in registry.store.units()] == [f"kp:trace:{number}" for number in (0, 3, 7)]
        assert set(registry.store.state()["units"].values()) == {1}
        reasons = [header(each, "kp-error-reason") for each in booth.refusals()]
        assert reasons == ["id_too_long", "unanswerable", "unanswerable", "too_large", "conflict"]
        print(f"peak {peak_memory_mib(contributor.pid):.0f} MiB")
        assert peak_memory_mib(contributor.pid) < 300
        assert contributor.metric("kp_contribute_refused_total", reason="unanswerable") == 2
        contributor.wait_metric("kp_contribute_held", 0)
        fallen = True
        command = workers(booth.env, ("redrive", "--refused", "--reason", "unanswerable", "--execute"))
        assert command.wait() == 0, command.log()
        booth.wait_committed(len(documents) + 2)
        assert {"kp:trace:2", "kp:trace:large"} <= registry.store.state()["units"].keys()
        contributor.finish()


def test_while_a_gateway_is_away_or_refuses_all_everything_waits_and_a_crash_changes_nothing(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread
) -> None:
    """It refuses the key, as a gateway with keys of its own does."""
    closed = True
    denied = Reply(401, b'{"error": "Invalid API key"}', JSON)
    with GatewayThread(registry.url, lambda asked: denied if closed and asked.method == "POST" else None) as gateway:
        booth = Booth(kafka.bootstrap_servers, registry, 1, gateway.url, KP_SESSION_TIMEOUT_SECONDS="2")
        booth.put([accepted_document("kp:trace:0"), accepted_document("kp:trace:1")])
        contributor = workers(booth.env, ("contribute",))
        contributor.wait_words("2 traces wait until the registry itself answers a POST")
        contributor.wait_metric("kp_contribute_held", 2)
        assert contributor.metric("kp_contribute_ready") == 0
        assert contributor.get("/healthz")[0] == 200
        assert booth.committed() == 0
        contributor.kill()
        gateway.stop()
        closed = False
        contributor = workers(booth.env, ("contribute",))
        contributor.wait_words("no answer")
        assert contributor.get("/healthz")[0] == 200
        gateway.start()
        booth.wait_committed(2)
        contributor.wait_ready()
        assert registry.store.state()["units"] == {"kp:trace:0": 1, "kp:trace:1": 1}
        assert booth.refusals() == []


def test_a_stop_does_not_wait_for_a_registry_that_does_not_answer(
    kafka: EmbeddedKafka, workers: Workers, registry: RegistryThread
) -> None:
    """A look-up is given up at once, a POST after KP_SHUTDOWN_TIMEOUT_SECONDS."""
    silent = Reply(200, b" ", seconds=60.0, times=10)
    for method, code in (("GET", 0), ("POST", 1)):

        def rule(asked: Asked, method: str = method) -> Reply | None:
            return silent if asked.method == method else None

        with GatewayThread(registry.url, rule) as gateway:
            booth = Booth(kafka.bootstrap_servers, registry, url=gateway.url, KP_SHUTDOWN_TIMEOUT_SECONDS="2")
            booth.put([accepted_document(f"kp:trace:{method}-{number}") for number in range(2)])
            contributor = workers(booth.env, ("contribute",))
            assert wait_until(lambda: gateway.gateway.refused[method]), contributor.log()  # noqa: B023
            stopped = time.monotonic()
            contributor.terminate()
            assert contributor.wait() == code, contributor.log()
            # The promise is 2 s more than the setting; the rest is for a machine with other tests. It once took 40 s.
            assert time.monotonic() - stopped < 2 + 2 + 6
            assert booth.committed() == 0


def test_what_is_in_flight_at_a_stop_is_finished(kafka: EmbeddedKafka, workers: Workers) -> None:
    with RegistryThread(RegistryOptions(latency_seconds=1.5)) as slow:
        booth = Booth(kafka.bootstrap_servers, slow)
        booth.put([accepted_document("kp:trace:1")])
        contributor = start(workers, booth)
        looked_up = "kp_contribute_request_duration_seconds_count"  # the POST follows
        assert wait_until(lambda: contributor.metric(looked_up), pause=0.05), contributor.log()
        time.sleep(0.3)
        contributor.finish()
        assert booth.committed() == 1
        assert booth.receipts()["kp:trace:1"]["status"] == 201


def test_a_429_is_remembered_over_a_crash(kafka: EmbeddedKafka, workers: Workers) -> None:
    with RegistryThread(limit=2) as tight:
        booth = Booth(kafka.bootstrap_servers, tight, partitions=1, KP_SESSION_TIMEOUT_SECONDS="2")
        for number in range(2):  # another program of the same agent
            request = urllib.request.Request(
                f"{tight.url}/v1/knowledge",
                json.dumps(accepted_document(f"kp:trace:other-{number}")).encode(),
                {"Authorization": f"Bearer {tight.key}"},
            )
            urllib.request.urlopen(request, timeout=10).close()
        booth.put([accepted_document("kp:trace:1")])
        for _ in range(3):
            contributor = workers(booth.env, ("contribute",))
            contributor.wait_log("answered 429")
            contributor.wait_log("nothing is sent")
            time.sleep(0.5)  # the offset's metadata is committed
            assert contributor.get("/readyz")[0] == 503
            contributor.kill()
        state = tight.store.state()
        assert (state["429s"], state["revoked"]) == ({AGENT: 1}, [])
