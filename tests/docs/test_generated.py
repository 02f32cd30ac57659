"""What the code writes into the pages is there: `make docs` writes it."""

from pathlib import Path

import pytest

from tests.support.generated import BLOCKS, MARKED, PAGES, generated

GENERATED = generated()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_the_file_is_as_make_docs_writes_it(path: Path) -> None:
    assert path.read_text() == GENERATED[path]


def test_each_block_has_its_place() -> None:
    assert sorted(at[1] for page in PAGES for at in MARKED.finditer(page.read_text())) == sorted(BLOCKS)
