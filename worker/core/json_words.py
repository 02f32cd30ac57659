"""Describe what is wrong with a JSON value in JSON's terms; msgspec's messages name Python types."""

import heapq
import json
import math
import re
import reprlib
from typing import Any, Final

_WANTED: Final = {
    "str": "a string", "float": "a number", "int": "an integer", "bool": "true or false", "object": "an object",
    "array": "an array", "null": "null",
}  # fmt: skip
_FOUND: Final = _WANTED | {"int": "a number", "bool": "a boolean"}
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
    found = _MISMATCH.match(problem)
    return None if found is None else (_types(found[2], _FOUND), _types(found[1], _WANTED))


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
