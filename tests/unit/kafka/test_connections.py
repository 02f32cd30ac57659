"""What all clients share, brokers that cannot be reached, work that needs the sender task, and words for errors."""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import conn
from aiokafka import errors as kafka
from aiokafka.conn import AIOKafkaConnection

from tests.support.secure_kafka import KEY_PASSWORD, PASSWORD, Files
from tests.support.surroundings import ROOT
from worker.config import ConfigError, Settings, load
from worker.kafka.connections import (
    BrokerFault,
    UnreachableError,
    client_arguments,
    connected_admin,
    patch_aiokafka,
    while_sending,
)
from worker.kafka.errors import HungUpError, error_text, is_final, remedy
from worker.kafka.producer import PublishError
from worker.kafka.rows import TopicRefusedError

# -- the arguments: files that cannot be used are named, but never what is in them; who patches aiokafka

TLS = {"security_protocol": "SSL"}
PLAIN = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "u"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def settings(**given: object) -> Settings:
    return load(**{name: str(value) for name, value in given.items()})


def test_without_settings_it_is_plain_text() -> None:
    assert client_arguments(load()) == {
        "bootstrap_servers": "127.0.0.1:9092",
        "client_id": "kp-worker",
        "metadata_max_age_ms": 30_000,
        "security_protocol": "PLAINTEXT",
    }


def test_aiokafka_is_patched_by_the_function_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[tuple[Any, str]] = [
        (AIOKafkaConnection, "connect"), (AIOKafkaConnection, "authenticator_oauth"), (conn, "AIOKafkaProtocol"),
    ]  # fmt: skip
    theirs = object()
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, theirs)
    client_arguments(load())
    assert [name for owner, name in replaced if getattr(owner, name) is not theirs] == []
    patch_aiokafka()
    assert [name for owner, name in replaced if getattr(owner, name) is theirs] == []


def test_whoever_makes_clients_has_patched_aiokafka() -> None:
    """Otherwise their connections would miss a lost broker, and ignore a refused token. `config check` makes none."""
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "worker").rglob("*.py")}
    assert sorted(name for name, text in texts.items() if re.search(r"\bclient_arguments\(", text)) == [
        "config.py",
        "connections.py",
    ]
    assert sum("prepare_clients(" in text for text in texts.values()) >= 6


def test_certificates_and_host_names_are_always_checked(files: Files) -> None:
    for ca in ({}, {"tls_ca_file": files.ca}):
        context = client_arguments(settings(**TLS, **ca))["ssl_context"]
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_secrets_come_from_files_without_their_last_line_break(files: Files) -> None:
    arguments = client_arguments(settings(**PLAIN, sasl_password_file=files.write("spaced", " p w \r\n")))
    assert (arguments["sasl_plain_username"], arguments["sasl_plain_password"]) == ("u", " p w ")
    certificate = {"tls_certificate_file": files.client, "tls_key_file": files.encrypted_key}
    client_arguments(settings(**TLS, **certificate, tls_key_password_file=files.key_password))
    client_arguments(settings(**TLS, **certificate, tls_key_password=KEY_PASSWORD))


def wrong(files: Files) -> Mapping[str, tuple[dict[str, object], tuple[str, ...]]]:
    empty, text, missing = files.write("empty", " \n"), files.write("text", PASSWORD), files.directory / "nowhere"
    binary = files.directory / "binary"
    binary.write_bytes(b"\xff\xfe" + PASSWORD.encode())
    pair = {**TLS, "tls_certificate_file": files.client}
    token = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    return {
        "no authority": ({**TLS, "tls_ca_file": missing}, ("KP_TLS_CA_FILE", str(missing), "No such file")),
        "an authority that is none": ({**TLS, "tls_ca_file": text}, ("KP_TLS_CA_FILE", str(text), "PEM file")),
        "no certificate": (
            {**TLS, "tls_certificate_file": missing},
            ("KP_TLS_CERTIFICATE_FILE", str(missing), "No such file", "mount"),
        ),
        "no key": ({**pair, "tls_key_file": missing}, ("KP_TLS_KEY_FILE", str(missing), "No such file")),
        "a key that is none": ({**pair, "tls_key_file": text}, ("KP_TLS_KEY_FILE", str(text), "private key")),
        "a certificate alone": (pair, ("KP_TLS_CERTIFICATE_FILE", str(files.client), "private key")),
        "another key": (
            {**TLS, "tls_certificate_file": files.client, "tls_key_file": files.expired_client},
            ("KP_TLS_KEY_FILE", "mismatch"),
        ),
        "an encrypted key": ({**pair, "tls_key_file": files.encrypted_key}, ("encrypted", "KP_TLS_KEY_PASSWORD_FILE")),
        "another password": (
            {**pair, "tls_key_file": files.encrypted_key, "tls_key_password": PASSWORD},
            ("KP_TLS_KEY_FILE", "KP_TLS_KEY_PASSWORD must be the key's"),
        ),
        "no password file": ({**PLAIN, "sasl_password_file": missing}, ("KP_SASL_PASSWORD_FILE", "No such file")),
        "an empty password": ({**PLAIN, "sasl_password_file": empty}, ("KP_SASL_PASSWORD_FILE", "is empty")),
        "a directory": ({**PLAIN, "sasl_password_file": files.directory}, ("KP_SASL_PASSWORD_FILE", "Is a directory")),
        "not text": ({**PLAIN, "sasl_password_file": binary}, ("KP_SASL_PASSWORD_FILE", "not UTF-8")),
        "an empty token": ({**token, "sasl_token_file": empty}, ("KP_SASL_TOKEN_FILE", "is empty", "sidecar")),
    }


@pytest.mark.slow
def test_a_file_that_cannot_be_used_is_named_and_not_shown(files: Files) -> None:
    for name, (given, words) in wrong(files).items():
        with pytest.raises(ConfigError) as caught:
            client_arguments(settings(**given))
        for word in words:
            assert word in str(caught.value), name
        assert PASSWORD not in str(caught.value)


def test_an_open_login_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        client_arguments(settings(**{**PLAIN, "security_protocol": "SASL_PLAINTEXT"}, sasl_password=PASSWORD))
    assert "the password and all records cross the network unencrypted; use SASL_SSL" in caplog.text
    assert PASSWORD not in caplog.text


# -- brokers that cannot be reached: which, why, and what to do


@contextmanager
def listening(backlog: int | None) -> Iterator[int]:
    """Take a port; None: nobody listens on it, otherwise connections are taken and nothing answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if backlog is not None:
            taken.listen(backlog)
        yield taken.getsockname()[1]


def failure(servers: str) -> UnreachableError:
    settings = Settings(bootstrap_servers=servers)

    async def connect() -> None:
        async with connected_admin(settings, client_arguments(settings)):
            raise AssertionError("nobody is there")

    with pytest.raises(UnreachableError) as error:
        asyncio.run(connect())
    return error.value


@pytest.mark.slow
def test_each_broker_is_named_with_its_reason_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with listening(None) as closed, listening(5) as silent:
        error = failure(f"127.0.0.1:{closed},nowhere.invalid:9092,127.0.0.1:{silent}")
    assert not error.final
    assert f"127.0.0.1:{closed} (connection refused)" in str(error)
    assert "nowhere.invalid:9092 (unknown host name)" in str(error)
    assert f"127.0.0.1:{silent} (no answer in 5 s)" in str(error)
    assert "start the broker or correct the address (-b, KP_BOOTSTRAP_SERVERS)" in str(error)
    assert caplog.records == [], "the library says nothing of its own"


def test_one_address_is_named_once() -> None:
    with listening(None) as closed:
        text = str(failure(f"127.0.0.1:{closed}"))
    assert text.startswith(f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS=127.0.0.1:{closed}: connection refused; ")


def test_an_advertised_address_is_a_matter_of_the_broker() -> None:
    refused = ConnectionRefusedError(111, "Connect call failed")
    assert "advertised.listeners" in (BrokerFault(("b", 9092), refused, advertised=True).advice() or "")
    assert "advertised.listeners" not in (BrokerFault(("b", 9092), refused).advice() or "")
    assert BrokerFault(("::1", 9092), refused).where == "[::1]:9092"


# -- aiokafka's sender task


def producer_with(sender: asyncio.Future[None]) -> Any:
    return SimpleNamespace(_sender=SimpleNamespace(sender_task=sender))


async def test_the_result_of_work_comes_back_while_the_sender_runs() -> None:
    sender: asyncio.Future[None] = asyncio.Future()
    assert await while_sending(producer_with(sender), asyncio.sleep(0, "done")) == "done"
    assert not sender.done()


@pytest.mark.parametrize("cause", [ValueError("fenced"), None])
async def test_a_sender_that_ends_ends_the_work(cause: Exception | None) -> None:
    sender: asyncio.Future[None] = asyncio.Future()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    sending = asyncio.create_task(while_sending(producer_with(sender), work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sender.cancel() if cause is None else sender.set_exception(cause)
    with pytest.raises(
        PublishError, match="the producer ended: " + ("None" if cause is None else "ValueError")
    ) as error:
        await sending
    assert error.value.__cause__ is cause
    await asyncio.sleep(0)
    assert ended == ["cancelled"]


async def test_a_caller_that_is_cancelled_cancels_the_work() -> None:
    done = asyncio.Event()
    sending = asyncio.create_task(while_sending(producer_with(asyncio.Future()), done.wait()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await asyncio.sleep(0)
    assert [task.cancelled() for task in before - asyncio.all_tasks()] == [True, True], "the caller and its work"


# -- words for Kafka's errors: the cause that a remedy is known for is found anywhere in the chain


def tls_error(kind: type[ssl.SSLError], **attributes: object) -> ssl.SSLError:
    """Return an error as OpenSSL raises it: only that sets the attributes."""
    error = kind(1, "no")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (kafka.SaslAuthenticationFailed("no"), "KP_SASL_USERNAME"),
        (kafka.UnsupportedSaslMechanismError("no"), "KP_SASL_MECHANISM"),
        (kafka.IllegalSaslStateError("no"), "has no SASL"),
        (tls_error(ssl.SSLCertVerificationError, verify_code=20), "KP_TLS_CA_FILE"),
        (tls_error(ssl.SSLCertVerificationError, verify_code=10), "it has expired"),
        (tls_error(ssl.SSLError, reason="WRONG_VERSION_NUMBER"), "may not speak TLS"),
        (tls_error(ssl.SSLError, reason="TLSV13_ALERT_CERTIFICATE_REQUIRED"), "another client certificate"),
        (kafka.TopicAuthorizationFailedError({"b", "a"}), "topic a, b: grant"),
        (kafka.TopicAuthorizationFailedError(), "topic (see above): grant"),
        (kafka.GroupAuthorizationFailedError("g"), "denies group g"),
        (kafka.TransactionalIdAuthorizationFailed("g-0"), "transactional id g-0"),
        (kafka.ClusterAuthorizationFailedError(), "IdempotentWrite"),
        (kafka.ProducerFenced(), "another worker"),
        (kafka.InvalidProducerEpoch(), "another worker"),
        (TopicRefusedError("t", 0, 10, ""), "topic t: raise its max.message.bytes"),
        (kafka.MessageSizeTooLargeError(), "raise max.message.bytes of that topic"),
        (kafka.RequestTimedOutError(), "KP_TRANSACTION_TIMEOUT_SECONDS"),
        (TimeoutError(), "KP_TRANSACTION_TIMEOUT_SECONDS"),
        (HungUpError("b:1 closed the connection"), "if the broker is running"),
    ],
)
def test_a_remedy_for_each_error_and_for_what_it_caused(error: Exception, words: str) -> None:
    assert words in (remedy(error) or "")
    if not isinstance(error, HungUpError):
        outer = RuntimeError("outer")
        outer.__cause__ = error
        assert remedy(outer) == remedy(error)
        assert is_final(outer) == (isinstance(error, ssl.SSLError) or "Sasl" in type(error).__name__)
    assert error_text(error).endswith(f"({remedy(error)})")


def test_nothing_is_added_to_an_unknown_error() -> None:
    assert remedy(ValueError("x")) is None
    assert error_text(ValueError("x")) == "ValueError: x"
    assert error_text(ValueError()) == "ValueError"
