"""Write the lock of one Kafka's jars: `python -m tests.runs.lock_kafka 3.9.2 > tests/data/kafka/3.9.2.lock`."""

import hashlib
import sys
import tempfile
from pathlib import Path

from jgo.maven import MavenContext

HEADER = """\
# The jars of Apache Kafka {version}: sha256 and coordinate (group:artifact:version), one a line.
# Written by `python -m tests.runs.lock_kafka {version}`; fetched and checked by worker/lab/broker/kafka_jars.py.
"""
LOG4J = "2.25.3"
LOGGING = ("log4j-api", "log4j-core", "log4j-slf4j-impl")
"""Kafka leaves the choice of a logger to its distribution. 3.x calls log4j 1, whose interface log4j-1.2-api has."""


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        maven = MavenContext(repo_cache=Path(temporary), timeout=60)
        kafka = maven.project("org.apache.kafka", "kafka_2.13").at_version(version)
        _, nodes = maven.pom_dependency_list(kafka.pom())
        releases = {(d.groupId, d.artifactId): d.version for d in (node.dep for node in nodes)}
        releases["org.apache.kafka", "kafka_2.13"] = version
        logging = (*LOGGING, "log4j-1.2-api") if version.startswith("3.") else LOGGING
        releases |= {("org.apache.logging.log4j", artifact): LOG4J for artifact in logging}
        print(HEADER.format(version=version), end="")
        for (group, artifact), release in sorted(releases.items()):
            path = maven.project(group, artifact).at_version(release).artifact().resolve()
            print(hashlib.sha256(path.read_bytes()).hexdigest(), f" {group}:{artifact}:{release}")


if __name__ == "__main__":
    main(sys.argv[1])
