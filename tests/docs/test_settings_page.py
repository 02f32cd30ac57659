"""The table of docs/settings.md is the code's."""

from pathlib import Path

from worker.config import describe

DOCUMENT = Path(__file__).parents[2] / "docs/settings.md"


def table() -> str:
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, default, meaning in describe():
        shown = f"`{default}`" if default else ""
        rows.append(f"| `{name}` | {shown} | {meaning.replace('|', '/')} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_true() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert table() in text, "python -m tests.docs.test_settings_page prints the table as it should be"


if __name__ == "__main__":
    print(table())
