"""Words for Kafka's refusals: which resource, which ACL, what to do."""

from __future__ import annotations

import ssl
from typing import Final

from aiokafka import errors as kafka

from worker.kafka.refusals import TopicRefusedError

BAD_CERTIFICATE: Final = {
    10: "it has expired: renew it on the broker",
    62: "KP_BOOTSTRAP_SERVERS (or what the broker advertises) must be a name that is in it",
    64: "KP_BOOTSTRAP_SERVERS (or what the broker advertises) must be an address that is in it",
}
"""What to do, by OpenSSL's reason (X509_V_ERR_...); all others: the authority is not known."""

ANOTHER_LISTENER: Final = "check KP_SECURITY_PROTOCOL and the port in KP_BOOTSTRAP_SERVERS"


class HungUpError(ConnectionError):
    """A broker took the connection and closed it."""


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and what caused it, outermost first."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def remedy(error: BaseException) -> str | None:
    """Say what would mend a Kafka error, or None where there is nothing to add to its own words."""
    for cause in chain(error):
        subject = ", ".join(sorted(_names(cause)))
        if isinstance(cause, kafka.SaslAuthenticationFailed):
            return (
                "the broker refuses the login: check KP_SASL_USERNAME and KP_SASL_PASSWORD (or the token), "
                "and that the user exists for KP_SASL_MECHANISM"
            )
        if isinstance(cause, kafka.UnsupportedSaslMechanismError):
            return "the listener does not offer KP_SASL_MECHANISM: take one of its mechanisms, or another port"
        if isinstance(cause, kafka.IllegalSaslStateError):
            return f"the listener has no SASL: {ANOTHER_LISTENER}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            todo = BAD_CERTIFICATE.get(cause.verify_code, "KP_TLS_CA_FILE must hold the authority that signed it")
            return f"the broker's certificate is not trusted: {todo}"
        if isinstance(cause, ssl.SSLError):
            return _about_tls(cause)
        if isinstance(cause, kafka.TopicAuthorizationFailedError):
            return (
                f"the broker denies access to topic {subject or '(see above)'}: grant the ACL Write on the output "
                "topics and the changelog, Read on the source and the changelog (docs/security.md)"
            )
        if isinstance(cause, kafka.GroupAuthorizationFailedError):
            return f"the broker denies group {subject}: grant the ACL Read on the group (KP_GROUP_ID)"
        if isinstance(cause, kafka.TransactionalIdAuthorizationFailed):
            return (
                f"the broker denies transactional id {subject}: grant the ACL Write on transactional ids "
                "with the prefix <KP_GROUP_ID>-, or set KP_DELIVERY=at_least_once"
            )
        if isinstance(cause, kafka.ClusterAuthorizationFailedError):
            return "the broker denies idempotent writes: grant the ACL IdempotentWrite on the cluster"
        if isinstance(cause, kafka.ProducerFenced | kafka.InvalidProducerEpoch):
            return (
                "another worker has taken over the partition (this one was paused or cut off for longer than "
                "KP_SESSION_TIMEOUT_SECONDS), or two deployments share KP_GROUP_ID"
            )
        if isinstance(cause, TopicRefusedError):
            return f"topic {cause.topic}: {cause.advice}"
        if isinstance(cause, kafka.MessageSizeTooLargeError):
            return "an output is larger than its topic allows: raise max.message.bytes of that topic"
        if isinstance(cause, kafka.KafkaTimeoutError | kafka.RequestTimedOutError | TimeoutError):
            return "the broker did not answer in KP_TRANSACTION_TIMEOUT_SECONDS"
    if isinstance(error, HungUpError):  # no reason was found in what caused it
        return f"if the broker runs, this listener may expect something else: {ANOTHER_LISTENER}"
    return None


def _about_tls(error: ssl.SSLError) -> str:
    if "ALERT" in (error.reason or ""):
        return (
            "the broker wants another client certificate: check KP_TLS_CERTIFICATE_FILE and KP_TLS_KEY_FILE (given, "
            "not expired, signed by an authority that the broker trusts)"
        )
    return f"the listener may not speak TLS: {ANOTHER_LISTENER}"


def is_final(error: BaseException) -> bool:
    """Whether connecting again cannot help: a refused login or certificate."""
    final = (
        kafka.SaslAuthenticationFailed,
        kafka.UnsupportedSaslMechanismError,
        kafka.IllegalSaslStateError,
        ssl.SSLError,
    )
    return any(isinstance(cause, final) for cause in chain(error))


def explain(error: BaseException) -> str:
    """Return type, words and remedy of an error, in one line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    advice = remedy(error)
    return text if advice is None else f"{text} ({advice})"


def _names(error: BaseException) -> set[str]:
    names: set[str] = set()
    for argument in error.args:
        names |= {str(item) for item in argument} if isinstance(argument, set | frozenset | list) else {str(argument)}
    return names
