"""What all commands share: settings, errors with their exit codes, lines on standard error, files.

It imports what is heavy inside functions: `--help` loads this module.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, cast

import click

from worker.core.terminal import clean, clean_json_bytes
from worker.version import install_extra

if TYPE_CHECKING:
    from rich.console import Console

    from worker.config import Loaded, Settings

A_DEVICE = "it is a device, which may have no end; give a file or a pipe"

PIPE_WIDTH = 100_000
"""Columns where standard output is no terminal: who reads it cuts or wraps lines as needed."""


class CommandError(click.ClickException):
    """The command failed, with a message for the user: exit code 1."""

    def adding(self, text: str) -> CommandError:
        """Return the same error with a longer message."""
        return type(self)(self.message + text)


class SettingsError(CommandError):
    """Wrong settings or topics: exit code 2, as for wrong options."""

    exit_code = 2


class ArgumentError(click.BadParameter):
    """A wrong argument or option: exit code 2, with the command's usage."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message, param_hint=name)


class Command(click.Command):
    """A command whose errors repeat no argument that it does not take: `--set sasl_password SECRET` has one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            ctx.fail(
                f"{len(rest)} argument{'s' * (len(rest) != 1)} too many (not shown, since a secret may be among them); "
                "a setting is given by --set NAME=VALUE"
            )
        return rest


class CommandGroup(click.Group):
    """The group of all commands. Errors quote files, brokers and arguments, so they are cleaned here, in one place."""

    command_class = Command
    group_class = type

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command as click does; exit, unless `standalone_mode` is false."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            message = io.StringIO()
            error.show(message)
            click.echo(clean(message.getvalue(), "\n"), err=True, nl=False)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("Aborted!", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Turn the errors of a command's Kafka work into one line and exit code 1, or 2 for settings and topics."""
    from worker.commands.shared.session import SessionError
    from worker.config import ConfigError

    try:
        yield
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    except BrokenPipeError:
        raise
    except (SessionError, OSError) as error:
        raise CommandError(str(error)) from None


def _remember(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(context: click.Context, _: click.Parameter, value: Any) -> None:
        context.meta[f"{__name__}.{name}"] = value

    return keep


def _remember_assignments(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> None:
    """Keep the values of --set; refuse a wrong one before an error about another argument repeats part of it."""
    if value:
        from worker.config.sources import SourceError, parse_assignments

        try:
            parse_assignments(value)
        except SourceError as error:
            raise SettingsError(str(error)) from None
    _remember("set")(context, parameter, value)


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that set settings; `read_settings` takes them from click's context."""
    options = (
        click.option("--config", type=click.Path(path_type=Path), metavar="FILE", expose_value=False,
                     callback=_remember("config"), help="Config file, TOML [KP_CONFIG]."),
        click.option("--bootstrap-servers", "-b", metavar="HOST:PORT", expose_value=False,
                     callback=_remember("bootstrap_servers"), help="Kafka brokers [KP_BOOTSTRAP_SERVERS]."),
        click.option("--group", "-g", metavar="NAME", expose_value=False,
                     callback=_remember("group_id"), help="Consumer group of the worker [KP_GROUP_ID]."),
        click.option("--set", metavar="NAME=VALUE", multiple=True, expose_value=False,
                     callback=_remember_assignments, help="Any setting, as in the config file; may be repeated."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def load_settings(file: Path | None = None, *, assignments: Sequence[str] = (), **fields: Any) -> Loaded:
    """Read the settings: `fields`, then the command's options, the environment, the config file. Raises ConfigError.

    `file` is a config file that wins over --config and KP_CONFIG; `assignments` are NAME=VALUE, behind those of --set.
    """
    from worker import config
    from worker.config.sources import OPTIONS, SourceError, parse_assignments

    meta = click.get_current_context().meta
    given = {name: meta.get(f"{__name__}.{name}") for name in ("config", "set", *OPTIONS)}
    try:
        options = parse_assignments([*(given["set"] or ()), *assignments])
    except SourceError as error:
        raise config.ConfigError(str(error)) from None
    options |= {name: given[name] for name in OPTIONS if given[name]}
    return config.read(file or given["config"], options, **fields)


def read_settings(**fields: Any) -> Settings:
    """Read the settings as `load_settings` does, and warn of what is odd. Raises SettingsError."""
    loaded = checked_settings(**fields)
    say_warnings(loaded)
    return loaded.settings


def checked_settings(file: Path | None = None, *, assignments: Sequence[str] = (), **fields: Any) -> Loaded:
    """Read the settings as `load_settings` does. Raises SettingsError."""
    from worker.config import ConfigError

    try:
        return load_settings(file, assignments=assignments, **fields)
    except ConfigError as error:
        raise SettingsError(str(error)) from None


def say_warnings(loaded: Loaded) -> None:
    """Write what is odd about the settings, and no error, to standard error."""
    for warning in loaded.warnings:
        say(f"warning: {warning}")


@contextmanager
def report_libraries() -> Iterator[None]:
    """Turn a missing library of the `report` extra into a CommandError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2", "markupsafe"):
            raise
        raise CommandError(f"{error.name} is not installed; {install_extra('report')}") from None


def say(text: str) -> None:
    """Write lines to standard error."""
    click.echo(clean(text, "\n"), err=True)


def say_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback of a bug, cleaned: it may quote a record, too."""
    say("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def write_line(text: str, label: str = "", colour: str | None = None) -> None:
    """Write a line to standard output, after a label that has the colour on a terminal."""
    click.echo((click.style(label, colour) if label else "") + text)


def text_console() -> Console:
    """Return a console for texts and tables on standard output; it cuts and wraps lines on a terminal only."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


class _JsonForTerminal:
    """A binary file that gets the same JSON Lines, in a form that cannot control a terminal."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(clean_json_bytes(data))


def json_output(file: BinaryIO) -> BinaryIO:
    """Return what to write JSON Lines to: a terminal gets them cleaned, a file or pipe gets them to the byte."""
    return cast("BinaryIO", _JsonForTerminal(file)) if file.isatty() else file


def open_file(path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
    """Open a file; - is standard input or output, which stays open. Raises OSError, also for a device to read from."""
    file = cast("BinaryIO", click.open_file(path, mode))
    if mode == "rb" and is_device(file):
        with file:
            raise OSError(errno.ENODEV, A_DEVICE, path)
    return file


class InputFile(click.File):
    """The argument of a command that reads a file; - is standard input. Refuses a device."""

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Open the file. Raises BadParameter."""
        file = super().convert(value, param, ctx)
        if is_device(file):
            if value != "-":
                file.close()
            self.fail(f"{value!r}: {A_DEVICE}", param, ctx)
        return file


def is_device(file: IO[Any]) -> bool:
    """Whether an open file is a device, which may have no end; a terminal and /dev/null have one."""
    try:
        found = os.fstat(file.fileno())
    except (OSError, ValueError):  # no file behind it
        return False
    character = stat.S_ISCHR(found.st_mode) and not file.isatty() and found.st_rdev != os.stat(os.devnull).st_rdev
    return character or stat.S_ISBLK(found.st_mode)


def size_of(file: BinaryIO) -> int | None:
    """Return the size of an open file, bytes; None for a pipe."""
    try:
        return os.fstat(file.fileno()).st_size if file.seekable() else None
    except OSError:  # no file behind it
        return None


def discard_buffered(*files: BinaryIO | None) -> None:
    """Discard what is still buffered: closing the files would fail with the same error again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        if file is not None:
            os.dup2(nowhere, file.fileno())
