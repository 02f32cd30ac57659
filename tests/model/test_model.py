"""Real model, real Kafka: the scores of the shared traces, by file and by topic."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_command
from tests.support.stage import LINES, Stage, Workers, origin
from tests.support.surroundings import DATA, environment
from worker.embed import torch_embedder
from worker.embed.embedder import ModelError
from worker.embed.torch_embedder import SentenceTransformersEmbedder
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(900)

SOME = 120
"""Lines from the first on: a score depends on those before it, so no others can be left out. 7 of them are longer than
256 tokens. `make test-long` takes all 1000."""

EXPECTED = [json.loads(line) for line in (DATA / "traces_scores.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    return len(EXPECTED) if request.config.getoption("--long") else SOME


def score_file(folder: Path, count: int, **settings: str) -> list[dict[str, Any]]:
    source, output = folder / "traces.jsonl", folder / "scored.jsonl"
    source.write_bytes(b"\n".join(LINES[:count]))
    done = run_command("worker", ["score", str(source), "--output", str(output)], environment(**settings))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(b"%d traces:" % count), done.stderr
    return [json.loads(line) for line in output.read_text("utf-8").splitlines()]


def worst(documents: Sequence[dict[str, Any]], key: str) -> float:
    expected = EXPECTED[: len(documents)]
    assert [document["id"] for document in documents] == [row["id"] for row in expected]
    pairs = zip(documents, expected, strict=True)
    return max(abs(document["scoring"]["score"] - row[key]) for document, row in pairs)


@pytest.fixture(scope="module")
def by_file(tmp_path_factory: pytest.TempPathFactory, count: int) -> list[dict[str, Any]]:
    return score_file(tmp_path_factory.mktemp("by-file"), count)


def test_a_file_gets_the_expected_scores_at_256_tokens(by_file: list[dict[str, Any]], count: int) -> None:
    assert len(by_file) == count
    assert worst(by_file, "score") <= 1e-4
    identity = by_file[0]["scoring"]["embedder"]
    assert identity["name"] == "all-MiniLM-L6-v2"
    assert identity["weights_sha256"].startswith("53aa5117")
    assert (identity["dimensions"], identity["max_tokens"], identity["precision"]) == (384, 256, "fp32")


def test_a_file_gets_the_expected_scores_at_512_tokens(tmp_path: Path, count: int) -> None:
    if count == SOME:
        count //= 2  # 3 of them have another score than at 256 tokens
    assert worst(score_file(tmp_path, count, KP_MAX_TOKENS="512"), "score_seq512") <= 1e-4


def test_a_topic_gets_the_same_documents_as_a_file(
    kafka: EmbeddedKafka, workers: Workers, by_file: list[dict[str, Any]], count: int
) -> None:
    """One partition; event times are created_at, as the records come later than the traces were made."""
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="1", KP_EMBEDDER="auto")
    worker = workers(stage.env).wait_ready(120)
    stage.produce([(None, line, (), 0) for line in LINES[:count]])
    stage.wait_committed(count, timeout=300)
    outputs = stage.outputs()
    assert not outputs["dead-letter"]
    found = [json.loads(r.value) for r in sorted(outputs["accepted"] + outputs["rejected"], key=origin)]
    assert worst(found, "score") <= 1e-4
    for document, expected in zip(found, by_file, strict=True):
        document["scoring"]["source"]["topic"] = expected["scoring"]["source"]["topic"]
        assert document == expected
    metrics = worker.metrics()
    truncated = sum(row["tokens"] > 256 for row in EXPECTED[:count])
    assert truncated == (62 if count == 1000 else 7)
    assert metrics["kp_truncated_texts_total"] == truncated
    assert metrics['kp_cache_entries{partition="0"}'] <= count
    assert metrics["kp_score_count"] == count


def test_a_model_that_does_not_load_is_named_with_the_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str) -> Path:
        raise OSError(f"{name} is not on the hub")

    with pytest.raises(ModelError, match=rf"{tmp_path} has no model.safetensors"):
        SentenceTransformersEmbedder(str(tmp_path), 256, 1)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ModelError, match=rf"(?s)^model '{tmp_path}' cannot be loaded: .*KP_MODEL"):
        SentenceTransformersEmbedder(str(tmp_path), 256, 1)
    monkeypatch.setattr(torch_embedder, "_download", download)
    with pytest.raises(
        ModelError, match=r"^model 'owner/no-such-model' cannot be loaded: owner/.* on the hub; .*KP_MODEL"
    ):
        SentenceTransformersEmbedder("owner/no-such-model", 256, 1)
