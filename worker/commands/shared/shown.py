"""How commands show values to people: contents of documents, shares, time spans, tables. No output."""

import re
import shlex
import textwrap
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from worker.core import terminal


def cut_text(text: str, length: int = 160) -> str:
    """Return a text of at most `length` characters: by default enough to recognise an id, a domain or an objective."""
    return text if len(text) <= length else text[: length - 1] + "…"


def shown_text(text: str) -> str:
    """Return a text that is safe to show: cut, and without characters that control terminals, markup or direction."""
    shown = cut_text(text)
    if shown.isascii() and shown.isprintable():
        return shown
    return terminal.clean(re.sub(r"[\t\n\r]", " ", shown))


def shown_name(name: str) -> str:
    """Return the name of a domain or profile as `shown_text` does, quoted if blanks around it would be overlooked."""
    shown = shown_text(name)
    return shown if shown == shown.strip() and shown else f'"{shown}"'


def fixed(value: float, digits: int) -> str:
    """Format a figure with this many digits after the point; a value near 0 never becomes -0.000."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def shown_score(score: float, threshold: float | None, digits: int = 3) -> str:
    """Format a score with enough digits to stay on its side of the threshold: 0.7497 is not 0.750 beside 0.75.

    `digits`: the fewest after the point. `threshold` None: nothing to compare with.
    """
    for places in range(digits, 17):
        text = fixed(score, places)
        if threshold is None or (float(text) >= threshold) == (score >= threshold):
            return text
    return repr(score)


def shown_threshold(threshold: float) -> str:
    """Format a threshold with all its digits, so that a score can be compared with it: 0.75, 1, 0.7500004."""
    short = f"{threshold:g}"
    return short if float(short) == threshold else repr(threshold)


def percent(share: float) -> str:
    """Format a share (0..1) in percent; only 0 is shown as 0, and only 1 as 100."""
    value = share * 100
    if 0 < value < 0.1:
        return "<0.1%"
    if 99.9 < value < 100:
        return ">99.9%"
    return f"{value:.0f}%" if value in (0, 100) else f"{value:.1f}%"


LEAST_TEXT = 8
"""Columns of a terminal that a text keeps if it is cut or wrapped."""


class PlainTable(Table):
    """A table without trailing blanks, whose figures, ids and decisions are never cut.

    Where it is too wide, the columns in `fit` are left out, or cut if they stand there as "name~", the first one first.
    A line that is still too long goes on below.
    """

    fit: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as rich does, then remove trailing blanks."""
        width = self._fit(console, options)
        rendered = cast("Iterable[Segment]", super().__rich_console__(console, options.update(max_width=width)))
        for line in Segment.split_lines(rendered):
            while line and not line[-1].text.strip(" "):
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(" "), line[-1].style)
            for part in Segment.divide(line, [*range(options.max_width, width, options.max_width), width]):
                if part or not line:
                    yield from part
                    yield Segment.line()

    def _fit(self, console: Console, options: ConsoleOptions) -> int:
        """Make the table narrower; return the width of its lines."""
        wide, steps = options.update(max_width=10_000), iter(self.fit)
        while True:
            needed = [self._measure_column(console, wide, column).maximum for column in self.columns]
            least = self._extra_width + sum(  # with all wrapped that may be
                width if column.no_wrap else min(width, max(LEAST_TEXT, column.min_width or 0))
                for width, column in zip(needed, self.columns, strict=True)
            )
            excess = least - options.max_width
            if excess <= 0 or (step := next(steps, None)) is None:
                return max(options.max_width, least)
            rest = [column for column in self.columns if column.header != step]
            if len(rest) < len(self.columns):
                self.columns = [replace(column, _index=index) for index, column in enumerate(rest)]
            for place, column in enumerate(self.columns):
                if f"{column.header}~" == step:
                    column.max_width = max(LEAST_TEXT, needed[place] - self._get_padding_width(place) - excess)
                    column.min_width = min(column.min_width or 0, column.max_width)


def columns(*names: str, right: Container[str] = (), fold: Container[str] = ()) -> PlainTable:
    """Return a table without lines; `right`: columns of numbers; `fold`: the only columns that are wrapped."""
    table = PlainTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        if name in fold:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    return table


class Pasted:
    """A command to paste: on one line if it fits, otherwise each line but the last ends with a backslash."""

    def __init__(self, command: str) -> None:
        self._words = [shlex.quote(word) for word in shlex.split(command)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        whole, words = " ".join("\0" * len(word) for word in self._words), iter(self._words)
        width = options.max_width - 2 * (len(whole) > options.max_width)
        lines = textwrap.wrap(whole, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        yield Text(re.sub("\0+", lambda _: next(words), " \\\n".join(lines)), no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the width of its longest word, and of the whole command."""
        return Measurement(max(map(len, self._words)) + 4, len(" ".join(self._words)))
