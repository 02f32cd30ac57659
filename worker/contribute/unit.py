"""The knowledge unit that is posted for an accepted record, and whether the registry's unit is the same.

Lives here: the gate, the schema's fields, the rewritten @context, redaction, equality. Pure. Must not live here:
requests (registry_client.py), answers (answers.py), Kafka.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from worker.contribute.cleaning import clean_unit, clean_words, secret_in_id
from worker.core.trace import CONTEXT, InvalidTrace, Limits, ReasoningTrace, parse_trace

MAX_BYTES: Final = 1 << 30
"""The accepted topic limits the bytes of a document; this only has to be larger."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What may leave: allowed values of metadata.visibility and metadata.privacy_level."""

    visibility: Set[str]
    privacy: Set[str]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is posted for one trace: its JSON, and the value that the JSON holds."""

    trace_id: str
    body: bytes
    document: Mapping[str, Any]
    redactions: Mapping[str, int]

    @property
    def sha256(self) -> str:
        """Return the hash of the body, hexadecimal."""
        return hashlib.sha256(self.body).hexdigest()


@dataclass(frozen=True, slots=True)
class Skip:
    """A trace that the gate keeps back. `reason`: visibility or privacy."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that is refused for good. All texts are redacted. `status`: the registry's, None: it was not asked."""

    reason: str
    message: str
    path: str = ""
    status: int | None = None
    issues: str | None = None


def unit_from(value: bytes | None, gate: Gate, limits: Limits) -> Unit | Skip | Refusal:
    """Return what is to be done with the value of a record of the accepted topic."""
    try:
        trace = parse_trace(value, replace(limits, max_bytes=MAX_BYTES, strict_context=False))
    except InvalidTrace as error:
        return Refusal("invalid_trace", clean_words(error.message), error.path)
    if trace.metadata.visibility not in gate.visibility:
        return Skip("visibility")
    if trace.metadata.privacy_level not in gate.privacy:
        return Skip("privacy")
    level = trace.metadata.privacy_level
    if secret_in_id(trace.id, level):
        return Refusal("secret_in_id", "the id holds a secret or an address, and an id cannot be redacted", "id")
    document, counts = clean_unit(known_fields(decode_json(value or b"")), level)
    document["@context"] = CONTEXT  # the registry refuses the former one
    return Unit(trace.id, msgspec.json.encode(document), document, counts)


def decode_json(value: bytes) -> Any:
    """Return the value of a JSON text. Raises msgspec.DecodeError, RecursionError, UnicodeDecodeError."""
    return _decoder.decode(value)


_decoder = msgspec.json.Decoder(float_hook=float)  # 1e400 is inf, which is sent as null, as JavaScript sends it


def known_fields(document: Any) -> dict[str, Any]:
    """Return the document with the schema's fields alone, at every level that the schema describes."""
    found: dict[str, Any] = _known(document, ReasoningTrace)
    return found


def _known(value: Any, kind: Any) -> Any:
    if get_origin(kind) in (Annotated, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is list and isinstance(value, list):
        return [_known(item, get_args(kind)[0]) for item in value]
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: item for name, item in value.items() if name != "__proto__"}  # the registry drops it
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
        fields = _field_types(kind)
        return {name: _known(item, fields[name]) for name, item in value.items() if name in fields}
    return value


@cache  # msgspec makes the fields anew for each call
def _field_types(kind: type[Struct]) -> dict[str, Any]:
    return {info.encode_name: info.type for info in msgspec.structs.fields(kind)}


def same_unit(ours: Mapping[str, Any], theirs: Any) -> bool:
    """Whether the registry's unit has our content: the schema's fields without metadata.validated_by."""
    try:
        return bool(_canonical(_compared(ours)) == _canonical(_compared(theirs)))
    except RecursionError:  # nests deeper than ours can
        return False


def _compared(document: Any) -> Any:
    fields = known_fields(document)
    if isinstance(fields, dict) and isinstance(fields.get("metadata"), dict):
        metadata = {name: value for name, value in fields["metadata"].items() if name != "validated_by"}
        return {**fields, "metadata": metadata}
    return fields


def _canonical(value: Any) -> Any:
    """Return a value that is equal for what JavaScript reads as equal: numbers are doubles, and no bool is a number."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None  # JavaScript writes Infinity as null
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return value
