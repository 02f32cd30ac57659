"""JSON Lines that are none: a document over several lines, recognised by its first one."""

from __future__ import annotations


def is_pretty_printed(first_line: bytes) -> bool:
    """Return whether the first line of a file opens a document that goes on in the next one."""
    return first_line.strip() in (b"{", b"[")


def pretty_printed_hint(file: str) -> str:
    """Return what to do with such a file."""
    return f"{file} holds JSON over several lines; one trace a line is expected: jq -c . {file}"
