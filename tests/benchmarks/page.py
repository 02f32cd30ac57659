"""docs/benchmarks.md out of a run: `python -m tests.benchmarks.page RESULTS.json > docs/benchmarks.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.__main__ import PARTS
from tests.benchmarks.results import spread

HEAD = """# Benchmarks

`make bench` measures the worker against the alternatives, all in one run on one machine, and prints the tables below.
Install the peers with `.venv/bin/python -m pip install -e '.[bench]'`. The lower precisions are measured if they were
exported: `kp-worker export-model --precision bf16 --precision int8`. A run that does not produce every output is an
error, not a fast result; in part b every output must equal that of the reference job, byte for byte. Ratios are taken
within a round. Figures are median (least..most).

![Results](benchmarks.svg)
"""


def page(found: dict[str, Any]) -> str:
    """Return the page."""
    machine = found["machine"]
    lines = [HEAD, "## The run", "", "| | |", "|---|---|"]
    for name, value in machine.items():
        several = [f"{k} {v}" for k, v in value.items()] if isinstance(value, dict) else value
        shown = ", ".join(map(str, several)) if isinstance(several, list) else several
        lines.append(f"| {name} | {shown} |")
    lines += ["", "## Goals", "", "| | goal | wanted | measured | |", "|---|---|---|---|---|"]
    for goal in sorted(found["goals"], key=lambda goal: goal["part"]):
        sign = "at most" if goal["best"] == "max" else "at least"
        verdict = "reached" if goal["reached"] else "**missed**"
        lines.append(
            f"| {goal['part']} | {goal['goal']} | {sign} {goal['limit']} | {spread(goal['values'])} | {verdict} |"
        )
    for part, rows in sorted(found["results"].items()):
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        lines += ["", f"## {part}) {PARTS[part][0]}", ""]
        lines.append("| | " + " | ".join(column.replace("_", " ") for column in columns) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for name, row in rows.items():
            cells = (spread(row[column]) if column in row else "" for column in columns)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        notes = [note.partition(": ")[2] for note in found["notes"] if note.startswith(f"{part}: ")]
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(json.loads(Path(sys.argv[1]).read_bytes())))
