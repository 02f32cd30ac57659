"""Words for Kafka's refusals: which resource, which ACL, what to do."""

from __future__ import annotations

from aiokafka import errors as kafka


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
        if isinstance(cause, kafka.TopicAuthorizationFailedError):
            return (
                f"the broker denies access to topic {subject or '(see above)'}: grant the ACL Write on the output "
                "topics and the changelog, Read on the source and the changelog, Describe on all"
            )
        if isinstance(cause, kafka.GroupAuthorizationFailedError):
            return f"the broker denies group {subject}: grant the ACL Read on the group (KP_GROUP_ID)"
        if isinstance(cause, kafka.TransactionalIdAuthorizationFailed):
            return (
                f"the broker denies transactional id {subject}: grant the ACLs Write and Describe on transactional ids "
                "with the prefix KP_GROUP_ID, or set KP_DELIVERY=at_least_once"
            )
        if isinstance(cause, kafka.ClusterAuthorizationFailedError):
            return "the broker denies idempotent writes: grant the ACL IdempotentWrite on the cluster"
        if isinstance(cause, kafka.ProducerFenced | kafka.InvalidProducerEpoch):
            return (
                "another worker has taken over the partition (this one was paused or cut off for longer than "
                "KP_SESSION_TIMEOUT_SECONDS), or two deployments share KP_GROUP_ID"
            )
        if isinstance(cause, kafka.MessageSizeTooLargeError):
            return "an output is larger than its topic allows: raise max.message.bytes of that topic"
        if isinstance(cause, kafka.KafkaTimeoutError | kafka.RequestTimedOutError | TimeoutError):
            return "the broker did not answer in KP_TRANSACTION_TIMEOUT_SECONDS"
    return None


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
