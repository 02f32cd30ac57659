"""A broker with TLS, SASL and ACLs for tests, and the certificates and tokens for it, created anew each time.

Every way to log in leads to the same user, `kp`, who may do nothing until `allow` says so. The PLAINTEXT listener is
the administrator's.
"""

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest
from aiokafka.protocol.types import CompactBytes, Int8, Int16, Int32
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tests.support.kafka_fixtures import admin
from worker.kafka.aiokafka_private import InOneVersion
from worker.kafka.protocol import TEXT, Fields, fields_array, flexible
from worker.lab.broker.embedded_kafka import EmbeddedKafka

USER = "kp"
PASSWORD = "marker-password-k3wq"
KEY_PASSWORD = "marker-key-password-z8xv"
REAUTHENTICATE_MS = 2000
"""The broker drops OAUTHBEARER connections after this: aiokafka does not log in again on a living connection."""

RESOURCE_TYPES = {"topic": 2, "group": 3, "cluster": 4, "transactional-id": 5}
OPERATIONS = {
    "Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Alter": 7, "Describe": 8, "ClusterAction": 9,
    "DescribeConfigs": 10, "AlterConfigs": 11, "IdempotentWrite": 12,
}  # fmt: skip
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3


class AlterScram(
    InOneVersion,
    version=flexible(
        "AlterUserScramCredentials", 51, 0,
        Fields(
            ("deletions", fields_array(("name", TEXT), ("mechanism", Int8))),
            (
                "upsertions",
                fields_array(
                    ("name", TEXT),
                    ("mechanism", Int8),
                    ("iterations", Int32),
                    ("salt", CompactBytes),
                    ("salted_password", CompactBytes),
                ),
            ),
        ),
        Fields(
            ("throttle_time_ms", Int32),
            ("results", fields_array(("user", TEXT), ("error_code", Int16), ("error_message", TEXT))),
        ),
    ),
):  # fmt: skip
    """The passwords of users who log in by SCRAM; aiokafka lacks this request."""


class Acl(NamedTuple):
    """One permission: operation, resource type and name, as kafka-acls takes them."""

    operation: str
    resource: str
    name: str
    prefixed: bool = False


class Files:
    """Certificates of one authority, as PEM files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))
        self.strange_ca = directory / "strange-ca.pem"
        trustme.CA().cert_pem.write_to_path(str(self.strange_ca))
        self.client = directory / "client.pem"
        self.client_key = directory / "client.key"
        self.encrypted_key = directory / "client-encrypted.key"
        chain, key = self._issue(USER, common_name=USER)
        self.client.write_bytes(chain)
        self.client_key.write_bytes(_pkcs8(key))
        self.encrypted_key.write_bytes(_pkcs8(key, KEY_PASSWORD))
        chain, key = self._issue(USER, common_name=USER, expired=True)
        self.expired_client = directory / "client-expired.pem"  # certificate and key in one file
        self.expired_client.write_bytes(chain + _pkcs8(key))
        self.password = self.write("password", PASSWORD + "\n")
        self.key_password = self.write("key-password", KEY_PASSWORD + "\n")

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text, "utf-8")
        return path

    def _issue(self, *names: str, common_name: str | None = None, expired: bool = False) -> tuple[bytes, bytes]:
        end = datetime.now(UTC) - timedelta(days=1) if expired else None
        issued = self._authority.issue_cert(*names, common_name=common_name, not_after=end)
        return b"".join(blob.bytes() for blob in issued.cert_chain_pems), issued.private_key_pem.bytes()

    def keystore(self, listener: str, name: str, *, expired: bool = False, client_auth: bool = False) -> dict[str, str]:
        """Return the broker's settings for one TLS listener."""
        chain, key = self._issue(name, expired=expired)
        settings = {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": chain.decode(),
            "ssl.keystore.key": _pkcs8(key).decode(),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": self.ca.read_text(),
            "ssl.client.auth": "required" if client_auth else "none",
            "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/",
        }
        return {f"listener.name.{listener.lower()}.{key}": value for key, value in settings.items()}


def _pkcs8(pem: bytes, password: str | None = None) -> bytes:
    """Return a key in the one form that Kafka reads."""
    protection = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
    return load_pem_private_key(pem, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)


def token(user: str = USER, seconds: float = 3600, **claims: str) -> str:
    """Return an unsecured JWT, as Kafka's own development validator takes them."""
    now = int(time.time())
    parts = [{"alg": "none"}, {"sub": user, "iat": now - 3600, "exp": now + int(seconds), **claims}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts) + "."


class SecureKafka:
    """The broker: `at(listener)` is where to connect."""

    def __init__(self, broker: EmbeddedKafka, files: Files) -> None:
        self.broker = broker
        self.files = files
        self.admin = broker.bootstrap_servers

    def at(self, listener: str) -> str:
        """Return host:port of MTLS, USERS (SASL_SSL), CLEAR (SASL_PLAINTEXT), EXPIRED, or ELSEWHERE (wrong host)."""
        return self.broker.bootstrap(listener)

    def allow(self, user: str, acls: Iterable[Acl], permission: int = ALLOW) -> None:
        """Grant permissions (or deny them), and wait until the broker knows them."""

        async def ask(client: AIOKafkaAdminClient) -> None:
            for acl in acls:
                request = CreateAclsRequest(
                    RESOURCE_TYPES[acl.resource], acl.name, PREFIXED if acl.prefixed else LITERAL, f"User:{user}", "*",
                    OPERATIONS[acl.operation], permission,
                )  # fmt: skip
                answer = await client._send_request(request)
                assert all(not code for code, *_ in answer.creation_responses), answer

        admin(self.admin, ask)

    def add_user(self, mechanism: str) -> None:
        """Let USER log in by SCRAM."""
        salt, hashed = b"salt", mechanism.removeprefix("SCRAM-").replace("-", "")
        salted = hashlib.pbkdf2_hmac(hashed, PASSWORD.encode(), salt, 4096)
        request = AlterScram([], [(USER, {"SHA256": 1, "SHA512": 2}[hashed], 4096, salt, salted)])

        async def ask(client: AIOKafkaAdminClient) -> None:
            answer = await client._send_request(request)
            assert all(not code for _, code, _ in answer.results), answer

        admin(self.admin, ask)


@contextmanager
def secure_kafka(directory: Path) -> Iterator[SecureKafka]:
    """Run the broker. Its users are USER, and of the listener CLEAR case0 to case79, whose name is the password."""
    files = Files(directory)
    login = "org.apache.kafka.common.security"
    cases = " ".join(f'user_case{i}="case{i}"' for i in range(80))
    plain = f"{login}.plain.PlainLoginModule required"
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        **files.keystore("MTLS", "127.0.0.1", client_auth=True),
        **files.keystore("USERS", "127.0.0.1"),
        **files.keystore("EXPIRED", "127.0.0.1", expired=True),
        **files.keystore("ELSEWHERE", "kafka.example"),
        "listener.name.users.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.users.plain.sasl.jaas.config": f'{plain} user_{USER}="{PASSWORD}";',
        "listener.name.users.scram-sha-256.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        "listener.name.users.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        "listener.name.users.oauthbearer.sasl.jaas.config": f"{login}.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="broker";',
        "listener.name.users.oauthbearer.connections.max.reauth.ms": str(REAUTHENTICATE_MS),
        "listener.name.clear.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.clear.plain.sasl.jaas.config": f"{plain} {cases};",
    }  # fmt: skip
    listeners = {"MTLS": "SSL", "USERS": "SASL_SSL", "CLEAR": "SASL_PLAINTEXT", "EXPIRED": "SSL", "ELSEWHERE": "SSL"}
    with EmbeddedKafka(listeners=listeners, config=config) as broker:
        yield SecureKafka(broker, files)
