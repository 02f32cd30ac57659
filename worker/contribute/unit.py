"""The outputs for an accepted record: the knowledge unit, redacted, or a refused record; and the receipt."""

import hashlib
import logging
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from worker.core.dead_letters import error_headers, truncated_header
from worker.core.records import DEAD_LETTER, NO_FAULT_OF_A_RECORD, SCREEN_HIDDEN, OutputRecord, SourceRecord, raised
from worker.core.trace import CONTEXT, InvalidTrace, Limits, Metadata, ReasoningTrace, bare_type, parse_trace
from worker.redact.documents import Rules, level_of, redact_document, redact_text
from worker.redact.screen import place_of, screen_json
from worker.version import __version__

log = logging.getLogger(__name__)

STRICTEST: Final = "aggregated"
"""The level for texts without one: it redacts most."""

STRICT: Final = Rules("strict")
"""The rules for texts that are not posted (messages, headers), and the default."""

MAX_ID_BYTES: Final = 2048
"""UTF-8 bytes of the longest id. PostgreSQL, which the registry may use, accepts no index key beyond 2704 bytes.
Percent-encoded, the id is three times as long, and URLs of 8000 bytes should work everywhere (RFC 9110, 4.1)."""

MAX_VALUES: Final = 200_000
"""Maximum number of values in a registry unit that is redacted for the comparison; a copy of them takes 30 MB."""


def secret_in_id(trace_id: str, level: str, rules: Rules = STRICT) -> bool:
    """Return whether the id of a trace contains a secret; digits are none: 1 of 100 random UUIDs has a phone's."""
    return not redact_text(trace_id, level, rules)[1].keys() <= {"phone", "card", "ssn"}


def clean_words(text: str, rules: Rules = STRICT) -> str:
    """Return a text without secrets."""
    return redact_text(text, STRICTEST, rules)[0]


def clean_bytes(text: bytes, rules: Rules = STRICT) -> bytes:
    """Return a key or header content without secrets; any bytes are allowed."""
    return clean_words(text.decode("utf-8", "surrogateescape"), rules).encode("utf-8", "surrogateescape")


def clean_issues(issues: Any) -> str:
    """Return the registry's issues as JSON without secrets, cut to 2000 characters: they travel in a Kafka header."""
    try:
        cleaned = redact_document({"issues": issues}, STRICTEST, STRICT)[0]["issues"]
    except NO_FAULT_OF_A_RECORD:
        raise
    except Exception as error:  # an answer to one trace must not stop the others
        cleaned = f"left out, since their redaction fails with {raised(error)}; that is a bug, please report it"
    return msgspec.json.encode(cleaned).decode()[:2000]


@dataclass(frozen=True, slots=True)
class Gate:
    """The conditions for posting a trace."""

    visibility: Set[str]  # allowed values of metadata.visibility
    privacy: Set[str]  # allowed values of metadata.privacy_level
    rules: Rules = STRICT  # of redaction
    screen: bool = False  # refuses a unit with hidden text


class Unit(Struct, frozen=True):
    """The unit to post for one trace."""

    trace_id: str
    body: bytes  # JSON
    document: Mapping[str, Any]  # the value of the body
    redactions: Mapping[str, int]  # markers by type
    rules: Rules = STRICT

    @property
    def sha256(self) -> str:
        """Return the hash of the body (hex)."""
        return hashlib.sha256(self.body).hexdigest()


class Skip(Struct, frozen=True):
    """A trace that the gate keeps back."""

    reason: str  # visibility or privacy


class Refusal(Struct, frozen=True):
    """A record that is refused permanently. All texts are redacted."""

    reason: str
    message: str
    path: str = ""
    status: int | None = None  # the registry's; None: it was not asked
    issues: str | None = None  # the registry's


def unit_from(value: bytes | None, gate: Gate, limits: Limits) -> Unit | Skip | Refusal:
    """Decide what to do with a record value of the accepted topic."""
    try:
        return _unit_from(value, gate, limits)
    except NO_FAULT_OF_A_RECORD:
        raise
    except Exception as error:
        message = (
            f"the worker fails on this trace with {raised(error)}. That is a bug: please report it, and redrive the "
            "trace once a version fixes it"
        )
        return Refusal("evaluation_failed", message)


def _unit_from(value: bytes | None, gate: Gate, limits: Limits) -> Unit | Skip | Refusal:
    try:  # the accepted topic limits the size of a document
        trace = parse_trace(value, replace(limits, max_bytes=1 << 30, strict_context=False))
    except InvalidTrace as error:
        return Refusal("invalid_trace", clean_words(error.message, gate.rules), error.path)
    if trace.metadata.visibility not in gate.visibility:
        return Skip("visibility")
    if trace.metadata.privacy_level not in gate.privacy:
        return Skip("privacy")
    level = trace.metadata.privacy_level
    if secret_in_id(trace.id, level, gate.rules):
        return Refusal("secret_in_id", "the id holds a secret or an address, and an id cannot be redacted", "id")
    if (size := len(trace.id.encode("utf-8", "replace"))) > MAX_ID_BYTES:
        return Refusal("id_too_long", f"the id has {size} bytes; give ids of at most {MAX_ID_BYTES}", "id")
    document, counts = redact_document(known_fields(decode_json(value or b"")), level, gate.rules)
    document["@context"] = CONTEXT  # the registry rejects the former one
    body = msgspec.json.encode(document)
    if len(body) > limits.max_bytes:
        message = (
            f"the unit has {len(body)} bytes once it is redacted, more than KP_MAX_MESSAGE_BYTES={limits.max_bytes}; "
            "shorten the trace, or raise the setting if the registry takes larger ones"
        )
        return Refusal("too_large", message)
    if gate.screen and (matched := screen_json(body, SCREEN_HIDDEN).rules):
        message = (
            f"the screen finds {', '.join(matched)}; look at the text, then drop the trace, or set "
            "KP_CONTRIBUTE_SCREEN=off and redrive it"
        )
        return Refusal("screened", message, place_of(document))
    return Unit(trace.id, body, document, counts, gate.rules)


def decode_json(value: bytes) -> Any:
    """Return the value of a JSON text. Raises msgspec.DecodeError, RecursionError, UnicodeDecodeError."""
    return _decoder.decode(value)


_decoder = msgspec.json.Decoder(float_hook=float)  # 1e400 is inf, which is sent as null, as JavaScript sends it


def json_object(value: bytes) -> dict[str, Any] | None:
    """Return the JSON object; None if the bytes are anything else."""
    try:
        document = decode_json(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return document if isinstance(document, dict) else None


def known_fields(document: Any) -> dict[str, Any]:
    """Return only the document's schema fields, at every level that the schema describes."""
    known: dict[str, Any] = _known(document, ReasoningTrace)
    return known


def _known(value: Any, kind: Any) -> Any:
    if get_origin(kind) is list and isinstance(value, list):
        return [_known(item, get_args(kind)[0]) for item in value]
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: item for name, item in value.items() if name != "__proto__"}  # the registry drops it
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
        fields = _field_types(kind)
        return {name: _known(item, fields[name]) for name, item in value.items() if name in fields}
    return value


@cache  # msgspec builds the fields again for each call
def _field_types(kind: type[Struct]) -> dict[str, Any]:
    return {info.encode_name: bare_type(info.type) for info in msgspec.structs.fields(kind)}


def same_unit(ours: Mapping[str, Any], theirs: Any, rules: Rules = STRICT) -> bool:
    """Return whether the registry's unit has our content: the schema's fields without metadata.validated_by.

    `ours` is the document of a Unit. `theirs` may be large and hostile, so it is not copied, except if its content
    differs and it has at most MAX_VALUES values: either of the two may have been redacted by fewer rules (`reference`,
    or before a pattern was added to `rules`), so they are compared with all rules applied to both. If that fails, by a
    bug of the worker, the contents count as different.
    """
    try:
        if _same(ours, theirs, ReasoningTrace):
            return True
        if not isinstance(theirs, dict) or theirs.get("id") != ours.get("id") or not _few(theirs):
            return False
        level, every = level_of(ours), Rules("strict", rules.own)
        cleaned = redact_document(known_fields(theirs), level, every)[0]
        return any(
            _same(unit, cleaned, ReasoningTrace) for unit in (ours, redact_document(dict(ours), level, every)[0])
        )
    except NO_FAULT_OF_A_RECORD:
        raise
    except Exception as error:
        if not isinstance(error, RecursionError):  # theirs may nest deeper than ours can
            log.error("the registry's unit cannot be compared: %s; that is a bug, please report it", raised(error))
        return False


def _few(document: dict[str, Any]) -> bool:
    """Return whether a document has at most MAX_VALUES values."""
    count, pending = 0, list[Any]([document])
    while pending:
        value = pending.pop()
        inner = value.values() if isinstance(value, dict) else value
        count += len(inner)
        if count > MAX_VALUES:
            return False
        pending += [item for item in inner if isinstance(item, dict | list)]
    return True


def _same(ours: Any, theirs: Any, kind: Any) -> bool:
    """Return whether JavaScript reads both values as equal: numbers are doubles, and no bool is a number."""
    if isinstance(ours, list) and isinstance(theirs, list):
        item = get_args(kind)[0] if get_origin(kind) is list else None
        return len(ours) == len(theirs) and all(_same(a, b, item) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        fields = _field_types(kind) if isinstance(kind, type) and issubclass(kind, Struct) else None
        ignored = {"validated_by"} if kind is Metadata else {"__proto__"} if get_origin(kind) is dict else set()
        names, others = ours.keys() - ignored, theirs.keys() - ignored
        if fields is not None:
            names, others = names & fields.keys(), others & fields.keys()
        return names == others and all(_same(ours[name], theirs[name], fields and fields[name]) for name in names)
    ours, theirs = _plain(ours), _plain(theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _plain(value: Any) -> Any:
    """Return a number as a double (null if not finite, as in JavaScript), and any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


CONTRIBUTED: Final = "contributed"

KEPT_HEADERS: Final = ("kp-redriven-from", "kp-redrive-count")
"""Headers of `kp-worker redrive`: a place and a number."""


def receipt(record: SourceRecord, unit: Unit, status: int, registry_time: str) -> OutputRecord:
    """Build the receipt of a trace that the registry holds. `status`: 201 if it was posted, 200 if it was there."""
    value = {
        "id": unit.trace_id, "status": status, "registry_time": registry_time, "sha256": unit.sha256,
        "source": {"topic": record.topic, "partition": record.partition, "offset": record.offset},
        "worker_version": __version__,
    }  # fmt: skip
    return OutputRecord(CONTRIBUTED, unit.trace_id.encode(), msgspec.json.encode(value), [], None)


def refused_record(record: SourceRecord, refusal: Refusal, rules: Rules = STRICT) -> OutputRecord:
    """Build the record of a trace that is refused permanently: the redacted record, and headers with the reason.

    If redaction fails, by a bug of the worker, the contents are omitted: the record then looks like a dead letter of
    `last_resort`, and `redrive` reads the trace itself from the accepted topic.
    """
    truncated = []
    try:
        key, value, headers = _cleaned(record, rules)
    except NO_FAULT_OF_A_RECORD:
        raise
    except Exception as error:
        log.error("a refused trace cannot be redacted: %s; that is a bug, please report it", raised(error))
        headers = [(name, content) for name, content in record.headers if name in KEPT_HEADERS]
        key, value, truncated = None, b"", [truncated_header(0, record.value)]
    status, issues = "" if refusal.status is None else str(refusal.status), refusal.issues or ""
    why = error_headers(record, refusal.reason, refusal.path, refusal.message, status=status, issues=issues)
    # No timestamp: the time of sending. A topic may reject an old one.
    return OutputRecord(DEAD_LETTER, key, value, [*headers, *why, *truncated], None)


def _cleaned(record: SourceRecord, rules: Rules) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]:
    """Return key, value and headers of a record without secrets."""
    headers = [
        (name, content or b"")
        if name in KEPT_HEADERS
        else (clean_words(name, rules), clean_bytes(content or b"", rules))
        for name, content in record.headers
    ]
    key = None if record.key is None else clean_bytes(record.key, rules)
    return key, _redacted(record.value, rules), headers


def _redacted(value: bytes | None, rules: Rules) -> bytes | None:
    """Return the value of a record without secrets; as text if it is not a JSON object."""
    if value is None:
        return None
    document = json_object(value)
    if document is None:
        return clean_bytes(value, rules)
    level = level_of(document)
    cleaned, _ = redact_document(document, level, rules)
    trace_id = document.get("id")
    if isinstance(trace_id, str) and secret_in_id(trace_id, level, rules):
        cleaned["id"] = redact_text(trace_id, level, rules)[0]
    return msgspec.json.encode(cleaned)
