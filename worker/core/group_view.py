"""The group view: the committed entries of all partitions, for comparing traces across partitions.

A foreign entry counts under the same conditions as an entry of a restored cache: its model is ours, its pass counts at
its source offset, and it is among the newest `capacity` of its partition. It expires by the stream time of the
partition whose trace is being scored.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from worker.core.changelog import PROBE_PREFIX, CorruptEntry, Entry, Probes, Restored, decode, impossible
from worker.core.forgetting import FORGOTTEN_PREFIX, Processed, decode_processed, end_of_validity, id_hash
from worker.core.novelty import Label, Neighbour, Vector
from worker.core.passes import MARKER_KEY, Chain, Found, at_offset, decode_marker, written_at
from worker.core.scan import FROM_ROWS, Matrix, can_scan_codes
from worker.core.track_record import RECORD_PREFIX, TrackRecord

FREE: Final = -(2**63)  # the time of a row without an entry: older than every entry

_NO_LABEL: Final = Label("")


@dataclass(slots=True)
class _Partition:
    """What the view holds of one partition's changelog."""

    chain: Chain  # its passes
    newest: int = -1  # the greatest sequence number of an entry that counts
    rows: dict[bytes, int] = field(default_factory=dict)  # of the matrix, by key
    order: deque[tuple[int, bytes]] = field(default_factory=deque)  # (sequence, key), in rising order


def memory_bytes(entries: int, dimensions: int) -> int:
    """Return the bytes of this many entries, without ids: vectors, int8 codes, times and partitions."""
    codes = dimensions + 8 if entries >= FROM_ROWS and can_scan_codes(dimensions) else 0
    return entries * (4 * dimensions + 4 + codes + 12)


@dataclass(slots=True)
class _Known:
    request: Processed
    done: dict[int, int] = field(default_factory=dict)  # offset of its control record, by partition
    keys: dict[int, bytes] = field(default_factory=dict)  # key of its changelog record, by partition

    def forgets(self, partition: int, label: Label) -> bool:
        """Return whether an entry must not be compared: it matches, and precedes its partition's control record.

        Until that record is processed, every offset at which it could still be honoured counts.
        """
        end = self.done.get(partition)
        if end is None:
            end = end_of_validity(self.request.end_offsets, partition)
        return label.offset is not None and label.offset < end and self.request.matches(label)


class _Requests:
    """The requests to forget seen so far, in the worker's own partitions or in the changelog."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._by_hash: dict[bytes, list[_Known]] = {}

    def add(self, partition: int, request: Processed) -> _Known:
        """Add a request processed by a partition."""
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = _Known(request)
            for each in request.hashes:
                self._by_hash.setdefault(each, []).append(known)
        known.keys[partition] = request.key()
        return known

    def done(self, partition: int, request: Processed) -> None:
        """Note that everything before a partition's control record has been read."""
        self._known[request.request_id].done[partition] = request.source_offset

    def unload(self, partition: int) -> None:
        """Note that a partition is being read again."""
        for known in self._known.values():
            known.done.pop(partition, None)
            known.keys.pop(partition, None)

    def expire(self, partition: int, key: bytes) -> None:
        """Note that a partition has deleted its record of a request; drop the request once no partition has one."""
        for request_id, known in list(self._known.items()):
            if known.keys.get(partition) == key:
                del known.keys[partition]
            if not known.keys:
                del self._known[request_id]
                for each in known.request.hashes:
                    self._by_hash[each].remove(known)
                    if not self._by_hash[each]:
                        del self._by_hash[each]

    def forget(self, partition: int, label: Label) -> bool:
        """Return whether an entry must not be compared."""
        if not self._known:
            return False
        hashes = (id_hash("trace", label.trace_id), id_hash("agent", label.agent_id))
        return any(known.forgets(partition, label) for each in hashes for known in self._by_hash.get(each, ()))


class GroupView:
    """The committed entries of all partitions: the `max_entries` with the latest stream times."""

    def __init__(
        self,
        model: str,  # the key of the embedder's identity
        dimensions: int,
        capacity: int,  # of each partition's cache
        ttl_ms: int | None,
        max_entries: int,
        probes: Probes | None = None,
    ) -> None:
        self.probes = probes
        self._model = model
        self._dimensions = dimensions
        self._capacity = capacity
        self._ttl_ms = ttl_ms
        self._max_entries = max_entries
        self._partitions: dict[int, _Partition] = {}
        self._matrix = Matrix(max_entries, dimensions)
        self._times = np.full(max_entries, FREE, dtype=np.int64)
        self._owners = np.full(max_entries, -1, dtype=np.int32)
        self._labels = [_NO_LABEL] * max_entries
        self._keys = [b""] * max_entries
        self._sequences = [-1] * max_entries
        self._nothing = np.zeros(dimensions, dtype=np.float32)
        self._used = 0  # rows ever written: the first ones
        self._free: list[int] = []  # the ones without an entry; a heap, so that the first rows are reused first
        self._requests = _Requests()
        self.corrupt = 0  # damaged records, which were skipped
        self.records: dict[int, TrackRecord] = {}  # the agents' track records, by partition

    def __len__(self) -> int:
        """Return the number of entries held, including expired ones."""
        return self._used - len(self._free)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the entries (see `memory_bytes`)."""
        return memory_bytes(self._used, self._dimensions)

    def load(self, partition: int, restored: Restored, found: Found | None = None) -> None:
        """Replace a partition's entries with its changelog, read to the end.

        `found`: where the partition continues; None: its track records do not count.
        """
        self.records[partition] = TrackRecord()
        if found is not None:
            self.records[partition] = TrackRecord(found.topic_id or "")
            self.records[partition].restore(restored.records, found.offset)
        for key in list(self._of(partition).rows) if partition in self._partitions else ():
            self._remove(partition, key)
        self._partitions[partition] = _Partition(restored.chain)
        self._requests.unload(partition)
        for request in restored.requests:
            self._processed(partition, request)
        for entry in restored.entries:
            if entry.sequence >= restored.next_sequence - self._capacity:  # the newest may be forgotten
                self._add(partition, restored.keys[entry.sequence], entry)
        self._of(partition).newest = max(self._of(partition).newest, restored.next_sequence - 1)

    def apply(self, partition: int, key: bytes | None, value: bytes | None, position: int) -> bool:
        """Apply a partition's next record; return False if the passes changed, so that it must be loaded again.

        Raises OtherModelError if another worker's probes come from another model.
        """
        if key is None:
            return True
        if key.startswith(PROBE_PREFIX):
            self._check_probe(key, value)
            return True
        if key == MARKER_KEY:
            return self._apply_marker(partition, value)
        if key.startswith(FORGOTTEN_PREFIX):
            self._apply_request(partition, key, value)
            return True
        if key.startswith(RECORD_PREFIX):
            self._apply_record(partition, key, value)
            return True
        self._remove(partition, key)
        if value is None:
            return True
        try:
            entry = decode(value)
        except CorruptEntry:
            self.corrupt += 1
            return True
        if not self._counts(partition, entry, position):
            return True
        if impossible(entry):
            self.corrupt += 1
            return True
        if entry.sequence <= self._of(partition).newest:
            return False
        self._add(partition, key, entry)
        return True

    def forget(self, partition: int, request: Processed) -> None:
        """Drop the entries that match a request, which one of this worker's partitions has processed.

        Everything visible of a partition that has not processed it yet precedes that partition's control record.
        """
        known = self._requests.add(partition, request)
        rows = [row for row in range(self._used) if known.forgets(int(self._owners[row]), self._labels[row])]
        for row in rows:
            self._remove(int(self._owners[row]), self._keys[row])

    def nearest(self, partition: int, query: Vector, now_ms: int) -> Neighbour | None:
        """Return the most similar live entry of the other partitions; None if there is none.

        `query`: a vector that `unit` returned. `now_ms`: the partition's stream time. A tie goes to the earliest stream
        time, then to the lowest partition and offset.
        """
        dead_before = FREE if self._ttl_ms is None else now_ms - self._ttl_ms
        live = (self._times[: self._used] > dead_before) & (self._owners[: self._used] != partition)
        found = self._matrix.all_nearest(query, live)
        if found is None:
            return None
        row = min((self._age(int(it)), int(it)) for it in found[0])[1]
        label = self._labels[row]
        return Neighbour(label.trace_id, max(-1.0, found[1]), int(self._owners[row]), label.offset)

    def _age(self, row: int) -> tuple[int, int, int]:
        return int(self._times[row]), int(self._owners[row]), self._sequences[row]

    def _of(self, partition: int) -> _Partition:
        return self._partitions[partition]

    def _check_probe(self, key: bytes, value: bytes | None) -> None:
        if self.probes is None or value is None:
            return
        try:
            self.probes.check(key, value)
        except CorruptEntry:
            self.corrupt += 1

    def _apply_marker(self, partition: int, value: bytes | None) -> bool:
        try:
            chain = decode_marker(value or b"").chain
        except ValueError:
            self.corrupt += value is not None
            return False
        known = self._of(partition).chain
        if [(it.number, it.start) for it in chain] != [(it.number, it.start) for it in known]:
            return False
        self._of(partition).chain = chain
        return True

    def _apply_request(self, partition: int, key: bytes, value: bytes | None) -> None:
        if value is not None:
            try:
                self._processed(partition, decode_processed(value, key))
            except ValueError:
                self.corrupt += 1
            return
        self._requests.expire(partition, key)

    def _apply_record(self, partition: int, key: bytes, value: bytes | None) -> None:
        try:
            self.records[partition].apply(key, value)
        except ValueError:
            self.corrupt += 1

    def _processed(self, partition: int, request: Processed) -> None:
        self.forget(partition, request)
        self._requests.done(partition, request)

    def _counts(self, partition: int, entry: Entry, position: int) -> bool:
        if entry.model != self._model or len(entry.vector) != 4 * self._dimensions:
            return False
        chain = self._of(partition).chain
        number = written_at(chain, position) if entry.pass_number is None else entry.pass_number
        segment = at_offset(chain, entry.source_offset)
        return segment is not None and number == segment.number

    def _add(self, partition: int, key: bytes, entry: Entry) -> None:
        """Add the partition's next entry and drop the one that is now `capacity` behind."""
        of = self._of(partition)
        of.newest = entry.sequence
        while of.order and of.order[0][0] <= entry.sequence - self._capacity:
            sequence, old = of.order.popleft()
            row = of.rows.get(old)
            if row is not None and self._sequences[row] == sequence:
                self._remove(partition, old)
        label = entry.label()
        if self._requests.forget(partition, label):
            return
        row = self._row_for(entry.stream_time_ms)
        if row is None:
            return
        self._matrix.put(row, entry.array())
        self._times[row] = entry.stream_time_ms
        self._owners[row] = partition
        self._labels[row] = label
        self._keys[row] = key
        self._sequences[row] = entry.sequence
        of.rows[key] = row
        of.order.append((entry.sequence, key))

    def _row_for(self, time_ms: int) -> int | None:
        """Return a row for an entry of this time; None if no row is free and all entries are later."""
        if not self._free:
            if self._used < self._max_entries:
                self._used += 1
                return self._used - 1
            oldest = int(self._times[: self._used].argmin())
            if self._times[oldest] > time_ms:
                return None
            self._remove(int(self._owners[oldest]), self._keys[oldest])
        return heapq.heappop(self._free)

    def _remove(self, partition: int, key: bytes) -> None:
        """Remove a key's entry, if there is one, and overwrite its vector."""
        row = self._of(partition).rows.pop(key, None)
        if row is None:
            return
        self._matrix.put(row, self._nothing)
        self._times[row] = FREE
        self._owners[row] = -1
        self._labels[row] = _NO_LABEL
        self._keys[row] = b""
        self._sequences[row] = -1
        heapq.heappush(self._free, row)
