"""`kp-worker broker`: the embedded Kafka broker alone, to try things out."""

import sys
import time
from pathlib import Path

import click

from worker.commands.shared.console import ArgumentError, Command, SettingsError, program, require_extra


@click.command(cls=Command)
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port to listen on [a free one].")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Keep the data here [temporary].")
def broker(port: int | None, data_dir: Path | None) -> None:
    """Run the embedded Kafka broker alone until Ctrl-C, to try things out."""
    require_extra("broker", SettingsError)
    from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
    from worker.lab.broker.kafka_node import is_free
    from worker.lab.console import interruptible, print_error, print_lines, running_kafka, wide_console

    if port is not None and not is_free(port):
        raise ArgumentError("--port", f"port {port} is in use; choose another one, or leave it out for a free one")
    console = wide_console()
    started = False
    try:
        with interruptible(), running_kafka(console, EmbeddedKafka(port=port, data_dir=data_dir)) as kafka:
            started = True
            address = kafka.bootstrap_servers
            kept = "temporary, deleted on exit" if data_dir is None else str(data_dir)
            print_lines(
                console,
                f"data     {kept}",
                f"worker   KP_BOOTSTRAP_SERVERS={address} KP_CREATE_TOPICS=true {program()} run",
                f"send     {program()} publish samples -b {address}",
                f"read     {program()} tail -b {address}",
                "stop     Ctrl-C",
            )
            while kafka.alive(0):
                time.sleep(0.2)
            raise BrokerError(f"the broker stopped by itself:\n{kafka.node_log(0).read_text(errors='replace')[-2000:]}")
    except KeyboardInterrupt:
        console.print("broker stopped")
        sys.exit(0 if started else 130)
    except (BrokerError, OSError) as error:
        print_error(console, error)
        sys.exit(1)
