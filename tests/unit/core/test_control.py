"""Control records: which ones there are, and the keys that sign them."""

from pathlib import Path

import pytest

from worker.config import ConfigError, load
from worker.config.keys import judge_keys
from worker.core.verdicts import control_kind

KEY = b"0123456789abcdef0123456789abcdef"
OTHER_KEY = b"another key, just as long as that"


def test_every_record_with_the_header_is_a_control_record() -> None:
    assert control_kind([("kp-control", b"verdict")]) == b"verdict"
    assert control_kind([("kp-control", b"forget")]) == b"forget"
    assert control_kind([("kp-control", None)]) == b""  # type: ignore[list-item]
    assert control_kind([("Kp-Control", b"verdict")]) is None
    assert control_kind([]) is None


def test_keys_come_from_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\nci " + OTHER_KEY + b"\r\n\nci " + KEY + b"\n")
    assert judge_keys(load(verdict_key_file=file)) == {"ci": [OTHER_KEY, KEY]}
    for content, words in (
        (b"\n", "empty"),
        (b"ci " + KEY + b"\nann short", "less than 32 bytes"),
        (b"ci " + KEY + b"\nann " + KEY, "the same key as ci"),
        (b"c i " + KEY + b"\nnobody", "a line is JUDGE KEY"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            judge_keys(load(verdict_key_file=file))
        assert "short" not in str(caught.value)
        assert KEY.decode() not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        judge_keys(load(verdict_key_file=tmp_path / "none"))
    assert judge_keys(load()) == {}
