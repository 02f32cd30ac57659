"""`kp-worker explain`: one trace's score, step by step.

Lives here: the command, and the words for a file that holds no valid trace. Must not live here: the steps
(explain_steps.py), how they look (explain_view.py).
"""

from __future__ import annotations

from typing import BinaryIO

from rich.console import Console

from worker.commands.console import CommandError, write_line
from worker.commands.explain_steps import explain_trace, is_json
from worker.commands.explain_view import explanation_json, explanation_text
from worker.commands.json_position import line_of
from worker.config import Settings
from worker.core.trace import InvalidTrace, Reason


def run_explain(trace: BinaryIO, novelty: float | None, settings: Settings, *, as_json: bool) -> int:
    """Explain the trace in a file; return the exit code. Raises CommandError for a file that holds no valid trace."""
    raw = trace.read()
    try:
        explanation = explain_trace(raw, settings, novelty)
    except InvalidTrace as error:
        raise CommandError(f"{getattr(trace, 'name', '<stdin>')}: {_describe_problem(raw, error)}") from None
    if as_json:
        write_line(explanation_json(explanation))
    else:
        Console(highlight=False).print(explanation_text(explanation))
    return 0 if explanation.agrees else 1


def _describe_problem(raw: bytes, error: InvalidTrace) -> str:
    """Return reason and message of an invalid trace, with the line (from 1) where it can be told."""
    line = line_of(raw, error.path)
    text = f"{'' if line is None else f'line {line}: '}{error.reason}: {error.message}"
    if error.reason is Reason.NOT_JSON and is_json(raw.partition(b"\n")[0]):
        text += "; these are JSON Lines: explain one of them, as in sed -n 1p FILE | kp-worker explain -"
    return text
