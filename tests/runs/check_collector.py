"""The Collector of docs/opentelemetry.md, for real: from the OpenTelemetry SDK to traces, with kills on the way.

Not part of `make test`, which needs nothing but Python: `make collector-check` builds the Collector and runs it. With
OTLP_DATA=FOLDER:... the records in the folders' *.jsonl ({"value": base64, ...}) are sent, too.
"""

import functools
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import pytest

from tests.support import spans
from tests.support.assemble import Workshop, by_run, expected_documents, judged, made_records, shared_records
from tests.support.kafka_fixtures import consume_all, create_topics, wait_until
from tests.support.surroundings import DOCS
from worker.core.trace import Limits
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports
from worker.runs.otlp.spans import decoded

pytestmark = pytest.mark.timeout(1200)

CONFIG = (DOCS / "examples/otel-collector.yaml").read_text("utf-8")

MOST = 1_000_000
"""KP_MAX_MESSAGE_BYTES, below what a topic takes by default: one run of the SDK is larger, and must be cut."""

AGENT = """
import base64, os, random, sys, time
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
import json

class Truth(SpanExporter):
    def export(self, spans):
        value = encode_spans(spans).SerializeToString()
        print(json.dumps({"value": base64.b64encode(value).decode()}), file=truth, flush=True)
        return SpanExportResult.SUCCESS

seed, runs, seconds, path = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
rng, truth = random.Random(seed), open(path, "a")
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Truth()))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("agent.loop")

def message(role, **part):
    return {"role": role, "parts": [part]}

for number in range(runs):
    long = number == runs // 2
    messages = [message("user", type="text", content=f"Do task {number}.")]
    with tracer.start_as_current_span("agent", attributes={
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"sdk-{number % 5}"
    }):
        turns = rng.randint(1, 4) + long
        for turn in range(turns):
            last, call = turn == turns - 1, f"call-{number}-{turn}"
            with tracer.start_as_current_span("chat") as chat:
                chat.set_attribute("gen_ai.operation.name", "chat")
                chat.set_attribute("gen_ai.provider.name", "openai")
                chat.set_attribute("gen_ai.input.messages", json.dumps(messages))
                answer = message("assistant", type="text", content=f"Task {number} is done.") if last else message(
                    "assistant", type="tool_call", id=call, name="look", arguments={"at": turn})
                chat.set_attribute("gen_ai.output.messages", json.dumps([answer]))
            if not last:
                with tracer.start_as_current_span("execute_tool look") as tool:
                    result = f"seen {turn} " + "x" * (1_200_000 if long else 100)
                    tool.set_attribute("gen_ai.operation.name", "execute_tool")
                    tool.set_attribute("gen_ai.tool.name", "look")
                    tool.set_attribute("gen_ai.tool.call.id", call)
                    tool.set_attribute("gen_ai.tool.call.result", result)
                messages += [answer, message("tool", type="tool_call_response", id=call, response=result)]
    time.sleep(rng.uniform(0, 2 * seconds / runs))
provider.shutdown()
truth.close()
"""
"""Runs of an agent with the SDK: its spans go to the Collector, and to a file."""


class Collector:
    """The Collector with the page's configuration, on free ports; it keeps its queue over restarts."""

    def __init__(self, bootstrap: str, folder: Path, config: str) -> None:
        grpc, http = free_ports(2)
        self.url = f"http://127.0.0.1:{http}"
        for before, after in {
            "kafka:9092": bootstrap,
            "0.0.0.0:4317": f"127.0.0.1:{grpc}",
            "0.0.0.0:4318": f"127.0.0.1:{http}",
            "/var/lib/otelcol": str(folder),
        }.items():
            assert config.count(before) == 1, f"the page's configuration has no {before}"
            config = config.replace(before, after)
        (folder / "config.yaml").write_text(config)
        # Beside it: the Collector's own metrics would take a fixed port.
        (folder / "quiet.yaml").write_text("service: {telemetry: {metrics: {level: none}}}\n")
        self._http, self._folder = http, folder
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = [os.environ.get("COLLECTOR", "otelcol"), "--config", "config.yaml", "--config", "quiet.yaml"]
        with (self._folder / "collector.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        assert wait_until(self._listens, 60), self.log()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it in order: it delivers what it has."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log()

    def log(self) -> str:
        """Return the end of what it wrote."""
        return (self._folder / "collector.log").read_text(errors="replace")[-5000:]

    def send(self, value: bytes) -> None:
        """Post a record as an SDK does: again, where it was not taken."""
        kind = "json" if value.lstrip()[:1] == b"{" else "x-protobuf"
        signal = "logs" if decoded(value).logs else "traces"
        headers = {"Content-Type": f"application/{kind}"}
        request = urllib.request.Request(f"{self.url}/v1/{signal}", value, headers, method="POST")

        def taken() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=30):
                    return True
            except urllib.error.HTTPError as error:
                if error.code not in (429, 502, 503, 504):
                    raise
            except OSError:  # it is away
                pass
            return False

        assert wait_until(taken, 120, 0.5), self.log()

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._http)) == 0


def test_each_run_comes_out_once_whatever_is_killed(seed: int, tmp_path: Path) -> None:
    """The SDK and the sample data, while Collector, broker and assemble are killed and started again."""
    rng = random.Random(seed)
    runs, seconds = 300, 90.0
    deeds = [*["collector"] * 4, *["broker"] * 2, *["assemble"] * 3]
    rng.shuffle(deeds)
    folders = [Path(each) for each in os.environ.get("OTLP_DATA", "").split(":") if each]
    files = [path for folder in folders for path in sorted(folder.glob("*.jsonl")) if path.name != "expected.jsonl"]
    groups = [*made_records(rng, 60), *by_run(shared_records(files))]
    rng.shuffle(groups)
    samples = list(itertools.chain(*groups))
    with EmbeddedKafka() as kafka:
        workshop = Workshop(
            kafka.bootstrap_servers, grace=30, gap=90, create=False, KP_SPANS_TOPIC="otlp_spans,otlp_logs",
            KP_MAX_MESSAGE_BYTES=str(MOST),
        )  # fmt: skip
        fleet = [workshop.start(tmp_path / f"assemble-{number}.log").wait_ready() for number in range(2)]
        truth = tmp_path / "truth.jsonl"
        output = tmp_path / "agent.log"
        with Collector(kafka.bootstrap_servers, tmp_path, CONFIG) as collector, output.open("wb") as log:
            env = {
                **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "60",
                "OTEL_SERVICE_NAME": "desk", "PYTHONWARNINGS": "default",
            }  # fmt: skip
            command = [sys.executable, "-c", AGENT, str(seed), str(runs), str(seconds), str(truth)]
            agent = subprocess.Popen(command, env=env, stdout=log, stderr=log)

            def send() -> None:
                for value in samples:
                    collector.send(value)
                    time.sleep(seconds / len(samples) / 2)

            sending = threading.Thread(target=send)
            sending.start()
            try:
                for deed in deeds:
                    time.sleep(seconds / len(deeds) * rng.uniform(0.6, 1.0))
                    print(f"kill {deed}", flush=True)
                    if deed == "assemble":
                        at = rng.randrange(len(fleet))
                        fleet[at].close()
                        fleet[at] = workshop.start(tmp_path / f"assemble-{at}.log").wait_ready()
                        continue
                    (collector.kill if deed == "collector" else functools.partial(kafka.kill_node, 0))()
                    time.sleep(rng.uniform(0, 3))
                    (collector.start if deed == "collector" else functools.partial(kafka.start_node, 0))()
                assert agent.wait(300) == 0, output.read_text()
                sending.join()
                written = expected_documents([*samples, *shared_records([truth])], Limits(max_bytes=MOST))
                patience = time.monotonic() + 300
                while len(workshop.documents()) < len(written) or any(
                    each.metric("kp_assemble_open_runs") for each in fleet
                ):
                    assert time.monotonic() < patience, (len(workshop.documents()), len(written), collector.log())
                    time.sleep(1)
                shortened = sum(each.metric("kp_assemble_shortened_traces_total") for each in fleet)
                collector.stop()
            finally:
                agent.kill()
                for each in fleet:
                    each.close()
        problems = judged(workshop, written)
    print(f"{runs} runs of the SDK, {len(samples)} records of samples, {shortened:.0f} shortened")
    print(output.read_text())
    assert not problems


def test_a_batch_processor_joins_no_more_than_the_topic_takes(seed: int, tmp_path: Path) -> None:
    """60 spans of 300 kB at once: more than a record may have, unless send_batch_max_size divides them."""
    tools = [each for each in spans.run_spans(seed % 1000, 61) if "gen_ai.tool.name" in each["attributes"]]
    for each in tools:
        each["attributes"]["gen_ai.tool.call.result"] = "x" * 300_000
    lines = [line for line in CONFIG.splitlines() if "batch: {sizer" not in line]
    assert len(lines) == len(CONFIG.splitlines()) - 1
    # The batch processor of which the page speaks: these sizes let spans of 600 kB pass.
    batch = "processors: {batch: {send_batch_size: 16, send_batch_max_size: 16}}"
    config = "\n".join(lines).replace("receivers: [otlp],", "receivers: [otlp], processors: [batch],") + f"\n{batch}"
    sent = {each["spanId"] for each in tools}
    with EmbeddedKafka() as kafka:
        create_topics(kafka.bootstrap_servers, {"otlp_spans": (2, {"max.message.bytes": "10485760"}), "otlp_logs": 1})
        with Collector(kafka.bootstrap_servers, tmp_path, config) as collector:
            collector.send(spans.as_protobuf(tools))

            def arrived() -> bool:  # a Collector that stops keeps what Kafka has not taken on its disk
                values = [each.value for each in consume_all(kafka.bootstrap_servers, "otlp_spans")]
                return {span.span_id for value in values for span in decoded(value).spans} == sent

            assert wait_until(arrived, 60), collector.log()


def test_spans_wait_on_disk_until_their_topic_is_there(tmp_path: Path) -> None:
    run = spans.run_spans(1)
    with (
        EmbeddedKafka(config={"auto.create.topics.enable": "true"}) as kafka,
        Collector(kafka.bootstrap_servers, tmp_path, CONFIG) as collector,
    ):
        collector.send(spans.as_protobuf(run))
        collector.kill()
        collector.start()
        create_topics(kafka.bootstrap_servers, {"otlp_spans": (2, {"max.message.bytes": "10485760"}), "otlp_logs": 1})
        assert wait_until(lambda: bool(consume_all(kafka.bootstrap_servers, "otlp_spans")), 120), collector.log()
        values = [each.value for each in consume_all(kafka.bootstrap_servers, "otlp_spans")]
    assert {span.span_id for value in values for span in decoded(value).spans} == {each["spanId"] for each in run}
