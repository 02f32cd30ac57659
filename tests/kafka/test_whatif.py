"""`kp-worker whatif` and the doctor's look at domains, on topics that hold scored traces."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.commands import Desk, Diagnosis
from tests.support.kafka_fixtures import produce
from tests.support.whatif import scored
from worker.lab.broker.embedded_kafka import EmbeddedKafka

DOMAINS = ["finance", "Finance", "legal", "customer-service"]


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """Twenty scored traces on the two topics, a second apart, and one record that nobody scored."""
    desk = Desk(kafka)
    sources = [trace_bytes(f"kp:trace:{n}", domain=DOMAINS[n % 4], confidence=n / 20) for n in range(20)]
    for number, (verdict, document) in enumerate(scored(sources)):
        kind = "accepted" if verdict.accepted else "rejected"
        produce(desk.bootstrap, desk.topics[kind], [(None, document, [], number % 2, T0 + 1000 * number)])
    produce(desk.bootstrap, desk.topics["rejected"], [(None, b"{", [], 0, T0)])
    return desk


def test_it_reads_the_topics(desk: Desk) -> None:
    result = desk.run("whatif", "--from-kafka", "--set", "threshold=0.4", "--set", "profiles.legal.threshold=1")
    assert result.returncode == 0, result.stderr
    assert f"{desk.name}.rejected/0 offset " in result.stderr
    found = json.loads(result.stdout)
    assert found["total"]["traces"] == 20
    by_name = {row["domain"]: row for row in found["domains"]}
    assert by_name["legal"]["after"]["profile"] == "legal"
    assert by_name["legal"]["after"]["accepted"] == 0 == by_name["legal"]["to_accepted"]
    assert by_name["finance"]["to_accepted"] > 0
    last = json.loads(desk.run("whatif", "--from-kafka", "--last", "6").stdout)
    assert last["total"]["traces"] == 6
    since = json.loads(desk.run("whatif", "--from-kafka", "--since", "2026-04-14T08:00:15Z").stdout)
    assert since["total"]["traces"] == 5


def test_thresholds_for_a_share_of_the_topics(desk: Desk) -> None:
    """Stream-time order, over partitions and topics, says which of two traces with one label is the repeat."""
    arguments = ["whatif", "--from-kafka", "--share", "40%", "--label", "outcome.result_summary"]
    result = desk.run(*arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {row["domain"]: row["labels"] for row in found["domains"]} == {
        domain: {"firsts": 1, "repeats": 4} for domain in DOMAINS
    }
    assert all(row["proposed"]["accepted"] == row["wanted"] == 2 for row in found["domains"])
    least = tomllib.loads(found["config"])["profiles"]
    assert {name: profile["threshold"] for name, profile in least.items()} == {
        row["domain"]: row["proposed"]["threshold"] for row in found["domains"]
    }
    shown = desk.run(*arguments, "--text").stdout
    assert "20 traces of" in shown
    assert "Finance has no profile; did you mean finance?" in shown


def test_without_a_broker_it_is_exit_code_2(desk: Desk) -> None:
    result = desk.run("whatif", "--from-kafka", "-b", "127.0.0.1:1")
    assert result.returncode == 2
    assert "127.0.0.1:1" in result.stderr


def test_the_doctor_names_near_misses(desk: Desk) -> None:
    found = Diagnosis({**desk.env, "KP_PROFILES": '{"legl": {"threshold": 0.9}}'}).of("domains")
    assert [level for level, _ in found] == ["warn"] * 4 + ["ok"]
    told = "\n".join(message for _, message in found)
    assert (
        "the domain Finance (5 of the last 20 scored traces) takes the profile default; did you mean finance?" in told
    )
    assert (
        "the domain customer-service (5 of the last 20 scored traces) takes the profile default; did you mean" in told
    )
    assert "the domain legal (5 of the last 20 scored traces) takes the profile default; did you mean legl?" in told
    assert "takes the profile legl of the settings; did you mean legal?" in told
    assert found[-1][1].startswith("4 in the last 20 scored traces; without a profile of their own: ")
    assert Diagnosis(desk.env).of("domains")[-1][1].endswith("customer-service (5), legal (5)")


def test_the_doctor_without_scored_traces(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    assert Diagnosis(desk.env).of("domains") == [("ok", "no trace is scored yet")]
    missing = {**desk.env, "KP_ACCEPTED_TOPIC": f"{desk.name}.none", "KP_PROFILES": '{"finanse": {}}'}
    [near, looked] = Diagnosis(missing).of("domains")
    assert near[0] == "warn"
    assert "did you mean finance?" in near[1]
    assert looked[0] == "ok"
    assert "no scored traces were looked at" in looked[1]
