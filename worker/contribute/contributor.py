"""The work of `contribute` on its partitions, as a member of its group (kafka/member.py).

Of each partition the records in order: each is posted, refused or skipped before the next.

A firewall in front of the registry may block one trace every time because of its content, a proxy because of its
length. Such a trace must not stop the others, and an innocent one must not be refused because a gateway blocks all:

 1. A trace that got ANSWERS definite answers, none of them the registry's own, is held, and the next one is tried.
 2. While nothing shows that POSTs reach the registry, each trace that gets such an answer is held too. All wait. After
    growing pauses the first one is tried again, and right after it another one: so the order is kept if a gateway
    blocks all for some time. Successful look-ups show nothing.
 3. Once the registry itself answers a POST, each held trace is tried ANSWERS times again, in order, while that answer
    is at most PROOF_SECONDS old. Only a trace that still gets no verdict is refused (`unanswerable`).

Receipts, refused records and offsets are committed in the order of the records. So nothing after a held trace is
committed before it: after a crash the look-up finds the posted ones.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from worker.config import ConfigError, Settings
from worker.config.redaction_rules import redaction_rules
from worker.contribute.delivery import (
    AFTER_429_SECONDS,
    STEP_SECONDS,
    Delivered,
    Delivery,
    DeniedError,
    Gateway,
    Pauses,
    Unanswered,
)
from worker.contribute.registry import RegistryClient, registry_key
from worker.contribute.unit import (
    CONTRIBUTED,
    Gate,
    Refusal,
    Skip,
    Unit,
    clean_words,
    receipt,
    refused_record,
    unit_from,
)
from worker.core.records import DEAD_LETTER, OutputRecord, SourceRecord
from worker.core.terminal import number_of
from worker.core.trace import Limits
from worker.kafka.assignment import Position
from worker.kafka.connections import prepare_clients, prepare_patiently
from worker.kafka.describe import current_limit
from worker.kafka.member import Claim, Member, StoppedError
from worker.kafka.publisher import Commit, Publisher
from worker.kafka.rows import OutputTopic
from worker.kafka.topic_watch import TopicWatch
from worker.kafka.topics import (
    DEAD_LETTER_OVERHEAD,
    MissingTopicsError,
    Observed,
    TopicPlan,
    create_planned,
    deleted_early,
    look_at,
)
from worker.observe.http_server import Page
from worker.observe.metrics import ContributeMetrics, process_registry, set_or_drop
from worker.version import __version__

log = logging.getLogger(__name__)


async def look_at_contributed(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Describe the accepted topic and the two that `contribute` writes."""
    names = [settings.accepted_topic, settings.contributed, settings.refused]
    return await look_at(admin, names, names)


async def create_contributed(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Create the missing ones of the two topics; return how the broker describes all three. Raises ConfigError."""
    return await create_planned(
        admin, settings, partial(look_at_contributed, admin, settings), partial(contribute_plan, settings)
    )


def contribute_plan(settings: Settings, observed: Observed) -> list[TopicPlan]:
    """Return the intended configuration of the two topics that `contribute` writes, given the accepted topic."""
    accepted = observed.topics.get(settings.accepted_topic)
    partitions = settings.topic_partitions if accepted is None else accepted.partitions
    largest = str(observed.max_bytes(settings.accepted_topic) + DEAD_LETTER_OVERHEAD)
    receipts = {"cleanup.policy": "compact", "retention.ms": "-1"}
    return [
        TopicPlan("KP_CONTRIBUTED_TOPIC", settings.contributed, partitions, receipts),
        TopicPlan("KP_REFUSED_TOPIC", settings.refused, partitions, {"max.message.bytes": largest}),
    ]


async def prepare_topics(settings: Settings, client: Mapping[str, Any]) -> dict[str, OutputTopic]:
    """Create the missing topics (KP_CREATE_TOPICS) and check all; return the topics to write to, by kind of record.

    Raises ConfigError that names topic and remedy.
    """

    async def prepare(admin: AIOKafkaAdminClient) -> Observed:
        observed = await look_at_contributed(admin, settings)
        creates = settings.create_topics and settings.accepted_topic in observed.topics
        return await create_contributed(admin, settings) if creates else observed

    observed = await prepare_patiently(settings, client, prepare)
    if observed.denied:
        raise ConfigError(
            f"the broker denies access to topic {observed.denied[0]}: grant an ACL on it (docs/security.md)"
        )
    if settings.accepted_topic not in observed.topics:
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {settings.accepted_topic} (KP_ACCEPTED_TOPIC); the worker "
            "creates it (kp-worker topics --create), or correct the name"
        )
    missing = [name for name in (settings.contributed, settings.refused) if name not in observed.topics]
    if missing:
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}; create them (kp-worker topics --create "
            "with KP_REGISTRY_URL set), or let contribute do it with KP_CREATE_TOPICS=true"
        )
    for name, wanted in ((settings.contributed, "compact"), (settings.refused, "delete")):
        policy = observed.config(name, "cleanup.policy", wanted)
        if ("compact" in policy) != (wanted == "compact"):
            log.warning("topic %s has cleanup.policy=%s; set cleanup.policy=%s", name, policy, wanted)
    for problem in deleted_early(observed, settings.accepted_topic, "posted"):
        log.warning("%s", problem)
    return {CONTRIBUTED: observed.output(settings.contributed), DEAD_LETTER: observed.output(settings.refused)}


class ReceiptQueue:
    """Commits the results of one partition, in order, one transaction after the other.

    A transaction takes longer than a request, so the next traces are posted meanwhile, and their receipts share the
    next one. After a crash all of them are looked up. `metadata` returns the metadata to commit with an offset.
    """

    def __init__(self, publisher: Publisher, metadata: Callable[[], str]) -> None:
        self._publisher = publisher
        self._metadata = metadata
        self._due: list[tuple[OutputRecord | None, int, Callable[[], None]]] = []  # as `add` gets them
        self._commits: asyncio.Task[None] | None = None

    async def add(self, output: OutputRecord | None, next_offset: int, on_committed: Callable[[], None]) -> None:
        """Commit a record, and the offset after it, soon. Raises the error of an earlier commit.

        Waits while 50 are due: every trace that is posted but not committed is looked up after a crash.
        """
        self._due.append((output, next_offset, on_committed))
        if self._commits is None or self._commits.done():
            await self.flush()
            self._commits = asyncio.create_task(self._commit_all())
        if len(self._due) >= 50:
            await self._commits

    async def flush(self) -> None:
        """Return when everything is committed. Raises the error of a commit."""
        if self._commits is not None:
            await self._commits

    async def _commit_all(self) -> None:
        while self._due:
            batch, self._due = self._due, []
            outputs = [output for output, _, _ in batch if output is not None]
            await self._publisher.publish(Commit(outputs, (), batch[-1][1], self._metadata()))
            for _, _, on_committed in batch:
                on_committed()


MAX_RECORDS: Final = 50
"""Records taken at once: few, as each needs a request."""

ANSWERS: Final = 3
"""Definite answers without a verdict before a trace is held, and again before it is refused. If one of two gateways
blocks everything, an innocent trace meets it six times in a row once in 64 times; it can be redriven."""

PROOF_SECONDS: Final = 60.0
"""How long an answer of the registry shows that POSTs reach it. It is short, so that few innocent traces are refused if
a gateway then begins to block everything."""

MAX_WAITING: Final = 500
MAX_WAITING_BYTES: Final = 32 << 20
"""Number of held traces, and bytes of them and of the receipts and refused traces after them; beyond these no further
one is tried."""


@dataclass(slots=True)
class _Pending:
    """A record on its way to its commit."""

    record: SourceRecord
    began_at: float = 0.0  # when it was first tried, s of time.monotonic
    asked_at: float = 0.0  # when it was last tried
    held: bool = False  # it has been held
    due: tuple[OutputRecord | None, Callable[[], None]] | None = None
    """The record to commit, and the callback afterwards; None: not known yet."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many of the records right after it are skipped, by reason."""
    next_offset: int = field(init=False)  # after the record and the skipped ones

    def __post_init__(self) -> None:
        self.next_offset = self.record.offset + 1

    @property
    def size(self) -> int:
        """Return the size of the trace or, once known, of the record to commit for it, bytes."""
        value = self.record.value if self.due is None else self.due[0] and self.due[0].value
        return len(value or b"")


@dataclass(eq=False)
class Partition:
    """The work on one partition."""

    claim: Claim
    publisher: Publisher
    delivery: Delivery
    gate: Gate
    limits: Limits

    def __post_init__(self) -> None:
        self.next_offset = self.claim.position.offset
        self.idle = False
        self._stop = self.claim.stop
        self._receipts = ReceiptQueue(self.publisher, lambda: limited_metadata(self.delivery.gateway.limited_at))
        self._taken: deque[SourceRecord] = deque()
        self._waiting: deque[_Pending] = deque()
        self._pauses = Pauses()
        self._just_held = False
        self._try_next_at = self._ask_again_at = 0.0

    @property
    def held(self) -> int:
        """Return the number of held traces."""
        return sum(each.due is None for each in self._waiting)

    async def run(self) -> None:
        """Work until stopped. Raises StoppedError once everything done is committed."""
        try:
            while True:
                self._stop.check()
                if self._waiting:
                    await self._work_while_held()
                elif record := await self._next():
                    await self._handle(_Pending(record), self._work(record), ANSWERS)
                else:
                    await self._receipts.flush()
                    self.idle = True
        except (StoppedError, DeniedError):
            await self._receipts.flush()
            raise

    async def _next(self) -> SourceRecord | None:
        """Return the next record; None if none comes for a while."""
        if not self._taken:
            self._taken.extend(await self.claim.poll(MAX_RECORDS))
        if not self._taken:
            return None
        self.idle = False
        return self._taken.popleft()

    async def _work_while_held(self) -> None:
        """Do one step: try a held trace again, or try the next record, or wait."""
        held = [each for each in self._waiting if each.due is None]
        first, now, proven_at = held[0], time.monotonic(), self.delivery.gateway.answered_at
        if now - proven_at < PROOF_SECONDS:
            for each in held:
                if each.began_at < proven_at:
                    await self._handle(each, self._work(each.record), ANSWERS, proven=True)
                    return
        record = await self._next() if self._has_room() and now >= self._try_next_at else None
        if record is None and (left := self._ask_again_at - time.monotonic()) > 0:
            await self._stop.sleep(min(left, STEP_SECONDS))
            self._just_held = False
            return
        another = _Pending(record) if record else min(held[1:], key=lambda each: each.asked_at, default=first)
        work = self._work(another.record)
        if isinstance(work, Skip):
            last = self._waiting[-1]  # it joins that one, as there may be any number of them after a held trace
            last.skipped[work.reason] += 1
            last.next_offset = another.record.offset + 1
            return
        if isinstance(work, Unit) and another is not first and not self._just_held:
            await self._handle(first, self._work(first.record), 1)
            if first.due:
                self._taken.extendleft([record] if record else [])
                return
        await self._handle(another, work, 1)
        self._just_held = False
        if another.due is None:
            self._ask_again_at = time.monotonic() + self._pauses.next_seconds()
            self._try_next_at = self._ask_again_at if record else 0.0

    def _has_room(self) -> bool:
        return self.held < MAX_WAITING and sum(each.size for each in self._waiting) < MAX_WAITING_BYTES

    def _work(self, record: SourceRecord) -> Unit | Skip | Refusal:
        """Decide what to do with a record."""
        if record.fault:
            return Refusal("unreadable", clean_words(record.fault.message))
        return unit_from(record.value, self.gate, self.limits)

    async def _handle(self, each: _Pending, work: Unit | Skip | Refusal, answers: int, *, proven: bool = False) -> None:
        """Skip, refuse, deliver or hold a record. `proven`: refuse it if it gets no verdict, since others do."""
        result: Delivered | Refusal | Unanswered | Skip
        if isinstance(work, Unit):
            uncommitted = (self._waiting[0] if self._waiting else each).record.offset
            remember_429 = partial(self._remember_429, uncommitted)
            each.asked_at = time.monotonic()
            each.began_at = each.began_at or each.asked_at
            result = await self.delivery.deliver(work, self._stop, remember_429, answers, _place(each.record))
            if isinstance(result, Delivered):
                output = receipt(each.record, work, result.status, result.time)
                await self._done(each, output, partial(self._count, work, result.status))
                return
        else:
            result = work
        if isinstance(result, Unanswered) and proven:
            self.delivery.gateway.trouble = None  # the registry is reachable; perhaps no other trace follows to show it
            message = (
                f"{result.words}, again and again, while the registry answers other traces; find what refuses this "
                "one in front of the registry, fix that, and redrive the trace"
            )
            result = Refusal("unanswerable", message)
        if isinstance(result, Skip):
            each.skipped[result.reason] += 1
            await self._done(each, None, lambda: None)
        elif isinstance(result, Refusal):
            output = refused_record(each.record, result, self.gate.rules)
            log.warning(
                "refused for good: %s%s", result.message, f" {result.issues}" if result.issues else "",
                extra=_place(each.record) | {"reason": result.reason, "path": result.path},
            )  # fmt: skip
            await self._done(each, output, self.delivery.metrics.refused.labels(result.reason).inc)
        else:
            self._hold(each, result.words)

    def _hold(self, each: _Pending, words: str) -> None:
        """Hold a record until the registry answers a POST."""
        if not self._waiting:
            self._pauses, self._just_held, self._try_next_at = Pauses(), True, 0.0
            self._ask_again_at = time.monotonic() + self._pauses.next_seconds()
        if not each.held:
            self._waiting.append(each)
        each.held = True
        log.warning("%s; the trace waits until the registry itself answers a POST", words, extra=_place(each.record))

    async def _done(self, each: _Pending, output: OutputRecord | None, count: Callable[[], None]) -> None:
        """Let a record's result be committed, once nothing before it is held."""
        each.due = (output, count)
        each.record = each.record._replace(key=None, value=None, headers=())  # it may be kept for long
        if not each.held:
            self._waiting.append(each)
        while self._waiting and (due := self._waiting[0].due):
            first = self._waiting.popleft()
            await self._receipts.add(due[0], first.next_offset, partial(self._committed, first, due[1]))

    def _committed(self, done: _Pending, count: Callable[[], None]) -> None:
        self.next_offset = done.next_offset
        count()
        for reason, number in done.skipped.items():
            self.delivery.metrics.skipped.labels(reason).inc(number)

    async def _remember_429(self, offset: int) -> None:
        """Commit the time of the 429: a process that takes over must wait too."""
        await self._receipts.add(None, offset, lambda: None)
        await self._receipts.flush()

    def _count(self, unit: Unit, status: int) -> None:
        (self.delivery.metrics.posted if status == 201 else self.delivery.metrics.found).inc()
        for kind, number in unit.redactions.items():
            self.delivery.metrics.redactions.labels(kind).inc(number)


def _place(record: SourceRecord) -> dict[str, object]:
    """Return the log fields for a record (logs.py)."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


LIMITED = "kp429:"


def limited_metadata(limited_at: float | None) -> str:
    """Return the metadata to commit with an offset: the time of the last 429, s since 1970."""
    return "" if limited_at is None else f"{LIMITED}{round(limited_at)}"


def limited_from(metadata: str) -> float | None:
    """Read the time of the last 429 from committed metadata; None if there is none."""
    number = metadata.removeprefix(LIMITED)
    return float(number) if metadata.startswith(LIMITED) and number.isdigit() and len(number) < 16 else None


class Contributor:
    """One process's share of the accepted topic: all its partitions use one gateway to the registry."""

    def __init__(
        self, settings: Settings, client: Mapping[str, Any], outputs: Mapping[str, OutputTopic],
        registry: RegistryClient, metrics: ContributeMetrics,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._client = client
        self._outputs = outputs
        self._metrics = metrics
        self._rules = redaction_rules(settings, unset="strict")
        for kind in self._rules.types:
            metrics.redactions.labels(kind)
        if self._rules.name == "reference":
            log.warning(
                "KP_REDACT_RULES=reference: secrets that the SDK's cleaner misses are posted; unset it, or set "
                "strict (docs/redaction.md)"
            )
        self.gateway = Gateway(registry, metrics, settings.contribute_rate)

    def member(self) -> Member[Partition]:
        """Return the group member that does this work."""
        settings = self._settings
        names = {
            "KP_ACCEPTED_TOPIC": settings.accepted_topic, "KP_CONTRIBUTED_TOPIC": settings.contributed,
            "KP_REFUSED_TOPIC": settings.refused,
        }  # fmt: skip
        return Member(
            settings, self._client, self, group=settings.contribute_group, topics=[settings.accepted_topic],
            drain_seconds=2 * settings.contribute_timeout_seconds + settings.transaction_timeout_seconds,
            watch=TopicWatch(settings, self._client, names, state={settings.accepted_topic}),
            set_ready=self._metrics.ready.set,
        )  # fmt: skip

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the transactional id of the partition's producer."""
        return f"{self._settings.contribute_group}-{tp.partition}"

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Wait after a 429 for as long as the former owner would have; its time is committed with the offsets."""
        for position in positions.values():
            self._metrics.skipped.labels("lost").inc(position.lost)
            limited_at = limited_from(position.metadata)
            if limited_at is not None and (left := limited_at + AFTER_429_SECONDS - time.time()) > 0:
                log.warning("the registry answered 429 before; nothing is sent for %.0f s", left)
                self.gateway.remember_429(limited_at, min(left, AFTER_429_SECONDS))

    def open(self, claim: Claim) -> Partition:
        """Return the work on a partition."""
        settings, group = self._settings, self._settings.contribute_group
        return Partition(
            claim=claim,
            publisher=Publisher(
                claim.producer, group, claim.tp, self._outputs, None, partial(current_limit, self._client)
            ),
            delivery=Delivery(self.gateway, self._metrics, 2 * settings.contribute_timeout_seconds, group),
            gate=Gate(
                frozenset(settings.contribute_visibility.split(",")),
                frozenset(settings.contribute_privacy.split(",")), self._rules,
                settings.contribute_screen == "hidden",
            ), limits=settings.limits,
        )  # fmt: skip

    def problem(self, works: Collection[Partition]) -> str | None:
        """Return why nothing reaches the registry, or None."""
        if (seconds := self.gateway.blocked_seconds()) > 0:
            return f"waiting for {seconds:.0f} s after the registry answered 429"
        trouble = self.gateway.trouble
        if held := sum(each.held for each in works):
            waiting = number_of(held, "trace waits", "traces wait")
            return f"{waiting} until the registry itself answers a POST{f': {trouble}' if trouble else ''}"
        return trouble

    def measure(self, tp: TopicPartition, work: Partition, lag: int | None) -> None:
        """Update the gauges of a partition."""
        self._metrics.held.labels(str(tp.partition)).set(work.held)
        set_or_drop(self._metrics.lag, lag, str(tp.partition))

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Drop the partitions' gauges, and the trouble with their traces, which another member may post."""
        self.gateway.trouble = None
        for tp in tps:
            self._metrics.forget_partition(tp.partition)


class ContributeProcess:
    """One process (commands/run.py): metrics from the start, the member once prepared."""

    name = "contribute"
    phase = "checking the topics"
    finished = "every trace in flight is finished and committed"
    unfinished = "a restart looks up the traces in flight"
    wrong: tuple[type[BaseException], ...] = (ConfigError, DeniedError)

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self.pages: Mapping[str, Page] = {}
        self._settings = settings
        self._metrics = ContributeMetrics(self.registry)
        self._metrics.build.info({"version": __version__, "group": settings.contribute_group})

    async def prepare(self, until_end: AsyncExitStack) -> Member[Partition]:
        """Check the settings and the topics. Raises ConfigError."""
        settings = self._settings
        if settings.registry_url is None:
            raise ConfigError("contribute needs the registry's address: set KP_REGISTRY_URL")
        key = registry_key(settings)
        client = prepare_clients(settings)
        outputs = await prepare_topics(settings, client)
        timeout, largest = settings.contribute_timeout_seconds, settings.max_message_bytes
        registry = RegistryClient(settings.registry_url, key, timeout, self._metrics, largest)
        await until_end.enter_async_context(registry)
        return Contributor(settings, client, outputs, registry, self._metrics).member()
