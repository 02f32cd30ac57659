"""Numbers of one run: kept by part, row and round; shown as tables; held against goals; written as JSON."""

import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests.support.surroundings import ROOT
from worker.lab.broker.embedded_kafka import KAFKA_VERSION


@dataclass(frozen=True)
class Goal:
    """A number that must be reached. `best` "max": at most `limit`; "min": at least."""

    part: str
    text: str
    values: tuple[float, ...]
    limit: float
    best: str

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def reached(self) -> bool:
        return self.value <= self.limit if self.best == "max" else self.value >= self.limit


@dataclass
class Results:
    """Everything measured: part -> row -> metric -> one value a round."""

    machine: dict[str, Any]
    values: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, row: str, **metrics: float) -> None:
        rounds = self.values.setdefault(part, {}).setdefault(row, {})
        for name, value in metrics.items():
            rounds.setdefault(name, []).append(value)

    def note(self, part: str, text: str) -> None:
        """Keep a remark that the reader of the numbers needs, once."""
        line = f"{part}: {text}"
        if line not in self.notes:
            self.notes.append(line)

    def ratio(self, part: str, metric: str, row: str, other: str) -> tuple[float, ...]:
        """Return row / other, round by round; empty where one of them was not measured."""
        rows = self.values.get(part, {})
        above, below = rows.get(row, {}).get(metric, []), rows.get(other, {}).get(metric, [])
        return tuple(a / b for a, b in zip(above, below, strict=False) if b)

    def goal(self, part: str, text: str, values: tuple[float, ...] | list[float], limit: float, best: str) -> None:
        """Hold measured values against a goal; without values, say that it was not measured."""
        if values:
            self.goals.append(Goal(part, text, tuple(values), limit, best))
        else:
            self.note(part, f"not measured: {text}")

    def save(self, path: Path) -> None:
        goals = [{**asdict(goal), "value": goal.value, "reached": goal.reached} for goal in self.goals]
        document = {"machine": self.machine, "results": self.values, "goals": goals, "notes": self.notes}
        path.write_text(json.dumps(document, indent=1) + "\n")


def number(value: float) -> str:
    """Write a number with three digits that count."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: list[float] | tuple[float, ...]) -> str:
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}..{number(max(values))})"


def show_part(console: Console, results: Results, part: str, title: str) -> None:
    rows = results.values.get(part, {})
    if rows:
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        table = Table(title=f"{part}) {title}: median (min..max)", title_justify="left")
        table.add_column("")
        for column in columns:
            table.add_column(column.replace("_", " "), justify="right")
        for name, row in rows.items():
            table.add_row(name, *(spread(row[c]) if c in row else "" for c in columns))
        console.print(table)
    for note in results.notes:
        if note.startswith(f"{part}: "):
            console.print(f"  {note.removeprefix(f'{part}: ')}", markup=False, highlight=False)


def show_goals(console: Console, results: Results) -> None:
    if not results.goals:
        return
    table = Table(title="Goals (medians; ratios are taken within a round)", title_justify="left")
    for column in ("", "goal", "wanted", "measured", ""):
        table.add_column(column)
    for goal in results.goals:
        sign = "<=" if goal.best == "max" else ">="
        verdict = "[green]reached[/]" if goal.reached else "[red]missed[/]"
        table.add_row(goal.part, goal.text, f"{sign} {number(goal.limit)}", spread(goal.values), verdict)
    console.print(table)


PACKAGES: Final = (
    "faust-streaming", "aiokafka", "numpy", "msgspec", "openvino", "sentence-transformers", "torch",
    "confluent-kafka", "quixstreams",
)  # fmt: skip


CPU_FLAGS: Final = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"}


def describe() -> dict[str, Any]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count(),
        "cpu flags": sorted(CPU_FLAGS & {*_field("/proc/cpuinfo", "flags").split()}),
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
