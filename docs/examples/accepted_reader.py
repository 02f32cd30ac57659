"""Stores each accepted trace, and each verdict, as one row in SQLite (docs/reading-the-accepted-topic.md)."""

import asyncio
import json
import math
import os
import signal
import sqlite3

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError

TABLES = """
CREATE TABLE IF NOT EXISTS accepted (
  id TEXT PRIMARY KEY, score DOUBLE PRECISION NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS unreadable (place TEXT PRIMARY KEY, error TEXT NOT NULL, value BYTEA);
CREATE TABLE IF NOT EXISTS judged (
  source TEXT NOT NULL, judge TEXT NOT NULL, success DOUBLE PRECISION NOT NULL, PRIMARY KEY (source, judge)
);
CREATE VIEW IF NOT EXISTS standing AS
  SELECT * FROM accepted WHERE source NOT IN (SELECT source FROM judged WHERE success < 0.5);
"""
UPSERT = """
INSERT INTO accepted (id, score, source, document) VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET score = excluded.score, source = excluded.source, document = excluded.document
"""
SET_ASIDE = "INSERT INTO unreadable (place, error, value) VALUES (?, ?, ?) ON CONFLICT (place) DO NOTHING"
JUDGE = """
INSERT INTO judged (source, judge, success) VALUES (?, ?, ?) ON CONFLICT (source, judge) DO UPDATE SET success = excluded.success
"""
JUDGED_TOPIC = os.environ.get("KP_JUDGED_TOPIC")


def judgement(value):
    """Return the source record that a verdict is about, its judge and the success; None if it is not in effect."""
    judged = json.loads(value)
    source = judged["source"] | {"offset": judged["trace_offset"]}
    return (json.dumps(source), judged["verdict"]["judge"], judged["verdict"]["success"]) if judged["counts"] else None


def row(value):
    """Return what the table has of a document. The whole document is kept, with the fields that are unknown here."""
    document = json.loads(value)
    scoring = document["scoring"]
    if not isinstance(document["id"], str) or not math.isfinite(scoring["score"]):
        raise TypeError("no id, or no score")
    return document["id"], scoring["score"], json.dumps(scoring["source"]), value.decode()


def store(database, record):
    try:
        if record.topic != JUDGED_TOPIC:
            database.execute(UPSERT, row(record.value))
        elif found := judgement(record.value):
            database.execute(JUDGE, found)
    except sqlite3.OperationalError:  # locked, or the disk is full: no fault of the record
        raise
    except Exception as error:
        place = f"{record.topic}/{record.partition}/{record.offset}"
        print(f"{place} cannot be read: {error!r}")
        database.execute(SET_ASIDE, (place, repr(error), record.value))


async def main():
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    database = sqlite3.connect(os.environ["DATABASE"], timeout=60)
    database.executescript(TABLES)
    consumer = AIOKafkaConsumer(
        *filter(None, (os.environ.get("KP_ACCEPTED_TOPIC", "traces.accepted"), JUDGED_TOPIC)),
        bootstrap_servers=os.environ["KP_BOOTSTRAP_SERVERS"],
        group_id="ingest",
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer:  # it leaves the group at the end, so that another process goes on at once
        print("reading", *consumer.subscription())
        while not stopped.is_set():
            batches = await consumer.getmany(timeout_ms=500, max_records=500)
            with database:  # one transaction
                for record in [each for batch in batches.values() for each in batch]:
                    store(database, record)
            try:
                await consumer.commit()  # up to what getmany has returned
            except CommitFailedError:
                print("the partitions have moved: their new reader stores these records again")
    database.close()


asyncio.run(main())
