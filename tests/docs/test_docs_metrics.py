"""The tables of docs/metrics.md are the code's."""

import re

from prometheus_client import CollectorRegistry

from tests.support.monitoring import SUFFIXES, exported_names
from tests.support.surroundings import DOCS
from worker.observe.assemble_metrics import AssembleMetrics
from worker.observe.contribute_metrics import ContributeMetrics
from worker.observe.metrics import Histogram, Metrics

DOCUMENT = DOCS / "metrics.md"


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
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    for metric in vars(metrics).values():
        if not hasattr(metric, "collect") or metric is metrics.registry:
            continue
        (family,) = metric.collect()
        name = family.name + ("" if family.type == "histogram" else SUFFIXES[family.type][0])
        labels = INFO_LABELS.get(name) or ", ".join(labels_of(metric))
        shown = f"{name}{{{labels}}}" if labels else name
        rows.append(f"| `{shown}` | {family.type} | {family.documentation} |")
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


def test_the_text_names_only_what_exists() -> None:
    named = set(re.findall(r"`((?:kp|process|python)_\w+)", DOCUMENT.read_text("utf-8")))
    histograms = {name.removesuffix("_bucket") for name in exported_names() if name.endswith("_bucket")}
    assert named <= exported_names() | histograms


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
