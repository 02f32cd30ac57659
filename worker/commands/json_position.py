"""The line of a JSON text on which a path's value stands, for errors that name a path."""

from __future__ import annotations

import json


def line_of(raw: bytes, path: str) -> int | None:
    """Return the line of a path such as steps.1.tool.name, or of what should hold it; None: the text has none."""
    try:
        text = raw.decode()
        json.loads(text)
    except UnicodeDecodeError as error:
        return raw.count(b"\n", 0, error.start) + 1
    except json.JSONDecodeError as error:
        return error.lineno
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return None
    return text.count("\n", 0, _position(text, path.split("."))) + 1 if path else None


def _position(text: str, path: list[str]) -> int:
    """Return the index of the value at `path` in a JSON text, or of the innermost value on the way that exists."""
    index = _skip(text, 0)
    for name in path:
        found = _members(text, index).get(name)
        if found is None:
            break
        index = found
    return index


def _members(text: str, index: int) -> dict[str, int]:
    """Return where the members of the object or array at `index` begin, by name (the last counts) or number."""
    decoder = json.JSONDecoder()
    found: dict[str, int] = {}
    kind = text[index]
    if kind not in "{[":
        return found
    index = _skip(text, index + 1)
    while text[index] not in "}]":
        name = str(len(found))
        if kind == "{":
            name, index = decoder.raw_decode(text, index)
            index = _skip(text, _skip(text, index) + 1)  # past the colon
        found[name] = index
        _, index = decoder.raw_decode(text, index)
        index = _skip(text, index)
        if text[index] == ",":
            index = _skip(text, index + 1)
    return found


def _skip(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\r\n":
        index += 1
    return index
