"""Finds the refused records of a batch: the broker names them, or parts of the batch are sent again.

Lives here: the search, for the worker and for `redrive`. Must not live here: which responses are refusals
(refusals.py), what is published instead (publication.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from aiokafka import AIOKafkaProducer
from aiokafka.errors import OutOfOrderSequenceNumber

from worker.kafka.producer import PublishError, send_rows
from worker.kafka.publication import Publication, Refused, Row, Shipment
from worker.kafka.refusals import TOO_LARGE, DoubtfulRefusalError, TopicRefusedError

log = logging.getLogger(__name__)

LimitOf = Callable[[str], Awaitable[int | None]]
"""Returns a topic's current max.message.bytes; None if it is not known."""


async def unknown_limit(topic: str) -> int | None:
    """Return no limit."""
    return None


async def replace_refused(
    producer: AIOKafkaProducer,
    publication: Publication,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
    *,
    aborting: bool,
) -> None:
    """Find the records that their topics refuse and replace them by dead letters. Raises as `search` does."""
    for shipment, culprits in await search(producer, refused, limit_of, aborting=aborting):
        publication.replace(shipment, culprits)
        for words, count in Counter(map(str, culprits.values())).items():
            log.warning("%s (%d records of partition %d)", words, count, shipment.partition)


async def search(
    producer: AIOKafkaProducer,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
    *,
    aborting: bool,
) -> list[tuple[Shipment, dict[int, TopicRefusedError]]]:
    """Return the rows of each shipment that are refused alone (none: its topic's limit is lower than known).

    Raises PublishError if there is neither: sending all again would have the same result.
    """
    found = []
    news = False
    for shipment, batches in refused:
        culprits, lowered = await find_culprits(producer, shipment, batches, limit_of, aborting=aborting)
        news |= bool(culprits) or lowered
        found.append((shipment, culprits))
    if not news:
        raise PublishError(f"the batch is refused, but none of its records alone: {refused[0][1][0].error}")
    return found


async def find_culprits(
    producer: AIOKafkaProducer, shipment: Shipment, refused: Sequence[Refused], limit_of: LimitOf, *, aborting: bool
) -> tuple[dict[int, TopicRefusedError], bool]:
    """Return the rows that are refused alone, and whether the topic's limit is lower than known.

    If the broker does not name the records, parts of the batch are sent again, down to single records. `aborting`: in
    a transaction that will be aborted, so that readers of committed records never see what is sent here.
    """
    topic = shipment.topic
    too_large = [each for each in refused if each.error.code in TOO_LARGE]
    if too_large:
        limit = await limit_of(topic.name)
        if limit is not None:
            topic.learn(limit)
        news = any(topic.batch_bytes < each.limit for each in too_large)  # found now, or by another partition task
        if news and not any(each.error.doubtful for each in refused):
            return {}, True  # the next round fits batches, records and dead letters
    culprits: dict[int, TopicRefusedError] = {}
    waiting = list(refused)
    while waiting:
        each = waiting.pop()
        if each.error.doubtful:
            await settle_doubt(producer, shipment, each, aborting=aborting)
        named = each.culprits()
        if named is not None:
            culprits |= named
            continue
        for part in each.suspects():
            found = await send_rows(producer, topic, shipment.partition, shipment.rows[part.start : part.stop])
            waiting += [replace(more, first=part.start + more.first) for more in found]
    if too_large and not culprits:
        topic.batch_bytes = min(topic.batch_bytes, *(each.size // 2 for each in too_large))
        return {}, True
    return culprits, False


async def settle_doubt(producer: AIOKafkaProducer, shipment: Shipment, refused: Refused, *, aborting: bool) -> None:
    """Make sure that a refused batch, sent more than once, was never appended. Raises DoubtfulRefusalError.

    If it was, the broker's sequence number is ahead of the producer's by that batch. The next batch would fail, or, if
    it has as many records, be taken for a duplicate and be lost. So a batch with another number of records is sent
    first. Any topic accepts its records, and only an aborted transaction can hide them.
    """
    if aborting:
        rows: list[Row] = [(b"kp-worker", b"", None, [])] * (2 if refused.count == 1 else 1)
        with contextlib.suppress(OutOfOrderSequenceNumber):
            if not await send_rows(producer, shipment.topic, shipment.partition, rows):
                return
    raise DoubtfulRefusalError(
        f"{refused.error}; it is unknown whether an earlier attempt was written"
    ) from refused.error
