"""The track record of a partition's agents: their last verdicts, and the outcome confidence that follows from them.

An agent's record in a domain is a set of verdicts: of each judge's verdicts on a trace the one that was issued last
(ties: the later offset), and of those the KEPT that were issued last. So neither a copy nor a late arrival of a verdict
changes it, and a restart that reads some of them again finds the same.
Successes are integers (millionths), so that every sum is exact, and equal on any machine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from worker.core.forgetting import ForgetRequest, RemovedBy, Row, id_hash
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.passes import LAST_OFFSET, Offset
from worker.core.verdicts import MILLION, Verdict

RECORD_PREFIX: Final = b"record:"
"""The changelog's key of a record: `record:` and the hash of agent and domain."""

RECORD_VERSION: Final = 1

KEPT: Final = 200
"""Verdicts that a record keeps. The standard error of a success rate of 200 verdicts is at most .035."""

HALF: Final = 50
"""A verdict behind 50 later ones of its agent and domain has half their weight: an agent changes with its releases.
The weights of 200 verdicts sum to 68, so the standard error of the rate is at most .06."""

PRIOR_WEIGHT: Final = 4
"""The verdicts that the prior stands for. A beta-binomial fitted to the outcomes of 36 agents (3,469 public runs) says
5; between 2 and 8 the Brier score on them hardly changes."""

MAX_RECORDS: Final = 100_000
"""Most records of a partition; beyond it, the one goes whose latest verdict is oldest."""

_UNIT: Final = 1 << 32
_WEIGHTS: Final = [round(_UNIT * 0.5 ** (age / HALF)) for age in range(KEPT)]
"""The weight of a verdict by its age, 0 for the latest: integers, so that their sums are exact."""

_WEIGHT_OF: Final = [0, *itertools.accumulate(_WEIGHTS)]
"""The sum of the weights of so many verdicts."""

_SUMS: Final = np.array([[1, weight] for weight in reversed(_WEIGHTS)], dtype=np.int64)
"""The successes of verdicts, the latest one last, multiplied by as many last rows of it: their sum, and the weighted
one."""

_ENTRY: Final = np.dtype([("issued", ">u8"), ("trace", "S16"), ("judge", "S8"), ("offset", ">u8"), ("success", ">u4")])
_SIZE: Final = _ENTRY.itemsize
_ORDER: Final = 32
_DROPPED: Final = _ORDER + 8
"""A verdict in a record is 44 bytes: when it was issued (ms, see `_ISSUED`), hashes of the trace and of the judge, its
source offset, and its success (millionths). Its first 32 bytes order it among the others; a copy has the same. Of a
verdict that had to go, order and offset are kept."""

_ISSUED: Final = 1 << 62
"""Added to an issue time, so that years before 1970 are positive too."""

Millionths = Annotated[int, Meta(ge=0, le=MILLION)]
_Name = Annotated[str, Meta(max_length=CACHED_ID_LENGTH)]


class Standing(NamedTuple):
    """What is known of an agent in a domain: the verdicts kept, their sum of successes, and the confidence they give.

    `used`: 0 to 1. `judged` and `succeeded` are not faded.
    """

    used: float
    judged: int
    succeeded: float


class Tally(NamedTuple):
    """Exact sums over verdicts: their number and successes (millionths), and both with each verdict's weight."""

    judged: int
    succeeded: int
    weight: int
    weighted: int

    def plus(self, other: Tally) -> Tally:
        """Return the sums of both."""
        return Tally(*map(int.__add__, self, other))


NOTHING: Final = Tally(0, 0, 0, 0)


def standing(tally: Tally, records: int, firsts: int) -> Standing:
    """Return what follows from an agent's tally, the number of all records, and the sum of their first successes.

    used = (successes + PRIOR_WEIGHT * prior) / (verdicts + PRIOR_WEIGHT), where verdicts and successes fade (HALF),
    and prior is the rate of success of all records' first verdicts, itself drawn to .5 by PRIOR_WEIGHT. A newcomer
    has the prior: agents that begin again under another name move it, and old agents' good records do not.
    """
    prior = (firsts / MILLION + PRIOR_WEIGHT / 2) / (records + PRIOR_WEIGHT)
    used = (tally.weighted / MILLION + PRIOR_WEIGHT * _UNIT * prior) / (tally.weight + PRIOR_WEIGHT * _UNIT)
    return Standing(used, tally.judged, tally.succeeded / MILLION)


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A record on the changelog. `topic_id`: of the topic whose offsets it has.

    `last_offset`: the greatest offset of a verdict that ever entered it. `dropped`: order and offset of the latest
    verdict that had to go; none of a lower order enters. `first`: success of the first verdict that had to go.
    `verdicts`: in rising order (see `_ENTRY`).
    """

    version: int
    agent_id: _Name
    domain: _Name
    topic_id: Annotated[str, Meta(max_length=22)]
    last_offset: Offset
    dropped: Annotated[bytes, Meta(max_length=_DROPPED)]
    first: Millionths | None
    verdicts: Annotated[bytes, Meta(min_length=_SIZE, max_length=KEPT * _SIZE)]

    def problem(self) -> str | None:
        """Return what is damaged, although each field has a possible value."""
        if len(self.dropped) not in (0, _DROPPED) or (self.dropped and self.first is None):
            return "what was dropped is out of range"
        if len(self.verdicts) % _SIZE:
            return "the size of the verdicts is out of range"
        orders = [self.dropped[:_ORDER], *_orders(self.verdicts)]
        if any(a >= b for a, b in itertools.pairwise(orders)):
            return "the verdicts are not in order"
        rows = np.frombuffer(self.verdicts, _ENTRY)
        if int(rows["offset"].max()) > self.last_offset or int(rows["success"].max()) > MILLION:
            return "a verdict is out of range"
        return None


Change = tuple[bytes, Stored | None]
"""A changelog row that is not encoded yet: a batch writes the last one of each key alone. None is a tombstone."""

_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(Stored)


def encode_row(row: Row | Change) -> Row:
    """Return the row of the changelog."""
    key, value = row
    return (key, _packer.encode(value)) if isinstance(value, Stored) else (key, value)


def record_key(agent_id: str, domain: str) -> bytes:
    """Return the changelog's key of an agent's record in a domain."""
    name = f"{len(agent_id)}:{agent_id}{domain}".encode("utf-8", "surrogatepass")
    return RECORD_PREFIX + hashlib.blake2b(name, digest_size=16).hexdigest().encode()


def read_stored(key: bytes, value: bytes) -> Stored:
    """Read a record of the changelog, whose key must be its own. Raises ValueError for damage."""
    try:
        stored = _unpacker.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a track record: {error}") from error
    if stored.version != RECORD_VERSION:
        raise ValueError(f"track record of version {stored.version}, this worker reads version {RECORD_VERSION}")
    if record_key(stored.agent_id, stored.domain) != key:
        raise ValueError("the track record has the key of another one")
    problem = stored.problem()
    if problem is not None:
        raise ValueError(f"track record: {problem}")
    return stored


def _orders(verdicts: bytes) -> list[bytes]:
    return [verdicts[at : at + _ORDER] for at in range(0, len(verdicts), _SIZE)]


def _order(verdict: Verdict, issued_ms: int) -> bytes:
    issued = (issued_ms + _ISSUED).to_bytes(8)
    return issued + id_hash("trace", verdict.trace_id) + _judge_hash(verdict.judge)


def _success(verdicts: bytes) -> int:
    """Return the success of the first one, in millionths."""
    return int.from_bytes(verdicts[_SIZE - 4 : _SIZE])


@functools.lru_cache(256)
def _judge_hash(judge: str) -> bytes:
    return hashlib.blake2b(judge.encode(), digest_size=8).digest()


class _Record:
    """The record of one agent in one domain (`Stored`), ready to change."""

    __slots__ = ("_tally", "agent_id", "domain", "dropped", "first_dropped", "key", "last_offset", "verdicts")

    def __init__(self, agent_id: str, domain: str) -> None:
        self.agent_id = agent_id
        self.domain = domain
        self.key = record_key(agent_id, domain)
        self.last_offset = -1
        self.dropped = b""
        self.first_dropped: int | None = None
        self.verdicts = b""
        self._tally: Tally | None = None

    @classmethod
    def of(cls, stored: Stored, below: int) -> _Record | None:
        """Return the record as it was before the source offset `below`; None if it had no verdict then.

        A verdict that a later one has replaced or pushed out is not there any more. If the one that had to go last is
        read again, those that are read with it may enter again: what pushed them out may be refused now.
        """
        record = cls(stored.agent_id, stored.domain)
        if int.from_bytes(stored.dropped[_ORDER:]) < below:
            record.dropped = stored.dropped
        record.first_dropped = stored.first
        if stored.last_offset < below:
            record.verdicts, record.last_offset = stored.verdicts, stored.last_offset
        else:
            rows = np.frombuffer(stored.verdicts, _ENTRY)
            rows = rows[rows["offset"] < below]
            record.verdicts = rows.tobytes()
            record.last_offset = int(rows["offset"].max(initial=0)) if len(rows) else -1
        return record if record.verdicts else None

    @property
    def first(self) -> int:
        """The success of the first verdict, in millionths."""
        if self.first_dropped is not None:
            return self.first_dropped
        return _success(self.verdicts)

    def add(self, order: bytes, offset: int, success: int) -> bool:
        """Add a verdict; return False if it changes nothing.

        That is so where it is a copy, where the judge has issued a later one on the trace, and where later ones have
        pushed it out before it came.
        """
        if self.dropped and order <= self.dropped[:_ORDER]:
            return False
        verdicts, same = self.verdicts, self._place(order[8:])
        if same is not None:
            known = verdicts[same : same + _SIZE]
            if known[:_ORDER] > order or (known[:_ORDER] == order and known[-4:] == success.to_bytes(4)):
                return False
            verdicts = verdicts[:same] + verdicts[same + _SIZE :]
        place = len(verdicts)
        while place and verdicts[place - _SIZE : place - _SIZE + _ORDER] > order:
            place -= _SIZE
        verdicts = verdicts[:place] + order + offset.to_bytes(8) + success.to_bytes(4) + verdicts[place:]
        if len(verdicts) > KEPT * _SIZE:
            self.dropped = verdicts[:_DROPPED]
            if self.first_dropped is None:
                self.first_dropped = _success(verdicts)
            verdicts = verdicts[_SIZE:]
        self.verdicts = verdicts
        self.last_offset = max(self.last_offset, offset)
        self._tally = None
        return True

    def _place(self, who: bytes) -> int | None:
        """Return where the verdict with these hashes, of trace and judge, begins."""
        at = self.verdicts.find(who)
        while at >= 0:
            if at % _SIZE == _ORDER - len(who):
                return at - at % _SIZE
            at = self.verdicts.find(who, at + 1)
        return None

    def tally(self) -> Tally:
        """Return the sums."""
        if self._tally is None:
            success = np.frombuffer(self.verdicts, _ENTRY)["success"].astype(np.int64)
            count = len(success)
            succeeded, weighted = (success @ _SUMS[-count:]).tolist()
            self._tally = Tally(count, succeeded, _WEIGHT_OF[count], weighted)
        return self._tally

    def change(self, topic_id: str) -> Change:
        """Return the row of the changelog, as the record is now."""
        return self.key, Stored(
            RECORD_VERSION, self.agent_id, self.domain, topic_id,
            self.last_offset, self.dropped, self.first_dropped, self.verdicts,
        )  # fmt: skip


class TrackRecord:
    """The records of one source partition, by agent and domain.

    `topic_id`: of the source topic. `others`: those of the other partitions, in the scope `group`.
    """

    def __init__(self, topic_id: str = "", others: Callable[[], Iterable[TrackRecord]] = tuple) -> None:
        self._topic_id = topic_id
        self._others = others
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()  # the one of the latest verdict last
        self._keys: dict[bytes, tuple[str, str]] = {}
        self.firsts = 0
        """Sum of the first verdicts' successes, in millionths."""

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def standing(self, agent_id: str, domain: str) -> Standing:
        """Return what is known of an agent in a domain (see `standing`)."""
        name = _name(agent_id, domain)
        every = (self, *self._others())
        tally = functools.reduce(Tally.plus, (it.tally(name) for it in every))
        return standing(tally, sum(len(it) for it in every), sum(it.firsts for it in every))

    def add(self, verdict: Verdict, issued_ms: int, offset: int) -> list[Change] | None:
        """Add the verdict at a source offset; return what changes on the changelog, None if nothing does."""
        name = _name(verdict.agent_id, verdict.task_domain)
        record = self._records.get(name)
        if record is None:
            record = _Record(*name)
        else:
            self.firsts -= record.first
        changed = record.add(_order(verdict, issued_ms), offset, verdict.millionths)
        self.firsts += record.first
        if not changed:
            return None
        self._put(name, record)
        return [record.change(self._topic_id), *self._overflow()]

    def forget(self, request: ForgetRequest) -> list[Row]:
        """Remove the records of the agent that a request names; return their tombstones.

        A request for single traces removes none: a record has hashes of traces alone.
        """
        gone = [name for name in self._records if name[0] == request.agent_id]
        return [self._remove(name) for name in gone]

    def restore(self, stored: Iterable[Stored], below: int, removed: RemovedBy | None = None) -> list[Row]:
        """Take the records as they were before the source offset `below`, where the partition continues.

        Return the rows that the next commit must write: of records that had verdicts at or past it, or of another
        topic, or `removed` by a request. A reset of the offset therefore brings back no verdict that is refused when it
        is read again.
        """
        rows: list[Row] = []
        found = []
        for each in stored:
            gone = removed is not None and removed.has("", each.agent_id, each.last_offset)
            record = None if gone or each.topic_id != self._topic_id else _Record.of(each, below)
            if record is None:
                rows.append((record_key(each.agent_id, each.domain), None))
                continue
            found.append(record)
            if record.last_offset != each.last_offset:
                rows.append(encode_row(record.change(self._topic_id)))
        for record in sorted(found, key=lambda it: it.last_offset):
            self.firsts += record.first
            self._put((record.agent_id, record.domain), record)
        return rows + self._overflow()

    def apply(self, key: bytes, value: bytes | None) -> None:
        """Take a row that another worker has written for this partition. Raises ValueError for damage."""
        name = self._keys.get(key)
        if name is not None:
            self._remove(name)
        if value is not None:
            self.restore([read_stored(key, value)], LAST_OFFSET + 1)

    def listed(self) -> Iterator[tuple[str, str, Standing]]:
        """Yield agent, domain and standing of each record, the one of the latest verdict last."""
        for agent_id, domain in self._records:
            yield agent_id, domain, self.standing(agent_id, domain)

    def tally(self, name: tuple[str, str]) -> Tally:
        """Return the sums of this partition's record of an agent and domain."""
        record = self._records.get(name)
        return NOTHING if record is None else record.tally()

    def _put(self, name: tuple[str, str], record: _Record) -> None:
        self._records[name] = record
        self._records.move_to_end(name)
        self._keys[record.key] = name

    def _remove(self, name: tuple[str, str]) -> tuple[bytes, None]:
        record = self._records.pop(name)
        self.firsts -= record.first
        del self._keys[record.key]
        return record.key, None

    def _overflow(self) -> list[tuple[bytes, None]]:
        return [self._remove(next(iter(self._records))) for _ in range(len(self._records) - MAX_RECORDS)]


def _name(agent_id: str, domain: str) -> tuple[str, str]:
    return agent_id[:CACHED_ID_LENGTH], domain[:CACHED_ID_LENGTH]
