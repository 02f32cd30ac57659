"""Requests to forget, a kind of control record (control.py): when they count, what they remove, and their receipts.

A copy of a request does no harm: a request is bound to a topic id (a recreated topic has the same name and offsets),
a partition, and a range of offsets.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from worker.core.control import bad_control, check_signature
from worker.core.novelty import CACHED_ID_LENGTH, Label, VectorCache
from worker.core.passes import Offset, PassNumber, StreamTime
from worker.core.records import FORGOTTEN, IdentityKey, OutputRecord, SourceRecord
from worker.core.trace import InvalidTrace
from worker.version import __version__

MAX_BEHIND: Final = 10_000
"""A control record is honoured up to this many offsets past the end that it was signed for: others may write in the
meantime, and transaction markers take offsets. A record further on is a copy."""

MAX_TRACE_IDS: Final = 500
"""Most trace ids of a request: keeps body, receipt and changelog record below Kafka's default limit of 1 MB."""

LISTED_BYTES: Final = 262_144  # a receipt lists removed entries up to about this size; its count covers all
REQUEST_VERSION: Final = 2  # of the body. Version 1 lacked the topic's id and is never honoured

_Id = Annotated[str, Meta(min_length=1, max_length=CACHED_ID_LENGTH)]


class ForgetRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a control record (schemas/forget.schema.json), with either `trace_ids` or `agent_id`."""

    version: Literal[2]
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    issued_at: Annotated[str, Meta(min_length=1, max_length=40)]
    topic: Annotated[str, Meta(min_length=1, max_length=249)]
    topic_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{22}$")]  # Kafka's, as its tools print it
    partition: Annotated[int, Meta(ge=0)]
    end_offsets: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]  # at issue time, by partition
    trace_ids: Annotated[list[_Id], Meta(min_length=1, max_length=MAX_TRACE_IDS)] | UnsetType = UNSET
    agent_id: _Id | UnsetType = UNSET  # like trace ids, cut to the length that the cache keeps

    def matcher(self) -> Callable[[Label], bool]:
        """Return a predicate: whether an entry is to be forgotten."""
        if isinstance(self.trace_ids, UnsetType):
            agent_id = self.agent_id
            return lambda label: label.agent_id == agent_id
        trace_ids = frozenset(self.trace_ids)
        return lambda label: label.trace_id in trace_ids


class _Versioned(Struct):
    version: int


class Removed(Struct, frozen=True):
    """An entry that was forgotten."""

    id: str  # of its trace
    offset: int | None
    sequence: int
    cached: bool  # whether it was in the cache, and not only on the changelog


class _At(Struct, frozen=True):
    topic: str
    partition: int
    offset: int


class _Asked(Struct, frozen=True, omit_defaults=True):
    trace_ids: list[str] | UnsetType = UNSET
    agent_id: str | UnsetType = UNSET


class _Count(Struct, frozen=True):
    count: int
    cached: int
    listed: int
    entries: list[Removed]


class Receipt(Struct, frozen=True):
    """The value of a receipt (schemas/forget-receipt.schema.json)."""

    version: Literal[1]
    request_id: str
    group: str
    issued_at: str
    source: _At  # the control record's
    asked: _Asked
    removed: _Count
    worker_version: str


_versions = msgspec.json.Decoder(_Versioned)
_decoder = msgspec.json.Decoder(ForgetRequest)
_receipts = msgspec.json.Decoder(Receipt)
_encoder = msgspec.json.Encoder()


def encode_request(request: ForgetRequest) -> bytes:
    """Return the value of a control record."""
    return _encoder.encode(request)


def read_request(record: SourceRecord, keys: Sequence[bytes], topic_id: str | None) -> ForgetRequest:
    """Return the request in a control record. Raises InvalidTrace if it must not be honoured.

    `topic_id`: the id of the record's topic; None if the broker has no topic ids: then no request is honoured.
    """
    body = record.value or b""
    check_signature(record.headers, body, keys, "KP_FORGET_KEY")
    try:
        if _versions.decode(body).version == 1:
            raise bad_control(
                "the request has version 1, which does not name the topic's id, so it may be a copy from another topic "
                "of this name: run kp-worker forget again, with the workers' version"
            )
        request = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_control(f"the value is not a request to forget (schemas/forget.schema.json): {error}") from error
    if isinstance(request.trace_ids, UnsetType) == isinstance(request.agent_id, UnsetType):
        raise bad_control("give either trace_ids or agent_id")
    if (request.topic, request.partition) != (record.topic, record.partition):
        raise bad_control("the record was signed for another topic or partition")
    if topic_id is None:
        raise bad_control(
            "the brokers report no id of the topic (Kafka has ids since 2.8), so this may be a copy from another"
        )
    if request.topic_id != topic_id:
        raise bad_control(
            f"the record was signed for another topic of this name, with the id {request.topic_id}. This one has the "
            f"id {topic_id}: it was recreated, or is on another cluster; run kp-worker forget again"
        )
    end = request.end_offsets[record.partition] if record.partition < len(request.end_offsets) else None
    if end is None or not end <= record.offset < end_of_validity(request.end_offsets, record.partition):
        raise bad_control(
            f"the record was signed for the end {end} of the partition, and is honoured up to {MAX_BEHIND} offsets "
            "behind it: run kp-worker forget again"
        )
    return request


def end_of_validity(end_offsets: Sequence[int], partition: int) -> int:
    """Return the first offset of a partition at which a control record is no longer honoured; 0: never honoured."""
    return end_offsets[partition] + MAX_BEHIND + 1 if partition < len(end_offsets) else 0


def copied(request: ForgetRequest, earlier: int) -> InvalidTrace:
    """Return why a second control record of one request is a dead letter; `earlier`: the first one's offset."""
    return bad_control(f"request {request.request_id} was processed at offset {earlier}; this is a copy")


def too_old(request: ForgetRequest, newer: int) -> InvalidTrace:
    """Return why a request signed before the last `newer` ones is a dead letter: it may be a copy."""
    return bad_control(
        f"request {request.request_id} was signed before the last {newer} requests of this partition, so it may be a "
        "copy: run kp-worker forget again"
    )


def receipt_record(
    record: SourceRecord, request: ForgetRequest, group: str, removed: Iterable[Removed]
) -> OutputRecord:
    """Build the receipt, with the request id as its key and without a timestamp, which a topic could refuse."""
    entries = sorted(removed, key=lambda it: -1 if it.offset is None else it.offset)
    listed, size = 0, 0
    for entry in entries:
        size += len(_encoder.encode(entry)) + 1
        if size > LISTED_BYTES:
            break
        listed += 1
    value = Receipt(
        version=1,
        request_id=request.request_id,
        group=group,
        issued_at=request.issued_at,
        source=_At(record.topic, record.partition, record.offset),
        asked=_Asked(request.trace_ids, request.agent_id),
        removed=_Count(len(entries), sum(it.cached for it in entries), listed, entries[:listed]),
        worker_version=__version__,
    )
    return OutputRecord(FORGOTTEN, request.request_id.encode(), _encoder.encode(value), [], None)


def read_receipt(value: bytes | None) -> Receipt | None:
    """Read a receipt; None for anything else."""
    try:
        return _receipts.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


FORGOTTEN_PREFIX: Final = b"forgotten:"
"""The key of a processed request is `forgotten:PASS:OFFSET`, with its control record's offset."""

FORGOTTEN_VERSION: Final = 1

MAX_REQUESTS: Final = 2048
"""Most processed requests kept on a changelog partition: more than can be past the committed offset."""

_IdHash = Annotated[bytes, Meta(min_length=16, max_length=16)]

Row = tuple[bytes, bytes | None]  # key and value of a changelog record; None is a tombstone


class Processed(msgspec.Struct, frozen=True, array_like=True):
    """A request that a partition has processed. It matches only entries of lower offsets."""

    version: int
    request_id: Annotated[str, Meta(max_length=64)]
    source_offset: Offset  # its control record's
    pass_number: PassNumber
    stream_time_ms: StreamTime | None  # None before the first trace
    next_sequence: Offset  # the cache's at that offset, for entries of `model`
    model: IdentityKey
    hashes: Annotated[frozenset[_IdHash], Meta(max_length=MAX_TRACE_IDS)]  # `id_hash` of trace ids, or of an agent id
    end_offsets: tuple[Offset, ...] = ()  # the control record's

    def key(self) -> bytes:
        """Return the key of its changelog record."""
        return b"%s%d:%d" % (FORGOTTEN_PREFIX, self.pass_number, self.source_offset)

    def matches(self, label: Label) -> bool:
        """Return whether an entry was asked to be forgotten, by its trace or by its agent."""
        return id_hash("trace", label.trace_id) in self.hashes or id_hash("agent", label.agent_id) in self.hashes


_packer = msgspec.msgpack.Encoder(order="deterministic")
_unpacker = msgspec.msgpack.Decoder(Processed)


@functools.lru_cache(4096)  # a fleet has few agents
def id_hash(kind: str, name: str) -> bytes:
    """Return the 16-byte hash of an id. `kind`: trace or agent."""
    return hashlib.blake2b(f"{kind}:{name}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


class RemovedBy:
    """The entries of a partition that requests have removed: matching ones at lower offsets."""

    def __init__(self, requests: Iterable[Processed]) -> None:
        self._ends: dict[bytes, int] = {}
        for request in requests:
            for each in request.hashes:
                self._ends[each] = max(self._ends.get(each, 0), request.source_offset)

    def has(self, trace_id: str, agent_id: str, offset: int) -> bool:
        """Return whether an entry is among them."""
        if not self._ends:
            return False
        ends = (self._ends.get(id_hash("trace", trace_id), 0), self._ends.get(id_hash("agent", agent_id), 0))
        return offset < max(ends)


def encode_processed(processed: Processed) -> bytes:
    """Return the record value of a processed request."""
    return _packer.encode(processed)


def decode_processed(value: bytes, key: bytes | None = None) -> Processed:
    """Read a processed request, whose record must have this key. Raises ValueError."""
    try:
        processed = _unpacker.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the record of a processed request: {error}") from error
    if processed.version != FORGOTTEN_VERSION:
        raise ValueError(f"request of version {processed.version}, this worker reads version {FORGOTTEN_VERSION}")
    if key is not None and processed.key() != key:
        raise ValueError("the record of a processed request has the key of another one")
    return processed


class Kept(NamedTuple):
    """The entry in a live changelog record."""

    sequence: int
    label: Label


class Forgotten(NamedTuple):
    """The effect of a request."""

    rows: list[Row]  # for the changelog, in order
    removed: list[Removed]
    processed: Processed


class Forgetting:
    """The state that one partition needs to forget: an index of its changelog records, and its processed requests."""

    def __init__(
        self,
        kept: Mapping[bytes, Kept],  # all live records with an entry, also if expired or of another model or capacity
        processed: Iterable[Processed],  # in rising order of offset
        pass_number: int,
        model: str,
        ttl_ms: int | None,  # of the cache's entries, in stream time
    ) -> None:
        self._kept = dict(kept)
        self.processed = list(processed)
        self._pass_number = pass_number
        self._model = model
        self._ttl_ms = ttl_ms

    def note(self, key: bytes, sequence: int, label: Label) -> None:
        """Note an entry about to be written under a key."""
        self._kept[key] = Kept(sequence, label)

    def earlier(self, request: ForgetRequest, offset: int) -> int | None:
        """Return the offset below `offset` where the same request was processed; None if there is none."""
        found = (it.source_offset for it in self.processed if it.request_id == request.request_id)
        return next((it for it in found if it < offset), None)

    def refusal(self, request: ForgetRequest, offset: int) -> InvalidTrace | None:
        """Return why the control record at an offset is not honoured; None if it is.

        It is a copy, or may be one: once the list is full, requests processed before its first one have left it.
        """
        earlier = self.earlier(request, offset)
        if earlier is not None:
            return copied(request, earlier)
        before = [it.source_offset for it in self.processed if it.source_offset < offset]
        if len(before) >= MAX_REQUESTS and request.end_offsets[request.partition] < before[0]:
            return too_old(request, len(before))
        return None

    def forget(self, request: ForgetRequest, cache: VectorCache, offset: int, stream_time_ms: int | None) -> Forgotten:
        """Remove the request's entries from cache and changelog. `offset`: the control record's."""
        matches = request.matcher()
        cached = dict(cache.forget(matches))
        gone = {key: kept for key, kept in self._kept.items() if matches(kept.label)}
        for key in gone:
            del self._kept[key]
        rows: list[Row] = [(key, None) for key in gone]
        removed = [
            Removed(label.trace_id, label.offset, sequence, cached.get(sequence) == label)
            for sequence, label in gone.values()
        ]
        done = Processed(
            FORGOTTEN_VERSION,
            request.request_id,
            offset,
            self._pass_number,
            stream_time_ms,
            cache.next_sequence,
            self._model,
            request_hashes(request),
            tuple(request.end_offsets),
        )
        rows.append((done.key(), encode_processed(done)))
        rows += [(old.key(), None) for old in self._outdated(done)]
        return Forgotten(rows, removed, done)

    def _outdated(self, newest: Processed) -> list[Processed]:
        stays = [each for each in self.processed if not self._outdates(newest, each)]
        stays = [*stays[-MAX_REQUESTS + 1 :], newest]
        keys = {each.key() for each in stays}
        outdated = [each for each in self.processed if each.key() not in keys]
        self.processed = stays
        return outdated

    def _outdates(self, newest: Processed, request: Processed) -> bool:
        """Return whether a request can go: its entries have expired, and a copy would be refused for its offset."""
        if newest.source_offset <= request.source_offset + MAX_BEHIND:
            return False
        if self._ttl_ms is None or newest.stream_time_ms is None:
            return False
        return request.stream_time_ms is None or newest.stream_time_ms - request.stream_time_ms >= self._ttl_ms


def request_hashes(request: ForgetRequest) -> frozenset[bytes]:
    """Return the hashes of the ids that a request matches."""
    if isinstance(request.trace_ids, UnsetType):
        return frozenset([id_hash("agent", str(request.agent_id))])
    return frozenset(id_hash("trace", it) for it in request.trace_ids)
