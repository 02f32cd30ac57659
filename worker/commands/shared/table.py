"""The tables of commands: rich's, without the trailing blanks that would fill the last column in a file or pipe."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table


class PlainTable(Table):
    """A table without title and caption; except on a terminal, its lines have no trailing blanks."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as rich does, then remove trailing blanks."""
        rendered = cast("Iterable[Segment]", super().__rich_console__(console, options))
        if console.is_terminal:
            yield from rendered
            return
        for line in Segment.split_lines(rendered):
            while line and not line[-1].text.strip(" "):
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(" "), line[-1].style)
            yield from line
            yield Segment.line()


def columns(*names: str, right: Container[str] = (), fold: Container[str] = (), gap: int = 2) -> PlainTable:
    """Return a table without lines; `right`: columns of numbers; `fold`: the only columns that are wrapped."""
    table = PlainTable(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name in names:
        if name in fold:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    return table
