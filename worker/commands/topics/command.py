"""`kp-worker topics`: its options."""

from __future__ import annotations

import sys

import click

from worker.commands.shared.console import Command
from worker.commands.shared.options import json_option, read_settings, settings_options


@click.command(cls=Command)
@click.option("--create", is_flag=True, help="Create missing topics; existing topics are not changed.")
@json_option
@settings_options
def topics(create: bool, as_json: bool) -> None:
    """Compare the topics with what the worker needs, or create them.

    Shows each topic as it is and as it should be, with the commands that correct it; also the topic of redrive, and
    those of assemble and contribute where their settings are given. --create creates what is missing, as the worker
    does at startup with KP_CREATE_TOPICS=true. Exit codes: 0 the worker would start with these topics; 1 it would not;
    2 wrong settings, or no broker answers.
    """
    settings = read_settings()
    from worker.commands.topics.compare import run_topics

    sys.exit(run_topics(settings, create=create, as_json=as_json))
