"""OpenTelemetry spans: one for each source record, from taken to committed, if KP_TRACING=true."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from worker.config import ConfigError, Settings
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import Headers, OutputRecord, SourceRecord
from worker.core.scoring import ScoredTrace
from worker.core.trace import Reason
from worker.version import __version__, install_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

CONTEXT_HEADERS: Final = ("traceparent", "tracestate")  # W3C Trace Context, as Kafka headers


class Tracing:
    """Makes spans for the records of one consumer group; without a provider none, and without a span does nothing."""

    def __init__(self, provider: TracerProvider | None, group: str) -> None:
        self._provider = provider
        if provider is None:
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = provider.get_tracer("kp-worker", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._group = group

    def begin(self, record: SourceRecord) -> Span | None:
        """Begin a record's span: a child of the span in its `traceparent`, or the first of a new trace."""
        if self._provider is None:
            return None
        attributes: dict[str, str | int | bool] = {
            "messaging.system": "kafka",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": record.topic,
            "messaging.destination.partition.id": str(record.partition),
            "messaging.kafka.offset": record.offset,
            "messaging.consumer.group.name": self._group,
            "messaging.message.body.size": len(record.value or b""),
        }
        if record.value is None:
            attributes["messaging.kafka.message.tombstone"] = True
        return self._tracer.start_span(
            f"process {record.topic}",
            self._propagator.extract(_context_headers(record.headers)),
            self._api.SpanKind.CONSUMER,
            attributes,
        )

    def trace_id(self, span: Span | None) -> str | None:
        """Return the id of a span's trace (hex) if it is exported."""
        context = None if span is None else span.get_span_context()
        return f"{context.trace_id:032x}" if context is not None and context.trace_flags.sampled else None

    def embedded(self, span: Span | None) -> None:
        """Note that the record's text is embedded."""
        if span is not None:
            span.add_event("embedded")

    def scored(self, span: Span, scored: ScoredTrace, output: OutputRecord) -> OutputRecord:
        """Note the decision; return the output with the worker's span in its `traceparent`."""
        span.add_event("scored")
        span.set_attributes(
            {
                "kp.trace.id": scored.trace_id[:CACHED_ID_LENGTH],
                "kp.score": scored.score,
                "kp.decision": output.kind,
                "kp.profile": scored.profile,
            }
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span))
        headers = [header for header in output.headers if header[0] not in CONTEXT_HEADERS]
        headers += [(name, value.encode()) for name, value in carrier.items()]
        return replace(output, headers=headers)

    def refused(self, span: Span | None, reason: Reason) -> None:
        """Note that the record became a dead letter (whose headers stay the producer's)."""
        if span is None:
            return
        span.set_attributes({"error.type": str(reason), "kp.decision": "dead_letter"})
        span.set_status(self._api.StatusCode.ERROR, "dead letter")

    def judged(self, span: Span | None) -> None:
        """Note that a verdict was honoured."""
        if span is not None:
            span.set_attribute("kp.decision", "judged")

    def end(self, spans: Iterable[Span | None]) -> None:
        """End the spans of records that are committed."""
        if self._provider is None:
            return
        for span in spans:
            if span is not None:
                span.end()

    def stop(self) -> None:
        """Export the remaining spans, for at most 3 s: a collector that is away must not delay a restart."""
        if self._provider is None:
            return
        flush = threading.Thread(target=self._provider.shutdown, name="tracing-flush", daemon=True)
        flush.start()
        flush.join(3)


NO_TRACING: Final = Tracing(None, "")


def _context_headers(headers: Headers) -> dict[str, str]:
    return {name: (value or b"").decode("latin-1") for name, value in headers if name in CONTEXT_HEADERS}


def start_tracing(settings: Settings) -> Tracing:
    """Start to export spans as the OTEL_* variables say, if tracing is on. Raises ConfigError."""
    if not settings.tracing:
        return NO_TRACING
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"KP_TRACING=true, but OpenTelemetry is not installed ({error}): {install_extra('tracing')}, "
            "or unset KP_TRACING"
        ) from error
    ours = Resource({"service.name": "kp-worker", "service.version": __version__})
    provider = TracerProvider(
        resource=Resource.create().merge(ours).merge(OTELResourceDetector().detect()),  # the variables win
        shutdown_on_exit=False,  # it would wait for the exporter without a limit; see Tracing.stop
    )
    if os.environ.get("OTEL_TRACES_EXPORTER") != "none":  # OpenTelemetry's word for spans that are not exported
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return Tracing(provider, settings.group_id)


def _exporter() -> SpanExporter:
    """Load the exporter by the names of OpenTelemetry's specification. Raises ConfigError."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    entry = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}.get(protocol) if name == "otlp" else name
    entries = entry_points(group="opentelemetry_traces_exporter", name=entry or "")
    if not entries:
        installed = sorted(entry_points(group="opentelemetry_traces_exporter").names)
        raise ConfigError(
            f"no exporter for OTEL_TRACES_EXPORTER={name} with OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is installed "
            f"(there are: {', '.join(installed)}); for grpc, install opentelemetry-exporter-otlp-proto-grpc"
        )
    exporter: SpanExporter = next(iter(entries)).load()()
    return exporter
