"""`kp-worker evaluate`: how well novelty tells repeated tasks from new ones, or scores tell successes from failures."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from worker.commands.shared.console import ArgumentError, Command, CommandError, require_extra, say, write_line
from worker.commands.shared.options import checked_settings, json_option, settings_options
from worker.core.terminal import clean, clean_json

if TYPE_CHECKING:
    from rich.progress import Progress

    from worker.commands.analysis.novelty import Interval, Row
    from worker.config import Settings

GRID: Final = ("embed_text", "max_tokens", "long_texts", "max_windows", "model", "precision", "embedder")
"""Settings that --grid may vary: those that change vectors."""

BAD_SHOWN: Final = 5


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True)
@click.option("--label", help="Field that names a trace's task; dots for nested fields.")
@click.option("--outcome", metavar="FIELD", help="Instead, measure scores by this field: whether the run succeeded, "
              "true, false or 0 to 1. --label then says which runs to resample together [x_task].")  # fmt: skip
@click.option("--claimed", metavar="FIELD", help="With --outcome: the field that says what the agent claims: true, "
              "false (admits failure) or null (neither, counts as true) [all true].")  # fmt: skip
@click.option("--verdicts", metavar="SHARE", help="With --outcome: also with KP_CONFIDENCE=record and verdicts on this "
              "share of the runs (0.1 or 10%), drawn at random.")  # fmt: skip
@click.option("--late", type=click.IntRange(1), help="With --verdicts: after how many runs a verdict comes [50].")
@click.option("--grid", multiple=True, metavar="NAME=V,V",
              help="Values of a setting to compare: embed_text=whole,objective. May be repeated.")  # fmt: skip
@click.option("--partition-by", metavar="FIELD", help="Also show the AUC with the traces spread over partitions by "
              "this field, such as metadata.agent_id, in random orders.")  # fmt: skip
@click.option(
    "--partitions", type=click.IntRange(1), help="With --partition-by: number of partitions [one for each value]."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of all random choices.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML page with plots.")
@json_option
@settings_options
def evaluate(
    files: tuple[str, ...], label: str | None, outcome: str | None, claimed: str | None, verdicts: str | None,
    late: int | None, grid: tuple[str, ...], partition_by: str | None, partitions: int | None, seed: int,
    page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure how well novelty tells a repeated task from a new one, or scores tell success from failure.

    FILES are traces, JSON Lines, each file in the order of a stream. Traces with the same label are the same task. Each
    file counts as one partition without TTL or capacity; --partition-by shows the effect of a key. Each text is
    embedded once.

    With --outcome, a run is scored as its agent claims it ended, with the confidence 0.95, never as it is recorded.
    """
    if label is None and outcome is None:
        raise click.UsageError("pass --label with the field that names the task, or --outcome with how the run ended")
    if outcome is None and (claimed is not None or verdicts is not None):
        raise click.UsageError("--claimed and --verdicts go with --outcome")
    if outcome is not None and (grid or partition_by is not None):
        raise click.UsageError("--grid and --partition-by go without --outcome")
    if late is not None and verdicts is None:
        raise click.UsageError("--late goes with --verdicts")
    if partitions is not None and partition_by is None:
        raise click.UsageError("--partitions goes with --partition-by")
    for file, count in Counter(map(os.path.normpath, files)).items():
        if count > 1:
            raise ArgumentError("FILES", f"{file} is named {count} times: name each file once")
    choices = [] if outcome is not None else list(_choices(grid))
    if page is not None:  # before the minutes of embedding
        require_extra("report")
    if outcome is not None:
        from worker.commands.analysis.outcomes import run_outcomes

        run_outcomes(
            files, outcome, claimed, label, verdicts, 50 if late is None else late, seed, page, as_json=as_json
        )
        return
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    if label is None:
        raise RuntimeError("this is a bug: there is a label")
    from worker.commands.analysis.labelled import LabelError
    from worker.embed.embedder import ModelError

    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            rows = list(_rows(files, label, partition_by, partitions, seed, choices, progress))
    except (LabelError, ModelError, OSError) as error:
        raise CommandError(str(error)) from None
    if as_json:
        for row in rows:
            write_line(clean_json(msgspec.json.encode(row).decode()))
    else:
        _write_table(rows)
    if page is not None:
        from worker.commands.analysis.page import render_evaluation, write_page

        write_page(render_evaluation(rows, label), page)


def _choices(grid: Sequence[str]) -> Iterator[tuple[Settings, dict[str, object]]]:
    """Yield the settings of each point of the grid, with what is shown of them."""
    axes = []
    for axis in grid:
        name, _, values = axis.partition("=")
        if name not in GRID or not values:
            raise ArgumentError("--grid", f"{axis!r}: give NAME=VALUE,VALUE with a name of {', '.join(GRID)}")
        axes.append([f"{name}={value}" for value in values.split(",")])
    for point in itertools.product(*axes):
        settings = checked_settings(assignments=point).settings
        names = {"embed_text", "max_tokens", *(assignment.partition("=")[0] for assignment in point)}
        if settings.long_texts != "cut":
            names |= {"long_texts", "max_windows"}
        yield settings, {name: getattr(settings, name) for name in GRID if name in names}


def _rows(
    files: Sequence[str], label: str, key: str | None, partitions: int | None, seed: int,
    choices: Sequence[tuple[Settings, dict[str, object]]], progress: Progress,
) -> Iterator[Row]:  # fmt: skip
    """Yield the figures of each file with each choice of settings; `key`: the field to spread over partitions by."""
    from worker.commands.analysis.labelled import LabelError, Vectors, names_apart, numbered, read_labelled
    from worker.commands.analysis.novelty import Row, behind_the_highest, measured, named, spread_figures

    vectors = Vectors()
    for file, name in zip(files, names_apart(files), strict=True):
        traces = read_labelled(file, name, label, choices[0][0].limits, key)
        for text in traces.bad[:BAD_SHOWN]:
            say(f"{traces.name}: {text}")
        if len(traces.bad) > BAD_SHOWN:
            say(f"{traces.name}: {len(traces.bad) - BAD_SHOWN} more lines are no valid trace")
        if len(set(traces.labels)) < 2 or len(set(traces.labels)) == len(traces.labels):
            raise LabelError(
                f"{traces.name}: {len(traces.labels)} traces with {len(set(traces.labels))} labels: there must be at "
                "least two tasks, and a repeat of one"
            )
        labels = numbered(traces.labels)
        rows = []
        for settings, shown in choices:
            bar = progress.add_task(clean(f"{traces.name}: {named(shown)}"), total=len(traces.traces))
            made, cut = vectors.of(traces, settings, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
            spread = None
            if key is not None:
                spread = spread_figures(made, labels, key, numbered(traces.keys), partitions, seed)
            found = measured(made, labels, seed)
            rows.append((Row(traces.name, shown, cut, len(traces.bad), found.figures, spread), found.warm))
            progress.remove_task(bar)
        yield from behind_the_highest(rows)


def _write_table(rows: Sequence[Row]) -> None:
    from worker.commands.analysis.novelty import QUANTILES, named, verdict

    width = max(len(named(row.settings)) for row in rows)
    for file, group in itertools.groupby(rows, key=lambda row: row.file):
        own = list(group)
        first = own[0].figures
        write_line(clean(f"{file}: {first.traces} traces, {first.labels} labels, {first.repeats} repeats"))
        write_line(f"  {'':{width}}  {'AUC warm':18}  {'AUC in order':18}  nearest  pairs   cut")
        for row in own:
            found = row.figures
            write_line(
                f"  {named(row.settings):{width}}  {_text(found.auc_warm):18}  {_text(found.auc_in_order):18}  "
                f"{_short(found.nearest_is_same):7}  {_short(found.auc_pairs):5}  {row.cut:4}"
            )
        head = "  ".join(f"p{100 * quantile:.0f}".ljust(4) for quantile in QUANTILES)
        write_line(f"  {'novelty':{width}}  firsts {head}   repeats {head}".rstrip())
        for row in own:
            firsts, repeats = (
                "  ".join(_short(value) for value in values)
                for values in (row.figures.first_quantiles, row.figures.repeat_quantiles)
            )
            write_line(f"  {named(row.settings):{width}}         {firsts}           {repeats}")
        _write_spread(own, width)
        for sentence in verdict(own):
            write_line(clean(f"  {sentence}"))
        write_line("")


def _write_spread(rows: Sequence[Row], width: int) -> None:
    from worker.commands.analysis.novelty import ORDERS, named
    from worker.commands.shared.shown import shown_text

    spread = rows[0].spread
    if spread is None:
        return
    keys = f"{shown_text(spread.key)}, {spread.keys} keys"
    write_line(clean(f"  AUC in {ORDERS} random orders, keyed by {keys}"))
    write_line(f"  {'':{width}}  {'one partition':18}  {spread.partitions} partitions")
    for row in rows:
        if row.spread is not None:
            write_line(
                f"  {named(row.settings):{width}}  {_text(row.spread.auc_one):18}  {_text(row.spread.auc_spread)}"
            )


def _text(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.3f} {interval.low:.3f}-{interval.high:.3f}"


def _short(interval: Interval | None) -> str:
    return "-" if interval is None else f"{round(interval.value, 2) + 0.0:.2f}"  # no -0.00
