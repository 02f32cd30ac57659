"""Finds the refused records of a batch: the broker names them, or parts of the batch are sent again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from worker.kafka.producer import Producer, PublishError
from worker.kafka.publication import Publication, Refused, Shipment
from worker.kafka.refusals import TOO_LARGE, TopicRefusedError

log = logging.getLogger(__name__)

LimitOf = Callable[[str], Awaitable[int | None]]
"""Returns a topic's current max.message.bytes; None if it is not known."""


async def unknown_limit(topic: str) -> int | None:
    """Return no limit."""
    return None


async def replace_refused(
    producer: Producer,
    publication: Publication,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
) -> None:
    """Find the records that their topics refuse and replace them by dead letters. Raises as `search` does."""
    for shipment, culprits in await search(producer, refused, limit_of):
        publication.replace(shipment, culprits)
        for words, count in Counter(map(str, culprits.values())).items():
            log.warning("%s (%d records of partition %d)", words, count, shipment.partition)


async def search(
    producer: Producer,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
) -> list[tuple[Shipment, dict[int, TopicRefusedError]]]:
    """Return the rows of each shipment that are refused alone (none: its topic's limit is lower than known).

    Raises PublishError if there is neither: sending all again would have the same result.
    """
    found = []
    news = False
    for shipment, batches in refused:
        culprits, lowered = await find_culprits(producer, shipment, batches, limit_of)
        news |= bool(culprits) or lowered
        found.append((shipment, culprits))
    if not news:
        raise PublishError(f"the batch is refused, but none of its records alone: {refused[0][1][0].error}")
    return found


async def find_culprits(
    producer: Producer, shipment: Shipment, refused: Sequence[Refused], limit_of: LimitOf
) -> tuple[dict[int, TopicRefusedError], bool]:
    """Return the rows that are refused alone, and whether the topic's limit is lower than known.

    If the broker does not name the records, parts of the batch are sent again, down to single records. With exactly
    once the transaction will be aborted, so that readers of committed records never see them.
    """
    topic = shipment.topic
    too_large = [each for each in refused if each.error.code in TOO_LARGE]
    if too_large:
        limit = await limit_of(topic.name)
        if limit is not None:
            topic.learn(limit)
        if any(topic.batch_bytes < each.limit for each in too_large):  # found now, or by another partition task
            return {}, True  # the next round fits batches, records and dead letters
    culprits: dict[int, TopicRefusedError] = {}
    waiting = list(refused)
    while waiting:
        each = waiting.pop()
        named = each.culprits()
        if named is not None:
            culprits |= named
            continue
        for part in each.suspects():
            rows = Shipment(topic, shipment.partition, shipment.rows[part.start : part.stop])
            for _, found in await producer.send([rows]):
                waiting += [replace(more, first=part.start + more.first) for more in found]
    if too_large and not culprits:
        topic.batch_bytes = min(topic.batch_bytes, *(each.size // 2 for each in too_large))
        return {}, True
    return culprits, False
