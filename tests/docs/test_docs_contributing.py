"""What docs/contributing.md says of rooms, targets and tests is so."""

import ast
import re

from tests.support.surroundings import ROOT


def layering() -> dict[str, set[str]]:
    """Return the table of tests/unit/test_layering.py: no test imports another one."""
    tree = ast.parse((ROOT / "tests/unit/test_layering.py").read_text("utf-8"))
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS"
    ]
    return eval(ast.unparse(value))  # a literal, but for set()


def test_the_table_of_rooms_is_the_one_that_is_enforced() -> None:
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    table = text.split("| room | purpose | may import |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)/?` \| .*? \| (.*?) ?\|$", table, re.MULTILINE)
    said = {room: set() if other in ("", "nothing") else set(other.split(", ")) for room, other in rows}
    said.pop("data")
    assert said == {
        room: others for room, others in layering().items() if not room.startswith("__") and room != "version"
    }


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
