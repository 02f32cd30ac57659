"""Topics: their description, what their settings say, what a watch concludes; tests/kafka has real ones."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from worker.config import Settings, load
from worker.kafka import topic_watch
from worker.kafka.describe import (
    METADATA,
    NO_ID,
    DescribeTopicsRequest,
    TopicDescription,
    apis_of,
    describe_topics,
    topic_id,
)
from worker.kafka.topic_watch import TopicLostError, TopicWatch
from worker.kafka.topics import AFTER, NO_LIMIT, Observed, _small_outputs

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
    messages = [record.getMessage() for record in caplog.records if "broker" in record.getMessage()]
    assert [words.split(":")[0] for words in messages] == [
        "no broker has answered for 15 s; work goes on once one does",
        "a broker answers again, after 90 s",
    ]


# -- the request that describes topics, in the version that aiokafka lacks


NO_BROKERS = SimpleNamespace(cluster=SimpleNamespace(brokers=tuple))  # aiokafka then chooses the one to ask


class Broker:
    """Answers with one topic, or that it is missing."""

    _client = NO_BROKERS

    def __init__(self, *, missing: bool = False) -> None:
        self.missing = missing

    async def _send_request(self, request: DescribeTopicsRequest, node: int | None) -> Any:
        prepared = request.prepare({3: (0, 13)})  # as aiokafka's connection does
        there = (0, "ab", bytes(range(16)), False, [(0, 0, -1, 5, [1, 2], [1], [])], 2**3 | 2**4)
        row = (3, "ab", NO_ID, False, [], 0) if self.missing else there
        return prepared.RESPONSE_TYPE.decode(METADATA.RESPONSE_TYPE(0, [], "c", 1, [row], 0).encode())


def test_the_bytes_of_the_request() -> None:
    """By Kafka's protocol guide: one topic by name, three flags that are off, no tags."""
    request = DescribeTopicsRequest(["ab"])
    assert request.prepare({3: (0, 13)}).encode() == b"\x02" + NO_ID + b"\x03ab\x00" + b"\x00\x00\x00" + b"\x00"
    with pytest.raises(IncompatibleBrokerVersion, match=r"DescribeTopicsRequest: kp-worker needs Kafka 3\.9 or later"):
        request.prepare({3: (0, 9)})


async def test_a_topic_is_described_with_its_id_and_the_permitted_operations() -> None:
    broker: Any = Broker()
    assert await topic_id(broker, "ab") == "AAECAwQFBgcICQoLDA0ODw"
    topic = (await describe_topics(broker, ["ab"], operations=True))["ab"]
    assert (topic.error, topic.partitions, topic.replicas, topic.leaderless) == (None, 1, 2, 1)
    assert topic.operations == {"Read", "Write"}


async def test_a_missing_topic_has_no_id() -> None:
    broker: Any = Broker(missing=True)
    topic = (await describe_topics(broker, ["ab"]))["ab"]
    assert (topic.error, topic.topic_id) == (UnknownTopicOrPartitionError, None)
    with pytest.raises(UnknownTopicOrPartitionError, match="topic ab"):
        await topic_id(broker, "ab")


@pytest.mark.parametrize(("fetch", "old"), [(17, False), (16, True)])
async def test_a_broker_before_3_9_is_old_and_one_before_2_8_lacks_a_request(fetch: int, old: bool) -> None:
    """17: Fetch in Kafka 3.9; 16: in 3.7 and 3.8, as those brokers answer."""
    versions = dict.fromkeys(range(70), (0, 20)) | {1: (0, fetch)}

    async def answer(request: Any, node: int | None) -> Any:
        return SimpleNamespace(api_versions=[(key, *each) for key, each in versions.items()])

    broker: Any = SimpleNamespace(_send_request=answer, _client=NO_BROKERS)
    apis = await apis_of(broker, transactions=True)
    assert (apis.lacking, apis.old) == ([], old)
    versions[3] = (0, 9)
    assert (await apis_of(broker, transactions=False)).lacking == ["DescribeTopics"]


# -- settings of topics


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), ("-1", math.inf), (str(NO_LIMIT), math.inf), (str(NO_LIMIT - 1), NO_LIMIT - 1), ("0", 0)],
)
def test_a_limit_in_milliseconds(text: str | None, expected: float | None) -> None:
    observed = Observed({}, [], {"traces": {} if text is None else {AFTER: text}}, {})
    assert observed.milliseconds("traces", AFTER) == expected
    assert observed.milliseconds("another", AFTER) is None


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((1200, 1200), "traces.accepted has max.message.bytes=1200 and traces.rejected has max.message.bytes=1200: a"),
        ((2_000_000, 20_000), "traces.rejected has max.message.bytes=20000: a scored trace that had more than 11808"),
        ((1_056_768, 1_056_768), None),
    ],
)
def test_outputs_that_are_too_small(limits: tuple[int, int], words: str | None) -> None:
    settings = load(accepted_topic="traces.accepted", rejected_topic="traces.rejected")
    names = (settings.accepted_topic, settings.rejected_topic)
    topics = {name: SimpleNamespace(partitions=1) for name in names}
    configs = {name: {"max.message.bytes": str(limit)} for name, limit in zip(names, limits, strict=True)}
    found = Observed(topics, [], configs, {})  # type: ignore[arg-type]
    problems = list(_small_outputs(settings, found, 0))
    assert len(problems) == (words is not None)
    for problem in problems:
        assert problem.message.startswith(f"{words} ")
        assert problem.message.endswith("may not fit, and then becomes a dead letter (too_large)")
        assert "set max.message.bytes=1056768 on " in problem.remedy
