"""The page of a report: one HTML file that loads nothing. Needs Jinja2 and matplotlib (the `report` extra)."""

from __future__ import annotations

from typing import Any

from worker.commands.report import charts
from worker.commands.report.columns import COMPONENTS
from worker.commands.report.numbers import PASTED_SHARE, SHARES, THRESHOLDS, Group, ReportNumbers
from worker.commands.shared.page import page_environment, svg
from worker.commands.shared.shown import duration, percent, shown_name, shown_text
from worker.core.documents import rfc3339
from worker.version import __version__

NAMES_SHOWN = 20
"""Domains without a profile that are listed; the rest is counted."""


def render(summary: ReportNumbers, source: str) -> str:
    """Return the page. `source` says where the documents come from; the same arguments give the same page."""
    environment = page_environment()
    environment.filters |= {
        "n": lambda value: f"{value:,}",
        "pct": percent,
        "f2": lambda value: f"{value:.2f}",
        "f3": lambda value: f"{value:.3f}",
        "time": lambda ms: rfc3339(ms)[:19].replace("T", " "),
        "name": shown_name,
        "words": lambda name: name.replace("_", " "),
        "duration": duration,
    }
    return environment.get_template("report.html.j2").render(
        s=summary, source=shown_text(source), version=__version__, component_names=COMPONENTS, thresholds=THRESHOLDS,
        cutoff_shares=SHARES, pasted_share=PASTED_SHARE, plots=_plots(summary), series=charts.SERIES,
        curves=_domain_curves(summary), names_shown=NAMES_SHOWN,
    )  # fmt: skip


def _plots(summary: ReportNumbers) -> dict[str, Any]:
    profiles = summary.profiles
    thresholds = {profile.threshold for profile in profiles}
    shared = thresholds.pop() if len(thresholds) == 1 else None
    curves = [(profile.group.curve, profile.threshold) for profile in profiles[: charts.SERIES]]
    return {
        "total": svg(charts.histogram(summary.total.histogram, shared)),
        "domains": [svg(charts.histogram(group.histogram, group.threshold, small=True)) for group in summary.domains],
        "components": {
            name: svg(charts.histogram(counts, colour=f"s{index}"))
            for index, (name, counts) in enumerate(summary.components.items())
        },
        "shares": [svg(charts.shares(profile.shares)) for profile in profiles],
        "spread": [None if profile.spread is None else svg(charts.shares(profile.spread)) for profile in profiles],
        "domain_acceptance": svg(
            charts.acceptance([(group.curve, group.threshold) for group in _domain_curves(summary)])
        ),
        "acceptance": svg(charts.acceptance(curves)),
        "novelty": svg(charts.novelty(summary.moments)),
    }


def _domain_curves(summary: ReportNumbers) -> list[Group]:
    """Return the domains that have a curve: the largest ones, without the row of all others."""
    alone = summary.domains[:-1] if summary.other_domains else summary.domains
    return alone[: charts.SERIES]
