"""The doctor's checks of settings against what was scored: the caches, domains, thresholds and verdicts."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec
from aiokafka.errors import UnknownTopicOrPartitionError

from worker.commands.doctor.finding import Exam, Finding, ok, warn
from worker.commands.doctor.kafka import ANSWER_SECONDS, GROUPS
from worker.commands.shared.placed_verdicts import Standings, read_judged
from worker.commands.shared.session import Session, read_topics
from worker.commands.shared.shown import shown_name, shown_score
from worker.commands.shared.thresholds import same_share
from worker.config import Settings
from worker.core.changelog import CorruptRecord, Entry, Kind, decode
from worker.core.documents import ScoredDocument
from worker.core.novelty import CACHED_ID_LENGTH, VectorCache, advice, entry_bytes, is_short, megabytes, per_second
from worker.core.records import ACCEPTED, REJECTED
from worker.core.restore import Log, ModelCache, Report, restore
from worker.core.scoring import accepts_too_few, score_trace, unused_profiles, weights_by_verdicts, without_profile
from worker.core.terminal import number_of
from worker.core.track_record import Standing
from worker.kafka.assignment import OffsetsError, Position, check_offsets, read_logs, read_positions
from worker.kafka.describe import describe_topics
from worker.kafka.topics import MissingTopicsError

NAMED: Final = 5
"""Domains that are named; the others are counted."""

MOST_NAMED: Final = 10
"""Partitions and track records that are named."""

# -- what a worker would restore from the changelog: the cache of each partition, and its track records

Record = tuple[str, str, Standing]
"""Agent, domain, and standing."""


class Memory(NamedTuple):
    """What a worker that takes over a partition remembers."""

    live: int  # entries of the model that wrote the last one
    records: list[Record]
    latest: Entry | None  # the last entry
    rate: float | None  # traces a second of stream time; None: too few to tell
    report: Report
    position: Position


async def check_memory(exam: Exam) -> None:
    """Check that the caches hold the TTL, count their entries, and name the track records; keep the caches' models."""
    session = Session(exam.settings)
    memory = await _restored(session)
    if exam.settings.embedder != "none":
        exam.models.update(kept.latest.model for kept in memory.values() if kept.latest is not None)
        exam.add(capacity(exam.settings, memory))
        if memory:
            exam.ok("cache entries", sizes({number: kept.live for number, kept in memory.items()}))
        try:
            await _check_offsets(session, memory)
        except OffsetsError as error:
            exam.fail("offsets", str(error), "until then, the worker exits with code 1")
    if records := [record for kept in memory.values() for record in kept.records]:
        exam.ok("track records", standings(records))


async def _check_offsets(session: Session, memory: Mapping[int, Memory]) -> None:
    """Compare the committed offsets with the changelog, as a worker does when it starts. Raises OffsetsError.

    A worker may have committed after the offsets were read: then its offset has moved.
    """
    settings = session.settings
    ahead = [number for number, kept in memory.items() if kept.report.ahead is not None]
    if ahead and settings.delivery == "exactly_once":
        now = await read_positions(session.client, settings.group_id, settings.source_topic, ahead, ANSWER_SECONDS)
        unmoved = {number: memory[number].report for number in ahead if now[number] == memory[number].position}
        check_offsets(settings.group_id, settings.source_topic, now, unmoved)


async def _restored(session: Session) -> dict[int, Memory]:
    """Restore each partition as a worker that takes it over, but without a producer, so that nobody is fenced.

    Partitions without a committed offset have no memory.
    """
    settings, seconds = session.settings, 20.0
    async with session.admin() as admin:
        topics = await session.topics(admin, settings.source_topic, settings.changelog)
        groups = (await describe_topics(admin, [GROUPS]))[GROUPS]
    if len(topics) < 2 or groups.error is UnknownTopicOrPartitionError:
        return {}
    numbers = range(min(topic.partitions for topic in topics.values()))
    try:
        positions = await read_positions(session.client, settings.group_id, settings.source_topic, numbers, seconds)
    except OffsetsError:  # reported by the check of the lag
        return {}
    committed = {number: position for number, position in positions.items() if position.has_offset}
    return await read_logs(
        session.client, settings.changelog, list(committed), seconds, settings.max_batch_bytes,
        lambda number, log: restored(settings, log, committed[number]),
    )  # fmt: skip


def restored(settings: Settings, log: Log, position: Position) -> Memory:
    """Return what is restored from a partition's changelog."""
    size, latest = settings.cache_max_elements, log.latest(position.offset)
    model = None if latest is None else ModelCache(latest.model, len(latest.vector) // 4, size)
    state = restore(log, position, model)
    cache = VectorCache(size, 1 if model is None else model.dimensions, settings.cache_ttl_ms)
    cache.restore(state.cache(), position.stream_time_ms)
    rate = None if latest is None else _rate(log, latest)
    return Memory(len(cache), list(state.track_record.listed()), latest, rate, state.report, position)


def _rate(log: Log, latest: Entry) -> float | None:
    """Return the rate of the last 500 entries, as far as they are of the latest's epoch and model."""
    times: dict[int, int] = {}
    for record in log.by_kind()[Kind.ENTRY][-500:]:
        with suppress(CorruptRecord):
            entry = decode(record.value)
            if (entry.epoch, entry.model) == (latest.epoch, latest.model):
                times[entry.sequence] = entry.stream_time_ms
    return per_second([times[sequence] for sequence in sorted(times)]) if len(times) >= 100 else None


def capacity(settings: Settings, memory: Mapping[int, Memory]) -> Finding:
    """Return whether the caches hold the TTL, by partition."""
    size, ttl_ms = settings.cache_max_elements, settings.cache_ttl_ms
    dimensions = next((len(kept.latest.vector) // 4 for kept in memory.values() if kept.latest is not None), 384)
    message = f"{size} entries for each partition, at most {megabytes(size * entry_bytes(dimensions))}"
    rate, partition = max(
        ((kept.rate, number) for number, kept in memory.items() if kept.rate is not None), default=(0, 0)
    )
    if not rate:
        return ok("cache", f"{message}; too few traces yet to tell their rate (capacity = rate x TTL)")
    reach_ms = 1000 * size / rate
    message += f"; partition {partition}, the busiest, takes {rate:.3g} traces a second of stream time"
    message += f": they hold {reach_ms / 1000:.0f} s, " + (
        "without a TTL" if ttl_ms is None else f"the TTL is {ttl_ms / 1000:.0f} s"
    )
    if ttl_ms is not None and is_short(reach_ms, ttl_ms):
        return warn("cache", message, advice(rate, reach_ms, ttl_ms, dimensions))
    return ok("cache", message)


def sizes(entries: Mapping[int, int]) -> str:
    """Return the entries in all, and of the partitions with the most."""
    fullest = sorted(entries.items(), key=lambda size: -size[1])
    named = ", ".join(f"{count} in partition {number}" for number, count in fullest[:MOST_NAMED])
    more = f", at most {fullest[MOST_NAMED][1]} in each other" if len(fullest) > MOST_NAMED else ""
    return f"{sum(entries.values())} live: {named}{more}"


def standings(records: Sequence[Record]) -> str:
    """Return the track records with the most verdicts."""
    named = "; ".join(
        f"{shown_name(agent)} in {shown_name(domain)}: {own.succeeded:g} of {own.judged} succeeded, used {own.used:.4f}"
        for agent, domain, own in sorted(records, key=lambda record: -record[2].judged)[:MOST_NAMED]
    )
    more = f"; and {len(records) - MOST_NAMED} more" if len(records) > MOST_NAMED else ""
    return f"{len(records)}: {named}{more}"


# -- the last scored traces: their domains, and how many are accepted


async def check_outputs(exam: Exam) -> None:
    """Check domains and thresholds by the newest outputs; keep these."""
    settings, decoder, complete_from = exam.settings, msgspec.json.Decoder(ScoredDocument), 0
    read: list[tuple[ScoredDocument, int]] = []  # with the record's time, ms

    def take(value: bytes | None, _where: str, record_ms: int) -> None:
        with suppress(ValueError, RecursionError):  # not the worker's
            read.append((decoder.decode(value or b""), record_ms))

    with suppress(MissingTopicsError):  # reported by the check of the topics
        complete_from = await read_topics(settings, (settings.accepted_topic, settings.rejected_topic), take, last=200)
    exam.documents = [document for document, _ in read]
    exam.of_both = [document for document, record_ms in read if record_ms >= complete_from]
    traces = Counter(document.metadata.task_domain for document in exam.documents)
    exam.add(*(list(_near_misses(settings, traces)) or [ok("domains", _summary(settings, traces))]))
    scores = [document.scoring.score for document in exam.of_both]
    accepted = sum(document.scoring.decision == ACCEPTED for document in exam.of_both)
    if accepts_too_few(accepted, len(scores)):
        highest = shown_score(max(scores), settings.threshold)
        exam.warn(
            "threshold",
            f"{accepted or 'none'} of the last {len(scores)} scored traces {'is' if accepted < 2 else 'are'} accepted:"
            f" the highest score is {highest}, KP_THRESHOLD={settings.threshold:g}",
            "kp-worker report --from-kafka shows what other thresholds would accept (docs/tuning.md)",
        )


def _near_misses(settings: Settings, traces: Counter[str]) -> Iterator[Finding]:
    """Yield the domains and the profiles whose names nearly agree."""
    last, profiles = f"of the last {traces.total()} scored traces", settings.scoring_profiles()
    near = [domain for domain in without_profile(traces, profiles) if domain.near is not None]
    for domain in near[:NAMED]:
        yield warn(
            "domains",
            f"the domain {shown_name(domain.name)} ({domain.traces} {last}) takes the profile default; did you mean "
            f"{shown_name(domain.near or '')}?",
            "correct the agents' metadata.task_domain, or add a profile of this name",
        )
    if len(near) > NAMED:
        more = number_of(len(near) - NAMED, "more domain is", "more domains are")
        yield warn("domains", f"{more} close to a profile", "kp-worker report lists them")
    for profile in unused_profiles(profiles, traces):
        if profile.near is not None:
            yield warn(
                "domains",
                f"none {last} takes the profile {shown_name(profile.name)} of the settings; did you mean "
                f"{shown_name(profile.near)}?",
                "correct the profile's name: a trace takes the profile with exactly its metadata.task_domain",
            )


def _summary(settings: Settings, traces: Counter[str]) -> str:
    if not traces:
        return "no trace is scored yet"
    without = without_profile(traces, settings.scoring_profiles())
    named = ", ".join(f"{shown_name(domain.name)} ({domain.traces})" for domain in without[:NAMED])
    more = f" and {len(without) - NAMED} more" if len(without) > NAMED else ""
    which = f"; without their own profile: {named}{more}" if without else ", each with its own profile"
    return f"{len(traces)} in the last {number_of(traces.total(), 'scored trace')}{which}"


# -- verdicts: whether they can count, who is judged, and what KP_CONFIDENCE=record accepts


async def check_verdicts(exam: Exam) -> None:
    """Check the verdicts; nothing without KP_VERDICT_KEY_FILE."""
    settings, documents = exam.settings, exam.documents
    if settings.verdict_key_file is None or documents is None:
        return
    verdicts = await read_judged(settings)
    # Scores that use no verdicts: a topic that gained partitions always has some agents in several
    least = 0.0 if settings.confidence == "record" else 0.1
    exam.add(*spread_agents(documents, least), *judged_shares(exam.of_both, verdicts.judged))
    exam.add(*late_judges(verdicts.late_seconds))
    message = number_of(verdicts.verdicts, "verdict counts", "verdicts count")
    if not documents:
        exam.ok("verdicts", f"{message}; no trace is scored yet")
        return
    accepted, by_record, kept = switch_to_record(documents, verdicts, settings)
    if settings.confidence == "record":
        message += f"; {accepted} of the last {len(documents)} traces are accepted"
        if any(
            weights_by_verdicts(profile.weights) != profile.weights for profile in settings.scoring_profiles().values()
        ):
            message += (
                "; kp-worker report --outcome FIELD --verdicts SHARE compares your weights with ones where the outcome "
                "has 0.6 (docs/verdicts.md)"
            )
    else:
        message += (
            f"; with KP_CONFIDENCE=record {by_record} of the last {len(documents)} traces would be accepted, now "
            f"{accepted} are"
        )
        if kept is not None:
            message += f" (the same share at KP_THRESHOLD={kept:.3g})"
    exam.ok("verdicts", message)


def switch_to_record(
    documents: Sequence[ScoredDocument], standings: Standings, settings: Settings
) -> tuple[int, int, float | None]:
    """Return how many traces are accepted, and would be with KP_CONFIDENCE=record; and `same_share` of the latter."""
    profiles, accepted, by_record, scores = settings.scoring_profiles(), 0, 0, list[float]()
    for document in documents:
        with suppress(ValueError):  # its novelty is no worker's
            new = score_trace(document, document.scoring.components.novelty, profiles, standings.used(document))
            scores.append(new.score)
            accepted += document.scoring.decision == ACCEPTED
            by_record += new.score >= profiles[new.profile].threshold_or(settings.threshold)
    return accepted, by_record, same_share(scores, accepted)


def late_judges(late_seconds: Mapping[str, Collection[float | None]]) -> Iterator[Finding]:
    """Yield a warning for each judge of whose last verdicts many do not count and were issued long before.

    `late_seconds`: as in `Standings`.
    """
    for judge, verdicts in late_seconds.items():
        late = [seconds for seconds in verdicts if seconds is not None]
        if len(late) >= 5 and 2 * len(late) >= len(verdicts) and (median := statistics.median(late)) > 600:
            yield warn(
                "verdicts",
                f"{len(late)} of the last {len(verdicts)} verdicts of judge {shown_name(judge)} do not count: they "
                f"were issued {median / 3600:.1f} hours before they were read, and later ones had been issued",
                "set the judge's clock (NTP): the time of issue orders verdicts. Or somebody sends copies",
            )


def judged_shares(documents: Iterable[ScoredDocument], judged: Container[tuple[int, int | str]]) -> Iterator[Finding]:
    """Yield a warning if the judged shares of accepted and rejected traces differ much.

    `documents`: of both topics, from the same time range. `judged`: as in `Standings`.
    """
    counts = {ACCEPTED: [0, 0], REJECTED: [0, 0]}  # judged, all
    for document in documents:
        of, at = counts.get(document.scoring.decision), document.scoring.source
        if of is not None:
            names = (at.offset, document.id[:CACHED_ID_LENGTH])
            of[0] += any((at.partition, name) in judged for name in names)
            of[1] += 1
    (accepted, of_accepted), (rejected, of_rejected) = counts.values()
    if not (of_accepted and of_rejected):
        return
    one, other = accepted / of_accepted, rejected / of_rejected
    both = (accepted + rejected) / (of_accepted + of_rejected)
    deviation = math.sqrt(both * (1 - both) * (1 / of_accepted + 1 / of_rejected))
    # Twice as often, and by more than three standard deviations: few verdicts are lopsided by chance alone
    if max(one, other) > 2 * min(one, other) and abs(one - other) > 3 * deviation:
        yield warn(
            "verdicts",
            f"{accepted} of the last {of_accepted} accepted traces have a verdict, and {rejected} of the last "
            f"{of_rejected} rejected ones: such verdicts do not tell how often an agent succeeds",
            "draw the runs that are judged at random, from both topics alike (docs/verdicts.md)",
        )


def spread_agents(documents: Iterable[ScoredDocument], least: float) -> Iterator[Finding]:
    """Yield a warning if at least this share of agents has traces of one domain in several partitions."""
    partitions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for document in documents:
        about = document.metadata
        partitions[about.agent_id, about.task_domain].append(document.scoring.source.partition)
    several = {agent for (agent, _), those in partitions.items() if len(those) > 1}
    spread = {agent for (agent, _), those in partitions.items() if len(set(those)) > 1}
    if spread and len(spread) >= least * len(several):
        yield warn(
            "verdicts",
            f"{len(spread)} of {len(several)} agents have traces in several partitions, and each partition keeps its "
            "own track records: an agent's verdicts are spread over them",
            "publish with the agent, or the domain, as the record's key (docs/publishing.md)",
        )
