"""What docs/contributing.md says of rooms, targets and tests is so."""

import re

from tests.support.surroundings import ROOT


def test_the_table_of_rooms_has_every_room() -> None:
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    table = text.split("| room | purpose |")[1].split("\n\n")[0]
    rooms = {path.stem for path in (ROOT / "worker").glob("[!_]*") if path.is_dir()}
    assert set(re.findall(r"^\| `(\w+)/?` \|", table, re.MULTILINE)) == rooms | {"cli"}


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
