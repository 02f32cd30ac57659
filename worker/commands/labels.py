"""The label of a trace names its task: `evaluate` and `whatif` tell firsts from repeats by it.

Must not live here: what is said of a trace without a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def label_of(document: Mapping[str, Any], path: str) -> str | None:
    """Return the text or number at a field, dotted where it is nested; None where there is none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None or isinstance(value, Mapping | list) else str(value)
