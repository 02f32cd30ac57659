"""A transaction: records, and with them a group's offsets, are committed together or not at all.

`send_then_commit` is for clusters without transactions.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from worker.kafka.producer import AbortableError, Producer, PublishError
from worker.kafka.protocol import Offsets
from worker.kafka.rows import TOO_LARGE, OutputTopic, PartitionRows, RefusedBatch, TopicRefusedError

log = logging.getLogger(__name__)

MAX_ROUNDS: Final = 24
"""Most attempts to publish the same contents, each with another dead letter or a lower limit. One cause needs four at
most; a limit that the broker does not report is halved each time."""

LOOK_AGAIN_SECONDS: Final = 60.0
"""Least time between two look-ups of a topic's limit before a record is replaced because of it: each is a
connection."""

LimitOf = Callable[[str], Awaitable[int | None]]  # returns a topic's current max.message.bytes; None if it is not known


async def unknown_limit(topic: str) -> int | None:
    """Return no limit."""
    return None


class Contents(Protocol):
    """The records of one transaction, as their owner has them."""

    def partition_rows(self) -> list[PartitionRows]:
        """Return what to send; each topic partition occurs once. Called again for each round."""
        ...

    def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
        """Replace or leave out the rows of a partition that its topic refuses, or raise an error.

        No row at all: the topic's limit is lower than it was known to be.
        """
        ...


async def run_transaction(
    producer: Producer,
    contents: Contents,
    limit_of: LimitOf,
    *,
    offsets: tuple[str, Offsets] | None = None,
    where: str = "",
) -> None:
    """Commit the contents and the offsets of a group. Raises PublishError, and what the contents raise.

    The guarantee depends on the order of the steps:
     1. begin;
     2. send the records, and await every acknowledgement;
     3. send the offsets;
     4. commit. Readers of committed records see none of it before.
    If a topic refuses records for good in step 2, the same producer continues (a new one would fence the next owner):
     a. find the refused records, in the transaction that will be aborted;
     b. let the contents replace them;
     c. abort, so that nobody reads any of it, and start again at 1 with all contents.
    A transaction that the brokers want aborted is run again as a whole. Any other failure aborts it and is not retried:
    it is unknown whether it was committed. `where` begins the messages: "partition 5: ".
    """
    for _ in range(MAX_ROUNDS):
        try:
            async with producer.transaction():  # 1, 4
                refused = await producer.send(contents.partition_rows())  # 2
                if refused:
                    await replace_refused(producer, contents, refused, limit_of)  # a, b
                    raise AbortableError("records are refused")  # c
                if offsets is not None:
                    await producer.send_offsets(*offsets)  # 3
        except AbortableError as error:
            log.info("%sthe transaction is run again: %s", where, error)
        else:
            return
    raise _still_refused(where)


async def send_then_commit(
    producer: Producer, contents: Contents, limit_of: LimitOf, commit: Callable[[], Awaitable[None]], *, where: str = ""
) -> None:
    """Commit the contents at least once. Raises as `run_transaction` does, and TimeoutError.

    The guarantee depends on the order of the steps:
     1. send the records, and await every acknowledgement. If a topic refuses some for good, let the contents replace
        them, and send all again: those accepted the first time are then duplicated;
     2. commit the offset.
    """
    for _ in range(MAX_ROUNDS):
        async with asyncio.timeout(producer.timeout_seconds):
            refused = await producer.send(contents.partition_rows())  # 1
            if not refused:
                await commit()  # 2
                return
            await replace_refused(producer, contents, refused, limit_of)
    raise _still_refused(where)


def _still_refused(where: str) -> PublishError:
    return PublishError(f"{where}still refused after {MAX_ROUNDS} attempts")


async def look_again(topics: Iterable[OutputTopic], limit_of: LimitOf) -> None:
    """Look up the limits of topics that seem too small, each once in LOOK_AGAIN_SECONDS at most.

    Otherwise only a refusal would show a raised limit, and what is replaced before it is sent is not refused.
    """
    for topic in topics:
        async with topic.looking:
            now = asyncio.get_running_loop().time()
            if now - topic.looked_at < LOOK_AGAIN_SECONDS:
                continue
            topic.looked_at = now
            limit = await limit_of(topic.name)
            if limit is not None:
                topic.learn(limit)


async def replace_refused(
    producer: Producer,
    contents: Contents,
    refused: list[tuple[PartitionRows, list[RefusedBatch]]],
    limit_of: LimitOf,
) -> None:
    """Find the rows that their topics refuse, and let the contents replace them.

    Raises PublishError if no row is refused alone, and no limit is lower than known: another round would end the same.
    """
    by_part = []
    news = False
    for part, batches in refused:
        rows, lowered = await find_refused_rows(producer, part, batches, limit_of)
        news |= bool(rows) or lowered
        by_part.append((part, rows))
    if not news:
        raise PublishError(f"the record batch is refused, but none of its records alone is: {refused[0][1][0].error}")
    for part, rows in by_part:
        contents.replace(part, rows)


async def find_refused_rows(
    producer: Producer, part: PartitionRows, refused: list[RefusedBatch], limit_of: LimitOf
) -> tuple[dict[int, TopicRefusedError], bool]:
    """Return the rows that are refused alone, and whether the topic's limit is lower than known.

    If the broker does not name the records, parts of the batch are sent again, down to single records; the transaction
    is aborted afterwards.
    """
    topic = part.topic
    too_large = [each for each in refused if each.error.code in TOO_LARGE]
    if too_large:
        limit = await limit_of(topic.name)
        if limit is not None:
            topic.learn(limit)
        if any(topic.batch_bytes < each.limit for each in too_large):  # found now, or by another partition task
            return {}, True  # the next round fits batches, records and dead letters
    alone: dict[int, TopicRefusedError] = {}
    waiting = list(refused)
    while waiting:
        each = waiting.pop()
        named = each.refused_rows()
        if named is not None:
            alone |= named
            continue
        for rows in each.parts():
            again = PartitionRows(topic, part.partition, part.rows[rows.start : rows.stop])
            for _, batches in await producer.send([again]):
                waiting += [replace(more, first=rows.start + more.first) for more in batches]
    if too_large and not alone:
        topic.limit_batches(min(each.size // 2 for each in too_large))
        return {}, True
    return alone, False
