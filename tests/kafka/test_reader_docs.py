"""docs/examples/accepted_reader.py: killed between a row and its offset, and with a second reader."""

import shutil
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.support.accepted_topic import accepted_topic, judge, start_reader, two_readers
from tests.support.kafka_fixtures import produce, wait_until
from tests.support.surroundings import DOCS
from worker.lab.broker.embedded_kafka import EmbeddedKafka

KILLED = """
import asyncio, functools, os, runpy, sqlite3
from aiokafka import AIOKafkaConsumer
really_commit = AIOKafkaConsumer.commit
async def commit(self):
    if sqlite3.connect(os.environ["DATABASE"]).execute("SELECT count(*) FROM accepted").fetchone() != (0,):
        await asyncio.sleep(0.3)  # a commit by a timer would come now
        os._exit(9)
    await really_commit(self)  # too early, if anything was read
AIOKafkaConsumer.commit = commit
# the group waits so long for a member that was killed
AIOKafkaConsumer.__init__ = functools.partialmethod(AIOKafkaConsumer.__init__, session_timeout_ms=6000)
runpy.run_path("reader.py")
"""


def tables(database: Path) -> tuple[dict[str, tuple[float, str]], list[bytes | None]]:
    """Return the rows by id, and the values of what could not be read."""
    with closing(sqlite3.connect(database)) as found:
        rows = {each[0]: each[1:] for each in found.execute("SELECT id, score, document FROM accepted")}
        return rows, [value for (value,) in found.execute("SELECT value FROM unreadable")]


def standing(database: Path) -> set[str]:
    """Return the ids of the rows that no verdict calls a failure."""
    with closing(sqlite3.connect(database)) as found:
        return {each for (each,) in found.execute("SELECT id FROM standing")}


def test_the_reader_stores_each_trace_once(kafka: EmbeddedKafka, tmp_path: Path, seed: int) -> None:
    shutil.copy(DOCS / "examples/accepted_reader.py", tmp_path / "reader.py")
    (tmp_path / "killed.py").write_text(KILLED)
    topic = accepted_topic(kafka, seed, traces=30)
    database, log = tmp_path / "traces.db", tmp_path / "log"
    judged, later, failed = judge(kafka, topic)
    env = {
        "PYTHONUNBUFFERED": "1", "DATABASE": str(database),
        "KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "KP_ACCEPTED_TOPIC": topic.name,
        "KP_JUDGED_TOPIC": judged,
    }  # fmt: skip

    with start_reader([sys.executable, "killed.py"], tmp_path, env) as killed:
        assert killed.wait(60) == 9, log.read_text()
    with closing(sqlite3.connect(database)) as stored, stored:
        assert stored.execute("UPDATE accepted SET score = -1").rowcount > 0, "the reader was killed too early"
    with two_readers([sys.executable, "reader.py"], tmp_path, env):
        assert wait_until(lambda: log.read_text().count("reading") == 3 and tables(database)[0] == topic.rows, 60)
        produce(kafka.bootstrap_servers, judged, [(None, later)])  # behind its trace; the others may come before
        assert wait_until(lambda: topic.rows.keys() - standing(database) == failed, 60)
    rows, unreadable = tables(database)
    assert rows == topic.rows
    assert Counter(unreadable) == Counter(topic.unreadable)
