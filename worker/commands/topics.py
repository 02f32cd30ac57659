"""`kp-worker topics`: the topics as they are and as they should be, and the commands to correct them.

The topics are the worker's five; those of `assemble`, if its settings are set; the one on which `kp-worker redrive`
keeps its marks; and with KP_REGISTRY_URL the two that `kp-worker contribute` writes. The worker needs only its own, so
problems of the others do not make the topics unusable.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from worker.commands.shared.console import Command, text_console, write_json
from worker.commands.shared.options import json_option, read_settings, settings_options
from worker.core.terminal import clean, number_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from worker.config import Settings
    from worker.kafka.describe import TopicDescription
    from worker.kafka.topics import Observed, Problem, TopicPlan


class ConfigRow(Struct, frozen=True):
    """One setting of a topic."""

    name: str
    current: str | None  # None, like `ok`: the topic is missing, or its settings may not be read
    wanted: str
    ok: bool | None


class TopicRow(Struct, frozen=True):
    """One topic as it is and as it should be."""

    setting: str
    topic: str
    state: str
    partitions: int | None
    partitions_wanted: int
    replicas: int | None
    configs: list[ConfigRow]
    commands: list[str]  # they correct it by hand; empty if it is right
    needed_by: str = "run"  # the command that does not work without it


@click.command(cls=Command)
@click.option("--create", is_flag=True, help="Create missing topics; existing topics are not changed.")
@json_option
@settings_options
def topics(create: bool, as_json: bool) -> None:
    """Compare the topics with what the worker needs, or create them.

    Shows how each topic differs, with the commands that correct it, including the topics of redrive and, if they are
    set up, of assemble and contribute. KP_CREATE_TOPICS=true creates the same at startup. Exit codes: 0 the worker
    would start with these topics, 1 it would not.
    """
    settings = read_settings()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)  # the error says the same
    rows, problems = asyncio.run(topics_report(settings, create))
    if as_json:
        write_json(
            *rows, *({"level": fault.level, "message": fault.message, "remedy": fault.remedy} for fault in problems)
        )
    else:
        print_report(text_console(), rows, problems)
    sys.exit(int(any(problem.level == "fail" for problem in problems)))


async def topics_report(settings: Settings, create: bool) -> tuple[list[TopicRow], list[Problem]]:
    """Return the topics and their problems; with `create`, first create the missing ones. Raises ConfigError."""
    from aiokafka.errors import KafkaError

    from worker.assemble.topics import assemble_plan, assemble_problems, create_assemble_topics, look_for_assemble
    from worker.commands.shared.marks import create_marks_topic, marks_plan, marks_topic
    from worker.commands.shared.session import Session
    from worker.config import ConfigError
    from worker.contribute.contributor import contribute_plan, create_contributed, look_at_contributed
    from worker.kafka.connections import connected_admin, prepare_clients
    from worker.kafka.errors import error_text
    from worker.kafka.topics import Problem, create_missing, observe, plan, problems

    marks, denied = marks_topic(settings), []
    client = {**prepare_clients(settings), "request_timeout_ms": 10_000}
    try:
        async with connected_admin(settings, client) as admin:
            if create:
                await create_missing(admin, settings)
                try:
                    await create_marks_topic(Session(settings), admin, marks)
                except ConfigError as error:
                    denied = [Problem(str(error), "a worker needs no such topic, kp-worker redrive does")]
                if settings.registry_url is not None:
                    await create_contributed(admin, settings)
                if settings.assembles:
                    await create_assemble_topics(admin, settings)
            observed = await observe(admin, settings.topics.values())
            marks_observed = await observe(admin, [marks])
            contributed = await look_at_contributed(admin, settings)
            spans = await look_for_assemble(admin, settings) if settings.assembles else None
    except KafkaError as error:
        raise ConfigError(error_text(error)) from error
    rows = [_row(settings, wanted, observed) for wanted in plan(settings, observed)]
    wrong = [*problems(settings, observed), *denied]
    if spans is not None:
        rows += [_row(settings, wanted, spans, "assemble") for wanted in assemble_plan(settings, spans)]
        remedy = "kp-worker assemble does not start"
        wrong += [Problem(text, remedy) for text in assemble_problems(settings, spans)]
    rows.append(_row(settings, marks_plan(marks), marks_observed, "redrive"))
    if settings.registry_url is not None:
        plans = contribute_plan(settings, contributed)
        rows += [_row(settings, wanted, contributed, "contribute") for wanted in plans]
    return rows, wrong


def _row(settings: Settings, wanted: TopicPlan, observed: Observed, needed_by: str = "run") -> TopicRow:
    topic, current = observed.topics.get(wanted.name), observed.configs.get(wanted.name, {})
    configs = []
    for name, value in wanted.configs.items():
        now, bound = current.get(name), _bound(wanted.variable, name)
        fits = None
        if now is not None:
            fits = now == value or (bound != "" and (int(now) > int(value)) == (bound == ">="))
        configs.append(ConfigRow(name, now, value, fits))
    # Any number fits an output, and more than the plan's a changelog.
    partitions = wanted.partitions if topic is None else topic.partitions
    if wanted.name == settings.changelog:
        partitions = max(partitions, wanted.partitions)
    state = "denied" if wanted.name in observed.denied else "missing" if topic is None else "exists"
    commands = [] if state == "denied" else _commands(settings, wanted, topic, partitions, configs)
    return TopicRow(
        setting=wanted.variable, topic=wanted.name, state=state,
        partitions=None if topic is None else topic.partitions, partitions_wanted=partitions,
        replicas=None if topic is None else topic.replicas, configs=configs, commands=commands, needed_by=needed_by,
    )  # fmt: skip


def _bound(variable: str, name: str) -> str:
    """Return the comparison for a setting of the topic that `variable` names: ">=", "<=", or "" for equality."""
    from worker.kafka.topics import AFTER

    if name == AFTER and variable == "KP_SOURCE_TOPIC":
        return "<="
    return ">=" if name in ("max.message.bytes", AFTER) else ""  # these may exceed the plan


def _commands(
    settings: Settings, wanted: TopicPlan, topic: TopicDescription | None, partitions: int, configs: list[ConfigRow]
) -> list[str]:
    def command(tool: str, action: str, *words: str) -> str:
        server = ["--bootstrap-server", settings.bootstrap_servers]
        return shlex.join([tool, *server, action, "--topic", wanted.name, *words])

    if topic is None:
        words = ["--partitions", str(partitions)]
        if settings.topic_replication > 0:
            words += ["--replication-factor", str(settings.topic_replication)]
        for name, value in wanted.configs.items():
            words += ["--config", f"{name}={value}"]
        return [command("kafka-topics.sh", "--create", *words)]
    commands = []
    if partitions != topic.partitions:
        commands.append(command("kafka-topics.sh", "--alter", "--partitions", str(partitions)))
    if change := ",".join(f"{row.name}={row.wanted}" for row in configs if row.ok is False):
        commands.append(command("kafka-configs.sh", "--alter", "--add-config", change))
    return commands


def print_report(console: Console, rows: Sequence[TopicRow], problems: Sequence[Problem]) -> None:
    """Print the report for people; commands are not wrapped, so that they can be copied."""
    from rich.text import Text

    from worker.commands.shared.shown import columns

    names = ("    setting", "is", "should be")
    for row in rows:
        console.print(_head(row))
        table = columns(*names, fold=names)
        for config in row.configs:
            current = Text(clean(config.current or "-"), "red" if config.ok is False else "")
            wanted = f"{_bound(row.setting, config.name)} {config.wanted}".strip()
            table.add_row(Text(f"    {config.name}"), current, wanted)
        if row.configs:
            console.print(table)
    for problem in problems:
        text = clean(f"\n{problem.level}: {problem.message}; {problem.remedy}", "\n")
        console.print(Text(text, "red" if problem.level == "fail" else "yellow"))
    commands = [command for row in rows for command in row.commands]
    if commands:
        console.print("\nTo run by hand (kp-worker topics --create creates missing topics):\n")
        for command in commands:
            console.print(Text(clean(command)), soft_wrap=True)


def _head(row: TopicRow) -> Text:
    from rich.text import Text

    needed = row.needed_by == "run"
    colour = "" if row.state == "exists" else "red" if needed else "yellow"
    text = Text.assemble((clean(row.topic), "bold"), "  ", (row.state, colour))
    if row.partitions is None:
        command = "" if needed else f" (for kp-worker {row.needed_by})"
        return text.append(f", needs {number_of(row.partitions_wanted, 'partition')}{command}")
    text.append(f", {number_of(row.partitions, 'partition')}")
    if row.partitions != row.partitions_wanted:
        text.append(f" (should be {row.partitions_wanted})", "red")
    return text.append(f", replicas {row.replicas}")
