"""The commands of docs/ with Kafka's own tools, as they stand: operations.md, contribute.md and runbooks.md."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.kafka_fixtures import committed, create_topics
from tests.support.kafka_tools import write_scripts
from tests.support.snippets import Snippet, shell, snippets
from tests.support.stage import LINES, Stage, Workers, origins
from tests.support.surroundings import DOCS
from worker.contribute.contributor import contribute_plan
from worker.kafka.connections import client_arguments, connected_admin
from worker.kafka.topics import TopicPlan, observe, plan
from worker.lab.broker.embedded_kafka import EmbeddedKafka

BLOCKS = snippets("tests/kafka/test_kafka_tools.py")
PARTITIONS = 4


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kafka-tools")
    write_scripts(directory)
    return directory


class Tools:
    """Runs the commands of a page's block on the topics and the group of a stage; each must succeed."""

    def __init__(self, stage: Stage, scripts: Path, directory: Path) -> None:
        self._stage = stage
        self._scripts = scripts
        self._directory = directory

    def run(self, block: Snippet) -> list[str]:
        """Return what each command printed."""
        return [self.command(command) for command in block.commands()]

    def command(self, command: str) -> str:
        """Return what a command printed, with the stage's names in place of the page's: of topics, and of the group."""
        command = command.replace("BROKERS", self._stage.bootstrap)
        names = r"(?<=--group )kp-worker|(?<=--topic )(kp-worker(?=-)|traces)"
        line = f'PATH="{self._scripts}:$PATH"\n{re.sub(names, self._stage.name, command)}'
        done = shell(line, self._stage.env, self._directory)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def stage(kafka: EmbeddedKafka) -> Stage:
    return Stage(kafka, KP_TOPIC_PARTITIONS=str(PARTITIONS))


@pytest.fixture
def tools(stage: Stage, scripts: Path, tmp_path: Path) -> Tools:
    return Tools(stage, scripts, tmp_path)


def the_block(word: str) -> Snippet:
    (found,) = [block for block in BLOCKS if word in block.text]
    return found


def score(stage: Stage, hashing: Workers, lines: list[bytes], done: int = 0) -> None:
    """Let a worker score traces behind those that are done, and stop it."""
    with hashing(stage.env).wait_ready() as worker:
        stage.produce([(None, line, (), n % PARTITIONS) for n, line in enumerate(lines)])
        stage.wait_committed(done + len(lines))
        worker.finish()


async def wanted_and_found(stage: Stage) -> list[tuple[TopicPlan, int, dict[str, str]]]:
    """Return the topics that the blocks create, as planned and as they are."""
    settings = stage.settings()
    names = [settings.changelog, settings.accepted_topic, settings.contributed, settings.refused]
    async with connected_admin(settings, client_arguments(settings), 30) as admin:
        found = await observe(admin, names)
    plans = [each for each in plan(settings, found) if each.name == settings.changelog]
    return [
        (it, found.topics[it.name].partitions, {name: found.config(it.name, name, "") for name in it.configs})
        for it in [*plans, *contribute_plan(settings, found)]
    ]


def test_topics_created_by_hand_are_those_that_the_worker_would_create(stage: Stage, tools: Tools) -> None:
    accepted = (PARTITIONS, {"max.message.bytes": "1056768"})
    create_topics(stage.bootstrap, {stage.name: PARTITIONS, stage.env["KP_ACCEPTED_TOPIC"]: accepted})
    tools.run(the_block("--create --topic kp-worker-novelty-changelog"))
    tools.run(the_block("--create --topic traces.accepted.contributed"))
    compared = asyncio.run(wanted_and_found(stage))
    assert len(compared) == 3
    for wanted, partitions, configs in compared:
        assert (partitions, configs) == (PARTITIONS, dict(wanted.configs)), wanted.name


def test_the_group_can_be_reset_and_its_offsets_restored_from_the_outputs(
    stage: Stage, tools: Tools, hashing: Workers
) -> None:
    score(stage, hashing, [*LINES[:40], b"no JSON"])
    before = committed(stage.bootstrap, stage.name, stage.name)
    state, dry_run = tools.run(the_block("--describe --group kp-worker"))
    assert "Empty" in state
    assert sorted(line.split()[-2:] for line in dry_run.splitlines() if stage.name in line) == [
        [str(partition), "0"] for partition in range(PARTITIONS)
    ]
    assert committed(stage.bootstrap, stage.name, stage.name) == before

    tools.command("kafka-consumer-groups.sh --bootstrap-server BROKERS --delete --group kp-worker")
    assert sum(committed(stage.bootstrap, stage.name, stage.name).values()) <= 0
    tools.command(the_block("> offsets.csv").text.replace('f"traces,', f'f"{stage.name},'))
    tools.run(the_block("--from-file offsets.csv"))
    assert committed(stage.bootstrap, stage.name, stage.name) == before

    score(stage, hashing, LINES[40:60], done=41)
    taken = origins(stage)
    assert len(taken) == len(set(taken)) == 61


def test_a_topic_gets_more_partitions_the_changelog_first(stage: Stage, tools: Tools, hashing: Workers) -> None:
    score(stage, hashing, LINES[:4])
    tools.run(the_block("--alter --topic traces --partitions 12"))
    with hashing(stage.env | {"KP_TOPIC_PARTITIONS": "1"}).wait_ready() as worker:
        stage.produce([(None, line, (), n) for n, line in enumerate(LINES[4:16])])
        stage.wait_committed(16)
        worker.wait_metric("kp_assigned_partitions", 12)


@pytest.mark.long
def test_the_commands_within_the_sentences_of_the_runbooks_run(stage: Stage, tools: Tools, hashing: Workers) -> None:
    """With the lines at the head of the page, one command of each form."""
    score(stage, hashing, LINES[:8])
    text = (DOCS / "runbooks.md").read_text("utf-8")
    (head,) = re.findall(r"^(kafka\(\) .*\nGROUP=.*)$", text, re.MULTILINE)
    head = head.replace("kafka-1:9092", stage.bootstrap).replace("GROUP=kp-worker", f"GROUP={stage.name}")
    forms = {tuple(re.findall(r"^kafka \S+| --\S+", it)): it for it in reversed(re.findall(r"`(kafka [^`]+)`", text))}
    for line in forms.values():
        command = line.replace("$GROUP-assemble", "$GROUP")
        tools.command(head + "\n" + re.sub(r"(?<!--topic )\btraces\b", stage.name, command))
    assert len(forms) == 8
