"""`kp-worker whatif` and the doctor's look at domains, on topics that hold scored traces."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.commands import Desk, Diagnosis
from tests.support.kafka_fixtures import produce
from tests.support.whatif import scored
from worker.lab.broker.embedded_kafka import EmbeddedKafka

DOMAINS = ["finance", "Finance", "legal", "customer-service"]


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """120 scored traces on the two topics, a second apart, and one record that nobody scored."""
    desk = Desk(kafka)
    sources = [trace_bytes(f"kp:trace:{n}", domain=DOMAINS[n % 4], confidence=n / 120) for n in range(120)]
    records: dict[str, list[Any]] = {"accepted": [], "rejected": []}
    for number, (verdict, document) in enumerate(scored(sources)):
        kind = "accepted" if verdict.accepted else "rejected"
        records[kind].append((None, document, [], number % 2, T0 + 1000 * number))
    records["rejected"].append((None, b"{", [], 0, T0))
    for kind, those in records.items():
        produce(desk.bootstrap, desk.topics[kind], those)
    return desk


def test_it_reads_the_topics(desk: Desk) -> None:
    result = desk.run("whatif", "--from-kafka", "--set", "threshold=0.4", "--set", "profiles.legal.threshold=1")
    assert result.returncode == 0, result.stderr
    assert f"{desk.name}.rejected/0 offset " in result.stderr
    found = json.loads(result.stdout)
    assert found["total"]["traces"] == 120
    by_name = {row["domain"]: row for row in found["domains"]}
    assert by_name["legal"]["after"]["profile"] == "legal"
    assert by_name["legal"]["after"]["accepted"] == 0 == by_name["legal"]["to_accepted"]
    assert by_name["finance"]["to_accepted"] > 0
    last = json.loads(desk.run("whatif", "--from-kafka", "--last", "6").stdout)
    assert last["total"]["traces"] == 6
    since = json.loads(desk.run("whatif", "--from-kafka", "--since", "2026-04-14T08:01:55Z").stdout)
    assert since["total"]["traces"] == 5


def test_thresholds_for_a_share_of_the_topics(desk: Desk) -> None:
    """Stream-time order, over partitions and topics, says which of two traces with one label is the repeat."""
    arguments = ["whatif", "--from-kafka", "--share", "40%", "--label", "outcome.result_summary"]
    result = desk.run(*arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {row["domain"]: row["labels"] for row in found["domains"]} == {
        domain: {"firsts": 1, "repeats": 29} for domain in DOMAINS
    }
    assert all(row["proposed"]["accepted"] == row["wanted"] == 12 for row in found["domains"])
    least = tomllib.loads(found["config"])["profiles"]
    assert {name: profile["threshold"] for name, profile in least.items()} == {
        row["domain"]: row["proposed"]["threshold"] for row in found["domains"]
    }
    shown = desk.run(*arguments, "--text").stdout
    assert "120 traces of" in shown
    assert "Finance has no profile; did you mean finance?" in shown


def test_without_a_broker_it_is_exit_code_2(desk: Desk) -> None:
    result = desk.run("whatif", "--from-kafka", "-b", "127.0.0.1:1")
    assert result.returncode == 2
    assert "127.0.0.1:1" in result.stderr


def test_the_doctor_names_near_misses(desk: Desk) -> None:
    found = Diagnosis({**desk.env, "KP_PROFILES": '{"legl": {"threshold": 0.9}}'}).of("domains")
    assert [level for level, _ in found] == ["warn"] * 4
    told = "\n".join(message for _, message in found)
    assert (
        "the domain Finance (30 of the last 120 scored traces) takes the profile default; did you mean finance?" in told
    )
    assert (
        "the domain customer-service (30 of the last 120 scored traces) takes the profile default; did you mean" in told
    )
    assert "the domain legal (30 of the last 120 scored traces) takes the profile default; did you mean legl?" in told
    assert "takes the profile legl of the settings; did you mean legal?" in told
    named = {**desk.env, "KP_PROFILES": '{"Finance": {}, "customer-service": {}}'}
    summary = "4 in the last 120 scored traces; without their own profile: legal (30)"
    assert Diagnosis(named).of("domains") == [("ok", summary)]


def test_the_doctor_without_scored_traces(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    assert Diagnosis(desk.env).of("domains") == [("ok", "no trace is scored yet")]
    missing = {**desk.env, "KP_ACCEPTED_TOPIC": f"{desk.name}.none", "KP_PROFILES": '{"finanse": {}}'}
    [(level, told)] = Diagnosis(missing).of("domains")
    assert level == "warn"
    assert "takes the profile finanse of the settings; did you mean finance?" in told
