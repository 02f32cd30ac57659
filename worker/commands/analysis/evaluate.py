"""`kp-worker evaluate`: how well novelty tells repeated tasks from new ones, or scores tell successes from failures."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from worker.commands.shared.console import ArgumentError, Command, require_extra
from worker.commands.shared.options import checked_settings, json_option, page_option, settings_options

if TYPE_CHECKING:
    from worker.config import Settings

GRID: Final = ("embed_text", "max_tokens", "model", "precision", "embedder")
"""Settings that --grid may vary: those that affect vectors."""


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True)
@click.option("--label", metavar="FIELD", help="Field that names a trace's task; dots for nested fields.")
@click.option("--outcome", metavar="FIELD", help="Measure scores instead, by the field that says whether the run "
              "succeeded: true, false or 0 to 1. --label then names runs to resample together [x_task].")  # fmt: skip
@click.option("--claimed", metavar="FIELD", help="With --outcome: the field with the agent's claim: true, false "
              "(admits failure) or null (counts as true) [all true].")  # fmt: skip
@click.option("--verdicts", metavar="SHARE", help="With --outcome: also measure KP_CONFIDENCE=record, with verdicts "
              "on a random share of the runs (0.1 or 10%).")  # fmt: skip
@click.option("--late", type=click.IntRange(1), metavar="N", help="With --verdicts: number of runs until a verdict "
              "comes [50].")  # fmt: skip
@click.option("--grid", multiple=True, metavar="NAME=V,V", help="Values of a setting to compare, such as "
              "embed_text=whole,objective; may be repeated.")  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, metavar="N", help="Seed of all random choices.")
@page_option
@json_option
@settings_options
def evaluate(
    files: tuple[str, ...], label: str | None, outcome: str | None, claimed: str | None, verdicts: str | None,
    late: int | None, grid: tuple[str, ...], seed: int, page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure how well novelty tells a repeated task from a new one, or scores tell success from failure.

    FILES have traces as JSON Lines, in the order of a stream. Traces with the same label are the same task. Each file
    is one partition without limits of age or number.

    With --outcome, a run is scored with the outcome that its agent claims and confidence 0.95, never with the recorded
    outcome.
    """
    if label is None and outcome is None:
        raise click.UsageError(
            "pass --label with the field that names the task, or --outcome with the field that says how the run ended"
        )
    if outcome is None and (claimed is not None or verdicts is not None):
        raise click.UsageError("--claimed and --verdicts require --outcome")
    if outcome is not None and claimed == outcome:
        raise click.UsageError("--claimed and --outcome name the same field: what is recorded is no claim")
    if outcome is not None and grid:
        raise click.UsageError("--grid cannot be used with --outcome")
    if late is not None and verdicts is None:
        raise click.UsageError("--late requires --verdicts")
    for file, count in Counter(map(os.path.normpath, files)).items():
        if count > 1:
            raise ArgumentError("FILES", f"{file} is named {count} times; name each file once")
    choices = [] if outcome is not None else list(_choices(grid))
    if page is not None:  # before the minutes of embedding
        require_extra("report")
    if outcome is not None:
        from worker.commands.analysis.outcomes import run_outcomes

        run_outcomes(files, outcome, claimed, label, verdicts, late or 50, seed, page, as_json=as_json)
    elif label is not None:
        from worker.commands.analysis.labelled import run_repeats

        run_repeats(files, label, seed, choices, page, as_json=as_json)


def _choices(grid: Sequence[str]) -> Iterator[tuple[Settings, dict[str, object]]]:
    """Yield the settings of each point of the grid, with the values to show."""
    axes = []
    for axis in grid:
        name, _, values = axis.partition("=")
        if name not in GRID or not values:
            raise ArgumentError("--grid", f"{axis!r}: give NAME=VALUE,VALUE with a name of {', '.join(GRID)}")
        axes.append([f"{name}={value}" for value in values.split(",")])
    for point in itertools.product(*axes):
        settings = checked_settings(assignments=point).settings
        names = {"embed_text", "max_tokens", *(assignment.partition("=")[0] for assignment in point)}
        yield settings, {name: getattr(settings, name) for name in GRID if name in names}
