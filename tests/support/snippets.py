"""The code blocks of README.md and docs/, each with its mark: run by a test, or not run for a reason.

A mark is an HTML comment on the line above the block: `<!-- run: tests/... -->` or `<!-- not run: why -->`. Blocks of
plain `text` are output and need none.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.surroundings import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Snippet:
    """A block: its page from the root, its first line there, its language, its text, and its mark ("" without one)."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Return the commands of a console block: those behind `$ `, or all lines where none is; none that installs."""
        lines = self.text.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in prompted or lines if line and not line.startswith(("#", "pip install"))]


def snippets(run_by: str = "") -> list[Snippet]:
    """Return all blocks, or those that `run_by` (a test file, from the root) runs."""
    found = []
    for path in PAGES:
        text = path.read_text("utf-8")
        for match in re.finditer(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Snippet(str(path.relative_to(ROOT)), line, match[2], match[3], match[1] or ""))
    return [each for each in found if not run_by or each.mark == f"run: {run_by}"]


PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def shell(line: str, env: Mapping[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in bash, as a user does."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env={**env, **PATH}, cwd=directory,
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
