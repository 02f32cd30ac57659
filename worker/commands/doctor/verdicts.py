"""The doctor's checks of verdicts: whether they can count, who is judged, and what KP_CONFIDENCE=record accepts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Final

from worker.commands.doctor.finding import Finding, ok, warn
from worker.commands.doctor.traces import Head, LastOutputs, read_within
from worker.commands.shared.placed_verdicts import Standings, switch_to_record
from worker.commands.shared.scored_topics import read_judged
from worker.config import Settings
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, REJECTED
from worker.core.terminal import number_of
from worker.kafka.cluster.topic_plan import MissingTopicsError

READ_SECONDS: Final = 20.0
"""Time limit for reading all verdicts."""

SPREAD_SHARE: Final = 0.1
"""Share of agents in several partitions that causes a warning while scores use no verdicts: a topic that gained
partitions always has some."""

LOPSIDED: Final = 2.0
"""How many times as often accepted traces may be judged as rejected ones, or vice versa."""

DEVIATIONS: Final = 3.0
"""Standard deviations by which the two shares must differ: with few verdicts, they are lopsided by chance alone."""


async def check_verdicts(settings: Settings, outputs: LastOutputs) -> list[Finding]:
    """Return the findings on verdicts; none without KP_VERDICT_KEY_FILE."""
    if settings.verdict_key_file is None:
        return []
    try:
        standings = await read_within(READ_SECONDS, read_judged(settings), "verdicts", "the verdicts")
    except MissingTopicsError:  # reported by the check of the topics
        return []
    if isinstance(standings, Finding):
        return [standings]
    spread = spread_agents(
        (head for head, _ in outputs.heads), 0.0 if settings.confidence == "record" else SPREAD_SHARE
    )
    of_both = [head for head, record_ms in outputs.heads if record_ms >= outputs.complete_from]
    lopsided = judged_shares(of_both, standings.judged)
    return [*filter(None, (spread, lopsided)), _switch(settings, outputs.values, standings)]


def judged_shares(documents: Iterable[Head], judged: Container[tuple[int, str]]) -> Finding | None:
    """Return a warning if the judged shares of accepted and rejected traces differ much; None if not.

    `documents`: of both topics, from the same time range. `judged`: partition and id of each trace with a verdict.
    """
    counts = {ACCEPTED: [0, 0], REJECTED: [0, 0]}  # judged, all
    for document in documents:
        of = counts.get(document.scoring.decision or "")
        if of is not None:
            of[0] += (document.scoring.source.partition, document.id[:CACHED_ID_LENGTH]) in judged
            of[1] += 1
    (accepted, of_accepted), (rejected, of_rejected) = counts.values()
    if not (of_accepted and of_rejected and accepted + rejected):
        return None
    one, other = accepted / of_accepted, rejected / of_rejected
    both = (accepted + rejected) / (of_accepted + of_rejected)
    deviation = math.sqrt(both * (1 - both) * (1 / of_accepted + 1 / of_rejected))
    if max(one, other) <= LOPSIDED * min(one, other) or abs(one - other) <= DEVIATIONS * deviation:
        return None
    return warn(
        "verdicts",
        f"{accepted} of the last {of_accepted} accepted traces have a verdict, and {rejected} of the last "
        f"{of_rejected} rejected ones: such verdicts do not tell how often an agent succeeds",
        "draw the runs that are judged at random, from both topics alike (docs/verdicts.md)",
    )


def spread_agents(documents: Iterable[Head], share: float) -> Finding | None:
    """Return a warning if this share of agents has traces of one domain in several partitions; None if not."""
    partitions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for document in documents:
        of = document.metadata
        partitions[of.agent_id, of.task_domain].append(document.scoring.source.partition)
    several = {agent for (agent, _), those in partitions.items() if len(those) > 1}
    spread = {agent for (agent, _), those in partitions.items() if len(set(those)) > 1}
    if not spread or len(spread) < share * len(several):
        return None
    return warn(
        "verdicts",
        f"{len(spread)} of {len(several)} agents have traces in several partitions, and each partition keeps its own "
        "track records: an agent's verdicts are spread over them",
        "publish with the agent, or the domain, as the record's key (docs/publishing.md)",
    )


def _switch(settings: Settings, documents: list[bytes], standings: Standings) -> Finding:
    switch = switch_to_record(documents, standings, settings)
    told = number_of(standings.verdicts, "verdict counts", "verdicts count")
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
