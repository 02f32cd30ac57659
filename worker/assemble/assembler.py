"""The work of `assemble` on its partitions, for both steps, as a member of its group (kafka/member.py).

On each partition: poll, process, publish, repeat; a batch is one transaction, with its next offset.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, get_args

from aiokafka import AIOKafkaConsumer, TopicPartition

from worker.assemble.open_runs import STREAM, HeldBytes, OpenRuns, Place
from worker.assemble.steps import (
    Assembling,
    Poll,
    SpanPartition,
    Spreading,
    StepResult,
    TraceWriter,
    UnreadContent,
    has_root,
    rules_from,
)
from worker.assemble.topics import AssembleTopics, prepare_topics
from worker.config import ConfigError, Settings
from worker.core.changelog import SourceEpoch
from worker.core.records import ASSEMBLED, BATCH_OVERHEAD, RECORD_OVERHEAD, SPANS, SourceRecord
from worker.core.restore import Log
from worker.core.terminal import clean, number_of
from worker.kafka.aiokafka_private import count_partitions
from worker.kafka.assignment import Position, read_logs
from worker.kafka.connections import prepare_clients
from worker.kafka.describe import current_limit
from worker.kafka.member import Claim, Member
from worker.kafka.publisher import Commit, Publisher
from worker.kafka.topic_watch import TopicWatch
from worker.observe.http_server import Page
from worker.observe.metrics import AssembleMetrics, process_registry, set_or_drop
from worker.runs.otlp.dialects import CONVENTIONS
from worker.runs.otlp.mapping import Missing
from worker.runs.otlp.rules import Rules
from worker.version import __version__

log = logging.getLogger(__name__)

MAX_RECORDS: Final = 500
"""Maximum records per batch."""

NOTE_SECONDS: Final = 30.0
"""How long a batch that only advances time may stay uncommitted: a restart reads it again."""


@dataclass(slots=True)
class Shared:
    """The state that the partitions of a process share."""

    metrics: AssembleMetrics
    interval_seconds: float  # minimum time between commits, unless records are waiting
    unread: UnreadContent = field(default_factory=UnreadContent)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One batch of the process is computed at a time, in a thread, so that heartbeats continue meanwhile."""
    warned: set[str] = field(default_factory=set)  # hints and reasons already logged
    clock_ms: int = 0

    def now_ms(self) -> int:
        """Return the clock, which may be set later than at the start, but never goes back."""
        self.clock_ms = max(self.clock_ms, time.time_ns() // 1_000_000)
        return self.clock_ms

    def committed(self, result: StepResult) -> None:
        """Count a committed batch, and log what is new in it."""
        self.metrics.count(result.counts, result.ends, time.time())
        # At most 100, each once: a hint names a scope, and anyone may send any scope.
        hints = sorted(result.hints - self.warned)[: max(0, 100 - len(self.warned))]
        warnings = {hint: f"some spans hold less than they could: {hint}" for hint in hints}
        for reason, words in sorted(result.refusals.items()):
            warnings[reason] = f"some spans are dead letters, reason {reason}; the first: {words}"
        if result.shortened:
            warnings["shortened"] = (
                "the longest texts of some traces are cut, so that these fit KP_MAX_MESSAGE_BYTES and the source "
                f"topic's max.message.bytes; the first: {result.shortened}"
            )
        for key, warning in warnings.items():
            if key not in self.warned:
                self.warned.add(key)
                log.warning("%s (docs/opentelemetry.md)", warning)
        for scope in [scope for run in result.unread for scope in self.unread.add(run)]:
            log.warning(
                "spans of %s seem to have content in attributes that nothing reads: %s; their runs have no trace, or "
                "one without it (docs/opentelemetry.md)", scope or "no scope", ", ".join(self.unread.scopes[scope]),
            )  # fmt: skip


@dataclass(eq=False)
class Partition:
    """The work on one partition."""

    claim: Claim
    publisher: Publisher
    step: Spreading | Assembling
    shared: Shared
    mark_seconds: float  # how often an idle partition writes a mark
    complete: Callable[[], Awaitable[bool]] | None = None
    """Returns whether all span partitions are known; set only for the partition whose marks decide on stream time."""

    def __post_init__(self) -> None:
        self.next_offset = self.claim.position.offset
        self.idle = False
        self._opened_ms = self.claim.consumer.last_poll_timestamp(self.claim.tp)
        self._committed_at = self._marked_at = -NOTE_SECONDS
        self._record_at = time.monotonic()

    async def run(self) -> None:
        """Work until stopped; then no batch is in flight. Raises StoppedError."""
        claim = self.claim
        while True:
            polled_ms = claim.consumer.last_poll_timestamp(claim.tp)
            records = await claim.poll(MAX_RECORDS)
            claim.stop.check()
            now = time.monotonic()
            if records and self.complete is not None and not await self.complete():
                # Wait for a rebalance to assign the new ones: their spans may belong to runs that would close here.
                await claim.stop.wait()
            if records:
                self.idle, self._record_at = False, now
                await self._process(records, None)
                if len(records) < MAX_RECORDS:
                    await claim.stop.sleep(self._committed_at + self.shared.interval_seconds - time.monotonic())
            # A fetch at this position has been answered: everything there at the time has been taken.
            elif polled_ms not in (None, self._opened_ms):
                self.idle = True
                if now - self._marked_at >= self.mark_seconds:
                    self._marked_at = now
                    await self._process([], int(polled_ms))

    async def _process(self, records: list[SourceRecord], read_ms: int | None) -> None:
        """Process records and publish the result; a batch that would be too large is split."""
        waited_ms = 0 if records else round((time.monotonic() - self._record_at) * 1000)
        state = self.publisher.changelog
        if isinstance(self.step, Assembling) and state is not None and self.step.may_not_fit(records):
            await self.publisher.look_again(state)
            self.step.largest_row = state.max_bytes
        while True:
            async with self.shared.turn:
                poll = Poll(records, self.shared.now_ms(), read_ms, waited_ms)
                result = await asyncio.to_thread(self.step.process, poll)
            if result.done:
                self.next_offset = records[result.done - 1].offset + 1
                records = records[result.done :]
            if result.urgent or time.monotonic() - self._committed_at > NOTE_SECONDS:
                await self._publish(result)
            if not result.more:
                return

    async def _publish(self, result: StepResult) -> None:
        commit = Commit(
            outputs=result.outputs, entries=list(result.rows.items()), next_offset=self.next_offset,
            metadata=SourceEpoch(self.claim.position.topic_id).metadata(result.time_ms), records=result.sources,
        )  # fmt: skip
        replaced = await self.publisher.publish(commit)
        self._committed_at = time.monotonic()
        for position, error in replaced.items():
            result.count_letter(error)
            if result.outputs[position].kind == ASSEMBLED:
                result.count("traces", "", -1)
        self.shared.committed(result)


@dataclass(eq=False)
class Assembler:
    """One process's share of both steps."""

    settings: Settings
    client: Mapping[str, Any]
    topics: AssembleTopics
    rules: Rules
    shared: Shared
    held: HeldBytes = field(default_factory=HeldBytes)
    runs: dict[int, OpenRuns] = field(default_factory=dict)  # restored, until `open` takes them

    def member(self) -> Member[Partition]:
        """Return the group member that does this work."""
        settings, topics = self.settings, self.topics
        names = {f"KP_SPANS_TOPIC {number}".removesuffix(" 1"): name for number, name in enumerate(topics.sources, 1)}
        names |= {"KP_SOURCE_TOPIC": settings.source_topic, "KP_DEAD_LETTER_TOPIC": settings.dead_letter_topic}
        names |= {"state": topics.state.name} | ({} if settings.spans_keyed else {"between": topics.reads})
        state = {*topics.sources, topics.reads, topics.state.name}
        return Member(
            settings,
            self.client,
            self,
            group=settings.assemble_group,
            topics={*topics.sources, topics.reads},
            drain_seconds=settings.transaction_timeout_seconds + settings.session_timeout_seconds,  # enough for a batch
            watch=TopicWatch(settings, self.client, names, state=state),
            set_ready=self.shared.metrics.ready.set,
        )

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the transactional id of the partition's producer."""
        return f"{self.settings.assemble_group}-{tp.topic}-{tp.partition}"

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Restore the open runs of these partitions."""
        self.shared.metrics.lost.inc(sum(position.lost for position in positions.values()))
        topics = await prepare_topics(self.settings, self.client)  # there may be new partitions
        now = await count_partitions(consumer, topics.sources) or {}
        sources = {name: max(count, now.get(name, 0)) for name, count in topics.sources.items()}
        self.topics = replace(topics, sources=sources)
        self.runs = await read_logs(
            self.client, topics.state.name, [tp.partition for tp in positions if tp.topic == topics.reads],
            self.settings.transaction_timeout_seconds, self.settings.max_batch_bytes, self._open_runs,
        )  # fmt: skip

    def open(self, claim: Claim) -> Partition:
        """Return the work on a partition."""
        topics, tp, leads = self.topics, claim.tp, self._leads(claim.tp)
        step: Spreading | Assembling
        source = None
        if tp.topic in topics.sources:
            source = SpanPartition(tp.topic, tp.partition, claim.position.stream_time_ms)
        if source is not None and tp.topic != topics.reads:
            step = Spreading(source, topics.outputs[SPANS].partitions)
        else:
            step = Assembling(
                self.runs.pop(tp.partition), self._writer(tp), self.settings.memory_budget_bytes,
                topics.state.max_bytes, source, range(1, topics.outputs[SPANS].partitions) if leads else (),
                self._mark_seconds * 1000,
            )  # fmt: skip
        return Partition(
            claim,
            Publisher(
                claim.producer, self.settings.assemble_group, tp, topics.outputs, topics.state,
                partial(current_limit, self.client),
            ),
            step, self.shared, self._mark_seconds, partial(self._complete, claim) if leads else None,
        )  # fmt: skip

    def _writer(self, tp: TopicPartition) -> TraceWriter:
        traces, limits = self.topics.outputs[ASSEMBLED], self.rules.limits
        most = min(self.settings.max_message_bytes, traces.max_bytes - BATCH_OVERHEAD - RECORD_OVERHEAD)
        return TraceWriter(
            replace(self.rules, limits=replace(limits, max_bytes=most)), self.settings.assemble_key == "agent",
            traces.partitions, self.topics.kept_ms, (tp.topic, tp.partition),
        )  # fmt: skip

    @property
    def _mark_seconds(self) -> float:
        return min(5.0, max(0.5, self.settings.assemble_grace_seconds / 10))

    def _leads(self, tp: TopicPartition) -> bool:
        """Return whether the partition reads the marks of all span partitions, and sends the others stream time."""
        return not self.settings.spans_keyed and tp == TopicPartition(self.topics.reads, 0)

    async def _complete(self, claim: Claim) -> bool:
        """Return whether there are no span partitions beyond those that count. Raises StoppedError.

        Called after marks were read: anything written before them is on partitions that the answer includes.
        """
        while True:
            claim.stop.check()
            counts = await count_partitions(claim.consumer, self.topics.sources)
            if counts is not None:
                new = {name: counts[name] for name, count in self.topics.sources.items() if counts[name] > count}
                for name, count in new.items():
                    log.info(
                        "%s has %s now: no run closes until all are assigned and read",
                        name,
                        number_of(count, "partition"),
                    )
                return not new
            await claim.stop.sleep(1)

    def _open_runs(self, number: int, read: Log) -> OpenRuns:
        settings, topics = self.settings, self.topics
        tp, state = TopicPartition(topics.reads, number), topics.state.name
        sources: list[Place] = [(tp.topic, number)] if settings.spans_keyed else [STREAM]
        if self._leads(tp):
            sources = [(topic, partition) for topic, count in topics.sources.items() for partition in range(count)]
        runs = OpenRuns(
            sources=sources, has_root=has_root, grace_ms=round(settings.assemble_grace_seconds * 1000),
            gap_ms=round(settings.assemble_gap_seconds * 1000),
            memory_ms=round(settings.assemble_memory_seconds * 1000), held=self.held,
        )  # fmt: skip
        problems = [*read.faults, *runs.restore(read.live())]
        if problems:
            log.warning(
                "%s/%d: skipped %s; the first: %s", state, number, number_of(len(problems), "record"), problems[0]
            )
        if runs.remembered or len(runs):
            log.info(
                "%s/%d: restored %s, remembered %s", state, number, number_of(len(runs), "open run"),
                number_of(len(runs.remembered), "closed run"),
            )  # fmt: skip
        return runs

    def problem(self, works: Collection[Partition]) -> str | None:
        """Return None: nothing but the brokers can stop this work."""
        return None

    def measure(self, tp: TopicPartition, work: Partition, lag: int | None) -> None:
        """Update the gauges of a partition."""
        if lag is not None:
            # Each partition that writes there may have left the end of a transaction after the last record.
            markers = sum(self.topics.sources.values()) + 1 if tp.topic == self.topics.reads else 1
            lag = 0 if lag <= markers else lag
        set_or_drop(self.shared.metrics.lag, lag, tp.topic, str(tp.partition))
        if not isinstance(work.step, Assembling):
            return
        for name, value in work.step.gauges.items():
            getattr(self.shared.metrics, name).labels(str(tp.partition)).set(value)

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Drop the partitions' gauges, and the count of bytes held by their runs."""
        self.runs, self.held.total = {}, 0
        for tp in tps:
            self.shared.metrics.forget_partition(tp.topic, tp.partition)


class AssembleProcess:
    """One process (commands/run.py): metrics from the start, the member once prepared."""

    name = "assemble"
    phase = "checking the topics"
    finished = "every record in flight is committed"
    unfinished = "uncommitted records will be read again"
    wrong: tuple[type[BaseException], ...] = (ConfigError,)

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self.pages: Mapping[str, Page] = {"/": self._page} if settings.status_page else {}
        self._settings = settings
        metrics = AssembleMetrics(self.registry, get_args(Missing), CONVENTIONS)
        self._shared = Shared(metrics, settings.commit_interval_seconds)
        metrics.build.info({"version": __version__, "group": settings.assemble_group})

    async def prepare(self, until_end: AsyncExitStack) -> Member[Partition]:
        """Check the settings and the topics. Raises ConfigError."""
        settings = self._settings
        rules = rules_from(settings)
        client = prepare_clients(settings)
        topics = await prepare_topics(settings, client)
        return Assembler(settings, client, topics, rules, self._shared).member()

    def _page(self, _: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
        """Return the status page, as text: the traces, the runs without one, and unread content."""
        count = self.registry.get_sample_value
        lacking = {reason: count("kp_assemble_without_trace_total", {"reason": reason}) for reason in get_args(Missing)}
        lines = [
            f"kp-worker assemble {__version__}, group {self._settings.assemble_group}",
            f"{count('kp_assemble_traces_total') or 0:.0f} traces",
            *(f"no trace for {runs:.0f} runs: {reason}" for reason, runs in lacking.items() if runs),
            *self._shared.unread.lines(),
        ]
        text = "\n".join(map(clean, lines)) + "\n"
        return text.encode("utf-8", "replace"), {"Content-Type": "text/plain; charset=utf-8"}
