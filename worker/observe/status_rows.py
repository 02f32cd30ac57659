"""The last committed records as the status page shows them: traces, also by domain, and dead letters.

Lives here: which are kept, how much of their texts, and their explanation. Must not live here: the page
(status_page.py), the arithmetic of a score (core/explanation.py). What is kept is bounded, whatever a producer sends.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from worker.config import Settings
from worker.core.domains import near_miss
from worker.core.explanation import FORMULAS, arithmetic
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import OutputRecord, SourceRecord
from worker.core.scorer import ScoredTrace
from worker.core.scoring import Components, Weights
from worker.core.terminal import clean

KEPT_TRACES: Final = 50
KEPT_DEAD_LETTERS: Final = 20

KEPT_DOMAINS: Final = 50
"""Domains that are known by name; the one that came longest ago goes first."""

KEPT_OF_DOMAIN: Final = 20
"""Traces of one domain that are kept, so that the filter finds those of a rare one, too."""

TEXT_LENGTH: Final = 200
"""Most characters of an objective that are kept."""

DOMAIN_LENGTH: Final = 100
"""Most characters of a domain that are kept: domains are told apart by these."""


# Raw fields: of a key given twice the last value counts, as for the parser, and 1e400 elsewhere is no error.
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text: Final = msgspec.json.Decoder(str)


class TraceRow(NamedTuple):
    """A committed trace; `objective` is None unless texts may be shown. `number` counts the worker's traces.

    Ids are as the record has them, cut to CACHED_ID_LENGTH: they are made safe when the row is shown, because most rows
    never are.
    """

    number: int
    committed_ms: int
    partition: int
    offset: int
    id: str
    decision: str
    score: float
    threshold: float
    domain: str
    profile: str
    components: Components
    weights: Weights
    overrides: tuple[str, ...]
    nearest: str | None
    similarity: float | None
    nearest_partition: int | None
    nearest_offset: int | None
    objective: str | None

    def explained(self) -> dict[str, Any]:
        """Return the row with the steps that lead to its score; components, weights and parts in the score's order."""
        steps = arithmetic(self.components, self.weights, self.overrides)
        return self._asdict() | {
            "id": _shown(self.id, CACHED_ID_LENGTH),
            "nearest": None if self.nearest is None else _shown(self.nearest, CACHED_ID_LENGTH),
            "components": [getattr(self.components, name) for name in FORMULAS],
            "weights": [getattr(self.weights, name) for name in FORMULAS],
            "parts": list(steps.parts.values()),
            "weighted_sum": steps.weighted_sum,
            "overrides": steps.overrides,
            "before_clamp": steps.before_clamp,
        }


class DeadLetterRow(NamedTuple):
    """A committed dead letter; `message` quotes the record, so it is None unless texts may be shown."""

    committed_ms: int
    partition: int
    offset: int
    reason: str
    path: str
    message: str | None


@dataclass(slots=True)
class _Domain:
    """A domain's traces since it is known, its last ones, and the profile that they took."""

    traces: int = 0
    profile: str = ""
    rows: deque[TraceRow] = field(default_factory=lambda: deque(maxlen=KEPT_OF_DOMAIN))


class LastRows:
    """The last records. All methods are called from the event loop's thread."""

    def __init__(self, settings: Settings) -> None:
        self._texts = settings.status_texts
        self._number = 0
        self._traces: deque[TraceRow] = deque(maxlen=KEPT_TRACES)
        self._dead_letters: deque[DeadLetterRow] = deque(maxlen=KEPT_DEAD_LETTERS)
        self._domains: OrderedDict[str, _Domain] = OrderedDict()
        profiles = tuple(settings.scoring_profiles())
        self._domain_name = functools.lru_cache(2 * KEPT_DOMAINS)(lambda domain: _shown(domain, DOMAIN_LENGTH))
        self._near = functools.lru_cache(2 * KEPT_DOMAINS)(lambda domain: near_miss(domain, profiles))

    def committed(self, record: SourceRecord, output: OutputRecord, scored: ScoredTrace | None) -> None:
        """Note one record whose output is committed; `scored` is None for a dead letter."""
        if scored is None:
            self._dead_letters.append(self._dead_letter(record, output))
            return
        row = self._trace(record, output, scored)
        self._traces.append(row)
        domain = self._domains.get(row.domain)
        if domain is None:
            domain = self._domains[row.domain] = _Domain()
            if len(self._domains) > KEPT_DOMAINS:
                self._domains.popitem(last=False)
        else:
            self._domains.move_to_end(row.domain)
        domain.traces += 1
        domain.profile = row.profile
        domain.rows.append(row)

    def clear(self) -> None:
        """Drop all records; the counts of domains stay."""
        self._traces.clear()
        self._dead_letters.clear()
        for domain in self._domains.values():
            domain.rows.clear()

    def traces(self, domain: str | None = None) -> list[dict[str, Any]]:
        """Return the last traces, newest first: of all, or of one domain."""
        rows = self._traces if domain is None else self._domains.get(domain, _Domain()).rows
        return [row.explained() for row in reversed(rows)]

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return the last dead letters, newest first."""
        return [row._asdict() for row in reversed(self._dead_letters)]

    def domains(self) -> list[dict[str, Any]]:
        """Return the domains by name, with their traces, profile, and the profile that one without its own may mean."""
        return [
            {"name": name, "traces": domain.traces, "profile": domain.profile, "near": self._near(name)}
            for name, domain in sorted(self._domains.items())
        ]

    def _trace(self, record: SourceRecord, output: OutputRecord, scored: ScoredTrace) -> TraceRow:
        self._number += 1
        nearest = scored.nearest
        domain, objective = self._texts_of(record, output, scored)
        return TraceRow(
            self._number,
            now_ms(),
            record.partition,
            record.offset,
            scored.trace_id[:CACHED_ID_LENGTH],
            output.kind,
            scored.score,
            scored.threshold,
            domain,
            scored.profile,
            scored.components,
            scored.weights,
            scored.overrides,
            None if nearest is None else nearest.trace_id[:CACHED_ID_LENGTH],
            None if nearest is None else nearest.similarity,
            None if nearest is None else nearest.partition,
            None if nearest is None else nearest.offset,
            objective,
        )

    def _texts_of(self, record: SourceRecord, output: OutputRecord, scored: ScoredTrace) -> tuple[str, str | None]:
        """Return the start of the trace's domain, and of its objective if texts may be shown.

        What a redacted document no longer contains is shown nowhere. A document is only parsed again where it must be:
        every committed trace comes here.
        """
        if output.redactions is None and not self._texts:
            return self._domain_name(scored.domain[:DOMAIN_LENGTH]), None
        domain, objective = _texts(record.value if output.redactions is None else output.value)
        return domain, objective if self._texts else None

    def _dead_letter(self, record: SourceRecord, output: OutputRecord) -> DeadLetterRow:
        said = dict(output.headers)
        reason, path, message = (
            clean(said[f"kp-error-{name}"].decode("utf-8", "replace")) for name in ("reason", "path", "message")
        )
        shown = message[:TEXT_LENGTH] if self._texts else None
        return DeadLetterRow(now_ms(), record.partition, record.offset, reason, path, shown)


def now_ms() -> int:
    """Return the time, ms since 1970."""
    return time.time_ns() // 1_000_000


def _texts(value: bytes | None) -> tuple[str, str]:
    """Return the start of a valid trace's domain and of its objective."""
    document = _fields.decode(value or b"")
    metadata, task = _fields.decode(document["metadata"]), _fields.decode(document["task"])
    domain, objective = _text.decode(metadata["task_domain"]), _text.decode(task["objective"])
    return _shown(domain, DOMAIN_LENGTH), _shown(objective, TEXT_LENGTH)


def _shown(text: str, length: int) -> str:
    """Return the start of a record's text, safe to be shown."""
    return clean(text[:length])[:length]
