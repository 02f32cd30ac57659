"""`kp-worker report`: what scored traces show, what other settings would change, and how well scores tell success.

Heavy imports are inside functions, because `--help` loads this module.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from worker.commands.shared.console import Command, CommandError, require_extra, say, write_json
from worker.commands.shared.options import InputFile, Moment, json_option, read_settings, settings_options
from worker.core.terminal import number_of

if TYPE_CHECKING:
    from worker.commands.report.numbers import Traces
    from worker.commands.shared.placed_verdicts import Standings
    from worker.config import Settings


def _share(_context: click.Context, _option: click.Parameter, text: str | None) -> Fraction | None:
    """Read a share, 0.1 or 10%, exactly. Raises BadParameter."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?|\.\d{1,9})(%?)", (text or "").strip())
    share = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(0)
    if text is not None and not 0 < share <= 1:
        raise click.BadParameter(f"{text!r}: give a share above 0 and up to 1, such as 0.1 or 10%")
    return share or None


@click.command(cls=Command)
@click.argument("files", type=InputFile(), nargs=-1)
@click.option("--from-kafka", is_flag=True, help="Read the accepted and rejected topics instead of files.")
@click.option("--since", type=Moment(), metavar="T", help="With --from-kafka: only records since this time (ISO 8601, "
              "UTC) or age (90m, 2h, 3d).")  # fmt: skip
@click.option("--last", type=click.IntRange(1), metavar="N", help="With --from-kafka: the latest N traces.")
@click.option("--share", metavar="SHARE", callback=_share, help="Propose thresholds that accept this share of each "
              "domain's traces (0.1 or 10%).")  # fmt: skip
@click.option("--outcome", metavar="FIELD", help="Measure how well scores tell success from failure, by the field that "
              "says whether the run succeeded: true, false or 0 to 1; dots for nested fields.")  # fmt: skip
@click.option("--claimed", metavar="FIELD", help="With --outcome: the field with the agent's claim: true, false "
              "(admits failure) or null (counts as true) [all true].")  # fmt: skip
@click.option("--verdicts", metavar="SHARE", callback=_share, help="With --outcome: also measure KP_CONFIDENCE=record, "
              "with simulated verdicts on a random share of the runs (0.1 or 10%).")  # fmt: skip
@click.option("--late", type=click.IntRange(1), metavar="N", help="With --verdicts: number of runs until a verdict "
              "comes [50].")  # fmt: skip
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML page with plots.")
@json_option
@settings_options
def report(
    files: tuple[BinaryIO, ...], from_kafka: bool, since: datetime | None, last: int | None, share: Fraction | None,
    outcome: str | None, claimed: str | None, verdicts: Fraction | None, late: int | None, page: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Show what scored traces are like, what other settings would change, and how well scores tell success.

    FILES have kp-worker's output documents as JSON Lines (- is standard input). With a threshold, profiles or
    confidence in the settings, such as --set threshold=0.7, the traces are scored again, exactly and without a model.
    Documents whose score does not follow from their own figures are then skipped and named. With --outcome, a run is
    scored with the outcome that its agent claims and confidence 0.95, never with the recorded outcome. Exit code 1:
    nothing to count, or a file failed.
    """
    if from_kafka == bool(files):
        raise click.UsageError("pass files of scored traces (-: standard input), or --from-kafka")
    if not from_kafka and (since is not None or last is not None):
        raise click.UsageError("--since and --last require --from-kafka")
    if outcome is None and (claimed is not None or verdicts is not None):
        raise click.UsageError("--claimed and --verdicts require --outcome")
    if outcome is not None and claimed == outcome:
        raise click.UsageError("--claimed and --outcome name the same field: what is recorded is no claim")
    if late is not None and verdicts is None:
        raise click.UsageError("--late requires --verdicts")
    settings = read_settings()
    tried = {"threshold", "profiles", "confidence"} & settings.model_fields_set  # each scores documents again
    by_record = "confidence" in tried and settings.confidence == "record"
    if by_record and outcome is not None and verdicts is None and not from_kafka:
        raise click.UsageError("--outcome with confidence=record requires --verdicts or --from-kafka")
    if page is not None:  # before the documents are read
        require_extra("report")
    from rich.console import Console

    from worker.commands.report.numbers import Traces
    from worker.commands.report.outcomes import Asked, Judging
    from worker.commands.report.view import left_out, print_report, render

    judging = None if verdicts is None else Judging(float(verdicts), late or 50)
    asked = None if outcome is None else Asked(outcome, claimed, judging)
    standings = _standings(settings) if by_record and from_kafka else None
    traces = Traces(settings, rescore=bool(tried) or share is not None, asked=asked, standings=standings)
    with Console(stderr=True).status("reading"):
        if from_kafka:
            source, complete_from = _read_topics(settings, traces, since, last)
        else:
            source, complete_from = _read_files(files, settings, traces), 0
    try:
        with Console(stderr=True).status("counting"):
            result = traces.report(source, last, complete_from, share)
    except CommandError as error:
        raise CommandError(f"{source}: {error.message}") from None
    for line in left_out(result):
        say(line)
    if as_json:
        write_json(result)
    else:
        print_report(result)
    if page is not None:
        content = render(result).encode()
        try:
            page.write_bytes(content)
        except OSError as error:
            raise CommandError(f"{page} cannot be written: {error.strerror}; choose another file (--page)") from None
        say(f"{len(content) // 1000} kB to {page}")


def _read_files(files: tuple[BinaryIO, ...], settings: Settings, traces: Traces) -> str:
    """Read all documents; return what the files are called. Raises CommandError."""
    from worker.commands.shared.json_lines import read_lines

    given = [getattr(file, "name", "<stdin>") for file in files]
    paths = [Path("standard input" if name == "<stdin>" else name) for name in given]
    known = Counter(path.name for path in paths)
    # Without its folders, since a page may be shared, unless two files have the same name.
    traces.files = [path.name if known[path.name] == 1 else str(path) for path in paths]
    for file, name in zip(files, traces.files, strict=True):
        prefix = f"{name}: " if len(files) > 1 else ""
        try:
            for line in read_lines(file, settings.max_message_bytes):
                if line.problem is not None:
                    traces.unreadable.add(f"{prefix}line {line.number}", line.problem)
                elif not line.blank:
                    traces.add(line.data, f"{prefix}line {line.number}", file=name)
        except OSError as error:
            raise CommandError(f"{name} cannot be read: {error.strerror or error}") from None
    return " and ".join(traces.files) if len(files) < 3 else f"{len(files)} files"


def _read_topics(settings: Settings, traces: Traces, since: datetime | None, last: int | None) -> tuple[str, int]:
    """Read the topics; return their names, and the time (ms) from which on they are complete. Raises CommandError."""
    from worker.commands.shared.session import read_topics, run_session

    topics = (settings.accepted_topic, settings.rejected_topic)
    bounds = [f"since {since:%Y-%m-%d %H:%M:%S} UTC"] if since else []
    bounds += [f"the last {last}"] if last else []
    since_ms = None if since is None else round(since.replace(tzinfo=UTC).timestamp() * 1000)
    complete_from = run_session(read_topics(settings, topics, traces.add, since_ms, last))
    return ", ".join([" and ".join(topics), *bounds]), complete_from


def _standings(settings: Settings) -> Standings:
    """Return the track records from all verdicts on KP_JUDGED_TOPIC. Raises CommandError."""
    from worker.commands.shared.placed_verdicts import Standings, read_judged
    from worker.commands.shared.session import run_session
    from worker.kafka.topics import MissingTopicsError

    async def read() -> Standings:
        try:
            return await read_judged(settings)
        except MissingTopicsError:  # no verdict was ever counted
            return Standings()

    standings = run_session(read())
    missing = "" if standings.verdicts else "; without verdicts, a trace that claims success gets 0.5"
    say(f"{number_of(standings.verdicts, 'verdict')} read{missing}")
    return standings
