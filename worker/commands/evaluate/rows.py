"""What `evaluate` shows: the figures of one file with one choice of settings, as a value."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from worker.commands.evaluate.numbers import Figures
from worker.commands.evaluate.partitions import Spread


class EvaluateRow(Struct, frozen=True, omit_defaults=True):
    """The figures of one file with one choice of settings; `cut` traces were truncated, `bad` lines were no trace.

    `spread`: the same traces in several partitions, if that was asked for.
    """

    file: str
    settings: dict[str, object]
    cut: int
    bad: int
    figures: Figures
    spread: Spread | None = None


def named(settings: Mapping[str, object]) -> str:
    """Name a choice of settings: objective, 128 tokens."""
    rest = [f"{name} {value}" for name, value in settings.items() if name not in ("embed_text", "max_tokens")]
    return ", ".join([str(settings["embed_text"]), f"{settings['max_tokens']} tokens", *rest])
