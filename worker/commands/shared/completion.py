"""What a shell completes where click cannot know it: the values of arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem

SAMPLES_WORD: Final = "samples"


def complete_reason(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the reasons for a dead letter."""
    from worker.core.trace import Reason

    return [reason for reason in Reason if reason.startswith(incomplete)]


def complete_traces(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the word samples where no file begins so; otherwise let the shell complete files.

    Not both: bash completes files only where there is no word.
    """
    if incomplete and SAMPLES_WORD.startswith(incomplete) and not any(Path().glob(f"{incomplete}*")):
        return [CompletionItem(SAMPLES_WORD)]
    return [CompletionItem(incomplete, type="file")]


def complete_directory(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell add directories: a model may also be a name of the hub."""
    return [CompletionItem(incomplete, type="dir")]
