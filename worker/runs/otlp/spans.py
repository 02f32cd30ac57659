"""Spans and log events of a record: OTLP in protobuf or in JSON, told apart by content.

`decoded` reads a record, `split` takes it apart by trace id. The messages are OpenTelemetry's own protobuf classes. A
record in JSON becomes such a message first. protobuf's own JSON parser would take the ids, which are hex, for base64.

One bad span costs its record that span alone (`Refused`): a record of the Collector holds what many applications sent.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status, TracesData

Value: TypeAlias = str | bool | int | float | bytes | list["Value"] | dict[str, "Value"] | None

_Message: TypeAlias = TracesData | LogsData

Why = Literal["not_otlp", "not_json", "invalid_type", "invalid_value", "too_deep", "too_large"]

MAX_DEPTH: Final = 30
"""Levels of lists and maps in a value. protobuf reads 100 levels of messages; a level of maps takes three of them."""

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

_LONE: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Half of a surrogate pair that a record has as an escape; the others stand for bytes that are not UTF-8."""

_REMOTE_KNOWN: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE: Final = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


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
    TracesData: ("resourceSpans", "scopeSpans", "spans"),
    LogsData: ("resourceLogs", "scopeLogs", "logRecords"),
}
"""The same fields in JSON, by which places are named."""


def _scopes(message: _Message) -> Iterator[tuple[Any, Any, Any, str]]:
    """Yield each scope after its resource, then its spans or log records, and their place."""
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
                above = ".".join(place.split(".")[:2])
                shared = _attributes(resource.resource.attributes, f"{above}.resource.attributes")
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
                made.append(read(one, f"{place}.{number}", shared, name, url))
            except InvalidSpans as error:
                bad.add(error, resource, scoped, one)
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


def _span(span: SpanMessage, place: str, resource: Mapping[str, Value], scope: str, url: str) -> Span:
    attributes = _attributes(span.attributes, f"{place}.attributes")
    events = [
        SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes, f"{place}.events"))
        for event in span.events
        if event.name or event.attributes  # millions of empty ones fit into a record, and say nothing
    ]
    return Span(
        span.trace_id.hex(), span.span_id.hex(), _parent_id(span), span.name, span.kind, span.start_time_unix_nano,
        span.end_time_unix_nano, span.status.code, span.status.message, attributes, tuple(events), resource, scope, url,
        span.dropped_attributes_count, bool(span.flags & _REMOTE and span.flags & _REMOTE_KNOWN),
    )  # fmt: skip


def _log_event(record: LogRecord, place: str, resource: Mapping[str, Value], scope: str, _: str) -> LogEvent:
    attributes = _attributes(record.attributes, f"{place}.attributes")
    name = record.event_name or attributes.get("event.name")
    return LogEvent(
        record.trace_id.hex(), record.span_id.hex() if any(record.span_id) else "",
        name if isinstance(name, str) else "", record.time_unix_nano or record.observed_time_unix_nano,
        _value(record.body, f"{place}.body"), attributes, resource, scope,
    )  # fmt: skip


def _attributes(pairs: Iterable[KeyValue], place: str) -> dict[str, Value]:
    # most values are texts: without the question which field is set, reading them takes half the time
    return {pair.key: (value := pair.value).string_value or _value(value, place) for pair in pairs}


def _value(value: AnyValue, place: str, depth: int = 0) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        _check_depth(depth, place)
        return [_value(item, place, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        _check_depth(depth, place)
        return {pair.key: _value(pair.value, place, depth + 1) for pair in value.kvlist_value.values}
    return None if kind is None else getattr(value, kind)


def _check_depth(depth: int, place: str) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidSpans("too_deep", place, f"a value has more than {MAX_DEPTH} levels; flatten it")


# The message of a record


class _Bad:
    """The bad spans of a record, as they are found."""

    def __init__(self) -> None:
        self.first: InvalidSpans | None = None
        self.count = 0
        self._message: _Message | None = None
        self._resource: tuple[Any, Any] = (None, None)
        self._scope: tuple[Any, Any] = (None, None)
        self._raw: list[bytes] = []
        self._documents: list[dict[str, Any]] = []

    def add(self, error: InvalidSpans, resource: Any, scoped: Any, one: Any) -> None:
        """Note a span or log record of a message, which may be removed from it afterwards."""
        self._note(error, 1)
        if self._message is None:
            self._message = TracesData() if isinstance(one, SpanMessage) else LogsData()
        outer, middle, inner = _LEVELS[type(self._message)]
        if self._resource[0] is not resource:
            self._resource = resource, getattr(self._message, outer).add(schema_url=resource.schema_url)
            self._resource[1].resource.CopyFrom(resource.resource)
        if self._scope[0] is not scoped:
            self._scope = scoped, getattr(self._resource[1], middle).add(schema_url=scoped.schema_url)
            self._scope[1].scope.CopyFrom(scoped.scope)
        getattr(self._scope[1], inner).append(one)

    def add_raw(self, error: InvalidSpans, count: int, value: bytes) -> None:
        """Note what protobuf cannot read: a whole message around it."""
        self._note(error, count)
        self._raw.append(value)

    def add_document(self, error: InvalidSpans, count: int, outer: str, document: dict[str, Any]) -> None:
        """Note a resource in JSON that holds nothing but bad spans."""
        self._note(error, count)
        self._outer = outer
        self._documents.append(document)

    def _note(self, error: InvalidSpans, count: int) -> None:
        self.first = self.first or error
        self.count += count

    def refused(self, *, any_good: bool) -> Refused | None:
        """Return what was found. Raises the first error where nothing is good."""
        if self.first is None:
            return None
        if not any_good:
            raise self.first
        if self._documents:
            text = json.dumps({self._outer: self._documents}, ensure_ascii=False, separators=(",", ":"))
            text = _LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
            return Refused(self.first, self.count, text.encode("utf-8", "surrogateescape"))
        parsed = b"" if self._message is None else self._message.SerializeToString(deterministic=True)
        return Refused(self.first, self.count, b"".join([parsed, *self._raw]))  # messages one after another are one


def _message(value: bytes) -> tuple[_Message, _Bad]:
    """Return a record as a message whose ids are complete, and what is bad in it. Raises InvalidSpans."""
    text = value.lstrip(_SPACE)
    bad = _Bad()
    if text[:1] not in (b"{", b"["):
        message = _from_protobuf(value, bad)
    else:
        try:
            message = _from_json(text, bad)
        except InvalidSpans as error:
            if error.reason != "not_json" or value[:1] != b"\n":
                raise
            message = _from_protobuf(value, bad)  # it also begins with 0x0a, and its length may be 0x7b or 0x5b
    _take_out_bad_ids(message, bad)
    return message, bad


def _from_protobuf(value: bytes, bad: _Bad) -> _Message:
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
            return traces
    except DecodeError:
        pass
    try:
        logs.ParseFromString(value)
    except DecodeError:
        return _read_singly(value, bad)
    records = [record for _, _, ones, _ in _scopes(logs) for record in ones]
    if not any(each.trace_id or each.time_unix_nano or each.observed_time_unix_nano for each in records):
        raise InvalidSpans("not_otlp", "", "protobuf, but neither spans nor log records; point the exporter at traces")
    return logs


def _read_singly(value: bytes, bad: _Bad) -> _Message:
    """Return what protobuf can read of a record if each span is read alone. Raises InvalidSpans."""
    unreadable = InvalidSpans(
        "not_otlp", "",
        "not OTLP: cut off, not UTF-8, or in another encoding; the exporter's encoding is otlp_proto or otlp_json",
    )  # fmt: skip
    for message in (TracesData(), LogsData()):
        found = _Bad()
        try:
            good = _read_resources(value, message, found)
        except _CutOffError:
            break
        if good:
            bad.__dict__.update(found.__dict__)
            return message
    raise unreadable


def _read_resources(value: bytes, message: _Message, bad: _Bad) -> bool:
    """Read a message span by span; return whether one has ids. Raises _CutOffError."""
    good = False
    (outer_name, middle, inner_name), names = _LEVELS[type(message)], _PLACES[type(message)]
    for number, resource in enumerate(_inner(value, 0, len(value), 1)[1]):
        head, scopes = _inner(value, *resource, 2)
        outer = getattr(message, outer_name).add()
        reason = _unreadable(outer, head)
        rest: list[bytes] = []
        for scope_number, scope in enumerate(scopes):
            scope_head, spans = _inner(value, *scope, 2)
            inner = getattr(outer, middle).add()
            why = _unreadable(inner, scope_head)
            rows = getattr(inner, inner_name)
            lost: list[bytes] = []
            for span_number, (start, end) in enumerate(spans):
                one = rows.add()
                if not (words := _unreadable(one, value[start:end]) or why or reason):
                    good = good or bool(one.trace_id)
                    continue
                del rows[-1]
                lost.append(_field(2, value[start:end]))
                place = f"{names[0]}.{number}.{names[1]}.{scope_number}.{names[2]}.{span_number}"
                bad.add_raw(InvalidSpans("not_otlp", place, words), 1, b"")
            if lost:
                rest.append(_field(2, scope_head + b"".join(lost)))
        if rest:
            bad.add_raw(bad.first or InvalidSpans("not_otlp", "", ""), 0, _field(1, head + b"".join(rest)))
        if reason:
            outer.Clear()
    return good


def _unreadable(message: Any, value: bytes) -> str:
    """Read a message; return "", or why it cannot be read."""
    try:
        message.ParseFromString(value)
    except DecodeError:
        message.Clear()
        return "a text that is not UTF-8, or too many levels of values; the other spans of the record are read"
    return ""


class _CutOffError(ValueError):
    """The bytes are no protobuf message."""


def _varint(value: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint, and the position behind it. Raises _CutOffError."""
    number = shift = 0
    while at < end and shift < 70:
        byte = value[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise _CutOffError


def _skipped(value: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return a field's tag, and where its content begins and ends. Raises _CutOffError."""
    tag, at = _varint(value, at, end)
    kind = tag & 7
    if kind == 2:
        size, at = _varint(value, at, end)
        last = at + size
    elif kind == 0:
        last = _varint(value, at, end)[1]
    else:
        last = at + (8 if kind == 1 else 4 if kind == 5 else end + 1)
    if last > end:
        raise _CutOffError
    return tag, at, last


def _inner(value: bytes, start: int, end: int, number: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a message without its submessages of one field, and where those begin and end. Raises _CutOffError."""
    head, found, at = [], [], start
    while at < end:
        tag, content, last = _skipped(value, at, end)
        if tag == number << 3 | 2:
            found.append((content, last))
        else:
            head.append(value[at:last])
        at = last
    return b"".join(head), found


def _field(number: int, content: bytes) -> bytes:
    size, rest = bytearray([number << 3 | 2]), len(content)
    while rest > 0x7F:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    size.append(rest)
    return bytes(size) + content


_Shape: TypeAlias = "dict[int, _Shape]"

_VALUE: _Shape = {}
_PAIR: Final[_Shape] = {2: _VALUE}
_VALUE |= {5: {1: _VALUE}, 6: {1: _PAIR}}
_SCOPE: Final[_Shape] = {3: _PAIR}
_SPAN: Final[_Shape] = {9: _PAIR, 11: {3: _PAIR}, 13: {4: _PAIR}, 5: _VALUE, 6: _PAIR}
_RECORD: Final[_Shape] = {1: {1: {1: _PAIR}, 2: {1: _SCOPE, 2: _SPAN}}}
"""Which fields of OTLP hold messages, by their numbers: of a span, and of a log record (its body and attributes)."""


def fields_in(value: bytes, most: int = MAX_FIELDS) -> int:
    """Return how many messages are in a message of OTLP; once there are more than `most`, how many were found."""
    count, stack = 0, [(0, len(value), _RECORD)]
    while stack:
        at, end, shape = stack.pop()
        try:
            while at < end:
                tag, content, at = _skipped(value, at, end)
                inner = shape.get(tag >> 3) if tag & 7 == 2 else None
                if inner is not None:
                    count += 1
                    if count > most:
                        return count
                    if at > content:
                        stack.append((content, at, inner))
        except _CutOffError:
            continue
    return count


def _check_fields(value: bytes, count: Callable[[bytes], int] = fields_in) -> None:
    if len(value) > COUNTED_BYTES and count(value) > MAX_FIELDS:
        words = f"more than {MAX_FIELDS} spans, events, attributes and values; send fewer of them in a record"
        raise InvalidSpans("too_large", "", words)


def _take_out_bad_ids(message: _Message, bad: _Bad) -> None:
    """Take what has wrong ids out of a message."""
    right: Callable[[Any], bool]
    right, words = (_has_span_ids, SPAN_IDS) if isinstance(message, TracesData) else (_has_log_ids, LOG_IDS)
    for resource, scoped, ones, place in _scopes(message):
        good = [one for one in ones if right(one)]
        if len(good) == len(ones):
            continue
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


# JSON


def _from_json(text: bytes, bad: _Bad) -> _Message:
    _check_fields(text, lambda text: text.count(b"{") + text.count(b"["))
    try:
        document = msgspec.json.decode(text)
    except UnicodeDecodeError as error:
        document = _with_wrong_bytes(text, error)
    except RecursionError:
        raise InvalidSpans("too_deep", "", f"a value has more than {MAX_DEPTH} levels; flatten it") from None
    except msgspec.MsgspecError as error:
        raise InvalidSpans("not_json", "", f"{error}; a record is one whole JSON object") from None
    if not isinstance(document, dict):
        raise InvalidSpans("not_otlp", "", "a JSON list; OTLP in JSON is an object with resourceSpans or resourceLogs")
    spans, logs = document.get("resourceSpans"), document.get("resourceLogs")
    if spans is not None and logs is not None:
        raise InvalidSpans("not_otlp", "", "both resourceSpans and resourceLogs; a record has one of them")
    if logs is None and "resourceSpans" not in document and document:
        found = ", ".join(sorted(document)[:3])
        raise InvalidSpans("not_otlp", "", f"an object with {found[:60]}; OTLP has resourceSpans or resourceLogs")
    return _resources_from_json(document, TracesData() if logs is None else LogsData(), bad)


def _with_wrong_bytes(text: bytes, error: UnicodeDecodeError) -> Any:
    """Return a document in which each byte that is not UTF-8 is half of a surrogate pair: its span is refused."""
    try:
        document = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not any(isinstance(each, list) for each in document.values()):
        words = f"not UTF-8: {error.reason}; send OTLP in JSON as UTF-8"
        raise InvalidSpans("not_json", "", words)
    return document


def _resources_from_json(document: dict[str, Any], message: _Message, bad: _Bad) -> _Message:
    (outer_name, middle_name, inner_name), (outer, middle, inner) = _LEVELS[type(message)], _PLACES[type(message)]
    fill: Callable[..., None] = _fill_span if isinstance(message, TracesData) else _fill_log
    for place, each in _items(document, outer, ""):
        target = getattr(message, outer_name).add()
        lost: list[Any] = []
        count, first = 0, None
        try:
            found = _as_object(each, place)
            target.schema_url = _text(found, "schemaUrl", place)
            _fill(target.resource.attributes, _object(found, "resource", place), f"{place}.resource")
            scopes = list(_items(found, middle, place))
        except (InvalidSpans, UnicodeEncodeError) as error:
            target.Clear()
            bad.add_document(_refusal(error, place), _count(each, middle, inner), outer, each)
            continue
        for scope_place, scoped in scopes:
            scope = getattr(target, middle_name).add()
            wrong: list[Any] = []
            try:
                inside = _as_object(scoped, scope_place)
                scope.schema_url = _text(inside, "schemaUrl", scope_place)
                scope.scope.name = _text(_object(inside, "scope", scope_place), "name", scope_place)
                ones = list(_items(inside, inner, scope_place))
            except (InvalidSpans, UnicodeEncodeError) as error:
                scope.Clear()
                first = first or _refusal(error, scope_place)
                count += _count({middle: [scoped]}, middle, inner)
                lost.append(scoped)
                continue
            rows = getattr(scope, inner_name)
            for one_place, one in ones:
                try:
                    fill(rows.add(), _as_object(one, one_place), one_place)
                except (InvalidSpans, UnicodeEncodeError) as error:
                    del rows[-1]
                    first = first or _refusal(error, one_place)
                    wrong.append(one)
            if wrong:
                count += len(wrong)
                lost.append({**inside, inner: wrong})
        if first is not None:
            bad.add_document(first, count, outer, {**found, middle: lost})
    return message


def _refusal(error: InvalidSpans | UnicodeEncodeError, place: str) -> InvalidSpans:
    if isinstance(error, InvalidSpans):
        return error
    return InvalidSpans("invalid_value", place, "a text is not UTF-8; send OTLP in JSON as UTF-8")


def _count(resource: Any, middle: str, inner: str) -> int:
    """Return how many spans a resource in JSON has, as far as that can be told; at least 1."""
    scopes = resource.get(middle) if isinstance(resource, dict) else None
    rows = [each.get(inner) for each in scopes if isinstance(each, dict)] if isinstance(scopes, list) else []
    return max(1, sum(len(each) for each in rows if isinstance(each, list)))


def _fill_span(span: SpanMessage, found: dict[str, Any], place: str) -> None:
    span.trace_id = _id(found, "traceId", 16, place)
    span.span_id = _id(found, "spanId", 8, place)
    span.parent_span_id = _id(found, "parentSpanId", 8, place)
    span.name = _text(found, "name", place)
    span.kind = _enum(found, "kind", SpanMessage.SpanKind, place)
    span.start_time_unix_nano = _integer(found, "startTimeUnixNano", 0, 1 << 64, place)
    span.end_time_unix_nano = _integer(found, "endTimeUnixNano", 0, 1 << 64, place)
    span.dropped_attributes_count = _integer(found, "droppedAttributesCount", 0, 1 << 32, place)
    span.flags = _integer(found, "flags", 0, 1 << 32, place)
    status = _object(found, "status", place)
    if status:
        span.status.code = _enum(status, "code", Status.StatusCode, f"{place}.status")
        span.status.message = _text(status, "message", f"{place}.status")
    _fill(span.attributes, found, place)
    for event_place, each in _objects(found, "events", place):
        event = span.events.add(name=_text(each, "name", event_place))
        event.time_unix_nano = _integer(each, "timeUnixNano", 0, 1 << 64, event_place)
        _fill(event.attributes, each, event_place)
    if not _has_span_ids(span):
        raise InvalidSpans("invalid_value", place, SPAN_IDS)


def _fill_log(record: LogRecord, found: dict[str, Any], place: str) -> None:
    record.trace_id = _id(found, "traceId", 16, place)
    record.span_id = _id(found, "spanId", 8, place)
    record.event_name = _text(found, "eventName", place)
    record.time_unix_nano = _integer(found, "timeUnixNano", 0, 1 << 64, place)
    record.observed_time_unix_nano = _integer(found, "observedTimeUnixNano", 0, 1 << 64, place)
    _fill(record.attributes, found, place)
    if (body := _object(found, "body", place)) != {}:
        _fill_value(record.body, body, f"{place}.body", 0)


def _fill(attributes: Any, found: dict[str, Any], place: str) -> None:
    for where, pair in _objects(found, "attributes", place):
        attribute = attributes.add(key=_text(pair, "key", where))
        _fill_value(attribute.value, _object(pair, "value", where), where, 0)


def _fill_value(value: AnyValue, found: dict[str, Any], place: str, depth: int) -> None:
    for kind, inner in found.items():
        if inner is None:
            continue
        if kind == "stringValue":
            value.string_value = _text(found, kind, place)
        elif kind == "intValue":
            value.int_value = _integer(found, kind, -1 << 63, 1 << 63, place)
        elif kind == "boolValue":
            value.bool_value = inner if isinstance(inner, bool) else _refuse_type(inner, "true or false", place)
        elif kind == "doubleValue":
            value.double_value = _double(inner, place)
        elif kind == "bytesValue":
            value.bytes_value = _base64(_text(found, kind, place), place)
        elif kind == "arrayValue":
            _check_depth(depth, place)
            value.array_value.SetInParent()
            for where, item in _objects(_object(found, kind, place), "values", place):
                _fill_value(value.array_value.values.add(), item, where, depth + 1)
        elif kind == "kvlistValue":
            _check_depth(depth, place)
            value.kvlist_value.SetInParent()
            for where, pair in _objects(_object(found, kind, place), "values", place):
                added = value.kvlist_value.values.add(key=_text(pair, "key", where))
                _fill_value(added.value, _object(pair, "value", where), where, depth + 1)


def _items(found: dict[str, Any], name: str, place: str) -> Iterator[tuple[str, Any]]:
    items = found.get(name)
    if items is None:
        return
    place = f"{place}.{name}" if place else name
    if not isinstance(items, list):
        _refuse_type(items, "a list", place)
    for number, item in enumerate(items):
        yield f"{place}.{number}", item


def _objects(found: dict[str, Any], name: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, item in _items(found, name, place):
        yield where, _as_object(item, where)


def _as_object(item: Any, place: str) -> dict[str, Any]:
    return item if isinstance(item, dict) else _refuse_type(item, "an object", place)


def _object(found: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    inner = found.get(name)
    if inner is None:
        return {}
    return inner if isinstance(inner, dict) else _refuse_type(inner, "an object", f"{place}.{name}")


def _text(found: dict[str, Any], name: str, place: str) -> str:
    text = found.get(name)
    if text is None:
        return ""
    return text if isinstance(text, str) else _refuse_type(text, "a text", f"{place}.{name}")


def _integer(found: dict[str, Any], name: str, low: int, end: int, place: str) -> int:
    """Return an integer from `low` to below `end`, which JSON may have as a text; 0 where it is absent."""
    value = found.get(name)
    if value is None:
        return 0
    try:
        number = None if isinstance(value, bool) or not isinstance(value, int | str) else int(value)
    except ValueError:
        number = None
    if number is None:
        _refuse_type(value, "an integer", f"{place}.{name}")
    if not low <= number < end:
        raise InvalidSpans("invalid_value", f"{place}.{name}", f"an integer from {low} to {end - 1} is expected")
    return number


def _enum(found: dict[str, Any], name: str, names: Any, place: str) -> Any:
    value = found.get(name)
    if isinstance(value, str) and value in names.keys():  # noqa: SIM118 a wrapper, no dict
        return names.Value(value)
    return _integer(found, name, 0, 1 << 31, place)


def _double(value: Any, place: str) -> float:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return math.nan if value == "NaN" else math.inf if value == "Infinity" else -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        _refuse_type(value, "a number", place)
    try:
        return float(value)
    except (ValueError, OverflowError):
        _refuse_type(value, "a number", place)


def _id(found: dict[str, Any], name: str, size: int, place: str) -> bytes:
    """Return an id of `size` bytes, which is in hex, or in base64 by some writers; b"" where it is absent."""
    text = _text(found, name, place)
    if not text:
        return b""
    try:
        value = bytes.fromhex(text) if len(text) == 2 * size else base64.b64decode(text, validate=True)
    except ValueError:
        value = b""
    if len(value) != size:
        raise InvalidSpans("invalid_value", f"{place}.{name}", f"an id of {2 * size} hex digits is expected")
    return value


def _base64(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise InvalidSpans("invalid_value", place, "bytesValue is base64") from None


def _refuse_type(value: Any, wanted: str, place: str) -> NoReturn:
    kind = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}.get(type(value), "a number")
    raise InvalidSpans("invalid_type", place, f"{kind}, but {wanted} is expected")
