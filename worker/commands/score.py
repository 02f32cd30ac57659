"""`kp-worker score`: a JSON Lines file, scored, with its progress and counts on standard error.

Must not live here: scoring the lines (score_file.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from worker.commands.console import CommandError, discard_buffered, json_output, say, size_of
from worker.commands.json_lines import pretty_printed_hint
from worker.commands.score_file import score_lines
from worker.config import Settings
from worker.embed.embedder import ModelError
from worker.embed.load import load_configured


def run_score(file: BinaryIO, output: BinaryIO, dead_letters: BinaryIO | None, settings: Settings) -> None:
    """Score a file and say how many traces came out which way. Raises CommandError, also where none was valid."""
    console = Console(stderr=True)
    try:
        with console.status("loading the model"):
            embedder = load_configured(settings)
        with _progress(console, size_of(file)) as on_line:
            counts = score_lines(
                file, json_output(output), dead_letters and json_output(dead_letters), settings, embedder, on_line
            )
        for written in (output, dead_letters):
            if written is not None:
                written.flush()  # a full disk shows here at the latest, and not in a traceback at the end
    except ModelError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        discard_buffered(output, dead_letters)
        if isinstance(error, BrokenPipeError):  # the reader of the pipe has closed it
            sys.exit(1)
        raise CommandError(f"cannot read or write: {error}") from None
    dead = sum(counts.dead_letters.values())
    total = counts.accepted + counts.rejected + dead
    say(
        f"{_number(total, 'trace')}: {counts.accepted} accepted, {counts.rejected} rejected, "
        f"{_number(dead, 'dead letter')}, {_number(counts.truncated, 'text')} truncated at {settings.max_tokens} tokens"
    )
    for reason, count in sorted(counts.dead_letters.items()):
        say(f"  {count} {reason}")
    for kind, count in counts.redactions.items():
        say(f"  {count} {kind} redacted")
    for problem in counts.too_long:
        say(f"{file.name}: {problem}")
    if counts.pretty_printed:
        raise CommandError(pretty_printed_hint(file.name))
    if dead and not counts.scores:
        raise CommandError(
            "no line of the file is a valid trace; write them with their reasons: --dead-letters BAD.jsonl"
        )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


@contextmanager
def _progress(console: Console, size: int | None) -> Iterator[Callable[[int], None]]:
    """Show the progress on a terminal; the value takes the size of each line, bytes."""
    columns = (TextColumn("scoring"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("scoring", total=size)
        yield lambda count: progress.advance(task, count)
