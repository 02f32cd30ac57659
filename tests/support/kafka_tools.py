"""Kafka's own `kafka-*.sh` for the pages' commands: Kafka's classes, started as its scripts do."""

import shlex
from pathlib import Path
from typing import Final

from worker.lab.broker.kafka_jars import Jar, check, default_cache, fetch, install
from worker.lab.broker.kafka_node import java_command

TOOLS: Final = Jar(
    "org.apache.kafka:kafka-tools:4.2.2", "894caaca48b11d351cbe1f27d58c7a3c09ff22563bf3ab4bccf1ef69933e099c"
)
"""The broker needs no tools, so this jar is not in its list."""

CLASSES: Final = {
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-log-dirs.sh": "org.apache.kafka.tools.LogDirsCommand",
}


def write_scripts(directory: Path) -> None:
    """Write the scripts into a directory, to be put on the PATH. Raises BrokerError if a jar cannot be fetched."""
    runtime = install(default_cache())
    jars = default_cache() / "kafka-tools"
    jars.mkdir(parents=True, exist_ok=True)
    tools = jars / TOOLS.name
    if not tools.exists():
        fetch(TOOLS, jars)
    check(TOOLS, tools, jars)
    for name, class_name in CLASSES.items():
        script = directory / name
        java = shlex.join([*java_command(runtime), "-cp", f"{runtime.class_path}:{tools}"])
        script.write_text(f'#!/bin/sh\nexec {java} {class_name} "$@"\n')
        script.chmod(0o755)
