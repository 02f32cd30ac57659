"""What the code writes into the pages: the tables of settings and metrics, and the config file's JSON Schema.

`make docs` runs this module, which writes it between the markers of the pages; tests/docs/test_pages.py compares.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from tests.support.monitoring import SUFFIXES
from tests.support.surroundings import DOCS, SCHEMAS
from worker.config import describe
from worker.config.settings import SECTIONS, ProfileSetting, Settings
from worker.core.scoring import PROFILES
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


# -- the config file's schema


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config file."""
    made = Settings.model_json_schema()
    properties = {name: _property(made["properties"][name]) for name in Settings.model_fields}
    properties["profiles"] = {
        "description": "profiles to add or change, by domain",
        "type": "object",
        "properties": {domain: {"$ref": "#/$defs/profile"} for domain in PROFILES},
        "additionalProperties": {"$ref": "#/$defs/profile"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:knowledgepulse:kp-worker:config",
        "title": "Config file of kp-worker",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {"profile": _profile()},
    }


def _property(made: dict[str, Any]) -> dict[str, Any]:
    """Return pydantic's schema of a field without null, which TOML cannot say, and without its own titles."""
    kinds = [dict(kind) for kind in made.get("anyOf", []) if kind != {"type": "null"}]
    result = {key: value for key, value in made.items() if key not in ("title", "anyOf", "default")}
    if len(kinds) == 1:
        result |= kinds[0]
    elif kinds:
        result["anyOf"] = kinds
    if made.get("default") is not None:
        result["default"] = made["default"]
    return result


def _profile() -> dict[str, Any]:
    made = ProfileSetting.model_json_schema()["properties"]
    names = list(made["weights"]["anyOf"][0]["propertyNames"]["enum"])
    weight = {"type": "number", "minimum": 0, "maximum": 1}
    return {
        "type": "object",
        "properties": {
            "threshold": _property(made["threshold"]),
            "weights": {
                "description": made["weights"]["description"],
                "type": "object",
                "properties": dict.fromkeys(names, weight),
                "required": names,
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    }


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
