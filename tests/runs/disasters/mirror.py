"""A cluster is lost, and its mirror takes over: MirrorMaker 2 with the settings of docs/operations.md.

Workers score on the first cluster, under kills; MirrorMaker copies source, outputs and offsets. The first cluster is
killed at once, and a worker starts on the second one with an empty changelog.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.runs.disasters.scene import Scene, Verdict
from tests.support.chaos import Fleet, wait_settled
from tests.support.kafka_fixtures import committed, consume_all, wait_until
from tests.support.kafka_tools import write_scripts
from tests.support.stage import OUTPUTS
from tests.support.surroundings import DOCS
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_jars import KAFKA_VERSION, default_cache, extra, install
from worker.lab.broker.kafka_node import LOG4J2

MIRROR: Final = f"org.apache.kafka:connect-mirror:{KAFKA_VERSION}+org.apache.kafka:connect-runtime:{KAFKA_VERSION}"
PAGE: Final = DOCS / "operations.md"
ONE_BROKER: Final = """\
replication.factor = 1
checkpoints.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
offset-syncs.topic.replication.factor = 1
offset.storage.replication.factor = 1
config.storage.replication.factor = 1
status.storage.replication.factor = 1
"""
"""MirrorMaker's topics have three replicas by default."""


def mirror_settings(first: str, second: str, s: Scene) -> str:
    """Return the page's mirror.properties for these clusters and names."""
    block = re.search(r"```properties\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block, "docs/operations.md has no settings of MirrorMaker"
    text = block[1].replace("FIRST", first).replace("SECOND", second)
    text = re.sub(r"^(first->second\.topics) =.*", lambda m: f"{m[1]} = {s.source}(\\\\..*)?", text, flags=re.MULTILINE)
    text = re.sub(r"^(first->second\.groups) =.*", lambda m: f"{m[1]} = {s.group}", text, flags=re.MULTILINE)
    return text + ONE_BROKER


@contextmanager
def mirror_maker(settings: str, work: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run MirrorMaker's own process; its jars are fetched by jgo into its cache at first use."""
    jgo = extra("jgo")
    environment = Path(jgo.build(MIRROR).path)
    work.mkdir(parents=True, exist_ok=True)
    (work / "mirror.properties").write_text(settings)
    (work / "log4j2.properties").write_text(LOG4J2)
    jars = os.pathsep.join(f"{environment}/{folder}/*" for folder in ("jars", "modules"))
    java = [str(install(default_cache()).jre.java), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    java += [f"-Dlog4j2.configurationFile={work / 'log4j2.properties'}", "-cp", jars]
    with (work / "mirror.log").open("ab") as log:
        process = subprocess.Popen(
            [*java, "org.apache.kafka.connect.mirror.MirrorMaker", str(work / "mirror.properties")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=work, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def count(bootstrap: str, topic: str, isolation: str = "read_committed") -> int:
    """Return the number of records; 0 where there is no such topic."""
    try:
        return len(consume_all(bootstrap, topic, isolation))
    except AssertionError:
        return 0


def ids(kind: str, records: list[Any]) -> Counter[str]:
    """Return how often each output occurs, by what identifies it on both clusters."""
    return Counter(trace_id(it) if kind != "dead-letter" else raw_id(it) for it in records)


def trace_id(record: Any) -> str:
    return str(json.loads(record.value)["id"])


def raw_id(record: Any) -> str:
    """Return what identifies a broken value and its dead letter."""
    return f"{record.timestamp} {record.value!r}"


def source_ids(record: Any) -> list[str]:
    """Return both ids that a source record's output may have."""
    with suppress(ValueError, TypeError, KeyError):
        return [raw_id(record), trace_id(record)]
    return [raw_id(record)]


def run(work: Path, seed: int) -> Verdict:
    with EmbeddedKafka() as first, EmbeddedKafka() as second:
        name = "a cluster is lost, its mirror takes over"
        with Scene(first.bootstrap_servers, work / "logs", name, seed=seed) as s:
            s.begin()
            settings = mirror_settings(first.bootstrap_servers, second.bootstrap_servers, s)
            with mirror_maker(settings, work / "mirror") as process:
                mirrored = f"first.{s.source}"
                s.wait(lambda: count(second.bootstrap_servers, mirrored) > 300, "the source is mirrored")
                for _ in range(4):  # transactions are left open, and aborted
                    s.fleet.kill(s.fleet.running()[0])
                    time.sleep(6)
                s.wait(
                    lambda: bool(committed(second.bootstrap_servers, s.group, mirrored)),
                    "the group's offsets are mirrored",
                )
                time.sleep(20)
                assert process.poll() is None, (work / "mirror" / "mirror.log").read_text()[-3000:]
                aborted = sum(
                    count(s.bootstrap, f"{s.source}.{kind}", "read_uncommitted")
                    - count(s.bootstrap, f"{s.source}.{kind}")
                    for kind in OUTPUTS
                )
                first.kill_node(0)
                s.say("the first cluster is lost")
                process.send_signal(signal.SIGKILL)
            s.eye.finish()
            s.fleet.__exit__(None, None, None)
            s.verdict.seen.append(f"{aborted} records of aborted transactions were on the first cluster's outputs")
            take_over(s, second, mirrored, work)
            return s.verdict


def take_over(s: Scene, second: EmbeddedKafka, mirrored: str, work: Path) -> None:
    """Start a worker on the second cluster, and compare all its outputs, mirrored and own, with its source."""
    bootstrap = second.bootstrap_servers
    env = {
        **s.env,
        "KP_BOOTSTRAP_SERVERS": bootstrap,
        "KP_SOURCE_TOPIC": mirrored,
        "KP_CHANGELOG_TOPIC": f"{s.group}-second-changelog",
    }
    (work / "tools").mkdir()
    write_scripts(work / "tools")  # as the page resets them
    command = [str(work / "tools/kafka-consumer-groups.sh"), "--bootstrap-server", bootstrap, "--group", s.group]
    command += ["--topic", mirrored, "--reset-offsets", "--to-current", "--execute"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    offsets = committed(bootstrap, s.group, mirrored)
    s.say(f"the second cluster's offsets of the group, committed anew: {offsets}")
    source = consume_all(bootstrap, mirrored)
    ends: Counter[int] = Counter()
    for record in source:
        ends[record.partition] = max(ends[record.partition], record.offset + 1)
    behind = {p: end - offsets.get(p, 0) for p, end in sorted(ends.items())}
    s.say(f"{len(source)} traces are mirrored; to be scored (again): {behind}")
    with Fleet(env, work / "logs-second") as fleet:
        (work / "logs-second").mkdir(exist_ok=True)
        fleet.add()
        began = time.monotonic()
        ready = wait_until(fleet.all_ready, 120)
        s.say(f"a worker on the second cluster is {'ready' if ready else 'NOT ready'}")
        settled = wait_settled(bootstrap, env, ends, 120)
        s.say(f"everything is committed: {settled}, {time.monotonic() - began:.0f} s after its start")
        codes = fleet.stop_all()
    s.verdict.expect(ready and settled and codes == [0], f"the second cluster's worker scored the rest: {codes}")
    compare(s, bootstrap, source, sum(behind.values()))


def compare(s: Scene, bootstrap: str, source: list[Any], behind: int) -> None:
    """Count what is missing, what came twice, and what the mirror made of aborted transactions."""
    mirrored: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for kind in OUTPUTS:
        topic = f"{s.source}.{kind}"
        mirrored += ids(kind, consume_all(bootstrap, f"first.{topic}"))
        own += ids(kind, consume_all(bootstrap, topic))
    missing = [record for record in source if not any(mirrored[i] + own[i] for i in source_ids(record))]
    twice = sum(n > 1 for n in mirrored.values())
    both = sum(1 for i in own if mirrored[i])
    s.verdict.expect(not missing, f"{len(source)} traces on the mirror, {len(missing)} without an output")
    s.verdict.expect(not twice, f"{twice} traces are twice on the mirrored outputs")
    s.verdict.expect(sum(n > 1 for n in own.values()) == 0, "none is twice on the second cluster's own outputs")
    s.verdict.expect(both <= behind, f"{both} traces were scored on both clusters, of {behind} behind the offsets")
