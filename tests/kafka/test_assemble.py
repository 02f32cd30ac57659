"""`kp-worker assemble` as a process on real Kafka: from spans to traces, each once, and what it says when it cannot."""

import json
import random
import re
import time

from aiokafka.admin import NewPartitions

from tests.support import spans
from tests.support.assemble import Workshop, expected_documents, made_records
from tests.support.kafka_fixtures import admin, committed, create_topics, produce
from tests.support.stage import Workers, header
from worker.core.trace import Limits
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_runs_become_traces_once_and_what_comes_later_is_told(
    kafka: EmbeddedKafka, workers: Workers, seed: int
) -> None:
    rng = random.Random(seed)
    workshop = Workshop(kafka.bootstrap_servers)
    values = [value for run in made_records(rng, 20) for value in run]
    never_ended = spans.run_spans(100)[:-1]
    rng.shuffle(values)
    workshop.put([*values, *values[:5], b"{", b"", spans.as_json(never_ended)])
    process = workers(workshop.env, ("assemble",)).wait_ready()
    expected = expected_documents([*values, spans.as_json(never_ended)])
    assert sorted(workshop.wait(len(expected))) == sorted(expected)
    process.wait_metric("kp_assemble_traces_total", 21)
    process.wait_metric("kp_assemble_open_runs", 0)
    assert process.metric("kp_assemble_closed_runs_total", cause="root_ended") == 20
    assert process.metric("kp_assemble_closed_runs_total", cause="gap") == 1
    assert process.metric("kp_assemble_repeated_parts_total") == 5
    assert process.metric("kp_assemble_dead_letters_total", reason="not_json") == 1
    assert process.metric("kp_assemble_conventions_total", convention="gen_ai") == 21
    process.finish()
    # after a restart the closed runs are remembered
    workshop.put(values[:3])
    again = workers(workshop.env, ("assemble",)).wait_ready()
    again.wait_metric("kp_assemble_late_parts_total", 3)
    assert len(workshop.documents()) == len(expected)
    letters = workshop.letters()
    assert sorted(header(each, "kp-error-reason") for each in letters) == ["late_span"] * 3 + ["not_json"]
    assert {header(each, "kp-source-topic") for each in letters} == {workshop.spans}
    state = sum(committed(workshop.bootstrap, f"{workshop.name}-assemble", workshop.spans).values())
    assert state >= len(values) + 8


def test_two_topics_are_assembled_together_and_a_keyed_one_without_one_between(
    kafka: EmbeddedKafka, workers: Workers, seed: int
) -> None:
    keyed = Workshop(kafka.bootstrap_servers, partitions=1, KP_SPANS_KEYED="true", KP_ASSEMBLE_KEY="trace")
    values = [value for run in made_records(random.Random(seed), 5) for value in run]
    keyed.put(values)
    of_keyed = workers(keyed.env, ("assemble",))
    workshop = Workshop(kafka.bootstrap_servers, grace=3)
    other = f"{workshop.name}.more"
    create_topics(kafka.bootstrap_servers, {other: 2})
    workshop.env["KP_SPANS_TOPIC"] += f",{other}"
    run = spans.run_spans(1, 3)
    workers(workshop.env, ("assemble",)).wait_ready()
    workshop.put([spans.as_json(run[:2])])
    workshop.put([spans.as_protobuf(run[2:])], topic=other)
    assert workshop.wait(1) == spans.documents(run)
    assert sorted(keyed.wait(5)) == sorted(expected_documents(values))
    of_keyed.finish()


def test_partitions_that_are_added_while_runs_are_open_cut_no_run(
    kafka: EmbeddedKafka, workers: Workers, seed: int
) -> None:
    """Producers use new partitions long before clients look for them (METADATA_MS): no run may close meanwhile."""
    rng = random.Random(seed)
    workshop = Workshop(kafka.bootstrap_servers, partitions=2, grace=3, gap=90)
    runs, open_run = made_records(rng, 24), spans.as_json(spans.run_spans(100)[:1])
    fleet = [workers(workshop.env, ("assemble",)).wait_ready() for _ in range(2)]
    admin(kafka.bootstrap_servers, lambda it: it.create_partitions({workshop.spans: NewPartitions(5)}))
    rest = [(None, value, (), rng.randrange(2, 5)) for run in runs for value in run[:-1]]
    workshop.put([run[-1] for run in runs])  # with the root, on the old partitions
    produce(kafka.bootstrap_servers, workshop.spans, rest)
    for _ in range(8):  # the time of the old partitions goes on
        time.sleep(1)
        workshop.put([open_run] * 2)
    expected = expected_documents(value for run in runs for value in run)
    assert sorted(workshop.wait(len(expected))) == sorted(expected)
    assert workshop.letters() == []
    for each in fleet:
        each.terminate()
    assert [each.wait() for each in fleet] == [0, 0]


def test_it_says_what_it_lacks_and_ends(kafka: EmbeddedKafka, workers: Workers) -> None:
    lacking, changed = Workshop(kafka.bootstrap_servers, KP_CREATE_TOPICS="false"), Workshop(kafka.bootstrap_servers)
    state = f"{changed.name}-assemble-state"
    create_topics(kafka.bootstrap_servers, {state: (2, {"cleanup.policy": "compact"})})
    ends = {
        "assemble needs KP_ASSEMBLE_DOMAIN": lacking.env | {"KP_ASSEMBLE_DOMAIN": ""},
        "confidence: '2' is not a number from 0 to 1": lacking.env | {"KP_ASSEMBLE_CONFIDENCE": "2"},
        f"{lacking.name}-assemble-state": lacking.env,
        f"topic {state} has 2 partitions": changed.env,
    }
    started = [(words, workers(env, ("assemble",))) for words, env in ends.items()]
    for words, process in started:
        assert process.wait() == 2, process.log()
        assert words in process.log()


def test_a_long_run_passes_the_topic_that_it_creates_and_is_shortened(kafka: EmbeddedKafka, workers: Workers) -> None:
    """Its last span has 1.2 MB, more than a broker's default for a topic."""
    workshop = Workshop(kafka.bootstrap_servers, partitions=2, create=False)
    process = workers(workshop.env, ("assemble",)).wait_ready()
    run = spans.run_spans(1, size=1_200_000)
    workshop.put([spans.as_protobuf([each]) for each in run])
    (value,) = workshop.wait(1)
    process.wait_metric("kp_assemble_shortened_traces_total", 1)
    trace, whole = json.loads(value), json.loads(spans.documents(run, Limits(max_bytes=1 << 24))[0])
    kept, cut = re.fullmatch(r"(.*) \[(\d+) characters cut\]", trace["steps"][2].pop("content")).groups()  # type: ignore[union-attr]
    before = whole["steps"][2].pop("content")
    assert (before[: len(kept)], len(before) - len(kept)) == (kept, int(cut))
    assert trace == whole
    assert 1_040_000 < len(value) < 1_048_576
    assert f"the first: {trace['id']}, by {cut} characters" in process.log()
    # what cannot be shortened is a dead letter, with a line in the log
    steps = spans.run_spans(2, 9, start_ns=spans.START_NS)
    process.finish()
    strict = workers({**workshop.env, "KP_MAX_STEPS": "5"}, ("assemble",)).wait_ready()
    workshop.put([spans.as_protobuf(steps)])
    strict.wait_metric("kp_assemble_dead_letters_total", 1, reason="too_large")
    assert f"run {spans.trace_id(2)} exceeds KP_MAX_MESSAGE_BYTES" in strict.log()
    assert [header(each, "kp-error-reason") for each in workshop.letters()] == ["too_large"]


def test_logs_that_waited_on_a_topic_that_is_added_later_are_no_dead_letters(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    workshop = Workshop(kafka.bootstrap_servers)
    logs = f"{workshop.name}.logs"
    create_topics(kafka.bootstrap_servers, {logs: 2})
    old, new = spans.run_spans(1), spans.run_spans(2)
    process = workers(workshop.env, ("assemble",)).wait_ready()
    workshop.put([spans.as_protobuf(old)])
    workshop.put([spans.as_logs(old)], topic=logs)
    assert workshop.wait(1) == spans.documents(old)
    process.finish()
    both = workers({**workshop.env, "KP_SPANS_TOPIC": f"{workshop.spans},{logs}"}, ("assemble",)).wait_ready()
    workshop.put([spans.as_logs(new)], topic=logs)
    workshop.put([spans.as_protobuf(new)])
    assert workshop.wait(2)[1:] == spans.documents(new)
    assert f"{logs}: log events of runs that are already closed" in both.log()
    # what is late by its own time still is a dead letter
    workshop.put([spans.as_logs(new)], topic=logs)
    both.wait_metric("kp_assemble_late_parts_total", 1)
    (letter,) = workshop.letters()
    assert (header(letter, "kp-error-reason"), header(letter, "kp-source-topic")) == ("late_span", logs)


def test_no_trace_closes_while_a_partition_of_spans_is_read_by_nobody(kafka: EmbeddedKafka, workers: Workers) -> None:
    """A frozen process holds the time back: what it has not read yet must not come late."""
    workshop = Workshop(kafka.bootstrap_servers, partitions=2, grace=2, KP_SESSION_TIMEOUT_SECONDS="20")
    fleet = [workers(workshop.env, ("assemble",)).wait_ready() for _ in range(2)]
    while any(each.metric("kp_assemble_lag") or not each.metric("kp_assemble_ready") for each in fleet):
        time.sleep(0.1)
    run = spans.run_spans(1)
    fleet[1].stop()
    workshop.put([spans.as_protobuf(run[:1]), spans.as_protobuf(run[1:])])  # each process has a partition
    time.sleep(6)
    assert workshop.documents() == []
    fleet[1].cont()
    assert workshop.wait(1) == spans.documents(run)


def test_content_where_nothing_reads_it_is_told_once_and_shown(kafka: EmbeddedKafka, workers: Workers) -> None:
    workshop = Workshop(kafka.bootstrap_servers, grace=1, KP_STATUS_PAGE="true", KP_EMBEDDER="none")
    for number in (1, 2):
        strange = spans.run_spans(number)
        for each in strange:
            each["attributes"] = {"gen_ai.request.model": "m", "desk.prompt": "Do it."}
        workshop.put([spans.as_json(strange)])
    process = workers(workshop.env, ("assemble",)).wait_ready()
    doctor = workers(workshop.env, ("doctor",))
    process.wait_metric("kp_assemble_unread_runs_total", 2)
    _, page = process.get("/")
    assert "desk.prompt (2 runs)" in page
    assert "no trace for 2 runs: no_content" in page
    doctor.wait()
    assert "desk.prompt (2 runs)" in doctor.log()
    process.finish()
    assert process.log().count("attributes that nothing reads: desk.prompt;") == 1


def test_topics_doctor_and_a_look_know_what_it_needs(kafka: EmbeddedKafka, workers: Workers) -> None:
    workshop = Workshop(kafka.bootstrap_servers, KP_CREATE_TOPICS="false", KP_EMBEDDER="none")
    none = workers(workshop.env, ("assemble", "--try", f"{workshop.name}.none"))
    assert none.wait() == 2, none.log()
    assert f"has no topic {workshop.name}.none yet, and there is no file {workshop.name}.none" in none.log()
    workshop.put([spans.as_json(spans.run_spans(1))])
    doctor = workers(workshop.env, ("doctor",))
    created = workers(workshop.env, ("topics", "--create"))
    assert doctor.wait() == 1
    assert created.wait() == 0, created.log()
    assert f"{workshop.name}-assemble-state" in created.log()
    assert f"{workshop.name}-assemble-spans" in created.log()
    doctor, look = workers(workshop.env, ("doctor",)), workers(workshop.env, ("assemble", "--try", workshop.spans))
    assert look.wait() == 0, look.log()
    assert "1 reasoning trace would come out" in look.log()
    doctor.wait()
    assert f'"check":"assemble","message":"reads {workshop.spans}, writes {workshop.traces}"' in doctor.log()
    small = f"topic {workshop.spans} has max.message.bytes=1048588: the Collector drops a larger record"
    assert small in doctor.log()
    assert f"set max.message.bytes=10485760 on {workshop.spans}" in doctor.log()
    assert f"--alter --topic {workshop.spans} --add-config max.message.bytes=10485760" in created.log()
