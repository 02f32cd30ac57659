"""docs/benchmarks.md out of a run: `python -m tests.runs.benchmarks.page RESULTS.json > docs/benchmarks.md`.

`python -m tests.runs.benchmarks.page RESULTS.json --run` prints the table of the run in docs/benchmark-method.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.runs.benchmarks.__main__ import PARTS
from tests.runs.benchmarks.results import spread

HEAD = """# Benchmarks

Speed against the alternatives, by `make bench`. [benchmark-method.md](benchmark-method.md) says how and on what it was
measured. Figures are median (least..most).

![Results](benchmarks.svg)
"""


def run_table(found: dict[str, Any]) -> str:
    """Return what the run was measured on, as a table."""
    lines = ["| | |", "|---|---|"]
    for name, value in found["machine"].items():
        several = [f"{k} {v}" for k, v in value.items()] if isinstance(value, dict) else value
        shown = ", ".join(map(str, several)) if isinstance(several, list) else several
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def page(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [HEAD, "## Goals", "", "| | goal | wanted | measured | |", "|---|---|---|---|---|"]
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
    results = json.loads(Path(sys.argv[1]).read_bytes())
    sys.stdout.write(run_table(results) if "--run" in sys.argv else page(results))
