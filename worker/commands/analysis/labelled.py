"""Labelled traces: reading them, embedding each text once, and the results as tables."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from worker.commands.analysis.novelty import (
    QUANTILES,
    Floats,
    Interval,
    Ints,
    Row,
    behind_the_highest,
    cell,
    measured,
    named,
    verdict,
)
from worker.commands.shared.console import BadLines, CommandError, open_file, write_json, write_line
from worker.commands.shared.json_lines import label_of, read_lines
from worker.commands.shared.shown import fixed
from worker.config import Settings
from worker.core.terminal import clean, number_of
from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, embedded_texts, is_objective, parse_trace
from worker.embed.embedder import Embedder, Embedding, ModelError, embed_or_diagnose
from worker.embed.load import load_configured
from worker.embed.pool import mean_of_parts


class Labelled:
    """The valid traces of one file, in order; `name` stands for the file in messages and results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.traces: list[ReasoningTrace] = []
        self.bad = BadLines(name)

    def read(self, path: str, limits: Limits) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield place and document of each valid trace, after adding it to the traces; name the first bad lines.

        Raises CommandError.
        """
        try:
            with open_file(path, "rb") as file:
                for number, line, _, problem in read_lines(file, limits.max_bytes):
                    if problem is None and not line.strip():
                        continue
                    try:
                        if problem is not None:
                            raise InvalidTrace(Reason.TOO_LARGE, "", problem)
                        self.traces.append(parse_trace(line, limits))
                    except InvalidTrace as error:
                        where = f"{error.path}: " if error.path else ""
                        self.bad.name(f"{number}: {error.reason}: {where}{error}")
                        continue
                    yield f"{self.name}: line {number}", json.loads(line)
        except OSError as error:
            raise CommandError(str(error)) from None
        self.bad.say_rest("kp-worker score FILE -o /dev/null --dead-letters BAD.jsonl lists all")


def numbered(names: Sequence[str]) -> Ints:
    """Return names as numbers 0..k-1, in order of first use."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def names_apart(files: Sequence[str]) -> list[str]:
    """Return a name for each file (- is standard input): its own, with enough folders to make it unique."""
    paths = [("standard input",) if file == "-" else Path(file).parts for file in files]
    endings = [[path[-count:] for count in range(1, len(path))] for path in paths]  # the whole path is the last resort
    known = Counter(ending for of_path in endings for ending in of_path) + Counter(paths)
    return [
        str(Path(*next((ending for ending in of_path if known[ending] == 1), path)))
        for path, of_path in zip(paths, endings, strict=True)
    ]


class Vectors:
    """Vectors of traces with several settings; a text is embedded once for each model, precision and limit."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._embedders: dict[tuple[object, ...], tuple[Embedder, dict[tuple[str, bool], Embedding]]] = {}

    def of(self, traces: Labelled, settings: Settings, what: str = "") -> tuple[Floats, int]:
        """Return the vectors, shape (n, dimensions), and the number of truncated traces; show the progress.

        Raises CommandError.
        """
        bar = self._progress.add_task(clean(f"{traces.name}{what}"), total=len(traces.traces))
        try:
            found = []
            embedder, known = self._embedder(settings)
            for trace in traces.traces:
                view = settings.embed_text
                texts = [(text, is_objective(index, view)) for index, text in enumerate(embedded_texts(trace, view))]
                for text in texts:
                    if text not in known:
                        known[text] = embed_or_diagnose(embedder, *text)
                found.append(mean_of_parts([known[text] for text in texts]))
                self._progress.advance(bar)
        except ModelError as error:
            raise CommandError(str(error)) from None
        self._progress.remove_task(bar)
        cut = sum(embedding.truncated or embedding.objective_truncated for embedding in found)
        return np.array([embedding.vector for embedding in found]), cut

    def _embedder(self, settings: Settings) -> tuple[Embedder, dict[tuple[str, bool], Embedding]]:
        key = (settings.embedder, settings.model, settings.precision, settings.max_tokens)
        if key not in self._embedders:
            embedder = load_configured(settings)
            if embedder is None:
                raise ModelError("KP_EMBEDDER=none makes no vectors; choose another embedder to evaluate")
            self._embedders[key] = embedder, {}
        return self._embedders[key]


def progress_bar() -> Progress:
    """Return the bar for reading and embedding, shown only on a terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def run_repeats(
    files: Sequence[str], label: str, seed: int, choices: Sequence[tuple[Settings, dict[str, object]]],
    page: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Measure novelty on files with labels. Raises CommandError."""
    with progress_bar() as progress:
        rows = list(_rows(files, label, seed, choices, Vectors(progress)))
    if as_json:
        write_json(*rows)
    else:
        _write_tables(rows)
    if page is not None:
        from worker.commands.analysis.page import render_evaluation, write_page

        write_page(render_evaluation(rows, label), page)


def _rows(
    files: Sequence[str], label: str, seed: int, choices: Sequence[tuple[Settings, dict[str, object]]], vectors: Vectors
) -> Iterator[Row]:
    """Yield the figures of each file with each choice of settings."""
    for file, name in zip(files, names_apart(files), strict=True):
        traces, labels = Labelled(name), []
        for where, document in traces.read(file, choices[0][0].limits):
            labels.append(label_of(document, label))
            if labels[-1] is None:
                raise CommandError(
                    f"{where} has no label at {label}; --label must name a field with text or a number; this line has "
                    f"{', '.join(sorted(document))}"
                )
        if not 1 < len(set(labels)) < len(labels):
            raise CommandError(
                f"{name}: {number_of(len(labels), 'trace')} with {number_of(len(set(labels)), 'label')}; there must be "
                "at least two tasks, and a repeat of one"
            )
        rows = []
        for settings, shown in choices:
            made, cut = vectors.of(traces, settings, f": {named(shown)}")
            figures, warm = measured(made, numbered([str(it) for it in labels]), seed)
            rows.append((Row(name, shown, cut, traces.bad.count, figures), warm))
        yield from behind_the_highest(rows)


def _write_tables(rows: Sequence[Row]) -> None:
    width = max(len(named(row.settings)) for row in rows)
    for file, group in itertools.groupby(rows, key=lambda row: row.file):
        own = list(group)
        first = own[0].figures
        write_line(clean(f"{file}: {first.traces} traces, {first.labels} labels, {first.repeats} repeats"))
        write_line(f"  {'':{width}}  {'AUC warm':18}  {'AUC in order':18}  nearest  pairs   cut")
        for row in own:
            it = row.figures
            write_line(
                f"  {named(row.settings):{width}}  {cell(it.auc_warm):18}  {cell(it.auc_in_order):18}  "
                f"{_short(it.nearest_is_same):7}  {_short(it.auc_pairs):5}  {row.cut:4}"
            )
        head = "  ".join(f"p{100 * quantile:.0f}".ljust(4) for quantile in QUANTILES)
        write_line(f"  {'novelty':{width}}  firsts {head}   repeats {head}".rstrip())
        for row in own:
            firsts, repeats = (
                "  ".join(map(_short, values)) for values in (row.figures.first_quantiles, row.figures.repeat_quantiles)
            )
            write_line(f"  {named(row.settings):{width}}         {firsts}           {repeats}")
        for sentence in verdict(own):
            write_line(clean(f"  {sentence}"))
        write_line("")


def _short(it: Interval | None) -> str:
    return "-" if it is None else fixed(it.value, 2)
