"""A producer: appends batches of records, each once; with a transactional id in transactions, with source offsets.

Why not aiokafka's (0.14): a request whose connection closed is sent again, and the first copy may still reach the
broker, in the midst of the next transaction. Here no transaction begins in an epoch of which a request may still be on
its way; how, docs/architecture.md says (Requests that arrive late). Within its own transaction a late request does no
harm: batches have sequence numbers, and adding a partition, committing an offset or ending twice is the same as once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.errors import ProducerFenced, for_code

from worker.core.records import encoded_size
from worker.kafka import protocol as requests
from worker.kafka.aiokafka_private import BatchBuilder, Brokers, UnansweredError, UnsentError
from worker.kafka.protocol import NO_PRODUCER, Offsets, ProducerEpoch
from worker.kafka.rows import REFUSALS, PartitionRows, RefusedBatch, Row, TopicRefusedError

log = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = 262_144  # bytes of one batch: a busy transaction carries hundreds of traces

BUSY_SECONDS: Final = 0.02
"""Pause before a request is sent again to a broker that is still completing the last transaction, some ms."""

FIRST_PAUSE_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 1.0  # other pauses double from the first to the longest

FIRST_READ_SECONDS: Final = 0.005
"""Pause before a committed offset is read back again; it doubles up to the longest one, 1.3 s in all."""

ABORT_SECONDS: Final = 3.0  # how long a producer that has failed tries to abort


class PublishError(Exception):
    """It is unknown whether something was written; the message names the topic or the request."""


class AbortableError(Exception):
    """The transaction cannot be committed. Once it is aborted, the same producer can run it again."""


class DoubtfulRefusalError(Exception):
    """A batch was refused when it was sent again, and it is unknown whether an earlier try was appended.

    Its sequence number is then unknown, too; a restart begins with a new producer.
    """


class Answer(Enum):
    """What an error code means for a producer."""

    DONE = auto()
    BUSY = auto()  # ask the same broker again; it did nothing
    MOVED = auto()  # look for the leader or coordinator again; this broker did nothing
    UNSURE = auto()  # the same, but it may have done it
    ABORT = auto()  # the transaction cannot be committed
    FENCED = auto()  # another producer has the transactional id


ANSWERS: Final[Mapping[int, Answer]] = {
    0: Answer.DONE,
    46: Answer.DONE,  # DUPLICATE_SEQUENCE_NUMBER: an earlier try is in the log
    14: Answer.BUSY,  # COORDINATOR_LOAD_IN_PROGRESS
    19: Answer.BUSY,  # NOT_ENOUGH_REPLICAS; also where the broker cannot verify the transaction at present
    51: Answer.BUSY,  # CONCURRENT_TRANSACTIONS: the markers of the last one are being written
    3: Answer.MOVED,  # UNKNOWN_TOPIC_OR_PARTITION
    5: Answer.MOVED,  # LEADER_NOT_AVAILABLE
    6: Answer.MOVED,  # NOT_LEADER_OR_FOLLOWER
    15: Answer.MOVED,  # COORDINATOR_NOT_AVAILABLE
    16: Answer.MOVED,  # NOT_COORDINATOR
    55: Answer.MOVED,  # OPERATION_NOT_ATTEMPTED: another partition of the request is the reason
    7: Answer.UNSURE,  # REQUEST_TIMED_OUT: not all replicas have it
    13: Answer.UNSURE,  # NETWORK_EXCEPTION
    20: Answer.UNSURE,  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
    56: Answer.UNSURE,  # KAFKA_STORAGE_ERROR
    120: Answer.ABORT,  # TRANSACTION_ABORTABLE
    47: Answer.FENCED,  # INVALID_PRODUCER_EPOCH
    90: Answer.FENCED,  # PRODUCER_FENCED
}
"""What follows from Kafka's error codes. Any other one is final, except those about a record batch (rows.REFUSALS).

Final, too, is a producer id that the coordinator has forgotten (after a week): it would give any former owner a new
one, also one that is behind a successor that it has forgotten as well.
"""

AGAIN: Final = {Answer.BUSY, Answer.MOVED, Answer.UNSURE}
INVALID_TXN_STATE, OPERATION_NOT_ATTEMPTED = 48, 55
GROUP, TRANSACTION = 0, 1  # kinds of coordinators, as FindCoordinator numbers them


@dataclass(eq=False, slots=True)
class _RecordBatch:
    """Rows [first, first + count) of a partition's. `unsure`: an earlier try may be in the log."""

    first: int
    count: int
    builder: BatchBuilder
    unsure: bool = False


@dataclass(eq=False, slots=True)
class _Progress:
    part: PartitionRows
    limit: int  # the topic's limit when the batches were made (bytes)
    batches: deque[_RecordBatch]  # what is left
    refused: list[RefusedBatch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why something must be sent again; `busy`: the broker is there and only needs a moment."""

    why: str
    busy: bool = False


def batches_of(rows: Sequence[Row], limit: int, *, transactional: bool) -> deque[_RecordBatch]:
    """Return rows as batches of at most `limit` bytes; a single row may have more."""
    small = limit < MAX_BATCH_BYTES  # otherwise the builder's own limit is the lower one
    batches: deque[_RecordBatch] = deque()
    for number, (key, value, timestamp_ms, headers) in enumerate(rows):
        last = batches[-1] if batches else None
        if last is not None and small and last.builder.size() + encoded_size(key, value, headers) > limit:
            last = None
        if last is None or not last.builder.append(timestamp_ms, key, value, headers):
            last = _RecordBatch(number, 0, BatchBuilder(MAX_BATCH_BYTES, transactional=transactional))
            last.builder.append(timestamp_ms, key, value, headers)
            batches.append(last)
        last.count += 1
    return batches


class Producer:
    """Appends rows to topics, each once, those of one partition in their order. One coroutine at a time uses it.

    With a transactional id, `start` fences whoever has the id, and `send` and `send_offsets` are called inside
    `transaction`. After AbortableError the transaction may be run again; after any other error it is unknown what was
    written, and the producer must be stopped. Without an id, `send` appends at once.

    `owns`: whether this process still has the partition, as far as it knows. It is asked before a new epoch, which
    would fence a successor that has a transaction open.
    """

    def __init__(
        self,
        client: Mapping[str, Any],
        transactional_id: str | None,
        timeout_seconds: float,
        *,
        owns: Callable[[], bool] = lambda: True,
        cluster: Brokers | None = None,  # in tests a model of the brokers,
    ) -> None:
        self.transactions = 1  # the version of the transaction protocol, known after `start`
        self.waits_for = "nothing"  # what the producer waits for, or waited for last, in words
        self.timeout_seconds = timeout_seconds
        self._id = transactional_id
        self._timeout_ms = round(timeout_seconds * 1000)
        self._owns = owns
        self._cluster = cluster or Brokers(client, self._timeout_ms)
        self._producer = NO_PRODUCER
        self._sequences: dict[TopicPartition, int] = {}  # of the next record, in this epoch
        self._coordinators: dict[int, int] = {}  # brokers, by kind
        self._late = False  # a request of this epoch was not answered, and may still reach a broker
        self._used = False  # V1: an answered request of this epoch's transaction may arrive once more
        self._reads_back = False  # a late TxnOffsetCommit of an earlier epoch may have taken an offset away
        # Of the open transaction:
        self._open = False
        self._added: set[TopicPartition | str] = set()  # V1: the partitions and the group that are part of it
        self._known = False  # the coordinator may know of it
        self._offsets: tuple[str, Offsets] | None = None  # the group and its offsets
        self._ending: bool | None = None  # its end was sent and is not answered: whether it commits

    @property
    def transactional_id(self) -> str | None:
        """Return the transactional id, None without transactions."""
        return self._id

    # -- start and stop

    async def start(self) -> None:
        """Connect, and fence whoever has the transactional id; return once that one's transaction has ended."""
        await self._cluster.start()
        if self._id is not None:
            response = await self._ask("ApiVersions", requests.FeaturesRequest(), None)
            self.transactions = requests.transaction_protocol(response)
            self._reads_back = requests.has_late_offsets(response)
        await self._initialise(NO_PRODUCER)

    async def stop(self) -> None:
        """Disconnect. An open transaction ends with the next owner's start, or after its timeout."""
        await self._cluster.stop()

    async def _initialise(self, current: ProducerEpoch) -> None:
        """Get a producer id, or the epoch after the current one."""
        request = requests.InitProducerId(self._id, self._timeout_ms, current)
        response = await self._ask("InitProducerId", request, None if self._id is None else TRANSACTION)
        self._enter(ProducerEpoch(response.producer_id, response.producer_epoch))

    def _enter(self, producer: ProducerEpoch) -> None:
        """Go on in a new epoch: none of its requests is on its way, and its sequence numbers begin with 0."""
        self._producer = producer
        self._sequences.clear()
        self._late = self._used = False

    # -- transactions

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Run a block as one transaction: commit at its end; if it raises, abort and raise its error.

        After AbortableError, which the block may raise, it may be run again. Raises PublishError after the timeout.
        """
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self.begin()
                try:
                    yield
                    await self.commit()
                except AbortableError:
                    await self.abort()
                    await self._leave_epoch()
                    raise
                await self._leave_epoch()
        except AbortableError:
            raise
        except Exception as error:
            try:  # readers then need not wait for the timeout; the next owner's start aborts it, too
                await asyncio.wait_for(self.abort(), ABORT_SECONDS)
            except Exception as failure:
                log.info("%s: the open transaction was not aborted: %r", self._id, failure)
            if isinstance(error, TimeoutError):
                raise PublishError(
                    f"not finished after {self._timeout_ms / 1000:g} s, waiting for {self.waits_for}"
                ) from error
            raise

    async def begin(self) -> None:
        """Begin a transaction; the brokers learn of it with its first record or offset."""
        if self._open or self._late:
            raise RuntimeError("this is a bug: the last transaction has not ended")
        if self._used:  # the group had given the partition away when the last one ended
            await self._renew()
        self._open, self._known, self._offsets = True, False, None
        self._added.clear()

    async def send(self, parts: Sequence[PartitionRows]) -> list[tuple[PartitionRows, list[RefusedBatch]]]:
        """Append rows to different partitions; return the batches that their topics refuse for good.

        Raises PublishError, which names the topic, and AbortableError; without transactions DoubtfulRefusalError.
        """
        sending: dict[TopicPartition, _Progress] = {}
        for each in parts:
            limit = each.topic.batch_bytes
            batches = batches_of(each.rows, limit, transactional=self._id is not None)
            sending[TopicPartition(each.topic.name, each.partition)] = _Progress(each, limit, batches)
        if len(sending) < len(parts) or (self._id is not None and not self._open):
            raise RuntimeError("this is a bug: a partition twice, or no transaction")
        if self._id is not None and self.transactions == 1 and (new := sorted(sending.keys() - self._added)):
            self._known = True
            await self._ask("AddPartitionsToTxn", requests.add_partitions(self._id, self._producer, new), TRANSACTION)
            self._added.update(new)
        pauses = _Pauses(self._id)
        while left := {partition: each for partition, each in sending.items() if each.batches}:
            troubles = await self._send_next(left)
            if troubles:
                await pauses.pause(troubles)
        return [(each.part, each.refused) for each in sending.values() if each.refused]

    async def send_offsets(self, group: str, offsets: Offsets) -> None:
        """Commit a group's offsets with the transaction."""
        if self._id is None or not self._open:
            raise RuntimeError("this is a bug: no transaction is open")
        self._known = True
        self._offsets = group, offsets
        if self.transactions == 2:
            request: Any = requests.CommitOffsetsV2(self._id, self._producer, group, offsets)
        else:
            if group not in self._added:
                await self._ask("AddOffsetsToTxn", requests.add_offsets(self._id, self._producer, group), TRANSACTION)
                self._added.add(group)
            request = requests.commit_offsets_v1(self._id, self._producer, group, offsets)
        await self._ask("TxnOffsetCommit", request, GROUP, group)

    async def commit(self) -> None:
        """Commit. After an error it is unknown whether the transaction is committed."""
        await self._end(commit=True)
        while self._reads_back and self._offsets is not None and not await self._are_committed(*self._offsets):
            log.warning("%s: a late request has taken the committed offset away; it is committed again", self._id)
            group, offsets = self._offsets
            await self.begin()
            await self.send_offsets(group, offsets)
            await self._end(commit=True)

    async def _are_committed(self, group: str, offsets: Offsets) -> bool:
        """Whether the group's coordinator has the offsets; it learns of the transaction's end some ms later."""
        request = requests.FetchOffsets(group, offsets, stable=False)
        pause = FIRST_READ_SECONDS
        while pause <= LONGEST_PAUSE_SECONDS:
            there = requests.fetched_offsets(await self._ask("OffsetFetch", request, GROUP, group))
            if all(
                partition in there and there[partition].offset >= offset.offset for partition, offset in offsets.items()
            ):
                return True
            await asyncio.sleep(pause)
            pause *= 2
        return False

    async def abort(self) -> None:
        """Abort the transaction, if one is open. Raises PublishError if it may be committed already."""
        if self._ending:
            raise PublishError("the transaction may be committed: its end was sent, and not answered")
        if self._open:
            await self._end(commit=False)

    async def _end(self, *, commit: bool) -> None:
        if self._id is None or not self._open:
            raise RuntimeError("this is a bug: no transaction is open")
        self._ending = commit
        if self._known:
            what = f"EndTxn({'commit' if commit else 'abort'})"
            if self.transactions == 1:
                await self._ask(what, requests.end_v1(self._id, self._producer, commit), TRANSACTION)
            else:
                request = requests.EndV2(self._id, self._producer, commit)
                response = await self._ask(what, request, TRANSACTION, also=(INVALID_TXN_STATE,))
                if response.error_code != INVALID_TXN_STATE:
                    self._enter(ProducerEpoch(response.producer_id, response.producer_epoch))
                elif commit:  # so the broker answers between the abort and the successor's next epoch
                    raise ProducerFenced(f"{self._id}: {what}: ended by a successor's start or by the timeout")
                else:
                    self._late = True  # all was refused before it became part of the transaction
        self._open, self._ending = False, None
        self._used = self.transactions == 1 and self._known
        if self._late:
            await self._renew()

    async def _leave_epoch(self) -> None:
        """Leave the epoch of a transaction V1: what was answered may still arrive once more.

        At once, and not when the next one begins: by then a successor may have a transaction open.
        """
        if self._used and self._owns():
            await self._renew()

    async def _renew(self) -> None:
        """Get the next epoch: requests of this one that still arrive, or arrive again, are fenced from now on."""
        why = "a request was not answered, and may still arrive" if self._late else "its requests may arrive again"
        if not self._owns():
            raise ProducerFenced(f"{self._id}: {why}, and the partition now belongs to another worker")
        before = self._producer
        unanswered = self._late
        await self._initialise(before)
        if unanswered:
            log.info("%s: %s; epoch %d follows %d", self._id, why, self._producer.epoch, before.epoch)

    # -- records

    async def _send_next(self, sending: Mapping[TopicPartition, _Progress]) -> list[_Trouble]:
        """Send the next batch of each partition, all at once; return what stands in the way of some."""
        troubles = []
        by_node: dict[int, dict[TopicPartition, _Progress]] = {}
        for partition, each in sending.items():
            self.waits_for = f"a leader of topic {partition.topic}, partition {partition.partition}"
            node = await self._cluster.leader(partition)
            if node is None:
                troubles.append(_Trouble(f"topic {partition.topic}, partition {partition.partition} has no leader"))
            else:
                by_node.setdefault(node, {})[partition] = each
        sent = (self._produce(node, some) for node, some in by_node.items())
        for result in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            troubles += result
        if not all(trouble.busy for trouble in troubles):
            await self._cluster.refresh()
        return troubles

    async def _produce(self, node: int, sending: Mapping[TopicPartition, _Progress]) -> list[_Trouble]:
        """Send one request with the next batch of each partition that a broker leads."""
        data = {
            partition: each.batches[0].builder.build(self._producer, self._sequences.get(partition, 0))
            for partition, each in sending.items()
        }
        if self._id is not None and self.transactions == 2:
            request: Any = requests.ProduceV2(self._id, self._timeout_ms, data)
        else:
            request = requests.ProduceV1(self._id, self._timeout_ms, data)
        topics = ", ".join(sorted({partition.topic for partition in sending}))
        self.waits_for = f"Produce to topic {topics} at broker {node}"
        self._known = True
        try:
            response = await self._send_to(node, request)
        except UnsentError as error:
            return [_Trouble(f"topic {topics}: {error}")]
        except UnansweredError as error:
            for each in sending.values():
                each.batches[0].unsure = True
            return [_Trouble(f"topic {topics}: {error}")]
        troubles = []
        for topic, results in response.topics:
            for number, code, *rest in results:
                partition = TopicPartition(topic, number)
                trouble = self._settle(partition, sending[partition], code, rest)
                if trouble is not None:
                    troubles.append(trouble)
        return troubles

    def _settle(
        self, partition: TopicPartition, progress: _Progress, code: int, rest: Sequence[Any]
    ) -> _Trouble | None:
        """Note what became of a partition's next batch. `rest`: offset, time, log start, messages."""
        batch = progress.batches[0]
        where = f"topic {partition.topic}, partition {partition.partition}"
        if code in REFUSALS:
            error = _refusal(partition, code, rest)
            if batch.unsure:
                self._doubtful(error)
            progress.refused.append(RefusedBatch(batch.first, batch.count, batch.builder.size(), progress.limit, error))
            progress.batches.popleft()  # the broker counts no refused record: the sequence number stays
            return None
        answer = ANSWERS.get(code)
        if answer is Answer.DONE:
            self._sequences[partition] = (self._sequences.get(partition, 0) + batch.count) % 2**31  # 0 follows the last
            progress.batches.popleft()
            return None
        # OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID: the leader does not have the batch before this one, or has
        # another. The abort of the transaction discards them all.
        if code in (45, 59) and self._id is not None:
            self._late = True  # a new epoch begins with sequence number 0
            raise AbortableError(f"{where}: {for_code(code).__name__}")
        if answer not in AGAIN:
            self._fail(where, code, partition.topic)
        if answer is Answer.UNSURE:
            batch.unsure = self._late = True
        return _Trouble(f"{where}: {for_code(code).__name__}", busy=answer is Answer.BUSY)

    def _doubtful(self, refusal: TopicRefusedError) -> None:
        """Raise the error of a refused batch that an earlier try may have appended: its sequence number is unknown."""
        if self._id is None:
            raise DoubtfulRefusalError(f"{refusal}; it is unknown whether an earlier attempt was written") from refusal
        self._late = True
        raise AbortableError(f"{refusal}; an earlier attempt may have been written") from refusal

    # -- requests

    async def _ask(
        self, what: str, request: Any, kind: int | None, key: str | None = None, *, also: Sequence[int] = ()
    ) -> Any:
        """Send a request until it is answered for good. `kind` and `key`: its coordinator; None: any broker.

        `also`: further error codes that the caller understands.
        """
        pauses = _Pauses(self._id)
        unsure = False
        while True:
            self.waits_for = f"the coordinator for {what}"
            try:
                node = await self._node(kind, key or self._id or "")
                self.waits_for = f"{what} at broker {node}"
                response = await self._send_to(node, request)
            except (UnsentError, UnansweredError) as error:
                unsure |= isinstance(error, UnansweredError)
                trouble = _Trouble(f"{what}: {error}")
                await self._cluster.refresh()
            else:
                code, topic = _error(response)
                answer = ANSWERS.get(code)
                if answer is Answer.DONE or code in also:
                    return response
                if answer not in AGAIN:
                    self._fail(what, code, topic or key or self._id or "", unsure=unsure)
                if answer is Answer.UNSURE:
                    unsure = self._late = True
                trouble = _Trouble(f"{what}: {for_code(code).__name__}", busy=answer is Answer.BUSY)
            if kind is not None and not trouble.busy:
                self._coordinators.pop(kind, None)
            await pauses.pause([trouble])

    async def _node(self, kind: int | None, key: str) -> int:
        if kind is None:
            return await self._cluster.any_node()
        if kind not in self._coordinators:
            self._coordinators[kind] = await self._cluster.coordinator(kind, key)
        return self._coordinators[kind]

    async def _send_to(self, node: int, request: Any) -> Any:
        """Send a request once. Without an answer, whatever the reason, it may still reach the broker."""
        try:
            return await self._cluster.send(node, request)
        except UnsentError:
            raise
        except BaseException:
            self._late |= not isinstance(request, requests.FetchOffsets)  # it changes nothing
            raise

    def _fail(self, where: str, code: int, name: str, *, unsure: bool = False) -> None:
        """Raise the error for a code that is final. `unsure`: an earlier try may have been done."""
        answer = ANSWERS.get(code)
        if answer is Answer.FENCED:
            raise ProducerFenced(f"{self._id}: {where}: the epoch {self._producer.epoch} is over")
        if answer is Answer.ABORT and self._open and (self._ending is None or (self._ending and not unsure)):
            self._ending = None
            raise AbortableError(f"{where}: the broker requires that the transaction is aborted")
        error = for_code(code)(name)
        raise PublishError(f"{where}: {error!r}") from error


class _Pauses:
    def __init__(self, name: str | None) -> None:
        self._name = name or "producer"
        self._seconds = FIRST_PAUSE_SECONDS
        self._logged: float | None = None

    async def pause(self, troubles: Sequence[_Trouble]) -> None:
        """Wait before the next try, and say why now and then."""
        if all(trouble.busy for trouble in troubles):
            await asyncio.sleep(BUSY_SECONDS)
            return
        now = asyncio.get_running_loop().time()
        why = "; ".join(trouble.why for trouble in troubles)
        if self._logged is None:  # most troubles are over after a moment: a new leader, a coordinator that is loading
            self._logged = now
            log.info("%s: %s; trying again", self._name, why)
        elif now - self._logged >= 10.0:
            self._logged = now
            log.warning("%s: %s; still trying", self._name, why)
        await asyncio.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, LONGEST_PAUSE_SECONDS)


def _error(response: Any) -> tuple[int, str | None]:
    """Return the error code of a response (0: none), and the topic if it is about one."""
    if getattr(response, "error_code", 0) or not (hasattr(response, "errors") or hasattr(response, "topics")):
        return response.error_code, None
    by_topic = response.errors if hasattr(response, "errors") else response.topics
    errors = [(code, topic) for topic, partitions in by_topic for *_, code in partitions if code]
    # The broker attempts none if one of them fails.
    return min(errors, key=lambda error: error[0] == OPERATION_NOT_ATTEMPTED, default=(0, None))


def _refusal(partition: TopicPartition, code: int, rest: Sequence[Any]) -> TopicRefusedError:
    records, message = rest[3:]
    of_records = {index: words or "" for index, words in records}
    words = next(iter(of_records.values()), "") or message or ""
    return TopicRefusedError(partition.topic, partition.partition, code, words, of_records)
