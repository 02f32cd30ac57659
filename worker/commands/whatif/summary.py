"""What a candidate would change, as values: rows of traces in, one `WhatIf` out.

Field names are those of the JSON output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from worker.commands.shared.scored import LeftOut, Rows, counts_of
from worker.commands.shared.target_share import config_to_paste
from worker.commands.whatif.rows import RescoredTraces
from worker.core.domains import DomainWithoutProfile, UnusedProfile, unused_profiles, without_profile
from worker.core.records import ACCEPTED, REJECTED

DOMAINS_SHOWN: Final = 20
"""Domains are free text of the agents, so there can be as many as traces: the rest becomes one row."""

QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
BINS: Final = 20
"""Bars of the histogram: 0.05 each."""


class Verdict(Struct, frozen=True):
    """One trace's score, and what it is compared with."""

    profile: str
    score: float
    threshold: float
    decision: str


class RescoredTrace(Struct, frozen=True):
    """One trace before and after; `partition` and `offset` are those of the source."""

    id: str
    domain: str
    partition: int
    offset: int
    before: Verdict
    after: Verdict


class Scores(Struct, frozen=True):
    """The scores of a domain. `profile` and `threshold` are those of its last trace; None for all domains together.

    `quantiles`: of the scores, at QUANTILES; `histogram`: BINS counts from 0 to 1.
    """

    profile: str | None
    threshold: float | None
    accepted: int
    quantiles: tuple[float, ...]
    histogram: tuple[int, ...]


class DomainChange(Struct, frozen=True):
    """A domain before and after, and on how many of its traces the decision changes."""

    domain: str
    traces: int
    to_accepted: int
    to_rejected: int
    before: Scores
    after: Scores


class Documents(Struct, frozen=True):
    """Documents that are left out, and where the first ones are, with the reason."""

    count: int
    first: list[tuple[str, str]]

    @classmethod
    def of(cls, left_out: LeftOut) -> Documents:
        """Return what was left out for one kind of reason."""
        return cls(left_out.count, left_out.shown)


class WhatIf(Struct, frozen=True):
    """Everything that a candidate changes.

    `domains` are the largest ones; where there are more, the last row sums `other_domains` of them. `flips` are the
    first traces in stream-time order whose decision changes. `config` is the candidate as a config file.
    """

    source: str
    repeated: int
    unreadable: Documents
    inconsistent: Documents
    total: DomainChange
    domains: list[DomainChange]
    other_domains: int
    flips: list[RescoredTrace]
    without_profile: list[DomainWithoutProfile]
    unused_profiles: list[UnusedProfile]
    config: str


class BeforeAndAfter:
    """The traces that count, in stream-time order. Raises NoDocuments."""

    def __init__(self, traces: RescoredTraces, last: int | None = None, since_ms: int = 0) -> None:
        self._traces = traces
        self._rows, self.repeated = traces.counted(last, since_ms)
        names = ("domain", "score_before", "score", "accepted_before", "accepted", "setup_before", "setup")
        self._columns: dict[str, npt.NDArray[Any]] = {name: traces.rows.column(name)[self._rows] for name in names}
        self._changed = self._columns["accepted_before"] != self._columns["accepted"]

    def __iter__(self) -> Iterator[RescoredTrace]:
        return map(self._trace, self._rows.tolist())

    def summary(self, source: str, flips: int) -> WhatIf:
        """Return what changes; `flips` is how many traces are named."""
        domains, others = self._domains()
        traces = self._traces
        counts = {traces.domains()[code]: count for code, count in counts_of(self._columns["domain"])}
        return WhatIf(
            source=source,
            repeated=self.repeated,
            unreadable=Documents.of(traces.unreadable),
            inconsistent=Documents.of(traces.inconsistent),
            total=self._change("all", np.arange(len(self._rows)), one_setup=False),
            domains=domains,
            other_domains=others,
            flips=[self._trace(row) for row in self._rows[self._changed][:flips].tolist()],
            without_profile=without_profile(counts, traces.profiles),
            unused_profiles=unused_profiles(traces.profiles, counts),
            config=config_to_paste(traces.profiles, traces.threshold),
        )

    def _domains(self) -> tuple[list[DomainChange], int]:
        """Return the largest domains, the rest as one row at the end, and how many are in that."""
        codes = self._columns["domain"]
        counts = counts_of(codes)
        shown = [
            self._change(self._traces.domains()[code], np.flatnonzero(codes == code), one_setup=True)
            for code, _ in counts[:DOMAINS_SHOWN]
        ]
        rest = [code for code, _ in counts[DOMAINS_SHOWN:]]
        if rest:
            shown.append(self._change(f"{len(rest)} others", np.flatnonzero(np.isin(codes, rest)), one_setup=False))
        return shown, len(rest)

    def _change(self, domain: str, at: Rows, *, one_setup: bool) -> DomainChange:
        accepted = self._columns["accepted"][at].astype(bool)
        changed = self._changed[at]
        return DomainChange(
            domain=domain,
            traces=len(at),
            to_accepted=int(np.count_nonzero(changed & accepted)),
            to_rejected=int(np.count_nonzero(changed & ~accepted)),
            before=self._scores("_before", at, one_setup=one_setup),
            after=self._scores("", at, one_setup=one_setup),
        )

    def _scores(self, when: str, at: Rows, *, one_setup: bool) -> Scores:
        scores = self._columns[f"score{when}"][at]
        last = self._traces.setups()[int(self._columns[f"setup{when}"][at[-1]])] if one_setup else None
        bars = np.clip(np.floor(scores * BINS + 1e-9).astype(np.intp), 0, BINS - 1)
        return Scores(
            profile=None if last is None else last.profile,
            threshold=None if last is None else last.threshold,
            accepted=int(np.count_nonzero(self._columns[f"accepted{when}"][at])),
            quantiles=tuple(float(value) for value in np.quantile(scores, QUANTILES)),
            histogram=tuple(int(count) for count in np.bincount(bars, minlength=BINS)),
        )

    def _trace(self, row: int) -> RescoredTrace:
        return RescoredTrace(
            id=self._traces.trace_id(self._cell("id", row)),
            domain=self._traces.domains()[self._cell("domain", row)],
            partition=self._cell("partition", row),
            offset=self._cell("offset", row),
            before=self._verdict("_before", row),
            after=self._verdict("", row),
        )

    def _verdict(self, when: str, row: int) -> Verdict:
        profile, threshold = self._traces.setups()[self._cell(f"setup{when}", row)]
        accepted = self._cell(f"accepted{when}", row)
        return Verdict(profile, self._cell(f"score{when}", row), threshold, ACCEPTED if accepted else REJECTED)

    def _cell(self, name: str, row: int) -> Any:
        return self._traces.rows.column(name)[row].item()
