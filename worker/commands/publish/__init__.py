"""`kp-worker publish`: its arguments and options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
from click.shell_completion import CompletionItem

from worker.commands.shared.console import Command
from worker.commands.shared.options import read_settings, settings_options
from worker.runs.sessions.session import FORMATS

if TYPE_CHECKING:
    from worker.commands.publish.send import KeyField
    from worker.config import Settings
    from worker.core.records import Clean

SAMPLES_WORD: Final = "samples"

REDACTIONS: Final = ("strict", "reference", "off")


def complete_traces(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the word samples if no file begins like this; otherwise let the shell complete files.

    Not both: bash completes files only if there is no word.
    """
    if incomplete and SAMPLES_WORD.startswith(incomplete) and not any(Path().glob(f"{incomplete}*")):
        return [CompletionItem(SAMPLES_WORD)]
    return [CompletionItem(incomplete, type="file")]


class _Publish(Command):
    """Accepts --redact with or without a value: in `publish --redact FILE` it has none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError."""
        given = [
            "--redact=on" if arg == "--redact" and following not in REDACTIONS else arg
            for arg, following in zip(args, [*args, ""][1:], strict=True)
        ]
        return super().parse_args(ctx, given)


@click.command(cls=_Publish)
@click.argument("files", nargs=-1, shell_complete=complete_traces)
@click.option("--topic", help="Topic to publish to [KP_SOURCE_TOPIC].")
@click.option("--key", type=click.Choice(["agent", "id", "domain", "none"]), default="agent", show_default=True,
              help="The record's key: metadata.agent_id, id, metadata.task_domain or none.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="N", help="Send at most N traces a second.")
@click.option("--no-validate", is_flag=True, help="Send every line without validation.")
@click.option("--redact", type=click.Choice([*REDACTIONS, "on"]), metavar="[strict|reference|off]",
              help="Replace secrets and personal data with markers before sending, by these rules; without a value, "
              "by KP_REDACT_RULES [off; with --follow strict].")  # fmt: skip
@click.option("--follow", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="Publish the requests in the session files (*.jsonl) below DIR as they are written; needs --from, "
              "--confidence, --domain, --visibility and --privacy.")  # fmt: skip
@click.option("--from", "form", type=click.Choice(("claude-code", "codex")),  # they write a session to one file
              help="With --follow: the agent that writes the sessions.")  # fmt: skip
@click.option("--idle-minutes", type=click.FloatRange(0, min_open=True), metavar="N",
              help="With --follow: close a request after N minutes without a new line [60].")  # fmt: skip
@click.option("--name", metavar="TEXT", help="With --follow: a process stops when another one starts with the same "
              "name [host and folder].")  # fmt: skip
@click.option("--success", metavar="VALUE", help="With --follow: as for convert [the session's outcome].")
@click.option("--confidence", metavar="VALUE", help="With --follow: 0 to 1, or @fact of the session.")
@click.option("--domain", metavar="VALUE", help="With --follow: metadata.task_domain, or @fact.")
@click.option("--visibility", metavar="VALUE", help="With --follow: private, org or network.")
@click.option("--privacy", metavar="VALUE", help="With --follow: aggregated, federated or private.")
@click.option("--agent-id", metavar="VALUE", help="With --follow: metadata.agent_id, or @fact [the agent's name].")
@click.option("--max-content", type=click.IntRange(1), metavar="N", help="With --follow: truncate each step's content "
              "at N characters.")  # fmt: skip
@click.option("--keep", multiple=True, metavar="NAME=@FACT",
              help="With --follow: copy a fact of the session to the trace as NAME; may be repeated.")  # fmt: skip
@settings_options
def publish(
    files: tuple[str, ...], topic: str | None, key: KeyField, rate: float | None, no_validate: bool,
    redact: Literal["strict", "reference", "off", "on"] | None, follow: Path | None, form: str | None,
    idle_minutes: float | None, name: str | None, max_content: int | None, keep: tuple[str, ...],
    **values: str | None,
) -> None:  # fmt: skip
    """Publish the traces of JSON Lines files, or the sessions of coding agents, to the source topic.

    A file may be - for standard input, or the word samples for the demo's traces. Invalid lines are named and not sent.
    With --redact the worker scores the texts with their markers.

    With --follow it runs until it is stopped. Each request in a session becomes a trace, once, when it is closed. You
    may kill the command and start it again at any time.

    Exit codes: 0 all sent, or stopped; 1 some refused or not sent, or another
    process has taken over.
    """
    settings = read_settings()
    from worker.commands.shared.session import Session

    topic = topic or settings.source_topic
    if follow is not None:
        if files or rate is not None or no_validate:
            raise click.UsageError("--follow takes neither FILES nor --rate nor --no-validate")
        needed = {"from": form} | {name: values[name] for name in ("confidence", "domain", "visibility", "privacy")}
        if missing := [f"--{option}" for option, value in needed.items() if value is None]:
            raise click.UsageError(f"Missing: {', '.join(missing)} (needed by --follow).")
        from worker.commands.publish.follow import Follower, default_name, run_follow
        from worker.commands.shared.run_traces import parse_options

        try:
            options = parse_options(values, keep, form or "", max_content, settings.limits)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        run_follow(
            Follower(
                Session(settings), follow, FORMATS[form or ""], options, topic, key,
                _cleaning(settings, redact or "strict"), 60 * (idle_minutes or 60.0), name or default_name(follow),
            )
        )  # fmt: skip
        return
    extra = {"from": form, "idle_minutes": idle_minutes, "name": name, "max_content": max_content, "keep": keep}
    if given := [f"--{option.replace('_', '-')}" for option, value in (extra | values).items() if value]:
        raise click.UsageError(f"{', '.join(given)}: only with --follow DIR; for a file, use kp-worker convert")
    if not files:
        raise click.UsageError("Missing argument 'FILES...' (or --follow DIR).")
    from worker.commands.publish.send import Publishing, run_publish

    run = Publishing(Session(settings), topic, key, rate, not no_validate, _cleaning(settings, redact or "off"))
    sys.exit(run_publish(files, run))


def _cleaning(settings: Settings, redact: str) -> Clean | None:
    """Return the function that redacts a trace, None for "off". Raises ConfigError."""
    if redact == "off":
        return None
    from functools import partial

    from worker.config.redaction_rules import redaction_rules
    from worker.redact.documents import redact_json

    if redact != "on":
        settings = settings.model_copy(update={"redact_rules": redact})
    return partial(redact_json, rules=redaction_rules(settings))
