"""What is wrong with a setting, in the words of settings: pydantic's messages name types of Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NUMBER: Final = "it must be a number"
_WHOLE: Final = "it must be a whole number"
_WORDS: Final = {
    "float_parsing": _NUMBER, "float_type": _NUMBER, "finite_number": "it must be a finite number",
    "int_parsing": _WHOLE, "int_type": _WHOLE, "int_from_float": _WHOLE,
    "bool_parsing": "it must be true or false", "bool_type": "it must be true or false",
    "string_type": "it must be a text", "dict_type": "it must be an object", "model_type": "it must be an object",
    "model_attributes_type": "it must be an object", "extra_forbidden": "no such field",
}  # fmt: skip
"""By the type of a pydantic error."""

_PHRASES: Final = {
    "Value error, ": "",
    "Input should be greater than or equal to ": "it must be at least ",
    "Input should be less than or equal to ": "it must be at most ",
    "Input should be ": "it must be ",
    "String should ": "it must ",
}
"""How other messages begin, and how they should; the first that fits counts."""

NAME_PATTERN: Final = r"^[a-zA-Z0-9._-]{1,249}$"
"""What Kafka allows as a topic's name, and as a member's."""


def issue_words(issue: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors says of a value."""
    kind, context = issue["type"], issue.get("ctx", {})
    if kind == "literal_error":
        return f"it must be one of {str(context['expected']).replace(' or ', ', ').replace(chr(39), '')}"
    if kind == "string_pattern_mismatch" and context["pattern"] == NAME_PATTERN:
        return "give 1 to 249 letters, digits, dots, underscores or hyphens"
    message = str(issue["msg"])
    for pydantic, ours in _PHRASES.items():
        message = message.replace(pydantic, ours, 1) if message.startswith(pydantic) else message
    return _WORDS.get(kind, message)
