"""`kp-worker explain`: one trace's score, step by step."""

from __future__ import annotations

import sys

import click

from worker.commands.shared.console import ArgumentError, Command, CommandError, text_console, write_json
from worker.commands.shared.options import given_options, json_option, read_settings, settings_options


@click.command(cls=Command)
@click.argument("trace", type=click.Path(allow_dash=True))  # a shell completes files; an id is allowed too
@click.option("--line", type=click.IntRange(1), metavar="N", help="The line of a JSON Lines file, from 1.")
@click.option("--novelty", type=click.FloatRange(0, 2), metavar="N", help="Novelty to use.")
@json_option
@settings_options
def explain(trace: str, line: int | None, novelty: float | None, as_json: bool) -> None:
    """Explain one score, step by step.

    TRACE is a JSON file, - for standard input, or a record on the output topics: a trace id (kp:trace:...) or its
    beginning, PARTITION:OFFSET on the source topic, or TOPIC:PARTITION:OFFSET on an output topic. The search begins
    with the newest.

    A scored document is explained with its own novelty, weights and threshold; a plain trace with those of the
    settings, and novelty 0.5. Exit code 1: the trace is invalid or not found, or its score does not follow from its
    figures.
    """
    if novelty is not None and novelty != novelty:  # NaN is within any range
        raise ArgumentError("--novelty", "nan is not a number")
    settings = read_settings()
    from worker.commands.explain.target import describe_problem, is_file, name_of, read_document
    from worker.commands.shared.explanation import explain_trace, explanation_text
    from worker.core.trace import InvalidTrace

    options = given_options()
    if is_file(trace):
        raw = read_document(trace, line, settings.limits.max_bytes)
        try:
            explanation = explain_trace(raw, settings, novelty)
        except InvalidTrace as error:
            raise CommandError(f"{name_of(trace)}: {describe_problem(raw, line, error)}") from None
    else:
        if line is not None:
            raise ArgumentError("--line", f"goes with a file, and there is no file {trace}")
        from worker.commands.explain.search import explain_found, find, show_letter  # with Kafka's client

        hit, *others = find(trace, settings, options)
        if hit.letter is not None:
            show_letter(hit, hit.letter, others, options, as_json=as_json)
            return
        explanation = explain_found(hit, others, novelty, settings)
    if as_json:
        write_json(explanation)
    else:
        text_console().print(explanation_text(explanation, options))
    sys.exit(0 if explanation.agrees else 1)
