"""One picture of a run: throughput and CPU against the peers, latency over load, the scan, the goals."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from tests.runs.benchmarks.results import Results

OURS: Final = "#c2410c"
PEER: Final = "#64748b"


def draw(results: Results, directory: Path) -> bool:
    """Write plot.png and plot.svg; return False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    drawings = []
    for part, way, metric, title in (
        ("b", _bars, "messages_s", "b) messages/s, no model"),
        ("b", _bars, "CPU_us_a_message", "b) CPU µs a message, no model"),
        ("c", _bars, "messages_s", "c) messages/s with the model"),
        ("a", _loads, "", "a) latency over load, ms"),
        ("d", _sizes, "", "d) one scan of the cache, ms"),
        ("f", _bars, "messages_s", "f) messages/s by processes"),
    ):
        if part in results.values:
            drawings.append((results.values[part], way, metric, title))
    if not drawings:
        return True
    lines = (len(drawings) + 1) // 2
    figure, axes = pyplot.subplots(lines, 2, figsize=(15, 4.6 * lines), squeeze=False)
    for axis in axes.flat[len(drawings) :]:
        axis.set_axis_off()
    for axis, (rows, way, metric, title) in zip(axes.flat, drawings, strict=False):
        way(axis, rows, metric)
        axis.set_title(title, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{results.machine['cpu']}, {results.machine['cpus']} CPUs; median, bars from least to most", y=1.0)
    figure.tight_layout()
    for kind in ("png", "svg"):
        figure.savefig(directory / f"plot.{kind}", dpi=110)
    pyplot.close(figure)
    return True


def _spread(values: list[float]) -> tuple[float, float, float]:
    middle = statistics.median(values)
    return middle, middle - min(values), max(values) - middle


def _bars(axis: Any, rows: dict[str, dict[str, list[float]]], metric: str) -> None:
    found = [(name, _spread(row[metric])) for name, row in rows.items() if metric in row]
    found.reverse()
    colors = [OURS if name.startswith("worker") or "process" in name else PEER for name, _ in found]
    errors = [[s[1] for _, s in found], [s[2] for _, s in found]]
    axis.barh([name for name, _ in found], [s[0] for _, s in found], xerr=errors, color=colors, error_kw={"lw": 1})
    axis.tick_params(axis="y", labelsize=7)


def _loads(axis: Any, rows: dict[str, dict[str, list[float]]], _: str) -> None:
    loads = [(share, rows.get(f"worker at {share}% load", {})) for share in (20, 50, 80)]
    for metric, style in (
        ("end_to_end_p50_ms", "-"), ("end_to_end_p95_ms", "--"), ("end_to_end_p99_ms", ":"),
        ("evaluation_p50_ms", "-"), ("evaluation_p99_ms", ":"),
    ):  # fmt: skip
        points = [(share, statistics.median(row[metric])) for share, row in loads if metric in row]
        color = OURS if metric.startswith("end") else PEER
        label = metric.removesuffix("_ms").replace("_", " ")
        axis.plot([p[0] for p in points], [p[1] for p in points], style, color=color, marker="o", ms=3, label=label)
    axis.set_xlabel("% of the full rate")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)


def _sizes(axis: Any, rows: dict[str, dict[str, list[float]]], _: str) -> None:
    for name, row in rows.items():
        points = [(int(m.rpartition("_")[2]), statistics.median(v)) for m, v in row.items() if m.startswith("ms_at_")]
        axis.loglog([p[0] for p in points], [p[1] for p in points], marker="o", ms=3, label=name)
    axis.set_xlabel("entries")
    axis.legend(fontsize=7, frameon=False)
