"""`kp-worker score`: its arguments and options."""

from typing import BinaryIO

import click
from click.shell_completion import CompletionItem

from worker.commands.shared.console import ArgumentError, Command
from worker.commands.shared.options import InputFile, read_settings, settings_options


def complete_directory(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete directories; a model may also be a hub name."""
    return [CompletionItem(incomplete, type="dir")]


@click.command(cls=Command)
@click.argument("files", type=InputFile(samples=True), nargs=-1, required=True)
@click.option("--output", "-o", type=click.File("wb"), default="-", help="Scored documents, as JSON Lines [stdout].")
@click.option("--dead-letters", type=click.File("wb"), help="Invalid lines with the reason, as JSON Lines.")
@click.option("--verdicts", type=InputFile(), metavar="FILE", help="Verdicts to count, as kp-worker verdict takes "
              "them. One with a field after: N counts only after the first N lines.")  # fmt: skip
@click.option("--embedder", type=click.Choice(["auto", "openvino", "sentence-transformers", "http", "none"]),
              help="Overrides KP_EMBEDDER.")  # fmt: skip
@click.option("--model", shell_complete=complete_directory, help="Overrides KP_MODEL.")
@click.option("--redact", type=click.Choice(["off", "accepted", "all"]), help="Overrides KP_REDACT.")
@settings_options
def score(
    files: tuple[BinaryIO, ...], output: BinaryIO, dead_letters: BinaryIO | None, verdicts: BinaryIO | None,
    embedder: str | None, model: str | None, redact: str | None,
) -> None:  # fmt: skip
    """Score JSON Lines files (- is standard input) exactly as the worker scores a topic with one partition.

    A file may have one trace over several lines, or be the word samples for the demo's traces. Takes the settings of
    `kp-worker run`. --verdicts needs KP_CONFIDENCE=record. The summary on standard error counts dead letters, and with
    --redact what was replaced, with an example of each type: each letter of a secret appears as a or A, each digit as
    9. Exit code 1: no line was a valid trace, or the model or a file failed.
    """
    settings = read_settings(embedder=embedder, model=model, redact=redact)
    if verdicts is not None:
        if settings.confidence != "record":
            raise ArgumentError("--verdicts", "changes no score with KP_CONFIDENCE=stated: add --set confidence=record")
        if verdicts.name in [file.name for file in files]:
            raise ArgumentError("--verdicts", "is a file of the traces")
    from worker.commands.score.lines import run_score

    run_score(files, output, dead_letters, verdicts, settings)
