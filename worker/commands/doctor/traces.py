"""The doctor's checks of settings against the last traces: the cache's capacity, domains, and verdicts."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Awaitable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import msgspec
from aiokafka.errors import KafkaError
from msgspec import Struct

from worker.commands.doctor.finding import Finding, ok, warn
from worker.commands.shared.placed_verdicts import Standings, read_judged, switch_to_record
from worker.commands.shared.session import Session, SessionError, read_topics
from worker.commands.shared.shown import shown_name, shown_score
from worker.config import ConfigError, Settings
from worker.core.changelog import CorruptRecord, Entry, Kind, decode, kind_of
from worker.core.documents import ScoringDecision
from worker.core.novelty import CACHED_ID_LENGTH, advice, entry_bytes, is_short, megabytes, per_second
from worker.core.records import ACCEPTED, REJECTED
from worker.core.scoring import accepts_too_few, unused_profiles, without_profile
from worker.core.terminal import number_of
from worker.kafka.cluster.errors import error_text
from worker.kafka.cluster.topics import MissingTopicsError

Found = TypeVar("Found")

READ_SECONDS: Final = 10.0
"""Time limit for reading entries, and for reading outputs."""

NAMED: Final = 5
"""Domains that are named; the others are counted."""


async def check_cache(settings: Settings) -> tuple[list[Finding], Counter[str]]:
    """Return a finding on capacity, TTL and the rate of the last entries; and the models of those entries.

    The latter are, for each embedder (`EmbedderIdentity.key`), the number of partitions whose last entry it made.
    """
    unknown: Counter[str] = Counter()
    if settings.embedder == "none":
        return [], unknown
    entries = await read_within(READ_SECONDS, _last_entries(Session(settings)), "cache", "the last entries")
    if isinstance(entries, Finding):
        return [entries], unknown
    return [_capacity(settings, entries)], Counter(those[-1].model for those in entries.values())


async def read_within(
    seconds: float, work: Awaitable[Found], check: str, what: str,
    remedy: str = "correct what the checks of the topics report, and run this again",
) -> Found | Finding:  # fmt: skip
    """Return the result of reading topics, or a finding that `what` could not be read. Raises MissingTopicsError."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except MissingTopicsError:
        raise
    except TimeoutError:
        return warn(check, f"{what} could not be read within {seconds:.0f} s", remedy)
    except KafkaError as error:
        return warn(check, f"{what} could not be read: {error_text(error)}", remedy)
    except (ConfigError, SessionError) as error:
        return warn(check, f"{what} could not be read: {error}", remedy)


async def _last_entries(session: Session) -> dict[int, list[Entry]]:
    """Return the last entries of each changelog partition, of its latest epoch and model, by sequence."""
    async with session.admin() as admin:
        topic = (await session.topics(admin, session.settings.changelog)).get(session.settings.changelog)
    entries_of: dict[int, list[Entry]] = defaultdict(list)
    if topic is None:
        return entries_of
    # Offsets to read at the end of each changelog partition. At a low rate every other one is a marker
    async for record in session.newest(topic, 500):
        if kind_of(record.key) is not Kind.ENTRY:
            continue
        with suppress(CorruptRecord):  # or a tombstone
            entry = decode(record.value)
            entries_of[record.partition].append(entry)  # a partition without a readable entry is omitted
    return {partition: _latest(entries) for partition, entries in entries_of.items()}


def _latest(entries: list[Entry]) -> list[Entry]:
    """Return the entries with the last one's epoch and model, by sequence."""
    last = entries[-1]
    same = {it.sequence: it for it in entries if (it.epoch, it.model) == (last.epoch, last.model)}
    return [same[sequence] for sequence in sorted(same)]


def _capacity(settings: Settings, entries: dict[int, list[Entry]]) -> Finding:
    capacity, ttl_ms = settings.cache_max_elements, settings.cache_ttl_ms
    rates: dict[int, float] = {}
    for number, those in entries.items():
        rate = per_second([entry.stream_time_ms for entry in those])
        # Entries of a partition that are needed before their rate is worth advice
        if rate is not None and len(those) >= 100:
            rates[number] = rate
    dimensions = next((len(those[-1].vector) // 4 for those in entries.values()), 384)
    memory = megabytes(capacity * entry_bytes(dimensions))
    message = f"{capacity} entries for each partition, at most {memory}"
    if not rates:
        return ok("cache", f"{message}; too few traces yet to tell their rate (capacity = rate x TTL)")
    partition = max(rates, key=lambda it: rates[it])
    reach_ms = 1000 * capacity / rates[partition]
    message += f"; partition {partition}, the busiest, takes {rates[partition]:.3g} traces a second of stream time"
    if ttl_ms is None:
        return ok("cache", f"{message}: they hold {_seconds(reach_ms)}, without a TTL")
    message += f": they hold {_seconds(reach_ms)}, the TTL is {_seconds(ttl_ms)}"
    if is_short(reach_ms, ttl_ms):
        return warn("cache", message, advice(rates[partition], reach_ms, ttl_ms, dimensions))
    return ok("cache", message)


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.0f} s"


class _Metadata(Struct):
    task_domain: str
    agent_id: str = ""


class Head(Struct):
    """The fields of a scored document for the checks of domains, of the source topic's keys, and of verdicts."""

    id: str
    metadata: _Metadata
    scoring: ScoringDecision


class LastOutputs(NamedTuple):
    """The newest scored documents."""

    heads: list[tuple[Head, int]]  # each with its record's timestamp, ms
    values: list[bytes]  # the unchanged documents
    complete_from: int  # time, ms, from which on both topics are complete


async def last_outputs(settings: Settings) -> LastOutputs | Finding:
    """Return the newest outputs, or why they cannot be read; empty if their topics are missing."""
    heads: list[tuple[Head, int]] = []
    values: list[bytes] = []
    decoder = msgspec.json.Decoder(Head)

    def take(value: bytes | None, _where: str, record_ms: int) -> None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # not the worker's
            heads.append((decoder.decode(value or b""), record_ms))
            values.append(value or b"")

    outputs = (settings.accepted_topic, settings.rejected_topic)
    # Offsets to read at the end of each partition of the accepted and rejected topics
    reading = read_topics(settings, outputs, take, last=200)
    try:
        complete_from = await read_within(READ_SECONDS, reading, "domains", "the last scored traces")
    except MissingTopicsError:  # reported by the check of the topics
        return LastOutputs([], [], 0)
    return complete_from if isinstance(complete_from, Finding) else LastOutputs(heads, values, complete_from)


def check_threshold(settings: Settings, outputs: LastOutputs) -> list[Finding]:
    """Return a warning if the thresholds accept almost no trace; nothing if they do, or after fewer than a hundred."""
    decided = [head.scoring for head, record_ms in outputs.heads if record_ms >= outputs.complete_from]
    accepted = sum(scoring.decision == ACCEPTED for scoring in decided)
    if not accepts_too_few(accepted, len(decided)):
        return []
    highest = max(scoring.score or 0.0 for scoring in decided)
    return [
        warn(
            "threshold",
            f"{accepted or 'none'} of the last {len(decided)} scored traces {'is' if accepted < 2 else 'are'} accepted:"
            f" the highest score is {shown_score(highest, settings.threshold)}, KP_THRESHOLD={settings.threshold:g}",
            "kp-worker report --from-kafka shows what other thresholds would accept (docs/tuning.md)",
        )
    ]


def check_domains(settings: Settings, outputs: LastOutputs) -> list[Finding]:
    """Return the findings on the domains of the last scored traces, and on profiles that none of them uses."""
    traces = Counter(head.metadata.task_domain for head, _ in outputs.heads)
    wrong = [*_near_domains(settings, traces), *_unused_profiles(settings, traces)]
    return wrong or [ok("domains", _summary(settings, traces) if traces else "no trace is scored yet")]


def _near_domains(settings: Settings, traces: Counter[str]) -> Iterator[Finding]:
    near = [domain for domain in without_profile(traces, settings.scoring_profiles()) if domain.near is not None]
    for domain in near[:NAMED]:
        yield warn(
            "domains",
            f"the domain {shown_name(domain.name)} ({domain.traces} of the last {traces.total()} scored traces) takes "
            f"the profile default; did you mean {shown_name(domain.near or '')}?",
            "correct the agents' metadata.task_domain, or add a profile of this name",
        )
    if len(near) > NAMED:
        yield warn(
            "domains",
            f"{number_of(len(near) - NAMED, 'more domain is', 'more domains are')} close to a profile",
            "kp-worker report lists them",
        )


def _unused_profiles(settings: Settings, traces: Counter[str]) -> Iterator[Finding]:
    for profile in unused_profiles(settings.scoring_profiles(), traces):
        if profile.near is not None:
            yield warn(
                "domains",
                f"none of the last {traces.total()} scored traces takes the profile {shown_name(profile.name)} of the "
                f"settings; did you mean {shown_name(profile.near)}?",
                "correct the profile's name: a trace takes the profile with exactly its metadata.task_domain",
            )


def _summary(settings: Settings, traces: Counter[str]) -> str:
    without = without_profile(traces, settings.scoring_profiles())
    message = f"{len(traces)} in the last {number_of(traces.total(), 'scored trace')}"
    if not without:
        return f"{message}, each with its own profile"
    named = ", ".join(f"{shown_name(domain.name)} ({domain.traces})" for domain in without[:NAMED])
    more = f" and {len(without) - NAMED} more" if len(without) > NAMED else ""
    return f"{message}; without their own profile: {named}{more}"


# -- verdicts: whether they can count, who is judged, and what KP_CONFIDENCE=record accepts

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
        standings = await read_within(20.0, read_judged(settings), "verdicts", "the verdicts")
    except MissingTopicsError:  # reported by the check of the topics
        return []
    if isinstance(standings, Finding):
        return [standings]
    spread = spread_agents(
        (head for head, _ in outputs.heads), 0.0 if settings.confidence == "record" else SPREAD_SHARE
    )
    of_both = [head for head, record_ms in outputs.heads if record_ms >= outputs.complete_from]
    lopsided = judged_shares(of_both, standings.judged)
    late = late_judges(standings.late_seconds)
    return [*filter(None, (spread, lopsided)), *late, _switch(settings, outputs.values, standings)]


def late_judges(late_seconds: Mapping[str, Iterable[float | None]]) -> Iterator[Finding]:
    """Yield a warning for each judge of whose last verdicts many do not count and were issued long before.

    `late_seconds`: as in `Standings`.
    """
    for judge, all_of_it in late_seconds.items():
        verdicts = list(all_of_it)
        late = [seconds for seconds in verdicts if seconds is not None]
        median = statistics.median(late) if late else 0.0
        if len(late) >= 5 and 2 * len(late) >= len(verdicts) and median > 600:
            yield warn(
                "verdicts",
                f"{len(late)} of the last {len(verdicts)} verdicts of judge {shown_name(judge)} do not count: they "
                f"were issued {median / 3600:.1f} hours before they were read, and later ones had been issued",
                "set the judge's clock (NTP): the time of issue orders verdicts. Or somebody sends copies",
            )


def judged_shares(documents: Iterable[Head], judged: Container[tuple[int, int | str]]) -> Finding | None:
    """Return a warning if the judged shares of accepted and rejected traces differ much; None if not.

    `documents`: of both topics, from the same time range. `judged`: as in `Standings`.
    """
    counts = {ACCEPTED: [0, 0], REJECTED: [0, 0]}  # judged, all
    for document in documents:
        of, at = counts.get(document.scoring.decision or ""), document.scoring.source
        if of is not None:
            names = (at.offset, document.id[:CACHED_ID_LENGTH])
            of[0] += any((at.partition, name) in judged for name in names)
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
    message = number_of(standings.verdicts, "verdict counts", "verdicts count")
    if switch is None:
        return ok("verdicts", f"{message}; no trace is scored yet")
    if settings.confidence == "record":
        return ok("verdicts", f"{message}; {switch.accepted} of the last {switch.traces} traces are accepted")
    message += (
        f"; with KP_CONFIDENCE=record {switch.accepted_by_record} of the last {switch.traces} traces would be "
        f"accepted, now {switch.accepted} are"
    )
    if switch.same_share is not None:
        message += f" (the same share at KP_THRESHOLD={switch.same_share.threshold:.3g})"
    return ok("verdicts", message)
