"""Fields of a logged run: how they are found and checked, and why a run yields no trace."""

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, get_args

import msgspec

from worker.core.trace import CREATED_AT_PATTERN, Metadata

FieldPath = tuple[str, ...]


class RunRefused(ValueError):
    """A run that yields no trace. The message says where and what to do; `reason` is a short word for the counts."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def fault(error: Exception) -> RunRefused:
    """Return the error for a run that could not be converted because of a bug here; the other runs can be."""
    return RunRefused("mapping_failed", f"{type(error).__name__} while it was converted; report it with this run")


@dataclass(slots=True)
class Counts:
    """What became of the parts of a run."""

    steps: Counter[str] = field(default_factory=Counter)  # by type
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)  # changed or cut

    def drop(self, kind: str, count: int = 1) -> None:
        """Count a part that has no place in a trace: `kind` is a word, or a field's path such as `messages[].name`."""
        if count:
            self.dropped[kind] += count

    def change(self, kind: str, count: int = 1) -> None:
        """Count a part that differs in the trace from the log."""
        if count:
            self.changed[kind] += count


def shown(value: Any) -> str:
    """Return a value for a message: what stands in a log may be secret, so only its kind, unless it is a mere name."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    # a name as formats have them, such as a role or a type; most secrets have another form
    if isinstance(value, str) and not re.fullmatch(r"|[a-z]{1,20}(?:[_.-](?:[a-z]{1,20}|\d{1,8})){0,5}", value):
        return f"<{len(value)} characters>"
    text = repr(value)
    return text if isinstance(value, str) or len(text) < 8 else f"<{len(text)} digits>"


def is_empty(value: Any) -> bool:
    """Return whether a field is null, or an empty string, list or object."""
    return value is None or value in ("", [], {})


def json_value(value: Any) -> Any:
    """Return the value of a JSON text, a text that is not JSON unchanged, and any other value made valid JSON."""
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return value
    return _plain(value)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it would lose something: NaN, 1e400, a repeated key."""
    values, problem = json_documents(text)
    if problem is not None or len(values) > 1:
        raise problem or ValueError("there is more than one JSON document")
    return values[0]


def json_documents(text: str | bytes) -> tuple[list[Any], ValueError | None]:
    """Return the values of JSON texts that follow each other; and why the first cannot be read that cannot be.

    A line has several where a file without a last line break was copied in front of another one.
    """
    values: list[Any] = []
    begin = 0
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        begin = _behind_blanks(text, 0)
        while begin < len(text) or not values:
            value, end = _decoder.raw_decode(text, begin)
            values.append(value)
            begin = _behind_blanks(text, end)
    except json.JSONDecodeError as error:
        return values, ValueError(f"{error.msg} at character {error.pos - begin + 1}")
    except RecursionError:
        return values, ValueError("it is nested too deeply")
    except ValueError as error:
        return values, error
    return values, None


def _behind_blanks(text: str, begin: int) -> int:
    blanks = re.compile(r"[ \t\n\r]+").match(text, begin)
    return begin if blanks is None else blanks.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; write null")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"the number {digits[:20]} is too large for a double")
    return number


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has a key twice")
    return fields


_decoder: Final = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_repeated_keys
)


def json_object(value: Any) -> dict[str, Any]:
    """Return a value that is an object, or JSON of one; {} for anything else."""
    parsed = json_value(value)
    return parsed if isinstance(parsed, dict) else {}


def plain(name: str) -> str:
    """Return the common part of all spellings of a name, such as in a model's request and in a title for readers."""
    return "".join(filter(str.isalnum, name)).lower()


def _plain(value: Any) -> Any:
    """Return a value as JSON can have it: bytes become base64, NaN, infinity and all that JSON does not know text."""
    if isinstance(value, dict):
        return {name if isinstance(name, str) else str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, str | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def objects_of(value: Mapping[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    """Return a list of objects, [] if absent. Raises RunRefused, with the place."""
    items = value.get(name) or []
    if not isinstance(items, list):
        raise RunRefused("not_a_run", f"{place}: {shown(items)} is not a list")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise RunRefused("not_a_run", f"{place}.{number}: {shown(item)} is not an object")
    return items


def text_field(value: Mapping[str, Any], name: str, place: str) -> str:
    """Return a string field, "" if absent or null. Raises RunRefused, with the place."""
    text = value.get(name)
    if not isinstance(text, str | None):
        raise RunRefused("not_a_run", f"{place}.{name}: {shown(text)} is not a text")
    return text or ""


def count_unread(value: Mapping[str, Any], read: Set[str], place: str, counts: Counts) -> None:
    """Count the non-empty fields that are not in `read`."""
    for name, inner in value.items():
        if name not in read and not is_empty(inner):
            counts.drop(place + name)


def first_given(value: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first of these fields that is not null; None if there is none."""
    for name in names:
        if (given := value.get(name)) is not None:
            return given
    return None


def says_error(result: Any) -> bool:
    """Return whether a tool's result says that it is an error: by `isError`, also in its JSON or repr, or by type."""
    if isinstance(result, str):
        if result.endswith(("isError=True", "isError=True)", "is_error=True)")):
            return True
        result = json_value(result) if '"isError"' in result else None
    if not isinstance(result, dict):
        return False
    return result.get("isError") is True or str(result.get("type")).endswith(("_tool_error", "_tool_result_error"))


def is_marked_error(record: Any) -> bool:
    """Return whether the log's own record of a result has a field which says that the result is an error."""
    if not isinstance(record, dict):
        return False
    error = record.get("error")
    marked = record.get("isError") is True or record.get("is_error") is True
    marked = marked or record.get("status") in ("error", "failed", "incomplete")
    return marked or error is True or (isinstance(error, str) and error != "")


def find_field(value: Any, path: FieldPath) -> tuple[FieldPath, Any] | None:
    """Return the keys that lead to a field, and its value; None if it is absent.

    A number is a position in a list (-1 is the last). A name may contain dots: the longest existing name counts.
    """
    if not path:
        return (), value
    if isinstance(value, list):
        try:
            inner = find_field(value[int(path[0])], path[1:])
        except (ValueError, IndexError):
            return None
        return inner and ((path[0], *inner[0]), inner[1])
    if isinstance(value, dict):
        for end in range(len(path), 0, -1):
            name = ".".join(path[:end])
            inner = find_field(value[name], path[end:]) if name in value else None
            if inner is not None:
                return (name, *inner[0]), inner[1]
    return None


def unused_fields(value: dict[str, Any], used: set[FieldPath], above: FieldPath = ()) -> Iterator[str]:
    """Yield the names of non-empty fields that no used path leads to."""
    for name, inner in value.items():
        path = (*above, name)
        if path in used or is_empty(inner):
            continue
        if isinstance(inner, dict) and any(other[: len(path)] == path for other in used):
            yield from unused_fields(inner, used, path)
        else:
            yield ".".join(path)


def as_success(value: Any) -> bool:
    """Return a success: true, false, or their usual spellings. Raises ValueError, which says what the value is not."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    text = str(value).lower() if isinstance(value, bool | int | float | str) else ""
    if text not in known:
        raise ValueError("is neither true nor false (nor 1 or 0); --success @field=TEXT compares a text")
    return known[text]


def as_confidence(value: Any) -> float:
    """Return a number from 0 to 1. Raises ValueError."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError("is not a number from 0 to 1")
    return number


def as_nonblank(value: Any) -> str:
    """Return a text that is not blank. Raises ValueError."""
    text = str(value) if isinstance(value, str | int | float) else ""
    if not text.strip():
        raise ValueError("is not a text")
    return text.lower() if isinstance(value, bool) else text


def _one_of(field: str, value: Any) -> str:
    allowed = get_args(Metadata.__annotations__[field])
    if value not in allowed:
        raise ValueError(f"is not one of {', '.join(allowed)}")
    return str(value)


as_visibility: Final = partial(_one_of, "visibility")
as_privacy: Final = partial(_one_of, "privacy_level")


def as_time(value: Any) -> str:
    """Return a time as ISO 8601 in UTC, from seconds since 1970 or ISO 8601 with a zone. Raises ValueError."""
    if isinstance(value, str) and re.match(CREATED_AT_PATTERN, value):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        moment = datetime.fromtimestamp(value, UTC) if number else datetime.fromisoformat(value)
        utc = moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        known = "use ISO 8601 such as 2026-04-14T08:00:00Z, or seconds (not milliseconds) since 1970"
        raise ValueError(f"is not a time; {known}") from None
    if moment.tzinfo is None:
        raise ValueError("has no time zone; end it with Z if it is UTC")
    return utc.replace(tzinfo=None).isoformat() + "Z"
