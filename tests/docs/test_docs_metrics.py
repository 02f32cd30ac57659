"""The table of docs/metrics.md is the code's."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from tests.support.monitoring import SUFFIXES, exported_names
from worker.observe.metrics import Histogram, Metrics

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"

UNITS = {
    "kp_evaluations_over_budget_total": "evaluations",
    "kp_records_consumed_total": "records",
    "kp_traces_total": "traces",
    "kp_dead_letters_total": "records",
    "kp_score": "score, 0 to 1",
    "kp_commit_traces": "records",
    "kp_truncated_texts_total": "texts",
    "kp_embedding_hits_total": "texts",
    "kp_cache_entries": "entries",
    "kp_cache_evictions_total": "entries",
    "kp_consumer_lag": "records",
    "kp_committed_offset": "offset",
    "kp_restored_entries_total": "entries",
    "kp_changelog_entries_skipped_total": "entries",
    "kp_forgotten_entries_total": "entries",
    "kp_control_records_total": "records",
    "kp_group_view_entries": "entries",
    "kp_group_view_bytes": "bytes",
    "kp_source_records_lost_total": "records",
    "kp_rebalances_total": "assignments",
    "kp_assigned_partitions": "partitions",
    "kp_ready": "0 or 1",
    "kp_build_info": "1",
}
"""Of the metrics whose name does not end in their unit."""


def labels_of(metric: object) -> tuple[str, ...]:
    if isinstance(metric, Histogram):
        return () if metric._label is None else (metric._label,)
    return tuple(metric._labelnames)  # type: ignore[attr-defined]


def table() -> str:
    metrics = Metrics(CollectorRegistry())
    rows = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for metric in vars(metrics).values():
        if not hasattr(metric, "collect") or metric is metrics.registry:
            continue
        (family,) = metric.collect()
        name = family.name + ("" if family.type == "histogram" else SUFFIXES[family.type][0])
        unit = "seconds" if name.endswith("_seconds") else UNITS[name]
        labels = "version, group, embedder" if name == "kp_build_info" else ", ".join(labels_of(metric))
        rows.append(f"| `{name}` | {family.type} | {labels} | {unit} | {family.documentation} |")
    return "\n".join(rows)


def test_the_table_of_metrics_is_true() -> None:
    assert table() in DOCUMENT.read_text("utf-8"), (
        "python -m tests.docs.test_docs_metrics prints the table as it should be"
    )


def test_no_unit_is_given_for_what_does_not_exist() -> None:
    names = set(re.findall(r"^\| `(\w+)`", table(), re.MULTILINE))
    assert UNITS.keys() <= names


def test_the_text_names_only_what_exists() -> None:
    named = set(re.findall(r"`((?:kp|process|python)_\w+)", DOCUMENT.read_text("utf-8")))
    histograms = {name.removesuffix("_bucket") for name in exported_names() if name.endswith("_bucket")}
    assert named <= exported_names() | histograms


if __name__ == "__main__":
    print(table())
