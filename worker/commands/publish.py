"""`kp-worker publish`: the traces of a file, published, with progress, refused lines and counts on standard error.

Must not live here: reading and sending lines (publish_lines.py).
"""

from __future__ import annotations

from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from worker.commands.console import ArgumentError, CommandError, errors_for_the_user, open_file, say, size_of
from worker.commands.json_lines import pretty_printed_hint
from worker.commands.publish_lines import KeyField, PublishCounts, publish_lines
from worker.commands.samples import SAMPLES
from worker.commands.session import Session, run_session
from worker.config import Settings
from worker.core.terminal import clean
from worker.core.trace import InvalidTrace


def run_publish(
    file: str, settings: Settings, *, topic: str, key: KeyField, rate: float | None, validate: bool, redact: bool
) -> int:
    """Publish a file, say how it went, and return the exit code. Raises CommandError, ArgumentError."""
    with errors_for_the_user():
        session = Session(settings)
    source = _open(file)
    console = Console(stderr=True, highlight=False)
    counts = PublishCounts()
    columns = (TextColumn("{task.fields[sent]} sent"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with source, Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("publishing", total=size_of(source), sent=0)

        def on_refused(line: int, error: InvalidTrace) -> None:
            where = Text(clean(f"{file}:{line}: "), "bold")
            why = Text(f"{error.reason}: ", "yellow") + Text(clean(str(error)))
            progress.console.print(where + why, soft_wrap=True)

        interrupted = False
        try:
            with errors_for_the_user():
                run_session(
                    publish_lines(
                        source, session, topic=topic, key=key, rate=rate, validate=validate, redact=redact,
                        counts=counts,
                        on_line=lambda size: progress.update(task, advance=size, sent=counts.sent),
                        on_refused=on_refused,
                    )
                )  # fmt: skip
        except KeyboardInterrupt:
            interrupted = True
        except CommandError as error:
            raise (error.adding(f"; {counts.sent} were published before") if counts.sent else error) from None
    _say_counts(counts, topic, interrupted)
    if counts.pretty_printed:
        say(pretty_printed_hint(file))
    return 130 if interrupted else 1 if counts.refused else 0


def _open(file: str) -> BinaryIO:
    try:
        return open_file(str(SAMPLES) if file == "samples" else file, "rb")
    except OSError as error:
        raise ArgumentError("FILE", f"{file}: {error.strerror}") from None


def _say_counts(counts: PublishCounts, topic: str, interrupted: bool) -> None:
    rate = f", {counts.sent / counts.seconds:.0f}/s" if counts.seconds > 1 else ""
    say(
        f"{counts.sent} trace{'s' * (counts.sent != 1)} published to topic {topic}{rate}, "
        f"{counts.refused} refused" + (", then interrupted" if interrupted else "")
    )
    for kind, count in counts.redactions.items():
        say(f"  {count} {kind} redacted")
