"""Reading the accepted and rejected topics for a report: once, from an offset or a time to the present end.

Lives here: which records, in what bounds. Must not live here: what is in them (report_columns.py). It joins no group
and commits nothing; it needs the ACLs Read and Describe on the two topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code

from worker.commands.report_columns import Traces
from worker.commands.session import SessionError, read_to
from worker.config import ConfigError, Settings
from worker.kafka.client import client_arguments, why_not
from worker.kafka.errors import explain
from worker.kafka.topics import describe

FETCH_BYTES: Final = 4 << 20


async def read_outputs(settings: Settings, traces: Traces, since_ms: int | None, last: int | None) -> int:
    """Add what is on the two topics; return from when on (record timestamp, ms) it is complete.

    `since_ms`: no records before it. `last`: at most that many offsets of each partition; since one partition may
    reach further back than another, the result is later than `since_ms` then, and earlier records are to be left out.
    Raises ConfigError, also for a broker that cannot be reached.
    """
    client = client_arguments(settings)
    try:
        partitions = await _partitions(client, [settings.accepted_topic, settings.rejected_topic])
        return await _read(client, partitions, traces, since_ms, last)
    except KafkaError as error:
        cause = await why_not(client) or error
        raise ConfigError(f"reading from {settings.bootstrap_servers} failed: {explain(cause)}") from error
    except SessionError as error:
        raise ConfigError(f"reading from {settings.bootstrap_servers} failed: {error}") from error


async def _partitions(client: Mapping[str, Any], topics: list[str]) -> list[TopicPartition]:
    """Return the topics' partitions, by the admin client: a consumer that asks for a topic may create it."""
    admin = AIOKafkaAdminClient(**client)
    try:
        await admin.start()
        found = await describe(admin, topics)
    finally:
        await admin.close()
    result = []
    for topic in found:
        if topic["error_code"]:
            problem = for_code(topic["error_code"]).__name__
            raise ConfigError(
                f"topic {topic['topic']} cannot be read ({problem}): check KP_ACCEPTED_TOPIC and KP_REJECTED_TOPIC, "
                "and the ACL Read on both"
            )
        result += [TopicPartition(topic["topic"], partition["partition"]) for partition in topic["partitions"]]
    return sorted(result)


async def _read(
    client: Mapping[str, Any], partitions: list[TopicPartition], traces: Traces, since_ms: int | None,
    last: int | None,
) -> int:  # fmt: skip
    async with AIOKafkaConsumer(
        **client, enable_auto_commit=False, auto_offset_reset="earliest", isolation_level="read_committed",
        max_partition_fetch_bytes=FETCH_BYTES,
    ) as consumer:  # fmt: skip
        consumer.assign(partitions)
        starts, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
        if since_ms is not None:
            for tp, found in (await consumer.offsets_for_times(dict.fromkeys(partitions, since_ms))).items():
                starts[tp] = ends[tp] if found is None else found.offset
        cut = set()
        for tp in partitions:
            if last is not None and ends[tp] - last > starts[tp]:
                starts[tp] = ends[tp] - last
                cut.add((tp.topic, tp.partition))
        complete_from = since_ms or 0
        async for record in read_to(consumer, starts, ends):
            if cut and (place := (record.topic, record.partition)) in cut:
                cut.remove(place)
                complete_from = max(complete_from, record.timestamp)
            traces.add(record.value, f"{record.topic}/{record.partition} offset {record.offset}", record.timestamp)
        return complete_from
