"""KP_EMBEDDER=http against a stand-in on a socket: batches, faults of texts, outages, other models, its answers."""

import asyncio
import base64
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.embedding_service import MODEL, Answer, EmbeddingService, answer, vector
from worker.config import ConfigError, load
from worker.embed import http_embedder
from worker.embed.embedder import MAX_CHARS, Embedding, ModelError, ServiceUnavailableError
from worker.embed.http_embedder import (
    LONG_TEXT,
    MAX_DIMENSIONS,
    MOST_REFUSED,
    MOST_TEXTS,
    PROBES,
    REFUSED_TRIES,
    TRIES,
    HttpEmbedder,
    ServiceError,
    embeddings_url,
    read_answer,
)
from worker.embed.pool import EmbeddingPool
from worker.embed.reference_texts import TEXTS, recorded_vectors

Open = Callable[..., HttpEmbedder]
SOON = 20.0


@pytest.fixture
def service() -> Iterator[EmbeddingService]:
    with EmbeddingService() as running:
        yield running


@pytest.fixture
def opened(service: EmbeddingService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(http_embedder, "FIRST_PAUSE_SECONDS", 0.01)
    made: list[HttpEmbedder] = []

    def make(**settings: Any) -> HttpEmbedder:
        given = {"embedder": "http", "embedder_url": service.url, "model": MODEL, **settings}
        made.append(HttpEmbedder(load(**given)))
        service.asked.clear()
        return made[-1]

    yield make
    for embedder in made:
        embedder.close()


@pytest.fixture
def embedder(opened: Open) -> HttpEmbedder:
    return opened()


def results(futures: list[Future[Embedding]]) -> list[list[float] | Exception]:
    errors = [future.exception(SOON) for future in futures]
    return [
        future.result().vector.tolist() if error is None else error  # type: ignore[misc]
        for future, error in zip(futures, errors, strict=True)
    ]


def submit(embedder: HttpEmbedder, count: int) -> list[Future[Embedding]]:
    return [embedder.submit(embedder.read(f"text {number}")) for number in range(count)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_check(texts: list[str]) -> bool:
    return texts[:-1] == list(PROBES)


def failing(*bad: str, status: int = 500) -> Callable[[list[str]], Answer | None]:
    """Return a fault that answers every request with one of these texts by a status."""
    return lambda texts: (status, b"what a text", {}) if set(bad) & set(texts) else None


def test_the_identity_names_the_service_model_and_its_dimensions(service: EmbeddingService, opened: Open) -> None:
    service.dimensions = 48
    embedder = opened(max_tokens=128, embed_text="objective")
    assert embedder.identity.key() == "test-model::48:128:unknown:objective"
    assert embedder.identity.runtime == "http"
    assert [it.tolist() for it in embedder.probes.vectors] == [pytest.approx(vector(text, 48)) for text in PROBES]


def test_texts_that_wait_go_together_and_results_belong_to_their_texts(service: EmbeddingService, opened: Open) -> None:
    embedder = opened(embed_in_flight=3)
    service.seconds = 0.05
    texts = [f"text {number}" for number in range(300)]
    assert results(submit(embedder, 300)) == [vector(text) for text in texts]
    sizes = [len(texts) for texts in service.asked]
    assert sorted(service.texts()) == sorted(texts)
    assert max(sizes) == MOST_TEXTS
    assert service.most == 3
    assert len(sizes) <= 3 + 300 / MOST_TEXTS + 3  # behind a backlog the requests are full


def test_a_text_does_not_wait_for_others_while_a_request_is_free(service: EmbeddingService, opened: Open) -> None:
    embedder = opened(embed_in_flight=2)
    service.seconds = 0.2
    futures = []
    for number in range(4):
        futures.append(embedder.submit(embedder.read(f"text {number}")))
        if number < 2:
            wait_for(lambda number=number: len(service.asked) > number)  # type: ignore[misc]
    results(futures)
    assert [sorted(texts) for texts in service.asked] == [["text 0"], ["text 1"], ["text 2", "text 3"]]


async def test_equal_texts_are_asked_for_once(service: EmbeddingService, embedder: HttpEmbedder) -> None:
    pool = EmbeddingPool(embedder, remembered=10)
    await pool.admission()
    futures = [pool.embed("the same") for _ in range(5)]
    assert await asyncio.gather(*[future for future in futures if isinstance(future, asyncio.Future)])
    assert service.texts() == ["the same"]
    assert pool.hits == 4
    assert pool.busy_seconds() == 0.0


def test_only_the_beginning_of_a_huge_text_is_sent(service: EmbeddingService, embedder: HttpEmbedder) -> None:
    embedding = embedder.embed("x" * (MAX_CHARS + 1))
    assert embedding.truncated
    assert [len(text) for text in service.texts()] == [MAX_CHARS]


@pytest.mark.parametrize("status", [400, 403, 413, 422, 500, 0, 200])
def test_a_text_that_fails_alone_fails_alone(service: EmbeddingService, opened: Open, status: int) -> None:
    """Status 0: the connection breaks; 200: the answer is no answer."""
    embedder = opened(embed_in_flight=2)
    service.fault = failing("bad", "worse", status=status)
    texts = [f"text {number}" for number in range(60)]
    texts[7], texts[44] = "bad", "worse"
    answers = results([embedder.submit(embedder.read(text)) for text in texts])
    assert [it for it in answers if isinstance(it, Exception)] == [answers[7], answers[44]]
    assert isinstance(answers[7], ServiceError)
    assert "what a text" not in str(answers[7]) + repr(answers[7])
    assert [it for it in answers if not isinstance(it, Exception)] == [
        vector(text) for text in texts if text not in ("bad", "worse")
    ]
    alone = REFUSED_TRIES if status in (400, 403, 413, 422) else TRIES
    assert service.asked.count(["bad"]) == alone
    assert sum(map(is_check, service.asked)) >= 2 * alone  # other texts were embedded after each
    assert embedder.problem() is None


def only_probes(status: int) -> Callable[[list[str]], Answer | None]:
    """Return the fault of a gateway that knows the probes, and answers everything else by a status."""
    return lambda texts: None if set(texts) <= set(PROBES) else (status, b"no", {})


@pytest.mark.parametrize(
    ("probes", "status"),
    [
        *((False, status) for status in (400, 401, 403, 404, 429, 500, 503, 0, 200)),
        *((True, status) for status in (400, 403, 413, 422, 500, 0)),
    ],
)
def test_texts_wait_while_the_service_fails_on_all_or_answers_probes_alone(
    service: EmbeddingService, embedder: HttpEmbedder, probes: bool, status: int
) -> None:
    service.fault = only_probes(status) if probes else lambda texts: (status, b"not now", {})
    futures = submit(embedder, 20)
    wait_for(lambda: embedder.problem() is not None)
    asked = len(service.asked)
    wait_for(lambda: len(service.asked) > asked + TRIES)  # the check is tried again and again
    assert service.url in str(embedder.problem())
    assert not any(future.done() for future in futures)
    service.fault = lambda texts: None
    assert results(futures) == [vector(f"text {number}") for number in range(20)]
    wait_for(lambda: embedder.problem() is None)
    assert embedder.service.counts["failures"] > (0 if probes else TRIES)


def refused(
    service: EmbeddingService, embedder: HttpEmbedder, count: int, status: int = 400
) -> list[Future[Embedding]]:
    """Submit so many texts that the service refuses; return when those beyond the first few are held."""
    service.fault = failing(*(f"text {number}" for number in range(count)), status=status)
    futures = submit(embedder, count)
    wait_for(lambda: f"Waiting texts: {count - MOST_REFUSED}" in (embedder.problem() or ""))
    assert sum(future.done() for future in futures) == MOST_REFUSED
    return futures


@pytest.mark.parametrize("status", [400, 500])
def test_of_many_failing_texts_the_first_fail_alone(
    service: EmbeddingService, embedder: HttpEmbedder, status: int
) -> None:
    """What refuses them may let other texts pass. As soon as one is embedded, those before it are to blame."""
    futures = refused(service, embedder, 8, status)
    asked = len(service.asked)
    wait_for(lambda: len(service.asked) > asked + 2)  # one of the others is tried again and again
    assert sum(future.done() for future in futures) == MOST_REFUSED
    assert results([embedder.submit(embedder.read("good"))]) == [vector("good")]
    assert all(isinstance(result, ServiceError) for result in results(futures))
    wait_for(lambda: embedder.problem() is None)


def test_a_text_that_fails_alone_does_so_also_if_no_other_follows(
    service: EmbeddingService, embedder: HttpEmbedder
) -> None:
    service.fault = failing("bad", status=400)
    assert isinstance(results([embedder.submit(embedder.read("bad"))])[0], ServiceError)


def test_held_texts_that_nobody_waits_for_any_more_are_forgotten(
    service: EmbeddingService, embedder: HttpEmbedder
) -> None:
    futures = refused(service, embedder, MOST_REFUSED + 3)
    assert sum(future.cancel() for future in futures) == 3
    wait_for(lambda: embedder.problem() is None)


def test_held_texts_are_embedded_once_nothing_refuses_them(service: EmbeddingService, embedder: HttpEmbedder) -> None:
    futures = refused(service, embedder, MOST_REFUSED + 3)
    service.fault = lambda texts: None
    answers = results(futures)
    wrong = [number for number, result in enumerate(answers) if isinstance(result, ServiceError)]
    assert len(wrong) == MOST_REFUSED
    assert [it for n, it in enumerate(answers) if n not in wrong] == [
        vector(f"text {n}") for n in range(len(answers)) if n not in wrong
    ]
    assert embedder.problem() is None


def test_a_command_gets_an_error_where_the_worker_would_wait(service: EmbeddingService, embedder: HttpEmbedder) -> None:
    service.fault = only_probes(400)
    for number in range(2 * MOST_REFUSED):
        with pytest.raises(ServiceError, match="the service answers 400"):
            embedder.embed(f"text {number}")


def test_an_outage_in_the_middle_of_a_refusal_is_not_the_texts_fault(
    service: EmbeddingService, embedder: HttpEmbedder
) -> None:
    """All texts are refused, then the probes are embedded again: what was refused before is asked again."""
    answers = iter([True] * 6)
    service.fault = lambda texts: (400, b"no such model", {}) if next(answers, False) else None
    assert results([embedder.submit(embedder.read("text"))]) == [vector("text")]


def test_random_faults_lose_and_swap_nothing(service: EmbeddingService, opened: Open, seed: int) -> None:
    """Each request may fail in any way. At most 3 in a row do, so that no text is taken for the cause (TRIES is 5)."""
    embedder = opened(embed_in_flight=4)
    rng = random.Random(seed)
    last = [0]

    def fault(texts: list[str]) -> Answer | None:
        last[0] += 1
        if rng.random() < 0.6 or last[0] > 3:
            last[0] = 0
            return None
        return rng.choice([
            (500, b"", {}), (502, b"<html>", {}), (503, b"", {"Retry-After": "0"}), (429, b"", {"Retry-After": "x"}),
            (0, b"", {}), (200, b"{}", {}), (200, b'{"data":[]}', {}), (301, b"", {"Location": "/"}),
        ])  # fmt: skip

    service.fault = fault
    assert results(submit(embedder, 200)) == [vector(f"text {number}") for number in range(200)]


def test_a_service_that_takes_fewer_texts_embeds_all(service: EmbeddingService, opened: Open) -> None:
    embedder = opened(embed_in_flight=1)
    service.seconds = 0.01
    service.fault = lambda texts: (413, b"batch size 32 > 10", {}) if len(texts) > 10 else None
    assert results(submit(embedder, 200)) == [vector(f"text {number}") for number in range(200)]


def test_a_request_has_a_time_limit(service: EmbeddingService, opened: Open) -> None:
    embedder = opened(stuck_seconds=0.3)
    service.seconds = 5.0
    future = embedder.submit(embedder.read("text"))
    wait_for(lambda: ["text"] in service.asked)
    service.seconds = 0.0
    assert results([future]) == [vector("text")]


def test_retry_after_is_kept(service: EmbeddingService, embedder: HttpEmbedder) -> None:
    once = iter([(429, b"", {"Retry-After": "1"})])
    service.fault = lambda texts: next(once, None)
    started = time.monotonic()
    assert results([embedder.submit(embedder.read("text"))]) == [vector("text")]
    assert time.monotonic() - started >= 1


def test_another_model_after_an_outage_ends_everything(service: EmbeddingService, embedder: HttpEmbedder) -> None:
    service.stop()
    future = embedder.submit(embedder.read("text"))
    wait_for(lambda: embedder.problem() is not None)
    service.salt = "another model"
    service.start()
    assert isinstance(future.exception(SOON), ModelError)
    assert isinstance(embedder.submit(embedder.read("later")).exception(SOON), ModelError)
    assert "later" not in service.texts()


def test_closing_in_an_outage_ends_at_once(service: EmbeddingService, opened: Open) -> None:
    embedder = opened(embed_in_flight=1)
    service.stop()
    futures = submit(embedder, 100)
    wait_for(lambda: embedder.problem() is not None)
    started = time.monotonic()
    embedder.close()
    assert time.monotonic() - started < 2
    assert not embedder._thread.is_alive()
    assert not any(future.done() for future in futures)


# --- the start


def test_a_service_that_does_not_answer_yet(service: EmbeddingService, opened: Open) -> None:
    for status in (500, 503, 429, 0):
        service.fault = lambda texts, status=status: (status, b"", {})  # type: ignore[misc]
        with pytest.raises(ServiceUnavailableError):
            opened()
    service.stop()
    with pytest.raises(ServiceUnavailableError, match="no connection"):
        opened()
    service.start()


@pytest.mark.parametrize("status", [301, 400, 401, 404])
def test_wrong_settings_are_told_with_the_answer(service: EmbeddingService, opened: Open, status: int) -> None:
    service.fault = lambda texts: (status, b"no model of\x1b that name", {"Location": "/"})
    with pytest.raises(ModelError, match=r"no model of\\x1b that name") as error:
        opened()
    assert not isinstance(error.value, ServiceUnavailableError)


def test_the_token_of_a_file_that_changes(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text("first-token")
    path.chmod(0o666)
    with EmbeddingService(token="second-token") as service:
        with pytest.raises(ModelError, match="denies the token") as error:
            opened(embedder_url=service.url, embedder_token_file=path)
        assert "first-token" not in str(error.value)
        path.write_text("second-token")
        embedder = opened(embedder_url=service.url, embedder_token_file=path)
        path.write_text("wrong")
        future = embedder.submit(embedder.read("text"))
        wait_for(lambda: "denies the token" in (embedder.problem() or ""))
        path.write_text("second-token\n")
        assert results([future]) == [vector("text")]
    assert "may be written by others" in caplog.text
    assert "second-token" not in caplog.text
    with pytest.raises(ModelError, match="KP_EMBEDDER_TOKEN_FILE"):
        opened(embedder_token_file=tmp_path / "none")


def test_a_token_over_http_is_warned_about(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text("token")
    with pytest.raises(ServiceUnavailableError):
        opened(embedder_url="http://model.invalid", embedder_token_file=path)
    assert "unencrypted" in caplog.text


def test_the_official_model_has_its_vectors(
    service: EmbeddingService, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sentence-transformers/all-MiniLM-L6-v2"
    with pytest.raises(ModelError, match="differs from that of all-MiniLM-L6-v2"):
        opened(model=name)
    recorded = {text: it.vector.tolist() for text, it in zip(TEXTS, recorded_vectors(), strict=True)}
    monkeypatch.setattr("tests.support.embedding_service.vector", lambda text, *_: recorded[text])
    assert opened(model=name).identity.name == name
    recorded[LONG_TEXT] = recorded[PROBES[0]]
    with pytest.raises(ModelError, match="does not cut texts at KP_MAX_TOKENS=256"):
        opened(model=name)
    assert opened(model=name, max_tokens=512)


def test_a_service_that_refuses_long_texts_is_warned_about(
    service: EmbeddingService, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    service.fault = failing(LONG_TEXT, status=413)
    opened()
    assert "does not embed a long text" in caplog.text


# --- the settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"embedder_url": None}, "needs KP_EMBEDDER_URL"),
        ({"model": None}, "needs KP_EMBEDDER_URL, and KP_MODEL"),
        ({"embedder_url": "embeddings.example.org"}, "not a URL"),
        ({"embedder_url": "http://user:secret@host"}, "KP_EMBEDDER_TOKEN_FILE"),
        ({"embedder_url": "http://host/?key=secret"}, "query"),
        ({"precision": "bf16"}, "KP_PRECISION=bf16"),
        ({"model": "m" * 513}, "512"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, str | None], words: str) -> None:
    settings = {"embedder": "http", "embedder_url": "http://host", "model": MODEL, **given}
    with pytest.raises(ConfigError, match=words) as error:
        load(**settings)
    assert "secret" not in str(error.value)


def test_requests_at_once_are_4_unless_they_are_set() -> None:
    given = {"embedder": "http", "embedder_url": "http://host", "model": MODEL}
    assert load(**given).embed_requests == 4
    assert load(**given, embed_in_flight=2).embed_requests == 2


# -- answers: what is read, and what is refused


def items(*pairs: tuple[object, object]) -> bytes:
    return msgspec.json.encode({"data": [{"index": index, "embedding": it} for index, it in pairs]})


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://host:7997", "http://host:7997/v1/embeddings"),
        ("https://host/v1", "https://host/v1/embeddings"),
        ("https://host/openai/v2", "https://host/openai/v2/embeddings"),
        ("https://host/llm", "https://host/llm/v1/embeddings"),
        ("http://host:7997/embeddings", "http://host:7997/embeddings"),
    ],
)
def test_the_address_with_and_without_v1(given: str, address: str) -> None:
    assert embeddings_url(given) == address


def test_vectors_come_in_the_order_of_their_indexes_if_they_have_any(seed: int) -> None:
    rng = random.Random(seed)
    texts = [f"text {number}" for number in range(rng.randint(1, 40))]
    pairs = [(number, vector(text)) for number, text in enumerate(texts)]
    rng.shuffle(pairs)
    vectors = read_answer(items(*pairs), len(texts))
    assert [it.tolist() for it in vectors] == [vector(text) for text in texts]
    without = msgspec.json.encode({"data": [{"embedding": [0.0, 1.0]}, {"embedding": [1.0, 0.0]}], "model": "m"})
    assert [it.tolist() for it in read_answer(without, 2)] == [[0.0, 1.0], [1.0, 0.0]], "as they stand"


def test_base64_gives_the_same_bits_as_a_list() -> None:
    numbers = vector("a text")
    coded = base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()
    vectors = read_answer(answer([numbers, coded]), 2, len(numbers))
    assert vectors[0].tobytes() == vectors[1].tobytes()
    assert vectors[0].dtype == np.float32


@pytest.mark.parametrize("scale", [1e-3, 0.5, 17.0, 1e30])
def test_a_vector_gets_the_length_1(scale: float) -> None:
    unit = read_answer(answer([[scale * it for it in vector("a text")]]), 1)[0]
    assert np.linalg.norm(unit.astype(np.float64)) == pytest.approx(1, abs=2e-7)
    assert unit == pytest.approx(vector("a text"), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>Bad Gateway</html>", "not a list of embeddings"),
        (b'{"data": "none"}', "not a list of embeddings"),
        (b"[" * 100_000, "not a list of embeddings"),
        (b'{"data":[{"embedding":[1,NaN]},{"embedding":[1,0]}]}', "not a list of embeddings"),
        (b'{"data":[{"embedding":[1,null]},{"embedding":[1,0]}]}', "not a list of embeddings"),
        (b'{"data":[{"embedding":[1,1e39]},{"embedding":[1,0]}]}', "not finite"),
        (items((0, "AADAfwAAgD8="), (1, [1.0, 0.0])), "not finite"),
        (items((0, "AADAfwAAgD8"), (1, [1.0, 0.0])), "padding"),
        (items((0, "AAA="), (1, [1.0, 0.0])), "buffer size"),
        (items((0, [1.0, 0.0])), "1 embeddings for 2 texts"),
        (items((0, [1.0]), (1, [1.0]), (2, [1.0])), "3 embeddings for 2 texts"),
        (items((0, [1.0, 0.0]), (0, [1.0, 0.0])), "indexes"),
        (items((1, [1.0, 0.0]), (2, [1.0, 0.0])), "indexes"),
        (items((0, [1.0, 0.0]), (None, [1.0, 0.0])), "indexes"),
        (items((0, [1.0, 0.0]), (1, [1.0])), "1 dimensions, not 2"),
        (items((0, [1.0, 0.0]), (1, [])), "0 dimensions, not 2"),
        (items((0, []), (1, [])), "0 dimensions"),
        (items((0, [0.0, 0.0]), (1, [1.0, 0.0])), "only zeros"),
    ],
)
def test_an_answer_that_cannot_be_used(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_answer(body, 2)


def test_an_answer_of_other_dimensions() -> None:
    with pytest.raises(ValueError, match="2 dimensions, not 3"):
        read_answer(items((0, [1.0, 0.0])), 1, 3)
    with pytest.raises(ValueError, match=f"{MAX_DIMENSIONS + 1} dimensions"):
        read_answer(items((0, [1.0] * (MAX_DIMENSIONS + 1))), 1)
