"""`make assemble-figures`: speed and memory of assemble on the embedded broker, and the ratio to parsing alone.

It takes files of records as JSON Lines ({"value": base64, ...}), for example what a Collector wrote to Kafka; without
them, made-up runs.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.support import spans
from tests.support.assemble import Workshop, made_records, shared_records
from worker.lab.broker.embedded_kafka import EmbeddedKafka

SECONDS = "process_cpu_seconds_total"


def main() -> None:
    """Open many runs, close them all, and compare with parsing alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--runs", type=int, default=10_000, help="how many runs are open at once")
    given = parser.parse_args()
    made = made_records(random.Random(1), 100, size=1000)
    values = shared_records(given.files) if given.files else list(itertools.chain(*made))
    runs = _traces(values)
    records = list(_copies(runs, given.runs))
    count = sum(len(part.resource_spans[0].scope_spans[0].spans) for part in map(TracesData.FromString, records))
    began = time.process_time()
    for record in records:
        TracesData.FromString(record)
    parsing = time.process_time() - began
    size = sum(map(len, records))
    print(
        f"{given.runs} runs, {count} spans in {len(records)} records, {size / 1e6:.0f} MB; parsing: {parsing:.2f} s CPU"
    )
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(kafka.bootstrap_servers, grace=30, gap=60, KP_COMMIT_INTERVAL_SECONDS="1")
        with workshop.start(Path(folder) / "log") as process:
            process.wait_ready()
            idle = process.metric(SECONDS)
            for start in range(0, len(records), 5000):
                workshop.put(records[start : start + 5000])
            while process.metric("kp_assemble_parts_total") < len(records):
                time.sleep(0.5)
            taken, most = process.metric(SECONDS) - idle, process.metric("process_resident_memory_bytes")
            print(f"open: {process.metric('kp_assemble_open_runs'):.0f} runs,", end=" ")
            print(f"{process.metric('kp_assemble_open_bytes') / 2**20:.0f} MiB held, {most / 2**20:.0f} MiB resident")
            while process.metric("kp_assemble_open_runs"):
                time.sleep(0.5)
                most = max(most, process.metric("process_resident_memory_bytes"))
            closed = process.metric(SECONDS) - idle
            traces = process.metric("kp_assemble_traces_total")
    most_mib = most / 2**20
    print(f"{taken:.1f} s CPU to take, {closed - taken:.1f} to close; {traces:.0f} traces; at most {most_mib:.0f} MiB")
    print(f"{count / closed:.0f} spans a second and core; {closed / parsing:.0f} times parsing alone")


def _traces(values: Iterable[bytes]) -> list[list[TracesData]]:
    """Return the spans of each trace, a message for each span, as one record of the Collector has it at most often."""
    messages: dict[bytes, list[TracesData]] = defaultdict(list)
    for value in values:
        if value.lstrip()[:1] == b"{":
            continue  # the same spans are there in the other encoding, or another run's are
        for resource in TracesData.FromString(value).resource_spans:
            for scoped in resource.scope_spans:
                for span in scoped.spans:
                    message = TracesData()
                    target = message.resource_spans.add()
                    target.resource.CopyFrom(resource.resource)
                    scope = target.scope_spans.add()
                    scope.scope.CopyFrom(scoped.scope)
                    scope.spans.add().CopyFrom(span)
                    messages[span.trace_id].append(message)
    return list(messages.values())


def _copies(runs: Sequence[Sequence[TracesData]], count: int) -> Iterator[bytes]:
    """Yield the records of so many runs, copies of these with other trace ids."""
    for number in range(count):
        trace_id = bytes.fromhex(spans.trace_id(number))
        for message in runs[number % len(runs)]:
            message.resource_spans[0].scope_spans[0].spans[0].trace_id = trace_id
            yield message.SerializeToString()


if __name__ == "__main__":
    main()
