"""`kp-worker forget`: its options."""

from __future__ import annotations

import sys

import click

from worker.commands.shared.console import Command
from worker.commands.shared.options import json_option, read_settings, settings_options


@click.command(cls=Command)
@click.option("--trace", "traces", multiple=True, metavar="ID", help="Forget this trace; may be repeated.")
@click.option("--agent", metavar="ID", help="Forget all traces of this agent.")
@click.option("--wait/--no-wait", help="Wait for the receipts of all partitions [no].")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              metavar="SECONDS", help="Longest wait for the receipts.")  # fmt: skip
@json_option
@settings_options
def forget(traces: tuple[str, ...], agent: str | None, wait: bool, timeout: float, as_json: bool) -> None:
    """Make the workers forget traces, or all traces of an agent.

    Writes one signed control record to each partition of the source topic. Workers with KP_FORGET=true then remove the
    entries from their caches and from the changelog, and write a receipt. Exit codes: 0 written, and with --wait
    forgotten everywhere; 1 failed, or receipts are missing.
    """
    if bool(traces) == (agent is not None):
        raise click.UsageError("give either --trace (once or more) or --agent")
    if agent == "" or "" in traces:
        raise click.UsageError("an id must not be empty")
    settings = read_settings()
    from worker.commands.forget.request import run_forget
    from worker.core.forgetting import MAX_TRACE_IDS

    if len(traces) > MAX_TRACE_IDS:
        raise click.UsageError(f"at most {MAX_TRACE_IDS} traces at once; run the command several times")
    sys.exit(run_forget(settings, traces, agent, wait_seconds=timeout if wait else None, as_json=as_json))
