"""`kp-worker topics`: the topics as they are and as they should be, and the commands to correct them.

The topics are the worker's five; those of `assemble`, if its settings are set; the one on which `kp-worker redrive`
keeps its marks; and with KP_REGISTRY_URL the two that `kp-worker contribute` writes. The worker needs only its own, so
problems of the others do not make the topics unusable. Heavy imports are inside functions, because `--help` loads this
module.
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

from worker.commands.shared.console import Command, SettingsError, text_console, write_json
from worker.commands.shared.options import json_option, read_settings, settings_options
from worker.core.terminal import clean, number_of

if TYPE_CHECKING:
    from aiokafka.admin import AIOKafkaAdminClient
    from rich.console import Console
    from rich.text import Text

    from worker.commands.shared.shown import PlainTable
    from worker.config import Settings
    from worker.kafka.cluster.topics import Observed, Problem, TopicPlan


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


class TopicsReport(Struct, frozen=True):
    """All topics, and the problems that prevent a start or deserve a warning."""

    topics: list[TopicRow]
    problems: list[dict[str, str]]

    @property
    def usable(self) -> bool:
        """Whether the worker would start with these topics."""
        return not any(problem["level"] == "fail" for problem in self.problems)


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
    from worker.config import ConfigError

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)  # the error says the same
    try:
        report = asyncio.run(topics_report(settings, create))
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    if as_json:
        write_json(*report.topics, *report.problems)
    else:
        print_report(text_console(), report)
    sys.exit(0 if report.usable else 1)


async def topics_report(settings: Settings, create: bool) -> TopicsReport:
    """Describe the topics; with `create`, first create the missing ones. Raises ConfigError."""
    from aiokafka.errors import KafkaError

    from worker.assemble.topics import assemble_plan, assemble_problems, create_assemble_topics, look_for_assemble
    from worker.commands.shared.marks import marks_plan, marks_topic
    from worker.config import ConfigError
    from worker.contribute.contributor import contribute_plan, create_contributed, look_at_contributed
    from worker.kafka.cluster.connections import connected_admin, prepare_clients
    from worker.kafka.cluster.errors import error_text
    from worker.kafka.cluster.topics import Problem, create_missing, look, look_at, plan, problems

    client = {**prepare_clients(settings), "request_timeout_ms": 10_000}
    try:
        async with connected_admin(settings, client) as admin:
            refused = None
            if create:
                await create_missing(admin, settings)
                refused = await _create_marks(admin, settings)
            observed = await look(admin, settings, list(settings.topics.values()))
            marks = await look_at(admin, [marks_topic(settings)], [marks_topic(settings)])
            creates = create and settings.registry_url is not None
            contributed = await (create_contributed if creates else look_at_contributed)(admin, settings)
            if create and settings.assembles:
                await create_assemble_topics(admin, settings)
            spans = await look_for_assemble(admin, settings) if settings.assembles else None
    except KafkaError as error:
        raise ConfigError(error_text(error)) from error
    rows = [_row(settings, wanted, observed) for wanted in plan(settings, observed)]
    wrong = [*problems(settings, observed), *([] if refused is None else [refused])]
    if spans is not None:
        rows += [_row(settings, wanted, spans, "assemble") for wanted in assemble_plan(settings, spans)]
        wrong += [
            Problem("warn", text, "kp-worker assemble does not start") for text in assemble_problems(settings, spans)
        ]
    rows.append(_row(settings, marks_plan(marks_topic(settings)), marks, "redrive"))
    if settings.registry_url is not None:
        plans = contribute_plan(settings, contributed)
        rows += [_row(settings, wanted, contributed, "contribute") for wanted in plans]
    wrong_rows = [{"level": each.level, "message": each.message, "remedy": each.remedy} for each in wrong]
    return TopicsReport(rows, wrong_rows)


async def _create_marks(admin: AIOKafkaAdminClient, settings: Settings) -> Problem | None:
    """Create the topic of `redrive`; return why that is denied, since a worker starts without it."""
    from worker.commands.shared.marks import create_marks_topic, marks_topic
    from worker.commands.shared.session import Session
    from worker.config import ConfigError
    from worker.kafka.cluster.topics import Problem

    try:
        await create_marks_topic(Session(settings), admin, marks_topic(settings))
    except ConfigError as error:
        return Problem("warn", str(error), "a worker needs no such topic, kp-worker redrive does")
    return None


def _row(settings: Settings, wanted: TopicPlan, observed: Observed, needed_by: str = "run") -> TopicRow:
    state = observed.topics.get(wanted.name)
    current = observed.configs.get(wanted.name)
    configs = []
    for name, value in wanted.configs.items():
        now = None if current is None else current.get(name)
        fits = None if now is None else _fits(_bound(wanted.variable, name), now, value)
        configs.append(ConfigRow(name, now, value, fits))
    word = "missing" if state is None else "exists"
    return TopicRow(
        setting=wanted.variable, topic=wanted.name, state="denied" if wanted.name in observed.denied else word,
        partitions=None if state is None else state.partitions,
        partitions_wanted=_partitions_wanted(settings, wanted, observed),
        replicas=None if state is None else state.replicas, configs=configs,
        commands=_commands(settings, wanted, observed, configs), needed_by=needed_by,
    )  # fmt: skip


def _bound(variable: str, name: str) -> str:
    """Return the comparison for a setting of the topic that `variable` names: ">=", "<=", or "" for equality."""
    from worker.kafka.cluster.topics import AFTER

    if name == AFTER and variable == "KP_SOURCE_TOPIC":
        return "<="
    return ">=" if name in ("max.message.bytes", AFTER) else ""  # these may exceed the plan


def _fits(bound: str, now: str, wanted: str) -> bool:
    if bound:
        return int(now) >= int(wanted) if bound == ">=" else int(now) <= int(wanted)
    return now == wanted


def _partitions_wanted(settings: Settings, wanted: TopicPlan, observed: Observed) -> int:
    """Return the partitions that a topic should have: any number for an output, at least the plan's for a changelog."""
    state = observed.topics.get(wanted.name)
    if state is None or (wanted.name == settings.changelog and state.partitions < wanted.partitions):
        return wanted.partitions
    return state.partitions


def _commands(settings: Settings, wanted: TopicPlan, observed: Observed, configs: Sequence[ConfigRow]) -> list[str]:
    state = observed.topics.get(wanted.name)
    server = ["--bootstrap-server", settings.bootstrap_servers]
    if wanted.name in observed.denied:
        return []
    if state is None:
        words = ["kafka-topics.sh", *server, "--create", "--topic", wanted.name, "--partitions", str(wanted.partitions)]
        if settings.topic_replication > 0:
            words += ["--replication-factor", str(settings.topic_replication)]
        for name, value in wanted.configs.items():
            words += ["--config", f"{name}={value}"]
        return [shlex.join(words)]
    commands = []
    partitions = _partitions_wanted(settings, wanted, observed)
    if partitions != state.partitions:
        alter = ["--alter", "--topic", wanted.name, "--partitions", str(partitions)]
        commands.append(shlex.join(["kafka-topics.sh", *server, *alter]))
    if wrong := [row for row in configs if row.ok is False]:
        change = ",".join(f"{row.name}={row.wanted}" for row in wrong)
        alter = ["--alter", "--topic", wanted.name, "--add-config", change]
        commands.append(shlex.join(["kafka-configs.sh", *server, *alter]))
    return commands


def print_report(console: Console, report: TopicsReport) -> None:
    """Print the report for people; commands are not wrapped, so that they can be copied."""
    from rich.text import Text

    for row in report.topics:
        console.print(_head(row))
        if row.configs:
            console.print(_config_table(row))
    for problem in report.problems:
        text = f"\n{problem['level']}: {problem['message']}; {problem['remedy']}"
        console.print(Text(clean(text, "\n"), "red" if problem["level"] == "fail" else "yellow"))
    commands = [command for row in report.topics for command in row.commands]
    if commands:
        console.print("\nTo run by hand (kp-worker topics --create creates missing topics):\n")
        for command in commands:
            console.print(Text(clean(command)), soft_wrap=True)


def _head(row: TopicRow) -> Text:
    from rich.text import Text

    needed = row.needed_by == "run"
    missing = "not bold red" if needed else "not bold yellow"
    text = Text(clean(row.topic), "bold").append(f"  {row.state}", "not bold" if row.state == "exists" else missing)
    if row.partitions is None:
        text.append(f", needs {number_of(row.partitions_wanted, 'partition')}", "not bold")
        return text if needed else text.append(f" (for kp-worker {row.needed_by})", "not bold")
    text.append(f", {number_of(row.partitions, 'partition')}", "not bold")
    if row.partitions != row.partitions_wanted:
        text.append(f" (should be {row.partitions_wanted})", "not bold red")
    return text.append(f", replicas {row.replicas}", "not bold")


def _config_table(row: TopicRow) -> PlainTable:
    from rich.text import Text

    from worker.commands.shared.shown import columns

    names = ("    setting", "is", "should be")
    table = columns(*names, fold=names)
    for config in row.configs:
        current = Text(clean(config.current or "-"), "red" if config.ok is False else "")
        table.add_row(
            Text(f"    {config.name}"), current, f"{_bound(row.setting, config.name)} {config.wanted}".strip()
        )
    return table
