"""The worker's memory budget for all partitions: uncommitted records, and unpacked batches.

Each share is half of the budget. Commits release bytes of `records` and need no room. A batch releases its bytes of
`batches` when its records are taken out, which needs room in `records` only: so there is no circular wait. Partitions
without room queue, first come, first served. An empty share accepts any size.

Records are fetched in the consumer's thread and committed in the main thread; a lock protects the counts.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


class NoRoom(Exception):
    """The share has no room now. Wait for `share.turn(key)`, then ask again."""

    def __init__(self, share: Share, key: Hashable) -> None:
        super().__init__(key)
        self.share = share
        self.key = key


@dataclass(slots=True)
class _Waiter:
    need: int
    loop: asyncio.AbstractEventLoop | None = None
    event: asyncio.Event | None = None


class Share:
    """Bytes that may be held at once, and the queue of partitions that wait for room."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._queue: OrderedDict[Hashable, _Waiter] = OrderedDict()
        self._lock = threading.RLock()  # the garbage collector may end a lease at any allocation

    def __len__(self) -> int:
        """Return the length of the queue."""
        return len(self._queue)

    def room(self, key: Hashable, need: int = 1) -> int | None:
        """Return how many bytes `key` may take, None: any number. Otherwise queue it and raise NoRoom.

        The caller then calls `take` with what it took. `need`: the least that it can use.
        """
        with self._lock:
            first = next(iter(self._queue), key)
            if first == key and self._fits(need):
                self.leave(key)  # wakes the next one too: this one may need nothing
                return self.limit - self.held if self.held else None
            self._wait(key, need)
        raise NoRoom(self, key)

    def no_room(self, key: Hashable, need: int) -> NoRoom:
        """Return the error for a caller that needs more room than it got; it keeps its place in the queue."""
        with self._lock:
            self._wait(key, need)
            self._queue.move_to_end(key, last=False)
        return NoRoom(self, key)

    def take(self, size: int) -> None:
        """Add to the bytes held, whether they fit or not."""
        with self._lock:
            self.held += size
            self._wake_first()

    def give_back(self, size: int) -> None:
        """Subtract from the bytes held; wake the first in the queue if it has room then."""
        with self._lock:
            self.held -= size
            self._wake_first()

    def leave(self, key: Hashable) -> None:
        """Remove `key` from the queue."""
        with self._lock:
            if self._queue.pop(key, None) is not None:
                self._wake_first()

    def forget_waiting(self) -> None:
        """Empty the queue, because the assigned partitions change. Those that still wait ask again."""
        with self._lock:
            waiters = list(self._queue.values())
            self._queue.clear()
        for waiter in waiters:
            _wake(waiter)

    async def turn(self, key: Hashable) -> None:
        """Wait until the queued `key` may ask again."""
        while True:
            with self._lock:
                waiter = self._queue.get(key)
                if waiter is None or (next(iter(self._queue)) == key and self._fits(waiter.need)):
                    return
                waiter.loop, waiter.event = asyncio.get_running_loop(), asyncio.Event()
                event = waiter.event
            await event.wait()

    def _fits(self, need: int) -> bool:
        return not self.held or self.held + need <= self.limit

    def _wait(self, key: Hashable, need: int) -> None:
        waiter = self._queue.setdefault(key, _Waiter(need))
        waiter.need = need

    def _wake_first(self) -> None:
        for waiter in self._queue.values():
            if self._fits(waiter.need):
                _wake(waiter)
            return


def _wake(waiter: _Waiter) -> None:
    if waiter.loop is not None and waiter.event is not None and not waiter.loop.is_closed():
        waiter.loop.call_soon_threadsafe(waiter.event.set)


class Lease:
    """Bytes of a share, released by `end`, or with the object if its holder is dropped (a cancelled fetch)."""

    def __init__(self, share: Share, size: int) -> None:
        share.take(size)
        self._share = share
        self._size = size

    def end(self) -> None:
        """Release them; a second call does nothing."""
        size, self._size = self._size, 0
        if size:
            self._share.give_back(size)

    def __del__(self) -> None:
        self.end()


class Budget:
    """The two shares of a worker."""

    def __init__(self, limit: int) -> None:
        self.records = Share(limit // 2)
        self.batches = Share(limit // 2)

    def forget_waiting(self) -> None:
        """Empty both queues, at a rebalance."""
        self.records.forget_waiting()
        self.batches.forget_waiting()
