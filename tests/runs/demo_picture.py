"""docs/demo.svg and the text beside it in README.md, of one run of the demo: `python -m tests.runs.demo_picture`."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from html import escape
from typing import Final
from unittest.mock import patch

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.support.surroundings import ROOT
from worker.config import load
from worker.lab.demo import show
from worker.lab.demo.view import STORY, short

PICTURE: Final = ROOT / "docs/demo.svg"
README: Final = ROOT / "README.md"
ROWS: Final = 10
"""Scored traces in the picture."""

WIDTH, LINE, MARGIN = 800, 20, 20  # 90 characters of 8.4 a line
STYLE: Final = """
:root { --surface: #ffffff; --line: #d8dee6; --ink: #17202b; --muted: #55616f; --green: #0b7a4d; --red: #b3261e;
  --yellow: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --surface: #171e27; --line: #2c3744; --ink: #e9eef4; --muted: #a3b0bf;
  --green: #4fd09a; --red: #ff8f85; --yellow: #f0b35c; } }
.surface { fill: var(--surface); stroke: var(--line); } text { fill: var(--ink); white-space: pre; }
.dim { fill: var(--muted); } .bold { font-weight: 700; }
.green { fill: var(--green); } .red { fill: var(--red); } .yellow { fill: var(--yellow); }
"""


def run() -> list[Text]:
    """Run the demo, and return what it prints; its output is shown, too."""
    console = Console(record=True, highlight=False, width=100)
    with patch.object(show, "wide_console", lambda: console):
        failed = show.run_demo(load(), None, keep_running=False, registry=False, otlp=False)
    if failed:
        sys.exit("the demo has failed: see above")
    return list(Text.from_ansi(console.export_text(styles=True)).split(allow_blank=True))


def shortened(lines: Sequence[Text], rows: int) -> list[Text]:
    """Return the lines to show: all steps and counts, `rows` scored traces, a dead letter, and the story."""
    plain = [line.plain.rstrip() for line in lines]
    table = plain.index("Scored traces, by partition and offset")
    head = next(n for n in range(table, len(plain)) if plain[n].startswith("id "))
    first = next(n for n in range(head, len(plain)) if plain[n].startswith(short(STORY[0])))
    letter = next(n for n in range(first, len(plain)) if "invalid_value" in plain[n])
    story = plain.index("The same incident, reported three times")
    end = plain.index("", story)
    steps = [n for n in range(table) if not plain[n] or plain[n].startswith(("ok ", "  published", "  evaluation"))]
    chosen = [*steps, head, *range(first, first + rows), None, letter, None, *range(story, end)]
    blank = [Text("..."), Text("")]
    found = [blank.pop(0) if n is None else lines[n] for n in chosen]
    while not found[0].plain.strip():
        found.pop(0)
    for line in found:
        line.rstrip()
    return found


def draw(lines: Sequence[Text]) -> str:
    """Return the lines as a picture, in light and dark colours."""
    height = len(lines) * LINE + 2 * MARGIN
    fonts = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title" font-family="{fonts}"',
        'font-size="14">',
        '<title id="title">make demo in a terminal: scored traces, and one incident, reported three times</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="surface" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
    ]
    for number, line in enumerate(lines):
        parts = (_part(span) for span in line.divide(sorted({edge for s in line.spans for edge in (s.start, s.end)})))
        out.append(f'<text x="{MARGIN}" y="{MARGIN + LINE * number + 15}">{"".join(parts)}</text>')
    return "\n".join([*out, "</svg>\n"])


def _part(text: Text) -> str:
    style = Style.combine([Style.null(), *(Style.parse(str(span.style)) for span in text.spans)])
    names = {1: "red", 2: "green", 3: "yellow"}
    classes = [name for name in ("dim", "bold") if getattr(style, name)]
    if style.color is not None and style.color.number in names:
        classes.append(names[style.color.number])
    content = escape(text.plain)
    return f'<tspan class="{" ".join(classes)}">{content}</tspan>' if classes else content


def main() -> None:
    """Run the demo and write both."""
    lines = run()
    picture = shortened([line.copy() for line in lines], ROWS)
    PICTURE.write_text(draw([Text.styled("$ make demo", "dim"), *picture]), "utf-8")
    text = io.StringIO()
    for line in shortened([line.copy() for line in lines], 3):
        text.write(line.plain + "\n")
    readme = README.read_text("utf-8")
    block = re.compile(r"(!\[The demo in a terminal\]\(docs/demo.svg\)\n\n```text\n).*?(?=```\n)", re.DOTALL)
    README.write_text(block.sub(lambda match: match[1] + text.getvalue(), readme), "utf-8")


if __name__ == "__main__":
    main()
