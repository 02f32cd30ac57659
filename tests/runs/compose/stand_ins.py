"""Stand-ins for the images that docker-compose.yml names, where no container registry can be reached.

Kafka has the same version's jars, the image's user, paths, volumes, and the program by which the image makes
server.properties of its environment. Prometheus is the same version, built from its module. For Grafana there is only
something that holds its place: it shows that the mounts and the environment arrive.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.runs.engine.base import PYTHON_NAME
from tests.runs.engine.docker import DockerEngine
from tests.runs.engine.plugins import go_build
from tests.support.kafka_tools import tools_jar
from worker.lab.broker.kafka_jars import default_cache, install

KAFKA: Final = """
FROM {base}
RUN useradd --uid 1000 --create-home appuser \\
    && mkdir -p /opt/kafka/config /opt/kafka/bin /etc/kafka/docker /etc/kafka/secrets \\
    && mkdir -p /mnt/shared/config /var/lib/kafka/data \\
    && chown -R appuser:appuser /opt/kafka /mnt/shared/config \\
    && chown -R appuser:root /var/lib/kafka /etc/kafka
COPY jre /opt/jre
COPY --chown=appuser:appuser libs /opt/kafka/libs
COPY --chown=appuser:appuser bin /opt/kafka/bin
COPY --chown=appuser:appuser docker /etc/kafka/docker
USER appuser
EXPOSE 9092
VOLUME ["/etc/kafka/secrets", "/var/lib/kafka/data", "/mnt/shared/config"]
CMD ["/etc/kafka/docker/run"]
"""
KAFKA_CLASS: Final = """#!/bin/sh
exec /opt/jre/bin/java {heap} ${{KAFKA_JVM_PERFORMANCE_OPTS:--XX:+UseG1GC}} -cp '/opt/kafka/libs/*' {name} "$@"
"""
KAFKA_RUN: Final = """#!/bin/sh
export CLUSTER_ID="${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}"
# As in the image: a volume that is formatted already is not an error.
said=$(/opt/kafka/bin/setup setup --default-configs-dir /etc/kafka/docker --mounted-configs-dir /mnt/shared/config \
  --final-configs-dir /opt/kafka/config 2>&1) ||
  echo "$said" | grep -i 'already formatted' || { echo "$said"; exit 1; }
exec /opt/kafka/bin/server /opt/kafka/config/server.properties
"""
KAFKA_PROGRAMS: Final = {
    "kafka-topics.sh": ("-Xmx256M", "org.apache.kafka.tools.TopicCommand"),
    "kafka-broker-api-versions.sh": ("-Xmx256M", "org.apache.kafka.tools.BrokerApiVersionsCommand"),
    "setup": ("-Xmx256M", "kafka.docker.KafkaDockerWrapper"),
    "server": ("-Xms1G -Xmx1G", "kafka.Kafka"),
}

PROMETHEUS: Final = """
FROM {base}
COPY prometheus promtool /bin/
RUN mkdir -p /prometheus /etc/prometheus && chown 65534:65534 /prometheus
USER nobody
EXPOSE 9090
VOLUME ["/prometheus"]
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""
PROMETHEUS_TAGS: Final = "-tags=remove_all_sd,enable_dns_sd"
"""Without the discoveries of the clouds, which docker-compose.yml does not use: a third of the build."""

GRAFANA: Final = """
FROM {base}
RUN mkdir -p /etc/grafana/provisioning/datasources /etc/grafana/provisioning/dashboards /var/lib/grafana \\
    && chown -R 472:0 /var/lib/grafana
USER 472:0
EXPOSE 3000
WORKDIR /usr/share/grafana
CMD ["python3", "-m", "http.server", "3000"]
"""


def make(engine: DockerEngine, image: str) -> None:
    """Make the stand-in for an image of docker-compose.yml under its name. Raises EngineError."""
    name, _, version = image.partition(":")
    with tempfile.TemporaryDirectory(prefix="kp-stand-in-") as directory:
        context = Path(directory)
        if name == "apache/kafka":
            text = _kafka(context)
        elif name == "prom/prometheus":
            text = _prometheus(context, version)
        else:
            text = GRAFANA
        (context / "Dockerfile").write_text(text.format(base=PYTHON_NAME))
        engine.docker("build", "--tag", image, context)


def _kafka(context: Path) -> str:
    runtime = install(default_cache())
    (context / "libs").mkdir()
    for jar in [*map(Path, runtime.class_path.split(os.pathsep)), tools_jar()]:
        shutil.copy2(jar, context / "libs")
    shutil.copytree(runtime.jre.java.parents[1], context / "jre", symlinks=True)
    for name, (heap, program) in KAFKA_PROGRAMS.items():
        _script(context / "bin" / name, KAFKA_CLASS.format(heap=heap, name=program))
    _script(context / "docker" / "run", KAFKA_RUN)
    return KAFKA


def _prometheus(context: Path, version: str) -> str:
    """Build the version's module: v3.11.2 is v0.311.2 there, as its releases are numbered since 3.0."""
    major, minor, patch = version.removeprefix("v").split(".")
    for name in ("prometheus", "promtool"):
        built = default_cache() / "prometheus" / version / name
        if not built.exists():
            package = f"github.com/prometheus/prometheus/cmd/{name}@v0.{major}{int(minor):02}.{patch}"
            go_build(package, built, PROMETHEUS_TAGS)
        shutil.copy2(built, context / name)
    return PROMETHEUS


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
