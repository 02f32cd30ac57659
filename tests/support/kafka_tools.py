"""Kafka's own `kafka-*.sh` for the pages' commands: Kafka's classes, started as its scripts do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.support.kafka_versions import since
from worker.lab.broker.kafka_jars import Jar, Runtime, check, default_cache, fetch, install

TOOLS_JAR: Final = Jar(
    "org.apache.kafka:kafka-tools:4.4.0", "4eb9a7fbfd63badfd8d1a677aa2d54b47b2b2d442ff7d68fd223972afea1954c"
)
"""The broker needs no tools, so this jar (0.8 MB) is not in its list."""

CLASSES: Final = {
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
    "kafka-configs.sh": "org.apache.kafka.tools.ConfigCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-log-dirs.sh": "org.apache.kafka.tools.LogDirsCommand",
}


def tools_jar() -> Path:
    """Return the checked jar of Kafka's tools. Raises BrokerError if it cannot be fetched."""
    jars = default_cache() / "kafka-tools"
    jars.mkdir(parents=True, exist_ok=True)
    jar = jars / TOOLS_JAR.name
    if not jar.exists():
        fetch(TOOLS_JAR, jars)
    check(TOOLS_JAR, jar, jars)
    return jar


def config_command(runtime: Runtime) -> tuple[str, str]:
    """Return class path and class of kafka-configs for a release of Kafka: before 4.4 it was part of the broker."""
    if since("4.4"):
        return f"{runtime.class_path}{os.pathsep}{tools_jar()}", CLASSES["kafka-configs.sh"]
    return runtime.class_path, "kafka.admin.ConfigCommand"


def write_scripts(directory: Path) -> None:
    """Write the scripts into a directory, to be put on the PATH. Raises BrokerError if the jar cannot be fetched."""
    runtime = install(default_cache())
    path = f"{runtime.class_path}{os.pathsep}{tools_jar()}"
    for name, class_name in CLASSES.items():
        script = directory / name
        java = f'"{runtime.jre.java}" -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -cp "{path}"'
        script.write_text(f'#!/bin/sh\nexec {java} {class_name} "$@"\n')
        script.chmod(0o755)
