"""The real worker with a cheap embedder, and with crashes at exact steps: `python -m tests.support.crash_worker`.

Everything between them is the product's own code. Settings are the worker's
(KP_...), and:

- TEST_EMBED_MS: sleep of each embedding, to imitate a model's load; TEST_REAL_MODEL=1: the configured model instead.
- TEST_RESTORE_MS: sleep after each restore, to imitate large caches.
- TEST_START_MS: sleep before each start of a producer, to imitate a slow broker.
- TEST_METADATA_MS: how often clients ask for partitions, to notice new ones sooner.
- TEST_CRASH_AT=step:count:how: crash when `step` (see STEPS) is passed for the count-th time. `kill` is SIGKILL to
  itself; `raise` is an exception out of the product's call, as a failing broker gives; `freeze` is SIGSTOP, and what
  follows is up to whoever sends SIGCONT.
"""

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as worker.cli

import msgspec
import numpy as np

import worker.kafka.connections
import worker.kafka.transaction
import worker.stream.partition_factory
from worker import config
from worker.commands.run import run_service
from worker.core.novelty import Vector
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import OBJECTIVE_TOKENS, Embedder, Embedding, Reading
from worker.embed.load import load_embedder
from worker.kafka.producer import Producer
from worker.kafka.protocol import Offsets
from worker.kafka.rows import PartitionRows, RefusedBatch
from worker.stream.faust_consumer import KpConsumer
from worker.stream.worker import WorkerProcess

DIMENSIONS: Final = 384
STEPS: Final = (
    "starting",  # the assignment is here, the producer is not connected (its predecessor not fenced) yet
    "started",  # the producer is connected (and has fenced its predecessor), nothing is read yet
    "restored",  # the changelog is read, no record flows yet
    "embed",  # a trace is in the embedder (kill only: an exception there is a dead letter by design)
    "before_begin",
    "after_begin",
    "mid_sends",  # this send is acknowledged, the batch's others are not sent
    "after_sends",  # everything is acknowledged, the offset is not sent
    "after_offsets",  # the offset is in the transaction, which is still open
    "committing",  # the commit is on its way, its answer is not here
    "after_commit",  # committed, and the worker does not know
)

REFUSAL_STEPS: Final = (
    "refused",  # a topic has refused a batch, the refused records are not looked for yet
    "searching",  # a part of the refused batch is sent again
    "found",  # they are known, the transaction is still open
    "aborted",  # and aborted; nothing is published again
)
"""Steps of a publication of which a topic refuses something; those of STEPS follow."""


class CrashError(Exception):
    """The planned failure."""


class _Plan:
    """What TEST_CRASH_AT says."""

    def __init__(self, text: str) -> None:
        self.step, _, rest = text.partition(":")
        count, _, self.how = rest.partition(":")
        if text and (self.step not in STEPS + REFUSAL_STEPS or self.how not in ("kill", "raise", "freeze")):
            raise SystemExit(f"TEST_CRASH_AT={text!r} is wrong")
        self.left = int(count or 0)

    def is_next(self, step: str) -> bool:
        """Whether this passing of the step is the one to crash at (each call counts)."""
        if step != self.step:
            return False
        self.left -= 1
        return self.left == 0

    def crash(self) -> None:
        """Die, raise, or freeze and go on."""
        sys.stderr.write(f"TEST crash at {self.step} by {self.how}\n")
        sys.stderr.flush()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        if self.how == "raise":
            raise CrashError(self.step)
        os.kill(os.getpid(), signal.SIGSTOP)

    def passing(self, step: str) -> None:
        """Crash here if it is time to."""
        if self.is_next(step):
            self.crash()


PLAN = _Plan(os.environ.get("TEST_CRASH_AT", ""))


def hash_vector(text: str) -> Vector:
    """Return a unit vector that depends on every character: the direction of one of 12 families plus noise.

    Texts of one family are similar to each other, more or less, so that novelty takes all values from 0 to 1.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
    share = digest[1] / 255
    mixed = share * _spread(b"family%d" % (digest[0] % 12)) + (1 - share) * _spread(digest)
    return np.asarray(mixed / np.linalg.norm(mixed), dtype=np.float32)


def _spread(seed: bytes) -> Any:
    raw = b"".join(hashlib.blake2b(seed, salt=bytes([i])).digest() for i in range(DIMENSIONS // 32))
    return np.frombuffer(raw, dtype="<i2").astype(np.float64)


class HashEmbedder(Embedder):
    """An embedder without a model: the same vector for the same text, whatever came before."""

    identity = EmbedderIdentity("test-hash", "0" * 64, DIMENSIONS, 256, "test", "fp32")

    def __init__(self, embed_text: str = "whole") -> None:
        apart = OBJECTIVE_TOKENS if embed_text == "objective" else 0
        self.identity = msgspec.structs.replace(self.identity, embed_text=embed_text, objective_tokens=apart)
        self._seconds = float(os.environ.get("TEST_EMBED_MS") or 0) / 1000

    def infer(self, reading: Reading) -> Embedding:
        PLAN.passing("embed")
        if self._seconds:
            time.sleep(self._seconds)
        return Embedding(hash_vector(reading.content), False)


class SteppedProducer(Producer):
    """The product's producer; the steps of a publication pass through here."""

    async def start(self) -> None:
        PLAN.passing("starting")
        if delay_ms := os.environ.get("TEST_START_MS"):
            sys.stderr.write("TEST a producer starts slowly\n")
            await asyncio.sleep(float(delay_ms) / 1000)
        await super().start()
        PLAN.passing("started")

    async def begin(self) -> None:
        PLAN.passing("before_begin")
        await super().begin()
        PLAN.passing("after_begin")

    async def send(self, parts: Sequence[PartitionRows]) -> list[tuple[PartitionRows, list[RefusedBatch]]]:
        """Send the records of all topics; when it is planned, crash between the first topic's and the others'."""
        refused: list[tuple[PartitionRows, list[RefusedBatch]]] = []
        if PLAN.is_next("mid_sends"):
            refused += await super().send(parts[:1])
            PLAN.crash()
            parts = parts[1:]
        refused += await super().send(parts)
        if _SEARCHES:  # of this partition or another: all the same for a crash
            PLAN.passing("searching")
        return refused

    async def send_offsets(self, group: str, offsets: Offsets) -> None:
        PLAN.passing("after_sends")
        await super().send_offsets(group, offsets)
        PLAN.passing("after_offsets")

    async def abort(self) -> None:
        await super().abort()
        PLAN.passing("aborted")

    async def commit(self) -> None:
        if PLAN.is_next("committing"):
            commit = asyncio.create_task(super().commit())
            await asyncio.sleep(0.002)
            try:
                PLAN.crash()
            except CrashError:
                commit.cancel()
                raise
            await commit
        else:
            await super().commit()
        PLAN.passing("after_commit")


def install() -> None:
    """Put the doubles at their seams."""
    factory: Any = worker.stream.partition_factory
    transaction: Any = worker.kafka.transaction
    factory.Producer = SteppedProducer
    factory.read_logs = _slowly(factory.read_logs)
    transaction.find_refused_rows = _stepped(transaction.find_refused_rows)
    if metadata_ms := os.environ.get("TEST_METADATA_MS"):
        client: Any = worker.kafka.connections
        client.METADATA_MS = int(metadata_ms)
    commit_offset = KpConsumer.commit_offset

    async def stepped(self: KpConsumer, *args: Any) -> None:  # at least once: the offset is the commit
        PLAN.passing("after_sends")
        await commit_offset(self, *args)
        PLAN.passing("after_commit")

    KpConsumer.commit_offset = stepped  # type: ignore[method-assign,assignment]


_SEARCHES: list[bool] = []
"""One for each search for refused records that is under way."""


def _stepped(find_refused_rows: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def stepped(*args: Any, **kwargs: Any) -> Any:
        PLAN.passing("refused")
        _SEARCHES.append(True)
        try:
            found = await find_refused_rows(*args, **kwargs)
        finally:
            _SEARCHES.pop()
        PLAN.passing("found")
        return found

    return stepped


def _slowly(read_logs: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def slow_read(*args: Any) -> Any:
        result = await read_logs(*args)
        PLAN.passing("restored")
        await asyncio.sleep(float(os.environ.get("TEST_RESTORE_MS") or 0) / 1000)
        return result

    return slow_read


def load(settings: config.Settings) -> Embedder | None:
    """Return the stand-in, or with TEST_REAL_MODEL=1 what the settings name."""
    if os.environ.get("TEST_REAL_MODEL") == "1":
        return load_embedder(settings)
    return HashEmbedder(settings.embed_text)


def _say_what_waits(*_: object) -> None:
    """Write one line for each asyncio task: its functions and lines, the innermost last."""
    for task in list(asyncio.tasks._all_tasks):  # type: ignore[attr-defined]  # of all threads
        places, waiting = [], task.get_coro()
        while waiting is not None:
            frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
            if frame is not None:
                places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
        print(f"TEST waits: {' > '.join(places)}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Run as `kp-worker run` does; SIGUSR2 makes it say what it waits for."""
    install()
    signal.signal(signal.SIGUSR2, _say_what_waits)
    settings = config.load()
    run_service(settings, WorkerProcess(settings, load))


if __name__ == "__main__":
    main()
