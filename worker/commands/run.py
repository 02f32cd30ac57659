"""`kp-worker run` and `kp-worker contribute`: they run until they are stopped."""

from __future__ import annotations

import click

from worker.commands.shared.options import SettingsHelp, read_settings, settings_options, stop_at_once


@click.command(cls=SettingsHelp)
@settings_options
def run() -> None:
    """Run the worker until SIGTERM or Ctrl-C.

    Exit codes: 0 stopped on request, and everything taken is committed; 1 failed, a restart reads uncommitted records
    again; 2 wrong settings, topics or model.
    """
    stop_at_once()
    settings = read_settings()
    from worker.commands.shared.service import run_service
    from worker.stream.process import WorkerProcess

    run_service(settings, WorkerProcess(settings))


@click.command(cls=SettingsHelp)
@settings_options
def contribute() -> None:
    """Post accepted traces to the registry until SIGTERM or Ctrl-C, redacted, each once.

    Needs KP_REGISTRY_URL, and KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY. Exit codes: 0 stopped on request, and everything
    sent is recorded; 1 failed, a restart continues; 2 wrong settings or topics, or the registry does not accept the
    key.
    """
    stop_at_once()
    settings = read_settings()
    from worker.commands.shared.service import run_service
    from worker.contribute.process import ContributeProcess

    run_service(settings, ContributeProcess(settings))
