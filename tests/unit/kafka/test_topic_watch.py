"""What a watch over topics concludes from answers of brokers; tests/kafka/test_topic_watch.py has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from worker.config import Settings
from worker.kafka.cluster import topic_watch
from worker.kafka.cluster.describe import TopicDescription
from worker.kafka.cluster.topic_watch import TopicLostError, TopicWatch

SOURCE, OUTPUT, CACHE = "traces", "traces.accepted", "cache"
GONE = UnknownTopicOrPartitionError
Answer = dict[str, Any] | Exception


def watch() -> TopicWatch:
    topics = {"KP_SOURCE_TOPIC": SOURCE, "KP_ACCEPTED_TOPIC": OUTPUT, "KP_CHANGELOG_TOPIC": CACHE}
    return TopicWatch(Settings(), {}, topics, state={SOURCE, CACHE}, cache=CACHE)


def described(answer: dict[str, Any]) -> dict[str, TopicDescription]:
    """Return the topics as they are at first, but for those that the answer names: an error, an id, or both numbers."""
    found = {}
    for name in (SOURCE, OUTPUT, CACHE):
        said = answer.get(name, "first")
        error = said if isinstance(said, type) and issubclass(said, KafkaError) else None
        identity, partitions = said if isinstance(said, tuple) else (said, 4)
        found[name] = TopicDescription(name, error, partitions, 1, 0, None if error is not None else identity, None)
    return found


def told(monkeypatch: pytest.MonkeyPatch, it: TopicWatch, answers: Sequence[Answer]) -> list[str | None]:
    """Return the problem after each answer."""
    problems = []

    async def run() -> None:
        for answer in answers:

            async def describe(admin: Any, names: Sequence[str], answer: Answer = answer) -> Any:
                assert list(names) == [SOURCE, OUTPUT, CACHE]
                if isinstance(answer, Exception):
                    raise answer
                return described(answer)

            monkeypatch.setattr(topic_watch, "describe_topics", describe)
            await it._check(None)  # type: ignore[arg-type]
            problems.append(it.problem)

    asyncio.run(run())
    return problems


def test_a_topic_is_missing_after_three_answers_in_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that has just started may not know it yet, and one that does not answer says nothing about it."""
    it = watch()
    gone: Answer = {OUTPUT: GONE}
    assert told(monkeypatch, it, [{}, gone, gone, {}, gone, gone, KafkaConnectionError()]) == [None] * 7
    *_, problem = told(monkeypatch, it, [RequestTimedOutError(), TimeoutError(), OSError(), gone])
    assert problem == (
        "deleted: topic traces.accepted (KP_ACCEPTED_TOPIC); create it again (kp-worker topics --create, or "
        "KP_CREATE_TOPICS=true)"
    )
    assert told(monkeypatch, it, [gone, {}]) == [problem, None]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [problem]


def test_all_missing_topics_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both: Answer = {OUTPUT: GONE, SOURCE: GONE}
    *_, problem = told(monkeypatch, watch(), [{}, both, both, both])
    assert str(problem).startswith(
        "deleted: topic traces (KP_SOURCE_TOPIC), topic traces.accepted (KP_ACCEPTED_TOPIC); "
    )


def test_a_missing_cache_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Answer = {CACHE: GONE}
    with pytest.raises(TopicLostError, match=r"deleted: topic cache \(KP_CHANGELOG_TOPIC\); .*lost with cache"):
        told(monkeypatch, watch(), [{}, gone, gone, gone])


@pytest.mark.parametrize("name", [SOURCE, CACHE])
def test_state_that_was_created_again_ends_the_worker_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TopicLostError, match=rf"topic {name} \(KP_\w+\) was deleted and created again \(topic id new"):
        told(monkeypatch, watch(), [{}, {name: "new"}])


def test_an_output_may_be_created_again_unless_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = watch()
    assert told(monkeypatch, it, [{}, {OUTPUT: "new"}, {OUTPUT: ("new", 5)}, {OUTPUT: ("newer", 6)}]) == [None] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    with pytest.raises(TopicLostError, match="with 5 partitions instead of 6"):
        told(monkeypatch, it, [{OUTPUT: ("newest", 5)}])


def test_denied_topics_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    denied: Answer = {CACHE: TopicAuthorizationFailedError}
    it = watch()
    assert told(monkeypatch, it, [denied, {}, denied, denied, denied, denied]) == [None] * 6
    with pytest.raises(TopicLostError):
        told(monkeypatch, it, [{CACHE: "new"}])


def test_an_error_of_kafka_names_the_topic_that_was_missing_last(monkeypatch: pytest.MonkeyPatch) -> None:
    it = watch()
    timeout, other = TimeoutError(), ValueError("a bug")
    told(monkeypatch, it, [{}])
    assert it.explain(timeout) is timeout
    told(monkeypatch, it, [{OUTPUT: GONE}])
    assert it.explain(other) is other
    explained = it.explain(timeout)
    assert isinstance(explained, TopicLostError)
    assert str(explained).startswith("deleted: topic traces.accepted (KP_ACCEPTED_TOPIC); ")
    assert "TimeoutError" in str(explained)


def test_brokers_that_do_not_answer_are_a_problem_after_the_session_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not before; and a topic that was missing is so again once a broker answers."""
    it, now = watch(), 100.0
    monkeypatch.setattr(topic_watch.time, "monotonic", lambda: now)
    gone: Answer = {OUTPUT: GONE}
    told(monkeypatch, it, [{}, gone, gone, gone])
    deleted = it.problem
    now = 114.9
    assert told(monkeypatch, it, [KafkaConnectionError()]) == [deleted]
    assert not it.unreachable
    now = 115.0
    assert told(monkeypatch, it, [TimeoutError(), OSError()]) == ["no broker has answered for 15 s"] * 2
    now = 190.0
    assert it.problem == "no broker has answered for 90 s"
    assert told(monkeypatch, it, [gone, {}]) == [deleted, None]
    assert not it.unreachable
    said = [record.getMessage() for record in caplog.records if "broker" in record.getMessage()]
    assert [words.split(":")[0] for words in said] == [
        "no broker has answered for 15 s; work goes on once one does",
        "a broker answers again, after 90 s",
    ]
