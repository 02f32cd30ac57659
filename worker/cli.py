"""Commands. Lives here: options, output, exit codes. Must not live here: anything a command does (other modules)."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

import click

from worker.core.terminal import clean, clean_json, clean_json_bytes
from worker.observe.logs import BareFormatter
from worker.version import __version__

if TYPE_CHECKING:
    from worker.commands.publish import KeyField
    from worker.commands.redrive import Selection
    from worker.commands.report import Traces
    from worker.commands.session import Session
    from worker.config import Settings
    from worker.core.trace import InvalidTrace


def main() -> NoReturn:
    """Run the command line."""
    # One cache scan takes 20 us on one core; OpenBLAS would spread it over all of them, at more than that in hand-overs
    # and against the embedder's threads. Must stand before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.excepthook = _excepthook
    if logging.lastResort is not None:  # where no handler is set up: every command but run
        logging.lastResort.setFormatter(BareFormatter())
    cli(prog_name="kp-worker")
    sys.exit(0)


class _Commands(click.Group):
    """The group of all commands. Errors quote files, brokers and arguments: they are cleaned here, all in one place."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command as click does; exit, unless `standalone_mode` is false."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            said = io.StringIO()
            error.show(said)
            click.echo(clean(said.getvalue(), "\n"), err=True, nl=False)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("Aborted!", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


class _JsonForTerminal:
    """A binary file that gets the same JSON Lines in a form that a terminal does not obey."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(clean_json_bytes(data))


def _shown(file: BinaryIO) -> BinaryIO:
    """Return what to write JSON Lines to: a terminal gets them cleaned, a file or pipe to the byte."""
    return cast("BinaryIO", _JsonForTerminal(file)) if file.isatty() else file


def _say(text: str) -> None:
    """Write lines to standard error."""
    click.echo(clean(text, "\n"), err=True)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback of a bug: it may quote a record, too."""
    _say("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Score KnowledgePulse reasoning traces on a Kafka stream, exactly once.

    Settings are environment variables (KP_...); `kp-worker run --help` lists them.
    """


class SettingsError(click.ClickException):
    """Wrong settings: exit code 2, as for wrong options."""

    exit_code = 2


def _settings(**overrides: Any) -> Settings:
    from worker import config

    try:
        settings = config.load(**overrides)
    except config.ConfigError as error:
        raise SettingsError(str(error)) from None
    for warning in config.unknown_variables():
        _say(f"warning: {warning}")
    return settings


def _size(file: BinaryIO) -> int | None:
    try:
        return os.fstat(file.fileno()).st_size if file.seekable() else None
    except OSError:  # no file behind it
        return None


def _give_up(*files: BinaryIO | None) -> None:
    """Send what is still buffered nowhere: closing the files would fail with the same error again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        if file is not None:
            os.dup2(nowhere, file.fileno())


class _RunCommand(click.Command):
    """Lists the settings at the end of its help: they are the command's real options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from worker.config import describe

        with formatter.section("Settings (environment variables)"):
            formatter.write_dl([(f"{name}={default}", text) for name, default, text in describe()])


@cli.command(cls=_RunCommand)
def run() -> None:
    """Run the worker until SIGTERM or Ctrl-C.

    Exit codes: 0 stopped as asked, everything taken is committed; 1 failed, what was not committed is read again after
    a restart; 2 the settings, the topics or the model are wrong.
    """
    # Until the worker's own handlers are there (it imports for a second), there is nothing to finish.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    settings = _settings()
    from worker.stream import process as app

    app.main(settings)


@cli.command()
@click.argument("file", type=click.File("rb"))
@click.option("--output", "-o", type=click.File("wb"), default="-", help="Scored documents, JSON Lines [stdout].")
@click.option("--dead-letters", type=click.File("wb"), help="Lines that cannot be read, with the reason, JSON Lines.")
@click.option("--embedder", help="As KP_EMBEDDER, which it overrides.")
@click.option("--model", help="As KP_MODEL, which it overrides.")
def score(
    file: BinaryIO, output: BinaryIO, dead_letters: BinaryIO | None, embedder: str | None, model: str | None
) -> None:
    """Score a JSON Lines file (- is standard input) exactly as the worker scores a topic with one partition.

    Settings come from the environment (kp-worker run --help). Exit code 0 also with dead letters: they are counted in
    the summary on standard error.
    """
    settings = _settings(embedder=embedder, model=model)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from worker.commands.score_file import score_lines
    from worker.embed.embedder import ModelError
    from worker.embed.load import load_configured

    console = Console(stderr=True)
    try:
        with console.status("loading the model"):
            loaded = load_configured(settings)
        size = _size(file)
        with Progress(
            TextColumn("scoring"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        ) as progress:  # fmt: skip
            task = progress.add_task("scoring", total=size)
            summary = score_lines(
                file, _shown(output), dead_letters and _shown(dead_letters), settings, loaded,
                lambda count: progress.advance(task, count),
            )  # fmt: skip
        for written in (output, dead_letters):
            if written is not None:
                written.flush()  # a full disk shows here at the latest, and not in a traceback at the end
    except ModelError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        _give_up(output, dead_letters)
        if isinstance(error, BrokenPipeError):  # whoever reads has seen enough
            sys.exit(1)
        raise click.ClickException(f"cannot read or write: {error}") from None
    letters = sum(summary.dead_letters.values())
    _say(
        f"{summary.accepted + summary.rejected + letters} traces: {summary.accepted} accepted, {summary.rejected} "
        f"rejected, {letters} dead letters, {summary.truncated} texts cut at {settings.max_tokens} tokens"
    )
    for reason, count in sorted(summary.dead_letters.items()):
        _say(f"  {count} {reason}")


@cli.command("export-model")
@click.option("--model", help="Directory or hub name of a sentence-transformers model [all-MiniLM-L6-v2].")
@click.option("--output", type=click.Path(path_type=Path), help="Directory to write [the user's cache directory].")
@click.option("--precision", multiple=True, type=click.Choice(["fp32", "bf16", "int8"]), help="May be repeated.")
@click.option("--if-missing", is_flag=True, help="Do nothing where the default model is exported already.")
def export_model(model: str | None, output: Path | None, precision: tuple[str, ...], if_missing: bool) -> None:
    """Make the model directory of the fast runtime, checked against sentence-transformers.

    KP_EMBEDDER=auto finds the default one by itself; for another, set KP_MODEL to the directory.
    """
    from worker.embed.embedder import ModelError
    from worker.embed.export import DEFAULT_PRECISIONS
    from worker.embed.export import export_model as export
    from worker.embed.model_dir import find_exported

    if if_missing and find_exported(None) is not None:
        return
    try:
        click.echo(clean(str(export(model, output, precision or DEFAULT_PRECISIONS))))
    except (ModelError, OSError) as error:
        raise click.ClickException(str(error)) from None


@cli.command()
@click.option("--keep-running", is_flag=True, help="Stay until Ctrl-C, so that you can look around.")
@click.option("--http-port", type=int, help="Port of the worker's metrics [a free one].")
def demo(keep_running: bool, http_port: int | None) -> None:
    """Show the whole worker: embedded Kafka, sample traces, real scores, explained."""
    from worker.commands.demo import demo as run_demo

    sys.exit(run_demo(keep_running, http_port))


@cli.command()
@click.option("--port", type=int, help="Port to listen on [a free one].")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Keep the data there [temporary].")
def broker(port: int | None, data_dir: Path | None) -> None:
    """Run the embedded Kafka broker alone until Ctrl-C, to try things out."""
    from worker.commands.demo import broker as run_broker

    sys.exit(run_broker(port, data_dir))


def _as_json(wanted: bool | None) -> bool:
    """Whether to write JSON: as asked for, otherwise where standard output is no terminal."""
    return not sys.stdout.isatty() if wanted is None else wanted


_json_option = click.option("--json/--text", "as_json", default=None, help="Form of the output [JSON when piped].")


@cli.command()
@click.argument("trace", type=click.File("rb"))
@click.option("--novelty", type=click.FloatRange(0, 2), help="Novelty to count with, 0..2.")
@_json_option
def explain(trace: BinaryIO, novelty: float | None, as_json: bool | None) -> None:
    """Explain one score, step by step.

    TRACE is a JSON file, - is standard input. A document from the accepted or rejected topic is explained with its own
    novelty, weights and threshold; a bare trace with those of the settings, and novelty 0.5. Exit code 1: no valid
    trace, or a document whose score does not follow from its own figures.
    """
    if novelty is not None and novelty != novelty:  # NaN passes any range
        raise click.BadParameter("nan is no number", param_hint="--novelty")
    settings = _settings()
    from rich.console import Console

    from worker.commands import explain as explaining
    from worker.core.trace import InvalidTrace

    raw = trace.read()
    try:
        explanation = explaining.explain_trace(raw, settings, novelty)
    except InvalidTrace as error:
        raise click.ClickException(
            f"{getattr(trace, 'name', '<stdin>')}: {explaining.describe_problem(raw, error)}"
        ) from None
    if _as_json(as_json):
        click.echo(explaining.as_json(explanation))
    else:
        Console(highlight=False).print(explaining.as_text(explanation))
    if not explanation.agrees:
        sys.exit(1)


@cli.command()
@click.option("--create", is_flag=True, help="Create the topics that are missing; changes none that exists.")
@_json_option
def topics(create: bool, as_json: bool | None) -> None:
    """Compare the topics with the plan, or create them.

    Shows the five topics as they are and as they should be, with the commands that make them so. --create does what the
    worker does at start with KP_CREATE_TOPICS=true. Exit code 0: the worker would start with these topics; 1: it would
    not; 2: the settings are wrong, or no broker answers.
    """
    settings = _settings()
    from rich.console import Console

    from worker.commands import topics_view
    from worker.config import ConfigError

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)  # its words are in the error
    try:
        report = asyncio.run(topics_view.topics_report(settings, create))
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    if _as_json(as_json):
        click.echo(topics_view.as_json(report))
    else:
        topics_view.show(Console(highlight=False), report)
    if not report.usable:
        sys.exit(1)


@cli.command()
@_json_option
def doctor(as_json: bool | None) -> None:
    """Check what a worker needs; change nothing.

    Settings, brokers, topics, permissions, group and lag, model, disk, port. One line for each check: ok, warn or fail,
    with a remedy. Exit code 0: nothing failed; 1: something did.
    """
    from itertools import zip_longest
    from shutil import get_terminal_size

    from msgspec.json import encode

    from worker.commands.doctor import examine
    from worker.commands.finding import as_lines

    # Their words are in the findings.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)
    logging.getLogger("worker").setLevel(logging.CRITICAL + 1)
    plain, margin = _as_json(as_json), " " * 6

    async def tell() -> bool:
        failed = False
        async for finding in examine():
            failed |= finding.level == "fail"
            if plain:
                click.echo(clean_json(encode(finding).decode()))
                continue
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
            lines = as_lines(finding, get_terminal_size().columns - len(margin))
            for prefix, line in zip_longest([click.style(f"{finding.level:{len(margin)}}", colour)], lines):
                click.echo((prefix or margin) + line)
        return failed

    failed = asyncio.run(tell())
    sys.stdout.flush()
    # Not sys.exit: a model that hangs in its thread would keep the interpreter from ending.
    os._exit(int(failed))


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the code for completion in a shell.

    \b
    bash  eval "$(kp-worker completion bash)"     in ~/.bashrc
    zsh   eval "$(kp-worker completion zsh)"      in ~/.zshrc, after compinit
    fish  kp-worker completion fish | source      in ~/.config/fish/config.fish
    """  # noqa: D301 click's own mark, the character itself
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise AssertionError(f"this is a bug: click completes no {shell}")
    click.echo(kind(cli, {}, "kp-worker", "_KP_WORKER_COMPLETE").source())


@cli.command()
@click.argument("file", type=click.File("rb"), required=False)
@click.option("--from-kafka", is_flag=True, help="Read the accepted and rejected topics instead of a file.")
@click.option("--since", type=click.DateTime(["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%MZ", "%Y-%m-%d"]),
              help="With --from-kafka: records from this time on (UTC).")  # fmt: skip
@click.option("--last", type=click.IntRange(min=1), help="With --from-kafka: at most so many traces, the latest.")
@click.option("--output", "-o", default="report.html", show_default=True, type=click.Path(dir_okay=False,
              allow_dash=True, path_type=Path), help="The page; - is standard output.")  # fmt: skip
@click.option("--similarity", type=click.FloatRange(-1, 1), default=0.9, show_default=True,
              help="From which similarity on two traces count as near-duplicates.")  # fmt: skip
@click.option("--hide-texts", is_flag=True, help="Leave out the objectives, to share the page; ids and domains stay.")
def report(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, output: Path, similarity: float,
    hide_texts: bool,
) -> None:  # fmt: skip
    """Make one HTML page on scored traces, to choose a threshold by: verdicts, components, near-duplicates.

    FILE holds output documents of kp-worker, JSON Lines (- is standard input). Lines that cannot be read are left out
    and counted, on the page and on standard error.
    """
    if from_kafka == (file is not None):
        raise click.UsageError("give a file of scored traces (- is standard input), or --from-kafka")
    if not from_kafka and (since is not None or last is not None):
        raise click.UsageError("--since and --last go with --from-kafka")
    try:
        from worker.commands.report_page import render
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2", "markupsafe"):
            raise
        raise click.ClickException(f"{error.name} is not installed: pip install 'kp-worker[report]'") from None
    from rich.console import Console

    from worker.commands.report import EmptyReport, Traces, summarize

    traces = Traces(hide_texts=hide_texts)
    console = Console(stderr=True)
    try:
        with console.status("reading"):
            if file is not None:
                name = str(getattr(file, "name", "<stdin>"))
                source = "standard input" if name == "<stdin>" else Path(name).name  # the page may be shared
                complete_from = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        traces.add(line, f"line {number}")
            else:
                source, complete_from = _read_topics(traces, since, last)
        with console.status("making the page"):
            summary = summarize(traces, similarity, last, complete_from)
            page = render(summary, source).encode()
    except EmptyReport as error:
        raise click.ClickException(f"{source}: {error}") from None
    except OSError as error:
        raise click.ClickException(str(error)) from None
    with click.open_file(os.fspath(output), "wb") as stream:
        stream.write(page)
    _say(
        f"{summary.total.count} traces: {summary.total.accepted} accepted, "
        f"{summary.total.count - summary.total.accepted} rejected, {summary.bad} cannot be read, "
        f"{summary.repeated} repeated; {len(page) // 1000} kB to {output}"
    )
    for where, reason in summary.bad_shown:
        _say(f"  {where}: {reason}")


def _read_topics(traces: Traces, since: datetime | None, last: int | None) -> tuple[str, int]:
    """Read the worker's outputs; return what was read, for the page, and from which time (ms) it is complete."""
    from worker.commands.report_kafka import read_outputs
    from worker.config import ConfigError

    settings = _settings()
    since_ms = None if since is None else round(since.replace(tzinfo=UTC).timestamp() * 1000)
    try:
        complete_from = asyncio.run(read_outputs(settings, traces, since_ms, last))
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    bounds = [*([f"since {since:%Y-%m-%d %H:%M:%S} UTC"] if since else []), *([f"the last {last}"] if last else [])]
    return ", ".join([f"{settings.accepted_topic} and {settings.rejected_topic}", *bounds]), complete_from


def _run_session(work: Coroutine[Any, Any, None]) -> None:
    """Run a command's Kafka work; errors become one line and exit code 1, or 2 for settings and topics."""
    from worker.commands.session import SessionError, run
    from worker.config import ConfigError

    try:
        run(work)
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    except BrokenPipeError:
        raise
    except (SessionError, OSError) as error:
        raise click.ClickException(str(error)) from None


@cli.command()
@click.argument("file")
@click.option("--topic", help="Topic to publish to [KP_SOURCE_TOPIC].")
@click.option(
    "--key", type=click.Choice(["agent", "id", "domain", "none"]), default="agent", show_default=True,
    help="Field that becomes the record's key: metadata.agent_id, id, metadata.task_domain, or none.",
)  # fmt: skip
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Most traces a second.")
@click.option("--no-validate", is_flag=True, help="Send every line, whatever is in it.")
def publish(file: str, topic: str | None, key: KeyField, rate: float | None, no_validate: bool) -> None:
    """Publish the traces of a JSON Lines file to the source topic.

    FILE may be - for standard input, or the word samples for the traces of the demo. Lines that are no valid trace are
    named and not sent. Exit codes: 0 all sent; 1 some refused, or not all could be sent; 2 wrong settings or topic.
    """
    settings = _settings()
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    from worker.commands import publish as publishing

    topic = topic or settings.source_topic
    session = _session(settings)
    try:
        source = cast("BinaryIO", click.open_file(str(publishing.SAMPLES) if file == "samples" else file, "rb"))
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from None
    console = Console(stderr=True, highlight=False)
    summary = publishing.Summary()
    with (
        source,
        Progress(
            TextColumn("{task.fields[sent]} sent"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        ) as progress,
    ):  # fmt: skip
        task = progress.add_task("publishing", total=_size(source), sent=0)

        def on_refused(line: int, error: InvalidTrace) -> None:
            where = Text(clean(f"{file}:{line}: "), "bold")
            why = Text(f"{error.reason}: ", "yellow") + Text(clean(str(error)))
            progress.console.print(where + why, soft_wrap=True)

        try:
            _run_session(
                publishing.publish(
                    source, session, topic=topic, key=key, rate=rate,
                    validate=not no_validate, summary=summary, on_refused=on_refused,
                    on_line=lambda size: progress.update(task, advance=size, sent=summary.sent),
                )
            )  # fmt: skip
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        except click.ClickException as error:
            if summary.sent:
                error.message += f"; {summary.sent} were published before"
            raise
    rate_text = f", {summary.sent / summary.seconds:.0f}/s" if summary.seconds > 1 else ""
    _say(
        f"{summary.sent} trace{'s' * (summary.sent != 1)} published to topic {topic}{rate_text}, "
        f"{summary.refused} refused" + (", then interrupted" if interrupted else "")
    )
    sys.exit(130 if interrupted else 1 if summary.refused else 0)


def _session(settings: Settings) -> Session:
    from worker.commands.session import Session
    from worker.config import ConfigError

    try:
        return Session(settings)
    except ConfigError as error:
        raise SettingsError(str(error)) from None


@cli.command()
@click.option("--accepted", is_flag=True, help="Accepted traces [with --rejected, the default].")
@click.option("--rejected", is_flag=True, help="Rejected traces.")
@click.option("--dead-letters", is_flag=True, help="Dead letters.")
@click.option("--domain", help="Only traces whose metadata.task_domain is this.")
@click.option("--min-score", type=click.FloatRange(0, 1), help="Only traces that score at least this.")
@click.option("--last", type=click.IntRange(0), metavar="N", help="Begin with the last N that match [10].")
@click.option("--from-beginning", is_flag=True, help="Begin with the oldest.")
@click.option("--follow/--no-follow", default=True, help="Wait for more, until Ctrl-C [follow].")
def tail(
    accepted: bool, rejected: bool, dead_letters: bool, domain: str | None, min_score: float | None,
    last: int | None, from_beginning: bool, follow: bool,
) -> None:  # fmt: skip
    """Show scored traces as they come: a table on a terminal, JSON Lines into a pipe.

    Reads committed records only, and joins no group: it takes nothing away from anybody.
    """
    if from_beginning and last is not None:
        raise click.UsageError("--from-beginning and --last exclude each other")
    if dead_letters and (domain is not None or min_score is not None):
        raise click.UsageError("dead letters have neither domain nor score: leave out --domain and --min-score")
    if not (accepted or rejected or dead_letters):
        accepted = rejected = True
    settings = _settings()
    topics = {
        settings.accepted_topic: accepted, settings.rejected_topic: rejected, settings.dead_letter_topic: dead_letters,
    }  # fmt: skip
    from worker.commands import tail_view
    from worker.commands.tail import Filter
    from worker.commands.tail import tail as tail_topics

    only_letters = dead_letters and not (accepted or rejected)
    view = tail_view.on_terminal(only_letters=only_letters, follow=follow)
    try:
        with view if sys.stdout.isatty() else nullcontext(tail_view.write_lines) as show:
            _run_session(
                tail_topics(
                    _session(settings), [name for name, wanted in topics.items() if wanted],
                    Filter(settings.dead_letter_topic, domain, min_score), show,
                    last=None if from_beginning else 10 if last is None else last, follow=follow,
                )
            )  # fmt: skip
    except KeyboardInterrupt:
        sys.exit(0)
    except BrokenPipeError:  # whoever reads has seen enough
        _give_up(sys.stdout.buffer)


@cli.command()
@click.option("--reason", "reasons", multiple=True, help="Only dead letters of this reason; may be repeated.")
@click.option(
    "--since", metavar="T", help="Only from this time of the source record on: ISO 8601, or an age (90m, 2h, 3d)."
)
@click.option("--until", metavar="T", help="Only before this time of the source record.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition of the dead-letter topic.")
@click.option("--offset", metavar="A:B", help="Only its offsets from A up to, not including, B (A:, :B or A).")
@click.option(
    "--max-redrives", type=click.IntRange(1), default=3, show_default=True, help="Refuse what failed as often."
)
@click.option("--to-source", is_flag=True, help="Publish to the source topic again [the default].")
@click.option("--to-file", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON Lines there instead.")
@click.option("--execute", is_flag=True, help="Do it; without this only show what would be done.")
def redrive(
    reasons: tuple[str, ...], since: str | None, until: str | None, partition: int | None, offset: str | None,
    max_redrives: int, to_source: bool, to_file: Path | None, execute: bool,
) -> None:  # fmt: skip
    """Send dead letters back to the source topic, each exactly once, or write them to a file.

    Without --execute it shows what would be done, and does nothing. It may be killed and run again at any time: what
    it has re-driven is marked in the same transaction. Exit codes: 0 done; 1 some letters were refused, or it failed;
    2 wrong settings or topics.
    """
    if to_source and to_file is not None:
        raise click.UsageError("--to-source and --to-file exclude each other")
    settings = _settings()
    from worker.commands import redrive as redriving
    from worker.commands import redrive_view

    selection = _selection(reasons, since, until, partition, offset)
    report = redriving.Report()
    with redrive_view.watching(report) as (on_refused, on_progress):
        run = redriving.Redrive(_session(settings), selection, max_redrives, report, on_refused, on_progress)
        work = (
            run.preview(to_file is not None)
            if not execute
            else run.to_source()
            if to_file is None
            else run.to_file(to_file)
        )
        try:
            _run_session(work)
        except KeyboardInterrupt:
            _say(f"interrupted after {report.done.total()} letters; run it again to go on")
            sys.exit(130)
    redrive_view.show(report, to_file, execute)
    sys.exit(1 if execute and report.refused else 0)


def _selection(
    reasons: tuple[str, ...], since: str | None, until: str | None, partition: int | None, offset: str | None
) -> Selection:
    from worker.commands.redrive import Selection, parse_offsets, parse_time
    from worker.core.trace import Reason

    for reason in reasons:
        if reason not in set(Reason):
            raise click.BadParameter(f"{reason!r} is none of {', '.join(Reason)}", param_hint="--reason")
    if offset is not None and partition is None:
        raise click.UsageError("--offset needs --partition: offsets count for each partition by itself")
    now_ms = round(time.time() * 1000)
    try:
        first, end = (0, None) if offset is None else parse_offsets(offset)
        since_ms, until_ms = (None if text is None else parse_time(text, now_ms) for text in (since, until))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return Selection(frozenset(reasons), since_ms, until_ms, partition, first, end)
