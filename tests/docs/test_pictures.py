"""The pictures of docs/ have light and dark colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.surroundings import DOCS


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_and_dark_colours(path: Path) -> None:
    text = path.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert "prefers-color-scheme: dark" in text
    used, defined = set(re.findall(r"var\((--[\w-]+)\)", text)), re.findall(r"(--[\w-]+):", text)
    assert used == set(defined)
    assert all(defined.count(name) == 2 for name in used), "each colour is there in light and in dark"
