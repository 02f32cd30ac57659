"""Forgetting: which changelog records of a partition belong to a trace or an agent, and the requests that removed them.

Lives here: the index of a partition's live changelog records, the record of each processed request, and what a request
removes. Must not live here: the control record and the receipt (control.py), vectors (novelty.py), the rules of passes
(passes.py), Kafka clients.

Each processed request is a record on the changelog partition, in the transaction that removes the entries. A restore
needs it: the next sequence number must not fall when the newest entry is forgotten. It names what was asked by hashes,
so that the ids themselves do not stay on the compacted topic.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, UnsetType

from worker.core.control import MAX_BEHIND, MAX_TRACE_IDS, ForgetRequest, Removed, copied, too_old
from worker.core.identity import IdentityKey
from worker.core.novelty import Label, VectorCache
from worker.core.passes import Offset, PassNumber, StreamTime
from worker.core.trace import InvalidTrace

FORGOTTEN_PREFIX: Final = b"forgotten:"
"""The key of a processed request is `forgotten:PASS:OFFSET`, with the offset of its control record."""

FORGOTTEN_VERSION: Final = 1

MAX_REQUESTS: Final = 2048
"""Most processed requests that a changelog partition keeps; more than can be past the committed offset."""

_IdHash = Annotated[bytes, Meta(min_length=16, max_length=16)]

Row = tuple[bytes, bytes | None]
"""Key and value of a changelog record; None is a tombstone."""


class Processed(msgspec.Struct, frozen=True, array_like=True):
    """A request that a partition has processed: where, in which pass, and what it matches.

    `next_sequence`: of the cache at that record, for entries of `model`. `stream_time_ms`: None before the first trace.
    `hashes`: of trace ids or of an agent id (see `id_hash`). They match entries of lower offsets alone. `end_offsets`:
    those of the control record.
    """

    version: int
    request_id: Annotated[str, Meta(max_length=64)]
    source_offset: Offset
    pass_number: PassNumber
    stream_time_ms: StreamTime | None
    next_sequence: Offset
    model: IdentityKey
    hashes: Annotated[frozenset[_IdHash], Meta(max_length=MAX_TRACE_IDS)]
    end_offsets: tuple[Offset, ...] = ()

    def key(self) -> bytes:
        """Return the key of its record."""
        return b"%s%d:%d" % (FORGOTTEN_PREFIX, self.pass_number, self.source_offset)

    def matches(self, label: Label) -> bool:
        """Whether an entry was asked to be forgotten, by its trace or by its agent."""
        return id_hash("trace", label.trace_id) in self.hashes or id_hash("agent", label.agent_id) in self.hashes


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Processed)


@functools.lru_cache(4096)  # a fleet has few agents
def id_hash(kind: str, name: str) -> bytes:
    """Return the hash, 16 bytes, of an id; `kind`: trace or agent."""
    return hashlib.blake2b(f"{kind}:{name}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


class RemovedBy:
    """Tells which entries of a partition the requests have removed: those that they match, of lower offsets."""

    def __init__(self, requests: Iterable[Processed]) -> None:
        self._ends: dict[bytes, int] = {}
        for request in requests:
            for each in request.hashes:
                self._ends[each] = max(self._ends.get(each, 0), request.source_offset)

    def has(self, trace_id: str, agent_id: str, offset: int) -> bool:
        """Whether an entry is among them."""
        if not self._ends:
            return False
        ends = (self._ends.get(id_hash("trace", trace_id), 0), self._ends.get(id_hash("agent", agent_id), 0))
        return offset < max(ends)


def encode_processed(processed: Processed) -> bytes:
    """Return the record value of a processed request."""
    return _encoder.encode(processed)


def decode_processed(value: bytes, key: bytes | None = None) -> Processed:
    """Read a processed request. Raises ValueError for what `encode_processed` of this version did not write.

    `key`: that of its record, which must be its own.
    """
    try:
        processed = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the record of a processed request: {error}") from error
    if processed.version != FORGOTTEN_VERSION:
        raise ValueError(f"request of version {processed.version}, this worker reads version {FORGOTTEN_VERSION}")
    if key is not None and processed.key() != key:
        raise ValueError("the record of a processed request has the key of another one")
    return processed


class Kept(NamedTuple):
    """A live changelog record with an entry: the entry's sequence number and label."""

    sequence: int
    label: Label


class Forgotten(NamedTuple):
    """What a request did: the changelog's rows, in order, the entries that were removed, and the request's record."""

    rows: list[Row]
    removed: list[Removed]
    processed: Processed


class Forgetting:
    """What one partition needs to forget: an index of its changelog records, and the requests that it has processed.

    `kept`: the live records with an entry, by key: those of the cache, of expired entries, of other models and
    capacities. `processed`: in rising order of offset. `ttl_ms`: of the cache's entries, in stream time.
    """

    def __init__(
        self,
        kept: Mapping[bytes, Kept],
        processed: Iterable[Processed],
        pass_number: int,
        model: str,
        ttl_ms: int | None,
    ) -> None:
        self._kept = dict(kept)
        self.processed = list(processed)
        self._pass_number = pass_number
        self._model = model
        self._ttl_ms = ttl_ms

    def note(self, key: bytes, sequence: int, label: Label) -> None:
        """Note an entry that is about to be written under a key."""
        self._kept[key] = Kept(sequence, label)

    def earlier(self, request: ForgetRequest, offset: int) -> int | None:
        """Return the offset below `offset` where the same request was processed; None if there is none."""
        found = (it.source_offset for it in self.processed if it.request_id == request.request_id)
        return next((it for it in found if it < offset), None)

    def refusal(self, request: ForgetRequest, offset: int) -> InvalidTrace | None:
        """Return why the control record at an offset is not honoured; None if it is.

        It is a copy, or may be one: if the list is full, a request that was processed before all of it has left it.
        """
        earlier = self.earlier(request, offset)
        if earlier is not None:
            return copied(request, earlier)
        before = [it.source_offset for it in self.processed if it.source_offset < offset]
        if len(before) >= MAX_REQUESTS and request.end_offsets[request.partition] < before[0]:
            return too_old(request, len(before))
        return None

    def forget(self, request: ForgetRequest, cache: VectorCache, offset: int, stream_time_ms: int | None) -> Forgotten:
        """Remove the request's entries from the cache and from the changelog; `offset`: the control record's."""
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
        """Add a request; return those that no longer matter."""
        stays = [each for each in self.processed if not self._outdates(newest, each)]
        stays = [*stays[-MAX_REQUESTS + 1 :], newest]
        keys = {each.key() for each in stays}
        outdated = [each for each in self.processed if each.key() not in keys]
        self.processed = stays
        return outdated

    def _outdates(self, newest: Processed, request: Processed) -> bool:
        """Whether what a request matched has expired, and a copy of its record is refused for its offset."""
        if newest.source_offset <= request.source_offset + MAX_BEHIND:
            return False
        if self._ttl_ms is None or newest.stream_time_ms is None:
            return False
        return request.stream_time_ms is None or newest.stream_time_ms - request.stream_time_ms >= self._ttl_ms


def request_hashes(request: ForgetRequest) -> frozenset[bytes]:
    """Return the hashes of what a request matches."""
    if isinstance(request.trace_ids, UnsetType):
        return frozenset([id_hash("agent", str(request.agent_id))])
    return frozenset(id_hash("trace", it) for it in request.trace_ids)
