"""The multilingual model, as `kp-worker fetch-model --model multilingual` exports it from the package index."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.processes import run_command
from tests.support.stage import Diagnosis
from tests.support.surroundings import environment
from worker.cli import cli
from worker.config import load
from worker.core.novelty import VectorCache
from worker.embed.embedder import MULTILINGUAL, MULTILINGUAL_NAME, ModelError
from worker.embed.export import RECORDED, open_multilingual
from worker.embed.load import load_embedder
from worker.embed.openvino_embedder import OpenVinoEmbedder, find_exported
from worker.embed.reference_texts import TEXTS, recorded_vectors

PARAPHRASES = (
    ("Comprueba el importe de la factura antes de pagarla.", "Verifica la cantidad facturada antes del pago."),
    ("El cliente quiere cambiar la fecha de su vuelo.", "Un pasajero pide mover su billete a otro día."),
    ("Cuenta los registros que no tienen país.", "Averigua cuántas filas carecen de país."),
    ("付款前请核对发票金额。", "在支付之前检查账单的数额。"),
    ("客户想更改航班日期。", "一位乘客要求把机票改到另一天。"),
    ("统计没有国家的记录数量。", "查一下有多少行缺少国家。"),
)
"""The same three tasks, each in other words, in two languages."""


@pytest.fixture(scope="module")
def embedder() -> OpenVinoEmbedder:
    fetch = ["fetch-model", "--model", MULTILINGUAL, "--if-missing"]
    done = run_command("worker", fetch, environment(), seconds=240)
    assert done.returncode == 0, done.stderr
    found = load_embedder(load(embedder="auto", model=MULTILINGUAL))
    assert isinstance(found, OpenVinoEmbedder)
    return found


def test_the_vectors_are_those_of_sentence_transformers_less_the_centre(embedder: OpenVinoEmbedder) -> None:
    assert embedder.identity.name == MULTILINGUAL_NAME
    assert (embedder.identity.dimensions, embedder.identity.runtime) == (384, "openvino")
    for text, expected in list(zip(TEXTS, recorded_vectors(RECORDED), strict=True))[::4]:
        found = embedder.embed(text)
        assert found.vector @ expected.vector > 0.99999, text[:60]
        assert found.truncated == expected.truncated


def test_a_paraphrase_is_nearer_than_another_task_in_spanish_and_chinese(embedder: OpenVinoEmbedder) -> None:
    first, second = (np.array([embedder.embed(pair[side]).vector for pair in PARAPHRASES]) for side in (0, 1))
    similar = first @ second.T
    for start in (0, 3):
        block = similar[start : start + 3, start : start + 3]
        assert np.diag(block).min() > block[~np.eye(3, dtype=bool)].max() + 0.05, block
    cache = VectorCache(10, embedder.identity.dimensions)
    cache.add(first[0])
    assert 1 - cache.max_cosine_similarity(second[0]) < 0.3
    assert 1 - cache.max_cosine_similarity(second[1]) > 0.35


def test_blanks_and_control_characters_do_not_count(embedder: OpenVinoEmbedder) -> None:
    plain = embedder.embed("check the invoice").vector
    odd = embedder.embed("check\u200b\x07the\n\n  ｉｎｖｏｉｃｅ").vector  # noqa: RUF001 full-width letters
    assert np.array_equal(plain, odd)


@pytest.mark.parametrize(
    ("settings", "model", "tokens"),
    [
        ({}, "all-MiniLM-L6-v2 (", 256),
        (
            {"KP_MODEL": MULTILINGUAL, "KP_MAX_TOKENS": "128"},
            f"{MULTILINGUAL_NAME} (openvino, fp32), sha256 1571fc982750", 128,
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("embedder")
def test_the_doctor_says_which_model_it_is(settings: dict[str, str], model: str, tokens: int) -> None:
    diagnosis = Diagnosis({"KP_BOOTSTRAP_SERVERS": "127.0.0.1:1", "KP_EMBEDDER": "auto"} | settings)
    assert diagnosis.of("model")[0][1].startswith(model)
    assert f"a text of {tokens} tokens takes" in diagnosis.of("embedding")[0][1]
    assert "fp32" in diagnosis.of("precision")[0][1]


def test_without_it_the_command_that_fetches_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kind in ("auto", "openvino"):
        with pytest.raises(ModelError, match="run kp-worker fetch-model --model multilingual"):
            load_embedder(load(embedder=kind, model=MULTILINGUAL))
    with pytest.raises(ModelError, match="runs with OpenVINO alone: set KP_EMBEDDER=auto"):
        load_embedder(load(embedder="sentence-transformers", model=MULTILINGUAL))
    assert find_exported(MULTILINGUAL) is None
    diagnosis = Diagnosis({"KP_BOOTSTRAP_SERVERS": "127.0.0.1:1", "KP_EMBEDDER": "auto", "KP_MODEL": MULTILINGUAL})
    assert any("fetch-model --model multilingual" in message for message in diagnosis.failed())


def test_other_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e5-small-q4.bin").write_bytes(b"E5S1 but another model")
    with pytest.raises(ModelError, match="the weights of the multilingual model have 1571fc982750"):
        open_multilingual(np, tmp_path)


def test_the_hub_has_no_such_weights() -> None:
    done = CliRunner().invoke(cli, ["fetch-model", "--model", MULTILINGUAL, "--from", "hub"])
    assert done.exit_code == 2
    assert "come from the package index alone" in done.stderr
