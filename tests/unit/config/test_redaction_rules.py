"""KP_REDACT_RULES and KP_REDACT_PATTERNS_FILE: what they mean, and the error of each wrong file."""

import re
from pathlib import Path

import pytest

from tests.support.surroundings import DOCS
from worker.config import ConfigError, Settings
from worker.config.redaction_rules import redaction_rules
from worker.core.records import STRICT_TYPES, TYPES
from worker.redact.documents import redact_text


def test_unset_each_process_has_its_default_and_set_both_have_it() -> None:
    assert redaction_rules(Settings()).name == "reference"
    assert redaction_rules(Settings(), unset="strict").name == "strict"
    for name, types in (("reference", TYPES), ("strict", STRICT_TYPES)):
        settings = Settings(redact_rules=name)
        assert redaction_rules(settings).types == redaction_rules(settings, unset="strict").types == types


def test_the_patterns_on_the_page(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(\[\[pattern.*?)```", (DOCS / "redaction.md").read_text("utf-8"), re.DOTALL)
    file = tmp_path / "patterns.toml"
    file.write_text(example[1], "utf-8")
    rules = redaction_rules(Settings(redact_patterns_file=file))
    assert rules.types == (*TYPES, "customer_number", "host")
    cleaned, counts = redact_text("KD-12345678 on db1.corp.example", "private", rules)
    assert (cleaned, counts) == ("[REDACTED:customer_number] on (internal host)", {"customer_number": 1, "host": 1})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "must hold 1 to 100 patterns"),
        ("pattern = 1", "must hold 1 to 100 patterns"),
        ("[[patterns]]", "must hold 1 to 100 patterns"),
        ("[[pattern]]", "pattern 1 must have name and pattern"),
        ("[[pattern]]\nname='a'\npattern='b'\nx=1", "and nothing else"),
        ("[[pattern]]\nname='a'\npattern=1", "are texts"),
        ("[[pattern]]\nname='a'\npattern='(x'", r"pattern 1 \('a'\): missing \)"),
        ("[[pattern]]\nname='a'\npattern='b'\n" * 2, "the name 'a' is taken"),
        ("[[pattern]]\nname='email'\npattern='b'", "the name 'email' is taken"),
        (
            "".join(f"[[pattern]]\nname='a{i}'\npattern='x{{1,900}}'\n" for i in range(9)),
            r"pattern 3 \('a2'\) has 18.. instructions of RE2, which makes 5..., more than 4000: .*shorter repeats",
        ),
        ("[[pattern]]\nname='a'\npattern='\\pL{40}'", r"pattern 1 \('a'\) has .*ASCII such as \[a-z\]"),
        ("[[pattern", "is not TOML"),
        ("\udcff", "is not TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_and_where(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "patterns.toml"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=words) as error:
        redaction_rules(Settings(redact_patterns_file=file))
    assert f"KP_REDACT_PATTERNS_FILE={file}" in str(error.value)


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "cannot be read"), (tmp_path, "is not a file")):
        with pytest.raises(ConfigError, match=words):
            redaction_rules(Settings(redact_patterns_file=path))
