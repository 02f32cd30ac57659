"""The rows of `kp-worker whatif --export`: CSV, one row for each trace, in stream-time order."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import chain
from typing import BinaryIO, Final

from worker.commands.analysis.whatif_numbers import RescoredTrace
from worker.core.terminal import clean

COLUMNS: Final = (
    "id", "domain", "partition", "offset", "profile_before", "profile", "score_before", "score", "threshold_before",
    "threshold", "decision_before", "decision", "flips",
)  # fmt: skip

_BREAKS: Final = "\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029;"
"""Characters that start a new cell or row in some reader: a spreadsheet splits at the semicolon if the comma is the
decimal mark, and many programs split lines even inside quotes."""

_CELL_START: Final = re.compile(f"(^|[{_BREAKS}])([^{_BREAKS}]+)")

_BLANK_LETTERS: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols drawn as a blank: Hangul fillers, and the Braille pattern without dots."""


def write_csv(traces: Iterable[RescoredTrace], file: BinaryIO) -> None:
    """Write a header and the rows; `flips` is 1 if the decision changes, else 0. Raises OSError."""
    rows: Iterable[Iterable[str | float]] = (
        (
            trace.id, trace.domain, trace.partition, trace.offset, trace.before.profile, trace.after.profile,
            trace.before.score, trace.after.score, trace.before.threshold, trace.after.threshold,
            trace.before.decision, trace.after.decision, int(trace.before.decision != trace.after.decision),
        )
        for trace in traces
    )  # fmt: skip
    terminal = file.isatty()
    for row in chain([COLUMNS], rows):
        line = csv_line(row)
        file.write((clean(line, "\n") if terminal else line).encode())


def csv_line(cells: Iterable[str | float]) -> str:
    """Return a CSV row with its line feed: numbers unchanged, texts so that a spreadsheet runs none of them.

    Agents choose ids and domains, and `=...` would be a formula. csv.writer does not quote a carriage return, at which
    many readers start another row.
    """
    return ",".join(_quoted(_no_formula(cell)) if isinstance(cell, str) else str(cell) for cell in cells) + "\n"


def _quoted(text: str) -> str:
    """Return the text in quotes if a reader might take part of it for something else."""
    if text.isprintable() and text == text.strip() and not {",", '"'} & set(text):
        return text
    return '"' + text.replace('"', '""') + '"'


def _no_formula(text: str) -> str:
    """Return the text with a `'` before each part that would be a formula at the start of a cell."""
    marked = _CELL_START.sub(lambda found: f"{found[1]}{_marked(found[2])}", text)
    return f"'{marked}" if text.startswith(("\t", "\r", "\n")) else marked


def _marked(part: str) -> str:
    """Return a part with a `'` if its first visible character, even a full-width one, would start a formula."""
    first = next((char for char in part if _is_visible(char)), "")
    return f"'{part}" if unicodedata.normalize("NFKC", first)[:1] in ("=", "+", "-", "@") else part


def _is_visible(char: str) -> bool:
    """Return whether the character is drawn, and kept by a spreadsheet or a reader that trims cells."""
    return unicodedata.category(char)[0] not in "CMZ" and char not in _BLANK_LETTERS
