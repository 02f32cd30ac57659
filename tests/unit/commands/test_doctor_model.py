"""What `kp-worker doctor` says of cache entries that another embedder has made."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.builders import TextEmbedder, trace_document
from tests.support.embedding_service import MODEL, EmbeddingService
from worker.commands.doctor.model import check_model, long_texts, other_entries
from worker.config import load
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import Reading

NOW = EmbedderIdentity("m", "0", 2, 128, "r", "fp32", embed_text="objective", objective_tokens=512)


def test_nothing_is_said_of_entries_of_the_same_embedder() -> None:
    assert list(other_entries(NOW, {NOW.key(): 4})) == []
    assert list(other_entries(NOW, {})) == []


def test_entries_of_another_embedder_are_named_with_what_follows() -> None:
    other = msgspec.structs.replace(NOW, max_tokens=256)
    (finding,) = other_entries(NOW, {other.key(): 1, NOW.key(): 3})
    assert finding.level == "warn"
    assert f"of 1 partition were made by another embedder ({other.key()}); with these settings ({NOW.key()})" in str(
        finding
    )
    assert "starts there with an empty cache, once" in str(finding)


class ReadsWords(TextEmbedder):
    """Truncates texts of more than five words."""

    def read(self, text: str, objective: bool = False) -> Reading:
        return super().read(text, objective)._replace(truncated=len(text.split()) > 5)


@pytest.mark.parametrize(("view", "cut", "said"), [("whole", 2, True), ("whole", 1, False), ("objective", 2, False)])
def test_long_texts_are_said_if_most_are_cut_and_another_view_would_help(view: str, cut: int, said: bool) -> None:
    objectives = ["word " * 9] * cut + ["two words"] * (3 - cut)
    documents = [
        msgspec.json.encode(trace_document(f"kp:trace:{number}", objective=objective, steps=["thought"]))
        for number, objective in enumerate(objectives)
    ]
    found = list(long_texts(load(embed_text=view), ReadsWords(), [*documents, b"no trace"]))
    assert [finding.check for finding in found] == ["long texts"] * said
    if said:
        assert "2 of the last 3 texts are longer than KP_MAX_TOKENS=256" in found[0].message


async def test_an_embedding_service_is_asked_and_timed() -> None:
    with EmbeddingService() as service:
        settings = load(embedder="http", embedder_url=service.url, model=MODEL)
        model, embedding, other = await check_model(settings, {NOW.key(): 1})
        assert (model.level, embedding.level, other.level) == ("ok", "ok", "warn")
        assert f"{MODEL} at {service.url}: 384 dimensions" in model.message
        assert "a text of 256 words takes" in embedding.message
        service.fault = lambda texts: (404, b"no such model", {})
        (finding,) = await check_model(settings, {})
        assert finding.level == "fail"
        assert "no such model" in finding.message
        service.stop()
        (finding,) = await check_model(settings, {})
        assert "no connection" in finding.message
        assert "check KP_EMBEDDER_URL" in finding.remedy
