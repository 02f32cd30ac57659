r"""The reasoning trace: its model, validation, time and embedded text, and the scored output document.

The only exception raised for a document is InvalidTrace.

A document is valid if JSON.parse and the reference's zod 3 schema accept it, with these deliberate differences:

- A lone surrogate escape (`"\ud800"`) is refused anywhere, even in unknown fields: UTF-8 cannot carry it.
- A number beyond a double is refused in a field of the schema (the reference reads 1e400 as Infinity); unknown fields
  keep it as spelt. An integer of more than about 4300 digits, Python's limit, is refused anywhere.
- The year 0000 is refused: the calendars of Python and of most databases begin with year 1.
- `Limits` bounds bytes, steps and depth, so that one document cannot hold up its partition.

As in the reference, the last of duplicate keys counts and the earlier ones need only be JSON; 1.0 and 1e0 are
integers; null is not absence; U+0000 is a character like any other.
"""

import enum
import functools
import heapq
import json
import math
import re
import reprlib
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

CONTEXT = "https://openknowledgepulse.org/schema/v1"
LEGACY_CONTEXT = "https://knowledgepulse.dev/schema/v1"

# UTC as "Z" only, seconds optional, any number of fraction digits, 29 February in leap years only. The JSON Schema has
# it too, so it must mean the same in JavaScript and Python: [0-9] because Python's \d matches any Unicode digit, and
# (?![\s\S]) for the end because Python's $ also matches before a final newline.
CREATED_AT_PATTERN = (
    r"^(?!0000)(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
    r"-02-29)T(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?Z(?![\s\S])"
)

# In characters. A message goes into a Kafka header and log lines: long enough to say what to do, never a copy of the
# content.
MAX_MESSAGE = 300


class Reason(enum.StrEnum):
    """The closed list of reasons for a dead letter: the header kp-error-reason, and a metric label."""

    EMPTY_VALUE = "empty_value"  # null (a tombstone) or no bytes
    TOO_LARGE = "too_large"
    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"  # also a lone surrogate escape
    TOO_DEEP = "too_deep"
    TOO_MANY_STEPS = "too_many_steps"
    WRONG_CONTEXT = "wrong_context"  # @context
    WRONG_TYPE = "wrong_type"  # @type, for example of another knowledge unit
    MISSING_FIELD = "missing_field"
    INVALID_TYPE = "invalid_type"  # another JSON type than the field's
    INVALID_VALUE = "invalid_value"  # right type, but out of range, not in the list, or malformed
    EMBEDDING_FAILED = "embedding_failed"  # the model failed on this text; the document is valid
    EVALUATION_FAILED = "evaluation_failed"  # a bug in the worker: it failed to read, score, redact or screen it
    BAD_HEADER = "bad_header"  # a header's name is not UTF-8
    BATCH_TOO_LARGE = "batch_too_large"  # a batch unpacks to more than KP_MAX_BATCH_BYTES: one letter for all records
    UNREADABLE = "unreadable"  # a record, or the rest of a batch, that does not follow Kafka's format
    REFUSED_BY_TOPIC = "refused_by_topic"  # the output topic refused the scored trace for good
    BAD_CONTROL = "bad_control"  # a control record that must not be honoured
    NOT_OTLP = "not_otlp"  # a record on a spans topic that is not OTLP
    LATE_SPAN = "late_span"  # spans of a run that is already closed
    ASSEMBLY_FAILED = "assembly_failed"  # a bug in the worker: it made no trace from the spans


class InvalidTrace(ValueError):
    """Why a document is not a valid trace; the message says what to do."""

    def __init__(self, reason: Reason, path: str, message: str) -> None:
        super().__init__(reason, path, message)
        self.reason = reason
        self.path = path  # `steps.1.tool.name`; "": the document. Names of the schema and indexes, never content
        # Not every str can be encoded as UTF-8, and a header must be.
        self.message = message[:MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8")

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Limits:
    """Bounds on one document."""

    max_bytes: int = 1_048_576  # of UTF-8
    max_steps: int = 10_000
    max_depth: int = 64  # levels of nesting; keep it far below 1000
    strict_context: bool = False
    """Refuse the project's former @context, which its documentation still shows but the reference schema rejects."""


DEFAULT_LIMITS = Limits()

# The structs declare their fields in the reference's order, in which problems are reported. Optional fields have
# neutral defaults, never null, so null is refused.
Context = Literal["https://openknowledgepulse.org/schema/v1", "https://knowledgepulse.dev/schema/v1"]
Number = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Integer = Annotated[float, Meta(ge=0, multiple_of=1)]  # JSON has no integer type: 1.0 and 1e300 count
Fraction = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
TraceId = Annotated[str, Meta(pattern="^kp:trace:")]
Timestamp = Annotated[str, Meta(pattern=CREATED_AT_PATTERN)]


class Metadata(Struct, frozen=True, kw_only=True):
    """Who recorded the trace, when, and in which domain."""

    created_at: Timestamp
    agent_id: str = ""
    framework: str = ""
    task_domain: Text
    success: bool
    quality_score: Fraction
    visibility: Literal["private", "org", "network"]
    privacy_level: Literal["aggregated", "federated", "private"]
    validated_by: list[str] = field(default_factory=list)


class Task(Struct, frozen=True, kw_only=True):
    """The task given to the agent."""

    objective: Text
    input_schema: dict[str, Any] = field(default_factory=dict)


class Tool(Struct, frozen=True, kw_only=True):
    """The tool of one step."""

    name: str
    mcp_server: str = ""


class Step(Struct, frozen=True, kw_only=True):
    """One step of reasoning."""

    step_id: Integer
    type: Literal["thought", "tool_call", "observation", "error_recovery"]
    content: str = ""  # "" if absent
    tool_or_unset: Tool | UnsetType = field(default=UNSET, name="tool")
    input: dict[str, Any] = field(default_factory=dict)
    output_summary: str = ""
    latency_ms: Number = 0.0

    @property
    def tool(self) -> Tool | None:
        """The tool, or None if the step has none."""
        return self.tool_or_unset or None


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of the task."""

    result_summary: str
    confidence: Fraction
    evaluated: Any = None  # True: the confidence comes from an evaluation; any other value is ignored


class Entity(Struct, frozen=True, kw_only=True):
    """A node of the knowledge graph."""

    name: str
    type: str


class Relationship(Struct, frozen=True, kw_only=True):
    """An edge of the knowledge graph."""

    fact: str
    valid_from: str


class KnowledgeGraphDelta(Struct, frozen=True, kw_only=True):
    """The trace's additions to the knowledge graph."""

    entities: list[Entity]
    relationships: list[Relationship]


class ReasoningTrace(Struct, frozen=True, kw_only=True):
    """A valid trace, without unknown fields (`splice` keeps them)."""

    context: Context = field(name="@context")
    kind: Literal["ReasoningTrace"] = field(name="@type")
    id: TraceId
    source_skill: str = ""
    metadata: Metadata
    task: Task
    steps: Annotated[list[Step], Meta(min_length=1)]
    outcome: Outcome
    knowledge_graph_delta: KnowledgeGraphDelta | UnsetType = UNSET


# Untyped first, then typed: decoding to plain values checks every byte, including unknown fields, and lets the last of
# duplicate keys win; a typed decoder does neither. The hook reads 1e400 as inf instead of failing.
document_decoder = msgspec.json.Decoder(float_hook=float)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])

_ADVICE = {
    "@context": f"give {CONTEXT}",
    "@type": "give ReasoningTrace; other knowledge units belong on other topics",
    "created_at": "give a UTC time such as 2026-04-14T08:00:03.589Z",
    "id": "start it with kp:trace:",
    "step_id": "give an integer of at least 0",
    "latency_ms": "give a finite number of at least 0",
    "quality_score": "give a number from 0 to 1",
    "confidence": "give a number from 0 to 1",
    "steps": "give at least one step",
    "task_domain": "give at least one character",
    "objective": "give at least one character",
}


def parse_trace(raw: bytes | bytearray | memoryview | str | None, limits: Limits = DEFAULT_LIMITS) -> ReasoningTrace:
    """Return the trace in `raw`, JSON as UTF-8 or str. Raises InvalidTrace, and TypeError for any other type."""
    if not isinstance(raw, str | bytes | bytearray | memoryview | None):
        raise TypeError(
            f"parse_trace takes the JSON of a trace, as bytes or str, not {type(raw).__name__}; a document that is "
            "parsed already needs json.dumps() first"
        )
    if raw is None or not len(raw):
        raise InvalidTrace(Reason.EMPTY_VALUE, "", "the record has no value; send a ReasoningTrace as JSON")
    document = _parse_json(raw, limits)
    if isinstance(document, dict):
        if limits.strict_context and document.get("@context") == LEGACY_CONTEXT:
            _refuse(Reason.WRONG_CONTEXT, ("@context",), f"the former context; {_ADVICE['@context']}")
        steps = document.get("steps")
        if isinstance(steps, list) and len(steps) > limits.max_steps:
            problem = f"{len(steps)} steps, the limit is {limits.max_steps}; split the trace or raise the limit"
            _refuse(Reason.TOO_MANY_STEPS, ("steps",), problem)
    try:
        return msgspec.convert(document, ReasoningTrace)
    except msgspec.ValidationError as error:
        _explain(document, ReasoningTrace, ())
        raise AssertionError("convert refused what _explain accepts: this is a bug") from error


def embedding_text(trace: ReasoningTrace) -> str:
    """Return the text to embed: the objective and all steps' contents, joined by single spaces."""
    return " ".join([trace.task.objective, *[step.content for step in trace.steps]])


EARLIEST_MS: Final = -62_135_596_800_000
LATEST_MS: Final = 253_402_300_799_999
"""The first and the last millisecond (since 1970) of the years 1 to 9999, the range of created_at."""


def created_at_ms(trace: ReasoningTrace) -> int:
    """Return created_at in ms since 1970, without further fraction digits."""
    text = trace.metadata.created_at
    days = date(int(text[:4]), int(text[5:7]), int(text[8:10])).toordinal() - date(1970, 1, 1).toordinal()
    seconds = (days * 24 + int(text[11:13])) * 3600 + int(text[14:16]) * 60 + int(text[17:19] or 0)
    return seconds * 1000 + int(text[20:23].rstrip("Z").ljust(3, "0"))


def splice(raw: bytes, quality_score: float, scoring: bytes) -> bytes:
    """Return the output document: `raw` with `metadata.quality_score` set and `scoring` (JSON) appended.

    `raw` must have passed `parse_trace`. Every other value keeps its bytes, and every field its place.
    """
    document = _fields_decoder.decode(raw)
    metadata = _fields_decoder.decode(document["metadata"])
    metadata["quality_score"] = Raw(msgspec.json.encode(quality_score))
    document["metadata"] = Raw(msgspec.json.encode(metadata))
    document.pop("scoring", None)
    document["scoring"] = Raw(scoring)
    return msgspec.json.encode(document)


def _parse_json(text: bytes | bytearray | memoryview | str, limits: Limits) -> Any:
    """Return the value of a JSON text; its depth is measured only if there are enough brackets to exceed the limit."""
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
        if len(raw) > limits.max_bytes:
            problem = f"{len(raw)} bytes, the limit is {limits.max_bytes}; shorten the trace or raise the limit"
            raise InvalidTrace(Reason.TOO_LARGE, "", problem)
        document = document_decoder.decode(raw)
        brackets = raw.count(b"{") + raw.count(b"[")
        if brackets <= limits.max_depth or not _deeper_than(limits.max_depth, document):
            return document
    except UnicodeEncodeError as error:
        problem = f"a lone surrogate at character {error.start}; send valid Unicode"
        raise InvalidTrace(Reason.NOT_UTF8, "", problem) from None
    except UnicodeDecodeError as error:
        raise InvalidTrace(Reason.NOT_UTF8, "", f"not UTF-8: {error.reason}; send JSON in UTF-8") from None
    except msgspec.ValidationError:
        problem = "an integer of thousands of digits; shorten it"
        raise InvalidTrace(Reason.INVALID_VALUE, "", problem) from None
    except msgspec.DecodeError as error:
        problem = f"{error}; send one JSON document, without lone surrogate escapes"
        raise InvalidTrace(Reason.NOT_JSON, "", problem) from None
    except RecursionError:
        pass
    problem = f"nested deeper than {limits.max_depth} levels; flatten the trace or raise the limit"
    raise InvalidTrace(Reason.TOO_DEEP, "", problem)


def _deeper_than(limit: int, document: Any) -> bool:
    """Return whether lists and dicts nest in more than `limit` levels; one pass, no recursion."""
    # Lists and dicts separately, their items by `chain`: a megabyte holds 490,000 brackets, and a Python loop over each
    # takes four times as long.
    level: list[Any] = [document]
    for _ in range(limit + 1):
        lists = [item for item in level if type(item) is list]
        dicts = [item for item in level if type(item) is dict]
        if not lists and not dicts:
            return False
        level = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
    return True


def bare_type(kind: Any) -> Any:
    """Return the type of a struct's field without limits and without UNSET."""
    return get_args(kind)[0] if get_origin(kind) in (Annotated, types.UnionType) else kind


_fields_of = functools.cache(msgspec.structs.fields)


def _explain(value: Any, kind: Any, path: tuple[str | int, ...], *, optional: bool = False) -> None:
    """Raise InvalidTrace for the first problem in the order of the schema; return if `value` is a `kind`.

    `convert` alone would name the first problem in the order of the document, and missing fields last.
    """
    try:
        msgspec.convert(value, kind)
        return
    except msgspec.ValidationError as error:
        problem = str(error)
    inner = bare_type(kind)
    if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
        for info in _fields_of(inner):
            if info.encode_name in value:
                _explain(value[info.encode_name], info.type, (*path, info.encode_name), optional=not info.required)
            elif info.required:
                _refuse(Reason.MISSING_FIELD, (*path, info.encode_name), "required, but missing; add it")
    elif isinstance(value, list) and get_origin(inner) is list:
        # msgspec names the first bad item at the end of its message; the beginning may quote the document.
        item = problem.rpartition(" - at `$[")[2].partition("]")[0]
        if item.isdecimal():
            _explain(value[int(item)], get_args(inner)[0], (*path, int(item)))
    name = path[-1] if path else ""
    differ = mismatch(problem)
    reason = Reason.INVALID_VALUE if differ is None else Reason.INVALID_TYPE
    if len(path) == 1:
        reason = {"@context": Reason.WRONG_CONTEXT, "@type": Reason.WRONG_TYPE}.get(str(name), reason)
    advice = _ADVICE.get(str(name))
    if advice is None and get_origin(kind) is Literal:
        advice = f"use one of {', '.join(get_args(kind))}"
    if differ is not None and reason is Reason.INVALID_TYPE:
        given, wanted = differ
        leave = ", or leave the field out" if optional and value is None else ""
        _refuse(reason, path, f"{given} is not allowed; {advice or f'give {wanted}'}{leave}")
    _refuse(reason, path, f"{excerpt(value)} is not allowed; {advice or 'correct it'}")


def _refuse(reason: Reason, path: tuple[str | int, ...], problem: str) -> None:
    where = ".".join(map(str, path))
    raise InvalidTrace(reason, where, f"{where or 'document'}: {problem}")


WHOLE: Final = "whole"


def embedded_texts(trace: ReasoningTrace, view: str = WHOLE) -> tuple[str, ...]:
    """Return the texts whose unit mean is the trace's vector.

    `whole`: the objective and all steps' contents, as one text. `objective`: the objective and, if any step has
    content, that text.
    """
    text = embedding_text(trace)
    if view == WHOLE:
        return (text,)
    objective = trace.task.objective
    return (objective, text) if any(step.content for step in trace.steps) else (objective,)


def is_objective(index: int, view: str) -> bool:
    """Return whether the text at an index of `embedded_texts` is the objective, which is read beyond KP_MAX_TOKENS."""
    return index == 0 and view != WHOLE


def joined(texts: Sequence[str]) -> str:
    """Return one text that is different for different texts; a single text is returned unchanged."""
    return texts[0] if len(texts) == 1 else f"{len(texts[0])}:{''.join(texts)}"


# -- what is wrong with a JSON value, in JSON's terms; msgspec's messages name Python types

_WANTED: Final = {
    "str": "a string", "float": "a number", "int": "an integer", "bool": "true or false", "object": "an object",
    "array": "an array", "null": "null",
}  # fmt: skip
_GIVEN: Final = _WANTED | {"int": "a number", "bool": "a boolean"}
_MISMATCH: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_BOUND: Final = re.compile(r"Expected `([^`]+)` ?(.*)")
_MISSING: Final = re.compile(r"Object missing required field `([^`]+)`")


class _Excerpt(reprlib.Repr):
    """The beginning of a value, as JSON spells it; one line of printable characters."""

    def repr_str(self, text: str, level: int) -> str:
        """Write a string, without the middle of a long one."""
        half = (self.maxstring - 3) // 2
        short = text if len(text) <= self.maxstring else f"{text[:half]}...{text[-half:]}"
        written = json.dumps(short, ensure_ascii=False)
        return "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in written)

    def repr_bool(self, value: bool, level: int) -> str:
        """Write true or false."""
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802 a type's name
        """Write null."""
        return "null"

    def repr_float(self, value: float, level: int) -> str:
        """Write a number. JSON has no infinity; the parser reads 1e400 as one."""
        return "a number beyond 1.8e308" if math.isinf(value) else repr(value)


_excerpt = _Excerpt()
_excerpt.maxstring = 60
_excerpt.maxlevel = 1


def excerpt(value: Any) -> str:
    """Return the beginning of a value for a message."""
    if isinstance(value, dict):  # reprlib sorts all keys to show the first few
        value = {key: value[key] for key in heapq.nsmallest(_excerpt.maxdict + 1, value)}
    return _excerpt.repr(value)


def mismatch(problem: str) -> tuple[str, str] | None:
    """Return the type that msgspec found and the one that it expected, in words; None for any other problem."""
    match = _MISMATCH.match(problem)
    return None if match is None else (_types(match[2], _GIVEN), _types(match[1], _WANTED))


def in_json_words(problem: str) -> str:
    """Return a message of msgspec with the field first and JSON's names of types."""
    text, _, path = problem.partition(" - at `$")
    where = path.rstrip("`").removeprefix(".")
    if types := mismatch(text):
        text = f"{types[0]} is not allowed; give {types[1]}"
    elif bound := _BOUND.fullmatch(text):
        text = f"give {_types(bound[1], _WANTED)} {bound[2]}".rstrip()
    elif missing := _MISSING.fullmatch(text):
        text = f"the field `{missing[1]}` is missing; add it"
    return f"{where}: {text}" if where else text


def _types(names: str, words: dict[str, str]) -> str:
    return " or ".join(words.get(name, name) for name in names.split(" | "))
