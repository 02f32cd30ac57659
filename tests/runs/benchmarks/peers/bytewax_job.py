"""bytewax: KafkaSource -> flat_map (the job) -> KafkaSink, with recovery on. At least once.

Bytewax keeps source offsets in its own recovery store and commits none to Kafka, so its run ends when all outputs are
there, and the offsets are not checked. Batches of 1000 and epochs of 10 s are its defaults; the scorers live outside
its state store, so that no snapshot of 1000 vectors is taken at each epoch (which would cost more).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main

from tests.runs.benchmarks.peers.options import Options, parse
from worker.core.records import SourceRecord


def main(options: Options) -> None:
    """Run until SIGTERM."""
    job = options.job()
    brokers = [options.bootstrap]

    def handle(message: Any) -> list[KafkaSinkMessage[Any, Any]]:
        timestamp = message.timestamp[1]
        record = SourceRecord(
            message.topic, message.partition, message.offset, timestamp, message.key, message.value, message.headers
        )
        output, entry = job.handle(record)
        out = [
            KafkaSinkMessage(
                output.key, output.value, options.outputs[output.kind], output.headers, timestamp=timestamp
            )
        ]
        if entry is not None:
            out.append(KafkaSinkMessage(entry[0], entry[1], options.changelog))
        return out

    flow = Dataflow("bench")
    stream = op.input("in", flow, KafkaSource(brokers, [options.source]))
    op.output(
        "out",
        op.flat_map("job", stream, handle),
        KafkaSink(brokers, None, {"enable.idempotence": "true", "queue.buffering.max.messages": "1000000"}),
    )
    with tempfile.TemporaryDirectory(prefix="kp-bench-bytewax-") as directory:
        init_db_dir(Path(directory), 1)
        cli_main(flow, recovery_config=RecoveryConfig(Path(directory)))


if __name__ == "__main__":
    os.environ.setdefault("BYTEWAX_DATAFLOW_API_ENABLED", "0")
    main(parse())
