"""The spans and log events of a record: OTLP in protobuf or in JSON, which its first bytes tell apart.

`decoded` reads a record, `split` divides it by trace id. Both work on OpenTelemetry's own protobuf messages; JSON is
read into such messages first. protobuf's JSON parser takes five times as long, and the hex ids for base64.

A bad span does not affect the other spans of its record (`Refused`): a record of the Collector holds what many
applications sent. In JSON, and where protobuf cannot read the whole record, each span is read alone.
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from msgspec import Raw, Struct
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status, TracesData

Value: TypeAlias = str | bool | int | float | bytes | list["Value"] | dict[str, "Value"] | None

_Message: TypeAlias = TracesData | LogsData

Why = Literal["not_otlp", "not_json", "invalid_type", "invalid_value", "too_deep", "too_large"]

MAX_DEPTH: Final = 30
"""Levels of lists and maps in a value. protobuf reads 100 levels of messages; a level of maps takes three of them."""

TOO_DEEP: Final = f"a value has more than {MAX_DEPTH} levels; flatten it"

MAX_FIELDS: Final = 1_000_000
"""Most spans, events, attributes and values of a record, and of a run: each of them takes 100 to 200 bytes of memory
(measured with tracemalloc), though it may be two bytes of a record."""

COUNTED_BYTES: Final = 4 << 20
"""A record up to this size is not counted. For a moment it takes some 200 MB at most; of empty spans alone, 1 GB."""

MAX_COPIED_BYTES: Final = 32 << 20
"""Most bytes by which the parts of a record may be more than itself: each part has its own copy of the resource. A full
batch of the Collector, 8192 spans of as many traces, may have 4 kB of it."""

TOO_MANY_COPIES: Final = (
    f"taken apart by trace it has more than {MAX_COPIED_BYTES} bytes more, because each trace gets its resource: make "
    "the resource smaller, or the batches (send_batch_max_size)"
)

_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)

_SPACE: Final = b" \t\r\n"

_REMOTE: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class InvalidSpans(ValueError):
    """A record that is not OTLP: why (`reason`), where (`path`, "" is the record), and what to do (`message`)."""

    def __init__(self, reason: Why, path: str, message: str) -> None:
        super().__init__(reason, path, message)
        self.reason: Why = reason
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path or 'record'}: {self.message}"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event of a span, such as an exception; `time_ns` since 1970."""

    name: str
    time_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """A span."""

    trace_id: str  # 32 lower-case hex digits
    span_id: str  # 16 lower-case hex digits
    parent_id: str  # empty without a parent
    name: str
    kind: int  # OTLP's number
    start_ns: int  # ns since 1970, below 2**64
    end_ns: int
    status: int  # 0 unset, 1 ok, 2 error
    status_message: str
    attributes: Mapping[str, Value]
    events: tuple[SpanEvent, ...]
    resource: Mapping[str, Value]
    scope: str
    schema_url: str
    dropped_attributes: int
    remote_parent: bool = False  # the parent is known to be in another process


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A log record of a trace, such as `gen_ai.user.message`; its name is the event's name, `span_id` may be ""."""

    trace_id: str
    span_id: str
    name: str
    time_ns: int
    body: Value
    attributes: Mapping[str, Value]
    resource: Mapping[str, Value]
    scope: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The bad spans or log records of a record whose others are good: why the first one is bad, how many there are.

    `value`: they alone, with their resources and scopes, as OTLP in the record's encoding.
    """

    error: InvalidSpans
    count: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a record holds, in its order: spans, or log events. `untraced`: log records without a trace id."""

    spans: tuple[Span, ...]
    logs: tuple[LogEvent, ...]
    untraced: int = 0
    refused: Refused | None = None


_LEVELS: Final[Mapping[type, tuple[str, str, str]]] = {
    TracesData: ("resource_spans", "scope_spans", "spans"),
    LogsData: ("resource_logs", "scope_logs", "log_records"),
}
"""The fields of a message that hold resources, of a resource that hold scopes, of a scope that hold spans or logs."""

_PLACES: Final[Mapping[type, tuple[str, str, str]]] = {
    TracesData: ("resourceSpans", "scopeSpans", "spans"), LogsData: ("resourceLogs", "scopeLogs", "logRecords"),
}  # fmt: skip
"""Their names in JSON, by which places are named."""


_At: TypeAlias = tuple[int, int, int]
"""Where a span or log record stands: the numbers of its resource, of its scope in that, and its own in the scope."""


def _rows(message: _Message) -> Iterator[Any]:
    """Yield the spans or log records of a message."""
    outer, middle, inner = _LEVELS[type(message)]
    for resource in getattr(message, outer):
        for scoped in getattr(resource, middle):
            yield from getattr(scoped, inner)


@dataclass(slots=True)
class _Record:
    """A record as a message, and which of its spans or log records are bad: these may be empty in the message."""

    message: _Message
    source: Any  # what was read: the message itself, or a record whose parts are bytes, with the fields `levels`
    levels: tuple[str, str, str]
    bad: set[_At] = field(default_factory=set)
    first: tuple[_At, Sequence[int], InvalidSpans] | None = None  # the first of them, what is wrong, and where

    def refuse(self, at: _At, place: Sequence[int], error: InvalidSpans) -> None:
        """Add a row that is bad, or whose whole resource or scope is (`place`). A record may have a million of them."""
        self.bad.add(at)
        if self.first is None or at < self.first[0]:
            self.first = (at, place, error)

    def scopes(self) -> Iterator[tuple[Any, Any, Iterator[tuple[_At, Any]]]]:
        """Yield each scope's resource, the scope, and its good spans or log records with their positions."""
        outer, middle, inner = _LEVELS[type(self.message)]
        for number, resource in enumerate(getattr(self.message, outer)):
            for scope_number, scoped in enumerate(getattr(resource, middle)):
                yield resource, scoped, self._good(number, scope_number, getattr(scoped, inner))

    def _good(self, resource: int, scope: int, rows: Any) -> Iterator[tuple[_At, Any]]:
        for number, row in enumerate(rows):
            at = (resource, scope, number)
            if self.bad and at in self.bad:
                continue
            if words := _wrong_ids(row):
                self.refuse(at, at, InvalidSpans("invalid_value", "", words))
            else:
                yield at, row

    def refused(self, *, any_good: bool) -> Refused | None:
        """Return what is bad, taken out of the source. Raises the first error if nothing is good."""
        if self.first is None:
            return None
        _, place, error = self.first
        path = [f"{name}.{number}" for name, number in zip(_PLACES[type(self.message)], place, strict=False)]
        first = InvalidSpans(error.reason, ".".join([*path, error.path] if error.path else path), error.message)
        if not any_good:
            raise first
        outer, middle, inner = self.levels
        resources = getattr(self.source, outer)
        for number, resource in enumerate(resources):
            scopes = getattr(resource, middle) or []
            for scope_number, scoped in enumerate(scopes):
                rows = getattr(scoped, inner) or []
                _keep(rows, [row for at, row in enumerate(rows) if (number, scope_number, at) in self.bad])
            _keep(scopes, [scoped for scoped in scopes if getattr(scoped, inner)])
        _keep(resources, [resource for resource in resources if getattr(resource, middle)])
        is_json = isinstance(self.source, _JsonRecord)
        value = msgspec.json.encode(self.source) if is_json else self.source.SerializeToString(deterministic=True)
        return Refused(first, len(self.bad), value)


def _keep(items: Any, kept: list[Any]) -> None:
    """Leave only these items in a list of a record. To delete the others one by one would take quadratic time."""
    del items[:]
    items.extend(kept)


def decoded(value: bytes) -> Decoded:
    """Return the spans or log events of a record. No bytes are no spans.

    Raises InvalidSpans, and nothing else, for a record in which nothing is good.
    """
    record = _record(value)
    traces = isinstance(record.message, TracesData)
    read: Callable[..., Any] = _span if traces else _log_event
    made: list[Any] = []
    untraced = 0
    last: Any = None
    shared: dict[str, Value] = {}
    problem: InvalidSpans | None = None
    for resource, scoped, rows in record.scopes():
        if resource is not last:
            last, shared, problem = resource, {}, None
            try:
                shared = _attributes(resource.resource.attributes)
            except InvalidSpans as error:
                problem = error
        name, url = scoped.scope.name, scoped.schema_url or resource.schema_url
        for at, row in rows:
            if not traces and not any(row.trace_id):
                untraced += 1
                continue
            try:
                if problem is not None:
                    raise problem
                made.append(read(row, shared, name, url))
            except InvalidSpans as error:
                record.refuse(at, at, error)
    refused = record.refused(any_good=bool(made))
    return Decoded(tuple(made), (), 0, refused) if traces else Decoded((), tuple(made), untraced, refused)


def links(value: bytes) -> Iterator[tuple[str, str]]:
    """Yield the id of each span of a part that `split` made, and its parent's; "" for a root.

    A tenth of the time of `decoded`: no attribute is read. Raises InvalidSpans for too many fields.
    """
    message = TracesData()
    _check_fields(value)
    try:
        message.ParseFromString(value)
    except DecodeError:
        return  # log records
    for span in _rows(message):
        if not span.span_id:
            return  # log records that can be read as spans
        yield span.span_id.hex(), _parent_id(span)


def is_complete(links: Iterable[tuple[str, str]]) -> bool:
    """Return whether a trace looks complete: each span has its parent or is the root.

    `links`: of each span its id and its parent's. A span is exported when it ends, so a missing parent is
    still open, or was lost. It may be in another process, such as an agent that waits for a sub-agent.
    """
    known: set[str] = set()
    parents: set[str] = set()
    for span_id, parent_id in links:
        known.add(span_id)
        parents.add(parent_id)
    return "" in parents and not parents - known - {""}


def split(value: bytes, refused: list[Refused] | None = None) -> dict[str, bytes]:
    """Return a record's parts by trace id: TracesData or LogsData in protobuf, each with what the trace has of it.

    The order is that of the first span of each trace. A protobuf record of one trace keeps its bytes. Log records
    without a trace id are left out. What is bad is added to `refused`. Raises InvalidSpans for a record in which
    nothing is good, or whose parts would be far larger than itself.
    """
    record = _record(value)
    outer, middle, inner = _LEVELS[type(record.message)]
    parts: dict[bytes, Any] = {}
    copied = 0
    for resource, scoped, good in record.scopes():
        here: dict[bytes, Any] = {}
        for _, row in good:
            trace_id = row.trace_id
            rows = here.get(trace_id)
            if rows is None:
                if not any(trace_id):
                    continue
                part = getattr(parts.setdefault(trace_id, type(record.message)()), outer).add()
                part.resource.CopyFrom(resource.resource)
                part.schema_url = resource.schema_url
                target = getattr(part, middle).add(schema_url=scoped.schema_url)
                target.scope.CopyFrom(scoped.scope)
                if here:
                    copied += part.ByteSize()
                    if copied > MAX_COPIED_BYTES:
                        raise InvalidSpans("too_large", "", TOO_MANY_COPIES)
                rows = here[trace_id] = getattr(target, inner)
            rows.append(row)
    bad = record.refused(any_good=bool(parts))
    if bad is not None and refused is not None:
        refused.append(bad)
    if bad is None and len(parts) == 1 and value[:1] == b"\n" and value.lstrip(_SPACE)[:1] not in (b"{", b"["):
        return {name.hex(): value for name in parts}
    return {name.hex(): part.SerializeToString(deterministic=True) for name, part in parts.items()}


def _parent_id(span: SpanMessage) -> str:
    return "" if span.parent_span_id == _NO_SPAN else span.parent_span_id.hex()


def _span(span: SpanMessage, resource: Mapping[str, Value], scope: str, url: str) -> Span:
    attributes = _attributes(span.attributes)
    events = [
        SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes))
        for event in span.events
        if event.name or event.attributes  # millions of empty ones fit into a record, and say nothing
    ]
    return Span(
        span.trace_id.hex(), span.span_id.hex(), _parent_id(span), span.name, span.kind, span.start_time_unix_nano,
        span.end_time_unix_nano, span.status.code, span.status.message, attributes, tuple(events), resource, scope, url,
        span.dropped_attributes_count, span.flags & _REMOTE == _REMOTE,
    )  # fmt: skip


def _log_event(record: LogRecord, resource: Mapping[str, Value], scope: str, _: str) -> LogEvent:
    attributes = _attributes(record.attributes)
    name = record.event_name or attributes.get("event.name")
    return LogEvent(
        record.trace_id.hex(), record.span_id.hex() if any(record.span_id) else "",
        name if isinstance(name, str) else "", record.time_unix_nano or record.observed_time_unix_nano,
        _value(record.body), attributes, resource, scope,
    )  # fmt: skip


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    # most values are texts: without the question which field is set, reading them takes half the time
    return {pair.key: (value := pair.value).string_value or _value(value) for pair in pairs}


def _value(value: AnyValue, depth: int = 0) -> Value:
    kind = value.WhichOneof("value")
    if depth >= MAX_DEPTH and kind in ("array_value", "kvlist_value"):
        raise InvalidSpans("too_deep", "", TOO_DEEP)
    if kind == "array_value":
        return [_value(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return None if kind is None else getattr(value, kind)


# The message of a record


def _record(value: bytes) -> _Record:
    """Return a record. Raises InvalidSpans."""
    text = value.lstrip(_SPACE)
    if text[:1] in (b"{", b"["):
        try:
            return _from_json(text)
        except InvalidSpans as error:
            if error.reason != "not_json" or value[:1] != b"\n":
                raise  # protobuf, too, begins with 0x0a, and the length after it may be 0x7b or 0x5b
    return _from_protobuf(value)


def _from_protobuf(value: bytes) -> _Record:
    """Traces and logs have the same outer shape, but a log record has no field that a span's ids could be read from."""
    _check_fields(value)
    traces, logs = TracesData(), LogsData()
    try:
        traces.ParseFromString(value)
        spans = list(_rows(traces))
        if not spans or any(span.trace_id or span.span_id for span in spans):
            if value and not traces.resource_spans:
                words = "protobuf, but not OTLP; the exporter's encoding is otlp_proto or otlp_json"
                raise InvalidSpans("not_otlp", "", words)
            return _Record(traces, traces, _LEVELS[TracesData])
    except DecodeError:
        pass
    try:
        logs.ParseFromString(value)
    except DecodeError:
        return _from_parts(value)
    if not any(row.trace_id or row.time_unix_nano or row.observed_time_unix_nano for row in _rows(logs)):
        raise InvalidSpans("not_otlp", "", "protobuf, but neither spans nor log records; point the exporter at traces")
    return _Record(logs, logs, _LEVELS[LogsData])


def _wrong_ids(row: Any) -> str:
    """Return what is wrong with the ids of a span or a log record, "" if nothing is."""
    sizes = len(row.trace_id), len(row.span_id)
    if isinstance(row, LogRecord):
        is_right = sizes[0] in (0, 16) and sizes[1] in (0, 8)
        return "" if is_right else "a traceId has 16 bytes and a spanId 8, or they are absent"
    is_right = sizes == (16, 8) and len(row.parent_span_id) in (0, 8) and row.trace_id != _NO_TRACE
    is_right = is_right and row.span_id != _NO_SPAN
    return "" if is_right else "a span needs a traceId of 16 bytes and a spanId of 8, not all of them 0"


_Shape: TypeAlias = "dict[int, _Shape]"

_VALUE: _Shape = {}
_PAIR: Final[_Shape] = {2: _VALUE}
_VALUE |= {5: {1: _VALUE}, 6: {1: _PAIR}}
_SPAN: Final[_Shape] = {9: _PAIR, 11: {3: _PAIR}, 13: {4: _PAIR}, 5: _VALUE, 6: _PAIR}
_RECORD: Final[_Shape] = {1: {1: {1: _PAIR}, 2: {1: {3: _PAIR}, 2: _SPAN}}}
"""Which fields of OTLP hold messages, by their numbers: of a span, and of a log record (its body and attributes)."""


def fields_in(value: bytes, most: int = MAX_FIELDS) -> int:
    """Return how many messages are in a message of OTLP; once there are more than `most`, how many were found."""
    count, stack = 0, [(0, len(value), _RECORD)]
    while stack:
        at, end, shape = stack.pop()
        try:
            while at < end:
                tag, at = _varint(value, at)
                kind = tag & 7
                if kind == 2:
                    size, at = _varint(value, at)
                    if (inner := shape.get(tag >> 3)) is not None:
                        count += 1
                        if count > most:
                            return count
                        if size:
                            stack.append((at, min(at + size, end), inner))
                    at += size
                else:
                    at = _varint(value, at)[1] if kind == 0 else at + {1: 8, 5: 4}[kind]
        except (IndexError, KeyError):
            continue  # cut off, or no protobuf
    return count


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """Return a varint, and the position behind it. Raises IndexError if it is cut off or too long."""
    number = shift = 0
    while (byte := value[at]) > 0x7F:
        if shift > 63:
            raise IndexError
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | byte << shift, at + 1


def _check_fields(value: bytes, count: Callable[[bytes], int] = fields_in) -> None:
    if len(value) > COUNTED_BYTES and count(value) > MAX_FIELDS:
        words = f"more than {MAX_FIELDS} spans, events, attributes and values; send fewer of them in a record"
        raise InvalidSpans("too_large", "", words)


# Records whose parts are read singly


def _read_singly(
    source: Any, levels: tuple[str, str, str], message: _Message, read: Callable[[type[Any], Any], dict[str, Any]]
) -> _Record:
    """Fill a message from a record whose parts are bytes. `read`: returns a part as the fields of a kind of message."""
    record = _Record(message, source, levels)
    outer, middle, inner = _LEVELS[type(message)]
    kind = SpanMessage if isinstance(message, TracesData) else LogRecord

    def add(
        rows: Any, at: Sequence[int], kind: type[Any], part: Any, head: str = ""
    ) -> tuple[Any, tuple[Sequence[int], InvalidSpans] | None]:
        """Add a row, or a resource or scope, which is in the field `head` of its part; return it, and what is wrong."""
        try:
            if not head:
                return rows.add(**read(kind, part)), None
            url = part.schema_url or ""
            fields = {head: read(kind, getattr(part, head))}
            return rows.add(**fields, schema_url=url if isinstance(url, str) else url.decode()), None
        except InvalidSpans as error:
            wrong = error
        except (UnicodeError, msgspec.DecodeError):
            wrong = InvalidSpans("invalid_value", "", "a text is not UTF-8; send OTLP in JSON as UTF-8")
        return rows.add(), (at, wrong)

    for at, resource in enumerate(getattr(source, levels[0]) or ()):
        target, of_resource = add(getattr(message, outer), [at], Resource, resource, "resource")
        for at_scope, scoped in enumerate(getattr(resource, levels[1]) or ()):
            scopes = getattr(target, middle)
            scope, of_scope = add(scopes, [at, at_scope], InstrumentationScope, scoped, "scope")
            wrong, rows = of_resource or of_scope, getattr(scope, inner)
            for at_row, part in enumerate(getattr(scoped, levels[2]) or ()):
                place = (at, at_scope, at_row)
                if (problem := wrong or add(rows, place, kind, part)[1]) is not None:
                    record.refuse(place, *problem)
    return record


def _parts() -> Any:
    """Return the class of a record with spans as bytes: protobuf encodes messages like bytes."""
    file = FileDescriptorProto(name="kp_worker/parts.proto", package="kp", syntax="proto3")
    for message, head, rows, inner in (
        ("Parts", "", "resource_spans", "Resource"), ("Resource", "resource", "scope_spans", "Scope"),
        ("Scope", "scope", "spans", ""),
    ):  # fmt: skip
        fields = file.message_type.add(name=message).field
        for number, name in ((1, head), (3, "schema_url")) if head else ():
            fields.add(name=name, number=number, type="TYPE_BYTES", label="LABEL_OPTIONAL")
        rows_field = fields.add(name=rows, number=2 if head else 1, type="TYPE_BYTES", label="LABEL_REPEATED")
        if inner:
            rows_field.type, rows_field.type_name = rows_field.TYPE_MESSAGE, f".kp.{inner}"
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("kp.Parts"))


_Parts = _parts()


def _from_parts(value: bytes) -> _Record:
    """Return what protobuf can read of a record part by part. Raises InvalidSpans."""
    with suppress(DecodeError):
        parts = _Parts.FromString(value)
        for message in (TracesData(), LogsData()):
            record = _read_singly(parts, _LEVELS[TracesData], message, _from_bytes)
            if any(row.trace_id for row in _rows(message)):
                return record
    words = "not OTLP: cut off, not UTF-8, or in another encoding; the exporter's encoding is otlp_proto or otlp_json"
    raise InvalidSpans("not_otlp", "", words)


def _from_bytes(kind: type[Any], part: bytes) -> dict[str, Any]:
    try:
        return {field.name: value for field, value in kind.FromString(part).ListFields()}
    except DecodeError:
        words = "a text that is not UTF-8, or too many levels of values; the other spans of the record are read"
        raise InvalidSpans("not_otlp", "", words) from None


# JSON


class _JsonScope(Struct, rename="camel", omit_defaults=True):
    scope: Raw = Raw(b"{}")
    spans: list[Raw] | None = None
    log_records: list[Raw] | None = None
    schema_url: str | None = None


class _JsonResource(Struct, rename="camel", omit_defaults=True):
    resource: Raw = Raw(b"{}")
    scope_spans: list[_JsonScope] | None = None
    scope_logs: list[_JsonScope] | None = None
    schema_url: str | None = None


class _JsonRecord(Struct, rename="camel", omit_defaults=True):
    resource_spans: list[_JsonResource] | None = None
    resource_logs: list[_JsonResource] | None = None


_RECORDS: Final = msgspec.json.Decoder(_JsonRecord | list[Raw])
_NAMES: Final = msgspec.json.Decoder(dict[str, Raw])


def _from_json(text: bytes) -> _Record:
    _check_fields(text, lambda text: text.count(b"{") + text.count(b"["))
    try:
        record = _json(text, _RECORDS)
        names = _json(text, _NAMES) if record == _JsonRecord() else {}
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidSpans("not_json", "", f"{error}; a record is one whole JSON object") from None
    if isinstance(record, list):
        raise InvalidSpans("not_otlp", "", "a JSON list; OTLP in JSON is an object with resourceSpans or resourceLogs")
    if record.resource_spans is not None and record.resource_logs is not None:
        raise InvalidSpans("not_otlp", "", "both resourceSpans and resourceLogs; a record has one of them")
    if names and "resourceSpans" not in names:
        given = ", ".join(sorted(names)[:3])
        raise InvalidSpans("not_otlp", "", f"an object with {given[:60]}; OTLP has resourceSpans or resourceLogs")
    message: _Message = TracesData() if record.resource_logs is None else LogsData()
    return _read_singly(record, _LEVELS[type(message)], message, _from_object)


def _json(text: bytes | Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return the value of a JSON text. Raises InvalidSpans if its type is wrong (see also `_scalar`)."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise InvalidSpans("too_deep", "", TOO_DEEP) from None
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$.")
        reason: Why = "invalid_type" if type(error.__cause__) in (NoneType, TypeError) else "invalid_value"
        raise InvalidSpans(reason, re.sub(r"\[(\d+)\]", r".\1", path[:-1]), words) from None


def _from_object(kind: type[Any], part: Raw) -> dict[str, Any]:
    return _fields(_json(part, _DECODERS[kind])) or {}


def _fields(value: Any, depth: int = 0) -> Any:
    """Return an object as the fields of a message; None if it says nothing. `depth`: how deep it lies in values."""
    if isinstance(value, list):
        return [_fields(each, depth) or {} for each in value]
    if isinstance(value, _Pair) and value.value is not None and (text := value.value.string_value):
        return {"key": value.key or "", "value": {"string_value": text}}  # most are texts: half of the time
    if not isinstance(value, Struct):
        return value
    depth += isinstance(value, (_Values, _Pairs))
    if depth > MAX_DEPTH:
        raise InvalidSpans("too_deep", "", TOO_DEEP)
    made = {}
    for name in value.__struct_fields__:
        if (inner := getattr(value, name)) is not None:
            made[name] = _fields(inner, depth) if isinstance(inner, (list, Struct)) else inner
    return made or ({} if isinstance(value, (_Values, _Pairs)) else None)  # an empty list or map is a value


def _scalar(kind: Any, value: Any) -> Any:
    """Return a number, an id or bytes, which may be a text in JSON. Raises TypeError and ValueError."""
    if issubclass(kind, bytes):
        if not isinstance(value, str):
            raise TypeError("a text is expected")
        read = b""
        with suppress(ValueError):
            is_hex = kind.size and len(value) == 2 * kind.size
            read = bytes.fromhex(value) if is_hex else base64.b64decode(value, validate=True)
            if kind.size in (0, len(read)) or not value:
                return kind(read)
        raise ValueError(f"an id of {2 * kind.size} hex digits is expected" if kind.size else "bytesValue is base64")
    wanted = "a number" if kind is _Double else "an integer"
    if isinstance(value, bool) or not isinstance(value, (int, str, float) if kind is _Double else (int, str)):
        raise TypeError(f"{wanted} is expected")
    try:
        number = kind(kind.names.get(value, value))
    except (ValueError, OverflowError):
        raise TypeError(f"{wanted} is expected") from None
    if kind is not _Double and not kind.low <= number < kind.end:
        raise ValueError(f"an integer from {kind.low} to {kind.end - 1} is expected")
    return number


def _integer(low: int, end: int, names: Any = None) -> Any:
    """Return the class of integers from `low` to below `end`, which may be one of these names, too."""
    return type("Integer", (int,), {"low": low, "end": end, "names": dict(names.items()) if names else {}})


def _object(**fields: str) -> Any:
    """Return the class of an object of JSON: by fields' names in protobuf their types here. All may be missing."""
    listed = [(name, f"{kind} | None", None) for name, kind in fields.items()]
    return msgspec.defstruct("Object", listed, rename="camel", module=__name__)


_U64, _U32, _I64 = _integer(0, 1 << 64), _integer(0, 1 << 32), _integer(-1 << 63, 1 << 63)
_Kind = _integer(0, 1 << 31, SpanMessage.SpanKind)
_Code = _integer(0, 1 << 31, Status.StatusCode)
_Double: Any = type("Double", (float,), {"names": {}})
_TraceId, _SpanId, _Bytes = (type("Bytes", (bytes,), {"size": size}) for size in (16, 8, 0))

_Pair = _object(key="str", value="_Any")
_Pairs, _Values = _object(values="list[_Pair]"), _object(values="list[_Any]")
_Any = _object(
    string_value="str", int_value="_I64", bool_value="bool", double_value="_Double", bytes_value="_Bytes",
    array_value="_Values", kvlist_value="_Pairs",
)  # fmt: skip
_Event = _object(name="str", time_unix_nano="_U64", attributes="list[_Pair]")
_Status = _object(code="_Code", message="str")
_JsonSpan = _object(
    trace_id="_TraceId", span_id="_SpanId", parent_span_id="_SpanId", name="str", kind="_Kind",
    start_time_unix_nano="_U64", end_time_unix_nano="_U64", dropped_attributes_count="_U32", flags="_U32",
    status="_Status", attributes="list[_Pair]", events="list[_Event]",
)  # fmt: skip
_JsonLog = _object(
    trace_id="_TraceId", span_id="_SpanId", event_name="str", time_unix_nano="_U64", observed_time_unix_nano="_U64",
    attributes="list[_Pair]", body="_Any",
)  # fmt: skip

_Nothing: Any = Annotated[list[Any], msgspec.Meta(max_length=0)] | None  # PHP writes [] for an empty object

_DECODERS: Final = {
    kind: msgspec.json.Decoder(fields, dec_hook=_scalar)
    for kind, fields in (
        (Resource, _object(attributes="list[_Pair]") | _Nothing),
        (InstrumentationScope, _object(name="str") | _Nothing), (SpanMessage, _JsonSpan), (LogRecord, _JsonLog),
    )
}  # fmt: skip
