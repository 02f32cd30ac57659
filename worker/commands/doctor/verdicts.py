"""The doctor's checks of verdicts: whether they can count, and what KP_CONFIDENCE=record would accept."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

import msgspec
from msgspec import Struct

from worker.commands.doctor.finding import Finding, ok, warn
from worker.commands.shared.placed_verdicts import Standings, switch_to_record
from worker.commands.shared.scored_topics import read_judged, read_outputs
from worker.config import ConfigError, Settings
from worker.kafka.cluster.topic_plan import MissingTopicsError

LAST_OUTPUTS: Final = 200
"""Offsets of each partition of the accepted and rejected topics that are read, from its end."""

READ_SECONDS: Final = 20.0

SPREAD_SHARE: Final = 0.1
"""The share of agents in several partitions from which on a warning is due: a topic that gained partitions has some."""


class _Agent(Struct):
    agent_id: str = ""


class _At(Struct):
    partition: int


class _Scoring(Struct):
    source: _At


class _Document(Struct):
    """What of a scored document tells how the source topic is keyed."""

    metadata: _Agent
    scoring: _Scoring


async def check_verdicts(settings: Settings) -> list[Finding]:
    """Return the findings on verdicts; none without KP_VERDICT_KEY_FILE."""
    if settings.verdict_key_file is None:
        return []
    documents: list[bytes] = []

    def take(value: bytes | None, _where: str, _record_ms: int) -> None:
        documents.append(value or b"")

    try:
        async with asyncio.timeout(READ_SECONDS):
            await read_outputs(settings, take, None, LAST_OUTPUTS)
            standings = await read_judged(settings)
    except MissingTopicsError:  # the check of the topics says so
        return []
    except TimeoutError:
        return [_unread(f"traces and verdicts could not be read within {READ_SECONDS:.0f} s")]
    except ConfigError as error:
        return [_unread(f"traces and verdicts could not be read: {error}")]
    spread = None if settings.novelty_scope == "group" else spread_agents(documents)
    return [*([spread] if spread else []), _switch(settings, documents, standings)]


def spread_agents(documents: list[bytes]) -> Finding | None:
    """Return a warning if the traces of many agents are in several partitions; None if not."""
    decoder = msgspec.json.Decoder(_Document)
    partitions: dict[str, set[int]] = defaultdict(set)
    traces: dict[str, int] = defaultdict(int)
    for raw in documents:
        try:
            document = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # not the worker's
        partitions[document.metadata.agent_id].add(document.scoring.source.partition)
        traces[document.metadata.agent_id] += 1
    several = [agent for agent, count in traces.items() if count > 1]
    spread = [agent for agent in several if len(partitions[agent]) > 1]
    if not spread or len(spread) < SPREAD_SHARE * len(several):
        return None
    return warn(
        "verdicts",
        f"{len(spread)} of {len(several)} agents have traces in several partitions, and each partition keeps its own "
        "track records: an agent's verdicts are spread thin",
        "publish with the agent as the record's key (docs/publishing.md), or set KP_NOVELTY_SCOPE=group",
    )


def _switch(settings: Settings, documents: list[bytes], standings: Standings) -> Finding:
    switch = switch_to_record(documents, standings, settings)
    told = f"{standings.verdicts} verdict{'s' * (standings.verdicts != 1)} count"
    if switch is None:
        return ok("verdicts", f"{told}; no trace is scored yet")
    if settings.confidence == "record":
        return ok("verdicts", f"{told}; {switch.accepted} of the last {switch.traces} traces are accepted")
    told += (
        f"; with KP_CONFIDENCE=record {switch.accepted_by_record} of the last {switch.traces} traces would be "
        f"accepted, now {switch.accepted} are"
    )
    if switch.same_share is not None:
        told += f" (the same share at KP_THRESHOLD={switch.same_share.threshold:.3g})"
    return ok("verdicts", told)


def _unread(message: str) -> Finding:
    return warn("verdicts", message, "see what the checks of the topics say; run this again")
