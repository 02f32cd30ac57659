"""The table of modules in docs/contributing.md lists the modules that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_has_its_row_and_every_row_its_module() -> None:
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    table = text.split("<!-- modules:")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([\w/]+\.py)`", cell)]
    modules = [path.relative_to(ROOT / "worker") for path in (ROOT / "worker").rglob("*.py")]
    assert sorted(listed) == sorted(
        str(path) for path in modules if path.name != "__init__.py" or path.parent.name == ""
    )


def test_the_make_targets_exist() -> None:
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_every_file_of_the_layout_is_there() -> None:
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    table = text.split("| folder | contents |")[1].split("\n\n")[0]
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names = re.findall(r"`([\w/]+)`", cell)
        folder = names[0].rpartition("/")[0] if len(names) > 1 else ""
        for name in names:
            path = ROOT / "tests" / folder / name.removeprefix(f"{folder}/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), name
