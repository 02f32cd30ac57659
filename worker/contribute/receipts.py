"""Writing receipts and refused records: each with the offset behind its trace, in one transaction.

Lives here: the transaction. Must not live here: the records (outputs.py), when one is due (partition.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.contribute.outputs import REFUSED
from worker.core.fitting import fit_dead_letter
from worker.core.records import OutputRecord
from worker.kafka.producer import PublishError, abort_soon, send_all, transactional_producer, while_sending
from worker.kafka.publication import OutputTopic, Shipment


class ReceiptPublisher:
    """The transactional producer of one partition; `group` is the prefix of its id."""

    def __init__(
        self,
        client: Mapping[str, Any],
        group: str,
        source: TopicPartition,
        topics: Mapping[str, OutputTopic],
        timeout_seconds: float,
    ) -> None:
        self._group = group
        self._source = source
        self._topics = topics
        self._timeout = timeout_seconds
        self._producer = transactional_producer(client, f"{group}-{source.partition}", timeout_seconds)

    async def start(self) -> None:
        """Connect; this fences the partition's former owner and aborts its open transaction."""
        await self._producer.start()

    async def commit(self, output: OutputRecord | None, next_offset: int, metadata: str) -> None:
        """Write a record, if there is one, and the offset. After any error it is unknown whether that was committed."""
        shipments = [] if output is None else [self._shipment(output)]
        try:
            async with asyncio.timeout(self._timeout):
                await while_sending(self._producer, self._transact(shipments, next_offset, metadata))
        except Exception:
            with contextlib.suppress(Exception):  # the next owner's start aborts it, too
                await abort_soon(self._producer)
            raise

    async def _transact(self, shipments: list[Shipment], next_offset: int, metadata: str) -> None:
        await self._producer.begin_transaction()
        for shipment, refused in await send_all(self._producer, shipments):
            error = refused[0].error
            raise PublishError(f"topic {shipment.topic.name} refuses a record: {error.name}; {error.advice}") from error
        await self._producer.send_offsets_to_transaction(
            {self._source: OffsetAndMetadata(next_offset, metadata)}, self._group
        )
        await self._producer.commit_transaction()

    def _shipment(self, output: OutputRecord) -> Shipment:
        topic = self._topics[output.kind]
        if output.kind == REFUSED:
            output = fit_dead_letter(output, topic.max_bytes)
        row = (output.key, output.value, output.timestamp_ms, output.headers)
        return Shipment(topic, self._source.partition % topic.partitions, [row])

    async def stop(self) -> None:
        """Disconnect."""
        await self._producer.stop()
