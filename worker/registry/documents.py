"""Which documents the registry takes, and what it stores of them.

Lives here: the verdict on a document, and the stored unit: the schema's fields, with the numbers that JavaScript has.
Must not live here: HTTP, the store.
"""

import functools
import json
import math
from decimal import Decimal
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, parse_trace

Document = dict[str, Any]

LIMITS: Final = Limits(max_bytes=2**27, max_steps=2**31, max_depth=500, strict_context=True)
"""The registry has none of the worker's limits, and does not know the former @context."""


class NotJson(ValueError):
    """The body is no JSON: the registry fails on it, and blames itself (500)."""


def read_unit(body: bytes) -> Document:
    """Return what the registry stores of a body. Raises NotJson, or InvalidTrace for a JSON text that is no trace."""
    try:
        parse_trace(body, LIMITS)
    except InvalidTrace as error:
        if error.reason in (Reason.EMPTY_VALUE, Reason.NOT_UTF8, Reason.NOT_JSON):
            raise NotJson(str(error)) from error
        raise
    document = json.loads(body)  # reads 1e400, as JavaScript does
    return {name: _as_javascript(value) for name, value in _known(document, ReasoningTrace).items()}


def _known(value: Any, kind: Any) -> Any:
    """Return a value of a struct type without the fields that the type does not have, at any depth."""
    types = get_args(kind) if get_origin(kind) is not None else ()
    if isinstance(value, dict):
        struct = next((each for each in (kind, *types) if isinstance(each, type) and issubclass(each, Struct)), None)
        if struct is None:  # free contents: every member counts but this one, which is special in JavaScript
            return {name: part for name, part in value.items() if name != "__proto__"}
        fields = _types_of(struct)
        return {name: _known(part, fields[name]) for name, part in value.items() if name in fields}
    if isinstance(value, list):
        listed = next((each for each in (kind, *types) if get_origin(each) is list), None)
        return value if listed is None else [_known(part, get_args(listed)[0]) for part in value]
    return value


@functools.cache
def _types_of(struct: type[Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields by their names in JSON."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def _as_javascript(value: Any) -> Any:
    """Return a JSON value as JSON.stringify(JSON.parse(...)) leaves it: every number is a double."""
    if isinstance(value, dict):
        return {name: _as_javascript(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_javascript(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    # It writes integers below 1e21 with all their digits, of which it keeps seventeen at most.
    return int(Decimal(repr(number))) if number.is_integer() and abs(number) < 1e21 else number
