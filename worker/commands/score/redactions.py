"""Examples of what redaction replaced in a trace, with the secrets masked."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from worker.core.trace import document_decoder
from worker.redact.markers import MARKER

AROUND: Final = 32
"""Characters shown before and after a marker."""


def redaction_examples(raw: bytes, redacted: bytes) -> dict[str, str]:
    """Return the first replacement of each type in a document: its path, and the masked secret in its surroundings."""
    examples: dict[str, str] = {}
    pending = deque([(document_decoder.decode(raw), document_decoder.decode(redacted), "")])
    while pending:
        before, after, path = pending.popleft()
        if isinstance(before, dict) and isinstance(after, dict):
            for (name, value), (cleaned_name, cleaned_value) in zip(before.items(), after.items(), strict=True):
                place = f"{path}.{cleaned_name}" if path else cleaned_name
                if name != cleaned_name:
                    _add_markers(examples, name, cleaned_name, place)
                pending.append((value, cleaned_value, place))
        elif isinstance(before, list) and isinstance(after, list):
            pending += [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(before, after, strict=True))]
        elif isinstance(after, str) and before != after:
            _add_markers(examples, before if isinstance(before, str) else json.dumps(before), after, path)
    return examples


def _add_markers(examples: dict[str, str], before: str, after: str, path: str) -> None:
    for kind, text in _markers(before, after):
        examples.setdefault(kind, f"{path}: {text}".replace("\n", " "))


def _markers(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield the markers of a text. A replaced text lies between the parts around its marker, common to both texts."""
    markers = list(islice(MARKER.finditer(after), 1000))
    place = 0
    for number, marker in enumerate(markers):
        end = markers[number + 1].start() if number + 1 < len(markers) else len(after)
        start = place + marker.start() - (markers[number - 1].end() if number else 0)
        following = after[marker.end() : end]
        behind = before.find(following, start + 1) if following else len(before)
        if number + 1 == len(markers):
            behind = len(before) - len(following)
        place = behind = max(start, behind)
        if before[start:behind] == marker[0]:
            continue  # it was already there
        left, right = after[max(0, marker.start() - AROUND) : marker.start()], after[marker.end() :][:AROUND]
        kind = marker[0].removeprefix("[REDACTED:").removesuffix("]")
        yield kind, f"{left}«{_masked(before[start:behind])}»{right}"


def _masked(secret: str) -> str:
    """Return the shape of a secret: a for a letter, A for a capital, 9 for a digit; at most 40 characters."""
    shape = "".join(
        "9" if c.isdigit() else "A" if c.isupper() else "a" if c.isalpha() or ord(c) > 126 else c for c in secret[:40]
    )
    return shape + (f"... ({len(secret)} characters)" if len(secret) > 40 else "")
