"""Watch what Kafka's clients do not report to a running worker.

A consumer waits for brokers, and for a producer's open transaction, without end, and shows what it knew last. A
producer waits for a missing topic until its timeout, and continues with a new one of the same name.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError

from worker.config import Settings
from worker.core.terminal import number_of
from worker.kafka.connections import CONNECT_SECONDS, connected_admin
from worker.kafka.describe import TopicDescription, describe_topics
from worker.kafka.errors import chain, error_text
from worker.kafka.fetches import End

log = logging.getLogger(__name__)

MISSING_TIMES: Final = 3
"""Consecutive answers without a topic after which it counts as missing: a new broker may not know it yet."""


class TopicLostError(Exception):
    """A topic was deleted or recreated; the message names it and says what to do."""


@dataclass(slots=True)
class _OpenTransaction:
    offset: int  # its first
    since_ms: int  # when a fetch first saw it
    logged: bool = False


class TopicWatch:
    """Watches the topics."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        topics: Mapping[str, str],  # names, by the variable that sets each
        *,
        state: Collection[str],  # topics with records that the worker relies on: it must restart if one is recreated
        cache: str | None = None,  # the one with the caches, which cannot be waited for: they are lost with it
    ) -> None:
        self._deleted: str | None = None
        self._silence_seconds = settings.session_timeout_seconds
        """No broker has answered: without heartbeats for this long the member has lost its partitions."""
        self._answered = 0.0  # when a broker last did, s of the monotonic clock
        self.unreachable = False  # none has for so long
        self._settings = settings
        self._client = {**client, "metadata_max_age_ms": 600_000}  # the brokers' only: it follows no topic
        self._variables = {name: variable for variable, name in topics.items()}
        self._state = state
        self._cache = cache
        self._patience_seconds = settings.transaction_timeout_seconds  # for a transaction of a producer
        self._open: dict[TopicPartition, _OpenTransaction] = {}
        self._first: dict[str, TopicDescription] = {}
        self._missing: Counter[str] = Counter()
        self._stack = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Return why nothing can be read or written: no broker answers, or a topic is missing; None if neither."""
        if self.unreachable:
            return f"no broker has answered for {time.monotonic() - self._answered:.0f} s"
        return self._deleted

    async def start(self, fail: Callable[[BaseException], None]) -> None:
        """Note the current topics and watch them; `fail` ends the worker. Raises UnreachableError."""
        admin = await self._stack.enter_async_context(connected_admin(self._settings, self._client, CONNECT_SECONDS))
        self._answered = time.monotonic()
        await self._check(admin)
        self._task = asyncio.create_task(self._watch(admin, fail), name="topic-watch")

    async def stop(self) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stack.aclose()

    def explain(self, error: BaseException) -> BaseException:
        """Return a Kafka error that a missing topic explains with the topic's name, any other unchanged."""
        missing = self._gone(1)
        if not missing or not any(isinstance(cause, KafkaError | TimeoutError) for cause in chain(error)):
            return error
        return TopicLostError(f"{missing}; {error_text(error)}")

    def open_transaction(self, tp: TopicPartition, end: End | None) -> tuple[int, float] | None:
        """Return how many offsets wait for the end of a producer's transaction, and for how long; None: not known.

        Logged once it is open for longer than a worker's own may be, and when it has ended.
        """
        if end is None:
            return None
        waiting, former = end.high - end.stable, self._open.get(tp)
        if former is not None and (not waiting or former.offset != end.stable):
            if former.logged:
                log.warning("the transaction at offset %d of %s/%d has ended", former.offset, *tp)
            del self._open[tp]
            former = None
        if not waiting:
            return 0, 0.0
        if former is None:
            former = self._open[tp] = _OpenTransaction(end.stable, end.read_ms)
        seconds = max(0.0, (end.read_ms - former.since_ms) / 1000)
        if not former.logged and seconds > self._patience_seconds:
            former.logged = True
            log.warning(
                "%s/%d: %s from %d on cannot be read: a producer's transaction has been open there for %.0f s; if it "
                "does not end, kafka-transactions.sh find-hanging --topic %s --partition %d finds it",
                *tp, number_of(waiting, "offset"), end.stable, seconds, *tp,
            )  # fmt: skip
        return waiting, seconds

    async def _watch(self, admin: AIOKafkaAdminClient, fail: Callable[[BaseException], None]) -> None:
        try:
            while True:
                await asyncio.sleep(2.0)  # a metadata request takes about a millisecond of CPU
                await self._check(admin)
        except Exception as error:
            fail(error)

    async def _check(self, admin: AIOKafkaAdminClient) -> None:
        """Ask one broker. Raises TopicLostError."""
        try:
            # The next request goes to another broker, so one that does not answer is not noticed if others do.
            async with asyncio.timeout(min(5.0, self._silence_seconds / 4)):
                described = await describe_topics(admin, list(self._variables))
        except (KafkaError, OSError, TimeoutError) as error:
            log.debug("the topics could not be checked: %r", error)
            if not self.unreachable and time.monotonic() - self._answered >= self._silence_seconds:
                self.unreachable = True
                log.error("%s; work goes on once one does: %s", self.problem, error_text(error))
            return
        if self.unreachable:
            log.warning("a broker answers again, after %.0f s", time.monotonic() - self._answered)
        self.unreachable, self._answered = False, time.monotonic()
        for topic in described.values():
            self._compare(topic)
        problem = self._gone(MISSING_TIMES)
        if self._cache is not None and self._missing[self._cache] >= MISSING_TIMES:
            raise TopicLostError(f"{problem}; the caches are lost with {self._cache}")
        if problem is None and self._deleted is not None:
            log.info("all topics exist again")
        elif problem != self._deleted:
            log.error("%s", problem)
        self._deleted = problem

    def _compare(self, now: TopicDescription) -> None:
        """Compare a topic with its first description. Raises TopicLostError."""
        if now.error is UnknownTopicOrPartitionError:
            self._missing[now.name] += 1
            return
        if now.error is not None:
            return  # access denied, or no leader: reported elsewhere
        del self._missing[now.name]
        first = self._first.setdefault(now.name, now)
        if now.topic_id == first.topic_id:
            return
        lost = f"{self._named(now.name)} was deleted and created again (topic id {now.topic_id}, was {first.topic_id})"
        if now.name == self._cache:
            raise TopicLostError(f"{lost}, and the caches with it: the restart begins with empty ones")
        if now.name in self._state:
            raise TopicLostError(f"{lost}: the restart reads it from its oldest record")
        if now.partitions < first.partitions:
            raise TopicLostError(f"{lost}, with {now.partitions} partitions instead of {first.partitions}")
        log.warning("%s", lost)
        self._first[now.name] = now

    def _gone(self, times: int) -> str | None:
        """Return which topics were missing from the last `times` answers, and what to do; None if none was."""
        missing = [self._named(name) for name in self._variables if self._missing[name] >= times]
        if not missing:
            return None
        return f"deleted: {', '.join(missing)}; create it again (kp-worker topics --create, or KP_CREATE_TOPICS=true)"

    def _named(self, name: str) -> str:
        return f"topic {name} ({self._variables[name]})"


class Failure:
    """The first error of a member of a group, after which it ends."""

    def __init__(self, watch: TopicWatch) -> None:
        self.error: BaseException | None = None
        self.event = asyncio.Event()
        self._watch = watch

    def set(self, error: BaseException) -> None:
        """Note an error, as the topic watch explains it."""
        if self.error is None:
            self.error = self._watch.explain(error)
            self.event.set()


@asynccontextmanager
async def watched(
    settings: Settings, client: Mapping[str, Any], topics: Mapping[str, str], state: Collection[str]
) -> AsyncIterator[Failure]:
    """Watch topics meanwhile; the failure is set if one is lost. Raises UnreachableError."""
    watch = TopicWatch(settings, client, topics, state=state)
    failure = Failure(watch)
    try:
        await watch.start(failure.set)
        yield failure
    finally:
        await watch.stop()
