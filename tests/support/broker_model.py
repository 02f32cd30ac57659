"""A small model of Kafka's transactions, and a network that delays, loses and reorders what is sent to it.

The model follows Kafka's TransactionCoordinator, TransactionMetadata, ProducerAppendInfo and group coordinator as far
as they decide about producer ids, epochs, sequence numbers, transactions and their offsets: one broker that leads all
partitions and coordinates everything. Requests and responses pass through their wire formats.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from aiokafka import TopicPartition
from aiokafka.protocol.types import CompactString, Int16, TaggedFields, UnsignedVarInt32

from worker.kafka.aiokafka_private import Brokers, RecordBatch, UnansweredError, UnsentError

UNKNOWN_TOPIC, NOT_ATTEMPTED = 3, 55
NONE, OUT_OF_ORDER, DUPLICATE, INVALID_EPOCH, INVALID_STATE, INVALID_MAPPING, CONCURRENT, FENCED, ABORTABLE = (
    0, 45, 46, 47, 48, 49, 51, 90, 120,
)  # fmt: skip
INVALID_TIMESTAMP, UNSTABLE = 32, 88
VERSIONS = {0: (3, 11), 9: (1, 9), 18: (0, 3), 22: (0, 4), 24: (0, 3), 25: (0, 3), 26: (0, 4), 28: (0, 4)}
VERSIONS_V2 = VERSIONS | {0: (3, 12), 26: (0, 5), 28: (0, 5)}
LAST_EPOCH = 32_766
"""A producer id has no epochs after this one: the last is kept for fencing."""

REFUSED = b"refused"
"""A record with this value has a time that its topic refuses, unless it is one for dead letters."""


@dataclass
class Written:
    """A batch in a partition's log. `committed` None: its transaction is open."""

    producer_id: int
    epoch: int
    first: int
    records: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]]  # key, value, headers
    committed: bool | None


@dataclass
class Log:
    """A partition's log, and what its leader knows of each producer id: epoch and last batches."""

    batches: list[Written] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)

    def append(self, batch: Written) -> int:
        """Append a batch unless it is a duplicate or out of order; return the error code."""
        epoch = self.epochs.get(batch.producer_id, -1)
        if batch.epoch < epoch:
            return INVALID_EPOCH
        mine = [b for b in self.batches if (b.producer_id, b.epoch) == (batch.producer_id, batch.epoch)]
        if any((b.first, len(b.records)) == (batch.first, len(batch.records)) for b in mine[-5:]):
            return NONE
        expected = mine[-1].first + len(mine[-1].records) if mine else 0
        if batch.first != expected and epoch != -1:
            return DUPLICATE if batch.first < expected else OUT_OF_ORDER
        self.epochs[batch.producer_id] = batch.epoch
        self.batches.append(batch)
        return NONE

    def end(self, producer_id: int, epoch: int, commit: bool) -> None:
        """Write a transaction's marker."""
        if epoch < self.epochs.get(producer_id, -1):
            return
        self.epochs[producer_id] = epoch
        for batch in self.batches:
            if batch.producer_id == producer_id and batch.committed is None:
                batch.committed = commit

    def visible(self) -> list[Any]:
        """Return what a reader of committed records gets: nothing from the first open transaction on."""
        records: list[Any] = []
        for batch in self.batches:
            if batch.committed is None:
                break
            records += batch.records if batch.committed else []
        return records


@dataclass
class Transaction:
    """What the coordinator knows of a transactional id. `pending`: whether it commits, until its markers are there."""

    producer_id: int
    epoch: int = -1
    last_epoch: int = -1
    previous_id: int = -1
    state: str = "Empty"
    partitions: set[Any] = field(default_factory=set)
    bumps: bool = False
    pending: bool | None = None


class BrokerModel:
    """The broker. `logs` by partition; `offsets` and their `metadata` by group and partition.

    `transactions`: the finalised transaction.version, 0 or 2. `release`: before (4, 0) a late offset takes away a
    pending one, and there are no transactions V2. `deleted`: topics that it does not have; it then takes no other
    partition of the request either.
    """

    def __init__(self, *, transactions: int, release: tuple[int, int] = (4, 1), last_epoch: int = LAST_EPOCH) -> None:
        self.transactions = transactions
        self.release = release
        self.last_epoch = last_epoch
        self.logs: dict[TopicPartition, Log] = {}
        self.deleted: set[str] = set()
        self.offsets: dict[tuple[str, TopicPartition], int] = {}
        self.metadata: dict[tuple[str, TopicPartition], str] = {}
        self._pending_offsets: dict[int, dict[tuple[str, TopicPartition], tuple[int, str]]] = {}
        self._offset_epochs: dict[int, int] = {}
        self._ids: dict[str, Transaction] = {}
        self._next_id = 1000
        self._markers: list[Callable[[], None]] = []  # that are due

    # -- the wire

    def versions(self) -> dict[int, tuple[int, int]]:
        """Return the versions of requests that the broker knows."""
        return VERSIONS if self.release < (4, 0) else VERSIONS_V2

    def answer(self, frame: Any) -> Any:
        """Handle a request in its wire format; return the response."""
        request = type(frame).decode(BytesIO(frame.encode()))
        name = type(frame).__name__
        values = getattr(self, "_" + name.split("Request")[0].lower())(request)
        response = frame.RESPONSE_TYPE(*values)
        return frame.RESPONSE_TYPE.decode(BytesIO(response.encode()))

    def _apiversions(self, _: Any) -> tuple[Any, ...]:
        text = CompactString("utf-8")
        level = self.transactions
        features = [("transaction.version", level)] if level else []
        tag = UnsignedVarInt32.encode(len(features) + 1) + b"".join(
            text.encode(name) + Int16.encode(level) + Int16.encode(level) + TaggedFields.encode({})
            for name, level in features
        )
        return 0, [(key, *row) for key, row in self.versions().items()], 0, {2: UnsignedVarInt32.encode(len(tag)) + tag}

    # -- the transaction coordinator

    def _initproducerid(self, request: Any) -> tuple[Any, ...]:
        return 0, *self._init(
            request.transactional_id, getattr(request, "producer_id", -1), getattr(request, "producer_epoch", -1)
        )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _init(self, name: str | None, expected_id: int, expected_epoch: int) -> tuple[int, int, int]:
        if name is None:
            return NONE, self._new_id(), 0
        known = self._ids.setdefault(name, Transaction(self._next_id + 1))
        self._next_id = max(self._next_id, known.producer_id)
        given = expected_id >= 0
        if known.pending is not None:
            return CONCURRENT, -1, -1
        ended = expected_id == known.previous_id and expected_epoch >= self.last_epoch
        if given and not (known.epoch == -1 or expected_id == known.producer_id or ended):
            return FENCED, -1, -1
        if known.state == "Ongoing":
            known.epoch, known.last_epoch = known.epoch + 1, -1
            self._prepare(known, commit=False)
            return CONCURRENT, -1, -1
        if known.epoch >= self.last_epoch and (not given or expected_epoch == known.epoch):
            known.previous_id, known.producer_id = known.producer_id, self._new_id()
            known.last_epoch, known.epoch = (known.epoch if given else -1), 0
        elif not given:
            known.epoch, known.last_epoch = known.epoch + 1, -1
        elif known.epoch == -1 or expected_epoch == known.epoch:
            known.epoch, known.last_epoch = known.epoch + 1, known.epoch
        elif expected_epoch != known.last_epoch:
            return FENCED, -1, -1
        known.state, known.bumps = "Empty", False
        return NONE, known.producer_id, known.epoch

    def _add(self, name: str, producer_id: int, epoch: int, parts: set[Any]) -> int:
        known = self._ids.get(name)
        if known is None or known.producer_id != producer_id:
            return INVALID_MAPPING
        if known.epoch != epoch:
            return FENCED
        if known.pending is not None:
            return CONCURRENT
        if known.state != "Ongoing":
            known.partitions, known.bumps = set(), False
        known.state = "Ongoing"
        known.partitions |= parts
        return NONE

    def _addpartitionstotxn(self, request: Any) -> tuple[Any, ...]:
        partitions = [TopicPartition(topic, number) for topic, numbers in request.topics for number in numbers]
        codes = {topic: self._missing(request.topics, topic) for topic, _ in request.topics}
        if any(codes.values()):
            return 0, [(topic, [(number, codes[topic]) for number in numbers]) for topic, numbers in request.topics]
        code = self._add(request.transactional_id, request.producer_id, request.producer_epoch, set(partitions))
        code = INVALID_EPOCH if code == FENCED else code  # this version does not know the other
        return 0, [(topic, [(number, code) for number in numbers]) for topic, numbers in request.topics]

    def _addoffsetstotxn(self, request: Any) -> tuple[Any, ...]:
        code = self._add(request.transactional_id, request.producer_id, request.producer_epoch, {request.group_id})
        return 0, INVALID_EPOCH if code == FENCED else code

    def _endtxn(self, request: Any) -> tuple[Any, ...]:
        bumps = type(request).API_VERSION >= 5
        commit = request.commit if bumps else request.transaction_result
        code, known = self._end(request.transactional_id, request.producer_id, request.producer_epoch, commit, bumps)
        if not bumps:
            return 0, INVALID_EPOCH if code == FENCED else code
        return (0, code, known.producer_id, known.epoch) if known is not None and code == NONE else (0, code, -1, -1)

    def _end(
        self, name: str, producer_id: int, epoch: int, commit: bool, bumps: bool
    ) -> tuple[int, Transaction | None]:
        known = self._ids.get(name)
        if known is None:
            return INVALID_MAPPING, None
        again = known.bumps and (
            (producer_id == known.producer_id and epoch + 1 == known.epoch)
            or (producer_id == known.previous_id and epoch >= self.last_epoch and known.epoch == 0)
        )
        if producer_id != known.producer_id and not again:
            return INVALID_MAPPING, None
        if not again and epoch != known.epoch:
            return FENCED, None
        if known.pending is not None:
            return (CONCURRENT if commit == known.pending and (again or not known.bumps) else INVALID_STATE), None
        if known.state == "Ongoing" and not again:
            if bumps:
                known.bumps = True
                known.last_epoch = known.epoch
                if known.epoch >= self.last_epoch:
                    ended = known.epoch + 1
                    known.previous_id, known.producer_id, known.epoch = known.producer_id, self._new_id(), 0
                    self._prepare(known, commit, known.previous_id, ended)
                    return NONE, known
                known.epoch += 1
            else:
                known.bumps = False
            self._prepare(known, commit)
            return NONE, known
        if known.state == ("CompleteCommit" if commit else "CompleteAbort") and (again or not known.bumps):
            return NONE, known
        return INVALID_STATE, None

    def _prepare(self, known: Transaction, commit: bool, producer_id: int = -1, epoch: int = -1) -> None:
        """Decide the end of a transaction; `complete` writes the markers."""
        known.state = "PrepareCommit" if commit else "PrepareAbort"
        known.pending = commit
        if producer_id < 0:
            producer_id, epoch = known.producer_id, known.epoch

        def write() -> None:
            for part in known.partitions:
                if isinstance(part, TopicPartition):
                    self.logs.setdefault(part, Log()).end(producer_id, epoch, commit)
                else:
                    offsets = self._pending_offsets.pop(producer_id, {})
                    self._offset_epochs[producer_id] = max(epoch, self._offset_epochs.get(producer_id, -1))
                    if commit:
                        self.offsets |= {key: offset for key, (offset, _) in offsets.items()}
                        self.metadata |= {key: metadata for key, (_, metadata) in offsets.items()}
            known.partitions = set()
            known.pending = None
            known.state = "CompleteCommit" if commit else "CompleteAbort"

        self._markers.append(write)

    def complete(self) -> None:
        """Write all markers that are due."""
        markers, self._markers = self._markers, []
        for write in markers:
            write()

    def time_out(self) -> None:
        """Abort all open transactions, as if they had lasted too long, and fence their producers."""
        for known in self._ids.values():
            if known.state == "Ongoing":
                known.epoch, known.last_epoch = known.epoch + 1, -1
                self._prepare(known, commit=False)

    def forget(self) -> None:
        """Forget the transactional ids that are idle, as after a week."""
        self._ids = {name: known for name, known in self._ids.items() if known.state == "Ongoing" or known.pending}

    def is_settled(self) -> bool:
        """Whether no transaction is half-way ended."""
        return all(known.pending is None for known in self._ids.values())

    # -- leaders and the group coordinator

    def _in_transaction(self, name: str, producer_id: int, epoch: int, part: Any, *, adds: bool) -> int:
        """Return whether a record or offset belongs to the open transaction (V2: becomes part of it)."""
        if adds:
            return self._add(name, producer_id, epoch, {part})
        known = self._ids.get(name)
        if known is None or known.producer_id != producer_id:
            return INVALID_MAPPING
        if known.epoch != epoch:
            return INVALID_EPOCH
        if known.pending is not None:
            return CONCURRENT
        return NONE if known.state == "Ongoing" and part in known.partitions else INVALID_STATE

    def _produce(self, request: Any) -> tuple[Any, ...]:
        adds = type(request).API_VERSION >= 12
        topics = []
        for topic, partitions in request.topics:
            rows: list[tuple[Any, ...]] = []
            for number, data in partitions:
                partition = TopicPartition(topic, number)
                code = self._missing(request.topics, topic) if adds else NONE
                code = code or self._append(request.transactional_id, partition, bytes(data), adds=adds)
                rows.append((number, code, 0, -1, 0, [], ""))
            topics.append((topic, rows))
        return topics, 0

    def _missing(self, topics: Sequence[Any], topic: str) -> int:
        """Return the error code for a topic of a request that adds all its partitions to a transaction, or none."""
        if topic in self.deleted:
            return UNKNOWN_TOPIC
        return NOT_ATTEMPTED if any(other in self.deleted for other, _ in topics) else NONE

    def _append(self, name: str | None, partition: TopicPartition, data: bytes, *, adds: bool) -> int:
        batch = RecordBatch(data)
        records = list(batch)
        written = Written(
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
            [(record.key, record.value, list(record.headers)) for record in records],
            None if name is not None else True,
        )
        if name is not None:
            code = self._in_transaction(name, batch.producer_id, batch.producer_epoch, partition, adds=adds)
            if code:
                return INVALID_EPOCH if code == FENCED else code
        if any(record.value == REFUSED for record in records) and "dead-letter" not in partition.topic:
            return INVALID_TIMESTAMP
        return self.logs.setdefault(partition, Log()).append(written)

    def _txnoffsetcommit(self, request: Any) -> tuple[Any, ...]:
        adds = type(request).API_VERSION >= 5
        group = request.group if adds else request.group_id
        producer_id, epoch = request.producer_id, request.producer_epoch
        # Kafka verifies offsets of a transaction since 4.0, with version 4 of the request or later.
        code = self._in_transaction(request.transactional_id, producer_id, epoch, group, adds=True) if adds else NONE
        if code == NONE and epoch < self._offset_epochs.get(producer_id, -1):
            code = INVALID_EPOCH
            if self.release < (4, 0):
                for topic, partitions in request.topics:
                    for number, *_ in partitions:
                        self._pending_offsets.get(producer_id, {}).pop((group, TopicPartition(topic, number)), None)
        if code == NONE:
            self._offset_epochs[producer_id] = epoch
            pending = self._pending_offsets.setdefault(producer_id, {})
            for topic, partitions in request.topics:
                for number, offset, *_, metadata in partitions:
                    pending[group, TopicPartition(topic, number)] = offset, metadata
        code = INVALID_EPOCH if code == FENCED and not adds else code
        return 0, [(topic, [(number, code) for number, *_ in rows]) for topic, rows in request.topics]

    def _offsetfetch(self, request: Any) -> tuple[Any, ...]:
        pending = {key for offsets in self._pending_offsets.values() for key in offsets}
        unstable = pending if request.require_stable else set()
        topics = []
        for topic, numbers in request.topics:
            keys = [(request.group, TopicPartition(topic, number)) for number in numbers]
            rows = [(self.offsets.get(key, -1), UNSTABLE if key in unstable else NONE) for key in keys]
            topics.append(
                (topic, [(number, offset, -1, "", code) for number, (offset, code) in zip(numbers, rows, strict=True)])
            )
        return 0, topics, NONE


@dataclass(frozen=True)
class Odds:
    """How often (0..1) a request is held back, a held one arrives, an answer is lost, and so on."""

    held: float = 0.0
    repeated: float = 0.0  # a request that was answered arrives once more, later
    late: float = 0.0
    unanswered: float = 0.0
    unsent: float = 0.0
    slow_markers: float = 0.0
    time_out: float = 0.0
    forgets: float = 0.0
    changes: float = 0.0  # of transaction.version
    fences: bool = True  # a late InitProducerId is delivered, too


class Network:
    """The way to the broker for any number of producers: delays, losses and late deliveries, all from one seed.

    A request that is held back is delivered later, before any other request, or at the end (`deliver_all`), or never.
    """

    def __init__(self, broker: BrokerModel, odds: Odds, seed: int) -> None:
        self.broker = broker
        self.odds = odds
        self.random = random.Random(seed)
        self.late = 0
        self.check: Callable[[], None] = lambda: None
        self._held: list[Any] = []

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _tick(self) -> None:
        """Let happen what happens meanwhile: markers are written, held frames arrive, transactions time out."""
        if not self._chance(self.odds.slow_markers):
            self.broker.complete()
        while self._held and self._chance(self.odds.late):
            frame = self._held.pop(self.random.randrange(len(self._held)))
            self._arrive(frame)
            self.late += 1
        if self._chance(self.odds.time_out):
            self.broker.time_out()
        if self._chance(self.odds.forgets):
            self.broker.forget()
        if self._chance(self.odds.changes):
            self.broker.transactions = 2 - self.broker.transactions
        self.check()

    def _arrive(self, frame: Any) -> Any:
        answer = self.broker.answer(frame)
        if self._chance(0.3):
            self.broker.complete()
        return answer

    def deliver_all(self) -> None:
        """Deliver all held frames, in any order, and write all markers."""
        self.random.shuffle(self._held)
        for frame in self._held:
            self.broker.complete()
            self._arrive(frame)
            self.late += 1
        self._held.clear()
        self.broker.complete()

    async def send(self, request: Any) -> Any:
        """Send a request; raises UnsentError and UnansweredError by chance."""
        await asyncio.sleep(0)
        self._tick()
        if self._chance(self.odds.unsent):
            raise UnsentError("no connection")
        frame = request.prepare(self.broker.versions())
        if self._chance(self.odds.held):
            if self.odds.fences or type(frame).API_KEY != 22:
                self._held.append(frame)
            raise UnansweredError("the connection was closed")
        answer = self._arrive(frame)
        if self._chance(self.odds.repeated) and (self.odds.fences or type(frame).API_KEY != 22):
            self._held.append(frame)
        await asyncio.sleep(0)
        if self._chance(self.odds.unanswered):
            raise UnansweredError("the connection was closed")
        return answer


class ModelCluster(Brokers):
    """One producer's connections to the model."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def refresh(self) -> None: ...

    async def send(self, node: int, request: Any) -> Any:
        return await self._network.send(request)

    async def any_node(self) -> int:
        return 1

    async def coordinator(self, kind: int, key: str) -> int:
        return 1

    async def leader(self, partition: TopicPartition) -> int | None:
        return 1


class FailingCluster(ModelCluster):
    """The model, with requests that fail (`errors`: code, or an exception, by name), or wait while `gate` is closed."""

    def __init__(self, transactions: int = 2) -> None:
        self.broker = BrokerModel(transactions=transactions)
        super().__init__(Network(self.broker, Odds(), seed=1))
        self.errors: dict[str, int | Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[str] = []
        self.stopped = False

    async def send(self, node: int, request: Any) -> Any:
        frame = request.prepare(self.broker.versions())
        name = type(frame).__name__.split("Request")[0]
        if name == "EndTxn":
            name += "(commit)" if frame.get_item(frame.SCHEMA.names[-1]) else "(abort)"
        self.asked.append(name)
        if name not in ("InitProducerId", "ApiVersions"):
            await self.gate.wait()
        error = self.errors.get(name)
        if isinstance(error, Exception):
            raise error
        answer = await super().send(node, request)
        if error is None:
            return answer
        if name == "Produce":
            answer.topics = [
                (topic, [(number, error, *rest) for number, _, *rest in rows]) for topic, rows in answer.topics
            ]
        elif name == "TxnOffsetCommit":
            answer.errors = [(topic, [(number, error) for number, _ in rows]) for topic, rows in answer.errors]
        else:
            answer.error_code = error
        return answer

    async def stop(self) -> None:
        self.stopped = True

    def visible(self) -> dict[str, list[Any]]:
        """Return what a reader of committed records gets: key, value, headers, by topic and partition."""
        self.broker.complete()
        return {
            f"{tp.topic}-{tp.partition}": records for tp, log in self.broker.logs.items() if (records := log.visible())
        }
