"""A proxy in front of one broker that holds single requests back and delivers them in a later transaction.

The broker's listener `PROXIED` advertises the proxy, so all connections of a client that bootstraps there come through.
The proxy ends the client's connection when it holds a request back, keeps its own to the broker, and delivers the
request there later: as a load balancer or a network does that has buffered what its client takes for lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support import kafka_versions
from tests.support.proxy import frames, listening
from tests.support.servers import ServerThread
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_node import HOST, free_ports

NAMES = {
    0: "Produce", 22: "InitProducerId", 24: "AddPartitions", 25: "AddOffsets", 26: "EndTxn", 28: "TxnOffsetCommit",
}  # fmt: skip
FLEXIBLE = {0: 9, 22: 2, 24: 3, 25: 3, 26: 3, 28: 3}
"""The first flexible version of each request: another header, compact strings."""

SETTLE_SECONDS = 0.03
"""How long the broker has for what a late request starts: transaction markers."""


class Scenario(NamedTuple):
    """The request that is held back, and the one of a later transaction before which it arrives.

    `step` "": 0 to 60 ms after its own transaction has ended, whatever happens then.
    """

    held: str
    step: str

    def __str__(self) -> str:
        return f"{self.held} @ {self.step or 'random'}"


def scenarios(held: Sequence[str], steps: Sequence[str]) -> list[Scenario]:
    return [Scenario(frame, step) for frame in held for step in steps]


V1_STEPS = ("AddPartitions", "Produce", "AddOffsets", "TxnOffsetCommit", "EndTxn(commit)", "InitProducerId", "")
V2_STEPS = ("Produce", "TxnOffsetCommit", "EndTxn(commit)", "")
V1 = scenarios(("Produce", "AddPartitions", "AddOffsets", "TxnOffsetCommit", "EndTxn(commit)"), V1_STEPS)
V2 = scenarios(("Produce", "TxnOffsetCommit", "EndTxn(commit)"), V2_STEPS)
ABORTS_V1 = scenarios(("EndTxn(abort)",), V1_STEPS)
ABORTS_V2 = scenarios(("EndTxn(abort)",), V2_STEPS)


@dataclass(eq=False)
class Frame:
    """One request of a producer; `transactional_id` None: of anything else."""

    data: bytes
    name: str = ""
    transactional_id: str | None = None


def read_frame(data: bytes) -> Frame:
    """Return the request with its name and transactional id."""
    key, version = struct.unpack_from(">hh", data, 4)
    (length,) = struct.unpack_from(">h", data, 12)
    at = 14 + max(0, length)  # behind the client's id
    if key not in NAMES:
        return Frame(data)
    if version >= FLEXIBLE[key]:
        at += 1  # no tags
        size = data[at] - 1  # of ids with fewer than 127 bytes
        at += 1
    else:
        (size,) = struct.unpack_from(">h", data, at)
        at += 2
    if size < 0:
        return Frame(data)
    name, transactional_id = NAMES[key], data[at : at + size].decode()
    if name == "EndTxn":
        name += "(commit)" if data[at + size + 10] else "(abort)"  # behind producer id and epoch
    return Frame(data, name, transactional_id)


class Pipe:
    """One client's connection, and the proxy's own to the broker, which outlives it."""

    def __init__(self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.client = client
        self.broker = broker
        self.sent: deque[Frame] = deque()  # without an answer yet
        self.answers: dict[Frame, asyncio.Future[bytes]] = {}  # of late requests

    def forward(self, frame: Frame) -> None:
        self.sent.append(frame)
        self.broker.write(frame.data)

    async def deliver(self, frame: Frame) -> bytes | None:
        """Deliver a request late; return the broker's answer, None if there is none."""
        answer = self.answers[frame] = asyncio.get_running_loop().create_future()
        self.forward(frame)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(answer, 10)
        return None


@dataclass
class Held:
    pipe: Pipe
    frame: Frame
    scenario: Scenario
    ended: int  # transactions of this id that had ended by then
    arriving: bool = False

    def is_due(self, name: str, ended: int) -> bool:
        """Whether it arrives before this request."""
        return not self.arriving and self.scenario.step == name and ended > self.ended


@dataclass
class LateRequests:
    """Which requests are late. `plan` returns the scenarios of a transactional id.

    `on_late` is awaited after each, and once more when the transaction has ended in which it arrived: between two
    transactions outputs and offset must agree.
    `share`: how many of the requests that a scenario could hold back are held.
    """

    plan: Callable[[str], Sequence[Scenario]]
    seed: int
    share: float = 0.35
    on_late: Callable[[str, Scenario], Awaitable[None]] | None = None
    delivered: Counter[Scenario] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    active: bool = True

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next: dict[str, Scenario] = {}
        self.held: dict[str, Held] = {}  # by transactional id
        self._hit: dict[str, tuple[Scenario, int]] = {}  # and the transactions that had ended when one arrived
        self._tasks: set[asyncio.Task[None]] = set()

    async def request(self, pipe: Pipe, frame: Frame) -> bool:
        """Handle a request before it is forwarded; return whether it may be."""
        name = frame.transactional_id
        if name is None:
            return True
        self.requests[frame.name] += 1
        begins = frame.name in ("AddPartitions", "Produce")  # a transaction with records
        if begins and self.on_late is not None and self.ended[name] > self._hit.get(name, (None, sys.maxsize))[1]:
            await self.on_late(name, self._hit.pop(name)[0])
        held = self.held.get(name)
        if held is not None and held.is_due(frame.name, self.ended[name]):
            await self._deliver(name)
            return True
        wanted = self._wanted(name)
        ready = self.active and held is None and self.ended[name] >= 1
        if ready and wanted is not None and frame.name == wanted.held and self._random.random() < self.share:
            # The end that is held back is the first one of two: its transaction ends with the second.
            self.held[name] = Held(pipe, frame, wanted, self.ended[name])
            pipe.client.transport.abort()
            return False
        return True

    def _wanted(self, name: str) -> Scenario | None:
        if name not in self._next:
            plan = self.plan(name)
            if not plan:
                return None
            least = min(self.delivered[each] for each in plan)
            self._next[name] = self._random.choice([each for each in plan if self.delivered[each] == least])
        return self._next[name]

    async def _deliver(self, name: str) -> None:
        held = self.held[name]
        held.arriving = True
        self.delivered[held.scenario] += 1
        await held.pipe.deliver(held.frame)
        await asyncio.sleep(SETTLE_SECONDS)
        if self.on_late is not None and held.scenario.step:  # otherwise the next transaction may be anywhere
            await self.on_late(name, held.scenario)
        self._hit[name] = held.scenario, self.ended[name]
        del self.held[name]
        self._next.pop(name, None)

    def answered(self, frame: Frame) -> None:
        """Note the answer to a request that was not late."""
        name = frame.transactional_id
        if name is None or not frame.name.startswith("EndTxn"):
            return
        self.ended[name] += 1
        held = self.held.get(name)
        if held is None or held.arriving:
            return
        if not held.scenario.step:
            task = asyncio.get_running_loop().create_task(self._deliver_soon(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self.ended[name] > held.ended + 20:  # the step does not come: something else
            del self.held[name]
            self._next.pop(name, None)

    async def _deliver_soon(self, name: str) -> None:
        await asyncio.sleep(self._random.uniform(0, 0.06))
        if name in self.held and not self.held[name].arriving:
            await self._deliver(name)


class Proxy(ServerThread):
    """The proxy, in a thread of its own."""

    def __init__(self, port: int, upstream: int, late: LateRequests) -> None:
        super().__init__(lambda _: listening(self._accept, port))
        self.late = late
        self._upstream = upstream

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker_reader, broker_writer = await asyncio.open_connection(HOST, self._upstream)
        pipe = Pipe(writer, broker_writer)
        up = asyncio.create_task(self._up(pipe, reader))
        down = asyncio.create_task(self._down(pipe, broker_reader))
        with contextlib.suppress(asyncio.CancelledError):  # by the end of the proxy
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if any(held.pipe is pipe for held in self.late.held.values()):
                await asyncio.wait({down})  # the broker's side stays open for the late request
        for part in (up, down):
            part.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        broker_writer.transport.abort()

    async def _up(self, pipe: Pipe, reader: asyncio.StreamReader) -> None:
        async for data in frames(reader):
            frame = read_frame(data)
            if not await self.late.request(pipe, frame):
                return
            pipe.forward(frame)

    async def _down(self, pipe: Pipe, reader: asyncio.StreamReader) -> None:
        async for data in frames(reader):
            frame = pipe.sent.popleft()
            late = pipe.answers.pop(frame, None)
            if late is not None:
                if not late.done():
                    late.set_result(data)
                continue
            self.late.answered(frame)
            if not pipe.client.is_closing():
                pipe.client.write(data)


@contextlib.contextmanager
def kafka_behind_a_proxy(late: LateRequests, transactions: int) -> Iterator[tuple[EmbeddedKafka, Proxy]]:
    """Run a broker whose listener PROXIED leads through the proxy, with this transaction.version (0 or 2)."""
    plain, proxied, controller, outside = free_ports(4)
    config = {
        "listeners": f"PLAINTEXT://{HOST}:{plain},PROXIED://{HOST}:{proxied},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{plain},PROXIED://{HOST}:{outside}",
        "controller.quorum.voters": f"0@{HOST}:{controller}",
    }
    features = {"transaction.version": transactions} if kafka_versions.since("4.0") else None
    with (
        EmbeddedKafka(config=config, listeners={"PROXIED": "PLAINTEXT"}, features=features) as kafka,
        Proxy(outside, proxied, late) as proxy,
    ):
        yield kafka, proxy
