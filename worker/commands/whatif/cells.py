"""What the outputs of `kp-worker whatif` share: tables, cells, the config to paste, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from worker.commands.shared.scored import LEFT_OUT_SHOWN
from worker.commands.shared.shown import cut_text, shown_name
from worker.commands.whatif.share import Proposal
from worker.commands.whatif.summary import Documents, WhatIf
from worker.core.terminal import clean

_DOMAIN: Final = 16
"""Columns of a domain; a longer one is cut."""


def left_out(it: WhatIf | Proposal) -> Iterator[str]:
    """Yield lines about the documents that are not counted."""
    if it.repeated:
        yield f"repeated documents (equal to the byte), counted once: {it.repeated:,}"
    for what, documents in (
        ("cannot be read", it.unreadable),
        ("have a score that does not follow from their own figures", it.inconsistent),
    ):
        yield from _left_out(what, documents)


def _left_out(what: str, documents: Documents) -> Iterator[str]:
    if documents.count:
        yield f"skipped, since they {what}: {documents.count:,}"
        yield from (f"  {where}: {reason}" for where, reason in documents.first)
        if documents.count > LEFT_OUT_SHOWN:
            yield f"  and {documents.count - LEFT_OUT_SHOWN:,} more"


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a table without lines; `right`: the columns with numbers. Profiles are folded, other cells cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        if name == "profile":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right" if name in right else "left", overflow="ellipsis")
    return table


def domain_cell(name: str) -> str:
    """Return the name of a domain, cut to the column."""
    return cut_text(shown_name(name), _DOMAIN)


def before_and_after(before: str, after: str) -> Text:
    """Return `before -> after`, or one of them where they are equal."""
    return Text(clean(before if before == after else f"{before} -> {after}"))


def name_line(text: str, near: str | None) -> Text:
    """Return a line about a domain or profile, with the name that it may mean."""
    line = Text(f"  {text}")
    return line if near is None else line.append(f"; did you mean {shown_name(near)}?", "yellow")


def print_config(console: Console, config: str) -> None:
    """Print a config file to paste; its lines are not wrapped."""
    console.print()
    if not config:
        console.print("The candidate is the built-in threshold and profiles: there is nothing to set.", style="bold")
        return
    console.print("To use it, paste this into the config file (--config FILE, KP_CONFIG):", style="bold")
    console.print(Text(config), soft_wrap=True)
