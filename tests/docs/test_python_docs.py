"""The Python interface: docs/python.md runs as it stands, the public list is this one, importing loads little."""

import contextlib
import inspect
import io
import re
import warnings

import pytest

import worker
from tests.support.imports import MODEL_RUNTIMES, loaded_after
from tests.support.surroundings import ROOT

TEXT = (ROOT / "docs" / "python.md").read_text("utf-8")

PUBLIC = {
    "InvalidTrace", "PartitionScorer", "Profile", "Reason", "ReasoningTrace", "Score", "ScoredTrace", "VectorCache",
    "Weights", "__version__", "embedded_texts", "embedding_text", "parse_trace", "redact_document", "redact_text",
    "make_verdict", "score_trace", "sign_verdict", "unit_mean",
}  # fmt: skip
"""Written out here: whoever changes it changes the interface (docs/compatibility.md)."""


def test_the_code_of_the_page_runs_and_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == TEXT.count("```python")
    names: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # open() as a reader writes it
            exec(compile(code, "docs/python.md", "exec"), names)
        assert printed.getvalue() == expected


def test_the_public_list_is_held() -> None:
    assert set(worker.__all__) == PUBLIC
    assert set(dir(worker)) >= PUBLIC
    assert all(hasattr(worker, name) for name in PUBLIC)


def test_every_public_name_is_on_the_page_with_its_arguments() -> None:
    for name in PUBLIC:
        assert re.search(rf"^\|[^|]*`{name}\b", TEXT, re.MULTILINE), name
    for name, shown in re.findall(r"`(\w+)\(([^)]*)\)`", TEXT.split("## Score one")[0]):
        parameters = inspect.signature(getattr(worker, name)).parameters
        assert [part.split("=")[0].strip() for part in shown.split(",")] == list(parameters)
        for part in shown.split(","):
            if "=" in part and "..." not in part:
                argument, default = part.strip().split("=")
                assert repr(parameters[argument].default) == default.replace("_", "")


def test_importing_the_package_loads_no_kafka_and_no_model() -> None:
    heavy = MODEL_RUNTIMES | {"aiokafka", "faust", "mode", "aiohttp", "prometheus_client", "pydantic"}
    assert not loaded_after("import worker") & (heavy | {"numpy", "msgspec"})
    names = ", ".join(sorted(PUBLIC))
    assert not loaded_after(f"from worker import {names}") & heavy


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "worker" / "py.typed").is_file()
