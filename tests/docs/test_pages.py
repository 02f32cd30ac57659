"""README.md and docs/: links lead somewhere, pictures have two sets of colours, and what the code knows is there."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.generated import BLOCKS, MARKED, generated
from tests.support.generated import PAGES as WRITTEN
from tests.support.snippets import PAGES
from tests.support.surroundings import DOCS, ROOT
from worker.core.trace import Reason

GENERATED = generated()
LINK = re.compile(r"""\]\(([^)\s]+)(?:\s+"[^"]*")?\)|(?:href|src|srcset)="([^"]+)\"""")


def prose(path: Path) -> str:
    """The page without its code blocks, in which a # is a comment and brackets are code."""
    return re.sub(r"^(`{3,}).*?^\1", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, without punctuation, numbered if repeated."""
    names: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', prose(path)))
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


def links(page: Path) -> list[str]:
    targets = [match[1] or match[2] for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", prose(page)))]
    return [link for link in targets if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "schemas").glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}: no such heading"


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    assert listed >= {page for page in DOCS.glob("*.md") if page.name != "README.md"}


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_the_file_is_as_make_docs_writes_it(path: Path) -> None:
    assert path.read_text() == GENERATED[path]


def test_each_block_that_make_docs_writes_has_its_place() -> None:
    assert sorted(at[1] for page in WRITTEN for at in MARKED.finditer(page.read_text())) == sorted(BLOCKS)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_and_dark_colours(path: Path) -> None:
    text = path.read_text("utf-8")
    assert ElementTree.fromstring(text).findtext("{http://www.w3.org/2000/svg}title")
    assert "prefers-color-scheme: dark" in text
    used, defined = set(re.findall(r"var\((--[\w-]+)\)", text)), re.findall(r"(--[\w-]+):", text)
    assert used == set(defined)
    assert set(Counter(defined).values()) <= {2}, "each colour is there in light and in dark"


def test_every_reason_for_a_dead_letter_is_explained() -> None:
    table = (DOCS / "publishing.md").read_text("utf-8").split("## What becomes a dead letter")[1]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(Reason)


# -- contributing.md

CONTRIBUTING = (DOCS / "contributing.md").read_text("utf-8")


def test_the_table_of_rooms_has_every_room() -> None:
    table = CONTRIBUTING.split("| room | purpose |")[1].split("\n\n")[0]
    rooms = {path.stem for path in (ROOT / "worker").glob("[!_]*") if path.is_dir()}
    assert set(re.findall(r"^\| `(\w+)/?` \|", table, re.MULTILINE)) == rooms | {"cli"}


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", CONTRIBUTING)) <= targets


def test_every_file_of_the_layout_is_there() -> None:
    table = CONTRIBUTING.split("| folder | contents |")[1].split("\n\n")[0]
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names = re.findall(r"`([\w/]+)`", cell)
        folder = names[0].rpartition("/")[0] if len(names) > 1 else ""
        for name in names:
            path = ROOT / "tests" / folder / name.removeprefix(f"{folder}/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), name
