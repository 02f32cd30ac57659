"""Which dead letters a re-drive takes: by reason, time, partition and offset, and these as the user writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from worker.kafka.reading.dead_letters import DeadLetter


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: of these reasons (none: all), times in [since, until), one partition, offsets [first, end).

    Times are the source records' own, ms since 1970.
    """

    reasons: frozenset[str] = frozenset()
    since_ms: int | None = None
    until_ms: int | None = None
    partition: int | None = None
    first: int = 0
    end: int | None = None

    def takes(self, letter: DeadLetter) -> bool:
        """Whether the selection holds the dead letter, by reason and time."""
        moment = letter.record.timestamp if letter.timestamp_ms is None else letter.timestamp_ms
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.since_ms is None or moment >= self.since_ms)
            and (self.until_ms is None or moment < self.until_ms)
        )


def parse_time(text: str, now_ms: int) -> int:
    """Return ms since 1970 of an ISO 8601 time (UTC by default) or an age such as 90m. Raises ValueError."""
    if age := re.fullmatch(r"([0-9]{1,9})([smhd])", text):
        return now_ms - int(age[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[age[2]] * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; give one such as 2026-04-14T08:00Z, or an age such as 90m, 2h, 3d"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_offsets(text: str) -> tuple[int, int | None]:
    """Return (first, end) of A:B (without B), A:, :B or a single offset. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{0,18})(:?)([0-9]{0,18})", text)
    if found is None or not (found[1] or found[3]):
        raise ValueError(f"{text!r} is not an offset range; use A:B (B is exclusive), A:, :B or A")
    first = int(found[1] or 0)
    end = first + 1 if not found[2] else int(found[3]) if found[3] else None
    if end is not None and end <= first:
        raise ValueError(f"{text!r} is empty: the end must be greater than the start")
    return first, end
