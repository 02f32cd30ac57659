"""Documents that are too large: the longest texts of their steps, objective and result summary are cut.

The number, kinds and tools of the steps are kept, and the beginning of each text. What is left of a run is more than an
embedder reads, so a shortened trace has the score of the whole one, unless very many steps share the room.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

LEAST: Final = 128
"""Bytes that a text keeps, as JSON. If that is still too much, the document cannot be shortened."""


def shortened(document: dict[str, Any], size: int, most: int) -> tuple[dict[str, Any], int] | None:
    """Return a trace of `size` bytes as one of at most `most`, and the number of characters cut; None: impossible.

    All cut texts keep about the same number of bytes, the most that fits. The result is deterministic.
    """
    sizes: list[int] = []
    _mapped(document, lambda text: sizes.append(_size(text)))
    level = _level(sorted(sizes), most - (size - sum(sizes)))
    if level < LEAST:
        return None
    cut = 0

    def fit(text: str) -> str:
        nonlocal cut
        if _size(text) <= level:
            return text
        kept = _beginning(text, level - 48)  # room for quotes and for the note
        cut += len(text) - len(kept)
        return f"{kept} [{len(text) - len(kept)} characters cut]"

    return _mapped(document, fit), cut


def _mapped(document: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """Return a document with its long texts changed."""
    steps = [
        {name: _deeply(value, change) if name in ("content", "input") else value for name, value in step.items()}
        for step in document["steps"]
    ]
    task = {**document["task"], "objective": change(document["task"]["objective"])}
    outcome = {**document["outcome"], "result_summary": change(document["outcome"]["result_summary"])}
    return {**document, "task": task, "steps": steps, "outcome": outcome}


def _deeply(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _deeply(each, change) for name, each in value.items()}
    return [_deeply(each, change) for each in value] if isinstance(value, list) else value


def _level(sizes: list[int], room: int) -> int:
    """Return the highest limit of bytes for each text with which all fit. `sizes`: ascending."""
    for number, size in enumerate(sizes):
        if size * (len(sizes) - number) > room:
            return room // (len(sizes) - number)
        room -= size
    return sizes[-1]


def _size(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode())


def _beginning(text: str, room: int) -> str:
    """Return the longest beginning that has at most `room` bytes as JSON, without its quotes.

    Only a word of more than 512 characters is split: half of a secret would not be recognised, and would survive.
    """
    low, high = 0, min(len(text), room)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _size(text[:middle]) - 2 <= room else (low, middle - 1)
    space = re.compile(r"\s(?=\S*\Z)").search(text, max(0, low - 512), low)  # the last one
    return text[: low if space is None else space.start()]
