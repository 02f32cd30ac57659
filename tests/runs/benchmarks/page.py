"""A run into docs/benchmarks.md: `python -m tests.runs.benchmarks.page RESULTS.json`.

The goals of the parts that were measured are replaced, and the tables of those that the page shows; the other parts and
all sentences stay.
"""

import itertools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.runs.benchmarks.results import number, spread
from tests.support.surroundings import DOCS

PAGE = DOCS / "benchmarks.md"


def update(page: str, results: dict[str, Any]) -> str:
    """Return the page with the goals and tables of the parts in `results`, the content of a results.json.

    A part without a section on the page has its goals there alone.
    """
    for part, rows in results["results"].items():
        section = re.search(rf"^## {part}\) .*\n(?:(?!## |\|).*\n)*((?:\|.*\n|\n(?=\|))+)", page, re.MULTILINE)
        if section is None:
            continue
        page = page[: section.start(1)] + _tables(rows) + page[section.end(1) :]
    goals = re.search(r"^\| \| goal \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    if goals is None:
        raise ValueError("docs/benchmarks.md has no table of goals")
    kept = [line for line in goals[1].splitlines() if line.split("|")[1].strip() not in results["results"]]
    lines = sorted([*kept, *map(_goal, results["goals"])], key=lambda line: line.split("|")[1])
    return page[: goals.start(1)] + "".join(f"{line}\n" for line in lines) + page[goals.end(1) :]


def _tables(rows: dict[str, dict[str, list[float]]]) -> str:
    """Return the medians, without the length of the runs; rows with the same columns share a table."""
    tables = []
    for columns, group in itertools.groupby(rows.items(), lambda row: tuple(it for it in row[1] if it != "seconds")):
        head = "| | " + " | ".join(column.replace("_", " ") for column in columns) + " |\n"
        tables.append(head + "|---" * (len(columns) + 1) + "|\n")
        for name, row in group:
            tables[-1] += f"| {name} | " + " | ".join(number(statistics.median(row[it])) for it in columns) + " |\n"
    return "\n".join(tables)


def _goal(goal: dict[str, Any]) -> str:
    sign = "at most" if goal["best"] == "max" else "at least"
    verdict = "reached" if goal["reached"] else "**missed**"
    return f"| {goal['part']} | {goal['text']} | {sign} {goal['limit']} | {spread(goal['values'])} | {verdict} |"


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_bytes())
    PAGE.write_text(update(PAGE.read_text("utf-8"), results), "utf-8")
