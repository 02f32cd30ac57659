"""Where report and whatif get scored documents from: a file of JSON Lines, or the accepted and rejected topics.

Must not live here: which records of the topics are read (scored_kafka.py), what a document says (scored_documents.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

from worker.commands.console import CommandError, SettingsError
from worker.commands.json_lines import read_lines
from worker.commands.scored_documents import TakeDocument
from worker.config import ConfigError, Settings


class ScoredInput(NamedTuple):
    """What to read: a file, or (None) the topics; of these records from `since` on (UTC), and the `last` ones."""

    file: BinaryIO | None
    since: datetime | None = None
    last: int | None = None

    def described(self, settings: Settings) -> str:
        """Return what is read, for the user: a file without its folders, since a page may be shared."""
        if self.file is not None:
            name = str(getattr(self.file, "name", "<stdin>"))
            return "standard input" if name == "<stdin>" else Path(name).name
        since = [f"since {self.since:%Y-%m-%d %H:%M:%S} UTC"] if self.since else []
        last = [f"the last {self.last}"] if self.last else []
        return ", ".join([f"{settings.accepted_topic} and {settings.rejected_topic}", *since, *last])

    def read(self, settings: Settings, take: TakeDocument, leave_out: Callable[[str, str], None]) -> int:
        """Read all documents; return from which time (ms) on they are complete. Raises CommandError.

        `leave_out` gets the place of a line that is too long, and why it is not read.
        """
        try:
            if self.file is not None:
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
        from worker.commands.scored_kafka import read_outputs

        since_ms = None if self.since is None else round(self.since.replace(tzinfo=UTC).timestamp() * 1000)
        try:
            return asyncio.run(read_outputs(settings, take, since_ms, self.last))
        except ConfigError as error:
            raise SettingsError(str(error)) from None
