"""`kp-worker explain`: one trace's score, step by step."""

from __future__ import annotations

from worker.commands.explain.steps import Explanation, explain_trace
from worker.commands.explain.target import is_file
from worker.commands.explain.view import explanation_json, explanation_text
from worker.commands.shared.console import ArgumentError, CommandError, text_console, write_line
from worker.commands.shared.json_lines import describe_problem, name_of, read_document
from worker.config import Settings
from worker.core.trace import InvalidTrace


def run_explain(
    target: str, novelty: float | None, settings: Settings, *, line: int | None, parts: bool, as_json: bool
) -> int:
    """Explain the trace in a file or on the topics; return the exit code.

    Raises CommandError for a file that holds no valid trace and for a trace that is not found, ArgumentError for an
    argument that is neither.
    """
    if is_file(target):
        if parts:
            raise ArgumentError("--parts", "goes with a trace on the topics: its nearest trace is looked up there, too")
        raw = read_document(target, line, settings.limits.max_bytes)
        try:
            explanation = explain_trace(raw, settings, novelty)
        except InvalidTrace as error:
            raise CommandError(f"{name_of(target)}: {describe_problem(raw, line, error)}") from None
        return _show_explanation(explanation, as_json=as_json)
    if line is not None:
        raise ArgumentError("--line", f"goes with a file, and there is no file {target}")
    from worker.commands.explain.topics import explain_target  # with Kafka's client: a file does without

    found = explain_target(target, novelty, settings, parts=parts)
    if isinstance(found, Explanation):
        return _show_explanation(found, as_json=as_json)
    if as_json:
        write_line(found.json)
    else:
        text_console().print(found.text)
    return 0


def _show_explanation(explanation: Explanation, *, as_json: bool) -> int:
    if as_json:
        write_line(explanation_json(explanation))
    else:
        text_console().print(explanation_text(explanation))
    return 0 if explanation.agrees else 1
