"""Labelled traces and their vectors: reading the files, and embedding each text once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worker.commands.analysis.novelty import Floats, Ints
from worker.commands.shared.console import open_file
from worker.commands.shared.json_lines import label_of, read_lines
from worker.config import Settings
from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, embedded_texts, is_objective, parse_trace
from worker.embed.embedder import Embedder, Embedding, ModelError, embed_or_diagnose
from worker.embed.load import load_configured
from worker.embed.pool import mean_of_parts


class LabelError(ValueError):
    """A trace has no label; the message names the line and the field."""


@dataclass(slots=True)
class Labelled:
    """The traces of one file in their order, with a label each, and a key each where one was asked for.

    `bad`: lines that are no valid trace, and why.
    """

    name: str
    traces: list[ReasoningTrace] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def numbered(names: Sequence[str]) -> Ints:
    """Return names as numbers 0..k-1, in the order of their first use."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def names_apart(files: Sequence[str]) -> list[str]:
    """Return a name for each file (- is standard input): its own, with as many folders as tell it from the others."""
    paths = [("standard input",) if file == "-" else Path(file).parts for file in files]
    endings = [[path[-count:] for count in range(1, len(path))] for path in paths]  # the whole path is the last resort
    known = Counter(ending for of_path in endings for ending in of_path) + Counter(paths)
    return [
        str(Path(*next((ending for ending in of_path if known[ending] == 1), path)))
        for path, of_path in zip(paths, endings, strict=True)
    ]


def read_labelled(path: str, name: str, label: str, limits: Limits, key: str | None = None) -> Labelled:
    """Read a JSON Lines file; `name` stands for it in messages and results.

    `label` and `key` are fields, dotted where nested. Raises LabelError and OSError.
    """
    found = Labelled(name)
    with open_file(path, "rb") as file:
        for number, line, _, problem in read_lines(file, limits.max_bytes):
            if problem is None and not line.strip():
                continue
            try:
                if problem is not None:
                    raise InvalidTrace(Reason.TOO_LARGE, "", problem)
                trace = parse_trace(line, limits)
            except InvalidTrace as error:
                found.bad.append(f"line {number}: {error.reason}: {error.path}: {error.message}")
                continue
            document = json.loads(line)
            where = f"{found.name}: line {number}"
            found.labels.append(_named(document, label, f"{where} has no label at {label}: --label"))
            if key is not None:
                found.keys.append(_named(document, key, f"{where} has no key at {key}: --partition-by"))
            found.traces.append(trace)
    return found


def _named(document: Mapping[str, Any], field_path: str, problem: str) -> str:
    named = label_of(document, field_path)
    if named is None:
        raise LabelError(f"{problem} names a field with text or a number; it has {', '.join(sorted(document))}")
    return named


class Vectors:
    """Vectors of traces with several settings; a text is embedded once for each model, precision and limit."""

    def __init__(self) -> None:
        self._embedders: dict[tuple[object, ...], tuple[Embedder, dict[tuple[str, bool], Embedding]]] = {}

    def of(self, traces: Labelled, settings: Settings, on_trace: Callable[[], None]) -> tuple[Floats, int]:
        """Return the vectors, shape (n, dimensions), and how many traces were cut. Raises ModelError."""
        key = (settings.embedder, settings.model, settings.precision, settings.max_tokens, settings.windows)
        if key not in self._embedders:
            embedder = load_configured(settings)
            if embedder is None:
                raise ModelError("KP_EMBEDDER=none makes no vectors: choose another embedder to evaluate")
            self._embedders[key] = embedder, {}
        embedder, known = self._embedders[key]
        found = []
        for trace in traces.traces:
            view = settings.embed_text
            texts = [(text, is_objective(index, view)) for index, text in enumerate(embedded_texts(trace, view))]
            for text in texts:
                if text not in known:
                    known[text] = embed_or_diagnose(embedder, *text)
            found.append(mean_of_parts([known[text] for text in texts]))
            on_trace()
        cut = sum(embedding.truncated or embedding.objective_truncated for embedding in found)
        return np.array([embedding.vector for embedding in found]), cut
