"""What the code writes into the pages: the tables of settings and metrics, and the config file's JSON Schema.

`make docs` runs this module, which writes it between the markers of the pages; tests/docs/test_pages.py compares.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from tests.support.config_schema import config_schema
from tests.support.monitoring import SUFFIXES
from tests.support.surroundings import DOCS, SCHEMAS
from worker.config import describe
from worker.config.settings import SECTIONS
from worker.observe.metrics import AssembleMetrics, ContributeMetrics, Histogram, Metrics

PAGES = [DOCS / "settings.md", DOCS / "metrics.md"]
SCHEMA = SCHEMAS / "config.schema.json"

# -- settings


def settings() -> str:
    """Return the tables of all settings, each under its heading."""
    tables = []
    for title, section in SECTIONS.items():
        rows = [
            f"| `{name}` | {f'`{default}`' if default else ''} | {meaning.replace(' | ', '/').replace('|', '/')} |"
            for name, default, meaning in describe(section)
        ]
        tables.append("\n".join([f"### {title}\n\n| variable | default | meaning |\n|---|---|---|", *rows]))
    return "\n\n".join(tables)


# -- metrics

INFO_LABELS = {
    "kp_build_info": "version, group, embedder",
    "kp_contribute_build_info": "version, group",
    "kp_assemble_build_info": "version, group",
}


def metrics(kind: type[Metrics | ContributeMetrics | AssembleMetrics]) -> str:
    """Return the table of a process's metrics."""
    made = kind(CollectorRegistry())
    rows = ["| metric | meaning |", "|---|---|"]
    for metric in vars(made).values():
        if not hasattr(metric, "collect") or metric is made.registry:
            continue
        (family,) = metric.collect()
        if isinstance(metric, Histogram):
            name, labels, mark = family.name, metric._label or "", " (histogram)"
        else:
            name = family.name + SUFFIXES[family.type][0]
            labels, mark = INFO_LABELS.get(name) or ", ".join(metric._labelnames), ""
        shown = f"{name}{{{labels}}}" if labels else name
        rows.append(f"| `{shown}`{mark} | {family.documentation} |")
    return "\n".join(rows)


# -- pages

BLOCKS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": lambda: metrics(Metrics),
    "metrics of contribute": lambda: metrics(ContributeMetrics),
    "metrics of assemble": lambda: metrics(AssembleMetrics),
}
MARKED = re.compile(r"(?<=<!-- make docs: )(.*?)( -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def generated() -> dict[Path, str]:
    """Return the files with what the code writes, as they should be."""
    return {
        **{page: MARKED.sub(lambda at: f"{at[1]}{at[2]}{BLOCKS[at[1]]()}{at[3]}", page.read_text()) for page in PAGES},
        SCHEMA: json.dumps(config_schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
