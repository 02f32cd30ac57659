"""`kp-worker doctor`: problems that would keep a worker from running well, with remedies. Changes nothing."""

import asyncio
import logging
import os
import sys

import click

from worker.commands.shared.console import PIPE_CLOSED, Command, write_line
from worker.commands.shared.options import json_option, settings_options
from worker.core.terminal import clean


@click.command(cls=Command)
@json_option
@settings_options
def doctor(as_json: bool) -> None:
    """Check what a worker needs; change nothing.

    Checks settings, brokers, topics, permissions, group and lag, model, disk and port. Prints one line per check: ok,
    warn or fail, with a remedy. Exit code 1: a check failed; warnings do not count.
    """
    from worker.commands.doctor.examine import examine
    from worker.commands.doctor.finding import Finding, summary, write_finding

    for library in ("aiokafka", "worker"):  # the findings say the same
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        try:
            write_finding(finding, as_json=as_json)
        except BrokenPipeError:  # a normal exit would wait for checks, which would then report their own errors
            os._exit(PIPE_CLOSED)

    asyncio.run(examine(report))
    if not as_json:
        write_line(clean(summary(findings)))
    sys.stdout.flush()
    # Not sys.exit: a model that hangs in its thread would keep the interpreter from exiting.
    os._exit(int(any(finding.level == "fail" for finding in findings)))
