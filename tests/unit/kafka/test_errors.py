"""Words for Kafka's errors: the cause that a remedy is known for is found anywhere in the chain."""

from __future__ import annotations

import ssl

import pytest
from aiokafka import errors as kafka

from worker.kafka.cluster.errors import HungUpError, error_text, is_final, remedy
from worker.kafka.writing.rows import TopicRefusedError


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
