"""Numbers of one run: kept by part, row and round; held against goals; shown as tables; written as JSON.

`python -m tests.runs.benchmarks.results RESULTS.json` puts a run into docs/benchmarks.md. The goals of the parts that
were measured are replaced, and the tables of those that the page shows; the other parts and all sentences stay.
"""

import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from tests.support.surroundings import DOCS, ROOT
from worker.lab.broker.embedded_kafka import KAFKA_VERSION

Rows = Mapping[str, Mapping[str, Sequence[float]]]
"""Row -> metric -> one value a round."""

GOALS_HEAD: Final = "| | goal | wanted | measured | |\n|---|---|---|---|---|"


@dataclass
class Results:
    """Everything measured: part -> row -> metric -> one value a round. A goal is as in results.json."""

    machine: dict[str, Any]
    values: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, row: str, **metrics: float) -> None:
        """Keep what a round has measured, and print it."""
        print(f"  {row}: {', '.join(f'{name} {number(value)}' for name, value in metrics.items())}", flush=True)
        rounds = self.values.setdefault(part, {}).setdefault(row, {})
        for name, value in metrics.items():
            rounds.setdefault(name, []).append(value)

    def note(self, part: str, text: str) -> None:
        """Keep a remark that the reader of the numbers needs, once."""
        line = f"{part}: {text}"
        if line not in self.notes:
            self.notes.append(line)

    def ratio(self, part: str, metric: str, row: str, other: str) -> list[float]:
        """Return row / other, round by round; empty where one of them was not measured."""
        rows = self.values.get(part, {})
        above, below = rows.get(row, {}).get(metric, []), rows.get(other, {}).get(metric, [])
        return [a / b for a, b in zip(above, below, strict=False) if b]

    def goal(self, part: str, text: str, values: Sequence[float], limit: float, best: str) -> None:
        """Hold the median against a goal (`best` "max": at most `limit`; "min": at least), if there are values."""
        if not values:
            self.note(part, f"not measured: {text}")
            return
        value = statistics.median(values)
        reached = value <= limit if best == "max" else value >= limit
        self.goals.append({
            "part": part, "text": text, "values": values, "limit": limit, "best": best, "value": value,
            "reached": reached,
        })  # fmt: skip

    def save(self, path: Path) -> None:
        document = {"machine": self.machine, "results": self.values, "goals": self.goals, "notes": self.notes}
        path.write_text(json.dumps(document, indent=1) + "\n")

    def show_part(self, part: str) -> None:
        print(tables(self.values.get(part, {}), spread))
        for note in self.notes:
            if note.startswith(f"{part}: "):
                print(f"  {note.removeprefix(f'{part}: ')}")

    def show_goals(self) -> None:
        print("Medians (least..most); ratios are taken within a round", GOALS_HEAD, sep="\n")
        print(*map(goal_line, self.goals), sep="\n")


def number(value: float) -> str:
    """Write a number with three digits that count."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def median(values: Sequence[float]) -> str:
    return number(statistics.median(values))


def spread(values: Sequence[float]) -> str:
    return median(values) + (f" ({number(min(values))}..{number(max(values))})" if len(values) > 1 else "")


def tables(rows: Rows, cell: Callable[[Sequence[float]], str]) -> str:
    """Return rows in Markdown, without the length of the runs; those with the same columns share a table."""
    made = []
    for columns, group in itertools.groupby(rows.items(), lambda row: tuple(it for it in row[1] if it != "seconds")):
        head = "| | " + " | ".join(column.replace("_", " ") for column in columns) + " |\n"
        made.append(head + "|---" * (len(columns) + 1) + "|\n")
        for name, row in group:
            made[-1] += f"| {name} | " + " | ".join(cell(row[it]) for it in columns) + " |\n"
    return "\n".join(made)


def goal_line(goal: Mapping[str, Any]) -> str:
    sign = "at most" if goal["best"] == "max" else "at least"
    verdict = "reached" if goal["reached"] else "**missed**"
    return f"| {goal['part']} | {goal['text']} | {sign} {goal['limit']} | {spread(goal['values'])} | {verdict} |"


def updated(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with the goals and tables of the parts in `results`, the content of a results.json.

    A part without a section on the page has its goals there alone.
    """
    for part, rows in results["results"].items():
        section = re.search(rf"^## {part}\) .*\n(?:(?!## |\|).*\n)*((?:\|.*\n|\n(?=\|))+)", page, re.MULTILINE)
        if section is not None:
            page = page[: section.start(1)] + tables(rows, median) + page[section.end(1) :]
    goals = re.search(rf"^{re.escape(GOALS_HEAD)}\n((?:\|.*\n)+)", page, re.MULTILINE)
    if goals is None:
        raise ValueError("docs/benchmarks.md has no table of goals")
    kept = [line for line in goals[1].splitlines() if line.split("|")[1].strip() not in results["results"]]
    lines = sorted([*kept, *map(goal_line, results["goals"])], key=lambda line: line.split("|")[1])
    return page[: goals.start(1)] + "".join(f"{line}\n" for line in lines) + page[goals.end(1) :]


# -- the machine

PACKAGES: Final = (
    "faust-streaming", "aiokafka", "numpy", "msgspec", "openvino", "sentence-transformers", "torch",
    "confluent-kafka", "quixstreams",
)  # fmt: skip


def describe() -> dict[str, Any]:
    flags = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"}
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "cpu flags": sorted(flags & {*_field("/proc/cpuinfo", "flags").split()}),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "kafka": KAFKA_VERSION,
        "commit": _commit(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load average before": os.getloadavg(),
    }


def installed(*packages: str) -> bool:
    """Tell whether all of these packages are installed."""
    return all(_version(name) is not None for name in packages)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    PAGE = DOCS / "benchmarks.md"
    PAGE.write_text(updated(PAGE.read_text("utf-8"), json.loads(Path(sys.argv[1]).read_bytes())), "utf-8")
