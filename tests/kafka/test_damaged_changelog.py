"""A changelog to which somebody else has written: the worker starts, says so, and scores as if nothing had happened."""

import time
from typing import Any

import pytest

from tests.support.crash_worker import HashEmbedder
from tests.support.damaged import bad_entries, bad_markers, entry_fields
from tests.support.kafka_fixtures import consume_all, create_topics, produce
from tests.support.raw_batches import RawRecord, batch_of, encode_batch, encode_record, produce_batch
from tests.support.stage import LINES, NO_MODEL, Diagnosis, Stage, Workers, documents
from worker.core.changelog import MARKER_KEY, Entry, decode, decode_marker
from worker.lab.broker.embedded_kafka import EmbeddedKafka

MODEL = HashEmbedder.identity.key()
NOW = int(time.time() * 1000)
LIMIT = 2 << 20
"""KP_MAX_BATCH_BYTES of these tests."""


def stage_of(kafka: EmbeddedKafka) -> Stage:
    stage = Stage(kafka, KP_MAX_BATCH_BYTES=str(LIMIT))
    create_topics(stage.bootstrap, {stage.name: 2})
    return stage


def score(stage: Stage, first: int, count: int) -> None:
    """Publish traces to both partitions, and wait until they are scored."""
    for partition in (0, 1):
        lines = LINES[first + partition * count : first + (partition + 1) * count]
        stage.produce([(None, line, (), partition, NOW) for line in lines])
        stage.wait_committed(first + (partition + 1) * count)


def results(stage: Stage) -> list[Any]:
    found = []
    for document in documents(stage):
        scoring: Any = document["scoring"]
        source = scoring.pop("source")
        found.append((source["partition"], source["offset"], document["id"], scoring))
    return sorted(found, key=lambda it: it[:2])


def damage(stage: Stage) -> dict[int, list[tuple[bytes, bytes]]]:
    """Write to both partitions of the changelog, and return keys and values of the damaged records of each.

    They are made from the last entry and the record of the epochs. Before them are batches that clients cannot read:
    the last entry again, with a header's name that is not UTF-8; a batch that unpacks to too much; and one whose last
    record cannot be read. That is a fault, a bad entry and a fault.
    """
    changelog = f"{stage.name}-novelty-changelog"
    found: dict[int, list[tuple[bytes, bytes]]] = {}
    there = consume_all(stage.bootstrap, changelog)
    for partition in (0, 1):
        mine = [it for it in there if it.partition == partition]
        (marker,) = [it for it in mine if it.key == MARKER_KEY]
        last = [it for it in mine if it.key != MARKER_KEY][-1]
        found[partition] = _damaged(decode(last.value), decode_marker(marker.value).topic_id)
        same = RawRecord(last.value, last.key, ((b"caf\xe9", b""),))
        blank = RawRecord(b" " * (2 * LIMIT), b"1:2024:900")
        parts = [encode_record(RawRecord(b"bad", b"1:2024:90%d" % delta), delta, 0) for delta in (0, 7)]
        for batch in (
            encode_batch([same]),
            encode_batch([blank], "gzip"),
            batch_of(b"".join(parts), 2, "none", NOW, NOW),
        ):
            produce_batch(stage.bootstrap, changelog, partition, batch)
        produce(stage.bootstrap, changelog, [(key, value, (), partition) for key, value in found[partition]])
    return found


def _damaged(last: Entry, topic_id: str) -> list[tuple[bytes, bytes]]:
    number = last.epoch
    assert number is not None
    fields = entry_fields(last.sequence, last.source_offset, last.stream_time_ms, MODEL, last.array(), number)
    values = [value for _, value in bad_entries(fields)]
    rows = [(b"%d:2024:%d" % (number, 1000 + place), value) for place, value in enumerate(values)]
    return [*rows, (MARKER_KEY, next(iter(bad_markers(topic_id))))]


@pytest.mark.sample(1)
def test_damaged_records_are_skipped_and_change_no_score(kafka: EmbeddedKafka, hashing: Workers) -> None:
    whole, clean = stage_of(kafka), stage_of(kafka)
    for stage in (whole, clean):
        with hashing(stage.env).wait_ready() as worker:
            score(stage, 0, 25)
            worker.finish()
    assert results(whole) == results(clean)

    changelog, rows = f"{whole.name}-novelty-changelog", damage(whole)
    expected = sum(len(of_one) + 3 for of_one in rows.values())  # 3 are in batches of their own
    worker, _ = (hashing(stage.env).wait_ready() for stage in (whole, clean))
    assert worker.metric("kp_changelog_entries_skipped_total", cause="corrupt") == expected
    for partition in (0, 1):
        count = expected // 2
        (line,) = [it for it in worker.log().splitlines() if f"changelog {changelog}/{partition} offset" in it]
        assert f"the entry is skipped ({count} damaged in all)" in line
    for stage in (whole, clean):
        score(stage, 50, 25)
    assert results(whole) == results(clean)
    assert len(results(whole)) == 100
    assert "Traceback" not in worker.log()


def test_commands_read_a_damaged_changelog(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = stage_of(kafka)
    with hashing(stage.env).wait_ready():
        score(stage, 0, 25)
    damage(stage)

    diagnosis = Diagnosis(stage.env | NO_MODEL)  # it looks at no cache without an embedder
    assert "no entries were looked at" not in str(diagnosis.of("cache"))
    assert diagnosis.of("cache entries") == [("ok", "50 live: 25 in partition 0, 25 in partition 1")]
