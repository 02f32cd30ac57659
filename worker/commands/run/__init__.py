"""`kp-worker run`, `contribute` and `assemble`: they run until they are stopped."""

from __future__ import annotations

import os
import signal
import sys

import click

from worker.commands.shared.console import Command, SettingsError, require_extra
from worker.commands.shared.options import read_settings, settings_options


class SettingsHelp(Command):
    """Lists the settings at the end of its help, because they are the command's real options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name, default and meaning of each setting."""
        from worker.config import describe

        with formatter.section(
            "Settings (environment variables; in the config file and for --set in lower case without KP_)"
        ):
            formatter.write_dl([(f"{name}={default}", text) for name, default, text in describe()])


def stop_at_once() -> None:
    """Exit with code 0 on a signal until the process installs its own handlers (its imports take a second)."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


@click.command(cls=SettingsHelp)
@settings_options
def run() -> None:
    """Run the worker until SIGTERM or Ctrl-C.

    Exit codes: 0 stopped on request, everything taken is committed; 1 failed, a restart reads uncommitted records
    again; 2 wrong settings, topics or model.
    """
    stop_at_once()
    settings = read_settings()
    from worker.commands.run.service import run_service
    from worker.stream.worker import WorkerProcess

    run_service(settings, WorkerProcess(settings))


@click.command(cls=SettingsHelp)
@settings_options
def contribute() -> None:
    """Post accepted traces to the registry until SIGTERM or Ctrl-C, redacted, each once.

    Needs KP_REGISTRY_URL, and KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY. Exit codes: 0 stopped on request, everything
    sent is recorded; 1 failed, a restart continues; 2 wrong settings or topics, or the registry rejects the key.
    """
    stop_at_once()
    settings = read_settings()
    from worker.commands.run.service import run_service
    from worker.contribute.contributor import ContributeProcess

    run_service(settings, ContributeProcess(settings))


@click.command(cls=SettingsHelp)
@click.option("--try", "sample", metavar="FILE|TOPIC", help="Show the traces of a topic's newest runs, or of a file "
              "with one OTLP/JSON record per line, and what they lack; write nothing.")  # fmt: skip
@click.option("--records", type=click.IntRange(1), default=200, show_default=True, metavar="N",
              help="With --try: records per partition.")  # fmt: skip
@settings_options
def assemble(sample: str | None, records: int) -> None:
    """Make traces from OpenTelemetry spans until SIGTERM or Ctrl-C, one for each run of an agent.

    Needs KP_ASSEMBLE_CONFIDENCE, KP_ASSEMBLE_DOMAIN, KP_ASSEMBLE_VISIBILITY and KP_ASSEMBLE_PRIVACY. Exit codes: 0
    stopped on request, everything taken is committed; 1 failed, a restart continues; 2 wrong settings or topics. With
    --try: 0 a trace would come out, 1 none.
    """
    stop_at_once()
    settings = read_settings()
    require_extra("otlp", SettingsError)
    if sample is not None:
        from worker.commands.shared.preview import run_preview

        sys.exit(run_preview(settings, sample, records))
    from worker.assemble.assembler import AssembleProcess
    from worker.commands.run.service import run_service

    run_service(settings, AssembleProcess(settings))
