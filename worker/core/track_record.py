"""The track records of a partition's agents: their latest verdicts, and the outcome confidence derived from them.

An agent's record in a domain is a set of verdicts: the last-issued one of each judge on each trace (ties: the later
offset), and of those the KEPT last-issued ones. So neither a copy nor a late arrival changes it, and a restart that
reads some again ends with the same set. Successes are integers (millionths), so that every sum is exact.

Where a record is gone, copies of its verdicts must not make it anew: verdicts on traces from before the changelog's
beginning do not count, nor, where records have been dropped, those from before the latest verdict of the oldest one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from worker.core.changelog import RECORD_PREFIX, CachedId, Offset, unpack
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import Row
from worker.core.verdicts import MILLION, Verdict

RECORD_VERSION: Final = 1

KEPT: Final = 200  # verdicts in a record. The standard error of a success rate over 200 verdicts is at most .035

HALF: Final = 50
"""A verdict's weight halves every 50 later ones of its agent and domain, as agents change with their releases. The
weights of 200 verdicts sum to 68, so the standard error of the rate is at most .06."""

PRIOR_WEIGHT: Final = 4
"""The number of verdicts that the prior counts as. A beta-binomial fitted to 36 agents (3,469 public runs) gives 5;
between 2 and 8 the Brier score hardly changes."""

MAX_RECORDS: Final = 100_000  # of a partition; then the record whose latest verdict came first is dropped

_UNIT: Final = 1 << 32
_WEIGHTS: Final = [round(_UNIT * 0.5 ** (age / HALF)) for age in range(KEPT)]
"""The weight of a verdict by its age (0: the latest). Integers, so that their sums are exact."""

_WEIGHT_OF: Final = [0, *itertools.accumulate(_WEIGHTS)]  # the total weight, by number of verdicts

_SUMS: Final = np.array([[1, weight] for weight in reversed(_WEIGHTS)], dtype=np.int64)
"""Multiplied by verdicts' successes, the latest last, gives their sum and their weighted sum."""

_ENTRY: Final = np.dtype([("issued", ">u8"), ("trace", "S16"), ("judge", "S8"), ("offset", ">u8"), ("success", ">u4")])
_SIZE: Final = _ENTRY.itemsize
_ORDER: Final = 32
_DROPPED: Final = _ORDER + 8
"""A verdict in a record is 44 bytes: issue time (ms, see `_ISSUED`), hashes of trace and judge, source offset, success
(millionths). The first 32 bytes are its sort order, which a copy shares. Of a dropped verdict, order and offset are
kept."""

_ISSUED: Final = 1 << 62  # added to an issue time, so that times before 1970 are positive too

Millionths = Annotated[int, Meta(ge=0, le=MILLION)]


class Standing(NamedTuple):
    """The standing of an agent in a domain."""

    used: float  # its confidence, 0..1
    judged: int  # number of verdicts
    succeeded: float  # sum of their successes, unweighted


class Tally(NamedTuple):
    """Exact sums over verdicts."""

    judged: int  # number of verdicts
    succeeded: int  # successes, millionths
    weight: int  # weights
    weighted: int  # weight times success


NOTHING: Final = Tally(0, 0, 0, 0)


def standing(tally: Tally, records: int, firsts: int) -> Standing:
    """Return an agent's standing from its tally, the number of all records, and the sum of their first successes.

    used = (successes + PRIOR_WEIGHT * prior) / (verdicts + PRIOR_WEIGHT), where verdicts and successes are weighted by
    age (HALF), and prior is the success rate of all records' first verdicts, itself shrunk to .5 by PRIOR_WEIGHT. A
    newcomer gets the prior: agents that start over under another name move it, good records of old agents do not.
    """
    prior = (firsts / MILLION + PRIOR_WEIGHT / 2) / (records + PRIOR_WEIGHT)
    used = (tally.weighted / MILLION + PRIOR_WEIGHT * _UNIT * prior) / (tally.weight + PRIOR_WEIGHT * _UNIT)
    return Standing(used, tally.judged, tally.succeeded / MILLION)


@functools.lru_cache(4096)
def record_key(agent_id: str, domain: str) -> bytes:
    """Return the changelog key of an agent's record in a domain."""
    name = f"{len(agent_id)}:{agent_id}{domain}".encode("utf-8", "surrogatepass")
    return RECORD_PREFIX + hashlib.blake2b(name, digest_size=16).hexdigest().encode()


class AgentRecord(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The record of one agent in one domain, as on the changelog. Each verdict makes a new one."""

    version: int
    agent_id: CachedId
    domain: CachedId
    topic_id: Annotated[str, Meta(max_length=22)]  # of the topic that its offsets refer to
    last_offset: Offset  # the greatest offset of any verdict that ever entered it
    dropped: Annotated[bytes, Meta(max_length=_DROPPED)]
    """Order and offset of the latest dropped verdict; no verdict of a lower order may enter."""
    first: Millionths | None  # success of the first dropped verdict
    verdicts: Annotated[bytes, Meta(min_length=_SIZE, max_length=KEPT * _SIZE)]  # rising (see `_ENTRY`)

    @property
    def name(self) -> tuple[str, str]:
        """The agent and the domain."""
        return self.agent_id, self.domain

    @property
    def key(self) -> bytes:
        """The record's key on the changelog."""
        return record_key(self.agent_id, self.domain)

    @property
    def first_success(self) -> int:
        """The first verdict's success, in millionths."""
        return _success(self.verdicts) if self.first is None else self.first

    @functools.cached_property
    def tally(self) -> Tally:
        """The sums over the verdicts."""
        count = len(self.verdicts) // _SIZE
        success = np.ndarray((count,), _ENTRY["success"], self.verdicts, _DROPPED, (_SIZE,))
        succeeded, weighted = success.dot(_SUMS[-count:]).tolist()
        return Tally(count, succeeded, _WEIGHT_OF[count], weighted)

    def check(self) -> None:
        """Raise ValueError for damage although each field has a valid value."""
        if len(self.dropped) not in (0, _DROPPED) or (self.dropped and self.first is None):
            raise ValueError("track record: what was dropped is out of range")
        if len(self.verdicts) % _SIZE:
            raise ValueError("track record: the size of the verdicts is out of range")
        orders = [self.verdicts[at : at + _ORDER] for at in range(0, len(self.verdicts), _SIZE)]
        if any(a >= b for a, b in itertools.pairwise([self.dropped[:_ORDER], *orders])):
            raise ValueError("track record: the verdicts are not in order")
        rows = np.frombuffer(self.verdicts, _ENTRY)
        if int(rows["offset"].max()) > self.last_offset or int(rows["success"].max()) > MILLION:
            raise ValueError("track record: a verdict is out of range")

    def before(self, offset: int) -> AgentRecord | None:
        """Return the record as it was before a source offset; None if it had no verdict then.

        Verdicts that were replaced or dropped cannot be recovered. If the last dropped one will be read again, the
        verdicts read with it may enter again: the ones that pushed them out may be refused this time.
        """
        dropped = self.dropped if int.from_bytes(self.dropped[_ORDER:]) < offset else b""
        if self.last_offset < offset:
            return replace(self, dropped=dropped)
        rows = np.frombuffer(self.verdicts, _ENTRY)
        rows = rows[rows["offset"] < offset]
        if not len(rows):
            return None
        return replace(self, dropped=dropped, verdicts=rows.tobytes(), last_offset=int(rows["offset"].max()))

    def with_verdict(self, order: bytes, offset: int, success: int) -> AgentRecord | None:
        """Return the record with a verdict added; None if that changes nothing.

        A verdict changes nothing if it is a copy, if its judge has issued a later one on the trace, or if later ones
        have pushed it out.
        """
        dropped, first = self.dropped, self.first
        if dropped and order <= dropped[:_ORDER]:
            return None
        verdicts, same = self.verdicts, self._place(order[8:])
        if same is not None:
            known = verdicts[same : same + _SIZE]
            if known[:_ORDER] > order or (known[:_ORDER] == order and known[-4:] == success.to_bytes(4)):
                return None
            verdicts = verdicts[:same] + verdicts[same + _SIZE :]
        place = len(verdicts)
        while place and verdicts[place - _SIZE : place - _SIZE + _ORDER] > order:
            place -= _SIZE
        verdicts = b"".join((verdicts[:place], order, offset.to_bytes(8), success.to_bytes(4), verdicts[place:]))
        if len(verdicts) > KEPT * _SIZE:
            dropped = verdicts[:_DROPPED]
            if first is None:
                first = _success(verdicts)
            verdicts = verdicts[_SIZE:]
        return replace(self, last_offset=max(self.last_offset, offset), dropped=dropped, first=first, verdicts=verdicts)

    def _place(self, who: bytes) -> int | None:
        """Return the position of the verdict with these hashes of trace and judge; None if there is none."""
        at = self.verdicts.find(who)
        while at >= 0:
            if at % _SIZE == _ORDER - len(who):
                return at - at % _SIZE
            at = self.verdicts.find(who, at + 1)
        return None


Change = tuple[bytes, AgentRecord | None]
"""A changelog row that is not encoded yet, as a batch writes only the last one of each key. None is a tombstone."""

_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(AgentRecord)


def encode_row(row: Row | Change) -> Row:
    """Return the encoded changelog row."""
    key, value = row
    return (key, _packer.encode(value)) if isinstance(value, AgentRecord) else (key, value)


def read_record(key: bytes, value: bytes) -> AgentRecord:
    """Read a record from the changelog; the key must match. Raises ValueError for damage."""
    record = unpack(_unpacker, value, RECORD_VERSION, "a track record")
    if record.key != key:
        raise ValueError("the track record has the key of another one")
    record.check()
    return record


def _order(verdict: Verdict, issued_ms: int) -> bytes:
    issued = (issued_ms + _ISSUED).to_bytes(8)
    # An agent chooses its ids: only the place of the record tells two traces apart (earlier builds did not name it).
    place = f"{verdict.partition}:{verdict.offset}" if verdict.offset is not None else f"trace:{verdict.trace_id}"
    trace = hashlib.blake2b(place.encode("utf-8", "surrogatepass"), digest_size=16)
    return issued + trace.digest() + _judge_hash(verdict.judge)


def _success(verdicts: bytes) -> int:
    return int.from_bytes(verdicts[_SIZE - 4 : _SIZE])


@functools.lru_cache(256)
def _judge_hash(judge: str) -> bytes:
    return hashlib.blake2b(judge.encode(), digest_size=8).digest()


class Weighed(NamedTuple):
    """The effect of a verdict."""

    record: AgentRecord | None  # the agent's, including it; None: it changes nothing
    gained: int  # its change to the sum of first successes
    standing: Standing  # the agent's after it
    changes: list[Change]


class TrackRecord:
    """The records of one source partition, by agent and domain."""

    def __init__(self, topic_id: str = "", known_from: int | None = None) -> None:
        """`known_from`: the offset from which on the partition was read; None: all verdicts that are given count."""
        self._topic_id = topic_id
        self.known_from = known_from
        # In the order of their latest verdicts.
        self._records: OrderedDict[tuple[str, str], AgentRecord] = OrderedDict()
        self.firsts = 0  # sum of the first verdicts' successes, millionths

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def standing(self, agent_id: str, domain: str) -> Standing:
        """Return the standing of an agent in a domain (see `standing`)."""
        return standing(self.tally(_name(agent_id, domain)), len(self._records), self.firsts)

    def weigh(self, verdict: Verdict, issued_ms: int, offset: int) -> Weighed:
        """Return the effect of the verdict at a source offset. Nothing changes before `keep`."""
        name = _name(verdict.agent_id, verdict.task_domain)
        old = self._records.get(name)
        new = None
        if not self._may_be_gone(verdict):
            start = old or AgentRecord(RECORD_VERSION, *name, self._topic_id, -1, b"", None, b"")
            new = start.with_verdict(_order(verdict, issued_ms), offset, verdict.millionths)
        if new is None:
            return Weighed(None, 0, self.standing(*name), [])
        records, gained = len(self._records), new.first_success
        changes: list[Change] = [(new.key, new)]
        if old is not None:
            gained -= old.first_success
        elif records < MAX_RECORDS:
            records += 1
        else:
            oldest = next(iter(self._records.values()))
            gained -= oldest.first_success
            changes.append((oldest.key, None))
        return Weighed(new, gained, standing(new.tally, records, self.firsts + gained), changes)

    def _may_be_gone(self, verdict: Verdict) -> bool:
        """Return whether a record that had this verdict may be gone; never known for a verdict without an offset."""
        if verdict.offset is None or self.known_from is None:
            return False
        oldest = next(iter(self._records.values())).last_offset if len(self._records) >= MAX_RECORDS else 0
        return verdict.offset < max(oldest, self.known_from)

    def keep(self, weighed: Weighed) -> None:
        """Apply the verdict weighed last. Nothing here may fail."""
        record = weighed.record
        if record is None:
            return
        self.firsts += weighed.gained
        self._put(record)
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def add(self, verdict: Verdict, issued_ms: int, offset: int) -> Weighed:
        """Weigh and keep the verdict at a source offset."""
        weighed = self.weigh(verdict, issued_ms, offset)
        self.keep(weighed)
        return weighed

    def restore(self, stored: Iterable[AgentRecord], below: int) -> list[Row]:
        """Restore the records as they were before the source offset `below`, where the partition continues.

        Return the rows that the next commit must write: those of records with verdicts at or past that offset, or of
        another topic. So after a reset of the offset, no verdict survives that is refused when read again.
        """
        rows: list[Row] = []
        restored = []
        for now in stored:
            record = now.before(below) if now.topic_id == self._topic_id else None
            if record is None:
                rows.append((now.key, None))
                continue
            restored.append(record)
            if record.last_offset != now.last_offset:
                rows.append(encode_row((record.key, record)))
        for record in sorted(restored, key=lambda record: record.last_offset):
            self.firsts += record.first_success
            self._put(record)
        overflow = [self._records.popitem(last=False)[1] for _ in range(len(self._records) - MAX_RECORDS)]
        self.firsts -= sum(record.first_success for record in overflow)
        return rows + [(record.key, None) for record in overflow]

    def listed(self) -> Iterator[tuple[str, str, Standing]]:
        """Yield agent, domain and standing of each record, in the order of their latest verdicts."""
        for agent_id, domain in self._records:
            yield agent_id, domain, self.standing(agent_id, domain)

    def tally(self, name: tuple[str, str]) -> Tally:
        """Return the sums over the record of an agent and domain."""
        record = self._records.get(name)
        return NOTHING if record is None else record.tally

    def _put(self, record: AgentRecord) -> None:
        name = record.name
        self._records[name] = record
        self._records.move_to_end(name)


def _name(agent_id: str, domain: str) -> tuple[str, str]:
    return agent_id[:CACHED_ID_LENGTH], domain[:CACHED_ID_LENGTH]
