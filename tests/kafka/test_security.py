"""TLS, logins and ACLs: real workers on a real broker that checks them, and what they say when it refuses."""

import base64
import re
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce, unique, wait_committed
from tests.support.secure_kafka import (
    DENY,
    KEY_PASSWORD,
    PASSWORD,
    REAUTHENTICATE_MS,
    USER,
    Acl,
    SecureKafka,
    secure_kafka,
    token,
)
from tests.support.stage import LINES, OUTPUTS, Diagnosis, Workers, origin
from tests.support.surroundings import ROOT, topic_settings
from worker.config import load
from worker.kafka.connections import client_arguments
from worker.stream.faust_consumer import Membership


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
                    Acl(operation, option[2:], re.sub(r"^(traces|kp-worker)", name, value), prefixed)
                    for option, value in options
                    if option in ("--topic", "--group", "--transactional-id")
                ]
    assert {part for part in parts if f"# {part}" in block} == set(parts)
    return found


CREATE = "KP_CREATE_TOPICS=true"
CHECK = "check topic settings"


def names(name: str, create: str = "false") -> dict[str, str]:
    """Return the settings of a worker with its own topics."""
    more = {"KP_EMBEDDER": "none", "KP_HTTP_HOST": "127.0.0.1", "KP_SESSION_TIMEOUT_SECONDS": "6"}
    return topic_settings("", name, **more, KP_CREATE_TOPICS=create)


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


def as_case(secure: SecureKafka, user: str) -> dict[str, str]:
    """Return the settings that connect a worker as a user of its own."""
    login = {"KP_SASL_MECHANISM": "PLAIN", "KP_SASL_USERNAME": user, "KP_SASL_PASSWORD": user}
    return {"KP_BOOTSTRAP_SERVERS": secure.at("CLEAR"), "KP_SECURITY_PROTOCOL": "SASL_PLAINTEXT", **login}


def origins(secure: SecureKafka, name: str) -> list[tuple[int, int]]:
    """Return source partition and offset of everything that came out."""
    return sorted(origin(each) for kind in OUTPUTS for each in consume_all(secure.admin, f"{name}.{kind}"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "way", ["mTLS", "mTLS, encrypted key", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
)
def test_each_login_creates_topics_and_scores_exactly_once(secure: SecureKafka, workers: Workers, way: str) -> None:
    name = unique("login")
    if way.startswith("SCRAM"):
        secure.add_user(way)
    secure.allow(USER, documented(name, "run", "exactly_once", CHECK, CREATE))
    login_env = login(secure, way)
    worker = workers({**names(name, "true"), **login_env}).wait_ready()
    records = [(None, line, (), i % 4) for i, line in enumerate([*LINES[:100], b"not a trace"])]
    places = produce(secure.admin, name, records)
    wait_committed(secure.admin, name, name, len(records))
    if way == "OAUTHBEARER":  # the broker drops each connection after a while, and the token is late once
        path = Path(login_env["KP_SASL_TOKEN_FILE"])
        for text in ("", token(), token()):
            path.write_text(text)
            deadline = time.monotonic() + REAUTHENTICATE_MS / 1000 + 0.5
            while time.monotonic() < deadline:
                places += produce(secure.admin, name, [(None, line, (), i % 4) for i, line in enumerate(LINES[:20])])
                time.sleep(0.3)
        wait_committed(secure.admin, name, name, len(places))
        assert f"KP_SASL_TOKEN_FILE={path} is empty" in worker.log(), "it was asked for again"
    worker.finish()
    assert origins(secure, name) == sorted(places)
    assert "WARNING worker" not in worker.log(), "the documented ACLs are enough for silence"


# -- refusals


def refusals(secure: SecureKafka) -> dict[str, tuple[dict[str, str], tuple[str, ...]]]:
    """Return settings that cannot work, and what the worker must say, by what is wrong."""
    files, at = secure.files, secure.at
    plain, authority = login(secure, "PLAIN"), {"KP_TLS_CA_FILE": str(files.ca)}
    tls = {"KP_SECURITY_PROTOCOL": "SSL", **authority}
    clear = {"KP_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "KP_SASL_USERNAME": "case0", "KP_SASL_PASSWORD": "case0"}
    at_mtls = {**tls, "KP_BOOTSTRAP_SERVERS": at("MTLS")}
    stranger = {**login(secure, "SCRAM-SHA-512"), "KP_SASL_USERNAME": "nobody"}
    expired = {**login(secure, "OAUTHBEARER"), "KP_SASL_TOKEN_FILE": str(files.write("expired", token(seconds=-10)))}
    scram = {**clear, "KP_BOOTSTRAP_SERVERS": at("CLEAR"), "KP_SASL_MECHANISM": "SCRAM-SHA-256"}
    without = {**clear, "KP_BOOTSTRAP_SERVERS": secure.admin, "KP_SASL_MECHANISM": "PLAIN"}
    expired_client = {**at_mtls, "KP_TLS_CERTIFICATE_FILE": str(files.expired_client)}
    password = {**plain, "KP_SASL_PASSWORD_FILE": str(files.write("wrong", "wrong"))}
    return {
        "password": (password, ("SaslAuthenticationFailed", "KP_SASL_PASSWORD")),
        "user of SCRAM": (stranger, ("SaslAuthenticationFailed", "KP_SASL_USERNAME")),
        "expired token": (expired, ("invalid_token", "(or the token)")),
        "mechanism": (scram, ("does not support KP_SASL_MECHANISM",)),
        "no SASL there": (without, ("the listener has no SASL", "KP_SECURITY_PROTOCOL")),
        "authority": ({**plain, "KP_TLS_CA_FILE": str(files.strange_ca)}, ("KP_TLS_CA_FILE must contain the CA",)),
        "expired broker": ({**tls, "KP_BOOTSTRAP_SERVERS": at("EXPIRED")}, ("has expired", "renew it on the broker")),
        "host": ({**tls, "KP_BOOTSTRAP_SERVERS": at("ELSEWHERE")}, ("'127.0.0.1'", "must be an address that is in it")),
        "no client certificate": (at_mtls, ("KP_TLS_CERTIFICATE_FILE",)),
        "expired client certificate": (expired_client, ("KP_TLS_CERTIFICATE_FILE", "not expired")),
    }


def test_a_refused_connection_ends_the_start_and_says_what_to_do(secure: SecureKafka, workers: Workers) -> None:
    running = {
        wrong: (workers({**names(unique("refused")), **env}), env["KP_BOOTSTRAP_SERVERS"], words)
        for wrong, (env, words) in refusals(secure).items()
    }
    for wrong, (worker, address, words) in running.items():
        assert worker.wait() == 2, f"{wrong}: {worker.log()}"
        last = worker.log().splitlines()[-1]
        for word in (f"KP_BOOTSTRAP_SERVERS={address}", *words):
            assert word in last, wrong
        assert "Traceback" not in worker.log()


def test_a_listener_that_hangs_up_is_tried_again_with_a_hint(secure: SecureKafka, workers: Workers) -> None:
    worker = workers({**names(unique("hint")), "KP_BOOTSTRAP_SERVERS": secure.at("USERS")})
    worker.wait_log("check KP_SECURITY_PROTOCOL")
    assert "trying again" in worker.log()
    assert worker.returncode is None, "it may be a broker that is just starting"


# -- least permissions

RECORDS = [(None, value, (), 0) for value in (*LINES[:20], b"not a trace")]


def trials() -> Iterator[tuple[str, tuple[str, ...], Acl | None]]:
    """Yield delivery, parts and what is missing: the four ways to run, each whole, and without what matters there."""
    once, least = ("run", "exactly_once", CHECK), ("run", CHECK)
    for delivery, parts, left_out in (
        ("exactly_once", once, documented("NAME", *once)),
        ("at_least_once", least, documented("NAME", "run")),
        ("exactly_once", (*once, CREATE), documented("NAME", CREATE)),
        ("at_least_once", (*least, CREATE), []),
    ):
        for missing in (None, *left_out):
            yield delivery, parts, missing


def check_trial(
    secure: SecureKafka, delivery: str, parts: tuple[str, ...], missing: Acl | None, user: str, log: Path
) -> None:
    """Run one worker to its end: its failure, or SIGTERM after everything is committed."""
    name = unique("acl")
    missing = None if missing is None else missing._replace(name=missing.name.replace("NAME", name))
    secure.allow(user, [acl for acl in documented(name, *parts) if acl != missing])
    changelog, creates = f"{name}-novelty-changelog", CREATE in parts
    if missing is not None and missing.operation == "Alter":  # the source has gained a partition
        create_topics(secure.admin, {name: 2, changelog: (1, {"cleanup.policy": "compact"})})
    elif not creates:
        outputs = {f"{name}.{kind}": 1 for kind in OUTPUTS}
        create_topics(secure.admin, {name: 1, changelog: (1, {"cleanup.policy": "compact"}), **outputs})
        produce(secure.admin, changelog, [(b"0", b"an entry to read", (), 0)])
        produce(secure.admin, name, RECORDS)
    env = names(name, str(creates)) | as_case(secure, user) | {"KP_DELIVERY": delivery}
    with WorkerProcess(env, (), log_path=log, module="tests.support.crash_worker") as worker:
        if missing is None or missing.operation == "DescribeConfigs":
            worker.wait_ready()
            if creates:
                produce(secure.admin, name, RECORDS)
            wait_committed(secure.admin, name, name, len(RECORDS))
            worker.terminate()
        assert worker.wait() == exit_code(missing, name), f"{delivery}, {parts}, {missing}: {worker.log()}"
    if missing is None:
        assert origins(secure, name) == [(0, offset) for offset in range(len(RECORDS))]
        assert "ACL" not in worker.log()
        return
    resource = re.escape(missing.name) + (r"\d" if missing.prefixed else r"(?![\w.-])")
    lines = [line for line in worker.log().splitlines() if re.search("(ERROR|WARNING) worker", line)]
    assert any(missing.operation in line and re.search(resource, line) for line in lines), (missing, worker.log())


def exit_code(missing: Acl | None, name: str) -> int:
    """Return the code that a missing permission gives: 2 where the start finds out, otherwise 1."""
    if missing is None or missing.operation == "DescribeConfigs":
        return 0
    at_start = missing.operation in ("Create", "Alter") or missing.name in (name, *(f"{name}.{o}" for o in OUTPUTS))
    return 2 if at_start and missing.resource == "topic" else 1


def test_the_documented_permissions_are_enough_and_none_is_too_many(secure: SecureKafka, tmp_path: Path) -> None:
    """Some at a time, each as a user of its own."""
    with ThreadPoolExecutor(4) as pool:
        checks = [
            pool.submit(check_trial, secure, *trial, f"case{i}", tmp_path / f"{i}.log")
            for i, trial in enumerate(trials())
        ]
    for check in checks:
        check.result()


def test_an_output_that_is_denied_while_the_worker_runs_is_named_with_its_acl(
    secure: SecureKafka, hashing: Workers
) -> None:
    name = unique("denied")
    secure.allow("case79", documented(name, "run", "exactly_once", CHECK, CREATE))
    worker = hashing(names(name, "true") | as_case(secure, "case79")).wait_ready()
    secure.allow("case79", [Acl("Write", "topic", f"{name}.rejected")], permission=DENY)
    produce(secure.admin, name, RECORDS)
    assert worker.wait() == 1
    assert "grant the ACL Write" in worker.log()
    assert f"{name}.rejected" in worker.log().split("stopping:")[-1]
    assert not consume_all(secure.admin, f"{name}.accepted")  # all of the transaction or nothing


def test_the_doctor_names_what_a_login_may_not_do(secure: SecureKafka) -> None:
    name, user = unique("acl"), "case78"
    changelog = f"{name}-novelty-changelog"
    outputs = {f"{name}.{kind}": 1 for kind in OUTPUTS}
    create_topics(secure.admin, {name: 1, **outputs, changelog: (1, {"cleanup.policy": "compact"})})
    read = [Acl("Read", "topic", name), Acl("Read", "topic", changelog)]
    secure.allow(user, [*read, Acl("Write", "topic", f"{name}.", True)])
    env = names(name) | as_case(secure, user)
    diagnosis = Diagnosis(env)
    failed = "\n".join(diagnosis.failed())
    assert f"permissions: Write denied on topic {changelog}" in failed
    assert f"transactions: transactional id {name}-0 is denied" in failed
    assert f"group {name}: GroupAuthorizationFailedError" in failed
    assert any("cannot read the settings" in message for _, message in diagnosis.of("topics"))
    assert any("unencrypted" in message for _, message in diagnosis.of("broker"))
    more = [Acl("Write", "topic", changelog), Acl("Read", "group", name)]
    secure.allow(user, [*more, Acl("Write", "transactional-id", f"{name}-", True)])
    assert Diagnosis(env).failed() == []
    assert "refuses the login" in Diagnosis({**env, "KP_SASL_PASSWORD": "wrong"}).failed()[0]


# -- secrets

MARKERS = (PASSWORD, KEY_PASSWORD, "marker-in-environment-h2jd")


def assert_no_secret(text: str, *more: str) -> None:
    for marker in (*MARKERS, *more):
        for form in (marker, base64.b64encode(marker.encode()).decode().rstrip("="), marker.encode().hex()):
            assert form not in text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("way", "style"), [("PLAIN", "text"), ("OAUTHBEARER", "json"), ("mTLS, encrypted key", "text")]
)
def test_no_secret_comes_out_anywhere(secure: SecureKafka, workers: Workers, way: str, style: str) -> None:
    name = unique("secret")
    secure.allow(USER, documented(name, "run", "exactly_once", CHECK, CREATE))
    env = {**names(name, "true"), **login(secure, way), "KP_LOG_LEVEL": "debug"}
    if way == "PLAIN":  # this time by the environment
        del env["KP_SASL_PASSWORD_FILE"]
        env["KP_SASL_PASSWORD"] = PASSWORD
    bearer = Path(env["KP_SASL_TOKEN_FILE"]).read_text().strip() if way == "OAUTHBEARER" else PASSWORD
    env |= {"KP_LOG_FORMAT": style, "PYTHONASYNCIODEBUG": "1"}
    worker = workers(env, cold=True).wait_ready()
    seen = [worker.get(path)[1] for path in ("/metrics", "/healthz", "/readyz", "/nothing")]
    seen.append(Path(f"/proc/{worker.pid}/cmdline").read_text())
    seen.append(Path(f"/proc/{worker.pid}/comm").read_text())
    # and in failure: no permission any more for the topics that it is told to use, and no broker
    failing = [
        workers({**env, "KP_SOURCE_TOPIC": unique("denied"), "KP_CREATE_TOPICS": "false"}),
        workers({**env, "KP_SECURITY_PROTOCOL": "PLAINTEXT"}),
        workers({**env, "KP_THRESHOLD": "7"}),
        workers({**env, "KP_SASL_PASWORD": "marker-in-environment-h2jd"}, ("run", "--help")),
    ]
    assert [process.wait() for process in failing] == [2, 2, 2, 0]
    worker.finish()
    for text in (*seen, worker.log(), *(process.log() for process in failing)):
        assert text
        assert_no_secret(text, bearer)


def test_a_refused_secret_does_not_come_out(secure: SecureKafka, workers: Workers) -> None:
    marker = "marker-in-environment-h2jd"
    env = {**names(unique("secret")), "KP_LOG_LEVEL": "debug"}
    bad_token = token(user=marker, seconds=-10)
    path = secure.files.write("bad-token", bad_token)
    mtls = login(secure, "mTLS, encrypted key")
    del mtls["KP_TLS_KEY_PASSWORD_FILE"]
    wrong = [
        {**login(secure, "PLAIN"), "KP_SASL_PASSWORD": marker},  # and the file, too
        {**login(secure, "PLAIN"), "KP_SASL_PASSWORD_FILE": "", "KP_SASL_PASSWORD": marker},
        {**login(secure, "SCRAM-SHA-256"), "KP_SASL_PASSWORD_FILE": "", "KP_SASL_PASSWORD": marker},
        {**login(secure, "OAUTHBEARER"), "KP_SASL_TOKEN_FILE": str(path)},
        {**mtls, "KP_TLS_KEY_PASSWORD": marker},
        {**mtls, "KP_TLS_KEY_FILE": secure.files.client_key.read_text()},  # the key itself
    ]
    for process in [workers({**env, **settings}) for settings in wrong]:
        assert process.wait() == 2, process.log()
        assert_no_secret(process.log(), bad_token, secure.files.client_key.read_text().splitlines()[1])
        assert "Traceback" not in process.log()


def test_no_secret_is_in_a_repr(secure: SecureKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**login(secure, "PLAIN"), "KP_SASL_PASSWORD": PASSWORD, "KP_TLS_KEY_PASSWORD": KEY_PASSWORD}
    del env["KP_SASL_PASSWORD_FILE"]
    env["KP_TLS_CERTIFICATE_FILE"], env["KP_TLS_KEY_FILE"] = str(secure.files.client), str(secure.files.encrypted_key)
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    settings = load()
    client = client_arguments(settings)
    assert client["sasl_plain_password"] == PASSWORD
    nothing: Any = None
    membership = Membership(settings, client, nothing, nothing, nothing)
    for text in (repr(settings), str(settings), repr(membership), settings.model_dump_json()):
        assert_no_secret(text)
