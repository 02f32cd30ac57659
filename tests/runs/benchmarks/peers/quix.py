"""quix-streams: one dataframe that expands each record into its output and its cache entry. At least or exactly once.

The state lives in memory, without quix's RocksDB store (which would cost more); the entry is sent to the changelog
topic as an ordinary record. Defaults but for the log level and, in throughput runs, `commit_every`: the default
interval of 5 s would make the last commit of a short run a wait for the timer. Latency runs keep the default (and a
second row asks for --commit-interval 0.1).
"""

import tempfile
from typing import Any

from quixstreams import Application
from quixstreams.context import message_context
from quixstreams.models import Serializer

from tests.runs.benchmarks.peers.options import Options, job, parse
from worker.core.records import SourceRecord

COMMIT_EVERY = 5000
"""Records of one checkpoint in throughput runs (--commit-interval 0); their counts are multiples of it."""


class RowValue(Serializer):  # type: ignore[misc,unused-ignore]
    """Takes the value out of a row (topic, key, value, headers)."""

    def __call__(self, value: Any, ctx: Any) -> Any:
        return value[2]


def main(options: Options) -> None:
    """Run until SIGTERM (quix handles it)."""
    work = job(options)
    interval = options.commit_interval
    with tempfile.TemporaryDirectory(prefix="kp-bench-quix-") as state:
        app = Application(
            broker_address=options.bootstrap,
            consumer_group=options.group,
            auto_offset_reset="earliest",
            processing_guarantee="exactly-once" if options.exactly_once else "at-least-once",
            commit_interval=interval or 5.0,
            commit_every=COMMIT_EVERY if interval == 0 else 0,
            auto_create_topics=False,
            use_changelog_topics=False,
            loglevel="WARNING",
            state_dir=state,
        )
        names = {**options.outputs, "entry": options.changelog}
        topics = {
            kind: app.topic(name, value_serializer=RowValue(), key_serializer="bytes") for kind, name in names.items()
        }

        def handle(value: bytes, key: bytes, timestamp: int, headers: Any) -> list[tuple[Any, ...]]:
            at = message_context()
            record = SourceRecord(at.topic, at.partition, at.offset, timestamp, key, value, headers or ())
            output, entry = work.handle(record)
            rows: list[tuple[Any, ...]] = [(topics[output.kind], output.key, output.value, output.headers)]
            if entry is not None:
                rows.append((topics["entry"], *entry, []))
            return rows

        source = app.topic(options.source, value_deserializer="bytes", key_deserializer="bytes")
        frame = app.dataframe(source).apply(handle, expand=True, metadata=True)
        frame = frame.set_headers(lambda row, *_: row[3])
        frame.to_topic(lambda row, *_: row[0], key=lambda row: row[1])
        app.run()


if __name__ == "__main__":
    main(parse())
