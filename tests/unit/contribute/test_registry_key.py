"""The registry's key and address: what is refused, without quoting it. A key file that changes: test_delivery.py."""

from pathlib import Path

import pytest

from worker.config import ConfigError, load
from worker.contribute.registry import registry_key

KEY = "kp_0123456789abcdef"


def test_the_key_of_the_variable() -> None:
    assert registry_key(load(registry_key=f" {KEY}\n")).read() == KEY


@pytest.mark.parametrize("text", ["", " \n", f"{KEY} {KEY}", f"{KEY}\r\nX-Other: 1", "kp_\u00e9"])
def test_what_is_no_key_is_refused_without_quoting_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as file_error:
        registry_key(load(registry_key_file=path))
    assert str(path) in str(file_error.value)
    assert KEY not in str(file_error.value)
    if text:
        with pytest.raises(ConfigError) as error:
            registry_key(load(registry_key=text))
        assert KEY not in str(error.value)


def test_no_key_and_two_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY"):
        registry_key(load())
    with pytest.raises(ConfigError, match="both set"):
        load(registry_key=KEY, registry_key_file=tmp_path / "key")


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o644, False), (0o620, True), (0o602, True), (0o666, True)]
)
def test_a_file_that_others_may_write_is_warned_about(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(mode)
    key = registry_key(load(registry_key_file=path))
    assert key.read() == KEY
    assert [f"mode {mode:03o}" in each.getMessage() for each in caplog.records] == [True] * warned  # once
    assert KEY not in caplog.text
    path.chmod(0o666)
    caplog.clear()
    key.read()
    assert bool(caplog.records) == (mode != 0o666)  # also when it becomes so while the process runs


@pytest.mark.parametrize(
    "url", ["https://r.example.org/", "http://127.0.0.1:8080", "http://[::1]:1/base", "http://localhost:80/"]
)
def test_addresses_that_are_allowed(url: str) -> None:
    assert load(registry_url=url).registry_url == url.rstrip("/")


def test_lists_and_names_that_are_derived() -> None:
    settings = load(accepted_topic="a", contribute_visibility=" org, network,org")
    assert settings.contribute_visibility == "org,network"
    assert (settings.contributed, settings.refused) == ("a.contributed", "a.refused")
    assert settings.contribute_group == "kp-worker-contribute"


URLS = [
    "http://r.example.org", "http://127.0.0.1.example.org", "http://10.0.0.1", "ftp://127.0.0.1", "r.example.org",
    "https://", "https://a:hunter2@r.example.org", "https://r.example.org?key=hunter2", "https://r.example.org/#hunter2",
    "https://r.example.org:x", "https://r.example.org/a b", "https://[::1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        *(("registry_url", url, "KP_REGISTRY_URL") for url in URLS),
        *(("contribute_visibility", names, "KP_CONTRIBUTE_VISIBILITY")
          for names in ("public", "network;org", "network,")),
        ("refused_topic", "traces.rejected", "must differ"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(setting: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        load(**{setting: value})
    assert "hunter2" not in str(error.value)
