"""The command line: every command's name, where it is defined and what it does; a command is imported when it runs."""

import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from worker.commands.shared.console import Command, CommandGroup, ending_in_order, say_last, say_traceback
from worker.observe.logs import BareFormatter
from worker.version import version_with_commit

_HELP: Final = {
    "run": "Run the worker until SIGTERM or Ctrl-C.",
    "contribute": "Post accepted traces to the registry until SIGTERM or Ctrl-C, redacted, each once.",
    "assemble": "Make traces from OpenTelemetry spans until SIGTERM or Ctrl-C, one for each run of an agent.",
    "score": "Score JSON Lines files (- is standard input) exactly as the worker scores a topic with one partition.",
    "fetch-model": "Fetch a model's weights and export them for the OpenVINO runtime.",
    "demo": "Show the whole worker: embedded Kafka, sample traces, real scores, explained.",
    "broker": "Run the embedded Kafka broker alone until Ctrl-C, to try things out.",
    "explain": "Explain one score, step by step.",
    "topics": "Compare the topics with what the worker needs, or create them.",
    "doctor": "Check what a worker needs; change nothing.",
    "config": "Check and show the settings: options, environment variables, config file, defaults.",
    "report": "Show what scored traces are like, what other settings would change, and how well scores tell success.",
    "publish": "Publish the traces of JSON Lines files, or the sessions of coding agents, to the source topic.",
    "tail": "Show scored traces as they arrive: a table on a terminal, JSON Lines in a pipe.",
    "redrive": "Send dead letters back to the source topic, each exactly once, or write them to a file.",
    "verdict": "Say whether traces succeeded: write a signed verdict for each line of a JSON Lines file.",
    "convert": "Convert agents' logs to reasoning traces: JSON Lines on standard output, to be piped to publish.",
}

_PLACES: Final = {
    "contribute": "worker.commands.run:contribute",
    "assemble": "worker.commands.run:assemble",
    "fetch-model": "worker.commands.model:fetch_model",
    "demo": "worker.lab.demo:demo",
    "broker": "worker.lab.broker:broker",
}
"""Where a command is defined, unless it is worker.commands.NAME:NAME."""

COMMANDS: Final = {name: (_PLACES.get(name, f"worker.commands.{name}:{name}"), text) for name, text in _HELP.items()}
"""Each command: module:attribute, and the first sentence of its help."""


INTERRUPTED: Final = 128 + 2
"""Exit code after Ctrl-C: that of any other tool, which SIGINT (2) ends."""


def main() -> NoReturn:
    """Run the command line."""
    # One cache scan takes 20 us on one core. OpenBLAS would spread it over all cores: the synchronisation costs more
    # than that, and takes time from the embedder's threads. Must be set before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by who started the command
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = say_traceback
    if logging.lastResort is not None:  # where no handler is set up: every command but run
        logging.lastResort.setFormatter(BareFormatter())
    cli(prog_name="kp-worker")
    sys.exit(0)


class CommandLine(CommandGroup):
    """All commands, each a stub of the table until it is resolved; and their errors.

    Help and completion show the stubs, so they import no command.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command as click does, and import it. Raises UsageError where there is none."""
        name, stub, rest = super().resolve_command(ctx, args)
        if name is None or stub is None:
            return name, stub, rest
        module, _, attribute = COMMANDS[name][0].partition(":")
        return name, getattr(import_module(module), attribute), rest

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command as click does; exit, unless `standalone_mode` is false.

        Errors quote files, brokers and arguments, so they are cleaned here, in one place.
        """
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            with ending_in_order():
                code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.exceptions.Exit as end:
            code = end.exit_code
        except click.ClickException as error:
            message = io.StringIO()
            error.show(message)
            say_last(message.getvalue().expandtabs(4).removesuffix("\n"))  # click indents by tabs
            sys.exit(error.exit_code)
        except click.Abort:  # Ctrl-C
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _show_version(context: click.Context, _parameter: click.Parameter, given: bool) -> None:
    if given and not context.resilient_parsing:
        click.echo(f"kp-worker {version_with_commit()}")
        context.exit()


@click.group(
    cls=CommandLine,
    commands=[Command(name, help=text) for name, (_, text) in COMMANDS.items()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, help="Show the version and exit.",
    callback=_show_version,
)  # fmt: skip
@click.pass_context
def cli(context: click.Context) -> None:
    """Score KnowledgePulse reasoning traces on a Kafka stream, exactly once.

    Settings come from options, environment variables (KP_...) and a config file (TOML), in this order; `kp-worker run
    --help` lists them.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":  # as rich does
        context.color = False
