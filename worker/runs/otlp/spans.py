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
from dataclasses import dataclass
from functools import partial
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
"""A record up to this size is not counted: it can take some 200 MB at most, for a moment."""

MAX_COPIED_BYTES: Final = 32 << 20
"""Most bytes by which the parts of a record may be more than itself: each part has its own copy of the resource. A full
batch of the Collector, 8192 spans of as many traces, may have 4 kB of it."""

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


def _scopes(message: _Message) -> Iterator[tuple[Any, Any, Any, str]]:
    """Yield each scope's resource, the scope, its spans or log records, and their place."""
    (outer, middle, inner), names = _LEVELS[type(message)], _PLACES[type(message)]
    for number, resource in enumerate(getattr(message, outer)):
        for scope_number, scoped in enumerate(getattr(resource, middle)):
            yield resource, scoped, getattr(scoped, inner), f"{names[0]}.{number}.{names[1]}.{scope_number}.{names[2]}"


def decoded(value: bytes) -> Decoded:
    """Return the spans or log events of a record. No bytes are no spans.

    Raises InvalidSpans, and nothing else, for a record in which nothing is good.
    """
    message, bad = _message(value)
    traces = isinstance(message, TracesData)
    read: Callable[..., Any] = _span if traces else _log_event
    made: list[Any] = []
    untraced = 0
    last: Any = None
    shared: dict[str, Value] = {}
    problem: InvalidSpans | None = None
    for resource, scoped, ones, place in _scopes(message):
        if resource is not last:
            last, shared, problem = resource, {}, None
            try:
                shared = _attributes(resource.resource.attributes)
            except InvalidSpans as error:
                problem = error
        name, url = scoped.scope.name, scoped.schema_url or resource.schema_url
        for number, one in enumerate(ones):
            if not traces and not any(one.trace_id):
                untraced += 1
                continue
            try:
                if problem is not None:
                    raise problem
                made.append(read(one, shared, name, url))
            except InvalidSpans as error:
                bad.add(InvalidSpans(error.reason, f"{place}.{number}", error.message), resource, scoped, one)
    refused = bad.refused(any_good=bool(made))
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
    for _, _, spans, _ in _scopes(message):
        for span in spans:
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
    message, bad = _message(value)
    _check_copies(message)
    outer, middle, inner = _LEVELS[type(message)]
    parts: dict[bytes, Any] = {}
    for resource, scoped, ones, _ in _scopes(message):
        here: dict[bytes, Any] = {}
        for one in ones:
            trace_id = one.trace_id
            rows = here.get(trace_id)
            if rows is None:
                if not any(trace_id):
                    continue
                part = getattr(parts.setdefault(trace_id, type(message)()), outer).add()
                part.resource.CopyFrom(resource.resource)
                part.schema_url = resource.schema_url
                target = getattr(part, middle).add(schema_url=scoped.schema_url)
                target.scope.CopyFrom(scoped.scope)
                rows = here[trace_id] = getattr(target, inner)
            rows.append(one)
    found = bad.refused(any_good=bool(parts))
    if found is not None and refused is not None:
        refused.append(found)
    if found is None and len(parts) == 1 and value[:1] == b"\n" and value.lstrip(_SPACE)[:1] not in (b"{", b"["):
        return {name.hex(): value for name in parts}
    return {name.hex(): part.SerializeToString(deterministic=True) for name, part in parts.items()}


def _check_copies(message: _Message) -> None:
    copied = size = 0
    last: Any = None
    for resource, scoped, ones, _ in _scopes(message):
        traces = len({one.trace_id for one in ones})
        if traces > 1:
            if resource is not last:
                last, size = resource, resource.resource.ByteSize() + len(resource.schema_url)
            copied += (traces - 1) * (size + scoped.scope.ByteSize() + len(scoped.schema_url))
    if copied > MAX_COPIED_BYTES:
        words = (
            f"taken apart by trace it has {copied} more bytes, because each trace gets its resource; "
            f"{MAX_COPIED_BYTES} are allowed: make the resource smaller, or the batches (send_batch_max_size)"
        )
        raise InvalidSpans("too_large", "", words)


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


class _Bad:
    """The bad spans of a record, as they are found."""

    def __init__(self) -> None:
        self.first: InvalidSpans | None = None
        self.count = 0
        self._kept: list[tuple[Any, list[tuple[Any, list[Any]]]]] = []  # by resource and scope

    def add(self, error: InvalidSpans, resource: Any, scoped: Any, one: Any) -> None:
        """Add a span or log record with its resource and scope: messages, or parts of a record that are read singly."""
        self.first = self.first or error
        self.count += 1
        if not self._kept or self._kept[-1][0] is not resource:
            self._kept.append((resource, []))
        scopes = self._kept[-1][1]
        if not scopes or scopes[-1][0] is not scoped:
            scopes.append((scoped, []))
        scopes[-1][1].append(one)

    def refused(self, *, any_good: bool) -> Refused | None:
        """Return what was found. Raises the first error if nothing is good."""
        if self.first is None:
            return None
        if not any_good:
            raise self.first
        outer, resources = "", []
        for resource, scopes in self._kept:
            outer, middle, inner = next(names for names in _LEVELS.values() if getattr(resource, names[1], None))
            kept = [_with(scoped, "scope", inner, ones) for scoped, ones in scopes]
            resources.append(_with(resource, "resource", middle, kept))
        if isinstance(resources[0], _JsonResource):
            value = msgspec.json.encode(_JsonRecord(**{outer: resources}))
        else:
            rows = [each.SerializeToString(deterministic=True) for each in resources]
            value = _Resources(resource_spans=rows).SerializeToString()
        return Refused(self.first, self.count, value)


def _with(each: Any, head: str, rows: str, kept: list[Any]) -> Any:
    """Return a resource or scope with only these scopes or spans."""
    return type(each)(**{head: getattr(each, head), "schema_url": each.schema_url, rows: kept})


def _message(value: bytes) -> tuple[_Message, _Bad]:
    """Return a record as a message whose ids are complete, and what is bad in it. Raises InvalidSpans."""
    text = value.lstrip(_SPACE)
    if text[:1] in (b"{", b"["):
        try:
            return _from_json(text)
        except InvalidSpans as error:
            if error.reason != "not_json" or value[:1] != b"\n":
                raise  # protobuf, too, begins with 0x0a, and the length after it may be 0x7b or 0x5b
    message, bad = _from_protobuf(value)
    _take_out_bad_ids(message, bad)
    return message, bad


def _from_protobuf(value: bytes) -> tuple[_Message, _Bad]:
    """Traces and logs have the same outer shape, but a log record has no field that a span's ids could be read from."""
    _check_fields(value)
    traces, logs = TracesData(), LogsData()
    try:
        traces.ParseFromString(value)
        spans = [span for _, _, ones, _ in _scopes(traces) for span in ones]
        if not spans or any(span.trace_id or span.span_id for span in spans):
            if value and not traces.resource_spans:
                words = "protobuf, but not OTLP; the exporter's encoding is otlp_proto or otlp_json"
                raise InvalidSpans("not_otlp", "", words)
            return traces, _Bad()
    except DecodeError:
        pass
    try:
        logs.ParseFromString(value)
    except DecodeError:
        return _from_parts(value)
    records = [record for _, _, ones, _ in _scopes(logs) for record in ones]
    if not any(each.trace_id or each.time_unix_nano or each.observed_time_unix_nano for each in records):
        raise InvalidSpans("not_otlp", "", "protobuf, but neither spans nor log records; point the exporter at traces")
    return logs, _Bad()


def _take_out_bad_ids(message: _Message, bad: _Bad) -> None:
    """Remove spans and log records with wrong ids from a message."""
    right: Callable[[Any], bool]
    right, words = (_has_span_ids, SPAN_IDS) if isinstance(message, TracesData) else (_has_log_ids, LOG_IDS)
    for resource, scoped, ones, place in _scopes(message):
        good = [one for one in ones if right(one)]
        if len(good) < len(ones):
            for position, one in enumerate(ones):
                if not right(one):
                    bad.add(InvalidSpans("invalid_value", f"{place}.{position}", words), resource, scoped, one)
            del ones[:]
            ones.extend(good)


SPAN_IDS: Final = "a span needs a traceId of 16 bytes and a spanId of 8, not all of them 0"
LOG_IDS: Final = "a traceId has 16 bytes and a spanId 8, or they are absent"


def _has_span_ids(span: SpanMessage) -> bool:
    sized = len(span.trace_id) == 16 and len(span.span_id) == 8 and len(span.parent_span_id) in (0, 8)
    return sized and span.trace_id != _NO_TRACE and span.span_id != _NO_SPAN


def _has_log_ids(record: LogRecord) -> bool:
    return len(record.trace_id) in (0, 16) and len(record.span_id) in (0, 8)


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


_Fill: TypeAlias = Callable[[Any, Any], object]
"""Fills a resource, a scope, a span or a log record with a part of a record. `_problem` knows what it raises."""


def _read_singly(record: Any, levels: tuple[str, str, str], message: _Message, fill: _Fill) -> _Bad:
    """Fill a message from a record whose parts are bytes (in the fields `levels`); return what cannot be read."""
    (outer, middle, inner), names, bad = _LEVELS[type(message)], _PLACES[type(message)], _Bad()

    def head(name: str, target: Any, part: Any) -> None:
        fill(getattr(target, name), getattr(part, name))
        url = part.schema_url or ""
        target.schema_url = url if isinstance(url, str) else url.decode()

    def row(rows: Any, part: Any) -> None:
        try:
            fill(rows.add(), part)
        except Exception:
            del rows[-1]
            raise

    for number, resource in enumerate(getattr(record, levels[0]) or ()):
        place = f"{names[0]}.{number}"
        target = getattr(message, outer).add()
        problem = _problem(partial(head, "resource"), target, resource, place)
        for scope_number, scoped in enumerate(getattr(resource, levels[1]) or ()):
            scope_place = f"{place}.{names[1]}.{scope_number}"
            scope = getattr(target, middle).add()
            wrong = problem or _problem(partial(head, "scope"), scope, scoped, scope_place)
            rows = getattr(scope, inner)
            for position, one in enumerate(getattr(scoped, levels[2]) or ()):
                error = wrong or _problem(row, rows, one, f"{scope_place}.{names[2]}.{position}")
                if error is not None:
                    bad.add(error, resource, scoped, one)
    return bad


def _problem(read: _Fill, target: Any, part: Any, place: str) -> InvalidSpans | None:
    """Read a part of a record; return why it cannot be read."""
    try:
        read(target, part)
    except InvalidSpans as error:
        return InvalidSpans(error.reason, place, error.message)
    except msgspec.ValidationError as error:
        wrong = _refusal(error)
        return InvalidSpans(wrong.reason, f"{place}.{wrong.path}" if wrong.path else place, wrong.message)
    except DecodeError:
        words = "a text that is not UTF-8, or too many levels of values; the other spans of the record are read"
        return InvalidSpans("not_otlp", place, words)
    except RecursionError:
        return InvalidSpans("too_deep", place, TOO_DEEP)
    except (UnicodeError, msgspec.DecodeError):
        return InvalidSpans("invalid_value", place, "a text is not UTF-8; send OTLP in JSON as UTF-8")
    return None


def _parts() -> Sequence[type[Any]]:
    """Return classes for records with resources as bytes, and with spans: protobuf encodes messages like bytes."""
    file = FileDescriptorProto(name="kp_worker/parts.proto", package="kp", syntax="proto3")
    for message, head, rows, inner in (
        ("Resources", "", "resource_spans", ""), ("Parts", "", "resource_spans", "Resource"),
        ("Resource", "resource", "scope_spans", "Scope"), ("Scope", "scope", "spans", ""),
    ):  # fmt: skip
        fields = file.message_type.add(name=message).field
        for number, name in ((1, head), (3, "schema_url")) if head else ():
            fields.add(name=name, number=number, type="TYPE_BYTES", label="LABEL_OPTIONAL")
        field = fields.add(name=rows, number=2 if head else 1, type="TYPE_BYTES", label="LABEL_REPEATED")
        if inner:
            field.type, field.type_name = field.TYPE_MESSAGE, f".kp.{inner}"
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return [GetMessageClass(pool.FindMessageTypeByName(f"kp.{name}")) for name in ("Resources", "Parts")]


_Resources, _Parts = _parts()


def _from_parts(value: bytes) -> tuple[_Message, _Bad]:
    """Return what protobuf can read of a record part by part. Raises InvalidSpans."""
    with suppress(DecodeError):
        parts = _Parts.FromString(value)
        for message in (TracesData(), LogsData()):
            bad = _read_singly(parts, _LEVELS[TracesData], message, lambda target, part: target.ParseFromString(part))
            if any(one.trace_id for _, _, ones, _ in _scopes(message) for one in ones):
                return message, bad
    words = "not OTLP: cut off, not UTF-8, or in another encoding; the exporter's encoding is otlp_proto or otlp_json"
    raise InvalidSpans("not_otlp", "", words)


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


def _from_json(text: bytes) -> tuple[_Message, _Bad]:
    _check_fields(text, lambda text: text.count(b"{") + text.count(b"["))
    try:
        if text[:1] == b"[":
            msgspec.json.decode(text, type=Raw)
            words = "a JSON list; OTLP in JSON is an object with resourceSpans or resourceLogs"
            raise InvalidSpans("not_otlp", "", words)
        record = msgspec.json.decode(text, type=_JsonRecord)
        names = msgspec.json.decode(text, type=dict[str, Raw]) if record == _JsonRecord() else {}
    except RecursionError:
        raise InvalidSpans("too_deep", "", TOO_DEEP) from None
    except msgspec.ValidationError as error:
        raise _refusal(error) from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidSpans("not_json", "", f"{error}; a record is one whole JSON object") from None
    if record.resource_spans is not None and record.resource_logs is not None:
        raise InvalidSpans("not_otlp", "", "both resourceSpans and resourceLogs; a record has one of them")
    if names and "resourceSpans" not in names:
        found = ", ".join(sorted(names)[:3])
        raise InvalidSpans("not_otlp", "", f"an object with {found[:60]}; OTLP has resourceSpans or resourceLogs")
    message: _Message = TracesData() if record.resource_logs is None else LogsData()
    return message, _read_singly(record, _LEVELS[type(message)], message, _from_object)


def _refusal(error: msgspec.ValidationError) -> InvalidSpans:
    """Return why a value of JSON is refused: a wrong type, or what `_scalar` has raised."""
    words, _, path = str(error).partition(" - at `$.")
    reason: Why = "invalid_type" if type(error.__cause__) in (NoneType, TypeError) else "invalid_value"
    return InvalidSpans(reason, re.sub(r"\[(\d+)\]", r".\1", path[:-1]), words)


def _from_object(message: Any, part: Raw) -> None:
    """Fill a message from its JSON."""
    message.CopyFrom(type(message)(**_fields(_DECODERS[type(message)].decode(part)) or {}))
    if isinstance(message, SpanMessage) and not _has_span_ids(message):
        raise InvalidSpans("invalid_value", "", SPAN_IDS)


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
