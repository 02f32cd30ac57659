"""Dead letters back to the source topic, each exactly once, whatever kills the command in between."""

import json
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, admin, consume_all, create_topics, produce, wait_until
from tests.support.stage import Desk, Workers, header
from worker.commands.redrive.steps import parse_offsets
from worker.core.dead_letters import dead_letter, fit_dead_letter, last_resort, readdressed
from worker.core.records import OutputRecord, SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.lab.broker.embedded_kafka import EmbeddedKafka

BAD = b"not a trace"
ANOTHER = b"another" * 1000
"""A value that is not on the source topic."""
BROKEN = InvalidTrace(Reason.NOT_JSON, "", "bad")
STEPS = ("started", "before_begin", "after_begin", "mid_sends", "committing", "after_commit")


def numbers(desk: Desk) -> list[int]:
    """The numbers of the letters that are on the source topic, in their order."""
    return sorted(int(header(record, "n")) for record in desk.read())


def test_a_letter_goes_back_as_it_was(desk: Desk) -> None:
    """A key that the letter was given does not."""
    keyless = readdressed(dead_letter(SourceRecord(desk.name, 1, 7, T0, None, BAD, [("n", b"7")]), BROKEN))
    produce(desk.bootstrap, desk.topics["dead-letter"], [(keyless.key, keyless.value, keyless.headers, 1, T0)])
    places = desk.letters([(Reason.NOT_JSON, BAD), (Reason.EMPTY_VALUE, b""), (Reason.NOT_UTF8, b"\xff\xfe")])
    done = desk.run("redrive", "--execute")
    assert done.returncode == 0, done.stderr
    assert "4 dead letters redriven" in done.stdout
    *records, last = sorted(desk.read(), key=lambda record: int(header(record, "n")))
    for number, (record, value, place) in enumerate(zip(records, (BAD, b"", b"\xff\xfe"), places, strict=True)):
        assert (record.key, record.value) == (b"key-%d" % number, value)
        assert (record.partition, record.timestamp) == (number % 2, T0 + 1000 * number)
        dead = "/".join(map(str, (desk.topics["dead-letter"], *place)))
        assert record.headers == (
            ("n", b"%d" % number),
            ("traceparent", b"00-%032x-%016x-01" % (number + 1, number + 1)),
            ("kp-redriven-from", dead.encode()),
            ("kp-redrive-count", b"1"),
        )
    assert (last.key, last.value, last.timestamp) == (None, BAD, T0)


def test_killed_again_and_again_it_sends_each_letter_exactly_once(desk: Desk, seed: int) -> None:
    rng = random.Random(seed)
    desk.letters([(Reason.NOT_JSON if n % 3 else Reason.NOT_UTF8, BAD) for n in range(60)])
    kills = 0
    for _ in range(6):
        step = rng.choice(STEPS)
        count = 1 if step == "started" else rng.randint(1, 3)
        reason = rng.choice([(), ("--reason", "not_json"), ("--reason", "not_utf8")])
        plan = f"{step}:{count}:kill"
        done = desk.run("redrive", "--execute", *reason, module="tests.support.crash_redrive", TEST_CRASH_AT=plan)
        print(plan, reason, done.returncode)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        kills += done.returncode == -signal.SIGKILL
        assert max(Counter(numbers(desk)).values(), default=1) == 1
    assert kills
    assert desk.run("redrive", "--execute").returncode == 0
    assert numbers(desk) == list(range(60))
    again = desk.run("redrive", "--execute")
    assert "0 dead letters redriven" in again.stdout
    assert numbers(desk) == list(range(60))


def test_a_second_run_takes_over_from_a_frozen_one(desk: Desk) -> None:
    desk.letters([(Reason.NOT_JSON, BAD) for _ in range(20)])
    plan = desk.env | {"TEST_CRASH_AT": "after_begin:2:freeze"}
    with WorkerProcess(plan, ["redrive", "--execute"], module="tests.support.crash_redrive") as frozen:
        frozen.wait_log("TEST crash")
        assert desk.run("redrive", "--execute").returncode == 0
        frozen.cont()
        assert frozen.wait() == 1
        assert "another redrive of group" in frozen.log()
    assert numbers(desk) == list(range(20))


def test_two_at_once_send_each_letter_exactly_once(desk: Desk, workers: Workers) -> None:
    desk.letters([(Reason.NOT_JSON, BAD) for _ in range(60)])
    for run in [workers(desk.env, ("redrive", "--execute")) for _ in range(2)]:
        assert run.wait() == 0 or (run.returncode == 1 and "another redrive of group" in run.log()), run.log()
        assert "Traceback" not in run.log(), run.log()
    assert desk.run("redrive", "--execute").returncode == 0
    assert numbers(desk) == list(range(60))


def test_filters_choose(desk: Desk, tmp_path: Path) -> None:
    desk.letters([([Reason.NOT_UTF8, Reason.NOT_JSON, Reason.TOO_DEEP][n % 3], BAD) for n in range(12)])
    cases: dict[str, set[int]] = {
        "--reason not_utf8": {0, 3, 6, 9},
        "--reason not_utf8 --reason too_deep": {0, 2, 3, 5, 6, 8, 9, 11},
        "--since 2026-04-14T08:00:05Z": {5, 6, 7, 8, 9, 10, 11},
        "--since 2026-04-14T08:00:05 --until 2026-04-14T09:00:08+01:00": {5, 6, 7},
        "--partition 1": {1, 3, 5, 7, 9, 11},
        "--partition 1 --offset 2:4": {5, 7},
        "--partition 0 --offset 4: --reason too_deep": {8},
    }
    for number, (options, expected) in enumerate(cases.items()):
        target = tmp_path / str(number)
        assert desk.run("redrive", "--execute", "--to-file", str(target), *options.split()).returncode == 0
        assert {json.loads(line)["source"]["offset"] for line in target.read_bytes().splitlines()} == expected, options
    assert desk.run("redrive", "--execute", "--reason", "not_utf8", "--partition", "1").returncode == 0
    assert numbers(desk) == [3, 9]
    assert desk.run("redrive", "--execute").returncode == 0  # also what lies before those
    assert numbers(desk) == list(range(12))


def test_without_execute_nothing_happens(desk: Desk, tmp_path: Path) -> None:
    desk.letters([(Reason.NOT_JSON, BAD)] * 3 + [(Reason.TOO_DEEP, BAD)])
    shown = desk.run("redrive")
    assert shown.returncode == 0
    assert re.search(r"not_json +3 +- +- +3", shown.stdout)
    assert "broken for a test: too_deep" in shown.stdout
    assert "Dry run: nothing was redriven. --execute sends 4" in shown.stdout
    assert desk.run("redrive", "--to-file", str(tmp_path / "out")).returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert desk.read() == []
    assert f"{desk.name}-redriven" not in admin(desk.bootstrap, lambda client: client.list_topics())


def test_letters_of_one_source_record_count_once_and_foreign_records_are_left_out(desk: Desk) -> None:
    desk.letters([(Reason.NOT_JSON, BAD)])
    desk.letters([(Reason.NOT_JSON, BAD)])  # as after a crash at least once, or of a second group
    other = dead_letter(SourceRecord("other", 0, 0, T0, None, BAD), BROKEN)
    produce(desk.bootstrap, desk.topics["dead-letter"], [(None, other.value, other.headers), (b"k", b"v")])
    for options in ([], ["--execute"]):
        done = desk.run("redrive", *options)
        assert "skipped 2 records: not a dead letter, or of a topic that these settings do not name" in done.stdout
        assert re.search(r"letters repeated already done refused", done.stdout)
        assert re.search(r"not_json +2 +1 +- +- +1\n", done.stdout)
        assert "1 repeated: another dead letter is of the same source record" in done.stdout
    assert "1 dead letter redriven" in done.stdout
    assert numbers(desk) == [0]
    again = desk.run("redrive")
    assert re.search(r"letters already done refused to do", again.stdout)
    assert re.search(r"not_json +2 +2 +- +-\n", again.stdout)
    assert "repeated" not in again.stdout


def test_the_worker_scores_a_mended_limit_and_the_loop_stops(desk: Desk, workers: Workers) -> None:
    good = trace_bytes()
    produce(desk.bootstrap, desk.name, [(b"k", good, [("traceparent", b"00-1")], 0, T0), (b"b", BAD, [], 1, T0)])

    def letters(count: int) -> None:
        assert wait_until(lambda: len(desk.read("dead-letter")) >= count)

    strict = workers({**desk.env, "KP_MAX_STEPS": "2"}).wait_ready()
    letters(2)
    strict.finish()
    workers(desk.env).wait_ready()
    for round_ in (1, 2):
        done = desk.run("redrive", "--execute", "--max-redrives", "2")
        assert done.returncode == 0, done.stderr
        letters(2 + round_)  # only the hopeless one comes back
    (scored,) = desk.read("accepted") + desk.read("rejected")
    assert (scored.key, header(scored, "traceparent"), header(scored, "kp-redrive-count")) == (b"k", "00-1", "1")
    assert header(desk.read("dead-letter")[-1], "kp-redrive-count") == "2"
    stopped = desk.run("redrive", "--execute", "--max-redrives", "2")
    assert stopped.returncode == 1
    assert "was redriven 2 times and failed each time" in stopped.stderr
    assert len(desk.read()) == 5


def test_a_letter_that_was_cut_is_taken_whole_from_the_source_topic_or_refused(desk: Desk) -> None:
    sources: list[tuple[bytes, bytes, list[tuple[str, bytes]]]] = [
        (b"k", b"value", [("h", b"x" * 5000), ("n", b"0")]),
        (b"k" * 5000, b"value", [("n", b"1")]),
        (b"k" * 5000, b"v" * 5000, [("h", b"x" * 5000), ("n", b"2")]),
        (b"k", b"v" * 5000, [("n", b"3")]),
    ]
    places = produce(desk.bootstrap, desk.name, [(key, value, headers, 1, T0) for key, value, headers in sources])
    for (partition, offset), (key, value, headers) in zip(places, sources, strict=True):
        for where, other in ((offset, value), (offset, ANOTHER), (offset + 7, value)):  # 7: behind the end
            source = SourceRecord(desk.name, partition, where, T0, key, other, headers)
            letter = dead_letter(source, BROKEN)
            fitted = fit_dead_letter(letter, 3000)
            assert (fitted.key != key) or (fitted.value != other) or len(fitted.headers) < len(letter.headers)
            if other == ANOTHER:
                fitted = OutputRecord(letter.kind, None, other, last_resort(letter, 3000, None).headers, T0)
            rows = [(fitted.key, fitted.value, fitted.headers, int((where, other) == (offset, value)), T0)]
            produce(desk.bootstrap, desk.topics["dead-letter"], rows)
    refused = desk.run("redrive", "--execute", "--partition", "0")
    assert refused.returncode == 1
    assert refused.stderr.count("is no longer there") == 5
    assert "3 more like these" in refused.stderr
    done = desk.run("redrive", "--execute", "--partition", "1")
    assert done.returncode == 0, done.stderr
    again = desk.read()[4:]
    assert [(record.key, record.value) for record in again] == [(key, value) for key, value, _ in sources]
    assert [list(record.headers)[:-2] for record in again] == [headers for *_, headers in sources]


def test_a_letter_that_stands_for_more_or_less_than_a_record_is_refused_with_words(desk: Desk) -> None:
    desk.letters([(Reason.BATCH_TOO_LARGE, b""), (Reason.UNREADABLE, b""), (Reason.BAD_HEADER, BAD)])
    done = desk.run("redrive", "--execute")
    assert done.returncode == 1
    assert "raise the worker's KP_MAX_BATCH_BYTES and score them again" in done.stderr
    assert "no client can read them there" in done.stderr
    assert numbers(desk) == [2]


def test_letters_whose_time_the_source_topic_refuses_do_not_stop_the_others(desk: Desk) -> None:
    create_topics(desk.bootstrap, {f"{desk.name}.young": (2, {"message.timestamp.before.max.ms": "3600000"})})
    desk.env["KP_SOURCE_TOPIC"] = desk.name = f"{desk.name}.young"
    desk.letters([(Reason.NOT_JSON, BAD)] * 3)
    now = int(time.time() * 1000)
    fresh = dead_letter(SourceRecord(desk.name, 0, 9, now, b"k", BAD, [("n", b"9")]), BROKEN)
    produce(desk.bootstrap, desk.topics["dead-letter"], [(fresh.key, fresh.value, fresh.headers, 0, now)])
    done = desk.run("redrive", "--execute")
    assert done.returncode == 1
    assert done.stderr.count(f"topic {desk.name} refuses it: INVALID_TIMESTAMP") == 3
    assert "1 dead letter redriven" in done.stdout
    assert numbers(desk) == [9]


def test_what_the_source_topic_refuses_does_not_stop_the_others_and_what_it_may_delete_is_told(desk: Desk) -> None:
    create_topics(
        desk.bootstrap, {f"{desk.name}.small": (2, {"max.message.bytes": "1000", "retention.ms": "864000000"})}
    )
    desk.env["KP_SOURCE_TOPIC"] = desk.name = f"{desk.name}.small"
    desk.letters([(Reason.NOT_JSON, BAD), (Reason.NOT_JSON, b"x" * 900), (Reason.NOT_JSON, BAD)])
    done = desk.run("redrive", "--execute")
    assert done.returncode == 1
    assert "exceeds the limit of topic" in done.stderr
    assert "2 dead letters redriven" in done.stdout
    assert f"2 of them are older than topic {desk.name} keeps records (10.0 days)" in done.stdout


def test_to_a_file(desk: Desk, tmp_path: Path) -> None:
    desk.letters([(Reason.NOT_JSON, BAD), (Reason.NOT_UTF8, b"\xff\xfe"), (Reason.TOO_DEEP, b"[[]]")])
    target = tmp_path / "letters.jsonl"
    done = desk.run("redrive", "--to-file", str(target), "--execute")
    assert done.returncode == 0, done.stderr
    lines = sorted(map(json.loads, target.read_text("utf-8").splitlines()), key=lambda line: line["source"]["offset"])
    assert [line["reason"] for line in lines] == ["not_json", "not_utf8", "too_deep"]
    assert lines[0]["value"] == "not a trace"
    assert lines[1]["value_base64"] == "//4="
    assert lines[2]["source"] == {"topic": desk.name, "partition": 0, "offset": 2, "timestamp_ms": T0 + 2000}
    assert lines[2]["key"] == "key-2"
    assert [name for name, _ in lines[2]["headers"]] == ["n", "traceparent"]
    before = target.read_bytes()
    again = desk.run("redrive", "--to-file", str(target), "--execute")
    assert again.returncode == 1
    assert "exists" in again.stderr
    assert target.read_bytes() == before
    assert desk.read() == []
    assert desk.run("redrive", "--execute", "--reason", "not_json").returncode == 0
    rest = tmp_path / "rest.jsonl"
    assert desk.run("redrive", "--to-file", str(rest), "--execute").returncode == 0
    assert {json.loads(line)["reason"] for line in rest.read_bytes().splitlines()} == {"not_utf8", "too_deep"}
    piped = desk.run("redrive", "--to-file", "-", "--execute")
    assert piped.returncode == 0, piped.stderr
    assert {json.loads(line)["reason"] for line in piped.stdout.splitlines()} == {"not_utf8", "too_deep"}
    assert "2 dead letters written to standard output" in piped.stderr
    shown = desk.run("redrive", "--to-file", "-")
    assert shown.stdout == ""
    assert "--execute writes 2 to standard output" in shown.stderr
    device = desk.run("redrive", "--to-file", "/dev/full", "--execute")
    assert (device.returncode, "/dev/full is not a file; name a new one" in device.stderr) == (1, True)


def test_records_with_spans_go_back_to_their_topics(desk: Desk) -> None:
    spans = [f"{desk.name}.spans-{number}" for number in range(2)]
    create_topics(desk.bootstrap, {name: (3, {"retention.ms": "-1"}) for name in spans})
    gone = f"{desk.name}.gone"
    of = {name: SourceRecord(name, 2, 5, T0, b"k", name.encode(), [("n", b"1")]) for name in (desk.name, *spans, gone)}
    rows, closed = [], [(Reason.LATE_SPAN, spans[0]), (Reason.ASSEMBLY_FAILED, spans[0])]
    for reason, name in [(Reason.NOT_JSON, desk.name), *((Reason.NOT_OTLP, name) for name in (*spans, gone)), *closed]:
        letter = dead_letter(of[name], InvalidTrace(reason, "", "broken for a test"))
        rows.append((letter.key, letter.value, letter.headers, 0, T0))
    produce(desk.bootstrap, desk.topics["dead-letter"], rows)
    names = {"KP_SPANS_TOPIC": ",".join([*spans, gone])}
    done = desk.run("redrive", "--execute", **names)
    assert done.returncode == 1
    assert f"belongs on topic {gone}, which does not exist" in done.stderr
    assert "skipped 2 dead letters with spans of closed runs" in done.stdout
    assert f"3 dead letters redriven to topics {desk.name}, {', '.join(spans)}\n" in done.stdout
    for name in spans:
        (record,) = consume_all(desk.bootstrap, name)
        assert (record.partition, record.key, record.value, record.timestamp) == (2, b"k", name.encode(), T0)
    assert len(desk.read()) == 1
    assert "0 dead letters redriven" in desk.run("redrive", "--execute", **names).stdout


def test_refused_traces_go_to_the_accepted_topic_and_a_conflict_is_told(desk: Desk) -> None:
    accepted = desk.topics["accepted"]
    create_topics(desk.bootstrap, {f"{accepted}.refused": (1, {"retention.ms": "-1"})})
    source = SourceRecord(accepted, 1, 3, T0, b"k", trace_bytes(), [])
    letter = dead_letter(source, InvalidTrace(Reason.TOO_LARGE, "", "another unit has its id"))
    headers = [(name, b"conflict" if name == "kp-error-reason" else value) for name, value in letter.headers]
    produce(desk.bootstrap, f"{accepted}.refused", [(letter.key, letter.value, headers, 0, T0)])
    for options, said in ((), "--execute sends 1"), (("--execute",), "1 dead letter redriven"):
        done = desk.run("redrive", "--refused", *options)
        assert done.returncode == 0, done.stderr
        assert f"{said} to topic {accepted}\n" in done.stdout
        assert "conflict: the registry has other units with the ids of these traces" in done.stdout
    assert [record.value for record in desk.read("accepted")] == [trace_bytes()]


def test_a_topic_of_marks_that_forgets_or_is_missing_is_refused(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka, KP_CREATE_TOPICS="false")
    desk.letters([(Reason.NOT_JSON, BAD)])
    missing = desk.run("redrive", "--execute")
    assert missing.returncode == 2
    assert f"{desk.name}-redriven is missing" in missing.stderr
    create_topics(desk.bootstrap, {f"{desk.name}-redriven": 1})
    forgets = desk.run("redrive", "--execute")
    assert forgets.returncode == 2
    assert "set cleanup.policy=compact" in forgets.stderr
    assert desk.read() == []


def test_wrong_options_are_named(desk: Desk) -> None:
    for options, text in {
        "--reason nonsense": "is not one of empty_value",
        "--offset 1:2": "--offset needs --partition",
        "--offset 2:1 --partition 0": "is empty",
        "--partition 7": "has no partition 7",
        "--since noon": "is not a time",
        "--to-source --to-file x": "cannot be used together",
    }.items():
        done = desk.run("redrive", *options.split())
        assert done.returncode == 2, options
        assert text in done.stderr


def test_offsets() -> None:
    assert [parse_offsets(text) for text in ("3", "3:", ":4", "3:4")] == [(3, 4), (3, None), (0, 4), (3, 4)]
    for wrong in ("", ":", "a", "1:2:3", "4:4", "-1"):
        with pytest.raises(ValueError, match=r"offset|is empty"):
            parse_offsets(wrong)
