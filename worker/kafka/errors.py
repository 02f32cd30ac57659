"""Explain Kafka's errors: what happened, on which resource, and what to do."""

import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

from aiokafka import errors as kafka

from worker.kafka.rows import TopicRefusedError

BAD_CERTIFICATE: Final = {
    10: "it has expired: renew it on the broker",
    62: "KP_BOOTSTRAP_SERVERS (or what the broker advertises) must be a name that is in it",
    64: "KP_BOOTSTRAP_SERVERS (or what the broker advertises) must be an address that is in it",
}
"""What to do, by OpenSSL's reason (X509_V_ERR_...). Any other reason means an unknown authority."""

ANOTHER_LISTENER: Final = "check KP_SECURITY_PROTOCOL and the port in KP_BOOTSTRAP_SERVERS"


class HungUpError(ConnectionError):
    """A broker accepted the connection and closed it."""


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, outermost first."""
    errors: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in errors:
        errors.append(current)
        current = current.__cause__ or current.__context__
    return errors


def remedy(error: BaseException) -> str | None:
    """Return what would fix a Kafka error; None if there is nothing to add to its message."""
    for cause in chain(error):
        for kinds, advice in REMEDIES:
            if isinstance(cause, kinds):
                return advice if isinstance(advice, str) else advice(cause)
    if isinstance(error, HungUpError):  # its causes gave no reason
        return f"if the broker is running, this listener may use another protocol: {ANOTHER_LISTENER}"
    return None


def _about_certificate(error: ssl.SSLCertVerificationError) -> str:
    todo = BAD_CERTIFICATE.get(error.verify_code, "KP_TLS_CA_FILE must contain the CA that signed it")
    return f"the broker's certificate is not trusted: {todo}"


def _about_tls(error: ssl.SSLError) -> str:
    if "ALERT" in (error.reason or ""):
        return (
            "the broker wants another client certificate: check KP_TLS_CERTIFICATE_FILE and KP_TLS_KEY_FILE (given, "
            "not expired, signed by an authority that the broker trusts)"
        )
    return f"the listener may not speak TLS: {ANOTHER_LISTENER}"


def is_final(error: BaseException) -> bool:
    """Whether connecting again cannot help, because the login failed or a certificate is not accepted."""
    final = (
        kafka.SaslAuthenticationFailed,
        kafka.UnsupportedSaslMechanismError,
        kafka.IllegalSaslStateError,
        ssl.SSLError,
    )
    return any(isinstance(cause, final) for cause in chain(error))


def error_text(error: BaseException) -> str:
    """Return an error's type, message and remedy in one line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    advice = remedy(error)
    return text if advice is None else f"{text} ({advice})"


def _names(error: BaseException) -> str:
    names: set[str] = set()
    for argument in error.args:
        names |= {str(item) for item in argument} if isinstance(argument, set | frozenset | list) else {str(argument)}
    return ", ".join(sorted(names))


REMEDIES: Final[Sequence[tuple[Any, str | Callable[[Any], str]]]] = (
    (
        kafka.SaslAuthenticationFailed,
        (
            "the broker refuses the login: check KP_SASL_USERNAME and KP_SASL_PASSWORD (or the token), and that the "
            "user exists for KP_SASL_MECHANISM"
        ),
    ),
    (
        kafka.UnsupportedSaslMechanismError,
        "the listener does not support KP_SASL_MECHANISM: use one of its mechanisms, or another port",
    ),
    (kafka.IllegalSaslStateError, f"the listener has no SASL: {ANOTHER_LISTENER}"),
    (ssl.SSLCertVerificationError, _about_certificate),
    (ssl.SSLError, _about_tls),
    (
        kafka.TopicAuthorizationFailedError,
        lambda error: (
            f"the broker denies access to topic {_names(error) or '(see above)'}: grant the ACL Write on the output "
            "topics and the changelog, Read on the source and the changelog (docs/security.md)"
        ),
    ),
    (
        kafka.GroupAuthorizationFailedError,
        lambda error: f"the broker denies group {_names(error)}: grant the ACL Read on the group (KP_GROUP_ID)",
    ),
    (
        kafka.TransactionalIdAuthorizationFailed,
        lambda error: (
            f"the broker denies transactional id {_names(error)}: grant the ACL Write on transactional ids with the "
            "prefix <KP_GROUP_ID>-, or set KP_DELIVERY=at_least_once"
        ),
    ),
    (
        kafka.ClusterAuthorizationFailedError,
        "the broker denies idempotent writes: grant the ACL IdempotentWrite on the cluster",
    ),
    (
        (kafka.ProducerFenced, kafka.InvalidProducerEpoch),
        (
            "another worker has taken over the partition (this one was paused or disconnected for longer than "
            "KP_SESSION_TIMEOUT_SECONDS), or two deployments share KP_GROUP_ID"
        ),
    ),
    (TopicRefusedError, lambda error: f"topic {error.topic}: {error.advice}"),
    (
        kafka.MessageSizeTooLargeError,
        "an output is larger than its topic allows: raise max.message.bytes of that topic",
    ),
    (
        (kafka.KafkaTimeoutError, kafka.RequestTimedOutError, TimeoutError),
        "the broker did not answer in KP_TRANSACTION_TIMEOUT_SECONDS",
    ),
)
"""What would fix an error, by its type or types; the first matching row counts."""
