"""Commands. Lives here: options, output, exit codes. Must not live here: anything a command does (other modules)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import NoReturn

import click

from worker.version import __version__


def main() -> NoReturn:
    """Run the command line."""
    # One cache scan takes 20 us on one core; OpenBLAS would spread it over all of them, at more than that in hand-overs
    # and against the embedder's threads. Must stand before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    cli(prog_name="kp-worker")
    sys.exit(0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Score KnowledgePulse reasoning traces on a Kafka stream, exactly once.

    Settings are environment variables (KP_...); `kp-worker run --help` lists them.
    """


@cli.command()
def run() -> None:
    """Run the worker until SIGTERM or Ctrl-C."""
    from worker import app, config, logs

    try:
        settings = config.load()
    except config.ConfigError as error:
        raise click.ClickException(str(error)) from None
    logs.configure(settings.log_level, settings.log_format)
    for warning in config.unknown_variables():
        logging.getLogger("worker").warning("%s", warning)
    code = asyncio.run(app.run(settings))
    logging.shutdown()
    # Not sys.exit: a model that hangs in its thread would keep the interpreter from ending.
    os._exit(code)
