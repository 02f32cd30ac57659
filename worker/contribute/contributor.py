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
import re
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import InitVar, dataclass, field
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
    no_access,
    observe,
)
from worker.observe.http_server import Page
from worker.observe.metrics import ContributeMetrics, process_registry, set_or_drop
from worker.version import __version__

log = logging.getLogger(__name__)


async def look_at_contributed(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Describe the accepted topic and the two that `contribute` writes."""
    names = [settings.accepted_topic, settings.contributed, settings.refused]
    return await observe(admin, names)


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
        if settings.create_topics and settings.accepted_topic in observed.topics:
            observed = await create_contributed(admin, settings)
        return observed

    observed = await prepare_patiently(settings, client, prepare)
    if observed.denied:
        raise ConfigError(no_access(observed.denied[0]))
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


MAX_RECORDS: Final = 50
"""Records taken at once, and results that wait for their commit: few, as each means a request, after a crash too."""

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


@dataclass(eq=False, slots=True)
class _Pending:
    """A record on its way to its commit."""

    record: SourceRecord
    began_at: float = 0.0  # when it was first tried, s of time.monotonic
    asked_at: float = 0.0  # when it was last tried
    held: bool = False  # it has been held
    decided: bool = False
    output: OutputRecord | None = None  # what is committed for it
    counts: Counter[Any] = field(default_factory=Counter)  # what to add to which metric once it is committed
    next_offset: int = field(init=False)  # after the record, and after the skipped ones that joined it

    def __post_init__(self) -> None:
        self.next_offset = self.record.offset + 1

    @property
    def size(self) -> int:
        """Return the size of the trace or, once decided, of the record to commit for it, bytes."""
        return len((self.output or self.record).value or b"")


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
        self._metrics = self.delivery.metrics
        self._taken: deque[SourceRecord] = deque()
        self._waiting: deque[_Pending] = deque()  # from the first held record on
        self._due: list[_Pending] = []  # to be committed
        self._commits: asyncio.Task[None] | None = None
        self._pauses = Pauses()
        self._just_held = False
        self._try_next_at = self._ask_again_at = 0.0

    @property
    def held(self) -> int:
        """Return the number of held traces."""
        return sum(not pending.decided for pending in self._waiting)

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
                    await self._flush()
                    self.idle = True
        except (StoppedError, DeniedError):
            await self._flush()
            raise

    async def _next(self) -> SourceRecord | None:
        """Return the next record; None if none comes for a while."""
        if not self._taken:
            self._taken.extend(await self.claim.poll(MAX_RECORDS))
        if not self._taken:
            return None
        self.idle = False
        return self._taken.popleft()

    def _work(self, record: SourceRecord) -> Unit | Skip | Refusal:
        """Decide what to do with a record."""
        if record.fault:
            return Refusal("unreadable", clean_words(record.fault.message))
        return unit_from(record.value, self.gate, self.limits)

    async def _work_while_held(self) -> None:
        """Do one step: try a held trace again, or try the next record, or wait."""
        held = [pending for pending in self._waiting if not pending.decided]
        first, now, proven_at = held[0], time.monotonic(), self.delivery.gateway.answered_at
        if now - proven_at < PROOF_SECONDS:
            for pending in held:
                if pending.began_at < proven_at:
                    await self._handle(pending, self._work(pending.record), ANSWERS, proven=True)
                    return
        has_room = len(held) < MAX_WAITING and sum(pending.size for pending in self._waiting) < MAX_WAITING_BYTES
        record = await self._next() if has_room and now >= self._try_next_at else None
        if record is None and (left := self._ask_again_at - time.monotonic()) > 0:
            await self._stop.sleep(min(left, STEP_SECONDS))
            self._just_held = False
            return
        another = _Pending(record) if record else min(held[1:], key=lambda pending: pending.asked_at, default=first)
        work = self._work(another.record)
        if isinstance(work, Skip):
            last = self._waiting[-1]  # it joins that one, as there may be any number of them after a held trace
            last.counts[self._metrics.skipped.labels(work.reason)] += 1
            last.next_offset = another.next_offset
            return
        if isinstance(work, Unit) and another is not first and not self._just_held:
            await self._handle(first, self._work(first.record), 1)
            if first.decided:
                self._taken.extendleft([record] if record else [])
                return
        await self._handle(another, work, 1)
        self._just_held = False
        if not another.decided:
            self._ask_again_at = time.monotonic() + self._pauses.next_seconds()
            self._try_next_at = self._ask_again_at if record else 0.0

    async def _handle(
        self, pending: _Pending, work: Unit | Skip | Refusal, answers: int, *, proven: bool = False
    ) -> None:
        """Skip, refuse, deliver or hold a record. `proven`: refuse it if it gets no verdict, since others do."""
        record, counts, metrics = pending.record, pending.counts, self._metrics
        result: Delivered | Unanswered | Refusal | Skip
        if isinstance(work, Unit):
            pending.asked_at = time.monotonic()
            pending.began_at = pending.began_at or pending.asked_at
            result = await self.delivery.deliver(work, self._stop, self._remember_429, answers, _place(record))
            if isinstance(result, Delivered):
                pending.output = receipt(record, work, result.status, result.time)
                counts[metrics.posted if result.status == 201 else metrics.found] += 1
                for kind, number in work.redactions.items():
                    counts[metrics.redactions.labels(kind)] += number
        else:
            result = work
        if isinstance(result, Unanswered):
            if not proven:
                self._hold(pending, result.words)
                return
            self.delivery.gateway.trouble = None  # the registry is reachable; perhaps no other trace follows to show it
            message = (
                f"{result.words}, again and again, while the registry answers other traces; find what refuses this "
                "one in front of the registry, fix that, and redrive the trace"
            )
            result = Refusal("unanswerable", message)
        if isinstance(result, Refusal):
            pending.output = refused_record(record, result, self.gate.rules)
            counts[metrics.refused.labels(result.reason)] += 1
            log.warning(
                "refused for good: %s%s", result.message, f" {result.issues}" if result.issues else "",
                extra=_place(record) | {"reason": result.reason, "path": result.path},
            )  # fmt: skip
        elif isinstance(result, Skip):
            counts[metrics.skipped.labels(result.reason)] += 1
        pending.decided = True
        pending.record = record._replace(key=None, value=None, headers=())  # it may be kept for long
        if not pending.held:
            self._waiting.append(pending)
        while self._waiting and self._waiting[0].decided:
            await self._commit(self._waiting.popleft())

    def _hold(self, pending: _Pending, words: str) -> None:
        """Hold a record until the registry answers a POST."""
        if not self._waiting:
            self._pauses, self._just_held, self._try_next_at = Pauses(), True, 0.0
            self._ask_again_at = time.monotonic() + self._pauses.next_seconds()
        if not pending.held:
            self._waiting.append(pending)
        pending.held = True
        log.warning("%s; the trace waits until the registry itself answers a POST", words, extra=_place(pending.record))

    async def _commit(self, pending: _Pending) -> None:
        """Commit a result soon, after all before it. Raises the error of an earlier commit.

        A transaction takes longer than a request, so the next traces are posted meanwhile, and their receipts share the
        next one. After a crash all of them are looked up.
        """
        self._due.append(pending)
        if self._commits is None or self._commits.done():
            await self._flush()
            self._commits = asyncio.create_task(self._commit_due())
        if len(self._due) >= MAX_RECORDS:
            await self._flush()

    async def _flush(self) -> None:
        """Return when everything is committed. Raises the error of a commit."""
        if self._commits is not None:
            await self._commits

    async def _commit_due(self) -> None:
        while self._due:
            batch, self._due = self._due, []
            outputs = [pending.output for pending in batch if pending.output is not None]
            await self._publish(outputs, batch[-1].next_offset)
            for pending in batch:
                for metric, number in pending.counts.items():
                    metric.inc(number)

    async def _publish(self, outputs: list[OutputRecord], next_offset: int) -> None:
        """Commit records and the offset, with the time of the last 429."""
        limited_at = self.delivery.gateway.limited_at
        metadata = "" if limited_at is None else f"kp429:{round(limited_at)}"
        await self.publisher.publish(Commit(outputs, (), next_offset, metadata))
        self.next_offset = next_offset

    async def _remember_429(self) -> None:
        """Commit the time of the 429: a process that takes over must wait too."""
        await self._flush()
        await self._publish([], self.next_offset)


def _place(record: SourceRecord) -> dict[str, object]:
    """Return the log fields for a record (logs.py)."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


_LIMITED: Final = re.compile("kp429:([0-9]{1,15})")
"""Metadata of an offset: the time of the last 429, s since 1970."""


@dataclass(eq=False)
class Contributor:
    """One process's share of the accepted topic: all its partitions use one gateway to the registry."""

    settings: Settings
    client: Mapping[str, Any]
    outputs: Mapping[str, OutputTopic]
    registry: InitVar[RegistryClient]
    metrics: ContributeMetrics

    def __post_init__(self, registry: RegistryClient) -> None:
        self._rules = redaction_rules(self.settings, unset="strict")
        for kind in self._rules.types:
            self.metrics.redactions.labels(kind)
        if self._rules.name == "reference":
            log.warning(
                "KP_REDACT_RULES=reference: secrets that the SDK's cleaner misses are posted; unset it, or set "
                "strict (docs/redaction.md)"
            )
        self.gateway = Gateway(registry, self.metrics, self.settings.contribute_rate)

    def member(self) -> Member[Partition]:
        """Return the group member that does this work."""
        settings = self.settings
        names = {
            "KP_ACCEPTED_TOPIC": settings.accepted_topic, "KP_CONTRIBUTED_TOPIC": settings.contributed,
            "KP_REFUSED_TOPIC": settings.refused,
        }  # fmt: skip
        return Member(
            settings, self.client, self, group=settings.contribute_group, topics=[settings.accepted_topic],
            drain_seconds=2 * settings.contribute_timeout_seconds + settings.transaction_timeout_seconds,
            watch=TopicWatch(settings, self.client, names, state={settings.accepted_topic}),
            set_ready=self.metrics.ready.set,
        )  # fmt: skip

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the transactional id of the partition's producer."""
        return f"{self.settings.contribute_group}-{tp.partition}"

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Wait after a 429 for as long as the former owner would have; its time is committed with the offsets."""
        for position in positions.values():
            self.metrics.skipped.labels("lost").inc(position.lost)
            limited = _LIMITED.fullmatch(position.metadata)
            if limited and (left := int(limited[1]) + AFTER_429_SECONDS - time.time()) > 0:
                log.warning("the registry answered 429 before; nothing is sent for %.0f s", left)
                self.gateway.remember_429(int(limited[1]), min(left, AFTER_429_SECONDS))

    def open(self, claim: Claim) -> Partition:
        """Return the work on a partition."""
        settings, group = self.settings, self.settings.contribute_group
        return Partition(
            claim=claim,
            publisher=Publisher(
                claim.producer, group, claim.tp, self.outputs, None, partial(current_limit, self.client)
            ),
            delivery=Delivery(self.gateway, self.metrics, 2 * settings.contribute_timeout_seconds, group),
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
        if held := sum(work.held for work in works):
            waiting = number_of(held, "trace waits", "traces wait")
            return f"{waiting} until the registry itself answers a POST{f': {trouble}' if trouble else ''}"
        return trouble

    def measure(self, tp: TopicPartition, work: Partition, lag: int | None) -> None:
        """Update the gauges of a partition."""
        self.metrics.held.labels(str(tp.partition)).set(work.held)
        set_or_drop(self.metrics.lag, lag, str(tp.partition))

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Drop the partitions' gauges, and the trouble with their traces, which another member may post."""
        self.gateway.trouble = None
        for tp in tps:
            self.metrics.forget_partition(tp.partition)


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
