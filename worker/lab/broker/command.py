"""`kp-worker broker`: the embedded Kafka broker alone, to try things out."""

from __future__ import annotations

import time
from pathlib import Path

from worker.commands.shared.samples import SAMPLES
from worker.lab.broker.embedded_kafka import BrokerError, EmbeddedKafka
from worker.lab.demo.console import (
    interruptible,
    kcat,
    print_error,
    print_lines,
    running_kafka,
    wide_console,
)
from worker.lab.demo.flow import ACCEPTED, SOURCE


def run_broker(port: int | None = None, data_dir: Path | None = None) -> int:
    """Run the embedded broker until Ctrl-C or SIGTERM; return the exit code (0, 1 failed, 130 interrupted early)."""
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
                f"worker   KP_BOOTSTRAP_SERVERS={address} KP_CREATE_TOPICS=true kp-worker run",
                f"send     kcat -P -b {address} -t {SOURCE} -l {SAMPLES}",
                f"read     {kcat(address, ACCEPTED)}",
                "stop     Ctrl-C",
            )
            while kafka.alive(0):
                time.sleep(0.2)
            raise BrokerError(f"the broker stopped by itself:\n{kafka.node_log(0).read_text(errors='replace')[-2000:]}")
    except KeyboardInterrupt:
        console.print("broker stopped")
        return 0 if started else 130
    except (BrokerError, OSError) as error:
        print_error(console, error)
        return 1
