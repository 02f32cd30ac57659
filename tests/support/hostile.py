"""Hostile and odd records among good ones, all that a broker accepts, and what must become of each."""

import asyncio
import gzip
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import Record, create_topics
from tests.support.raw_batches import (
    CODECS,
    RawRecord,
    batch_of,
    blank_bomb,
    encode_batch,
    encode_record,
    produce_batches,
    varint,
)
from tests.support.raw_reader import RawSourceRecord, read_batches
from tests.support.stage import OUTPUTS, Stage, origin
from worker.lab.broker.embedded_kafka import EmbeddedKafka

MAX_BATCH_BYTES: Final = 4 << 20
"""KP_MAX_BATCH_BYTES of the workers under test; every batch of this module is far from it, on one side or the other."""

DAY_MS: Final = 86_400_000

OUTPUT_CONFIG: Final = {"message.timestamp.after.max.ms": "600000"}
"""Settings of the accepted and rejected topics: they refuse what is dated tomorrow."""

SOURCE_CONFIG: Final = {"message.timestamp.after.max.ms": str(30 * DAY_MS)}


@dataclass(frozen=True)
class UnreadBatch:
    """All of a batch that a worker must not unpack; it counts as one record, at its last offset."""

    partition: int
    first: int
    offset: int


SourceRecord = RawSourceRecord | UnreadBatch


def source(bootstrap: str, topic: str) -> list[SourceRecord]:
    """Return what is on the source topic, a batch that unpacks to too much as one."""
    found: list[SourceRecord] = []
    for batch in read_batches(bootstrap, topic):
        if batch.unpacked > MAX_BATCH_BYTES:
            found.append(UnreadBatch(batch.partition, batch.first, batch.last))
        else:
            found += batch.records
    return found


def reason(record: SourceRecord) -> str | None:
    """Return the reason of the dead letter that must come of a record before it is parsed, or None."""
    if isinstance(record, UnreadBatch):
        return "batch_too_large"
    if record.has_bad_header:
        return "bad_header"
    size = len(record.key or b"") + len(record.value or b"")
    size += sum(2 + len(name) + len(value or b"") for name, value in record.raw_headers)
    return "too_large" if size > 1 << 20 else None


def refused(record: SourceRecord) -> bool:
    """Whether the output topics refuse the scored trace: it is dated later than they allow."""
    return isinstance(record, RawSourceRecord) and record.timestamp > time.time() * 1000 + DAY_MS / 2


Change = Callable[[RawRecord], RawRecord]


def later(ms: int) -> Change:
    return lambda record: replace(record, timestamp_ms=(record.timestamp_ms or 0) + ms)


def no_key(record: RawRecord) -> RawRecord:
    return replace(record, key=None)


def bad(record: RawRecord) -> RawRecord:
    """Write what is no JSON."""
    return replace(record, value=b"bad")


def large_key(record: RawRecord) -> RawRecord:
    """Give a record that is no trace a key that no topic takes."""
    return replace(record, value=b"bad", key=b"k" * (3 << 20))


def many_headers(record: RawRecord) -> RawRecord:
    """Give a record that is no trace more headers than a client makes."""
    return replace(record, value=b"bad", headers=((b"", b""),) * 600_000)


def with_header(name: bytes, value: bytes = b"value") -> Change:
    return lambda record: replace(record, headers=(*record.headers, (name, value)))


EMOJI: Final = "\N{FIRE}".encode() * 560
LATIN_1: Final = with_header(b"caf\xe9")
LATER_MS: Final = 1_200_000


@dataclass(frozen=True)
class Kind:
    """A batch that is made of good records, and what must become of what is in it."""

    batch: Callable[[RawRecord], bytes]
    """Made of one good record, which may be in it several times."""

    letters: Mapping[int, str] = field(default_factory=dict)
    """The reason of each dead letter, by its place in the batch. The others are scored."""

    change: Change | None = None
    """What was done to the record, where the batch is that record alone."""

    dropped: str = ""
    """What the dead letter had to drop of it."""


def changed(reason: str, *changes: Change, codec: str = "none", dropped: str = "") -> Kind:
    """Return the kind of a single record with some changes."""

    def change(record: RawRecord) -> RawRecord:
        for each in changes:
            record = each(record)
        return record

    return Kind(lambda good: encode_batch([change(good)], codec), {0: reason}, change, dropped)


def _parts(*deltas: int) -> Callable[[RawRecord], bytes]:
    """Return a batch of one record several times, at offsets that its count does not allow."""
    return lambda good: batch_of(
        b"".join(encode_record(good, delta, 0) for delta in deltas), len(deltas), "none", *[good.timestamp_ms or 0] * 2
    )


def _header_bomb(good: RawRecord) -> bytes:
    body = b"\0\0\0" + varint(1) + b"k" + varint(2) + b"{}" + varint(3_000_000) + b"\0\0" * 3_000_000
    return batch_of(gzip.compress(varint(len(body)) + body), 1, "gzip", *[good.timestamp_ms or 0] * 2)


UNREADABLE: Final[Mapping[str, Kind]] = {
    **{
        f"latin 1, {codec}": Kind(
            lambda good, codec=codec: encode_batch([good, LATIN_1(good), good, *[LATIN_1(good)] * 2, good], codec),  # type: ignore[misc]
            dict.fromkeys((1, 3, 4), "bad_header"),
        )
        for codec in CODECS
    },
    **{
        f"too large, {codec}": Kind(
            lambda good, codec=codec: encode_batch([replace(good, value=b" " * MAX_BATCH_BYTES), good, good], codec),  # type: ignore[misc]
            {2: "batch_too_large"},
        )
        for codec in CODECS
        if codec != "none"
    },
    "bomb": Kind(lambda good: blank_bomb(80 << 20, moment_ms=good.timestamp_ms), {0: "batch_too_large"}),
    "header bomb": Kind(_header_bomb, {0: "batch_too_large"}),
    "wrong offsets": Kind(_parts(0, 1, 700), {2: "unreadable"}),
    "the same offsets": Kind(_parts(0, 0, 0), {1: "unreadable", 2: "unreadable"}),
}
"""What the reader cannot take as it is. A batch that unpacks to too much is one record, at its last offset."""

REFUSED: Final[Mapping[str, Kind]] = {
    "no key": changed("refused_by_topic", no_key),
    "future": changed("refused_by_topic", later(LATER_MS)),
    "no key, future": changed("refused_by_topic", no_key, later(LATER_MS)),
    "bad, no key": changed("not_json", bad, no_key),
    "bad, future": changed("not_json", bad, later(LATER_MS)),
    "bad, no key, future": changed("not_json", bad, no_key, later(LATER_MS)),
    "bad, large": changed("not_json", lambda good: replace(good, value=b"bad" * 50_000)),
    "bad, large key, future": changed(
        "not_json", lambda good: replace(bad(good), key=b"k" * 100_000), later(LATER_MS), dropped="key (100000 bytes)"
    ),
    "bad, large header": changed("not_json", bad, with_header(EMOJI, b"x" * 100_000), dropped="headers (2 "),
}
"""What topics with REFUSING do not take: a trace becomes a dead letter, a dead letter loses what is too much."""

LARGE: Final[Mapping[str, Kind]] = {
    "many headers": changed("too_large", many_headers, codec="gzip", dropped="headers (600000 with 0 bytes)"),
    "large key": changed("too_large", large_key, codec="gzip", dropped=f"key ({3 << 20} bytes)"),
    "large key, at the limit": changed(
        "not_json", bad, lambda good: replace(good, key=b"k" * 1_048_300), dropped="key (1048300 bytes)"
    ),
    "large value, large header": changed(
        "not_json", lambda good: replace(good, value=b"x" * 1_040_000), with_header(EMOJI, b"")
    ),
}
"""What Kafka's defaults take on a source topic, and no output topic."""

GOOD: Final[Mapping[str, Kind]] = {
    f"good, {codec}": Kind(lambda good, codec=codec: encode_batch([good, good], codec))  # type: ignore[misc]
    for codec in CODECS
}
KINDS: Final[Mapping[str, Kind]] = {**UNREADABLE, **REFUSED, **LARGE, **GOOD}

REFUSING: Final = {
    "max.message.bytes": "65536", "message.timestamp.after.max.ms": "60000", "cleanup.policy": "compact",
}  # fmt: skip
"""Settings of a topic that refuses a null key, a time in the future, and a batch of more than 64 KiB."""


def good_record(number: int, moment_ms: int, size: int = 0) -> RawRecord:
    """Return a record that everybody takes: one of seven tasks."""
    task, confidence = f"task {number % 7}" + "x" * size, number % 10 / 10
    value = trace_bytes(f"kp:trace:{number}", objective=task, confidence=confidence)
    return RawRecord(value, b"k%d" % number, ((b"n", b"%d" % number),), moment_ms)


def refused_program() -> list[str]:
    """Return every kind that a topic refuses between good records, and every pair of them."""
    names = ["good, none"]
    for first in REFUSED:
        names += [first, "good, none"]
    for first in REFUSED:
        for second in REFUSED:
            names += [first, second, "good, none"]
    return names


class Sent(NamedTuple):
    """A record on partition 0, and what it must become."""

    kind: str
    record: RawRecord
    """As it was sent, where it is alone in its batch; else the good one of which the batch is made."""

    reason: str | None
    """Of its dead letter; None: it is scored."""


def send(stage: Stage, names: Sequence[str], now: int, start: int = 0) -> dict[int, Sent]:
    """Put kinds on partition 0, made of good records numbered from `start` on; return each by offset."""
    rows = []
    for number, name in enumerate(names, start):
        good = good_record(number, now + number)
        rows.append((name, good, KINDS[name].batch(good)))
    firsts = asyncio.run(produce_batches(stage.bootstrap, stage.name, [(0, batch) for _, _, batch in rows]))
    sent = {}
    for (name, good, batch), first in zip(rows, firsts, strict=True):
        kind, count = KINDS[name], int.from_bytes(batch[57:61], "big")
        record = kind.change(good) if kind.change else good
        whole = "batch_too_large" in kind.letters.values()
        for place in range(count - 1 if whole else 0, count):
            sent[first + place] = Sent(name, record, kind.letters.get(place))
    return sent


def send_scored(stage: Stage, sent: Iterable[Sent]) -> None:
    """Put on partition 0 what others were sent and scored, also where a topic refused the output."""
    batches = [(0, encode_batch([it.record])) for it in sent if it.reason in (None, "refused_by_topic")]
    asyncio.run(produce_batches(stage.bootstrap, stage.name, batches))


def stage_of(kafka: EmbeddedKafka, config: Mapping[str, str], **settings: str) -> Stage:
    """Return a stage with two partitions of each topic; `config`: of those to which the worker writes."""
    stage = Stage(kafka, KP_EVENT_TIME="record", KP_MAX_BATCH_BYTES=str(MAX_BATCH_BYTES), **settings)
    changelog = {"cleanup.policy": "compact", **({"max.message.bytes": "65536"} if config else {})}
    topics = {
        stage.name: (2, {"max.message.bytes": "8000000"}),
        **{f"{stage.name}.{kind}": (2, config) for kind in OUTPUTS},
        f"{stage.name}-novelty-changelog": (2, changelog),
    }
    create_topics(stage.bootstrap, topics)
    return stage


def results(stage: Stage) -> dict[tuple[int, int], list[tuple[str, Any]]]:
    """Return topic and record of each output, by its place on the source."""
    found: dict[tuple[int, int], list[tuple[str, Any]]] = {}
    for kind, records in stage.outputs().items():
        for record in records:
            found.setdefault(origin(record), []).append((kind, record))
    return found


def scoring(record: Any) -> dict[str, Any]:
    """Return what the worker said of a trace, without its place."""
    document: dict[str, Any] = json.loads(record.value)["scoring"]
    del document["source"]
    return document


def scores(found: Mapping[tuple[int, int], list[tuple[str, Any]]], sent: Iterable[Sent]) -> list[dict[str, Any]]:
    """Return in order how a worker that refused nothing scored the others, of what send_scored has sent it."""
    kept = [it for it in sent if it.reason in (None, "refused_by_topic")]
    return [scoring(found[0, n][0][1]) for n, it in enumerate(kept) if it.reason is None]


def batches(seed: int, good: Iterator[Record]) -> Iterator[tuple[str, int, bytes]]:
    """Yield (kind, partition, batch) without end: one to six records, good ones and those of the kind mixed."""
    rng = random.Random(seed)
    kinds: dict[str, Change] = {
        "codec": lambda record: record,
        "bad_header": LATIN_1,
        "future": lambda record: replace(record, timestamp_ms=int(time.time() * 1000) + 20 * DAY_MS),
        "emoji": with_header(EMOJI),
        "null_key": no_key,
        "large_key": large_key,
        "headers": many_headers,
    }
    while True:
        kind = rng.choices(["bomb", *kinds], [2, 40, 20, 15, 10, 10, 3, 3])[0]
        partition, of_partition = _some(rng, good)
        if kind == "bomb":
            yield kind, partition, blank_bomb(2 * MAX_BATCH_BYTES, moment_ms=of_partition[0].timestamp_ms)
            continue
        records = [kinds[kind](record) if rng.random() < 0.5 else record for record in of_partition]
        large = kind in ("large_key", "headers")
        codec = "gzip" if large else rng.choice([*CODECS])
        yield kind, partition, encode_batch(records[:1] if large else records, codec)


def _some(rng: random.Random, good: Iterator[Record]) -> tuple[int, list[RawRecord]]:
    """Return one to six good records of one partition."""
    first = next(good)
    records = [first, *(record for record, _ in zip(good, range(rng.randrange(20)), strict=False))]
    mine = [record for record in records if record.partition == first.partition][:6]
    return first.partition or 0, [
        RawRecord(r.value, r.key, [(name.encode(), value) for name, value in r.headers], r.timestamp_ms) for r in mine
    ]


class HostileLoad(threading.Thread):
    """Sends such batches at `rate` a second until it is told to stop, whatever happens to the broker.

    A batch whose answer was lost is sent again and may be there twice: the judge reads the topic.
    """

    def __init__(self, bootstrap: str, topic: str, found: Iterator[tuple[str, int, bytes]], rate: float) -> None:
        super().__init__(name="hostile", daemon=True)
        self._arguments = bootstrap, topic, found, rate
        self._enough = threading.Event()
        self.sent: Counter[str] = Counter()

    def run(self) -> None:
        asyncio.run(self._send(*self._arguments))

    def finish(self, timeout: float) -> None:
        """Stop, and wait for the last answer."""
        self._enough.set()
        self.join(timeout)
        if self.is_alive():
            raise AssertionError("the hostile producer is still at work")

    async def _send(self, bootstrap: str, topic: str, found: Iterator[tuple[str, int, bytes]], rate: float) -> None:
        for kind, partition, batch in found:
            while not self._enough.is_set():
                try:
                    await produce_batches(bootstrap, topic, [(partition, batch)])
                except Exception:  # the broker is away: chaos does that
                    await asyncio.sleep(0.5)
                else:
                    self.sent[kind] += 1
                    break
            if self._enough.is_set():
                return
            await asyncio.sleep(1 / rate)
