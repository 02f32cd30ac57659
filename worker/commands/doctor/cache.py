"""The doctor's check of the cache's capacity: whether it holds the TTL at the rate of the last traces."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from worker.commands.doctor.finding import Finding, ok, warn
from worker.commands.shared.session import Session, SessionError, read_to
from worker.config import ConfigError, Settings
from worker.core.capacity import advice, entry_bytes, is_short, megabytes, per_second
from worker.core.changelog import CorruptEntry, Entry, decode
from worker.kafka.cluster.errors import error_text

LAST_OFFSETS: Final = 500
"""Offsets of each changelog partition that are read, from its end. At a low rate every other one is a marker."""

ENOUGH_ENTRIES: Final = 100
"""Entries of a partition from which on their rate is worth advice."""

READ_CACHE_SECONDS: Final = 10.0
"""Longest time for reading them."""


async def check_cache(settings: Settings) -> list[Finding]:
    """Return what capacity, TTL and the rate of the last entries mean for each other."""
    if settings.embedder == "none":
        return []
    try:
        async with asyncio.timeout(READ_CACHE_SECONDS):
            entries = await _last_entries(Session(settings))
    except TimeoutError:
        return [ok("cache", f"the last entries could not be read within {READ_CACHE_SECONDS:.0f} s")]
    except KafkaError as error:
        return [ok("cache", f"no entries were looked at: {error_text(error)}")]
    except (ConfigError, SessionError) as error:
        return [ok("cache", f"no entries were looked at: {error}")]
    return [_judged(settings, entries)]


async def _last_entries(session: Session) -> dict[int, list[Entry]]:
    """Return the last entries of each changelog partition, those of its latest pass and model, by sequence."""
    async with session.admin() as admin:
        topic = (await session.topics(admin, session.settings.changelog)).get(session.settings.changelog)
    found: dict[int, list[Entry]] = defaultdict(list)
    if topic is None:
        return found
    tps = [TopicPartition(topic.name, partition) for partition in range(topic.partitions)]
    async with session.connected(session.reader(), tolerant=True) as reader:
        starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
        begins = {tp: max(starts[tp], end - LAST_OFFSETS) for tp, end in ends.items()}
        async for record in read_to(reader, begins, ends):
            try:
                entry = decode(record.value)
            except CorruptEntry:  # or a tombstone, or the record of the passes
                continue
            found[record.partition].append(entry)
    return {partition: _same(entries) for partition, entries in found.items()}


def _same(entries: list[Entry]) -> list[Entry]:
    last = entries[-1]
    same = {it.sequence: it for it in entries if (it.pass_number, it.model) == (last.pass_number, last.model)}
    return [same[sequence] for sequence in sorted(same)]


def _judged(settings: Settings, entries: dict[int, list[Entry]]) -> Finding:
    capacity, ttl_ms = settings.cache_max_elements, settings.cache_ttl_ms
    rates: dict[int, float] = {}
    for number, those in entries.items():
        rate = per_second([entry.stream_time_ms for entry in those])
        if rate is not None and len(those) >= ENOUGH_ENTRIES:
            rates[number] = rate
    dimensions = next((len(those[-1].vector) // 4 for those in entries.values()), 384)
    memory = megabytes(capacity * entry_bytes(dimensions))
    told = f"{capacity} entries for each partition, at most {memory}"
    if not rates:
        return ok("cache", f"{told}; too few traces yet to tell their rate (capacity = rate x TTL)")
    partition = max(rates, key=lambda it: rates[it])
    reach_ms = 1000 * capacity / rates[partition]
    told += f"; partition {partition}, the busiest, takes {rates[partition]:.3g} traces a second of stream time"
    if ttl_ms is None:
        return ok("cache", f"{told}: they hold {_seconds(reach_ms)}, without a TTL")
    told += f": they hold {_seconds(reach_ms)}, the TTL is {_seconds(ttl_ms)}"
    if is_short(reach_ms, ttl_ms):
        return warn("cache", told, advice(rates[partition], reach_ms, ttl_ms, dimensions))
    return ok("cache", told)


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.0f} s"
