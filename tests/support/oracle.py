"""An independent judge: re-score the raw source topic by brute force, and compare with what came out."""

import base64
import hashlib
import hmac
import json
import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.support import hostile
from tests.support.kafka_fixtures import consume_all, topic_id
from tests.support.stage import origin
from worker.core.trace import InvalidTrace, parse_trace

TOLERANCE: Final = 1e-6
EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00Z")

WEIGHTS: Final[Mapping[str, tuple[float, float, float, float]]] = {  # complexity, novelty, tool diversity, outcome
    "default": (0.25, 0.35, 0.15, 0.25),
    "finance": (0.20, 0.25, 0.10, 0.45),
    "code": (0.20, 0.30, 0.30, 0.20),
    "medical": (0.15, 0.20, 0.10, 0.55),
    "customer_service": (0.20, 0.30, 0.20, 0.30),
}

Place = tuple[int, int]  # source partition and offset
Embed = Callable[[str], npt.ArrayLike]


@dataclass
class Report:
    """What is wrong; all zero is right. `worst` is the greatest difference of a score or novelty."""

    source: int = 0
    accepted: int = 0
    rejected: int = 0
    dead_letters: int = 0
    judged: int = 0
    missing: int = 0
    duplicates: int = 0
    differing_copies: int = 0
    out_of_order: int = 0
    wrong_topic: int = 0
    foreign: int = 0  # no record of the source that a reader of committed records sees
    damaged: int = 0  # key, document, headers or time are not the source's
    worst: float = 0.0
    aborted: int = 0  # output records of transactions that a crash left open; readers of committed records see none
    examples: list[str] = field(default_factory=list)

    def problems(self, *, at_least_once: bool = False) -> list[str]:
        """Name what must not be; at least once, identical repeats may."""
        counts = ["missing", "differing_copies", "out_of_order", "wrong_topic", "foreign", "damaged"]
        counts += [] if at_least_once else ["duplicates"]
        found = [f"{name}={getattr(self, name)}" for name in counts if getattr(self, name)]
        if not self.worst <= TOLERANCE:
            found.append(f"worst={self.worst}")
        return found and [*found, *self.examples]

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "examples")

    def note(self, counter: str, text: str) -> None:
        """Count a problem and keep the first examples."""
        setattr(self, counter, getattr(self, counter) + 1)
        if len(self.examples) < 12:
            self.examples.append(f"{counter}: {text}")


@dataclass
class Standing:
    """What verdicts say of an agent in a domain."""

    judged: int
    succeeded: float
    used: float


class Judged:
    """The verdicts of one partition, each as it was read: by agent and domain, then by trace (its place) and judge."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], dict[tuple[str, str], tuple[int, bytes, float]]] = {}

    def take(self, body: Mapping[str, Any], timestamp: int) -> bool:
        """Count a verdict, unless the judge has issued a later one on the trace, or this one before."""
        issued = (datetime.fromisoformat(body["issued_at"]) - EPOCH) // timedelta(milliseconds=1)
        place = f"{body['partition']}:{body['offset']}"
        ties = hashlib.blake2b(place.encode(), digest_size=16).digest()
        ties += hashlib.blake2b(body["judge"].encode(), digest_size=8).digest()
        of = self._of.setdefault((body["agent_id"], body["task_domain"]), {})
        known, new = of.get((place, body["judge"])), (min(issued, timestamp), ties, float(body["success"]))
        if known is not None and (known[0] > new[0] or known == new):
            return False
        of[place, body["judge"]] = new
        return True

    def standing(self, agent_id: str, domain: str) -> Standing:
        """Return what is known by the formula of docs/verdicts.md; at most 200 verdicts stand for an agent here."""
        firsts = [min(of.values())[2] for of in self._of.values()]
        prior = (sum(firsts) + 4 * 0.5) / (len(firsts) + 4)
        latest = [success for _, _, success in sorted(self._of.get((agent_id, domain), {}).values(), reverse=True)]
        if len(latest) > 200:
            raise ValueError("more verdicts on an agent than a record keeps: make the test smaller")
        weights = [0.5 ** (age / 50) for age in range(len(latest))]
        weighted = sum(w * x for w, x in zip(weights, latest, strict=True))
        return Standing(len(latest), sum(latest), (weighted + 4 * prior) / (sum(weights) + 4))


@dataclass
class Verdict:
    """What an undisturbed run says of one source record; score and novelty are None for a dead letter."""

    record: Any
    kind: str
    score: float | None = None
    novelty: float | None = None
    reason: str | None = None  # of the dead letter, where it must be this one
    standing: Standing | None = None  # of a trace, or after a verdict
    counts: bool = True  # of a verdict
    vector: Any = None  # where outputs have it


@dataclass
class Remembered:
    """An entry of a cache: stream time at insertion, and vector."""

    time: int
    vector: Any


def score(document: Mapping[str, Any], novelty: float, used: float | None = None) -> float:
    """Return the score by the specification's formula; `used`: the confidence of KP_CONFIDENCE=record."""
    steps, metadata = document["steps"], document["metadata"]
    types = [step["type"] for step in steps]
    tools = [step["tool"]["name"] for step in steps if "tool" in step]
    recoveries = types.count("error_recovery")
    complexity = min(1.0, len(set(types)) / 4 * 0.5 + (0.3 if recoveries else 0.0) + len(steps) / 20 * 0.2)
    diversity = min(1.0, len(set(tools)) / max(1, len(steps)) * 3)
    confidence = used if used is not None and metadata["success"] else float(document["outcome"]["confidence"])
    outcome = confidence * (1.0 if metadata["success"] else 0.3)
    weights = WEIGHTS.get(metadata["task_domain"], WEIGHTS["default"])
    total: float = sum(w * x for w, x in zip(weights, (complexity, novelty, diversity, outcome), strict=True))
    if types == ["thought"]:
        total = 0.1
    if recoveries > 2 and metadata["success"]:
        total = min(1.0, total + 0.1)
    if tools and len(set(tools)) <= 1:
        total = max(0.0, total - 0.1)
    return min(1.0, max(0.0, total))


def judge(
    records: Sequence[Any],
    embed: Embed,
    capacity: int,
    ttl_ms: int | None,
    reason: Callable[[Any], str | None] = lambda record: None,
    refused: Callable[[Any], bool] = lambda record: False,
    *,
    objective_apart: bool = False,
    topic_id: str | None = None,
    judges: Mapping[str, bytes] | None = None,
    older: Container[Place] = (),
    vectors: bool = False,
) -> dict[Place, Verdict]:
    """Score the records of all partitions, each partition in offset order.

    `reason`: of a dead letter that a record becomes before it is parsed; `refused`: whether the output topics refuse a
    trace once it is scored (its vector stays in the cache). `objective_apart`: KP_EMBED_TEXT=objective. `judges`:
    the keys of verdicts, which must be signed for `topic_id` and whose records make the scores then, except for the
    places in `older`: a release without verdicts has read them. `vectors`: KP_OUTPUT_EMBEDDING.
    """
    verdicts: dict[Place, Verdict] = {}
    entries: dict[int, list[Remembered]] = defaultdict(list)
    judged: dict[int, Judged] = defaultdict(Judged)
    stream_time: dict[int, int] = {}
    for record in sorted(records, key=lambda r: (r.partition, r.offset)):
        place = record.partition, record.offset
        if (why := reason(record)) is not None:
            verdicts[place] = Verdict(record, "dead-letter", reason=why)
            continue
        control = dict(record.headers).get("kp-control")
        if control == b"verdict" and place in older:
            verdicts[place] = Verdict(record, "dead-letter", reason="missing_field")
            continue
        if control == b"verdict":
            verdicts[place] = rule(record, judged[record.partition], judges or {}, topic_id)
            continue
        try:
            parse_trace(record.value)
        except InvalidTrace:
            verdicts[place] = Verdict(record, "dead-letter")
            continue
        document = json.loads(record.value)
        created = (datetime.fromisoformat(document["metadata"]["created_at"]) - EPOCH) // timedelta(milliseconds=1)
        now = stream_time[record.partition] = max(
            min(created, record.timestamp), stream_time.get(record.partition, -(1 << 62))
        )
        objective, contents = document["task"]["objective"], [step.get("content", "") for step in document["steps"]]
        vector = np.asarray(embed(" ".join([objective, *contents])), dtype=np.float64)
        if objective_apart:
            vector = vector + np.asarray(embed(objective)) if any(contents) else np.asarray(embed(objective), "f8")
        vector = vector / np.sqrt(vector @ vector)
        cache = entries[record.partition][-capacity:]
        live = [it.vector for it in cache if ttl_ms is None or now - it.time < ttl_ms]
        novelty = 1.0 - float(max(np.asarray(live) @ vector)) if live else 0.5
        agent_id = document["metadata"].get("agent_id", "")
        entries[record.partition] = [*cache, Remembered(now, vector)]
        if refused(record):
            verdicts[place] = Verdict(record, "dead-letter", reason="refused_by_topic")
            continue
        standing = None
        if judges is not None and place not in older:
            standing = judged[record.partition].standing(agent_id, document["metadata"]["task_domain"])
        value = score(document, novelty, None if standing is None else standing.used)
        kind = "accepted" if value >= 0.75 else "rejected"
        verdicts[place] = Verdict(record, kind, value, novelty, standing=standing, vector=vector if vectors else None)
    return verdicts


def rule(record: Any, judged: Judged, judges: Mapping[str, bytes], topic_id: str | None) -> Verdict:
    """Let a verdict count, unless it is forged, or for another topic."""
    body = json.loads(record.value)
    key = judges.get(body["judge"], b"")
    said = dict(record.headers)["kp-control-signature"]
    forged = said != hmac.new(key, record.value, "sha256").hexdigest().encode()
    if forged or (body["topic_id"], body["partition"]) != (topic_id, record.partition):
        return Verdict(record, "dead-letter", reason="bad_control")
    counts = judged.take(body, record.timestamp)
    return Verdict(record, "judged", standing=judged.standing(body["agent_id"], body["task_domain"]), counts=counts)


def check(
    bootstrap: str,
    env: Mapping[str, str],
    embed: Embed,
    *,
    hostile_records: bool = False,
    refused: Callable[[Any], bool] = lambda record: False,
) -> Report:
    """Judge the source topic and compare the three output topics with it (`env`: the workers' settings).

    `hostile_records`: the source holds those of hostile.py, which no client library reads. `refused`: as for `judge`.
    """
    ttl = env.get("KP_CACHE_TTL_SECONDS", "3600")
    topic = env["KP_SOURCE_TOPIC"]
    source = hostile.source(bootstrap, topic) if hostile_records else consume_all(bootstrap, topic)
    path = env.get("KP_VERDICT_KEY_FILE")
    lines = Path(path).read_text().splitlines() if path else ()
    keys = {name: key.encode() for name, key in (line.split() for line in lines)}
    verdicts = judge(
        source,
        embed,
        int(env.get("KP_CACHE_MAX_ELEMENTS", "1000")),
        None if ttl == "none" else round(float(ttl) * 1000),
        *((hostile.reason, hostile.refused) if hostile_records else (lambda record: None, refused)),
        objective_apart=env.get("KP_EMBED_TEXT") == "objective",
        topic_id=topic_id(bootstrap, topic),
        judges=keys if env.get("KP_CONFIDENCE") == "record" else None,
        vectors=env.get("KP_OUTPUT_EMBEDDING") == "true",
    )
    names = {"accepted": "KP_ACCEPTED_TOPIC", "rejected": "KP_REJECTED_TOPIC", "dead-letter": "KP_DEAD_LETTER_TOPIC"}
    if keys:
        names["judged"] = "KP_JUDGED_TOPIC"
    outputs = {kind: consume_all(bootstrap, env[name]) for kind, name in names.items()}
    report = compare(verdicts, outputs)
    everything = sum(len(consume_all(bootstrap, env[name], "read_uncommitted")) for name in names.values())
    report.aborted = everything - sum(map(len, outputs.values()))
    return report


def compare(verdicts: Mapping[Place, Verdict], outputs: Mapping[str, Sequence[Any]]) -> Report:
    """Compare every output record with the verdict on its source record."""
    kinds = ("accepted", "rejected", "dead-letter", "judged")
    accepted, rejected, dead_letters, judged = (len(outputs.get(kind, ())) for kind in kinds)
    report = Report(len(verdicts), accepted, rejected, dead_letters, judged)
    copies: dict[Place, tuple[str, Any]] = {}
    homes: dict[tuple[str, int], int] = {}  # the output partition of each source partition, for each topic
    latest: dict[tuple[str, int], int] = {}
    for kind, records in outputs.items():
        for record in records:
            place = origin(record)
            at = f"{kind} {record.partition}/{record.offset} from source {place[0]}/{place[1]}"
            verdict = verdicts.get(place)
            if verdict is None:
                report.note("foreign", at)
                continue
            if place in copies:
                report.note("duplicates", at)
                if copies[place] != (kind, contents(record)):
                    report.note("differing_copies", at)
                continue
            copies[place] = kind, contents(record)
            stream = kind, place[0]
            if homes.setdefault(stream, record.partition) != record.partition:
                report.note("out_of_order", f"{at}: its source partition is elsewhere, too")
            if place[1] < latest.get(stream, -1):
                report.note("out_of_order", f"{at} after {latest[stream]}")
            latest[stream] = max(place[1], latest.get(stream, -1))
            _compare_one(report, at, kind, record, verdict)
    for place in sorted(verdicts.keys() - copies.keys()):
        report.note("missing", f"source {place[0]}/{place[1]}")
    return report


def _compare_one(report: Report, at: str, kind: str, record: Any, verdict: Verdict) -> None:
    source = verdict.record
    if verdict.reason is not None:
        _compare_reason(report, at, kind, record, verdict)
        return
    if "judged" in (kind, verdict.kind):
        said: Any = json.loads(record.value) if kind == verdict.kind else {"counts": None, "used": {"now": math.inf}}
        wanted = verdict.standing
        if wanted is None or said["counts"] != verdict.counts or abs(said["used"]["now"] - wanted.used) > TOLERANCE:
            report.note("damaged", f"{at}: expected {verdict.counts}, {wanted}, got {said}")
        return
    document = json.loads(record.value) if kind != "dead-letter" else {}
    scoring = document.pop("scoring", {})
    if verdict.score is None or verdict.novelty is None or not scoring:
        if kind != verdict.kind:
            report.note("wrong_topic", f"{at}: expected {verdict.kind}")
        intact = record.value == source.value
    else:
        header = float(dict(record.headers)["kp-score"])
        worst = max(abs(x - verdict.score) for x in (scoring["score"], header, document["metadata"]["quality_score"]))
        worst = max(worst, abs(scoring["components"]["novelty"] - verdict.novelty))
        if worst > TOLERANCE:
            report.note("damaged", f"{at}: score {scoring['score']}, expected {verdict.score}, differs by {worst}")
        report.worst = max(report.worst, worst)
        if verdict.vector is not None:
            vector = np.frombuffer(base64.b64decode(scoring["embedding"]["data"]), "<f4")
            if not np.abs(vector - verdict.vector).max() < TOLERANCE:
                report.note("damaged", f"{at}: another vector")
        if verdict.standing is not None:
            found, wanted = scoring["confidence"], verdict.standing
            if found["judged"] != wanted.judged or abs(found["succeeded"] - wanted.succeeded) > TOLERANCE:
                report.note("damaged", f"{at}: confidence {found}, expected {wanted}")
        if kind != verdict.kind and abs(verdict.score - scoring["threshold"]) > TOLERANCE:
            report.note("wrong_topic", f"{at}: expected {verdict.kind}")
        original = json.loads(source.value)
        document["metadata"]["quality_score"] = original["metadata"]["quality_score"]
        intact = document == original
    kept = tuple(record.headers)[: len(source.headers)] == tuple(source.headers)
    if not (intact and kept and record.key == source.key and record.timestamp == source.timestamp):
        report.note("damaged", f"{at}: not what the source record holds")


def _compare_reason(report: Report, at: str, kind: str, record: Any, verdict: Verdict) -> None:
    """Compare a dead letter that is none for its value's sake."""
    source, headers = verdict.record, dict(record.headers)
    if kind != "dead-letter":
        report.note("wrong_topic", f"{at}: expected a dead letter, {verdict.reason}")
        return
    if headers["kp-error-reason"].decode() != verdict.reason:
        report.note("damaged", f"{at}: {headers['kp-error-reason']!r}, expected {verdict.reason}")
    if isinstance(source, hostile.UnreadBatch):
        offsets = int(headers["kp-source-first-offset"]), int(headers["kp-source-last-offset"])
        intact = offsets == (source.first, source.offset)
    elif verdict.reason == "too_large":
        intact = True  # larger than its topic takes, so it is cut: test_hostile_records.py has how
    else:
        kept = tuple(record.headers)[: len(source.headers)] == source.headers
        intact = kept and (record.key, record.value, record.timestamp) == (source.key, source.value, source.timestamp)
    if not intact:
        report.note("damaged", f"{at}: not what the source record holds")


def contents(record: Any) -> tuple[Any, ...]:
    """Return all of a record that must be equal in its repeats."""
    return record.partition, record.key, record.value, tuple(record.headers), record.timestamp
