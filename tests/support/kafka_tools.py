"""Kafka's own `kafka-*.sh` for the pages' commands: Kafka's classes, started as its scripts do."""

import os
from pathlib import Path
from typing import Final

from tests.support.kafka_versions import since
from worker.lab.broker.kafka_jars import Jar, Runtime, check, default_cache, fetch, install

TOOLS: Final = (
    Jar("org.apache.kafka:kafka-tools:4.4.0", "4eb9a7fbfd63badfd8d1a677aa2d54b47b2b2d442ff7d68fd223972afea1954c"),
    Jar(
        "com.fasterxml.jackson.dataformat:jackson-dataformat-csv:2.21.7",
        "588050148497158cabdc05c0ae3a7e123194a486b8c62745778fc6239f9b085e",
    ),
)
"""The broker needs no tools, so these jars (0.9 MB) are not in its list."""

CLASSES: Final = {
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
    "kafka-configs.sh": "org.apache.kafka.tools.ConfigCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-log-dirs.sh": "org.apache.kafka.tools.LogDirsCommand",
}


def with_tools(runtime: Runtime) -> str:
    """Return the class path with the checked jars of the tools. Raises BrokerError if one cannot be fetched."""
    jars = default_cache() / "kafka-tools"
    jars.mkdir(parents=True, exist_ok=True)
    paths = [runtime.class_path]
    for jar in TOOLS:
        path = jars / jar.name
        if not path.exists():
            fetch(jar, jars)
        check(jar, path, jars)
        paths.append(str(path))
    return os.pathsep.join(paths)


def config_command(runtime: Runtime) -> tuple[str, str]:
    """Return class path and class of kafka-configs for a release of Kafka: before 4.4 it was part of the broker."""
    if since("4.4"):
        return with_tools(runtime), CLASSES["kafka-configs.sh"]
    return runtime.class_path, "kafka.admin.ConfigCommand"


def write_scripts(directory: Path) -> None:
    """Write the scripts into a directory, to be put on the PATH. Raises BrokerError if a jar cannot be fetched."""
    runtime = install(default_cache())
    path = with_tools(runtime)
    for name, class_name in CLASSES.items():
        script = directory / name
        java = f'"{runtime.jre.java}" -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -cp "{path}"'
        script.write_text(f'#!/bin/sh\nexec {java} {class_name} "$@"\n')
        script.chmod(0o755)
