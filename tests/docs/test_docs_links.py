"""Every link and picture in README.md and docs/ leads somewhere: files, and headings in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.surroundings import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "schemas").glob("*.md"))]
LINK = re.compile(r"""\]\(([^)\s]+)(?:\s+"[^"]*")?\)|(?:href|src|srcset)="([^"]+)\"""")


def prose(path: Path) -> str:
    """The page without its code blocks, in which a # is a comment and brackets are code."""
    return re.sub(r"^(`{3,}).*?^\1", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, without punctuation, numbered if repeated."""
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', prose(path)))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def links(page: Path) -> Iterator[str]:
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", prose(page))):
        target = match[1] or match[2]
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert not broken, broken


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs/README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page != index}
    nested = {page for page in pages if page.parent != index.parent and (page.parent / "README.md") in pages}
    missing = sorted(str(page.relative_to(ROOT)) for page in pages - listed - nested)
    assert not missing, f"add them to docs/README.md: {missing}"
