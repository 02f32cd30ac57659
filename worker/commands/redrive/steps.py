"""A run of `kp-worker redrive`: dead letters back to their topics, each exactly once, or into a file.

A redriven dead letter is marked by a record on the topic `<group>-redriven` (marks.py), in the same
transaction as the record on its topic.

The order of steps carries the guarantee:
 1. start the producer `<group>-redrive`: this aborts what a killed run left open, and fences one that still runs;
 2. read the marks, up to their end: all of what earlier runs committed, and nothing else;
 3. read the dead letters up to their end; for those that match, have no mark and are not refused, a transaction at a
    time: a. begin, b. send records and marks and await every acknowledgement, c. commit.
Killed anywhere before 3c has taken effect, a transaction is invisible (the worker reads committed records) and its dead
letters are without marks; after it, record and mark are both there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from worker.commands.redrive.counts import Progress
from worker.commands.redrive.dead_letters import Selection, open_source, source_topics
from worker.commands.redrive.transaction import RedrivenRecord, Transactions, redriven_record
from worker.commands.shared.console import json_output, naming
from worker.commands.shared.redrive_marks import find_marks_topic, marks_topic
from worker.commands.shared.session import Session, SessionError, Topic
from worker.config import ConfigError
from worker.kafka.reading.dead_letters import as_json
from worker.kafka.writing.producer import Producer

MAX_RECORDS: Final = 500
MAX_BYTES: Final = 8 << 20
"""Most records and bytes of one transaction: a commit costs the same for 1 or 500, and more would only hold memory."""


@dataclass(frozen=True, slots=True)
class Redrive:
    """One run over the dead-letter topic."""

    session: Session
    selection: Selection
    max_redrives: int
    progress: Progress

    async def preview(self, *, for_file: bool = False) -> None:
        """Count as `to_source` (or `to_file`) would, and change nothing."""
        if for_file:
            await self._write(None)
            return
        sources, marks = await self._topics(create=False)
        async with open_source(self.session, self.selection, self.progress, marks) as dead_letters:
            async for whole in dead_letters.to_redrive(self.max_redrives):
                with self.progress.refusing(whole.letter):
                    redriven_record(whole, sources)
                    self.progress.counts.count_done(whole.letter)

    async def to_file(self, path: str) -> None:
        """Write the dead letters that match and were not redriven as JSON Lines, also those that failed too often.

        - is standard output.
        """
        with contextlib.nullcontext(sys.stdout.buffer) if path == "-" else _whole_file(Path(path)) as output:
            await self._write(json_output(output))

    async def _write(self, output: BinaryIO | None) -> None:
        _, marks = await self._topics(create=False)
        async with open_source(self.session, self.selection, self.progress, marks) as dead_letters:
            async for letter in dead_letters.unmarked():
                with self.progress.refusing(letter):
                    whole = await dead_letters.whole(letter)
                    if output is not None:
                        output.write(as_json(letter, whole.key, whole.value, whole.headers) + b"\n")
                    self.progress.counts.count_done(letter)

    async def to_source(self) -> None:
        """Re-drive: the steps of the module's head."""
        sources, marks = await self._topics(create=self.session.settings.create_topics)
        if marks is None:
            raise ConfigError(
                f"topic {marks_topic(self.session.settings)} is missing: it records what was redriven. Create it "
                "with one partition and cleanup.policy=compact, or set KP_CREATE_TOPICS=true"
            )
        producer = self._producer()
        transactions = Transactions(self.session, producer, marks, self.progress)
        async with (
            self.session.connected(producer),  # 1
            open_source(self.session, self.selection, self.progress, marks) as dead_letters,  # 2
        ):
            batch: list[RedrivenRecord] = []
            size = 0
            async for whole in dead_letters.to_redrive(self.max_redrives):  # 3
                with self.progress.refusing(whole.letter):
                    batch.append(redriven_record(whole, sources))
                    size += len(whole.value or b"")
                if len(batch) >= MAX_RECORDS or size >= MAX_BYTES:
                    await transactions.commit(batch)
                    batch, size = [], 0
            if batch:
                await transactions.commit(batch)

    def _producer(self) -> Producer:
        settings = self.session.settings
        return Producer(self.session.client, f"{settings.group_id}-redrive", settings.transaction_timeout_seconds)

    async def _topics(self, *, create: bool) -> tuple[dict[str, Topic], Topic | None]:
        """Return the topics that records go back to, and that of the marks (None: missing). Raises ConfigError.

        The source topic is among them, and of those with spans, which only `assemble` needs, the ones that exist.
        """
        settings = self.session.settings
        await self.session.existing(settings.dead_letter_topic, settings.source_topic)
        async with self.session.admin() as admin:
            sources = await self.session.topics(admin, *source_topics(settings))
        self.progress.counts.compare_with_retention({name: topic.retention_ms for name, topic in sources.items()})
        return sources, await find_marks_topic(self.session, create_missing=create)


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that is there as a whole or not at all. Raises SessionError where there is one already."""
    if path.is_file():
        raise SessionError(f"{path} exists; remove it, or name another file")
    if path.exists():
        raise SessionError(f"{path} is no file; name a new one, or - for standard output")
    part = path.with_name(f"{path.name}.part")
    try:
        with naming(part), part.open("wb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
