"""Values that a trace needs and no library emits: constants, or attributes of spans and their resources.

They are taken from a run's own spans and their resource: the agent's, or the models' if there is no agent's span.
Domain, confidence and success may also be on the models' spans. A tool may run elsewhere, for others: its spans can
only make visibility and privacy stricter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.runs.fields import as_confidence, as_nonblank, as_privacy, as_visibility, json_value
from worker.runs.otlp.spans import Span

AGENT_NAME: Final = "name"
SERVICE_AND_NAME: Final = "service/name"

_LEVELS: Final = {"visibility": ("network", "org", "private"), "privacy": ("aggregated", "federated", "private")}
"""From the least to the most strict."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The value of an attribute, if a span or its resource has a valid one, otherwise a constant."""

    constant: Any
    check: Callable[[Any], Any]
    attribute: str = ""

    def value(self, spans: Iterable[Span]) -> Any:
        """Return the first valid value of the attribute, otherwise the constant."""
        return next(self.said(spans), self.constant)

    def said(self, spans: Iterable[Span]) -> Iterator[Any]:
        """Yield the valid values of the attribute, span by span; those of a shared resource once."""
        seen: set[int] = set()
        for span in spans if self.attribute else ():
            shared = [] if id(span.resource) in seen else [span.resource]
            seen.add(id(span.resource))
            for attributes in (span.attributes, *shared):
                value = _attribute(attributes, self.attribute)
                if value is not None:
                    try:
                        yield self.check(value)
                    except ValueError:
                        continue


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for what spans lack, and the limits of a trace. `success` None: the spans' status decides.

    `agent`: an attribute with the agent's id. If it is absent, the constant decides: AGENT_NAME takes the agent's name
    from the spans, SERVICE_AND_NAME combines it with the service's (two services may have agents of one name), and any
    other constant is the id of runs whose spans name no agent.
    """

    confidence: Rule
    domain: Rule
    visibility: Rule
    privacy: Rule
    success: Rule | None = None
    limits: Limits = DEFAULT_LIMITS
    agent: Rule = Rule(AGENT_NAME, as_nonblank)

    def strictest(
        self, name: Literal["visibility", "privacy"], own: Sequence[Span], others: Iterable[Span]
    ) -> str | None:
        """Return a level according to the run's own spans, or to other spans if they are stricter."""
        rule: Rule = getattr(self, name)
        value: str | None = rule.value(own)
        return None if value is None else max([value, *rule.said(others)], key=_LEVELS[name].index)


def parse_rules(
    confidence: str, domain: str, visibility: str, privacy: str, limits: Limits = DEFAULT_LIMITS,
    agent: str = AGENT_NAME,
) -> Rules:  # fmt: skip
    """Return the rules for texts, each a constant or `attribute:NAME|constant`. Raises ValueError."""
    return Rules(
        parse_rule("confidence", confidence, as_confidence), parse_rule("domain", domain, as_nonblank),
        parse_rule("visibility", visibility, as_visibility), parse_rule("privacy", privacy, as_privacy),
        limits=limits, agent=parse_rule("agent", agent, as_nonblank),
    )  # fmt: skip


def parse_rule(name: str, text: str, check: Callable[[Any], Any]) -> Rule:
    """Return the rule for a constant or `attribute:NAME|constant`. Raises ValueError, with its name."""
    attribute, bar, constant = "", "|", text
    if text.startswith("attribute:"):
        attribute, bar, constant = text.removeprefix("attribute:").partition("|")
    if not bar or (not attribute and text.startswith("attribute:")):
        raise ValueError(f"{name}: {text!r} is not attribute:NAME|constant")
    try:
        return Rule(check(constant), check, attribute)
    except ValueError as error:
        raise ValueError(f"{name}: {constant!r} {error}") from None


def _attribute(attributes: Mapping[str, Any], name: str) -> Any:
    """Return an attribute. `metadata.domain` is also the field `domain` in the JSON of an attribute `metadata`."""
    if name in attributes:
        return attributes[name]
    outer, dot, inner = name.partition(".")
    while dot:
        if outer in attributes:
            value = json_value(attributes[outer])
            return value.get(inner) if isinstance(value, dict) else None
        more, dot, inner = inner.partition(".")
        outer = f"{outer}.{more}"
    return None
