"""The source of scored documents for `report` and `whatif`: a file, standard input, or the topics.

Heavy imports are inside functions, because `--help` loads this module.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import click

from worker.commands.shared.console import CommandError, SettingsError
from worker.commands.shared.options import InputFile, Moment

if TYPE_CHECKING:
    from worker.commands.shared.scored_topics import TakeDocument
    from worker.config import Settings


def scored_documents_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the options that select scored documents to a command; see `scored_input`."""
    options = (
        click.argument("file", type=InputFile(), required=False),
        click.option("--from-kafka", is_flag=True, help="Read the accepted and rejected topics instead of a file."),
        click.option("--since", type=Moment(), metavar="T",
                     help="With --from-kafka: only records since this time (ISO 8601, UTC) or age (90m, 2h, 3d)."),
        click.option("--last", type=click.IntRange(1), metavar="N", help="With --from-kafka: the latest N traces."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def scored_input(file: BinaryIO | None, *, from_kafka: bool, since: datetime | None, last: int | None) -> ScoredInput:
    """Return the source of the scored documents. Raises UsageError for incompatible options."""
    if from_kafka == (file is not None):
        raise click.UsageError("pass a file of scored traces (-: standard input), or --from-kafka")
    if not from_kafka and (since is not None or last is not None):
        raise click.UsageError("--since and --last require --from-kafka")
    return ScoredInput(file, since, last)


class ScoredInput(NamedTuple):
    """The documents to read."""

    file: BinaryIO | None  # None: the topics
    since: datetime | None = None  # only records of the topics since this time (UTC)
    last: int | None = None  # only this many of them, the latest

    def described(self, settings: Settings) -> str:
        """Name the source for the user: a file without its folders, since a page may be shared."""
        if self.file is not None:
            name = str(getattr(self.file, "name", "<stdin>"))
            return "standard input" if name == "<stdin>" else Path(name).name
        since = [f"since {self.since:%Y-%m-%d %H:%M:%S} UTC"] if self.since else []
        last = [f"the last {self.last}"] if self.last else []
        return ", ".join([f"{settings.accepted_topic} and {settings.rejected_topic}", *since, *last])

    def read(self, settings: Settings, take: TakeDocument, leave_out: Callable[[str, str], None]) -> int:
        """Read all documents; return the time (ms) from which on they are complete. Raises CommandError.

        `leave_out` gets the place of each line that is too long, and the reason.
        """
        try:
            if self.file is not None:
                from worker.commands.shared.json_lines import read_lines

                for line in read_lines(self.file, settings.max_message_bytes):
                    if line.problem is not None:
                        leave_out(f"line {line.number}", line.problem)
                    elif line.data.strip():
                        take(line.data, f"line {line.number}", 0)
                return 0
            return self._read_topics(settings, take)
        except OSError as error:
            raise CommandError(f"{self.described(settings)} cannot be read: {error.strerror or error}") from None

    def _read_topics(self, settings: Settings, take: TakeDocument) -> int:
        import asyncio

        from worker.commands.shared.scored_topics import read_outputs
        from worker.config import ConfigError

        since_ms = None if self.since is None else round(self.since.replace(tzinfo=UTC).timestamp() * 1000)
        try:
            return asyncio.run(read_outputs(settings, take, since_ms, self.last))
        except ConfigError as error:
            raise SettingsError(str(error)) from None
