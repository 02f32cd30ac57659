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

    Shows how each topic differs, with the commands that correct it, including the topics of redrive and, if they are
    set up, of assemble and contribute. KP_CREATE_TOPICS=true creates the same at startup. Exit codes: 0 the worker
    would start with these topics, 1 it would not.
    """
    settings = read_settings()
    from worker.commands.topics.compare import run_topics

    sys.exit(run_topics(settings, create=create, as_json=as_json))
