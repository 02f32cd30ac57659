"""The tables of docs/metrics.md are the code's."""

import re

from prometheus_client import CollectorRegistry

from tests.support.monitoring import SUFFIXES, exported_names
from tests.support.surroundings import DOCS
from worker.observe.assemble_metrics import AssembleMetrics
from worker.observe.contribute_metrics import ContributeMetrics
from worker.observe.metrics import Histogram, Metrics

DOCUMENT = DOCS / "metrics.md"

UNITS = {
    "kp_evaluations_over_budget_total": "evaluations",
    "kp_records_consumed_total": "records",
    "kp_traces_total": "traces",
    "kp_dead_letters_total": "records",
    "kp_redactions_total": "markers",
    "kp_screened_total": "traces",
    "kp_score": "score, 0 to 1",
    "kp_commit_traces": "records",
    "kp_truncated_texts_total": "texts",
    "kp_truncated_objectives_total": "objectives",
    "kp_embedding_hits_total": "texts",
    "kp_embedder_requests_total": "requests",
    "kp_embedder_texts_total": "texts",
    "kp_embedder_request_seconds_total": "seconds",
    "kp_embedder_down": "0 or 1",
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
    "kp_contribute_posted_total": "traces",
    "kp_contribute_found_total": "traces",
    "kp_contribute_refused_total": "traces",
    "kp_contribute_skipped_total": "traces",
    "kp_contribute_redactions_total": "markers",
    "kp_contribute_lag": "records",
    "kp_contribute_held": "traces",
    "kp_contribute_rate_left": "requests",
    "kp_contribute_late_total": "requests",
    "kp_contribute_retries_total": "requests",
    "kp_contribute_ready": "0 or 1",
    "kp_contribute_build_info": "1",
    "kp_assemble_records_total": "records",
    "kp_assemble_parts_total": "parts",
    "kp_embed_in_flight": "texts",
    "kp_verdicts_total": "verdicts",
    "kp_verdict_successes_total": "successes",
    "kp_verdict_squared_error_total": "squared error",
    "kp_verdicts_compared_total": "verdicts",
    "kp_verdicts_superseded_total": "verdicts",
    "kp_track_records": "records",
    "kp_assemble_repeated_parts_total": "parts",
    "kp_assemble_spans_total": "spans",
    "kp_assemble_closed_runs_total": "runs",
    "kp_assemble_traces_total": "traces",
    "kp_assemble_without_trace_total": "runs",
    "kp_assemble_conventions_total": "runs",
    "kp_assemble_late_parts_total": "parts",
    "kp_assemble_dead_letters_total": "records",
    "kp_assemble_lost_records_total": "records",
    "kp_assemble_open_runs": "runs",
    "kp_assemble_open_bytes": "bytes",
    "kp_assemble_remembered_runs": "runs",
    "kp_assemble_lag": "records",
    "kp_assemble_ready": "0 or 1",
    "kp_assemble_build_info": "1",
}
"""Of the metrics whose name does not end in their unit."""


def labels_of(metric: object) -> tuple[str, ...]:
    if isinstance(metric, Histogram):
        return () if metric._label is None else (metric._label,)
    return tuple(metric._labelnames)  # type: ignore[attr-defined]


INFO_LABELS = {
    "kp_build_info": "version, group, embedder",
    "kp_contribute_build_info": "version, group",
    "kp_assemble_build_info": "version, group",
}


def table(metrics: Metrics | ContributeMetrics | AssembleMetrics) -> str:
    rows = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for metric in vars(metrics).values():
        if not hasattr(metric, "collect") or metric is metrics.registry:
            continue
        (family,) = metric.collect()
        name = family.name + ("" if family.type == "histogram" else SUFFIXES[family.type][0])
        unit = "seconds" if name.endswith("_seconds") else UNITS[name]
        labels = INFO_LABELS.get(name) or ", ".join(labels_of(metric))
        rows.append(f"| `{name}` | {family.type} | {labels} | {unit} | {family.documentation} |")
    return "\n".join(rows)


def tables() -> list[str]:
    return [
        table(Metrics(CollectorRegistry())),
        table(ContributeMetrics(CollectorRegistry())),
        table(AssembleMetrics(CollectorRegistry())),
    ]


def test_the_tables_of_metrics_are_true() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert all(each in text for each in tables()), (
        "python -m tests.docs.test_docs_metrics prints the tables as they should be"
    )


def test_no_unit_is_given_for_what_does_not_exist() -> None:
    names = set(re.findall(r"^\| `(\w+)`", "\n".join(tables()), re.MULTILINE))
    assert UNITS.keys() <= names


def test_the_text_names_only_what_exists() -> None:
    named = set(re.findall(r"`((?:kp|process|python)_\w+)", DOCUMENT.read_text("utf-8")))
    histograms = {name.removesuffix("_bucket") for name in exported_names() if name.endswith("_bucket")}
    assert named <= exported_names() | histograms


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
