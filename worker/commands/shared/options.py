"""Options and arguments shared by several commands: settings, the output format, files.

Heavy imports are inside functions, because `--help` loads this module.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from worker.commands.shared.console import A_DEVICE, is_device, say

if TYPE_CHECKING:
    from worker.config import Loaded, Settings


SAMPLES: Final = Path(__file__).parents[2] / "data" / "demo_traces.jsonl"
"""The file that the word samples names."""


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta.setdefault(__name__, {})[parameter.name] = value


def _keep_assignments(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> None:
    """Keep the values of --set. Raises ConfigError: errors about other arguments might repeat part of a wrong one."""
    if value:
        from worker.config.loading import parse_assignments

        parse_assignments(value)
    _keep(context, parameter, value)


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for settings to a command; `read_settings` takes their values from click's context."""
    options = (
        click.option("--config", type=click.Path(path_type=Path), metavar="FILE", expose_value=False,
                     callback=_keep, help="Config file, TOML [KP_CONFIG]."),
        click.option("--bootstrap-servers", "-b", metavar="HOST:PORT", expose_value=False,
                     callback=_keep, help="Kafka brokers [KP_BOOTSTRAP_SERVERS]."),
        click.option("--group", "-g", "group_id", metavar="NAME", expose_value=False,
                     callback=_keep, help="Consumer group of the worker [KP_GROUP_ID]."),
        click.option("--set", metavar="NAME=VALUE", multiple=True, expose_value=False,
                     callback=_keep_assignments, help="Any setting, as in the config file; may be repeated."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def given_options() -> str:
    """Return the options behind this command's settings, without secrets, for another command that it prints."""
    from worker.config.loading import SECRETS, parse_assignments

    given, words = click.get_current_context().meta[__name__], []
    for option, name in (("--config", "config"), ("-b", "bootstrap_servers"), ("-g", "group_id")):
        if given[name] is not None:
            words += [option, str(given[name])]
    for assignment in given["set"]:
        if not {*parse_assignments([assignment])} & {*SECRETS}:
            words += ["--set", assignment]
    return "".join(f" {shlex.quote(word)}" for word in words)


def load_settings(file: Path | None = None, *, checked: bool = True, **fields: Any) -> Loaded:
    """Read the settings: `fields`, then the command's options, the environment, the config file. Raises ConfigError.

    `file`: a config file that overrides --config and KP_CONFIG; `checked`: see `config.read`.
    """
    from worker import config
    from worker.config.loading import OPTIONS, parse_assignments

    given = click.get_current_context().meta[__name__]
    options = parse_assignments(given["set"]) | {name: given[name] for name in OPTIONS if given[name]}
    return config.read(file or given["config"], options, checked=checked, **fields)


def read_settings(**fields: Any) -> Settings:
    """Read the settings as `load_settings` does, and print warnings. Raises ConfigError."""
    loaded = load_settings(**fields)
    say_warnings(loaded)
    return loaded.settings


def say_warnings(loaded: Loaded) -> None:
    """Write warnings about the settings to standard error."""
    for warning in loaded.warnings:
        say(f"warning: {warning}")


json_option = click.option(
    "--json/--text", "as_json", default=None, help="Output format [JSON when piped].",
    callback=lambda context, parameter, value: not sys.stdout.isatty() if value is None else value,
)  # fmt: skip


class InputFile(click.File):
    """The argument of a command that reads a file; - is standard input. Rejects devices.

    `samples`: the word samples, if no file has this name, is the file of the demo's traces.
    """

    def __init__(self, *, samples: bool = False) -> None:
        super().__init__("rb")
        self._samples = samples

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Open the file. Raises BadParameter."""
        if self._samples and value == "samples" and not Path(value).exists():
            value = str(SAMPLES)
        file = super().convert(value, param, ctx)
        if is_device(file):
            if value != "-":
                file.close()
            self.fail(f"{value!r}: {A_DEVICE}", param, ctx)
        return file


class Moment(click.ParamType):
    """An ISO 8601 time (UTC by default), or an age such as 90m; the value is a datetime in UTC, never before 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the time. Raises BadParameter."""
        if isinstance(value, datetime):  # a default
            return value
        try:
            if age := re.fullmatch(r"([0-9]{1,9})([smhd])", value):
                seconds = time.time() - int(age[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[age[2]]
            else:
                moment = datetime.fromisoformat(value)
                seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            return datetime.fromtimestamp(max(0, round(seconds, 3)), UTC)
        except ValueError:
            example = "give one such as 2026-04-14T08:00Z, or an age such as 90m, 2h, 3d"
            self.fail(f"{value!r} is not a time; {example}", param, ctx)
        except OverflowError as error:
            self.fail(str(error), param, ctx)
