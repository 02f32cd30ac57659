"""docs/benchmarks-*.svg out of the tables of docs/benchmarks.md: `python -m tests.runs.benchmarks.plot`.

Four pictures, each with a sentence that says its figure. They stand side by side on a wide page, and below one
another on a phone, where one wide picture could not be read. Colours and fonts are those of the status page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from tests.support.surroundings import DOCS

PAGE: Final = DOCS / "benchmarks.md"

WIDTH, MARGIN, GAP = 384, 18, 8  # the gap is below each picture
ROW, HEADING, TITLE = 40, 30, 66  # heights
CLIPPED: Final = 10.0
"""A bar this many times as long as the next one is cut, so that the others can be told apart."""

STYLE: Final = """
:root { --surface: #ffffff; --ink: #17202b; --muted: #55616f; --line: #d8dee6; --track: #e6eaf0;
  --ours: #0b63c5; --other: #66748a; }
@media (prefers-color-scheme: dark) { :root { --surface: #171e27; --ink: #e9eef4; --muted: #a3b0bf;
  --line: #2c3744; --track: #283340; --ours: #71b3ff; --other: #93a1b5; } }
.panel { fill: var(--surface); stroke: var(--line); } .track { fill: var(--track); }
.ours { fill: var(--ours); } .other { fill: var(--other); } .range { stroke: var(--ink); stroke-width: 1.5; }
.cut { stroke: var(--surface); stroke-width: 3; }
text { fill: var(--ink); } .title { font-size: 17px; font-weight: 600; } .what { fill: var(--muted); font-size: 14px; }
.value { font-weight: 600; text-anchor: end; }
"""


@dataclass(frozen=True)
class Figure:
    """A median with the least and the most of its rounds; `text` as the page has it."""

    middle: float
    least: float
    most: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A row of a picture. `ours`: it is the worker's."""

    label: str
    figure: Figure
    ours: bool = True


@dataclass(frozen=True)
class Group:
    """Bars of one scale; `what` says what is measured, in which unit."""

    what: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Panel:
    """One picture: its file's name, its sentence, in two lines, and its bars."""

    name: str
    title: tuple[str, str]
    groups: Sequence[Group]


class Tables:
    """The tables of the page's parts."""

    def __init__(self, page: str) -> None:
        self._rows: dict[str, dict[str, dict[str, str]]] = {}
        for part, text in re.findall(r"^## (\w)\) [^\n]*\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
            lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
            if lines is None:
                raise ValueError(f"{PAGE.name}, part {part}: no table")
            head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
            self._rows[part] = {row[0]: dict(zip(head, row, strict=True)) for row in rows}

    def get(self, part: str, row: str, column: str) -> Figure:
        """Return a figure. Raises KeyError with words where the page has none."""
        cell = self._rows.get(part, {}).get(row, {}).get(column, "")
        found = re.fullmatch(r"([\d.,]+)(?: \(([\d.,]+)\.\.([\d.,]+)\))?", cell)
        if found is None:
            raise KeyError(f"{PAGE.name}, part {part}: row {row!r} has no {column!r}")
        middle = found[1].replace(",", "")
        least, most = ((found[n] or middle).replace(",", "") for n in (2, 3))
        return Figure(float(middle), float(least), float(most), found[1])

    def select(self, part: str, column: str, rows: Mapping[str, str]) -> dict[str, Figure]:
        """Return figures of one column: label -> figure, from label -> row."""
        return {label: self.get(part, row, column) for label, row in rows.items()}


def panels(tables: Tables) -> list[Panel]:
    """Return the pictures, with the sentences that the figures give."""
    return [_speed(tables), _latency(tables), _partitions(tables), _hand_over(tables)]


def _speed(tables: Tables) -> Panel:
    found = tables.select("c", "messages s", {
        "worker, int8": "worker, int8, exactly once",
        "worker, bf16": "worker, bf16, exactly once",
        "worker, fp32": "worker, fp32, exactly once",
        "quix-streams with encode()": "quix-streams with encode(), at least once",
        "aiokafka loop with encode()": "aiokafka loop with encode(), at least once",
    })  # fmt: skip
    ours = found["worker, fp32"].middle
    times = ours / found["aiokafka loop with encode()"].middle
    title = (f"With the model: {ours:.0f} traces/s, exactly", f"once; {times:.1f} times a loop with encode()")
    return Panel("speed", title, [Group("traces/s on two cores", bars(found))])


def _latency(tables: Tables) -> Panel:
    at = "exactly once, end to end at 200/s"
    found = tables.select("b", "p50 ms", {
        "worker": f"worker, vectors by its pool, {at}",
        "aiokafka loop": f"aiokafka loop, {at}",
        "quix-streams, commits every 0.1 s": f"quix-streams, commit_interval 0.1 s, {at}",
        "quix-streams, its default": f"quix-streams, {at}",
    })  # fmt: skip
    peer = min(each.middle for name, each in found.items() if name.startswith("quix"))
    title = (f"Committed {found['worker'].middle:.0f} ms after it was sent;", f"quix-streams: {peer:.0f} ms at best")
    return Panel("latency", title, [Group("median at 200/s, without a model, ms", bars(found))])


def _partitions(tables: Tables) -> Panel:
    names = {n: f"{n} partitions" for n in (4, 64, 256)}
    speed = tables.select("j", "traces s", {names[n]: f"backlog of {names[n]}" for n in (4, 64)})
    memory = tables.select("j", "RSS MiB", {name: f"{name} with full caches, idle" for name in names.values()})
    share = 100 * speed[names[64]].middle / speed[names[4]].middle
    each = (memory[names[256]].middle - memory[names[4]].middle) / (256 - 4)
    return Panel(
        "partitions",
        (f"64 partitions are read at {share:.0f} % of the", f"speed of 4; each takes {each:.1f} MiB"),
        [
            Group("backlog with the model, traces/s", bars(speed)),
            Group("full caches, without a model, MiB", bars(memory)),
        ],
    )


def _hand_over(tables: Tables) -> Panel:
    restart = "rolling restart of 4 workers, 32 partitions"
    stall = tables.select("h", "longest stall s", {
        "worker": restart,
        "worker, static members": f"{restart}, static members",
        "quix-streams": f"quix-streams: {restart}",
    })  # fmt: skip
    gone = {
        "stopped (SIGTERM)": tables.get("h", "SIGTERM to 1 of 3 workers, 16 partitions", "longest stall s"),
        "killed, session timeout 6 s": tables.get(
            "h", "SIGKILL of 1 of 3 workers, 16 partitions, session timeout 6 s", "slowest first output s"
        ),
    }
    ours, theirs = stall["worker"].middle, stall["quix-streams"].middle
    return Panel(
        "hand-over",
        ("A rolling restart stops a partition for", f"{ours:.2g} s at most; quix-streams: {theirs:.2g} s"),
        [
            Group("rolling restart, longest stall, s", bars(stall)),
            Group("one worker of three is gone, longest stall, s", bars(gone)),
        ],
    )


def bars(figures: Mapping[str, Figure]) -> list[Bar]:
    """Return a bar for each figure; what does not name a peer is the worker's."""
    peers = ("quix-streams", "aiokafka")
    return [Bar(label, figure, not label.startswith(peers)) for label, figure in figures.items()]


def pictures(page: str) -> dict[str, str]:
    """Return the pictures of the page's tables: file name -> SVG. Two beside one another are of the same height."""
    drawn = panels(Tables(page))
    heights = [TITLE + sum(HEADING + ROW * len(group.bars) for group in each.groups) + 14 for each in drawn]
    return {
        f"benchmarks-{panel.name}.svg": _picture(panel, max(heights[first : first + 2]))
        for first in range(0, len(drawn), 2)
        for panel in drawn[first : first + 2]
    }


def write(drawn: Mapping[str, str]) -> None:
    """Write pictures into docs/."""
    for name, picture in drawn.items():
        (DOCS / name).write_text(picture, "utf-8")


def _picture(panel: Panel, height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + GAP:g}" '
        f'viewBox="0 0 {WIDTH} {height + GAP:g}" '
        'role="img" aria-labelledby="title" '
        'font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="15">'
    )
    out = [
        head,
        f'<title id="title">{escape(" ".join(panel.title))}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="panel" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10"/>',
    ]
    for number, line in enumerate(panel.title):
        out.append(f'<text class="title" x="{MARGIN}" y="{30 + 22 * number}">{escape(line)}</text>')
    y = TITLE
    for group in panel.groups:
        out.append(f'<text class="what" x="{MARGIN}" y="{y + 18}">{escape(group.what)}</text>')
        y += HEADING
        lengths = sorted(bar.figure.most for bar in group.bars)
        cut = lengths[-1] > CLIPPED * lengths[-2] and len(lengths) > 2
        for bar in group.bars:
            out += _bar(bar, y, 1.15 * lengths[-2] if cut else lengths[-1])
            y += ROW
    return "\n".join([*out, "</svg>\n"])


def _bar(bar: Bar, top: int, end: float) -> list[str]:
    """Draw a label, its value, and below them a bar on a scale that ends at `end`, with the range of the rounds."""
    full = WIDTH - 2 * MARGIN
    share = full / end
    cut = bar.figure.middle > end
    length, kind = full if cut else bar.figure.middle * share, "ours" if bar.ours else "other"
    y = top + 22
    out = [
        f'<text x="{MARGIN}" y="{top + 15}">{escape(bar.label)}</text>',
        f'<text class="value" x="{MARGIN + full}" y="{top + 15}">{escape(bar.figure.text)}</text>',
        f'<rect class="track" x="{MARGIN}" y="{y}" width="{full}" height="9" rx="4.5"/>',
        f'<rect class="{kind}" x="{MARGIN}" y="{y}" width="{length:.1f}" height="9" rx="4.5"/>',
    ]
    if cut:
        x = MARGIN + full - 40
        out.append(f'<path class="cut" d="M{x} {y + 12} l8 -15 m8 0 l-8 15"/>')
    elif bar.figure.least < bar.figure.most:
        least, most = (MARGIN + min(value, end) * share for value in (bar.figure.least, bar.figure.most))
        out.append(f'<path class="range" d="M{least:.1f} {y + 4.5:g} H{most:.1f}"/>')
    return out


if __name__ == "__main__":
    write(pictures(PAGE.read_text("utf-8")))
