"""A rolling upgrade from the first release to today's worker under load, and back: `make upgrade-test`.

Two workers of the release hold a group under load. One by one they are replaced by workers of this checkout, and later
the other way round. The oracle of the crash tests judges every record: up to the way back everything must be as an
undisturbed run gives it; after it nothing may be lost, repeated or out of order, and the scores that differ are
counted. With `--verdicts` there are verdicts among the traces, and the scores follow from them while today's workers
run: the older release (here the last one without verdicts) makes dead letters of them, and keeps the track records.
Then today's workers come once more, the dead letters are redriven, and everything must be as an undisturbed run gives
it. With `--embed-text objective` (from a release that has it) the embedder's identity changes with the release, so
caches start anew, and scores may differ from the first replacement on.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support import chaos, kafka_versions, oracle
from tests.support.chaos import Fleet, Load, Slot, settings, traces, wait_settled
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import committed, consume_all, create_topics, topic_id, wait_until
from tests.support.old_release import FIRST_RELEASE, OldReleaseError, old_release
from tests.support.processes import run_command
from tests.support.surroundings import environment
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_jars import KAFKA_VERSION

PARTITIONS: Final = 4
WORKERS: Final = 2
PATIENCE_S: Final = 300.0

WITHOUT_VERDICTS: Final = "fffc773"
"""The last commit whose workers know no verdicts."""


@dataclass
class Run:
    """What happened: where the way back began, and what came out."""

    back: Mapping[int, int] = field(default_factory=dict)
    """By partition the first offset that was not committed when the way back began."""
    ends: Mapping[int, int] = field(default_factory=dict)
    skipped: float = 0.0
    """Changelog entries that today's workers did not take."""
    returned: float = 0.0
    """The same of the old workers, on the way back."""


def roll(bootstrap: str, env: Mapping[str, str], old: Fleet, new: Fleet, load: Load, seconds: float) -> Run:
    """Replace the workers one by one, and back, with `seconds` of load before, between and after.

    With verdicts today's workers come once more, and what the older release has made of the verdicts is redriven.
    """
    run = Run()
    _say("old workers")
    load.start()
    olds = [_join(old) for _ in range(WORKERS)]
    time.sleep(seconds)
    news = _replace(olds, old, new, "an old worker is replaced by one of today", seconds)
    run.skipped = sum(slot.process.metric("kp_changelog_entries_skipped_total") for slot in news)
    run.back = committed(bootstrap, env["KP_GROUP_ID"], env["KP_SOURCE_TOPIC"])
    again = _replace(news, new, old, "a worker of today is replaced by an old one", seconds)
    run.returned = sum(slot.process.metric("kp_changelog_entries_skipped_total") for slot in again)
    last = old
    if "KP_VERDICT_KEY_FILE" in env:
        last = new
        _replace(again, old, new, "an old worker is replaced by one of today, once more", seconds)
    run.ends = load.finish(PATIENCE_S)
    if not wait_settled(bootstrap, env, run.ends, PATIENCE_S):
        raise AssertionError(f"the group did not come to the end:\n{last.tails()}")
    if last is new:
        done = run_command("worker", ["redrive", "--execute", "--reason", "missing_field"], environment(**env))
        if done.returncode:
            raise AssertionError(done.stderr.decode())
        _say(done.stdout.decode().splitlines()[-1])
        source = consume_all(bootstrap, env["KP_SOURCE_TOPIC"])
        if not wait_settled(bootstrap, env, {it.partition: it.offset + 1 for it in source}, PATIENCE_S):
            raise AssertionError(f"the group did not come to the end:\n{last.tails()}")
    codes = last.stop_all()
    if set(codes) != {0} or old.unexpected() or new.unexpected():
        raise AssertionError(f"exits {codes}, {old.unexpected()}, {new.unexpected()}\n{old.tails()}\n{new.tails()}")
    return run


def _replace(workers: Sequence[Slot], leaving: Fleet, joining: Fleet, said: str, seconds: float) -> list[Slot]:
    """Replace workers one by one by those of the other release; return the new ones, after `seconds` of load."""
    found = []
    for worker in workers:
        found.append(_join(joining))
        leaving.remove(worker)
        _say(said)
        time.sleep(seconds / 4)
    time.sleep(seconds)
    return found


def judge(bootstrap: str, env: Mapping[str, str], run: Run) -> list[str]:
    """Print what came out by release; return what is wrong."""
    apart, judged = env.get("KP_EMBED_TEXT") == "objective", "KP_VERDICT_KEY_FILE" in env
    names = {"accepted": "KP_ACCEPTED_TOPIC", "rejected": "KP_REJECTED_TOPIC", "dead-letter": "KP_DEAD_LETTER_TOPIC"}
    names |= {"judged": "KP_JUDGED_TOPIC"} if judged else {}
    outputs = {kind: consume_all(bootstrap, env[name]) for kind, name in names.items()}
    source = consume_all(bootstrap, env["KP_SOURCE_TOPIC"])
    older = read_by_the_older(source, outputs) if judged else set()
    verdicts = oracle.judge(
        source, hash_vector, chaos.CAPACITY, chaos.TTL_SECONDS * 1000, objective_apart=apart,
        topic_id=topic_id(bootstrap, env["KP_SOURCE_TOPIC"]), judges=chaos.JUDGES if judged else None, older=older,
    )  # fmt: skip
    print("decisions and dead letters by worker version:", dict(Counter(map(_version, _all(outputs)))))
    whole = oracle.compare(verdicts, outputs)
    print("all:", whole)
    early = {
        kind: [record for record in records if _before(oracle.origin(kind, record), run.back)]
        for kind, records in outputs.items()
    }
    before = oracle.compare({place: v for place, v in verdicts.items() if _before(place, run.back)}, early)
    print("up to the way back:", before)
    differing = whole.damaged - before.damaged
    print(f"after that: {whole.source - before.source} records, {differing} with another score")
    print(f"changelog entries skipped: {run.skipped:.0f} on the way there, {run.returned:.0f} on the way back")
    if judged:
        letters = sum(it.reason == "missing_field" and place in older for place, it in verdicts.items())
        again = [
            record
            for record in outputs["judged"]
            if "kp-redriven-from" in dict(verdicts[oracle.origin("judged", record)].record.headers)
        ]
        print(f"{letters} verdicts are dead letters of the older release, {len(again)} counted after redrive")
        return whole.problems() + (
            [] if letters and again and run.returned else ["the run did not show what it is for"]
        )
    found = [] if apart else before.problems()
    counts = ("missing", "duplicates", "differing_copies", "out_of_order", "foreign")
    found += [f"after it: {name}={getattr(whole, name)}" for name in counts if getattr(whole, name)]
    if apart and not run.skipped:
        found += ["today's workers took entries of an objective that was truncated"]
    if not apart and run.skipped:
        found += ["today's workers did not take all entries of the old ones"]
    found += ["the load did not end where the outputs do"] if whole.source != sum(run.ends.values()) else []
    return found


def read_by_the_older(source: Sequence[Any], outputs: Mapping[str, Sequence[Any]]) -> set[oracle.Place]:
    """Return the places that a release without verdicts has read: its documents do not say what was used.

    A verdict between two traces is taken for that of their reader, and only where they differ for that of the worker
    whose output says so.
    """
    by_older: dict[oracle.Place, bool] = {}
    for kind in ("accepted", "rejected"):
        for record in outputs[kind]:
            by_older[oracle.origin(kind, record)] = "confidence" not in json.loads(record.value)["scoring"]
    said = {oracle.origin("judged", record): False for record in outputs["judged"]}
    for record in outputs["dead-letter"]:
        said[oracle.origin("dead-letter", record)] = dict(record.headers)["kp-error-reason"] == b"missing_field"
    found = {place for place, older in by_older.items() if older}
    for record in source:
        place = record.partition, record.offset
        if dict(record.headers).get("kp-control") is not None:
            earlier = max((it for it in by_older if it[0] == place[0] and it < place), default=None)
            later = min((it for it in by_older if it[0] == place[0] and it > place), default=None)
            readers = {by_older[it] for it in (earlier, later) if it is not None}
            if (len(readers) == 1 and readers.pop()) or (len(readers) != 1 and said.get(place, False)):
                found.add(place)
    return found


def _all(outputs: Mapping[str, Sequence[Any]]) -> list[Any]:
    return [record for records in outputs.values() for record in records]


def _version(record: Any) -> str:
    headers = dict(record.headers)
    if "kp-worker-version" in headers:
        return str(headers["kp-worker-version"].decode())
    document = json.loads(record.value)
    return str(document.get("scoring", document)["worker_version"])


def _before(place: oracle.Place, offsets: Mapping[int, int]) -> bool:
    return place[1] < offsets.get(place[0], 0)


def _join(fleet: Fleet) -> Slot:
    slot = fleet.add()
    if not wait_until(lambda: chaos.ready(slot), PATIENCE_S):
        raise AssertionError(f"a worker was not ready in {PATIENCE_S} s:\n{fleet.tails(40)}")
    return slot


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def main() -> int:
    """Run once; exit 1 where something is lost, twice, out of order or scored otherwise before the way back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--old", help=f"commit of the old release ({FIRST_RELEASE}; with --verdicts {WITHOUT_VERDICTS})"
    )
    parser.add_argument("--verdicts", action="store_true", help="verdicts among the traces, and KP_CONFIDENCE=record")
    parser.add_argument("--embed-text", default="whole", choices=["whole", "objective"], help="KP_EMBED_TEXT")
    parser.add_argument("--seconds", type=float, default=20, help="of load in each stage (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=60, help="traces a second (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--kafka", default=KAFKA_VERSION, help="the Kafka to run on (default: %(default)s)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `with` blocks, which end all processes
    chaos.quiet_clients()
    kafka_versions.use(kafka_versions.chosen(given.kafka))
    print(f"repeat with --seed {given.seed}")
    try:
        tree = old_release(given.old or (WITHOUT_VERDICTS if given.verdicts else FIRST_RELEASE))
    except OldReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kp-upgrade-") as temporary, EmbeddedKafka() as kafka:
        bootstrap = kafka.bootstrap_servers
        env = settings(bootstrap, TEST_EMBED_MS="5")
        if given.embed_text != "whole":
            env["KP_EMBED_TEXT"] = given.embed_text
        create_topics(bootstrap, chaos.topics(env, PARTITIONS))
        logs = Path(temporary) / "old", Path(temporary) / "new"
        for directory in logs:
            directory.mkdir()
        records, ours = traces(given.seed, PARTITIONS), dict(env)
        if given.verdicts:
            ours |= chaos.judging(env, Path(temporary))
            identity = topic_id(bootstrap, env["KP_SOURCE_TOPIC"])
            records = chaos.with_verdicts(given.seed, records, env["KP_SOURCE_TOPIC"], identity)
        load = Load(bootstrap, env["KP_SOURCE_TOPIC"], records, 500, given.rate, open_end=True)
        place = "tests.crash_worker" if (tree.root / "tests/crash_worker.py").exists() else "tests.support.crash_worker"
        with Fleet(env, logs[0], place, tree) as old, Fleet(ours, logs[1]) as new:
            run = roll(bootstrap, ours, old, new, load, given.seconds)
        problems = judge(bootstrap, ours, run)
        for name, directory in zip(("old", "today's"), logs, strict=True):
            print(f"warnings and errors of {name} workers:", chaos.log_report(directory))
    scores = "scores as without the upgrade" if given.embed_text == "whole" else "caches started anew"
    print("\n".join(problems) or f"nothing lost, nothing twice, order kept, {scores}")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
