"""`kp-worker redrive`: its options and messages; steps.py does the work."""

import sys
from datetime import datetime

import click

from worker.commands.shared.console import ArgumentError, Command
from worker.commands.shared.options import Moment, read_settings, settings_options


def complete_reason(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the reasons for a dead letter."""
    from worker.commands.redrive.steps import OF_CLOSED_RUNS
    from worker.core.trace import Reason

    return [reason for reason in Reason if reason.startswith(incomplete) and reason not in OF_CLOSED_RUNS]


@click.command(cls=Command)
@click.option("--reason", "reasons", multiple=True, shell_complete=complete_reason, metavar="REASON",
              help="Only dead letters with this reason; may be repeated.")  # fmt: skip
@click.option("--since", type=Moment(), metavar="T",
              help="Only source records since this time (ISO 8601, UTC) or age (90m, 2h, 3d).")  # fmt: skip
@click.option("--until", type=Moment(), metavar="T", help="Only source records before this time.")
@click.option("--partition", type=click.IntRange(0), metavar="N", help="Only this partition of the dead-letter topic.")
@click.option("--offset", metavar="A:B", help="Only offsets from A up to, but not including, B; also A:, :B or A.")
@click.option("--max-redrives", type=click.IntRange(1), default=3, show_default=True, metavar="N",
              help="Refuse dead letters that were redriven N times.")  # fmt: skip
@click.option("--to-source", is_flag=True, help="Publish to the topics of their source records [the default].")
@click.option("--to-file", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE",
              help="Write them to this new file instead, as JSON Lines; - is standard output.")  # fmt: skip
@click.option("--refused", is_flag=True,
              help="Send traces that the registry refused: from <accepted>.refused to the accepted topic.")  # fmt: skip
@click.option("--execute", is_flag=True, help="Do it; otherwise only show what would be done.")
@settings_options
def redrive(
    reasons: tuple[str, ...], since: datetime | None, until: datetime | None, partition: int | None, offset: str | None,
    max_redrives: int, to_source: bool, to_file: str | None, refused: bool, execute: bool,
) -> None:  # fmt: skip
    """Send dead letters back to the source topic, each exactly once, or write them to a file.

    Spans that `kp-worker assemble` could not read go back to their own topic. You may kill the command and run it again
    at any time: it marks redriven dead letters in the same transaction. Exit code 1: some dead letters were refused, or
    it failed.
    """
    if to_source and to_file is not None:
        raise click.UsageError("--to-source and --to-file cannot be used together")
    settings = read_settings()
    from worker.commands.redrive.steps import OF_CLOSED_RUNS, Redrive, parse_offsets, run_redrive
    from worker.commands.shared.session import Session
    from worker.core.trace import Reason
    from worker.observe.metrics import REFUSAL_REASONS

    allowed = REFUSAL_REASONS if refused else tuple(reason for reason in Reason if reason not in OF_CLOSED_RUNS)
    for reason in reasons:
        if reason not in allowed:
            raise ArgumentError("--reason", f"{reason!r} is not one of {', '.join(allowed)}")
    if offset is not None and partition is None:
        raise click.UsageError("--offset needs --partition: offsets are per partition")
    try:
        offsets = (0, None) if offset is None else parse_offsets(offset)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    since_ms, until_ms = (None if time is None else round(time.timestamp() * 1000) for time in (since, until))
    if refused:  # back to the accepted topic; the marks of refused traces are on their own topic
        settings = settings.model_copy(
            update={
                "group_id": settings.contribute_group,
                "source_topic": settings.accepted_topic,
                "dead_letter_topic": settings.refused,
            }
        )
    run = Redrive(
        Session(settings), frozenset(reasons), since_ms, until_ms, partition, offsets, max_redrives, to_file, execute
    )
    run_redrive(run)
    sys.exit(1 if execute and run.refused else 0)
