"""Faust as usually written: an agent over events, `topic.send` for each output. At least once.

Defaults, but for the log level, the web server (off) and the settings that a production app cannot do without: no
topic declaration, a session timeout below the default.
"""

import tempfile
from typing import Any

import faust

from tests.runs.benchmarks.peers.options import Options, job, parse
from worker.core.records import SourceRecord


def main(options: Options) -> None:
    """Run until SIGTERM (Faust handles it)."""
    work = job(options)
    directory = tempfile.mkdtemp(prefix="kp-bench-faust-")
    app = faust.App(
        options.group,
        broker=f"kafka://{options.bootstrap}",
        value_serializer="raw",
        key_serializer="raw",
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        datadir=directory,
        broker_session_timeout=30,
        broker_heartbeat_interval=3,
        producer_max_request_size=16 << 20,
    )
    outputs = {kind: app.topic(name) for kind, name in options.outputs.items()}
    changelog = app.topic(options.changelog)

    @app.agent(app.topic(options.source))
    async def score(stream: Any) -> None:
        async for event in stream.events():
            m = event.message
            headers = list(m.headers.items()) if isinstance(m.headers, dict) else (m.headers or ())
            output, entry = work.handle(
                SourceRecord(m.topic, m.partition, m.offset, round(m.timestamp * 1000), m.key, m.value, headers)
            )
            if entry is not None:
                await changelog.send(key=entry[0], value=entry[1], partition=m.partition)
            await outputs[output.kind].send(
                key=output.key, value=output.value, headers=output.headers, timestamp=m.timestamp, partition=m.partition
            )

    faust.Worker(app, loglevel="ERROR").execute_from_commandline()


if __name__ == "__main__":
    main(parse())
