"""What a trace needs and no library emits: constants, or attributes of spans and their resources.

A run's own spans say it, and their resource: the agent's, or those of the model where no span is the agent's. Spans of
the model also say domain, confidence and success. A tool may run elsewhere, for others: its spans say none of it, and
can only make visibility and privacy stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.runs.fields import as_confidence, as_privacy, as_text, as_visibility, json_value
from worker.runs.otlp.spans import Span

AGENT_NAME: Final = "name"
SERVICE_AND_NAME: Final = "service/name"

_VISIBILITIES: Final = ("network", "org", "private")
_PRIVACY_LEVELS: Final = ("aggregated", "federated", "private")
"""The strictest is the last."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A constant, or the value of an attribute where a span or its resource has a valid one."""

    constant: Any
    check: Callable[[Any], Any]
    attribute: str = ""

    def value(self, spans: Iterable[Span]) -> Any:
        """Return the first valid value of the attribute, else the constant."""
        return next(self.said(spans), self.constant)

    def said(self, spans: Iterable[Span]) -> Iterator[Any]:
        """Yield the valid values of the attribute, by span; those of a resource that spans share once."""
        seen: set[int] = set()
        for span in spans if self.attribute else ():
            shared = [] if id(span.resource) in seen else [span.resource]
            seen.add(id(span.resource))
            for found in (span.attributes, *shared):
                value = _attribute(found, self.attribute)
                if value is not None:
                    try:
                        yield self.check(value)
                    except ValueError:
                        continue


@dataclass(frozen=True, slots=True)
class Rules:
    """What spans do not have, and the limits of a trace. `success`: None takes it from the spans' status.

    `agent`: an attribute with the agent's id, and what counts where it is absent: AGENT_NAME (the name that the spans
    give the agent), SERVICE_AND_NAME (both, so that two services may have agents of one name), or a constant for the
    runs whose spans name no agent.
    """

    confidence: Rule
    domain: Rule
    visibility: Rule
    privacy: Rule
    success: Rule | None = None
    limits: Limits = DEFAULT_LIMITS
    agent: Rule = Rule(AGENT_NAME, as_text)

    def visibility_of(self, own: Sequence[Span], others: Iterable[Span]) -> str | None:
        """Return the visibility that the run's own spans say; that of other spans if it is stricter."""
        return _strictest(self.visibility, own, others, _VISIBILITIES)

    def privacy_of(self, own: Sequence[Span], others: Iterable[Span]) -> str | None:
        """Return the privacy level, likewise."""
        return _strictest(self.privacy, own, others, _PRIVACY_LEVELS)


def _strictest(rule: Rule, own: Sequence[Span], others: Iterable[Span], levels: tuple[str, ...]) -> str | None:
    value: str | None = rule.value(own)
    return None if value is None else max([value, *rule.said(others)], key=levels.index)


def parse_rules(
    confidence: str, domain: str, visibility: str, privacy: str, limits: Limits = DEFAULT_LIMITS,
    agent: str = AGENT_NAME,
) -> Rules:  # fmt: skip
    """Return the rules of five texts, each a constant, or `attribute:NAME|constant`. Raises ValueError."""
    return Rules(
        parse_rule("confidence", confidence, as_confidence), parse_rule("domain", domain, as_text),
        parse_rule("visibility", visibility, as_visibility), parse_rule("privacy", privacy, as_privacy),
        limits=limits, agent=parse_rule("agent", agent, as_text),
    )  # fmt: skip


def parse_rule(name: str, text: str, check: Callable[[Any], Any]) -> Rule:
    """Return a rule: a constant, or `attribute:NAME|constant`. Raises ValueError, with its name."""
    attribute, bar, constant = "", "|", text
    if text.startswith("attribute:"):
        attribute, bar, constant = text.removeprefix("attribute:").partition("|")
    if not bar or (not attribute and text.startswith("attribute:")):
        raise ValueError(f"{name}: {text!r} is not attribute:NAME|constant")
    try:
        return Rule(check(constant), check, attribute)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _attribute(found: Mapping[str, Any], name: str) -> Any:
    """Return an attribute; `metadata.domain` is also the field `domain` of an attribute `metadata` that holds JSON."""
    if name in found:
        return found[name]
    outer, dot, inner = name.partition(".")
    while dot:
        if outer in found:
            value = json_value(found[outer])
            return value.get(inner) if isinstance(value, dict) else None
        more, dot, inner = inner.partition(".")
        outer = f"{outer}.{more}"
    return None
