"""`kp-worker demo`: its options."""

import sys

import click

from worker.commands.shared.console import ArgumentError, Command, SettingsError, require_extra
from worker.commands.shared.options import read_settings, settings_options


@click.command(cls=Command)
@click.option("--keep-running", is_flag=True, help="Keep everything running until Ctrl-C.")
@click.option("--http-port", type=click.IntRange(1, 65535), metavar="N", help="Port of the metrics [a free one].")
@click.option("--otlp", is_flag=True, help="Also assemble and score runs from made-up OpenTelemetry spans.")
@click.option("--verdicts", is_flag=True, help="Also judge the runs of two agents, one of which claims too much.")
@settings_options
def demo(keep_running: bool, http_port: int | None, otlp: bool, verdicts: bool) -> None:
    """Show the whole worker: embedded Kafka, sample traces, real scores, explained.

    Only the settings of scoring and the model apply: the demo has its own broker, topics and port.
    """
    require_extra("broker", SettingsError)
    if otlp:
        require_extra("otlp", SettingsError)
    settings = read_settings()
    from worker.lab.broker.kafka_node import is_free
    from worker.lab.demo.show import run_demo

    if http_port and not is_free(http_port):
        raise ArgumentError("--http-port", f"port {http_port} is in use; choose another one, or leave it out")
    sys.exit(run_demo(settings, http_port, otlp=otlp, verdicts=verdicts, keep_running=keep_running))
