"""The five topics on real Kafka: `kp-worker topics`, and workers that prepare them at the same time."""

from __future__ import annotations

import asyncio
import json
import re

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from tests.support.kafka_fixtures import create_topics
from tests.support.stage import untouched
from worker.connection import client_arguments
from worker.embedded_kafka import EmbeddedKafka
from worker.topics import CHANGELOG_CONFIG, connect, create_missing, look, plan, prepare_topics


def test_the_plan_changes_nothing_and_create_makes_it_true(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="3")
    for _ in range(2):
        before = stage.topics("--json")
        assert before.exit_code == 1
        assert [json.loads(line).get("state") for line in before.output.splitlines()] == ["missing"] * 5 + [None]
    created = stage.topics("--json", "--create")
    assert created.exit_code == 0
    rows = [json.loads(line) for line in created.output.splitlines()]
    assert [(row["state"], row["partitions"], row["commands"]) for row in rows] == [("exists", 3, [])] * 5
    assert all(config["ok"] for row in rows for config in row["configs"])
    assert {config["name"] for config in rows[4]["configs"]} == set(CHANGELOG_CONFIG)


def test_the_commands_to_run_by_hand_say_what_the_worker_would_create(kafka: EmbeddedKafka) -> None:
    """Reads the commands as kafka-topics.sh does, creates by them, and finds nothing left to do."""
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="2")
    commands = [command for row in stage.lines()[:5] for command in row["commands"]]
    wanted = {}
    for command in commands:
        found = re.search(r"--create --topic (\S+) --partitions (\d+)", command)
        assert found
        wanted[found[1]] = int(found[2]), dict(pair.split("=") for pair in re.findall(r"--config (\S+)", command))
    create_topics(kafka.bootstrap_servers, wanted)
    rows = stage.lines()
    assert [row["commands"] for row in rows] == [[]] * 5
    assert stage.topics().exit_code == 0


def test_what_is_wrong_is_told_with_its_remedy_and_fails(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    names = list(stage.settings().topics.values())
    create_topics(kafka.bootstrap_servers, {names[0]: 3, names[1]: 1, names[2]: 1, names[3]: 1, names[4]: 2})
    result = stage.topics("--text")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert f"{names[4]} exists, 2 partitions (should be 3)" in text
    assert f"--alter --topic {names[4]} --partitions 3" in text
    assert "set cleanup.policy=compact" in text
    assert "--add-config cleanup.policy=compact," in text
    assert "warn: the output topics take records of at most 1048588 bytes" in text


def test_workers_that_see_new_source_partitions_at_once_all_go_on(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka, KP_TOPIC_PARTITIONS="1", KP_CREATE_TOPICS="true")
    settings = stage.settings()
    client = client_arguments(settings)

    async def scenario() -> list[int]:
        await prepare_topics(settings, client)
        async with asyncio.timeout(60):
            admin = AIOKafkaAdminClient(**client)
            await admin.start()
            await admin.create_partitions({settings.source_topic: NewPartitions(4)})
            for _ in range(200):
                if (await look(admin, settings, [])).topics[settings.source_topic].partitions == 4:
                    break
                await asyncio.sleep(0.05)
            await admin.close()
            layouts = await asyncio.gather(*(prepare_topics(settings, client) for _ in range(6)))
            return [layout.source_partitions for layout in layouts]

    assert asyncio.run(scenario()) == [4] * 6


def test_workers_that_create_topics_at_once_all_go_on(kafka: EmbeddedKafka) -> None:
    settings = untouched(kafka, KP_TOPIC_PARTITIONS="2", KP_CREATE_TOPICS="true").settings()

    async def scenario() -> list[int]:
        client = client_arguments(settings)
        layouts = await asyncio.gather(*(prepare_topics(settings, client) for _ in range(4)))
        return [layout.source_partitions for layout in layouts]

    assert asyncio.run(scenario()) == [2] * 4


def test_a_dead_letter_topic_is_planned_for_the_largest_record_of_the_source(kafka: EmbeddedKafka) -> None:
    stage = untouched(kafka)
    settings = stage.settings()
    create_topics(kafka.bootstrap_servers, {stage.name: (1, {"max.message.bytes": "5000000"})})

    async def scenario() -> tuple[str, int]:
        admin = await connect(settings, client_arguments(settings))
        try:
            found = await look(admin, settings, [stage.name])
            wanted = {topic.name: topic for topic in plan(settings, found)}[settings.dead_letter_topic]
            await create_missing(admin, settings)
            after = await look(admin, settings, [settings.dead_letter_topic])
            return wanted.configs["max.message.bytes"], after.max_bytes(settings.dead_letter_topic)
        finally:
            await admin.close()

    assert asyncio.run(scenario()) == ("5065536", 5065536)


def test_no_broker_is_exit_code_2(kafka: EmbeddedKafka) -> None:
    result = untouched(kafka, KP_BOOTSTRAP_SERVERS="127.0.0.1:1").topics()
    assert result.exit_code == 2
    assert "no Kafka broker answers at KP_BOOTSTRAP_SERVERS=127.0.0.1:1" in result.output
