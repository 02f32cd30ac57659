"""The work of `assemble` on its partitions, for both steps, as a member of its group (kafka/member.py).

On each partition: poll, process, publish, repeat; a batch is one transaction, with its next offset.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, get_args

from aiokafka import AIOKafkaConsumer, TopicPartition

from worker.assemble.open_runs import STREAM, HeldBytes, OpenRuns, Place
from worker.assemble.steps import Assembling, Outcome, Reading, Spread, Spreading
from worker.assemble.topics import AssembleTopics, prepare_topics
from worker.assemble.traces import TraceWriter, UnreadContent, has_root, rules_from
from worker.config import ConfigError, Settings
from worker.core.changelog import SourceEpoch
from worker.core.records import ASSEMBLED, BATCH_OVERHEAD, RECORD_OVERHEAD, SPANS, SourceRecord
from worker.core.restore import Log
from worker.core.terminal import clean, number_of
from worker.kafka.aiokafka_private import count_partitions
from worker.kafka.assignment import Position, read_logs
from worker.kafka.cluster.connections import prepare_clients
from worker.kafka.cluster.describe import current_limit
from worker.kafka.cluster.topic_watch import TopicWatch
from worker.kafka.member import Claim, Member
from worker.kafka.writing.publisher import Commit, ExactlyOncePublisher
from worker.observe.http_server import Page
from worker.observe.metrics import AssembleMetrics, process_registry, set_or_drop
from worker.runs.otlp.dialects import CONVENTIONS
from worker.runs.otlp.mapping import Missing
from worker.runs.otlp.rules import Rules
from worker.version import __version__

log = logging.getLogger(__name__)

MAX_RECORDS: Final = 500
"""Maximum records per batch."""

SHORTENED: Final = (
    "the longest texts of some traces are cut, so that these fit KP_MAX_MESSAGE_BYTES and the source topic's "
    "max.message.bytes"
)

MAX_TOLD: Final = 100
"""Maximum number of hints and reasons logged, each once: a hint names a scope, and anyone may send any scope."""

NOTE_SECONDS: Final = 30.0
"""How long a batch that only advances time may stay uncommitted: a restart reads it again."""


@dataclass(slots=True)
class Shared:
    """The state that the partitions of a process share."""

    metrics: AssembleMetrics
    interval_seconds: float
    """Minimum time between commits, unless records are waiting."""
    unread: UnreadContent
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One batch of the process is computed at a time, in a thread, so that heartbeats continue meanwhile."""
    told: set[str] = field(default_factory=set)
    """Hints and reasons already logged."""
    clock_ms: int = 0

    def now_ms(self) -> int:
        """Return the clock, which may be set later than at the start, but never goes back."""
        self.clock_ms = max(self.clock_ms, time.time_ns() // 1_000_000)
        return self.clock_ms


@dataclass(eq=False)
class Partition:
    """The work on one partition."""

    claim: Claim
    publisher: ExactlyOncePublisher
    step: Spreading | Assembling
    shared: Shared
    mark_seconds: float
    """How often an idle partition writes a mark."""
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
                reading = Reading(records, self.shared.now_ms(), read_ms, waited_ms)
                outcome = await asyncio.to_thread(self.step.process, reading)
            if outcome.done:
                self.next_offset = records[outcome.done - 1].offset + 1
                records = records[outcome.done :]
            if outcome.urgent or time.monotonic() - self._committed_at > NOTE_SECONDS:
                await self._publish(outcome)
            if not outcome.more:
                return

    async def _publish(self, outcome: Outcome) -> None:
        batch = Commit(
            outputs=outcome.outputs, entries=list(outcome.rows.items()), next_offset=self.next_offset,
            metadata=SourceEpoch(self.claim.position.topic_id).metadata(outcome.time_ms), records=outcome.sources,
        )  # fmt: skip
        replaced = await self.publisher.publish(batch)
        self._committed_at = time.monotonic()
        tally, told = outcome.tally, self.shared.told
        for position, error in replaced.items():
            tally.refuse(error)
            if outcome.outputs[position].kind == ASSEMBLED:
                tally.add("traces", "", -1)
        for hint in sorted(tally.hints - told)[: max(0, MAX_TOLD - len(told))]:
            told.add(hint)
            log.warning("some spans hold less than they could: %s (docs/opentelemetry.md)", hint)
        for run in tally.unread:
            for scope in self.shared.unread.add(run):
                names = ", ".join(self.shared.unread.scopes[scope])
                log.warning(
                    "spans of %s seem to have content in attributes that nothing reads: %s; their runs have no trace, "
                    "or one without it (docs/opentelemetry.md)", scope or "no scope", names,
                )  # fmt: skip
        for reason, words in sorted(tally.refusals.items()):
            if reason not in told:
                told.add(reason)
                log.warning(
                    "some spans are dead letters, reason %s; the first: %s (docs/opentelemetry.md)", reason, words
                )
        if tally.shortened and SHORTENED not in told:
            told.add(SHORTENED)
            log.warning("%s; the first: %s (docs/opentelemetry.md)", SHORTENED, tally.shortened)
        self.shared.metrics.count(tally.counts, tally.ends, time.time())


class Assembler:
    """One process's share of both steps."""

    def __init__(
        self, settings: Settings, client: Mapping[str, Any], topics: AssembleTopics, rules: Rules,
        metrics: AssembleMetrics, unread: UnreadContent,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._client = client
        self._topics = topics
        self._rules = rules
        self._metrics = metrics
        self._held = HeldBytes()
        self._shared = Shared(metrics, settings.commit_interval_seconds, unread)
        self._runs: dict[int, OpenRuns] = {}  # restored, until `open` takes them

    def member(self) -> Member[Partition]:
        """Return the group member that does this work."""
        settings, topics = self._settings, self._topics
        names = {f"KP_SPANS_TOPIC {number}".removesuffix(" 1"): name for number, name in enumerate(topics.sources, 1)}
        names |= {"KP_SOURCE_TOPIC": settings.source_topic, "KP_DEAD_LETTER_TOPIC": settings.dead_letter_topic}
        names |= {"state": topics.state.name} | ({} if settings.spans_keyed else {"between": topics.reads})
        state = {*topics.sources, topics.reads, topics.state.name}
        return Member(
            settings,
            self._client,
            self,
            group=settings.assemble_group,
            topics={*topics.sources, topics.reads},
            drain_seconds=settings.transaction_timeout_seconds + settings.session_timeout_seconds,  # enough for a batch
            watch=TopicWatch(settings, self._client, names, state=state),
            set_ready=self._metrics.ready.set,
        )

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the transactional id of the partition's producer."""
        return f"{self._settings.assemble_group}-{tp.topic}-{tp.partition}"

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Restore the open runs of these partitions."""
        self._metrics.lost.inc(sum(position.lost for position in positions.values()))
        topics = await prepare_topics(self._settings, self._client)  # there may be new partitions
        now = await count_partitions(consumer, topics.sources) or {}
        sources = {name: max(count, now.get(name, 0)) for name, count in topics.sources.items()}
        self._topics = replace(topics, sources=sources)
        self._runs = await self._restored([tp.partition for tp in positions if tp.topic == topics.reads])

    def open(self, claim: Claim) -> Partition:
        """Return the work on a partition."""
        topics, group = self._topics, self._settings.assemble_group
        limit_of = partial(current_limit, self._client)
        publisher = ExactlyOncePublisher(claim.producer, group, claim.tp, topics.outputs, topics.state, limit_of)
        complete = partial(self._complete, claim) if self._leads(claim.tp) else None
        return Partition(claim, publisher, self._step(claim), self._shared, self._mark_seconds, complete)

    @property
    def _mark_seconds(self) -> float:
        return min(5.0, max(0.5, self._settings.assemble_grace_seconds / 10))

    def _leads(self, tp: TopicPartition) -> bool:
        """Return whether the partition reads the marks of all span partitions, and sends the others stream time."""
        return not self._settings.spans_keyed and tp == TopicPartition(self._topics.reads, 0)

    async def _complete(self, claim: Claim) -> bool:
        """Return whether there are no span partitions beyond those that count. Raises StoppedError.

        Called after marks were read: anything written before them is on partitions that the answer includes.
        """
        while True:
            claim.stop.check()
            found = await count_partitions(claim.consumer, self._topics.sources)
            if found is not None:
                new = {name: found[name] for name, count in self._topics.sources.items() if found[name] > count}
                for name, count in new.items():
                    log.info(
                        "%s has %s now: no run closes until all are assigned and read",
                        name,
                        number_of(count, "partition"),
                    )
                return not new
            await claim.stop.sleep(1)

    def _step(self, claim: Claim) -> Spreading | Assembling:
        settings, topics = self._settings, self._topics
        tp, time_ms = claim.tp, claim.position.stream_time_ms
        runs = self._runs.pop(tp.partition, None) if tp.topic == topics.reads else None
        spread = Spread(tp.topic, tp.partition, time_ms) if tp.topic in topics.sources else None
        if runs is None:
            if spread is None:
                raise RuntimeError(f"this is a bug: {tp.topic} is not read")
            return Spreading(spread, topics.outputs[SPANS].partitions)
        traces = topics.outputs[ASSEMBLED]
        most = min(settings.max_message_bytes, traces.max_bytes - BATCH_OVERHEAD - RECORD_OVERHEAD)
        writer = TraceWriter(
            replace(self._rules, limits=replace(self._rules.limits, max_bytes=most)),
            settings.assemble_key == "agent", traces.partitions, topics.kept_ms, (tp.topic, tp.partition),
        )  # fmt: skip
        return Assembling(
            runs, writer, settings.memory_budget_bytes, topics.state.max_bytes, spread,
            others=range(1, topics.outputs[SPANS].partitions) if self._leads(tp) else (),
            tell_ms=self._mark_seconds * 1000,
        )  # fmt: skip

    async def _restored(self, partitions: Sequence[int]) -> dict[int, OpenRuns]:
        settings = self._settings
        return await read_logs(
            self._client, self._topics.state.name, partitions, settings.transaction_timeout_seconds,
            settings.max_batch_bytes, self._open_runs,
        )  # fmt: skip

    def _open_runs(self, number: int, read: Log) -> OpenRuns:
        settings, topics = self._settings, self._topics
        tp, state = TopicPartition(topics.reads, number), topics.state.name
        sources: list[Place] = [(tp.topic, number)] if settings.spans_keyed else [STREAM]
        if self._leads(tp):
            sources = [(topic, each) for topic, count in topics.sources.items() for each in range(count)]
        runs = OpenRuns(
            sources=sources, has_root=has_root, grace_ms=round(settings.assemble_grace_seconds * 1000),
            gap_ms=round(settings.assemble_gap_seconds * 1000),
            memory_ms=round(settings.assemble_memory_seconds * 1000), held=self._held,
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
            markers = sum(self._topics.sources.values()) + 1 if tp.topic == self._topics.reads else 1
            lag = 0 if lag <= markers else lag
        set_or_drop(self._metrics.lag, lag, tp.topic, str(tp.partition))
        if not isinstance(work.step, Assembling):
            return
        metrics, shown = self._metrics, work.step.shown
        for gauge, value in (
            (metrics.open_runs, shown.open_runs),
            (metrics.open_bytes, shown.held_bytes),
            (metrics.oldest, shown.oldest_ms / 1000),
            (metrics.remembered, shown.remembered),
            (metrics.stream_time, shown.time_ms / 1000),
        ):
            gauge.labels(str(tp.partition)).set(value)

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Drop the partitions' gauges, and the count of bytes held by their runs."""
        self._runs, self._held.total = {}, 0
        for tp in tps:
            self._metrics.forget_partition(tp.topic, tp.partition)


class AssembleProcess:
    """One process (commands/run/service.py): metrics from the start, the member once prepared."""

    name = "assemble"
    phase = "checking the topics"
    finished = "every record in flight is committed"
    unfinished = "uncommitted records will be read again"
    wrong: tuple[type[BaseException], ...] = (ConfigError,)

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self.pages: Mapping[str, Page] = {"/": self._page} if settings.status_page else {}
        self._settings = settings
        self._unread = UnreadContent()
        self._metrics = AssembleMetrics(self.registry, get_args(Missing), CONVENTIONS)
        self._metrics.build.info({"version": __version__, "group": settings.assemble_group})

    async def prepare(self, until_end: AsyncExitStack) -> Member[Partition]:
        """Check the settings and the topics. Raises ConfigError."""
        settings = self._settings
        rules = rules_from(settings)
        client = prepare_clients(settings)
        topics = await prepare_topics(settings, client)
        return Assembler(settings, client, topics, rules, self._metrics, self._unread).member()

    def _page(self, _: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
        """Return the status page, as text: the traces, the runs without one, and unread content."""
        count = self.registry.get_sample_value
        lacking = {reason: count("kp_assemble_without_trace_total", {"reason": reason}) for reason in get_args(Missing)}
        lines = [
            f"kp-worker assemble {__version__}, group {self._settings.assemble_group}",
            f"{count('kp_assemble_traces_total') or 0:.0f} traces",
            *(f"no trace for {runs:.0f} runs: {reason}" for reason, runs in lacking.items() if runs),
            *self._unread.lines(),
        ]
        text = "\n".join(map(clean, lines)) + "\n"
        return text.encode("utf-8", "replace"), {"Content-Type": "text/plain; charset=utf-8"}
