"""`kp-worker assemble`: its options."""

from __future__ import annotations

import sys

import click

from worker.commands.shared.console import SettingsError, require_extra
from worker.commands.shared.options import SettingsHelp, read_settings, settings_options, stop_at_once


@click.command(cls=SettingsHelp)
@click.option(
    "--try",
    "sample",
    metavar="FILE|TOPIC",
    help="Show what would come out for the newest runs of a topic, or of a file with a record of OTLP/JSON on each "
    "line, and what they lack; write nothing.",
)
@click.option(
    "--records", type=click.IntRange(1), default=200, show_default=True, help="With --try: records of each partition."
)
@settings_options
def assemble(sample: str | None, records: int) -> None:
    """Make traces from OpenTelemetry spans until SIGTERM or Ctrl-C, one for each run of an agent.

    Needs KP_ASSEMBLE_CONFIDENCE, KP_ASSEMBLE_DOMAIN, KP_ASSEMBLE_VISIBILITY and KP_ASSEMBLE_PRIVACY. Exit codes: 0
    stopped on request, and everything taken is committed; 1 failed, a restart continues; 2 wrong settings or topics.
    With --try: 0 a trace would come out; 1 none would.
    """
    stop_at_once()
    settings = read_settings()
    require_extra("otlp", SettingsError)
    if sample is not None:
        from worker.commands.assemble.preview import run_preview

        sys.exit(run_preview(settings, sample, records))
    from worker.assemble.process import AssembleProcess
    from worker.commands.shared.service import run_service

    run_service(settings, AssembleProcess(settings))
