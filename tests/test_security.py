"""TLS, logins and ACLs: real workers on a real broker that checks them, and what they say when it refuses."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kafka_fixtures import WorkerProcess, committed, consume_all, create_topics, produce, unique
from tests.secure_kafka import (
    CASE_USERS,
    KEY_PASSWORD,
    PASSWORD,
    REAUTHENTICATE_MS,
    USER,
    Acl,
    SecureKafka,
    secure_kafka,
    token,
)
from worker.config import ConfigError, load
from worker.connection import client_arguments
from worker.faust_io import Hooks

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parent.parent
LINES = (ROOT / "tests" / "data" / "traces.jsonl").read_bytes().splitlines()
OUTPUTS = ("accepted", "rejected", "dead-letter")
Workers = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    with secure_kafka(tmp_path_factory.mktemp("secure")) as broker:
        yield broker


# -- the permissions that docs/security.md tells to grant


def documented(name: str, *parts: str) -> list[Acl]:
    """Return what the commands of docs/security.md grant, in the parts (their comments) asked for."""
    block = (ROOT / "docs" / "security.md").read_text().split("## Least ACLs")[1].split("```")[1]
    found: list[Acl] = []
    part = ""
    for line in block.splitlines():
        if line.startswith("# "):
            part = line[2:].split(" (")[0]
        if line.startswith("acl --") and part in parts:
            words = shlex.split(line)[1:]
            options = list(zip(words[::2], words[1::2], strict=True))
            prefixed = ("--resource-pattern-type", "prefixed") in options
            for operation in [value for option, value in options if option == "--operation"]:
                found += [
                    Acl(operation, option[2:], _renamed(value, name), prefixed)
                    for option, value in options
                    if option in ("--topic", "--group", "--transactional-id")
                ]
    assert {part for part in parts if f"# {part}" in block} == set(parts)
    return found


def _renamed(resource: str, name: str) -> str:
    return re.sub(r"^(traces|kp-worker)", name, resource)


CREATE = "KP_CREATE_TOPICS=true"
CHECK = "check topic settings"


def names(name: str) -> dict[str, str]:
    """Return the settings of a worker with its own topics."""
    return {
        "KP_GROUP_ID": name,
        "KP_SOURCE_TOPIC": name,
        **{f"KP_{kind.upper().replace('-', '_')}_TOPIC": f"{name}.{kind}" for kind in OUTPUTS},
        "KP_EMBEDDER": "none",
        "KP_HTTP_HOST": "127.0.0.1",
        "KP_SESSION_TIMEOUT_SECONDS": "6",
    }


# -- ways to log in


def login(secure: SecureKafka, way: str) -> dict[str, str]:
    """Return the settings that connect a worker in the given way."""
    files = secure.files
    if way.startswith("mTLS"):
        env = {"KP_BOOTSTRAP_SERVERS": secure.at("MTLS"), "KP_SECURITY_PROTOCOL": "SSL"}
        certificate = {"KP_TLS_CERTIFICATE_FILE": str(files.client), "KP_TLS_KEY_FILE": str(files.client_key)}
        if way == "mTLS, encrypted key":
            certificate["KP_TLS_KEY_FILE"] = str(files.encrypted_key)
            certificate["KP_TLS_KEY_PASSWORD_FILE"] = str(files.key_password)
        return {**env, **certificate, "KP_TLS_CA_FILE": str(files.ca)}
    env = {
        "KP_BOOTSTRAP_SERVERS": secure.at("USERS"),
        "KP_SECURITY_PROTOCOL": "SASL_SSL",
        "KP_SASL_MECHANISM": way,
        "KP_TLS_CA_FILE": str(files.ca),
    }
    if way == "OAUTHBEARER":
        return {**env, "KP_SASL_TOKEN_FILE": str(files.write(unique("token"), token() + "\n"))}
    return {**env, "KP_SASL_USERNAME": USER, "KP_SASL_PASSWORD_FILE": str(files.password)}


def origins(secure: SecureKafka, name: str) -> list[tuple[int, int]]:
    """Return source partition and offset of everything that came out."""
    found = []
    for kind in OUTPUTS:
        for record in consume_all(secure.admin, f"{name}.{kind}"):
            headers = dict(record.headers)
            if kind == "dead-letter":
                place = int(headers["kp-source-partition"]), int(headers["kp-source-offset"])
            else:
                source = re.search(rb'"partition":(\d+),"offset":(\d+)', record.value)
                assert source is not None
                place = int(source[1]), int(source[2])
            found.append(place)
    return sorted(found)


def wait_committed(secure: SecureKafka, name: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(committed(secure.admin, name, name).values()) < count:
        assert time.monotonic() < deadline, committed(secure.admin, name, name)
        time.sleep(0.2)


@pytest.mark.parametrize(
    "way", ["mTLS", "mTLS, encrypted key", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
)
def test_each_login_creates_topics_and_scores_exactly_once(secure: SecureKafka, workers: Workers, way: str) -> None:
    name = unique("login")
    secure.allow(USER, documented(name, "run", "exactly_once", CHECK, CREATE))
    worker = workers({**names(name), **login(secure, way), "KP_CREATE_TOPICS": "true"}).wait_ready()
    records = [(None, line, (), i % 4) for i, line in enumerate([*LINES[:100], b"not a trace"])]
    places = produce(secure.admin, name, records)
    wait_committed(secure, name, len(records))
    if way == "OAUTHBEARER":  # the broker drops each connection after REAUTHENTICATE_MS
        deadline = time.monotonic() + 3 * REAUTHENTICATE_MS / 1000
        while time.monotonic() < deadline:
            places += produce(secure.admin, name, [(None, line, (), i % 4) for i, line in enumerate(LINES[100:120])])
            time.sleep(0.3)
        wait_committed(secure, name, len(places))
    worker.terminate()
    assert worker.wait() == 0, worker.log()
    assert origins(secure, name) == sorted(places)
    assert "WARNING worker" not in worker.log(), "the documented ACLs are enough for silence"
