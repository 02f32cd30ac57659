"""The rows of `kp-worker whatif --export`: CSV, one row for each trace, in stream-time order.

Must not live here: what is in a row's values (whatif_summary.py).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import BinaryIO, Final

from worker.commands.whatif_summary import RescoredTrace
from worker.core.terminal import clean

COLUMNS: Final = (
    "id", "domain", "partition", "offset", "profile_before", "profile", "score_before", "score", "threshold_before",
    "threshold", "decision_before", "decision", "flips",
)  # fmt: skip


class _CsvFile:
    """What csv.writer writes to: UTF-8, and nothing that could control a terminal."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._terminal = file, file.isatty()

    def write(self, text: str) -> int:
        return self._file.write((clean(text, "\n") if self._terminal else text).encode())


def write_csv(traces: Iterable[RescoredTrace], file: BinaryIO) -> None:
    """Write a header and the rows; `flips` is 1 where the decision changes, else 0. Raises OSError."""
    writer = csv.writer(_CsvFile(file), lineterminator="\n")
    writer.writerow(COLUMNS)
    for trace in traces:
        before, after = trace.before, trace.after
        writer.writerow(
            (
                _no_formula(trace.id), _no_formula(trace.domain), trace.partition, trace.offset,
                _no_formula(before.profile), _no_formula(after.profile), before.score, after.score, before.threshold,
                after.threshold, before.decision, after.decision, int(before.decision != after.decision),
            )
        )  # fmt: skip


def _no_formula(text: str) -> str:
    """Return a text that a spreadsheet does not run: agents choose domains, and `=...` would be a formula."""
    return (
        f"'{text}"
        if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20"))
        else text
    )
