"""Values of attributes: JSON, Python literals, and objects that are flattened into many attributes."""

import ast
import copy
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from worker.runs.fields import json_value

REDACTED: Final = "__REDACTED__"
"""OpenInference writes this instead of content that it was told to hide."""

_TOKEN: Final = re.compile(r""""(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|["']|[][{}]""", re.DOTALL)
"""Whole strings, the quote of a string that is cut off, and brackets, in JSON or a Python literal."""

_MAX_LITERAL: Final = 100_000
"""Maximum characters of a Python literal. Python's parser needs some hundred bytes for each."""


def loaded(value: Any) -> Any:
    """Return the value of a text that is JSON or a Python literal; what is whole of one that is cut off, or None.

    Any other text is returned unchanged, and any other value as valid JSON.
    """
    parsed = json_value(value)
    if not isinstance(parsed, str) or parsed[:1] not in ("[", "{"):
        return parsed
    literal = python_value(parsed)
    return literal if literal is not parsed else _before_the_cut(parsed)


def is_cut_off(value: Any) -> bool:
    """Return whether a value is the beginning of JSON or of a Python literal."""
    begin = value[:1] if isinstance(value, str) else ""
    end = {"[": "]", "{": "}"}.get(begin, "")
    if not end or (value[-1] == end and value.count(begin) <= value.count(end)):
        return False  # counting costs a whole value next to nothing
    return isinstance(json_value(value), str) and loaded(value) is not value


def python_value(text: str) -> Any:
    """Return the value of a Python literal that is a list or an object; any other text unchanged."""
    try:
        return json_value(ast.literal_eval(text)) if text[:1] in ("{", "[") and len(text) <= _MAX_LITERAL else text
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text


def python_object(text: str) -> Any:
    """Return the fields of an object in Python's repr, `Name(field=value, ...)`; any other text unchanged.

    Leading underscores of names are dropped; an enum becomes its value.
    """
    if len(text) > _MAX_LITERAL:
        return text
    try:
        return json_value(_of_node(ast.parse(re.sub(r"<\w+\.\w+: ('[^']*')>", r"\1", text), mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text


def _of_node(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return {each.arg.lstrip("_"): _of_node(each.value) for each in node.keywords if each.arg}
    if isinstance(node, ast.List):
        return [_of_node(each) for each in node.elts]
    return ast.literal_eval(node)


def _before_the_cut(text: str) -> Any:
    """Return the whole items of the list that is cut off, within what contains it; the text itself if it is not JSON.

    The list is the outermost one, or the innermost of lists of lists. Its items are messages, and one that is cut off
    is not read. None: no item is whole.
    """
    if re.match(r"""[\[{][\s\[{]*["']""", text) is None:
        return text
    closers: list[str] = []
    level = end = 0  # of the list; the end of its last whole item
    left: list[str] = []  # what closes the brackets that are open at that end
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark == "[" and (not level or (level == len(closers) and not end)):
            level = len(closers) + 1
        if mark in ("[", "{"):
            closers.append("]" if mark == "[" else "}")
        elif mark in ("]", "}") and closers:
            closers.pop()
            if level and len(closers) <= level:
                end, left = token.end(), closers[::-1]
            if len(closers) < level:
                level = 0
            if not closers:
                break
        elif mark in ("'", '"'):
            break
    whole = text[:end] + "".join(left)
    try:
        value = json.loads(whole, parse_constant=str)
    except (ValueError, RecursionError):
        value = python_value(whole)
    if closers:
        return None if isinstance(value, str) else value
    return text if end < len(text.rstrip()) else value


class Flat(dict[str, Any]):
    """An object whose field names are paths: `a.0.b` is the field `b` of the first item of `a`."""

    def nested(self) -> dict[str, Any]:
        """Return the object as it was before it was flattened. Gaps in lists, whose items were lost, are closed."""
        whole: dict[str, Any] = {}
        for path, value in self.items():
            head, _, last = path.rpartition(".")
            node = whole
            for name in head.split(".", 12) if head else ():  # deeper levels remain one name
                node = node.setdefault(name, {})
                if not isinstance(node, dict):
                    break  # something else is in the way
            else:
                node[last] = copy.deepcopy(value) if isinstance(value, dict) else value
        return {name: _with_lists(inner) if isinstance(inner, dict) else inner for name, inner in whole.items()}


def unflattened(attributes: Mapping[str, Any], prefix: str) -> list[Flat] | None:
    """Return the objects flattened into attributes such as `PREFIX0.name`, by number; None if there are none."""
    objects: dict[str, Flat] = {}
    size = len(prefix)
    for key, value in attributes.items():
        if key.startswith(prefix):
            number, _, path = key[size:].partition(".")
            one = objects.get(number)
            if one is None:
                one = objects[number] = Flat()
            one[path] = value
    numbers = [number for number in objects if number.isascii() and number.isdigit() and len(number) < 10]
    return [objects[number] for number in sorted(numbers, key=int)] or None


def _with_lists(value: dict[str, Any]) -> Any:
    for name, inner in value.items():
        if isinstance(inner, dict):
            value[name] = _with_lists(inner)
    if not next(iter(value), "")[:1].isdigit():
        return value
    try:
        return [value[name] for name in sorted(value, key=int)]
    except ValueError:
        return value
