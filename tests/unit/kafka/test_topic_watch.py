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
        state = answer.get(name, "first")
        error = state if isinstance(state, type) and issubclass(state, KafkaError) else None
        identity, partitions = state if isinstance(state, tuple) else (state, 4)
        found[name] = TopicDescription(name, error, partitions, 1, 0, None if error is not None else identity, None)
    return found


def problems(it: TopicWatch, answers: Sequence[Answer]) -> list[str | None]:
    """Return the problem after each answer."""
    found = []

    async def run() -> None:
        for answer in answers:

            async def describe(admin: Any, names: Sequence[str], answer: Answer = answer) -> Any:
                assert list(names) == [SOURCE, OUTPUT, CACHE]
                if isinstance(answer, Exception):
                    raise answer
                return described(answer)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(topic_watch, "describe_topics", describe)
                await it._check(None)  # type: ignore[arg-type]
            found.append(it.problem)

    asyncio.run(run())
    return found


def test_a_topic_is_missing_after_three_answers_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that has just started may not know it yet, and one that does not answer says nothing about it."""
    it = watch()
    gone: Answer = {OUTPUT: GONE}
    assert problems(it, [{}, gone, gone, {}, gone, gone, KafkaConnectionError()]) == [None] * 7
    *_, problem = problems(it, [RequestTimedOutError(), TimeoutError(), OSError(), gone])
    assert problem == (
        "deleted: topic traces.accepted (KP_ACCEPTED_TOPIC); create it again (kp-worker topics --create, or "
        "KP_CREATE_TOPICS=true)"
    )
    assert problems(it, [gone, {}]) == [problem, None]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [problem]


def test_all_missing_topics_are_named() -> None:
    both: Answer = {OUTPUT: GONE, SOURCE: GONE}
    *_, problem = problems(watch(), [{}, both, both, both])
    assert str(problem).startswith(
        "deleted: topic traces (KP_SOURCE_TOPIC), topic traces.accepted (KP_ACCEPTED_TOPIC); "
    )


DENIED: Answer = {CACHE: TopicAuthorizationFailedError}
LOST: dict[str, tuple[list[Answer], str]] = {
    "missing": ([{}, *[{CACHE: GONE}] * 3], r"deleted: topic cache \(KP_CHANGELOG_TOPIC\); .*lost with cache"),
    "source created again": (
        [{}, {SOURCE: "new"}],
        r"topic traces \(KP_\w+\) was deleted and created again \(topic id new",
    ),
    "cache created again": (
        [{}, {CACHE: "new"}],
        r"topic cache \(KP_\w+\) was deleted and created again \(topic id new",
    ),
    "denied meanwhile": ([DENIED, {}, *[DENIED] * 4, {CACHE: "new"}], "topic cache .* created again"),
    "a smaller output": (
        [{}, {OUTPUT: "new"}, {OUTPUT: ("new", 5)}, {OUTPUT: ("newer", 6)}, {OUTPUT: ("newest", 5)}],
        "with 5 partitions instead of 6",
    ),
}
"""Answers of which the last one ends the worker. Until then nothing is wrong: an output may be created again."""


@pytest.mark.parametrize("kind", LOST)
def test_what_ends_the_worker(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    (*before, last), words = LOST[kind]
    it = watch()
    assert problems(it, before) == [None] * len(before)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (2 if kind == "a smaller output" else 0)
    with pytest.raises(TopicLostError, match=words):
        problems(it, [last])


def test_an_error_of_kafka_names_the_topic_that_was_missing_last() -> None:
    it = watch()
    timeout, other = TimeoutError(), ValueError("a bug")
    problems(it, [{}])
    assert it.explain(timeout) is timeout
    problems(it, [{OUTPUT: GONE}])
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
    problems(it, [{}, gone, gone, gone])
    deleted = it.problem
    now = 114.9
    assert problems(it, [KafkaConnectionError()]) == [deleted]
    assert not it.unreachable
    now = 115.0
    assert problems(it, [TimeoutError(), OSError()]) == ["no broker has answered for 15 s"] * 2
    now = 190.0
    assert it.problem == "no broker has answered for 90 s"
    assert problems(it, [gone, {}]) == [deleted, None]
    assert not it.unreachable
    said = [record.getMessage() for record in caplog.records if "broker" in record.getMessage()]
    assert [words.split(":")[0] for words in said] == [
        "no broker has answered for 15 s; work goes on once one does",
        "a broker answers again, after 90 s",
    ]
