"""What `kp-worker doctor` reads from the changelog, against the scorer that wrote it, and what it says of embedders."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.builders import T0, TextEmbedder, make_trace, trace_document
from tests.support.damaged import bad_entries, entry_fields, mutated, packed, some_key
from tests.support.embedding_service import MODEL as SERVED
from tests.support.embedding_service import EmbeddingService
from worker.commands.doctor.finding import Exam, Finding
from worker.commands.doctor.model import check_model, long_texts, other_entries
from worker.commands.doctor.traces import Memory, capacity, restored, sizes, standings
from worker.config import Settings, load, read
from worker.core.changelog import Committed, encode, slot_key
from worker.core.novelty import unit
from worker.core.records import EmbedderIdentity
from worker.core.restore import Log
from worker.core.scorer import PartitionScorer
from worker.core.trace import ReasoningTrace
from worker.core.track_record import Standing
from worker.embed.embedder import Reading
from worker.kafka.assignment import Position

MODEL, DIMENSIONS = "test:0:8", 8
TOPIC_ID = "a" * 22


def settings_of(capacity: int, ttl_s: float | str) -> Settings:
    return load(cache_max_elements=capacity, cache_ttl_seconds=ttl_s)


class Written:
    """A partition's scorer, and the changelog that it leaves behind."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = MODEL
        self.scorer = PartitionScorer(settings.cache_max_elements, settings.cache_ttl_ms, DIMENSIONS)
        self.log = Log()
        self.offset = 0

    def score(self, vector: Any, time_ms: int) -> None:
        scored = self.scorer.score(make_trace(f"kp:trace:{self.offset}"), vector, time_ms)
        value = encode(
            sequence=scored.sequence, source_offset=self.offset, stream_time_ms=scored.stream_time_ms,
            trace_id="x", model=self.model, vector=scored.vector, epoch=1,
        )  # fmt: skip
        self.log.apply(slot_key(scored.sequence, self.settings.cache_max_elements, 1), value, self.log.end)
        self.offset += 1

    def memory(self, committed: int | None = None) -> Memory:
        offset = self.offset if committed is None else committed
        metadata = Committed(TOPIC_ID, 1, 0, self.scorer.stream_time_ms)
        return restored(self.settings, self.log, Position(offset, True, metadata, TOPIC_ID))


def test_the_entries_are_those_of_the_scorer(seed: int) -> None:
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    for _ in range(25):
        part = Written(settings_of(chance.randint(3, 40), chance.choice(["none", 20.0])))
        now = T0
        for vector in rng.normal(size=(chance.randint(1, 90), DIMENSIONS)).astype(np.float32):
            now += chance.choice([0, 100, 3000])
            part.score(vector, now)
        assert part.memory().live == len(part.scorer.cache)


def test_only_what_is_committed_and_of_the_last_model_counts() -> None:
    part = Written(settings_of(10, "none"))
    assert part.memory().live == 0
    for number in range(6):
        part.score(np.eye(8)[number], T0 + number)
    assert (part.memory(4).live, part.memory().live) == (4, 6)
    part.model = "another:1:8"
    part.score(np.eye(8)[1], T0)
    assert part.memory().live == 1


@pytest.mark.slow
def test_damaged_entries_fail_no_check(seed: int) -> None:
    rng, settings = random.Random(seed), settings_of(10, 60.0)
    made = np.random.default_rng(seed).normal(size=(20, DIMENSIONS)).astype(np.float32)
    for number in range(40):
        part = Written(settings)
        for place, vector in enumerate(made):
            part.score(vector, T0 + place)
        fields = entry_fields(19, 19, T0 + 19, MODEL, unit(made[0], DIMENSIONS))
        if number == 0:
            for place, (_, value) in enumerate(bad_entries(fields)):
                part.log.apply(b"1:1034:%d" % (100 + place), value, part.log.end)
            assert part.memory().live == 10
        used = [slot_key(place, 10, 1) for place in range(20)]
        for _ in range(rng.randint(1, 8)):
            part.log.apply(some_key(rng, used), mutated(rng, [packed(fields)]), part.log.end)
        capacity(settings, {0: part.memory()})


def test_a_long_list_names_the_ten_greatest() -> None:
    entries = {number: 100 + number for number in range(12)}
    assert sizes(entries).startswith("1266 live: 111 in partition 11, 110 in partition 10, ")
    assert sizes(entries).endswith(", 102 in partition 2, at most 101 in each other")
    records = [(f"agent-{number}", " x", Standing(0.25, number, number / 2)) for number in range(12)]
    assert standings(records).startswith('12: agent-11 in " x": 5.5 of 11 succeeded, used 0.2500; agent-10 in')
    assert standings(records).endswith("; and 2 more")


# -- embedders

NOW = EmbedderIdentity("m", "0", 2, 128, "r", "fp32", embed_text="objective", objective_tokens=512)


def test_entries_of_another_embedder_are_named_with_what_follows() -> None:
    assert list(other_entries(NOW, {})) == list(other_entries(NOW, {NOW.key(): 4})) == []
    other = msgspec.structs.replace(NOW, max_tokens=256)
    (finding,) = other_entries(NOW, {other.key(): 1, NOW.key(): 3})
    assert finding.level == "warn"
    message = f"of 1 partition were made by another embedder ({other.key()}); with these settings ({NOW.key()})"
    assert message in finding.message
    assert "starts there with an empty cache, once" in finding.message


class ReadsWords(TextEmbedder):
    """Truncates texts of more than five words."""

    def read(self, text: str, objective: bool = False) -> Reading:
        return super().read(text, objective)._replace(truncated=len(text.split()) > 5)


@pytest.mark.parametrize(("view", "cut", "said"), [("whole", 2, True), ("whole", 1, False), ("objective", 2, False)])
def test_long_texts_are_said_if_most_are_cut_and_another_view_would_help(view: str, cut: int, said: bool) -> None:
    objectives = ["word " * 9] * cut + ["two words"] * (3 - cut)
    documents = [
        msgspec.convert(trace_document(f"kp:trace:{number}", objective=objective, steps=["thought"]), ReasoningTrace)
        for number, objective in enumerate(objectives)
    ]
    found = list(long_texts(load(embed_text=view), ReadsWords(), documents))
    assert [finding.check for finding in found] == ["long texts"] * said
    if said:
        assert "2 of the last 3 texts are longer than KP_MAX_TOKENS=256" in found[0].message


async def test_a_model_that_cannot_be_looked_for_is_a_failure() -> None:
    findings: list[Finding] = []
    await check_model(Exam(read(options={"model": "/" + "x" * 300}), findings.append))
    (finding,) = findings
    assert finding.level == "fail"


async def test_an_embedding_service_is_asked_and_timed() -> None:
    async def findings(models: dict[str, int]) -> list[Finding]:
        loaded = read(options={"embedder": "http", "embedder_url": service.url, "model": SERVED})
        reported: list[Finding] = []
        exam = Exam(loaded, reported.append)
        exam.models.update(models)
        await check_model(exam)
        return reported

    with EmbeddingService() as service:
        model, embedding, other = await findings({NOW.key(): 1})
        assert (model.level, embedding.level, other.level) == ("ok", "ok", "warn")
        assert f"{SERVED} at {service.url}: 384 dimensions" in model.message
        assert "a text of 256 words takes" in embedding.message
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("worker.commands.doctor.model.long_texts", lambda *_: 1 / 0)
            *_, broken = await findings({})
        assert (broken.level, broken.message) == ("fail", "fails with ZeroDivisionError: division by zero")
        service.fault = lambda texts: (404, b"no such model", {})
        (finding,) = await findings({})
        assert finding.level == "fail"
        assert "no such model" in finding.message
        service.stop()
        (finding,) = await findings({})
        assert "no connection" in finding.message
        assert "check KP_EMBEDDER_URL" in finding.remedy
