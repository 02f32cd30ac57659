"""The five topics on real Kafka: `kp-worker topics`, and workers that prepare them at the same time."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from aiokafka.admin import NewPartitions
from aiokafka.errors import InvalidTimestampError
from click.testing import CliRunner, Result

from tests.support.kafka_fixtures import create_topics, create_topics_async, produce
from tests.support.kafka_versions import since
from tests.support.proxy import Cut, Proxy
from tests.support.stage import Stage, Workers, untouched
from worker import make_verdict
from worker.cli import cli
from worker.config import ConfigError, load
from worker.core.records import BATCH_OVERHEAD, encoded_size
from worker.core.track_record import TrackRecord, encode_row
from worker.kafka import connections
from worker.kafka.connections import client_arguments, connected_admin
from worker.kafka.describe import TopicDescription
from worker.kafka.topics import (
    AFTER,
    BEFORE,
    CHANGELOG_CONFIG,
    CODECS,
    LARGEST_RECORD_BYTES,
    NO_LIMIT,
    Layout,
    Observed,
    codec_problems,
    create_missing,
    observe,
    plan,
    prepare_topics,
    problems,
)
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def topics(stage: Stage, *options: str) -> Result:
    return CliRunner().invoke(cli, ["topics", *options], env=stage.env, catch_exceptions=False)


def lines(stage: Stage, *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in topics(stage, "--json", *options).output.splitlines()]


def observed(topic: str, config: dict[str, str]) -> Observed:
    return Observed({topic: TopicDescription(topic, None, 1, 1, 0, None)}, [], {topic: config}, {})


def test_the_plan_changes_nothing_and_create_makes_it_true(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="3")
    for _ in range(2):
        assert topics(stage).exit_code == 1
        assert [row.get("state") for row in lines(stage)] == ["missing"] * 6 + [None]
    rows = lines(stage, "--create")
    assert topics(stage).exit_code == 0
    assert [(row["state"], row["partitions"], row["commands"]) for row in rows[:5]] == [("exists", 3, [])] * 5
    assert all(config["ok"] for row in rows for config in row["configs"])
    assert {config["name"] for config in rows[4]["configs"]} == set(CHANGELOG_CONFIG)
    assert (rows[5]["topic"], rows[5]["partitions"], rows[5]["commands"]) == (f"{stage.name}-redriven", 1, [])


@pytest.mark.parametrize("embedder", ["auto", "none"])
def test_the_topic_of_verdicts_is_listed_and_created_beside_the_changelog(kafka: EmbeddedKafka, embedder: str) -> None:
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="3", KP_VERDICT_KEY_FILE="judges.key", KP_EMBEDDER=embedder)
    names = f"{stage.name}.judged", f"{stage.name}-novelty-changelog"
    for options, state, partitions in ((), "missing", None), (("--create",), "exists", 3):
        rows = {row.get("topic"): row for row in lines(stage, *options)}
        assert [(rows[name]["state"], rows[name]["partitions"]) for name in names] == [(state, partitions)] * 2
    assert f"{stage.name}.judged" not in topics(untouched(kafka, KP_EMBEDDER=embedder), "--json").output


def test_the_topic_of_redrive_is_listed_and_a_worker_starts_without_it(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="1")
    wanted = plan(stage.settings(), Observed({}, [], {}, {}))
    create_topics(kafka.bootstrap_servers, {each.name: (1, each.configs) for each in wanted})
    shown = topics(stage, "--text")
    assert shown.exit_code == 0
    head = f"{stage.name}-redriven missing, needs 1 partition (for kp-worker redrive)"
    assert head in " ".join(shown.output.split())
    assert f"--create --topic {stage.name}-redriven --partitions 1 --config cleanup.policy=compact" in shown.output
    create_topics(kafka.bootstrap_servers, {f"{stage.name}-redriven": 1})  # cleanup.policy=delete: marks would go
    assert (
        f"--alter --topic {stage.name}-redriven --add-config cleanup.policy=compact" in topics(stage, "--text").output
    )


def test_the_commands_to_run_by_hand_say_what_the_worker_would_create(kafka: EmbeddedKafka) -> None:
    """Reads the commands as kafka-topics.sh does, creates by them, and finds nothing left to do."""
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="2")
    commands = [command for row in lines(stage)[:6] for command in row["commands"]]
    wanted = {}
    for command in commands:
        found = re.search(r"--create --topic (\S+) --partitions (\d+)", command)
        assert found
        wanted[found[1]] = int(found[2]), dict(pair.split("=") for pair in re.findall(r"--config (\S+)", command))
    create_topics(kafka.bootstrap_servers, wanted)
    rows = lines(stage)
    assert [row["commands"] for row in rows[:6]] == [[]] * 6
    assert rows[6:] == []
    assert topics(stage).exit_code == 0


def test_what_is_wrong_is_told_with_its_remedy_and_fails(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    names = list(stage.settings().topics.values())
    create_topics(kafka.bootstrap_servers, {names[0]: 3, names[1]: 1, names[2]: 1, names[3]: 1, names[4]: 2})
    result = topics(stage, "--text")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert f"{names[4]} exists, 2 partitions (should be 3)" in text
    assert f"--alter --topic {names[4]} --partitions 3" in text
    assert "set cleanup.policy=compact" in text
    assert "--add-config cleanup.policy=compact," in text
    assert "has max.message.bytes=1048588: a scored trace that had more than " in text


def test_workers_that_create_topics_or_see_new_partitions_at_once_all_go_on(kafka: EmbeddedKafka) -> None:
    settings = untouched(kafka, KP_TOPIC_PARTITIONS="1", KP_CREATE_TOPICS="true").settings()
    client = client_arguments(settings)

    async def scenario() -> list[int]:
        layouts = await asyncio.gather(*(prepare_topics(settings, client) for _ in range(4)))
        assert [layout.source_partitions for layout in layouts] == [1] * 4
        async with asyncio.timeout(60):
            async with connected_admin(settings, client) as admin:
                await admin.create_partitions({settings.source_topic: NewPartitions(4)})
                for _ in range(200):
                    if (await observe(admin, settings.topics.values())).topics[settings.source_topic].partitions == 4:
                        break
                    await asyncio.sleep(0.05)
            layouts = await asyncio.gather(*(prepare_topics(settings, client) for _ in range(6)))
            return [layout.source_partitions for layout in layouts]

    assert asyncio.run(scenario()) == [4] * 6


def test_a_dead_letter_topic_is_planned_for_the_largest_record_of_the_source(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    settings = stage.settings()
    create_topics(kafka.bootstrap_servers, {stage.name: (1, {"max.message.bytes": "5000000"})})

    async def scenario() -> tuple[str, int]:
        async with connected_admin(settings, client_arguments(settings)) as admin:
            found = await observe(admin, settings.topics.values())
            wanted = {topic.name: topic for topic in plan(settings, found)}[settings.dead_letter_topic]
            await create_missing(admin, settings)
            after = await observe(admin, settings.topics.values())
            return wanted.configs["max.message.bytes"], after.max_bytes(settings.dead_letter_topic)

    assert asyncio.run(scenario()) == ("5065536", 5065536)


def problems_of(stage: Stage) -> dict[str, list[str]]:
    """Return the problems by level, each as one text."""
    return {
        level: [f"{row['message']}; {row['remedy']}" for row in lines(stage)[6:] if row["level"] == level]
        for level in ("fail", "warn")
    }


def test_what_the_outputs_will_refuse_is_told_beforehand(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    source, accepted, rejected, letters, changelog = stage.settings().topics.values()
    hour, week = 3_600_000, 7 * 24 * 3_600_000
    configs = {
        source: {AFTER: str(hour), "retention.ms": str(week), BEFORE: str(hour), "max.message.bytes": "2000000"},
        accepted: {AFTER: "1000", "cleanup.policy": "compact,delete"}, rejected: {BEFORE: str(week)},
        letters: {AFTER: "0", "message.timestamp.type": "LogAppendTime"},
        changelog: {"cleanup.policy": "compact", "max.message.bytes": "1700"},
    }  # fmt: skip
    create_topics(kafka.bootstrap_servers, {name: (1, config) for name, config in configs.items()})
    found = problems_of(stage)
    (failed,) = found["fail"]
    assert failed.startswith(f"topic {changelog} has max.message.bytes=1700, too small for a cache entry; set")
    text = "\n".join(found["warn"])
    for words in (
        f"topic {accepted} has cleanup.policy=compact,delete: records without a key are refused",
        f"topic {accepted} has {AFTER}=1000, less than the source {source} (3600000)",
        f"topic {rejected} has {BEFORE}={week}, and records of the source {source} may be older",
        f"set {BEFORE}={week + hour} on {rejected}",
        f"topic {letters} has max.message.bytes=1048588, the source {source} 2000000: dead letters of the",
        f"accepts records dated 3600 s ahead ({AFTER}), KP_CACHE_TTL_SECONDS is 3600: one such record empties",
        f"topic {accepted} has cleanup.policy=compact,delete: Kafka deletes all but the newest record of each",
    ):
        assert words in text
    assert f"topic {letters} has message.timestamp" not in text, "the broker stamps them"
    warned = text.splitlines()
    assert len(warned) == len(set(warned)) == 7, "the seventh: large outputs do not fit"

    stage.env |= {"KP_EMBEDDER": "none"}
    found = problems_of(stage)
    assert not found["fail"], "nothing is written to the changelog"
    assert "KP_CACHE_TTL_SECONDS" not in "\n".join(found["warn"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cleanup.policy": "compact"}, "cleanup.policy=compact: Kafka deletes all but the newest record of each key,"),
        ({"cleanup.policy": "delete,compact"}, "cleanup.policy=delete,compact: Kafka deletes all but the newest"),
        ({"retention.ms": "60000"}, "retention.ms=60000: Kafka deletes records that are not {} within 1 min; set"),
        ({"retention.ms": "43200000"}, "retention.ms=43200000: Kafka deletes records that are not {} within 720 min"),
        ({"retention.bytes": "1000000"}, "retention.bytes=1000000: Kafka deletes the oldest records of a larger"),
        ({"retention.ms": "86400000", "retention.bytes": "100000000"}, None),
        ({"cleanup.policy": "compact", "retention.ms": "60000"}, "cleanup.policy=compact: Kafka deletes all but"),
        ({"retention.ms": "-1"}, None),
    ],
)
def test_what_kafka_deletes_before_it_is_read(kafka: EmbeddedKafka, config: dict[str, str], said: str | None) -> None:
    stage = untouched(kafka)
    source, accepted, *_ = stage.settings().topics.values()
    create_topics(kafka.bootstrap_servers, {source: (1, config), accepted: (1, config)})
    for name, done in ((source, "scored"), (accepted, "read")):
        found = [words for words in problems_of(stage)["warn"] if words.startswith(f"topic {name} has ")]
        deleted = [words for words in found if "Kafka deletes" in words]
        assert len(deleted) == (said is not None)
        assert not deleted or deleted[0].startswith(f"topic {name} has {(said or '').format(done)}")


def test_an_entry_with_a_long_id_needs_a_little_more(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    *_, changelog = stage.settings().topics.values()
    create_topics(kafka.bootstrap_servers, {changelog: (1, {"cleanup.policy": "compact", "max.message.bytes": "3000"})})
    assert topics(stage, "--create").exit_code == 0
    (warned,) = [words for words in problems_of(stage)["warn"] if words.startswith(f"topic {changelog} ")]
    assert "too small for a cache entry with a long trace id" in warned


@pytest.mark.parametrize("place", range(5))
def test_a_compression_that_cannot_be_read_is_a_failure(
    kafka: EmbeddedKafka, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = untouched(kafka)
    name = list(stage.settings().topics.values())[place]
    more = {"cleanup.policy": "compact"} if place == 4 else {}
    create_topics(kafka.bootstrap_servers, {name: (4, {"compression.type": "zstd", **more})})
    topics(stage, "--create")
    for readable in (True, False):
        monkeypatch.setitem(cast("dict[str, Any]", CODECS), "zstd", lambda answer=readable: answer)
        failed = problems_of(stage)["fail"]
        if readable:
            assert not failed
        else:
            (words,) = failed
            start = f"topic {name} has compression.type=zstd, which cannot be read here; install cramjam"
            assert words.startswith(start)


def test_what_producers_may_send_is_a_check_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("snappy", "zstd"):
        monkeypatch.setitem(cast("dict[str, Any]", CODECS), name, lambda: False)
    monkeypatch.setitem(cast("dict[str, Any]", CODECS), "lz4", lambda: True)
    (problem,) = codec_problems()
    assert (problem.level, problem.message) == (
        "warn", "records that producers compress with snappy or zstd cannot be read here",
    )  # fmt: skip
    for name in CODECS:
        monkeypatch.setitem(cast("dict[str, Any]", CODECS), name, lambda: True)
    assert list(codec_problems()) == []


def test_created_topics_bound_how_far_ahead_a_record_may_be_dated(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka, KP_CREATE_TOPICS="true")
    settings = stage.settings()

    async def scenario() -> dict[str, str]:
        client = client_arguments(settings)
        await prepare_topics(settings, client)
        async with connected_admin(settings, client) as admin:
            found = await observe(admin, settings.topics.values())
            return {name: found.config(name, AFTER, "") for name in found.topics}

    ahead = asyncio.run(scenario())
    assert ahead.pop(stage.name) == "60000"
    assert set(ahead.values()) == {"3600000" if since("4.0") else str(NO_LIMIT)}
    now = round(time.time() * 1000)
    with pytest.raises(InvalidTimestampError):
        produce(kafka.bootstrap_servers, stage.name, [(None, b"x", (), 0, now + 120_000)])
    produce(kafka.bootstrap_servers, stage.name, [(None, b"x", (), 0, now + 20_000)])


def test_outputs_are_created_for_a_source_that_takes_more_and_the_start_warns_as_the_command_does(
    kafka: EmbeddedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    stage = untouched(kafka)
    create_topics(kafka.bootstrap_servers, {stage.name: (1, {AFTER: str(2**63 - 1)})})
    topics(stage, "--create")
    (warned,) = problems_of(stage)["warn"]
    assert warned.startswith(f"topic {stage.name} accepts records dated any time ahead")
    asyncio.run(prepare_topics(stage.settings(), client_arguments(stage.settings())))
    assert any("one such record empties a partition's cache" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("settings", "ahead", "warned"),
    [
        ({}, 3_600_000, True),
        ({}, 360_000, False),  # a tenth of the time that entries live
        ({}, 360_001, True),
        ({}, -1, True),
        ({"cache_ttl_seconds": "none"}, -1, False),
        ({"cache_ttl_seconds": 86_400.0}, 3_600_000, False),
        ({"cache_ttl_seconds": 10.0}, 60_000, False),  # clocks do differ
        ({"stream_time_max_step_seconds": 60.0}, -1, False),
        ({"stream_time_max_step_seconds": 3600.0}, -1, True),
        ({"embedder": "none"}, -1, False),
    ],
)
def test_when_the_source_lets_one_record_expire_too_much(settings: dict[str, Any], ahead: int, warned: bool) -> None:
    chosen = load(**settings)
    source = chosen.source_topic
    for kind, expected in (("CreateTime", warned), ("LogAppendTime", False)):
        found = observed(source, {AFTER: str(ahead), "message.timestamp.type": kind})
        levels = [problem.level for problem in problems(chosen, found) if AFTER in problem.message]
        assert levels == ["warn"] * expected


def test_the_changelog_takes_the_largest_track_record() -> None:
    record = TrackRecord("x" * 22)
    widest = "\U0001f600" * 256
    line = {"agent_id": widest, "task_domain": widest, "partition": 0, "success": 1, "judge": "ci"}
    changes = []
    for number in range(201):
        judged = line | {"trace_id": str(number), "offset": number}
        verdict = make_verdict(judged, topic="t", topic_id="x" * 22, issued_at=datetime.now(UTC))
        changes = record.add(verdict, number, (1 << 62) + number).changes
    assert changes
    key, value = encode_row(changes[0])
    needed = encoded_size(key, value, ()) + BATCH_OVERHEAD
    for settings, limit, failed in (
        (load(verdict_key_file="judges.key"), needed - 1, True),
        (load(verdict_key_file="judges.key"), LARGEST_RECORD_BYTES, False),
        (load(), needed - 1, False),
    ):
        found = observed(settings.changelog, {"max.message.bytes": str(limit)})
        levels = [problem.level for problem in problems(settings, found) if "track record" in problem.message]
        assert levels == ["fail"] * failed
    assert needed <= LARGEST_RECORD_BYTES


def test_no_broker_is_exit_code_2(kafka: EmbeddedKafka) -> None:
    result = topics(untouched(kafka, KP_BOOTSTRAP_SERVERS="127.0.0.1:1"))
    assert result.exit_code == 2
    assert "no Kafka broker answers at KP_BOOTSTRAP_SERVERS=127.0.0.1:1" in result.output


# -- brokers that close connections meanwhile

METADATA, CREATE_TOPICS, DESCRIBE_CONFIGS, CREATE_PARTITIONS = 3, 19, 32, 37


async def prepared(kafka: EmbeddedKafka, cut: Callable[[int, int], Cut | None], grow: bool) -> tuple[Layout, list[int]]:
    """Prepare the topics of a new stage behind a proxy; return the layout and the requests.

    `grow`: the changelog is there, and has fewer partitions than the source.
    """
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="3")
    if grow:
        changelog = f"{stage.name}-novelty-changelog"
        await create_topics_async(kafka.bootstrap_servers, {stage.name: 3, changelog: (1, CHANGELOG_CONFIG)})
    with Proxy(kafka.bootstrap_servers, cut) as proxy:
        settings = stage.settings().model_copy(update={"bootstrap_servers": proxy.url})
        return await prepare_topics(settings, client_arguments(settings)), proxy.requests


@pytest.mark.sample(1)
@pytest.mark.parametrize("grow", [False, True])
async def test_a_connection_that_is_closed_at_any_request_does_not_end_the_start(
    grow: bool, kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the broker got the request, and after it has done it."""
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.02)
    _, requests = await prepared(kafka, lambda number, key: None, grow)
    assert {METADATA, CREATE_TOPICS, DESCRIBE_CONFIGS} | ({CREATE_PARTITIONS} if grow else set()) <= set(requests)

    async def cut_at(number: int, how: Cut) -> bool:
        """Prepare topics while a request's connection is closed; return whether there were so many requests."""
        layout, requests = await prepared(kafka, lambda at, key: how if at == number else None, grow)
        outputs = [topic.partitions for topic in layout.outputs.values()]
        assert (layout.source_partitions, layout.changelog.partitions, outputs) == (3, 3, [3] * 3), (number, how)
        return len(requests) > number

    closings: tuple[Cut, ...] = ("before", "after")
    for how in closings:
        first = 0  # how many there are depends on how fast new topics are known
        while all(await asyncio.gather(*(cut_at(number, how) for number in range(first, first + 8)))):
            first += 8
        assert first


@pytest.mark.parametrize("key", [METADATA, CREATE_TOPICS, DESCRIBE_CONFIGS])
async def test_a_broker_that_closes_every_such_connection_is_told_in_the_end(
    key: int, kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 1.0)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"KP_BOOTSTRAP_SERVERS=127\.0\.0\.1:\d+: .*(closed|Not connected|no answer)"):
        await prepared(kafka, lambda _, asked: "before" if asked == key else None, grow=False)
    assert time.monotonic() - begun < 30
    assert sum("trying again for 1 s" in record.message for record in caplog.records) == 1


def test_a_worker_starts_behind_a_broker_that_closes_connections(kafka: EmbeddedKafka, workers: Workers) -> None:
    """As a process: each kind of request of the preparation fails once, and no traceback is written."""
    seen: set[int] = set()
    preparing = {METADATA, CREATE_TOPICS, DESCRIBE_CONFIGS}

    def cut(number: int, key: int) -> Cut | None:
        if key not in preparing - seen:
            return None
        seen.add(key)
        return "after"

    stage = Stage(kafka)
    with Proxy(kafka.bootstrap_servers, cut) as proxy:
        worker = workers({**stage.env, "KP_BOOTSTRAP_SERVERS": proxy.url}).wait_ready()
        worker.close()
    assert seen == preparing
    assert "trying again for 30 s" in worker.log()
    assert "Traceback" not in worker.log()
